"""Collectives between the ranks of a group: all-gather, all-to-all, reduce-scatter, all-reduce, barrier.

What the models need of them: TP sums row-parallel layers (all-reduce) and takes a row's scale over all ranks
(all-reduce of maxima); SP-TP-SP prefill gathers the latent and exchanges heads for tokens (CM 4.3). Each is a
round of four steps (`rounds`); reductions add a fifth:

    5  reduce what was pulled, in canonical order (`reduction`)

all-reduce is a round of reduce-scatter and one of all-gather. A barrier is a round in which nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import AddressError, ProtocolError
from ..hw.die import Die
from .channel import Observer
from .layout import CollectiveLayout
from .reduction import DTYPES, Reduction, segment, tree_reduce
from .rounds import Array, Kind, Rounds


class Collectives(Rounds):
    """One rank's end. All ranks of the group run the same collectives in the same order.

    `dies[rank]` is a rank's die; `layout.plan` must have been called on the plans of all. `event_id` of each
    call: from 1, greater than any earlier one's, the same on all ranks. Arrays given must be contiguous;
    arrays returned are views of the rank's app area, valid until its next collective.

    Raises DeadlineError if a rank does not take part within `timeout_ns` of virtual time, ProtocolError if
    one does something else, AddressError for arrays that the layout does not hold. After an error, `reset`.
    `on_step(op, step)` is called when a step is complete; if it returns an awaitable, the rank pauses on it.
    """

    def __init__(
        self,
        die: Die,
        dies: tuple[int, ...],
        layout: CollectiveLayout,
        *,
        num_cores: int | None = None,
        timeout_ns: int = 1_000_000_000,
        on_step: Observer | None = None,
    ) -> None:
        super().__init__(die, dies, layout, num_cores, timeout_ns, on_step)

    async def barrier(self, event_id: int) -> None:
        """Return when all ranks have called it."""
        await self.run(event_id, self.round("barrier", Kind.BARRIER, event_id, None))

    async def all_gather(self, x: Array, event_id: int) -> Array:
        """x [...], the same shape and type on all ranks -> [R, ...], in rank order."""
        self._check("all-gather", x)
        self._check_size("all-gather", x.nbytes * self.num_ranks)
        copies = [x] * self.num_ranks
        parts = await self.run(
            event_id, self.round("all-gather", Kind.ALL_GATHER, event_id, copies, x.nbytes)
        )
        return self._joined(parts, x.dtype).reshape(self.num_ranks, *x.shape)

    async def all_to_all(self, parts: Sequence[Array], event_id: int) -> list[Array]:
        """parts[p] [n_p, ...] goes to rank p -> what each rank sent here, [m_p, ...], in rank order.

        One type and one shape of a row for all; numbers of rows may differ, and may be 0.
        """
        if len(parts) != self.num_ranks:
            raise AddressError(
                f"all-to-all: {len(parts)} parts for {self.num_ranks} ranks: give one for each"
            )
        for part in parts:
            self._check("all-to-all", part)
            if part.ndim == 0 or (part.dtype, part.shape[1:]) != (parts[0].dtype, parts[0].shape[1:]):
                raise AddressError(
                    f"all-to-all: parts differ: {part.dtype} {part.shape} beside {parts[0].dtype} "
                    f"{parts[0].shape}"
                )
        self._check_size("all-to-all", sum(part.nbytes for part in parts))
        pulled = await self.run(event_id, self.round("all-to-all", Kind.ALL_TO_ALL, event_id, list(parts)))
        row = parts[0].shape[1:]
        row_nbytes = int(np.prod(row, dtype=np.int64)) * parts[0].itemsize
        for peer, received in enumerate(pulled):
            if row_nbytes == 0 or len(received) % row_nbytes:
                raise ProtocolError(
                    f"all-to-all: rank {self.rank}: peer {peer} sent {len(received)} bytes, "
                    f"which are no rows of {row_nbytes}"
                )
        return [part.view(parts[0].dtype).reshape(-1, *row) for part in pulled]

    async def reduce_scatter(self, x: Array, event_id: int, reduction: Reduction = "sum") -> Array:
        """x [n, ...], the same shape and type on all ranks -> this rank's rows of the reduction.

        Rank r gets rows n * r // R to n * (r + 1) // R. float32 or int32.
        """
        self._check_reducible("reduce-scatter", x)
        if x.ndim == 0:
            raise AddressError("reduce-scatter: x must have rows to scatter")
        operation = self._reduce("reduce-scatter", Kind.REDUCE_SCATTER, x, event_id, reduction)
        return await self.run(event_id, operation)

    async def all_reduce(self, x: Array, event_id: int, reduction: Reduction = "sum") -> Array:
        """x, the same shape and type on all ranks -> the reduction, of the same shape. float32 or int32."""
        self._check_reducible("all-reduce", x)
        return await self.run(event_id, self._all_reduce(x, event_id, reduction))

    async def _all_reduce(self, x: Array, event_id: int, reduction: Reduction) -> Array:
        flat = x.reshape(-1)
        mine = await self._reduce("all-reduce", Kind.ALL_REDUCE_SCATTER, flat, event_id, reduction)
        bounds = [segment(x.size, self.num_ranks, rank) for rank in range(self.num_ranks)]
        expected = [(hi - lo) * x.itemsize for lo, hi in bounds]
        parts = await self.round(
            "all-reduce", Kind.ALL_REDUCE_GATHER, event_id, [mine] * self.num_ranks, expected
        )
        return self._joined(parts, x.dtype).reshape(x.shape)

    async def _reduce(self, op: str, kind: Kind, x: Array, event_id: int, reduction: Reduction) -> Array:
        bounds = [segment(len(x), self.num_ranks, rank) for rank in range(self.num_ranks)]
        slices = [x[lo:hi] for lo, hi in bounds]
        mine = slices[self.rank]
        pulled = await self.round(op, kind, event_id, slices, mine.nbytes)
        parts = [part.view(x.dtype).reshape(mine.shape) for part in pulled]
        result = self.die.memory.view(self.region("result"), x.dtype, mine.shape)

        def reduce() -> None:
            result[...] = tree_reduce(parts, reduction)

        # Step 5: reduce.
        await self.die.compute(
            f"{op} 5 reduce",
            reduce,
            flops=mine.size * (self.num_ranks - 1),
            nbytes=mine.nbytes * (self.num_ranks + 1),
            core="aiv",
            cores=self.num_cores,
            is_fused=True,
        )
        await self.steps.passed(op, 5)
        return result

    # ---- checks and views ---------------------------------------------------------------------------

    def _check(self, op: str, x: Array) -> None:
        if not x.flags.c_contiguous or x.dtype.hasobject:
            raise AddressError(f"{op}: arrays must be contiguous, not {x.dtype} {x.shape} by {x.strides}")
        self._check_size(op, x.nbytes)

    def _check_size(self, op: str, nbytes: int) -> None:
        if nbytes > self.layout.max_bytes:
            raise AddressError(f"{op}: {nbytes} bytes exceed the layout's {self.layout.max_bytes}")

    def _check_reducible(self, op: str, x: Array) -> None:
        self._check(op, x)
        if x.dtype.name not in DTYPES:
            raise AddressError(f"{op}: cannot reduce {x.dtype}, only {' and '.join(DTYPES)}")

    def _joined(self, parts: list[npt.NDArray[np.uint8]], dtype: np.dtype[np.generic]) -> Array:
        """Pulled parts lie side by side: all of them as one array."""
        nbytes = sum(len(part) for part in parts)
        return self.die.memory.view(self.region("pulled"), dtype, nbytes // dtype.itemsize)
