"""A watch on a fleet that stops its run once too many requests have missed their bounds for sure."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.service_report import Bounds, StoppedReplay, is_within
from xdeepserve.platform.traces import TracedRequest

LOOKS = 200  # over the arrivals of a trace; after them each comes later by as large a share of the time


class BoundWatch:
    """Counts the requests of a run that miss their bounds, until fewer than the share `least` can keep them.

    A request that waits for a token has missed its bound when the time allowed is over. A fleet with a TE
    that has had no request is not stopped: more TEs would be no better, so its report is wanted.
    """

    def __init__(self, fleet: Fleet, requests: Sequence[TracedRequest], bounds: Bounds, least: float) -> None:
        self._fleet, self._requests, self._bounds, self._least = fleet, requests, bounds, least
        self._missed = set[int]()  # numbers of requests
        self._ended = set[int]()
        self._num_due = 0  # requests, in order of arrival, whose first token is due
        self._used = set[int]()  # TEs that have had requests
        self.stopped: StoppedReplay | None = None
        self._every_ns = max(1.0, requests[-1].at_ns / LOOKS) if requests else 1.0
        if least > 0:
            fleet.look_at(self._every_ns, self._look)

    def _look(self) -> None:
        fleet = self._fleet
        if not fleet.is_open:
            return
        self._count()
        found = StoppedReplay(len(self._requests), fleet.num_arrived, len(self._missed), len(fleet.served))
        if found.within < self._least and self._are_all_used():
            self.stopped = found
            fleet.stop()
            return
        fleet.look_at(fleet.now + max(self._every_ns, fleet.now / LOOKS), self._look)

    def _count(self) -> None:
        """Add the requests that have missed a bound since the last look."""
        fleet, requests, bounds, now = self._fleet, self._requests, self._bounds, self._fleet.now
        for each in fleet.served[len(self._ended) :]:
            self._ended.add(each.number)
            self._used.update((each.te, each.first_te))
            if not is_within(each.outcome(), bounds):
                self._missed.add(each.number)
        for number, first in fleet.decoding.items():
            left = requests[number].output_length - 1
            if left > 0 and (now - first.at_ns) / left > 1e6 * bounds.tpot_ms:
                self._missed.add(number)
        while self._num_due < fleet.num_arrived:
            number = self._num_due
            if now - requests[number].at_ns <= 1e9 * bounds.ttft_s:
                break
            if number in fleet.decoding:
                if fleet.decoding[number].at_ns - requests[number].at_ns > 1e9 * bounds.ttft_s:
                    self._missed.add(number)
            elif number not in self._ended:
                self._missed.add(number)
            self._num_due += 1

    def _are_all_used(self) -> bool:
        fleet = self._fleet
        return all(te in self._used or not fleet.is_empty(te) for te in range(len(fleet.tes)))
