"""Collectives of a group: barrier, broadcast, all-gather, all-to-all, reduce-scatter, all-reduce.

What the models need of them: TP sums row-parallel layers (all-reduce) and takes a row's scale over all ranks
(all-reduce of maxima); SP-TP-SP prefill gathers the latent and exchanges heads for tokens (CM 4.3); an output
projection that DP groups share takes heads of all their tokens (all-to-all) and sums (reduce-scatter). Each
is a round of four steps, pull-based like dispatch, and a barrier:

    1  MTE copies what the rank contributes to its staging buffer in the managed area
    2  post to each peer where its part lies and how long it is
    3  wait until all have posted
    4  MTE pulls the rank's part from every peer, in rank order, to the app area

Reductions add a fifth:

    5  reduce what was pulled, in canonical order (`reduction`)

all-reduce is a round of reduce-scatter and one of all-gather. A barrier is a round in which nothing moves, a
broadcast one in which only the root has something to pull.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.board import Board
from xdeepserve.comm.checks import check_array, check_event_id, check_later, integer
from xdeepserve.comm.collectives.layout import COLLECTIVE_FIELD, CollectiveLayout
from xdeepserve.comm.collectives.reduction import DTYPES, REDUCTIONS, TYPES, Reduction, segment, tree_reduce
from xdeepserve.comm.collectives.rules import MOVES, CollectiveMove, CollectiveState, Contents, Kind
from xdeepserve.comm.means import ALL_CORES, Means
from xdeepserve.comm.steps import Observer, Steps
from xdeepserve.errors import AddressError, DeploymentError, ProtocolError
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address, Region
from xdeepserve.machine import Machine

T = TypeVar("T")
Array = npt.NDArray[Any]


class Collectives:
    """Collective operations of a rank. All ranks of the group run the same ones in the same order.

    `dies[rank]` is a rank's die; `layout.plan` must have been called on the plans of all. `event_id` of each
    call: from 1, greater than any earlier one's, the same on all ranks. Arrays given must be contiguous;
    arrays returned are views of the rank's app area, valid until its next collective.

    Raises DeadlineError if a rank does not take part in time, ProtocolError if
    one does something else, AddressError for arrays that the layout does not hold. After an error, `reset`.
    `on_step(op, step)` is called when a step is complete; if it returns an awaitable, the rank pauses on it.
    """

    def __init__(
        self,
        die: Die,
        dies: tuple[int, ...],
        layout: CollectiveLayout,
        means: Means = ALL_CORES,
        on_step: Observer | None = None,
    ) -> None:
        means = means.checked(die)
        self.die, self.layout = die, layout
        self.num_cores, self.timeout_ns = means.cores or die.spec.num_cores("aiv"), means.timeout_ns
        self._check_group(dies)
        self.board = Board(die, dies, layout.region("fields"), layout.board)
        self.steps = Steps(die, on_step, means.lane)
        self._machine = Machine(MOVES, CollectiveState.IDLE, f"rank {self.rank}")
        self._last_event_id = 0
        self._turn = 0

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

    def reset(self, dies: tuple[int, ...] | None = None) -> None:
        """Forget a failed collective and go on, among fewer `dies` if given.

        All ranks that go on must do so when none is in a collective.
        """
        self._machine.after(CollectiveMove.RESET)
        if dies is not None:
            self._check_group(dies)
        self.board.clear(self.dies if dies is None else dies)
        self._machine.move(CollectiveMove.RESET)
        self._machine.who, self._turn = f"rank {self.rank}", 0

    async def run(self, event_id: int, operation: Callable[[], Awaitable[T]]) -> T:
        """Run a collective, made of any number of rounds, under an event ID."""
        self._machine.after(CollectiveMove.START)
        check_event_id("collective", self.rank, event_id)
        check_later(f"rank {self.rank}", event_id, self._last_event_id)
        self._machine.move(CollectiveMove.START)
        self._last_event_id = event_id
        with self._machine.ending(CollectiveMove.DONE, CollectiveMove.FAIL):
            return await operation()

    async def barrier(self, event_id: int) -> None:
        """Wait until all ranks have called it."""
        await self.run(event_id, lambda: self.round("barrier", Contents(event_id, Kind.BARRIER), None))

    async def broadcast(self, x: Array, root: int, event_id: int) -> Array:
        """x [...], the same shape and type on all ranks -> the root's, on all. Others' x is not read."""
        self._check("broadcast", x)
        root = integer("broadcast", "root", root)
        if not 0 <= root < self.num_ranks:
            raise AddressError(f"broadcast: the root is one of ranks 0..{self.num_ranks - 1}, not {root}")
        what = Contents(event_id, Kind.BROADCAST, TYPES.index(x.dtype.name), shape=x.shape, root=root)
        copies = [x] * self.num_ranks if self.rank == root else None
        expected = [x.nbytes if peer == root else 0 for peer in range(self.num_ranks)]
        parts = await self.run(event_id, lambda: self.round("broadcast", what, copies, expected))
        return self._joined(parts, x.dtype).reshape(x.shape)

    async def all_gather(self, x: Array, event_id: int) -> Array:
        """x [...], the same shape and type on all ranks -> [R, ...], in rank order."""
        self._check("all-gather", x)
        self._check_size("all-gather", x.nbytes * self.num_ranks)
        what = Contents(event_id, Kind.ALL_GATHER, TYPES.index(x.dtype.name), shape=x.shape)
        copies = [x] * self.num_ranks
        parts = await self.run(event_id, lambda: self.round("all-gather", what, copies, x.nbytes))
        return self._joined(parts, x.dtype).reshape(self.num_ranks, *x.shape)

    async def all_to_all(self, parts: Sequence[Array], event_id: int) -> list[Array]:
        """parts[p] [n_p, ...] goes to rank p -> what each rank sent here, [m_p, ...], in rank order.

        One type and one shape of a row for all; numbers of rows may differ, and may be 0.
        """
        if not isinstance(parts, Sequence | np.ndarray):
            raise AddressError(f"all-to-all: parts must be a list of arrays, not {type(parts).__name__}")
        if len(parts) != self.num_ranks:
            raise AddressError(
                f"all-to-all: {len(parts)} parts for {self.num_ranks} ranks: give one for each"
            )
        for part in parts:
            self._check("all-to-all", part)
            if part.ndim and 0 in part.shape[1:]:
                raise AddressError(f"all-to-all: rows of {part.dtype} {part.shape[1:]} have no elements")
            if part.ndim == 0 or (part.dtype, part.shape[1:]) != (parts[0].dtype, parts[0].shape[1:]):
                raise AddressError(
                    f"all-to-all: parts differ: {part.dtype} {part.shape} beside {parts[0].dtype} "
                    f"{parts[0].shape}"
                )
        self._check_size("all-to-all", sum(part.nbytes for part in parts))
        row = parts[0].shape[1:]
        what = Contents(event_id, Kind.ALL_TO_ALL, TYPES.index(parts[0].dtype.name), shape=row)
        pulled = await self.run(event_id, lambda: self.round("all-to-all", what, list(parts)))
        return [part.view(parts[0].dtype).reshape(-1, *row) for part in pulled]

    async def reduce_scatter(
        self,
        x: Array,
        event_id: int,
        reduction: Reduction = "sum",
        counts: Sequence[int] | None = None,
    ) -> Array:
        """x [n, ...], the same shape and type on all ranks -> this rank's rows of the reduction.

        Ranks get counts[r] rows each, in rank order; by default rank r rows n * r // R to n * (r + 1) // R.
        float32 or int32.
        """
        self._check_reducible("reduce-scatter", x, reduction)
        if x.ndim == 0:
            raise AddressError("reduce-scatter: x must have rows to scatter")
        bounds = self._segments(len(x)) if counts is None else self._bounds(x, counts)
        what = _reducing(Kind.REDUCE_SCATTER, event_id, x, reduction)
        return await self.run(event_id, lambda: self._reduce("reduce-scatter", what, x, bounds))

    def _segments(self, length: int) -> list[tuple[int, int]]:
        return [segment(length, self.num_ranks, rank) for rank in range(self.num_ranks)]

    def _bounds(self, x: Array, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Return each rank's bounds [lo, hi) in the rows of x, by the number of rows it gets."""
        if len(counts) != self.num_ranks or min(counts) < 0 or sum(counts) != len(x):
            raise AddressError(
                f"reduce-scatter: {len(x)} rows cannot be cut in {list(counts)} for {self.num_ranks} ranks"
            )
        bounds = list(pairwise([0, *accumulate(counts)]))
        lo, hi = bounds[self.rank]
        self._check_size("reduce-scatter", x[lo:hi].nbytes * self.num_ranks)
        return bounds

    async def all_reduce(self, x: Array, event_id: int, reduction: Reduction = "sum") -> Array:
        """x, the same shape and type on all ranks -> the reduction, of the same shape. float32 or int32."""
        self._check_reducible("all-reduce", x, reduction)
        return await self.run(event_id, lambda: self._all_reduce(x, event_id, reduction))

    async def _all_reduce(self, x: Array, event_id: int, reduction: Reduction) -> Array:
        flat, bounds = x.reshape(-1), self._segments(x.size)
        what = _reducing(Kind.ALL_REDUCE_SCATTER, event_id, x, reduction)
        mine = await self._reduce("all-reduce", what, flat, bounds)
        expected = [(hi - lo) * x.itemsize for lo, hi in bounds]
        what = what._replace(kind=Kind.ALL_REDUCE_GATHER)
        parts = await self.round("all-reduce", what, [mine] * self.num_ranks, expected)
        return self._joined(parts, x.dtype).reshape(x.shape)

    async def _reduce(self, op: str, what: Contents, x: Array, bounds: Sequence[tuple[int, int]]) -> Array:
        slices = [x[lo:hi] for lo, hi in bounds]
        mine = slices[self.rank]
        pulled = await self.round(op, what, slices, mine.nbytes)
        parts = [part.view(x.dtype).reshape(mine.shape) for part in pulled]
        result = self.die.memory.view(self.region("result"), x.dtype, mine.shape)

        def reduce() -> None:
            result[...] = tree_reduce(parts, REDUCTIONS[what.reduction])

        # Step 5: reduce.
        await self.die.compute(
            f"{op} 5 reduce",
            reduce,
            flops=mine.size * (self.num_ranks - 1),
            nbytes=mine.nbytes * (self.num_ranks + 1),
            core="aiv",
            cores=self.num_cores,
            is_fused=True,
            args=self.die.trace.place,
        )
        await self.steps.passed(op, 5)
        return result

    # ---- rounds -------------------------------------------------------------------------------------

    async def round(
        self,
        op: str,
        what: Contents,
        parts: list[Array] | None,
        expected: int | list[int] | None = None,
    ) -> list[npt.NDArray[np.uint8]]:
        """Contribute parts[p] for rank p; return the contributions of all ranks for this one, as bytes.

        Parts may be one and the same array, which is then staged once. `expected` is the number of bytes that
        each peer must have for this rank; None if it may be any.
        """
        fields = np.zeros(self.num_ranks, COLLECTIVE_FIELD)
        fields["kind"], fields["type"], fields["reduction"] = what.kind, what.type, what.reduction
        fields["axes"], fields["shape"] = len(what.shape), what.shape_digest
        self.steps.begin()
        if what.kind is not Kind.ALL_REDUCE_GATHER:  # whose kernel is running already
            await self.die.clock.sleep(self.die.spec.kernel_ns(0, 0))

        # Step 1: copy to staging, in one of two buffers: a slow peer may still pull from the other.
        self._turn += 1
        if parts is not None:
            await self._stage(op, parts, fields)
        await self.steps.passed(op, 1)

        # Step 2: tell every rank.
        self.board.begin(what.event_id)
        await self.board.post(fields, f"{op} 2 post", self.num_cores)
        await self.steps.passed(op, 2)

        # Step 3: wait until all have told.
        def check(peer: int, field: Any) -> None:
            what.check(op, self.rank, peer, field, self.num_ranks)
            wanted = expected[peer] if isinstance(expected, list) else expected
            if wanted is not None and field["nbytes"] != wanted:
                raise ProtocolError(
                    f"{op}: rank {self.rank} expects {wanted} bytes of peer {peer}, not {field['nbytes']}"
                )

        fields = await self.board.wait(op, self.timeout_ns, check)
        await self.steps.passed(op, 3)

        # Step 4: pull.
        pulled = await self._pull(op, fields)
        await self.steps.passed(op, 4)
        return pulled

    async def _stage(self, op: str, parts: list[Array], fields: npt.NDArray[Any]) -> None:
        """Write the parts to staging, each array once, and note in `fields` where they lie."""
        node, mte = self.die.index, self.die.mte
        offset = self.region("staging").offset + self.layout.staging_offset(self._turn)
        staged: dict[int, int] = {}
        pieces = []
        for peer, part in enumerate(parts):
            if id(part) not in staged:
                staged[id(part)] = offset
                if part.nbytes:
                    pieces.append((Address(node, offset), part.tobytes()))
                offset += part.nbytes
            fields["pointer"][peer], fields["nbytes"][peer] = staged[id(part)], part.nbytes
        if pieces:
            await mte.load_view(sum(len(data) for _, data in pieces), self.num_cores, f"{op} 1 load")
            await mte.store(pieces, self.num_cores, f"{op} 1 stage")

    async def _pull(self, op: str, fields: npt.NDArray[Any]) -> list[npt.NDArray[np.uint8]]:
        """Copy all parts announced in the fields, side by side, to the app area."""
        die, region, sizes = self.die, self.region("pulled"), fields["nbytes"].tolist()
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
        return result

    def region(self, part: str) -> Region:
        """Return a region of the rank: staging, pulled or result."""
        memory = self.die.memory
        area = memory.managed if part == "staging" else memory.app
        return area.regions[self.layout.region(part)]

    # ---- checks and views ---------------------------------------------------------------------------

    def _check(self, op: str, x: Array) -> None:
        check_array(op, "what it sends", x)
        if not x.flags.c_contiguous:
            raise AddressError(f"{op}: arrays must be contiguous, not {x.dtype} {x.shape} by {x.strides}")
        if x.dtype.name not in TYPES or not x.dtype.isnative:
            raise AddressError(f"{op}: cannot send {x.dtype}, only {', '.join(TYPES)} in native byte order")
        self._check_size(op, x.nbytes)

    def _check_size(self, op: str, nbytes: int) -> None:
        if nbytes > self.layout.max_bytes:
            raise AddressError(f"{op}: {nbytes} bytes exceed the layout's {self.layout.max_bytes}")

    def _check_reducible(self, op: str, x: Array, reduction: Reduction) -> None:
        self._check(op, x)
        if reduction not in REDUCTIONS:
            raise AddressError(f"{op}: no reduction {reduction!r}: there are {' and '.join(REDUCTIONS)}")
        if x.dtype.name not in DTYPES:
            raise AddressError(f"{op}: cannot reduce {x.dtype}, only {' and '.join(DTYPES)}")

    def _joined(self, parts: list[npt.NDArray[np.uint8]], dtype: np.dtype[np.generic]) -> Array:
        """View the pulled parts as a single array; they lie side by side."""
        nbytes = sum(len(part) for part in parts)
        return self.die.memory.view(self.region("pulled"), dtype, nbytes // dtype.itemsize)


def _reducing(kind: Kind, event_id: int, x: Array, reduction: Reduction) -> Contents:
    return Contents(event_id, kind, TYPES.index(x.dtype.name), REDUCTIONS.index(reduction), x.shape)
