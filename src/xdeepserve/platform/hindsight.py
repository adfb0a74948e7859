"""The cost of a choice of a TE in hindsight: the request is tried on every other TE, all others unchanged.

Nobody can know the cost in advance. So a request is tried in replays of the trace, one for each TE that could
have taken it, up to the time at which it ended. Later arrivals cannot change whether it would have ended
before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_words import Decision, ServedRequest
from xdeepserve.platform.traces import TracedRequest

SERVED_AGAIN = 100_000  # requests: as many choices are tried as that is enough for

MakeFleet = Callable[[Mapping[int, int]], Fleet]  # with TEs that some requests are forced to, by number


class Hindsight(msgspec.Struct, frozen=True):
    """Hindsight of a request: the TE that had it, and the TE that would have served it soonest.

    Times are ns from its arrival to its last token.
    """

    number: int
    te: int
    took_ns: float
    best: int
    best_ns: float

    @property
    def regret(self) -> float:
        """How much longer the request took than on the best TE, as a share of the best time."""
        return self.took_ns / self.best_ns - 1


def hindsights(
    make: MakeFleet,
    requests: Sequence[TracedRequest],
    decisions: Sequence[Decision],
    served: Sequence[ServedRequest],
    count: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Hindsight]:
    """Compute the hindsight of `count` requests, evenly spread over the trace; by default as many as take
    some seconds."""
    ways: dict[int, Decision] = {}
    for each in decisions:
        ways.setdefault(each.number, each)
    forced = {number: each.te for number, each in ways.items()}
    tried = spread(len(ways), len(decisions[0].keys), count)
    found, took = [], {each.number: each for each in served}
    for done, number in enumerate(tried):
        progress(done, len(tried))
        mine = took[number]
        until = [each for each in requests if each.at_ns <= mine.last_ns]
        best, best_ns = forced[number], mine.last_ns - mine.at_ns
        for te in np.flatnonzero(np.isfinite(ways[number].keys[:, 0])).tolist():
            if te == forced[number]:
                continue
            again = make({**forced, number: te}).run(until)
            (other,) = (each for each in again if each.number == number)
            if other.last_ns - other.at_ns < best_ns:
                best, best_ns = te, other.last_ns - other.at_ns
        found.append(Hindsight(number, forced[number], mine.last_ns - mine.at_ns, best, best_ns))
    return found


def spread(num_requests: int, num_tes: int, count: int | None) -> list[int]:
    """Choose requests to try. Each costs a replay of half the trace for each TE, on average."""
    if count is None:
        count = max(1, 2 * SERVED_AGAIN // (num_requests * num_tes))
    count = min(count, num_requests)
    return [num_requests * each // count for each in range(count)]
