"""Collectives between the ranks of a group: all-gather, all-to-all, reduce-scatter, all-reduce, barrier.

What the models need of them: TP sums row-parallel layers (all-reduce) and takes a row's scale over all ranks
(all-reduce of maxima); SP-TP-SP prefill gathers the latent and exchanges heads for tokens (CM 4.3). All are
pull-based, in rounds like those of dispatch:

    1  MTE copies what the rank contributes to its staging buffer in the managed area
    2  post to each peer where its part lies and how long it is
    3  wait until all have posted: a barrier
    4  MTE pulls the rank's part from every peer, in rank order, to the app area
    5  reduce it, if that is the task, in canonical order (`reduction`)

all-reduce is a round of reduce-scatter and one of all-gather. A barrier is steps 2 and 3.
"""

from __future__ import annotations

import enum
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import AddressError, DeploymentError, ProtocolError
from ..hw.die import Die
from ..hw.engines import Copy
from ..hw.memory import Address, Region
from .board import Board
from .channel import Observer, Steps
from .layout import COLLECTIVE_FIELD, CollectiveLayout
from .reduction import DTYPES, Reduction, segment, tree_reduce

T = TypeVar("T")
Array = npt.NDArray[Any]


class Kind(enum.IntEnum):
    """What a round is, in its field. Peers whose kinds differ do not run the same program."""

    BARRIER = 1
    ALL_GATHER = 2
    ALL_TO_ALL = 3
    REDUCE_SCATTER = 4
    ALL_REDUCE_SCATTER = 5  # first round of all-reduce
    ALL_REDUCE_GATHER = 6  # second


class Collectives:
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
        total = die.spec.num_cores("aiv")
        if num_cores is not None and not 1 <= num_cores <= total:
            raise DeploymentError(f"{num_cores} AIV cores asked for: a die has 1 to {total}")
        self.die, self.layout = die, layout
        self.num_cores, self.timeout_ns = num_cores or total, timeout_ns
        self._check_group(dies)
        self.board = Board(die, dies, layout.region("fields"), COLLECTIVE_FIELD, layout.num_ranks)
        self._last_event_id = 0
        self._has_failed = False
        self._is_running = False
        self._turn = 0
        self.steps = Steps(die, on_step)

    def _check_group(self, dies: tuple[int, ...]) -> None:
        if len(set(dies)) != len(dies) or self.die.index not in dies or len(dies) > self.layout.num_ranks:
            raise DeploymentError(
                f"die {self.die.index} needs a group of up to {self.layout.num_ranks} different dies with "
                f"itself among them, not {list(dies)}"
            )

    @property
    def dies(self) -> tuple[int, ...]:
        return self.board.dies

    @property
    def rank(self) -> int:
        return self.board.rank

    @property
    def num_ranks(self) -> int:
        return len(self.board.dies)

    # ---- the collectives ----------------------------------------------------------------------------

    async def barrier(self, event_id: int) -> None:
        """Return when all ranks have called it."""
        await self._run(event_id, self._round("barrier", Kind.BARRIER, event_id, None))

    async def all_gather(self, x: Array, event_id: int) -> Array:
        """x [...], the same shape and type on all ranks -> [R, ...], in rank order."""
        self._check("all-gather", x)
        self._check_size("all-gather", x.nbytes * self.num_ranks)
        parts = await self._run(
            event_id, self._round("all-gather", Kind.ALL_GATHER, event_id, [x] * self.num_ranks, x.nbytes)
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
        pulled = await self._run(event_id, self._round("all-to-all", Kind.ALL_TO_ALL, event_id, list(parts)))
        row = parts[0].shape[1:]
        row_nbytes = int(np.prod(row, dtype=np.int64)) * parts[0].itemsize
        for peer, part in enumerate(pulled):
            if row_nbytes == 0 or len(part) % row_nbytes:
                raise ProtocolError(
                    f"all-to-all: rank {self.rank}: peer {peer} sent {len(part)} bytes, which are no rows of "
                    f"{row_nbytes}"
                )
        return [part.view(parts[0].dtype).reshape(-1, *row) for part in pulled]

    async def reduce_scatter(self, x: Array, event_id: int, reduction: Reduction = "sum") -> Array:
        """x [n, ...], the same shape and type on all ranks -> this rank's rows of the reduction.

        Rank r gets rows n * r // R to n * (r + 1) // R. float32 or int32.
        """
        self._check_reducible("reduce-scatter", x)
        if x.ndim == 0:
            raise AddressError("reduce-scatter: x must have rows to scatter")
        return await self._run(
            event_id, self._reduce("reduce-scatter", Kind.REDUCE_SCATTER, x, event_id, reduction)
        )

    async def all_reduce(self, x: Array, event_id: int, reduction: Reduction = "sum") -> Array:
        """x, the same shape and type on all ranks -> the reduction, of the same shape. float32 or int32."""
        self._check_reducible("all-reduce", x)
        return await self._run(event_id, self._all_reduce(x, event_id, reduction))

    def reset(self, dies: tuple[int, ...] | None = None) -> None:
        """Forget a failed collective and go on, among fewer `dies` if given.

        All ranks that go on must do so when none is in a collective.
        """
        if self._is_running:
            raise ProtocolError(f"rank {self.rank} cannot reset while a collective is running")
        if dies is not None:
            self._check_group(dies)
        self.board.clear(self.dies if dies is None else dies)
        self._has_failed, self._turn = False, 0

    # ---- rounds -------------------------------------------------------------------------------------

    async def _all_reduce(self, x: Array, event_id: int, reduction: Reduction) -> Array:
        flat = x.reshape(-1)
        mine = await self._reduce("all-reduce", Kind.ALL_REDUCE_SCATTER, flat, event_id, reduction)
        expected = [
            (hi - lo) * x.itemsize
            for lo, hi in (segment(x.size, self.num_ranks, rank) for rank in range(self.num_ranks))
        ]
        parts = await self._round(
            "all-reduce", Kind.ALL_REDUCE_GATHER, event_id, [mine] * self.num_ranks, expected
        )
        return self._joined(parts, x.dtype).reshape(x.shape)

    async def _reduce(self, op: str, kind: Kind, x: Array, event_id: int, reduction: Reduction) -> Array:
        bounds = [segment(len(x), self.num_ranks, rank) for rank in range(self.num_ranks)]
        slices = [x[lo:hi] for lo, hi in bounds]
        mine = slices[self.rank]
        pulled = await self._round(op, kind, event_id, slices, mine.nbytes)
        parts = [part.view(x.dtype).reshape(mine.shape) for part in pulled]
        result = self.die.memory.view(self._region("result"), x.dtype, mine.shape)

        def reduce() -> None:
            result[...] = tree_reduce(parts, reduction)

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

    async def _round(
        self,
        op: str,
        kind: Kind,
        event_id: int,
        parts: list[Array] | None,
        expected: int | list[int] | None = None,
    ) -> list[npt.NDArray[np.uint8]]:
        """Contribute parts[p] for rank p; what each rank contributed for this one, as bytes.

        Parts may be one and the same array, which is then staged once. `expected` is the number of bytes that
        each peer must have for this rank; None if it may be any.
        """
        die, layout, num_ranks = self.die, self.layout, self.num_ranks
        self.steps.begin()
        if kind is not Kind.ALL_REDUCE_GATHER:
            await die.clock.sleep(die.spec.kernel_ns(0, 0))
        fields = np.zeros(num_ranks, COLLECTIVE_FIELD)
        fields["kind"] = kind

        # Step 1: copy to staging, in one of two buffers: a slow peer may still pull from the other.
        self._turn += 1
        if parts is not None:
            offset = self._region("staging").offset + self._turn % 2 * layout.staging_nbytes
            staged: dict[int, int] = {}
            pieces = []
            for peer, part in enumerate(parts):
                if id(part) not in staged:
                    staged[id(part)] = offset
                    if part.nbytes:
                        pieces.append((Address(die.index, offset), part.tobytes()))
                    offset += part.nbytes
                fields["pointer"][peer], fields["nbytes"][peer] = staged[id(part)], part.nbytes
            if pieces:
                await die.mte.load_view(sum(len(data) for _, data in pieces), self.num_cores, f"{op} 1 load")
                await die.mte.store(pieces, self.num_cores, f"{op} 1 stage")
        await self.steps.passed(op, 1)

        # Step 2: tell every rank.
        self.board.begin(event_id)
        await self.board.post(fields, f"{op} 2 post", self.num_cores)
        await self.steps.passed(op, 2)

        # Step 3: wait until all have told.
        def check(peer: int, field: Any) -> None:
            if field["kind"] != kind:
                theirs = Kind(int(field["kind"])).name if field["kind"] in list(Kind) else field["kind"]
                raise ProtocolError(
                    f"{op}: rank {self.rank} runs {kind.name} in event {event_id}, but peer {peer} {theirs}"
                )
            wanted = expected[peer] if isinstance(expected, list) else expected
            if wanted is not None and field["nbytes"] != wanted:
                raise ProtocolError(
                    f"{op}: rank {self.rank} expects {wanted} bytes of peer {peer}, not {field['nbytes']}"
                )

        fields = await self.board.wait(op, self.timeout_ns, check)
        await self.steps.passed(op, 3)

        # Step 4: pull.
        region = self._region("pulled")
        sizes = fields["nbytes"].tolist()
        if sum(sizes) > region.nbytes:
            raise ProtocolError(
                f"{op}: rank {self.rank} has no room for the {sum(sizes)} bytes that its peers post"
            )
        offset, copies, result = region.offset, [], []
        for source, pointer, nbytes in zip(self.dies, fields["pointer"].tolist(), sizes, strict=True):
            if nbytes:
                copies.append(Copy(Address(source, pointer), Address(die.index, offset), nbytes))
            result.append(np.frombuffer(die.memory.buffer, np.uint8, nbytes, offset))
            offset += nbytes
        if copies:
            await die.mte.copy(copies, self.num_cores, f"{op} 4 pull")
        await self.steps.passed(op, 4)
        return result

    async def _run(self, event_id: int, operation: Coroutine[Any, Any, T]) -> T:
        last = self._last_event_id
        if event_id <= last or self._has_failed or self._is_running:
            operation.close()
            if self._has_failed:
                raise ProtocolError(f"rank {self.rank} must be reset after a failed collective")
            if self._is_running:
                raise ProtocolError(f"rank {self.rank} already runs the collective of event {last}")
            raise ProtocolError(
                f"rank {self.rank} was given event {event_id} after {last}: event IDs must increase"
            )
        self._last_event_id, self._is_running = event_id, True
        try:
            return await operation
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._is_running = False

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

    def _joined(self, parts: list[npt.NDArray[np.uint8]], dtype: np.dtype[Any]) -> Array:
        """Pulled parts lie side by side: all of them as one array."""
        nbytes = sum(len(part) for part in parts)
        return self.die.memory.view(self._region("pulled"), dtype, nbytes // dtype.itemsize)

    def _region(self, part: str) -> Region:
        memory = self.die.memory
        area = memory.managed if part == "staging" else memory.app
        return area.regions[self.layout.region(part)]
