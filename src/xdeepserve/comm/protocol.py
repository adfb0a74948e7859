"""The rules of dispatch and combine (A2E and E2A alternate alike) as tables, without bytes, time or I/O.

Two machines. `PHASE` is a rank's: the two operations alternate. `FIELD` is one peer's field during the wait
of step 5: what a look at its event ID means. A transition that is not in the table is a ProtocolError.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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


def next_phase(phase: Phase, step: Step, name: str | None = None) -> Phase:
    """`name` is what an error calls the step."""
    try:
        return PHASE[phase, step]
    except KeyError:
        raise ProtocolError(f"cannot {name or step.name.lower()} while {phase.name.lower()}") from None


class Arrivals:
    """Which ranks have posted their field for event `expected`; `last` is the operation's event before.

    `names` are what errors call the ranks that are waited for, if not by their numbers.
    """

    def __init__(
        self,
        op: str,
        rank: object,
        num_ranks: int,
        expected: int,
        last: int = 0,
        names: Sequence[object] | None = None,
    ) -> None:
        self.op, self.rank, self.expected, self.last = op, rank, expected, last
        self.names: Sequence[object] = range(num_ranks) if names is None else names
        self.slots: list[int] = [Slot.AWAITED] * num_ranks
        self.num_awaited = num_ranks

    def look(self, peer: int, event_id: int, look: Look) -> None:
        """Take note of a peer's event ID. ProtocolError, naming both event IDs, if it cannot be."""
        expected = self.expected
        if event_id == expected and self.slots[peer] == Slot.AWAITED:
            # The table's last two rows, and all that a healthy group ever does.
            self.slots[peer] = Slot.POSTED
            self.num_awaited -= 1
            return
        if event_id == expected:
            event = Event.EQUAL
        elif event_id > expected:
            event = Event.NEWER
        else:
            event = Event.OLD if event_id <= self.last else Event.BETWEEN
        slot = FIELD.get((Slot(self.slots[peer]), look, event))
        if slot is None:
            raise ProtocolError(
                f"{self.op}: rank {self.rank} expects event {expected}, "
                f"but peer {self.names[peer]} {MISTAKE[event]}: its field says event {event_id}"
            )
        self.num_awaited -= slot - self.slots[peer]
        self.slots[peer] = slot

    def look_at_all(self, event_ids: npt.ArrayLike) -> None:
        """The first look, at the fields of all ranks. Old ones, usually the most, change nothing."""
        event_ids = np.asarray(event_ids, np.uint64)
        is_newer, is_expected = event_ids > self.last, event_ids == self.expected
        if np.array_equal(is_newer, is_expected):
            self.slots = np.where(is_expected, Slot.POSTED, Slot.AWAITED).tolist()
            self.num_awaited = self.slots.count(Slot.AWAITED)
            return
        for peer in np.flatnonzero(is_newer).tolist():
            self.look(peer, int(event_ids[peer]), Look.FIRST)

    @property
    def is_complete(self) -> bool:
        return self.num_awaited == 0

    @property
    def awaited(self) -> list[int]:
        return [peer for peer, slot in enumerate(self.slots) if slot == Slot.AWAITED]


class Turns:
    """A rank's place in the alternation of its two operations, and the event IDs that these have had."""

    def __init__(self, first: str = "dispatch", second: str = "combine") -> None:
        self.names = {Step.DISPATCH: first, Step.COMBINE: second}
        self.phase = Phase.READY
        self.last_event_id = {Step.DISPATCH: 0, Step.COMBINE: 0}

    def begin(self, step: Step, rank: object, event_id: int) -> int:
        """Start an operation; the event ID of the one before of its kind."""
        name, last = self.names[step], self.last_event_id[step]
        if event_id <= last:
            raise ProtocolError(
                f"{name}: rank {rank} was given event {event_id} after {last}: event IDs must increase"
            )
        self.phase = next_phase(self.phase, step, name)
        self.last_event_id[step] = event_id
        return last

    def end(self, is_done: bool) -> None:
        self.phase = next_phase(self.phase, Step.DONE if is_done else Step.FAIL)

    def reset(self, posted: dict[Step, int]) -> None:
        """Forget a failed exchange; `posted` are the newest event IDs that peers have posted."""
        self.phase = next_phase(self.phase, Step.RESET)
        for step, event_id in posted.items():
            self.last_event_id[step] = max(self.last_event_id[step], event_id)
