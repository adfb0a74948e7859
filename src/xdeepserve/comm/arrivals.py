"""Whose fields have come: the rules of the wait of step 5, without bytes, time or I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xdeepserve.errors import ProtocolError
from xdeepserve.hw.traffic import FEW


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
        self.has_posted = [False] * num_ranks
        self.num_awaited = num_ranks

    def look(self, peer: int, event_id: int, is_first: bool = False) -> None:
        """Take note of a peer's event ID, which it has just written; with `is_first` it may be older.

        ProtocolError, naming both event IDs, if it cannot be.
        """
        expected = self.expected
        if event_id == expected and not self.has_posted[peer]:
            self.has_posted[peer] = True
            self.num_awaited -= 1
        elif not is_first or event_id > self.last:  # else it is what an earlier operation left
            mistake = "has posted twice" if event_id == expected else "is behind"
            raise ProtocolError(
                f"{self.op}: rank {self.rank} expects event {expected}, but peer {self.names[peer]} "
                f"{'is ahead' if event_id > expected else mistake}: its field says event {event_id}"
            )

    def look_at_all(self, event_ids: npt.ArrayLike) -> None:
        """The first look, at the fields of all ranks. Old ones, usually the most, change nothing."""
        event_ids = np.asarray(event_ids, np.uint64)
        if len(event_ids) <= FEW:
            for peer, event_id in enumerate(event_ids.tolist()):
                if event_id > self.last:
                    self.look(peer, event_id, is_first=True)
            return
        is_newer, is_expected = event_ids > self.last, event_ids == self.expected
        if np.array_equal(is_newer, is_expected):
            self.has_posted = is_expected.tolist()
            self.num_awaited = self.has_posted.count(False)
            return
        for peer in np.flatnonzero(is_newer).tolist():
            self.look(peer, int(event_ids[peer]), is_first=True)

    @property
    def is_complete(self) -> bool:
        return self.num_awaited == 0

    @property
    def awaited(self) -> list[int]:
        return [peer for peer, has_posted in enumerate(self.has_posted) if not has_posted]
