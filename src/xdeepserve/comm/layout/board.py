"""A board of fields in two sets: one field a peer, written by that peer; successive rounds turn the sets."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class BoardLayout(NamedTuple):
    """`dtype` is a field (its first member `event_id` u64), `num_slots` how many of them a set has."""

    dtype: np.dtype[Any]
    num_slots: int

    @property
    def nbytes(self) -> int:
        return 2 * self.set_nbytes(self.num_slots)

    def set_nbytes(self, num_ranks: int) -> int:
        """Of the fields of the first ranks."""
        return num_ranks * self.dtype.itemsize

    def field_offset(self, which: int, rank: int) -> int:
        """Offset in the board of a rank's field in set 0 or 1."""
        return self.set_nbytes(which * self.num_slots + rank)

    def rank_at(self, offset: int) -> int:
        """Whose field the byte at an offset from the start of a set belongs to."""
        return offset // self.dtype.itemsize
