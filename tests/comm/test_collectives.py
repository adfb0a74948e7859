"""Collectives: canonical order, ranks that do not agree, and what else `contract` does not say of them."""

import asyncio
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.tools import same_bits
from xdeepserve.comm.collectives.handle import Collectives
from xdeepserve.comm.collectives.layout import COLLECTIVE_FIELD, CollectiveLayout
from xdeepserve.comm.collectives.reduction import TYPES, segment, tree_reduce
from xdeepserve.comm.collectives.rules import MOVES, CollectiveMove, CollectiveState
from xdeepserve.comm.means import Means
from xdeepserve.errors import DeploymentError, ProtocolError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.topology import Topology
from xdeepserve.hw.trace import Trace
from xdeepserve.machine import Machine
from xdeepserve.model import canonical

Program = Callable[[Collectives], Any]


def make(
    num_ranks: int, max_bytes: int = 4096, seed: int | None = None, **options: Any
) -> tuple[Pod, list[Collectives]]:
    dies = tuple(int(d) for d in np.random.default_rng(num_ranks).permutation(32)[:num_ranks])
    layout = CollectiveLayout(num_ranks, max_bytes)
    pod = Pod(Topology(servers=4, chips_per_server=4), clock=Clock(seed), trace=Trace())
    for die in dies:
        layout.plan(pod.plan(die))
    pod.materialise()
    return pod, [Collectives(pod.dies[die], dies, layout, Means(**options)) for die in dies]


def run(program: Program, num_ranks: int, seed: int | None = None, **options: Any) -> list[Any]:
    async def main() -> list[Any]:
        pod, ranks = make(num_ranks, seed=seed, **options)
        tasks = [rank.die.spawn(program(rank)) for rank in ranks]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for die in pod.dies:
            pod.memory(die).check_integrity()
            assert pod.memory(die).watches == []
        return results

    return asyncio.run(main())


def test_a_barrier_ends_for_none_before_the_last_begins() -> None:
    async def program(rank: Collectives) -> tuple[int, int]:
        clock = rank.die.clock
        await clock.sleep(100_000 * rank.rank)
        begin = clock.now
        await rank.barrier(1)
        return begin, clock.now

    times = run(program, 4)
    assert min(end for _, end in times) > max(begin for begin, _ in times)


def test_a_fast_rank_does_not_overwrite_what_a_slow_one_still_pulls() -> None:
    overtaken = []

    async def program(rank: Collectives) -> list[int]:
        clock, results = rank.die.clock, []
        if rank.rank == 1:
            rank.num_cores = 1  # pulls long after the others have gone on
        elif rank.rank == 0:
            rank.steps.on_step = lambda op, step: overtaken.append((clock.now, step))
        for event in (1, 2, 3):
            x = np.full(64 * 1024, 10 * event + rank.rank, np.float32)
            gathered = await rank.all_gather(x, event)
            if rank.rank == 1:
                overtaken.append((clock.now, "slow"))
            assert all((row == row[0]).all() for row in gathered)
            results += gathered[:, 0].astype(int).tolist()
        return results

    for result in run(program, 3, max_bytes=2**20):
        assert result == [10 * event + rank for event in (1, 2, 3) for rank in range(3)]
    # Rank 0 has staged its second contribution before rank 1 has pulled the first.
    staged = [time for time, step in overtaken if step == 1][1]
    assert staged < next(time for time, step in overtaken if step == "slow")


# ---- canonical order --------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_row_parallel_layers_agree_for_every_tp(tp: int) -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((5, 37)).astype(np.float32), rng.standard_normal((37, 6)).astype(np.float32)
    blocks = [canonical.tp_block(37, block) for block in range(8)]
    partial = [canonical.matmul(x[:, lo:hi], w[lo:hi]) for lo, hi in blocks]

    async def program(rank: Collectives) -> np.ndarray:
        mine = partial[rank.rank * 8 // tp : (rank.rank + 1) * 8 // tp]
        return (await rank.all_reduce(tree_reduce(mine), 1)).copy()

    for result in run(program, tp):
        assert same_bits(result, canonical.matmul_blocked(x, w))
    # The test can fail: another order gives other bits.
    assert not same_bits(np.sum(partial, axis=0, dtype=np.float32), canonical.matmul_blocked(x, w))


@given(st.integers(0, 300), st.integers(1, 20))
def test_segments_tile(length: int, num_ranks: int) -> None:
    bounds = [segment(length, num_ranks, rank) for rank in range(num_ranks)]
    assert [i for lo, hi in bounds for i in range(lo, hi)] == list(range(length))
    sizes = [hi - lo for lo, hi in bounds]
    assert max(sizes) - min(sizes) <= 1


@given(
    seed=st.integers(0, 2**16),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    dtype=st.sampled_from(["float32", "int32"]),
)
def test_a_reduction_is_scattered_in_whatever_parts_ranks_want(
    seed: int, counts: list[int], dtype: str
) -> None:
    rng, num_ranks = np.random.default_rng(seed), len(counts)
    inputs = [(1000 * rng.standard_normal((sum(counts), 3))).astype(dtype) for _ in counts]

    async def program(rank: Collectives) -> Any:
        return (await rank.reduce_scatter(inputs[rank.rank], 1, counts=counts)).copy()

    ends = np.cumsum([0, *counts])
    whole = tree_reduce(inputs)
    for rank, result in enumerate(run(program, num_ranks)):
        assert same_bits(result, whole[ends[rank] : ends[rank + 1]])


# ---- ranks that do not agree ------------------------------------------------------------------------

ONES, WHOLE = np.ones(4, np.float32), np.ones(4, np.int32)


def asks(op: str, x: Any, *more: Any) -> Program:
    return lambda rank: (
        getattr(rank, op)(x, *more, 3) if op == "broadcast" else getattr(rank, op)(x, 3, *more)
    )


def shaped(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


DIFFERENT: list[tuple[Program, Program, str]] = [  # of rank 0, of rank 1, and what rank 0 says
    (
        asks("all_gather", ONES),
        lambda rank: rank.barrier(3),
        "runs ALL_GATHER in event 3, but peer 1 BARRIER",
    ),
    *(
        (asks(op, ONES, a), asks(op, ONES, b), f"takes the {a} in event 3, but peer 1 {b}")
        for op in ("all_reduce", "reduce_scatter")
        for a, b in (("sum", "max"), ("max", "sum"))
    ),
    *(
        (asks(op, one), asks(op, other), "sends float32 in event 3, but peer 1 int32")
        for op, one, other in [
            ("all_reduce", ONES, WHOLE),
            ("all_gather", ONES, WHOLE),
            ("all_to_all", [ONES] * 3, [WHOLE] * 3),
        ]
    ),
    (asks("broadcast", ONES, 0), asks("broadcast", WHOLE, 0), "sends float32 in event 3, but peer 1 int32"),
    *(
        (
            asks("broadcast", x, 0),
            asks("broadcast", x, 2),
            "takes rank 0 for the root in event 3, but peer 1 rank 2",
        )
        for x in (ONES, shaped(0, 3), shaped())
    ),
    *(
        (
            asks(op, x, *root),
            asks(op, other, *root),
            f"sends shape {list(x.shape)} in event 3, but peer 1 another one of {other.ndim} axes",
        )
        for op, root, x, other in [
            *(
                (op, (), shaped(2, 3), shaped(*shape))
                for op in ("all_gather", "reduce_scatter", "all_reduce")
                for shape in ((3, 2), (6,), (2, 3, 1))
            ),
            ("all_gather", (), ONES, shaped(5)),
            ("broadcast", (0,), ONES, shaped(2, 2)),
            ("broadcast", (0,), ONES, shaped(5)),
        ]
    ),
    (
        *(asks("all_to_all", [shaped(1, row)] * 3) for row in (2, 3)),
        "sends shape [2] in event 3, but peer 1 another one of 1 axes",
    ),
]


@pytest.mark.parametrize(("program", "other", "message"), DIFFERENT, ids=itertools.count())
def test_ranks_that_do_not_agree_are_named_before_a_result_is_made(
    program: Program, other: Program, message: str
) -> None:
    results = run(lambda rank: other(rank) if rank.rank == 1 else program(rank), 3)
    assert all(isinstance(result, ProtocolError) for result in results), results
    assert re.search(f": rank 0 {re.escape(message)}", str(results[0]))
    assert re.search(f": rank 2 {re.escape(message)}", str(results[2]))
    assert re.search(": rank 1 .* but peer 0 ", str(results[1]))


def test_ranks_that_want_other_parts_are_named() -> None:
    async def program(rank: Collectives) -> Any:
        counts = [2, 1] if rank.rank else [1, 2]
        return await rank.reduce_scatter(np.ones((3, 2), np.float32), 1, counts=counts)

    results = run(program, 2)
    assert str(results[0]) == "reduce-scatter: rank 0 expects 8 bytes of peer 1, not 16"


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    num_ranks=st.integers(1, 9),
    dtype=st.sampled_from(TYPES),
    roots=st.lists(st.integers(0, 8), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_the_roots_bytes_come_to_all_ranks(
    shape: list[int], num_ranks: int, dtype: str, roots: list[int], seed: int
) -> None:
    """Any bytes of any type, from one root after the other; what the others give does not matter."""
    rng = np.random.default_rng(seed)
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    high = 2 if dtype == "bool" else 256
    raw = rng.integers(0, high, (len(roots), num_ranks, nbytes), np.uint8)
    given_arrays = [[row.view(dtype).reshape(shape) for row in rows] for rows in raw]

    async def program(rank: Collectives) -> list[np.ndarray]:
        xs = [given_arrays[turn][rank.rank] for turn in range(len(roots))]
        return [
            (await rank.broadcast(x, root % num_ranks, turn + 1)).copy()
            for turn, (root, x) in enumerate(zip(roots, xs, strict=True))
        ]

    for found in run(program, num_ranks, seed, max_bytes=16384):
        for turn, root in enumerate(roots):
            assert (found[turn].shape, found[turn].dtype) == (tuple(shape), np.dtype(dtype))
            assert found[turn].tobytes() == given_arrays[turn][root % num_ranks].tobytes()


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_can_be_sent(dtype: str) -> None:
    async def program(rank: Collectives) -> Any:
        return (await rank.all_gather(np.full(3, rank.rank, dtype), 1)).copy()

    for result in run(program, 2):
        assert same_bits(result, np.array([[0] * 3, [1] * 3], dtype))


def test_more_than_fits_is_refused_before_it_is_pulled() -> None:
    async def program(rank: Collectives) -> Any:
        parts = [np.ones((60 if peer == 0 else 0, 1), np.float32) for peer in range(4)]
        return await rank.all_to_all(parts, 1)

    results = run(program, 4, max_bytes=256)
    assert str(results[0]) == "all-to-all: rank 0 has no room for the 960 bytes that its peers post"
    assert [len(part) for part in results[1]] == [0, 0, 0, 0]


def test_everything_not_in_the_table_is_refused_by_name() -> None:
    for state, move in itertools.product(CollectiveState, CollectiveMove):
        rank = Machine(MOVES, state, "rank 3")
        if (state, move) in MOVES:
            assert rank.after(move) is MOVES[state, move]
        else:
            with pytest.raises(ProtocolError, match=f"rank 3 cannot {move.value} while {state.value}"):
                rank.move(move)


# ---- callers that err -------------------------------------------------------------------------------


def test_wrong_order_is_refused() -> None:
    async def program(rank: Collectives) -> None:
        await rank.barrier(4)
        with pytest.raises(ProtocolError, match="given event 4 after 4: event IDs must increase"):
            await rank.barrier(4)
        first = rank.die.spawn(rank.barrier(5))
        await rank.die.clock.sleep(1)
        with pytest.raises(ProtocolError, match="rank 0 cannot start a collective while in a collective"):
            await rank.barrier(6)
        with pytest.raises(ProtocolError, match="rank 0 cannot be reset while in a collective"):
            rank.reset()
        await first

    assert run(program, 1) == [None]


def test_handles_that_cannot_be_are_refused() -> None:
    pod, ranks = make(2)
    die, layout = ranks[0].die, ranks[0].layout
    with pytest.raises(DeploymentError, match="needs a group of up to 2 different dies with itself among"):
        Collectives(die, (die.index, 1, 2), layout)
    with pytest.raises(DeploymentError, match="needs a group of up to 2"):
        Collectives(die, (die.index, die.index), layout)
    with pytest.raises(DeploymentError, match=r"1\.\.48 AIV cores to use, not 0"):
        Collectives(die, ranks[0].dies, layout, Means(0))
    with pytest.raises(DeploymentError, match="max_bytes must be at least 1"):
        CollectiveLayout(2, 0)
    assert COLLECTIVE_FIELD.itemsize == 32
    assert pod.clock.now == 0
