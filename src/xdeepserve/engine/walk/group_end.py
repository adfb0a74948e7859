"""A die's end of a group that shares projections.

The group is a DP group of several dies, or several DP groups of one die each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from xdeepserve.comm.collectives.handle import Collectives
from xdeepserve.comm.collectives.reduction import Reduction
from xdeepserve.model.canonical import Array


class GroupEnd(Protocol):
    """Collectives of a group of dies. A result is valid until the next collective."""

    rank: int
    size: int

    def reset(self, epoch: int) -> None:
        """Forget an unfinished collective, and restart event IDs alike on all ranks."""

    async def all_reduce(self, x: Array, reduction: Reduction) -> Array:
        """Return the reduction of all dies' `x`."""

    async def all_gather(self, part: Array, num_rows: int) -> Array:
        """Gather a whole slice [slice, N] of each die into [num_rows, N]; rows beyond a short slice may be
        anything."""

    async def to_slices(self, parts: Sequence[Array]) -> list[Array]:
        """Exchange rows: send each die its part, and return the parts that each die sends to this die."""

    async def spread(self, parts: Sequence[Array]) -> list[Array]:
        """Exchange columns of rows [T, N]: send each die its columns of this die's rows.

        Returns this die's columns of each die's rows; the number of rows may differ by die.
        """

    async def reduce_scatter(self, x: Array, counts: Sequence[int]) -> Array:
        """Sum all dies' `x` [n, ...] and return this die's counts[rank] rows of the sum."""


def first_event(epoch: int) -> int:
    """Return the first event ID for collectives of an epoch.

    Epochs are farther apart than the collectives that any epoch can have.
    """
    return epoch << 32


class TPGroup:
    """Group of dies exchanging real bytes.

    All ranks count events alike, since they run the same Program.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives, self._num_events = collectives, 0
        self.rank, self.size = collectives.rank, collectives.num_ranks

    def reset(self, epoch: int) -> None:
        """Forget an unfinished collective, and restart event IDs.

        Ranks may have been at different collectives.
        """
        self._collectives.reset()
        self._num_events = first_event(epoch)

    def _event(self) -> int:
        self._num_events += 1
        return self._num_events

    async def all_reduce(self, x: Array, reduction: Reduction) -> Array:
        """Return the reduction of all dies' `x`."""
        return await self._collectives.all_reduce(x, self._event(), reduction)

    async def all_gather(self, part: Array, num_rows: int) -> Array:
        """Gather a whole slice [slice, N] of each die into [num_rows, N]."""
        parts = await self._collectives.all_gather(part, self._event())
        return parts.reshape(-1, *part.shape[1:])[:num_rows]

    async def to_slices(self, parts: Sequence[Array]) -> list[Array]:
        """Exchange rows: send each die its part, and return the parts that each die sends to this die."""
        return await self._collectives.all_to_all(list(parts), self._event())

    async def spread(self, parts: Sequence[Array]) -> list[Array]:
        """Exchange columns: send each die its columns, and return this die's columns of each die's rows."""
        return await self._collectives.all_to_all(list(parts), self._event())

    async def reduce_scatter(self, x: Array, counts: Sequence[int]) -> Array:
        """Sum all dies' `x` and return this die's counts[rank] rows of the sum."""
        return await self._collectives.reduce_scatter(x, self._event(), counts=counts)
