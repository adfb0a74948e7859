"""A DP group of several dies: what tensor parallelism (tensor_parallel.py) and its hybrid with sequence
parallelism (sequence_parallel.py) have in common.

All ranks of the group get the same plan and keep the same latents in their caches, since every head reads all
of them. The host reads the results of rank 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xdeepserve.comm.collectives.handle import Collectives
from xdeepserve.comm.collectives.reduction import Reduction
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.engine.programs.layers import Layers
from xdeepserve.engine.programs.messages import StepPlan
from xdeepserve.engine.programs.ops import Work
from xdeepserve.model.canonical import Array


class TPGroup:
    """A die's end of its TP group. Tokens are cut in equal slices, in rank order; the last may be short."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives, self._num_events = collectives, 0
        self.rank, self.size = collectives.rank, collectives.num_ranks

    def slice_size(self, num_rows: int) -> int:
        """Rows of a whole slice of `num_rows`."""
        return -(-num_rows // self.size)

    def rows(self, num_rows: int, rank: int | None = None) -> slice:
        """The slice of a rank (by default this one) of `num_rows`; it may be empty."""
        size = self.slice_size(num_rows)
        first = size * (self.rank if rank is None else rank)
        return slice(min(first, num_rows), min(first + size, num_rows))

    def at(self, place: dict[str, int]) -> None:
        """What comes belongs there: for traces."""
        self._collectives.steps.place = place

    def _event(self) -> int:
        """All ranks count alike, since they run the same collectives in the same order."""
        self._num_events += 1
        return self._num_events

    async def all_reduce(self, x: Array, reduction: Reduction = "sum") -> Array:
        """The ranks' x, reduced; valid until the next collective."""
        return await self._collectives.all_reduce(x, self._event(), reduction)

    async def all_gather(self, part: Array, num_rows: int) -> Array:
        """A whole slice [slice_size, N] of each rank -> [num_rows, N]; valid until the next collective.

        Rows beyond a short slice may be anything.
        """
        parts = await self._collectives.all_gather(part, self._event())
        return parts.reshape(-1, *part.shape[1:])[:num_rows]

    async def to_slices(self, x: Array) -> list[Array]:
        """x [T, N_r] of all rows -> each rank's [n, N_r] of this rank's slice; valid until the next."""
        parts = [x[self.rows(len(x), rank)] for rank in range(self.size)]
        return await self._collectives.all_to_all(parts, self._event())


class GroupLayers(Layers):
    """Layers of one rank of a group. The other arguments are those of `Layers`."""

    def __init__(self, *args: Any, group: TPGroup) -> None:
        super().__init__(*args)
        self.group = group

    def at(self, **place: int) -> None:
        super().at(**place)
        self.group.at(self.place)

    async def gather(self, h: Array) -> None:
        """Complete h [T, H], of which this rank has its own slice."""
        if not len(h):
            self.skip("Slice", "Gather")
            return
        rows = self.group.rows(len(h))
        mine = self.ws.take("slice", self.group.slice_size(len(h)), h.shape[1])

        def pack() -> None:
            mine[: rows.stop - rows.start] = h[rows]

        await self.compute("Slice", pack, Work(0.0, 2.0 * mine.nbytes), "aiv")
        whole = await self.group.all_gather(mine, len(h))
        await self.compute("Gather", lambda: np.copyto(h, whole), Work(0.0, 2.0 * h.nbytes), "aiv")


class GroupExecutor(Executor):
    """One rank of a DP group. `layers` are set by who builds it."""

    layers: GroupLayers

    async def _sample(self, plan: StepPlan, hidden: Array) -> None:
        """What goes on from the sampled tokens, MTP or a step that was planned ahead, does so on all ranks,
        which draw the same; else rank 0 is enough."""
        goes_on = self.drafter is not None or self.mem.sizes.plans_ahead
        if self.layers.group.rank == 0 or goes_on:
            await super()._sample(plan, hidden)
