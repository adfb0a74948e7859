"""The rules of dispatch and combine as tables, without bytes, time or I/O.

Two machines. `PHASE` is a rank's: the two operations alternate. `FIELD` is one peer's field during the wait
of step 5: what a look at its event ID means. A transition that is not in the table is a ProtocolError.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from ..errors import ProtocolError


class Phase(enum.IntEnum):
    """What a rank does, or has done last."""

    READY = 0  # no tokens are away: may dispatch
    DISPATCHING = 1
    HOLDING = 2  # holds others' tokens: must combine
    COMBINING = 3
    FAILED = 4  # an operation ended in an error: must be reset together with its peers


class Step(enum.IntEnum):
    DISPATCH = 0
    COMBINE = 1
    DONE = 2
    FAIL = 3
    RESET = 4


PHASE = {
    (Phase.READY, Step.DISPATCH): Phase.DISPATCHING,
    (Phase.DISPATCHING, Step.DONE): Phase.HOLDING,
    (Phase.DISPATCHING, Step.FAIL): Phase.FAILED,
    (Phase.HOLDING, Step.COMBINE): Phase.COMBINING,
    (Phase.COMBINING, Step.DONE): Phase.READY,
    (Phase.COMBINING, Step.FAIL): Phase.FAILED,
    (Phase.READY, Step.RESET): Phase.READY,
    (Phase.HOLDING, Step.RESET): Phase.READY,
    (Phase.FAILED, Step.RESET): Phase.READY,
}


class Slot(enum.IntEnum):
    """A peer's field in this operation."""

    AWAITED = 0
    POSTED = 1


class Look(enum.IntEnum):
    FIRST = 0  # at the start of the wait: the field may be old
    WRITE = 1  # the peer has just written it


class Event(enum.IntEnum):
    """A field's event ID against the last one this rank knows of and the one that it expects."""

    OLD = 0  # up to the last
    BETWEEN = 1
    EQUAL = 2
    NEWER = 3


FIELD = {
    (Slot.AWAITED, Look.FIRST, Event.OLD): Slot.AWAITED,  # what an earlier operation left
    (Slot.AWAITED, Look.FIRST, Event.EQUAL): Slot.POSTED,  # the peer was faster
    (Slot.AWAITED, Look.WRITE, Event.EQUAL): Slot.POSTED,
}
MISTAKE = {
    Event.OLD: "is behind",
    Event.BETWEEN: "is behind",
    Event.EQUAL: "has posted twice",
    Event.NEWER: "is ahead",
}


def next_phase(phase: Phase, step: Step) -> Phase:
    try:
        return PHASE[phase, step]
    except KeyError:
        raise ProtocolError(f"cannot {step.name.lower()} while {phase.name.lower()}") from None


class Arrivals:
    """Which ranks have posted their field for event `expected`; `last` is the operation's event before."""

    def __init__(self, op: str, rank: int, num_ranks: int, expected: int, last: int = 0) -> None:
        self.op, self.rank, self.expected, self.last = op, rank, expected, last
        self.slots = [Slot.AWAITED] * num_ranks
        self.num_awaited = num_ranks

    def look(self, peer: int, event_id: int, look: Look) -> None:
        """Take note of a peer's event ID. ProtocolError, naming both event IDs, if it cannot be."""
        expected = self.expected
        if event_id == expected:
            event = Event.EQUAL
        elif event_id > expected:
            event = Event.NEWER
        else:
            event = Event.OLD if event_id <= self.last else Event.BETWEEN
        slot = FIELD.get((self.slots[peer], look, event))
        if slot is None:
            raise ProtocolError(
                f"{self.op}: rank {self.rank} expects event {expected}, "
                f"but peer {peer} {MISTAKE[event]}: its field says event {event_id}"
            )
        self.num_awaited -= slot - self.slots[peer]
        self.slots[peer] = slot

    def look_at_all(self, event_ids: Sequence[int]) -> None:
        """The first look, at the fields of all ranks."""
        for peer, event_id in enumerate(event_ids):
            if event_id > self.last:  # an old one changes nothing
                self.look(peer, event_id, Look.FIRST)

    @property
    def is_complete(self) -> bool:
        return self.num_awaited == 0

    @property
    def awaited(self) -> list[int]:
        return [peer for peer, slot in enumerate(self.slots) if slot is Slot.AWAITED]
