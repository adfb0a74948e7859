"""Keep the engine's reports while the page is watched: requests with their times, and events of the pod."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.events import GroupId, Observed
from xdeepserve.page.parts import EventRow, EventsPart, RequestRow, RequestsPart

KEPT_REQUESTS = 24
KEPT_EVENTS = 40


class _Noticed(msgspec.Struct):
    """Progress of a sequence, as far as it was observed."""

    seq_id: int
    arrival_ns: int | None  # None: before anybody watched
    group: GroupId | None = None
    state: str = "waiting"
    first_ns: int | None = None
    last_ns: int = 0
    num_tokens: int = 0
    num_accepted: int = 0

    def row(self, place: Callable[[GroupId], int]) -> RequestRow:
        ttft = tpot = -1
        if self.first_ns is not None and self.arrival_ns is not None:
            ttft = self.first_ns - self.arrival_ns
        if self.first_ns is not None and self.num_tokens > 1:
            tpot = (self.last_ns - self.first_ns) // (self.num_tokens - 1)
        group = -1 if self.group is None else place(self.group)
        return RequestRow(self.seq_id, group, self.state, self.num_tokens, ttft, tpot, self.num_accepted)


class Happenings:
    """Observer of the engine (dp/events.py): takes notes and changes nothing."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._seen: dict[int, _Noticed] = {}
        self._events: deque[EventRow] = deque(maxlen=KEPT_EVENTS)
        self._num_events = 0
        self.num_tokens = 0

    def see(self, event: Observed) -> None:
        """Note an event of the engine."""
        if event.kind:
            self._num_events += 1
            row = self._num_events, self._now_ns(), event.kind, event.said, getattr(event, "die", -1)
            self._events.append(EventRow(*row))
        match event:
            case events.StepEnded():
                for share in event.shares:
                    self._see_tokens(event.group, share)
            case events.Preempted():
                self._at(event, "preempted")
            case events.Assigned():
                self._sequence(event.seq_id, self._now_ns())
            case events.Given() | events.Booked():
                self._at(event, "waiting")
            case events.Registered() | events.TransferBegan():
                self._at(event, "moving KV")
            case events.Ended():
                if event.seq_id in self._seen:
                    self._seen[event.seq_id].state = "ended"

    def forget_open(self) -> None:
        """Forget the requests still open, since no watcher will see them end."""
        self._seen = {seq_id: seen for seq_id, seen in self._seen.items() if seen.state == "ended"}

    def _at(self, event: events.AtGroup, state: str) -> None:
        seen = self._sequence(event.seq_id)
        seen.group, seen.state = event.group, state

    def _sequence(self, seq_id: int, arrival_ns: int | None = None) -> _Noticed:
        """Find the notes of a sequence, or begin them; only the latest KEPT_REQUESTS sequences are kept."""
        seen = self._seen.get(seq_id)
        if seen is None:
            seen = self._seen[seq_id] = _Noticed(seq_id, arrival_ns)
            if len(self._seen) > KEPT_REQUESTS:
                ended = (old for old, each in self._seen.items() if each.state == "ended")
                del self._seen[next(ended, next(iter(self._seen)))]
        return seen

    def _see_tokens(self, group: GroupId, share: events.ShareOfStep) -> None:
        seen = self._sequence(share.seq_id)
        seen.group, seen.state = group, "prefill" if share.is_prefill else "decode"
        seen.num_accepted += share.num_accepted
        if share.token_ids:
            seen.last_ns = self._now_ns()
            seen.first_ns = seen.last_ns if seen.first_ns is None else seen.first_ns
            seen.num_tokens += len(share.token_ids)
            self.num_tokens += len(share.token_ids)

    def requests_part(self, place: Callable[[GroupId], int]) -> RequestsPart:
        """Make the part for requests; `place` counts DP groups as GroupsPart does."""
        return RequestsPart([seen.row(place) for seen in self._seen.values()])

    def events_part(self) -> EventsPart:
        return EventsPart([*self._events])
