"""Rules of the wait in step 5: which peers' fields have come. Without bytes, time or I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xdeepserve.errors import ProtocolError
from xdeepserve.hw.traffic import FEW


class Arrivals:
    """Tracks posts of fields for event `expected`, by rank; `last` is the event of the operation before.

    `names` are the names of the awaited ranks in errors; by default their numbers.
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
        """Take note of the event ID that a peer has just written; with `is_first` it may be older.

        Raises ProtocolError, naming both event IDs, if the peer is ahead, behind, or has posted twice.
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
        """Look at the fields of all ranks for the first time. Old fields, usually most of them, change
        nothing."""
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
