"""Collectives of dies that share projections, with real bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from xdeepserve.comm.collectives.handle import Collectives
from xdeepserve.comm.collectives.reduction import Reduction
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.walk.ends import GroupEnd, first_event
from xdeepserve.model.canonical import Array


class Groups:
    """Collectives of a TE's groups in one of their microbatches; `make` makes those of a rank.

    All ranks of a group count events alike, since they run the same Program.
    """

    def __init__(self, make: Callable[[DieRank], Collectives]) -> None:
        self._make = make
        self._collectives: dict[DieRank, Collectives] = {}
        self._num_events = Counter[DieRank]()

    def end(self, rank: DieRank) -> GroupEnd:
        """Make a rank's end of its group."""
        self._collectives[rank] = self._make(rank)
        return GroupEnd(
            partial(self.all_reduce, rank),
            partial(self.all_gather, rank),
            partial(self.to_slices, rank),
            partial(self.spread, rank),
            partial(self.reduce_scatter, rank),
            partial(self.reset, rank),
        )

    def reset(self, rank: DieRank, epoch: int) -> None:
        """Forget a rank's unfinished collective, and restart event IDs.

        Ranks may have been at different collectives.
        """
        self._collectives[rank].reset()
        self._num_events[rank] = first_event(epoch)

    def _event(self, rank: DieRank) -> int:
        self._num_events[rank] += 1
        return self._num_events[rank]

    async def all_reduce(self, rank: DieRank, x: Array, reduction: Reduction) -> Array:
        """Return the reduction of all dies' `x`."""
        return await self._collectives[rank].all_reduce(x, self._event(rank), reduction)

    async def all_gather(self, rank: DieRank, part: Array, num_rows: int) -> Array:
        """Gather a whole slice [slice, N] of each die into [num_rows, N]."""
        parts = await self._collectives[rank].all_gather(part, self._event(rank))
        return parts.reshape(-1, *part.shape[1:])[:num_rows]

    async def to_slices(self, rank: DieRank, parts: Sequence[Array]) -> list[Array]:
        """Exchange rows: send each die its part, and return the parts that each die sends to this die."""
        return await self._collectives[rank].all_to_all(list(parts), self._event(rank))

    async def spread(self, rank: DieRank, parts: Sequence[Array]) -> list[Array]:
        """Exchange columns: send each die its columns, and return this die's columns of each die's rows."""
        return await self._collectives[rank].all_to_all(list(parts), self._event(rank))

    async def reduce_scatter(self, rank: DieRank, x: Array, counts: Sequence[int]) -> Array:
        """Sum all dies' `x` and return this die's counts[rank] rows of the sum."""
        return await self._collectives[rank].reduce_scatter(x, self._event(rank), counts=counts)
