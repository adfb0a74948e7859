"""The rules of dispatch and combine (A2E and E2A alternate alike) as tables, without bytes, time or I/O.

Two machines. `PHASE` is a rank's: the two operations alternate. `FIELD` is one peer's field during the wait
of step 5: what a look at its event ID means. A transition that is not in the table is a ProtocolError.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..errors import AddressError, ProtocolError
from ..hw.traffic import FEW

MAX_EVENT_ID = 2**64 - 1


def check_event_id(op: str, rank: object, event_id: object) -> int:
    """The same as Python's integer; ProtocolError unless it is one that a field of 64 bits holds, from 1."""
    if not is_integer(event_id) or not 1 <= event_id <= MAX_EVENT_ID:  # type: ignore[operator]
        raise ProtocolError(
            f"{op}: rank {rank} was given event {event_id!r}: event IDs are integers from 1 to 2**64 - 1"
        )
    return operator.index(event_id)  # type: ignore[arg-type]


def is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def integer(op: str, name: str, value: object) -> int:
    """A number that somebody gave as Python's, whose sums never wrap around as NumPy's do.

    AddressError unless it is whole.
    """
    if not is_integer(value):
        raise AddressError(f"{op}: {name} must be an integer, not {value!r}")
    return operator.index(value)  # type: ignore[arg-type]


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


def next_phase(phase: Phase, step: Step, rank: object, name: str | None = None) -> Phase:
    """ProtocolError, naming the rank and its step by `name`, if the phase does not allow it."""
    try:
        return PHASE[phase, step]
    except KeyError:
        raise ProtocolError(
            f"rank {rank} cannot {name or step.name.lower()} while {phase.name.lower()}"
        ) from None


def no_arguments() -> None:
    """The check of an operation that has no arguments."""


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
        if len(event_ids) <= FEW:
            for peer, event_id in enumerate(event_ids.tolist()):
                if event_id > self.last:
                    self.look(peer, event_id, Look.FIRST)
            return
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

    def __init__(self, rank: object, first: str = "dispatch", second: str = "combine") -> None:
        self.rank = rank
        self.names = {Step.DISPATCH: first, Step.COMBINE: second}
        self.phase = Phase.READY
        self.last_event_id = {Step.DISPATCH: 0, Step.COMBINE: 0}

    def begin(self, step: Step, event_id: int, check: Callable[[], None] = no_arguments) -> int:
        """Start an operation; the event ID of the one before of its kind.

        `check` may raise, about the arguments: nothing has changed then, and nothing is used up.
        """
        name, last = self.names[step], self.last_event_id[step]
        check_event_id(name, self.rank, event_id)
        if event_id <= last:
            raise ProtocolError(
                f"{name}: rank {self.rank} was given event {event_id} after {last}: event IDs must increase"
            )
        phase = next_phase(self.phase, step, self.rank, name)
        check()
        self.phase = phase
        self.last_event_id[step] = event_id
        return last

    def end(self, is_done: bool) -> None:
        self.phase = next_phase(self.phase, Step.DONE if is_done else Step.FAIL, self.rank)

    def reset(self, posted: dict[Step, int]) -> None:
        """Forget a failed exchange; `posted` are the newest event IDs that peers have posted."""
        self.phase = next_phase(self.phase, Step.RESET, self.rank)
        for step, event_id in posted.items():
            self.last_event_id[step] = max(self.last_event_id[step], event_id)
