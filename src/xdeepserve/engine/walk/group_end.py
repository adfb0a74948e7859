"""A die's end of a group that shares projections: the dies of a DP group, or several DP groups of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from xdeepserve.comm.collectives.handle import Collectives
from xdeepserve.comm.collectives.reduction import Reduction
from xdeepserve.model.canonical import Array


class GroupEnd(Protocol):
    """The collectives of a group. What they return is valid until the next one."""

    rank: int
    size: int

    def reset(self, epoch: int) -> None:
        """Forget a collective that was not ended, and count events alike on all ranks again."""

    async def all_reduce(self, x: Array, reduction: Reduction) -> Array:
        """The dies' x, reduced."""

    async def all_gather(self, part: Array, num_rows: int) -> Array:
        """A whole slice [slice, N] of each die -> [num_rows, N]; beyond a short slice may be anything."""

    async def to_slices(self, parts: Sequence[Array]) -> list[Array]:
        """Rows for each die -> those of each die for this one."""

    async def spread(self, parts: Sequence[Array]) -> list[Array]:
        """For each die its columns of this one's rows [T, N] -> this one's columns of each die's rows, whose
        numbers may differ."""

    async def reduce_scatter(self, x: Array, counts: Sequence[int]) -> Array:
        """The dies' x [n, ...], summed: the counts[rank] rows of it that are this die's."""


def first_event(epoch: int) -> int:
    """From which number on the collectives of an epoch are counted: more than there ever are in one."""
    return epoch << 32


class TPGroup:
    """A group whose dies exchange bytes. All count events alike, since they run the same Program."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives, self._num_events = collectives, 0
        self.rank, self.size = collectives.rank, collectives.num_ranks

    def reset(self, epoch: int) -> None:
        """Forget a collective that was not ended; ranks may have come to different ones."""
        self._collectives.reset()
        self._num_events = first_event(epoch)

    def _event(self) -> int:
        self._num_events += 1
        return self._num_events

    async def all_reduce(self, x: Array, reduction: Reduction) -> Array:
        """The dies' x, reduced."""
        return await self._collectives.all_reduce(x, self._event(), reduction)

    async def all_gather(self, part: Array, num_rows: int) -> Array:
        """A whole slice [slice, N] of each die -> [num_rows, N]."""
        parts = await self._collectives.all_gather(part, self._event())
        return parts.reshape(-1, *part.shape[1:])[:num_rows]

    async def to_slices(self, parts: Sequence[Array]) -> list[Array]:
        """Rows for each die -> those of each die for this one."""
        return await self._collectives.all_to_all(list(parts), self._event())

    async def spread(self, parts: Sequence[Array]) -> list[Array]:
        """Columns for each die -> those of each die for this one, of its own number of rows."""
        return await self._collectives.all_to_all(list(parts), self._event())

    async def reduce_scatter(self, x: Array, counts: Sequence[int]) -> Array:
        """The dies' sums of counts[rank] rows."""
        return await self._collectives.reduce_scatter(x, self._event(), counts=counts)
