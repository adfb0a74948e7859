"""Whose fields have come: the rules of the wait of step 5, as a table, without bytes, time or I/O.

`FIELD` is one peer's field during the wait: what a look at its event ID means. A transition that is not in
the table is a ProtocolError.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xdeepserve.hw.traffic import FEW
from xdeepserve.machine import follow


class Slot(enum.IntEnum):
    """A peer's field in this operation."""

    AWAITED = 0
    POSTED = 1


class Look(enum.IntEnum):
    FIRST = 0  # at the start of the wait: the field may be old
    WRITE = 1  # the peer has just written it


class EventOrder(enum.IntEnum):
    """A field's event ID against the last one this rank knows of and the one that it expects."""

    OLD = 0  # up to the last
    BETWEEN = 1
    EQUAL = 2
    NEWER = 3


FIELD = {
    (Slot.AWAITED, (Look.FIRST, EventOrder.OLD)): Slot.AWAITED,  # what an earlier operation left
    (Slot.AWAITED, (Look.FIRST, EventOrder.EQUAL)): Slot.POSTED,  # the peer was faster
    (Slot.AWAITED, (Look.WRITE, EventOrder.EQUAL)): Slot.POSTED,
}
MISTAKE = {
    EventOrder.OLD: "is behind",
    EventOrder.BETWEEN: "is behind",
    EventOrder.EQUAL: "has posted twice",
    EventOrder.NEWER: "is ahead",
}


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
            event = EventOrder.EQUAL
        elif event_id > expected:
            event = EventOrder.NEWER
        else:
            event = EventOrder.OLD if event_id <= self.last else EventOrder.BETWEEN
        slot = follow(
            FIELD,
            Slot(self.slots[peer]),
            (look, event),
            lambda: (
                f"{self.op}: rank {self.rank} expects event {expected}, "
                f"but peer {self.names[peer]} {MISTAKE[event]}: its field says event {event_id}"
            ),
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
