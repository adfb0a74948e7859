"""Collectives against plain NumPy, over random groups; canonical order; and peers that fail."""

import asyncio
import itertools
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
from xdeepserve.comm.oracles import collective as oracle
from xdeepserve.errors import AddressError, DeadlineError, DeploymentError, ProtocolError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.topology import Topology
from xdeepserve.hw.trace import Trace
from xdeepserve.machine import Machine
from xdeepserve.model import canonical

OPS = ("barrier", "broadcast", "all_gather", "all_to_all", "reduce_scatter", "all_reduce")
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


def make_inputs(rng: np.random.Generator, op: str, num_ranks: int, dtype: str) -> list[Any]:
    """For each rank an array, or for all-to-all one for each rank."""
    shape = tuple(rng.integers(0, 6, rng.integers(1, 3)).tolist())

    def array(shape: tuple[int, ...]) -> np.ndarray:
        values = rng.standard_normal(shape) * 10.0 ** rng.integers(-8, 9, shape)
        return (values if dtype == "float32" else rng.integers(-(2**31), 2**31, shape)).astype(dtype)

    if op == "all_to_all":
        row = int(rng.integers(1, 5))
        return [[array((int(rng.integers(0, 4)), row)) for _ in range(num_ranks)] for _ in range(num_ranks)]
    return [array(shape) for _ in range(num_ranks)]


async def call(rank: Collectives, op: str, x: Any, event_id: int, reduction: str) -> Any:
    match op:
        case "barrier":
            return await rank.barrier(event_id)
        case "broadcast":
            return await rank.broadcast(x, event_id % rank.num_ranks, event_id)
        case "all_gather" | "all_to_all":
            return await getattr(rank, op)(x, event_id)
        case _:
            return await getattr(rank, op)(x, event_id, reduction)


def copied(result: Any) -> Any:
    if isinstance(result, list):
        return [part.copy() for part in result]
    return None if result is None else result.copy()


@given(
    seed=st.integers(0, 2**16),
    num_ranks=st.integers(1, 9),
    ops=st.lists(st.sampled_from(OPS), min_size=1, max_size=5),
    dtype=st.sampled_from(["float32", "int32"]),
    reduction=st.sampled_from(["sum", "max"]),
    clock_seed=st.none() | st.integers(0, 99),
    cores=st.integers(1, 48),
)
def test_every_bit_is_the_oracles(
    seed: int,
    num_ranks: int,
    ops: list[str],
    dtype: str,
    reduction: str,
    clock_seed: int | None,
    cores: int,
) -> None:
    rng = np.random.default_rng(seed)
    inputs = [make_inputs(rng, op, num_ranks, dtype) for op in ops]
    delays = rng.integers(0, 100_000, (len(ops), num_ranks)).tolist()

    async def program(rank: Collectives) -> list[Any]:
        results = []
        for turn, op in enumerate(ops):
            await rank.die.clock.sleep(delays[turn][rank.rank])
            x = inputs[turn][rank.rank]
            results.append(copied(await call(rank, op, x, 2 * turn + 5, reduction)))
        return results

    results = run(program, num_ranks, clock_seed, cores=cores, max_bytes=16384)
    for rank, found in enumerate(results):
        if isinstance(found, BaseException):
            raise found
        for turn, op in enumerate(ops):
            expected = oracle(op, inputs[turn], rank, reduction, root=(2 * turn + 5) % num_ranks)
            if op == "barrier":
                assert found[turn] is None
            elif op == "all_to_all":
                assert [part.shape for part in found[turn]] == [part.shape for part in expected]
                assert all(same_bits(a, b) for a, b in zip(found[turn], expected, strict=True))
            else:
                assert found[turn].shape == expected.shape
                assert same_bits(found[turn], np.asarray(expected))


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


def test_ranks_that_want_other_parts_are_named() -> None:
    async def program(rank: Collectives) -> Any:
        counts = [2, 1] if rank.rank else [1, 2]
        return await rank.reduce_scatter(np.ones((3, 2), np.float32), 1, counts=counts)

    results = run(program, 2)
    assert str(results[0]) == "reduce-scatter: rank 0 expects 8 bytes of peer 1, not 16"


# ---- peers that fail --------------------------------------------------------------------------------

STEPS = {
    "barrier": [1, 2, 3, 4],
    "broadcast": [1, 2, 3, 4],
    "all_gather": [1, 2, 3, 4],
    "all_to_all": [1, 2, 3, 4],
    "reduce_scatter": [1, 2, 3, 4, 5],
    "all_reduce": [1, 2, 3, 4, 5, 6, 7, 8, 9],  # second round counted on
}
CASES = [(op, step) for op, steps in STEPS.items() for step in steps]


@pytest.mark.parametrize(("op", "nth"), CASES)
def test_a_rank_that_dies_at_any_step_is_named_and_the_others_go_on(op: str, nth: int) -> None:
    rng = np.random.default_rng(3)
    inputs = make_inputs(rng, op, 4, "float32")
    survivors_inputs = make_inputs(rng, op, 3, "float32")

    async def program(rank: Collectives) -> Any:
        me = rank.rank
        if me == 2:
            count = 0

            def dies(_: str, __: int) -> None:
                nonlocal count
                count += 1
                if count == nth:
                    raise RuntimeError("die 2 lost power")

            rank.steps.on_step = dies

        async def until_missed() -> None:
            for event in (1, 2):  # whoever dies at the end is missed in the next
                await call(rank, op, inputs[me], event, "sum")

        if me == 2:
            return await until_missed()
        with pytest.raises(DeadlineError) as caught:
            await until_missed()
        error = caught.value
        # Missed in the round that rank 2 has not posted in; it posts at the end of steps 2 and 7.
        posts = [step for step in (2, 7) if step <= nth]
        event = 1 if not posts or (op == "all_reduce" and len(posts) == 1) else 2
        assert (error.op, error.rank, error.peer) == (op.replace("_", "-"), me, (2,))
        assert (error.field, error.expected) == ("event ID", event)
        with pytest.raises(ProtocolError, match="cannot start a collective while failed"):
            await call(rank, op, inputs[me], 3, "sum")
        await rank.die.clock.sleep_until(5_000_000)
        rank.reset(tuple(die for die in rank.dies if die != rank.dies[2]))
        await rank.die.clock.sleep(1)
        x = survivors_inputs[rank.rank]
        return rank.rank, copied(await call(rank, op, x, 4, "sum"))

    results = run(program, 4, timeout_ns=500_000)
    assert isinstance(results[2], RuntimeError)
    for result in results[:2] + results[3:]:
        if isinstance(result, BaseException):
            raise result
        rank, found = result
        expected = oracle(op, survivors_inputs, rank, "sum", root=4 % 3)
        if op == "all_to_all":
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
        elif op != "barrier":
            assert same_bits(found, np.asarray(expected))


def test_ranks_that_run_different_programs_are_named() -> None:
    async def program(rank: Collectives) -> Any:
        if rank.rank == 1:
            return await rank.barrier(3)
        return await rank.all_gather(np.ones(4, np.float32), 3)

    results = run(program, 3)
    assert str(results[0]) == "all-gather: rank 0 runs ALL_GATHER in event 3, but peer 1 BARRIER"
    assert "barrier: rank 1 runs BARRIER in event 3, but peer 0 ALL_GATHER" in str(results[1])


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


@pytest.mark.parametrize("shape", [(4,), (0, 3), ()])
def test_ranks_that_mean_different_roots_are_named(shape: tuple[int, ...]) -> None:
    async def program(rank: Collectives) -> Any:
        return await rank.broadcast(np.ones(shape, np.float32), 2 if rank.rank == 1 else 0, 3)

    results = run(program, 3)
    assert str(results[0]) == "broadcast: rank 0 takes rank 0 for the root in event 3, but peer 1 rank 2"
    assert str(results[1]) == "broadcast: rank 1 takes rank 2 for the root in event 3, but peer 0 rank 0"
    assert str(results[2]) == "broadcast: rank 2 takes rank 0 for the root in event 3, but peer 1 rank 2"


def test_a_broadcast_of_other_shapes_types_or_sizes_is_named() -> None:
    others: list[Any] = [np.ones((2, 2), np.float32), np.ones(5, np.float32), np.ones(4, np.int32)]
    says = [
        "broadcast: rank 0 sends shape [4] in event 1, but peer 1 another one of 2 axes",
        "broadcast: rank 0 sends shape [4] in event 1, but peer 1 another one of 1 axes",
        "broadcast: rank 0 sends float32 in event 1, but peer 1 int32",
    ]
    for other, problem in zip(others, says, strict=True):

        async def program(rank: Collectives, other: Any = other) -> Any:
            return await rank.broadcast(other if rank.rank else np.ones(4, np.float32), 0, 1)

        assert str(run(program, 2)[0]) == problem


@pytest.mark.parametrize("root", [-1, 2, 0.5, True, "0"])
async def test_a_root_that_is_no_rank_is_refused(root: Any) -> None:
    _, ranks = make(2)
    with pytest.raises(
        AddressError, match=r"broadcast: (the root is one of ranks 0\.\.1|root must be an int)"
    ):
        await ranks[0].broadcast(np.ones(4, np.float32), root, 1)
    with pytest.raises(AddressError, match="broadcast: 4100 bytes exceed the layout's 4096"):
        await ranks[0].broadcast(np.ones(1025, np.float32), 0, 1)


ONES, WHOLE = np.ones(4, np.float32), np.ones(4, np.int32)


@pytest.mark.parametrize(
    ("op", "one", "other", "message"),
    [
        ("all_reduce", (ONES, "sum"), (ONES, "max"), "all-reduce: rank 0 takes the sum in event 1, but peer"),
        (
            "reduce_scatter",
            (ONES, "max"),
            (ONES, "sum"),
            "reduce-scatter: rank 0 takes the max in event 1, b",
        ),
        (
            "all_reduce",
            (ONES, "sum"),
            (WHOLE, "sum"),
            "all-reduce: rank 0 sends float32 in event 1, but peer",
        ),
        (
            "all_gather",
            (WHOLE, ""),
            (ONES, ""),
            "all-gather: rank 0 sends int32 in event 1, but peer 1 float",
        ),
        (
            "all_to_all",
            ([ONES] * 3, ""),
            ([WHOLE] * 3, ""),
            "all-to-all: rank 0 sends float32 in event 1, bu",
        ),
    ],
)
def test_types_and_reductions_that_differ_are_named_before_a_result_is_made(
    op: str, one: Any, other: Any, message: str
) -> None:
    async def program(rank: Collectives) -> Any:
        x, reduction = other if rank.rank == 1 else one
        return await call(rank, op, x, 1, reduction)

    results = run(program, 3)
    assert all(isinstance(result, ProtocolError) for result in results)
    assert str(results[0]).startswith(message)
    assert "but peer 1 " in str(results[2])
    assert "but peer 0 " in str(results[1])


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_can_be_sent(dtype: str) -> None:
    async def program(rank: Collectives) -> Any:
        return (await rank.all_gather(np.full(3, rank.rank, dtype), 1)).copy()

    for result in run(program, 2):
        assert same_bits(result, np.array([[0] * 3, [1] * 3], dtype))


def test_lengths_that_differ_are_named() -> None:
    async def program(rank: Collectives) -> Any:
        return await rank.all_gather(np.ones(4 + (rank.rank == 1), np.float32), 1)

    results = run(program, 3)
    assert str(results[0]) == (
        "all-gather: rank 0 sends shape [4] in event 1, but peer 1 another one of 1 axes"
    )
    assert "rank 1 sends shape [5] in event 1, but peer 0 another one of 1 axes" in str(results[1])


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("other", [(3, 2), (6,), (2, 3, 1)])
def test_shapes_of_as_many_bytes_that_differ_are_named(op: str, other: tuple[int, ...]) -> None:
    async def program(rank: Collectives) -> Any:
        x = np.arange(6, dtype=np.int32).reshape(other if rank.rank == 1 else (2, 3))
        return await call(rank, op, x, 1, "sum")

    results = run(program, 3)
    assert all(isinstance(result, ProtocolError) for result in results)
    says = f"rank 2 sends shape [2, 3] in event 1, but peer 1 another one of {len(other)} axes"
    assert str(results[2]).endswith(says)


def test_more_than_fits_is_refused_before_it_is_pulled() -> None:
    async def program(rank: Collectives) -> Any:
        parts = [np.ones((60 if peer == 0 else 0, 1), np.float32) for peer in range(4)]
        return await rank.all_to_all(parts, 1)

    results = run(program, 4, max_bytes=256)
    assert str(results[0]) == "all-to-all: rank 0 has no room for the 960 bytes that its peers post"
    assert [len(part) for part in results[1]] == [0, 0, 0, 0]


def test_rows_that_differ_are_named() -> None:
    async def program(rank: Collectives) -> Any:
        row = 3 if rank.rank == 1 else 2
        return await rank.all_to_all([np.ones((1, row), np.float32)] * 2, 1)

    results = run(program, 2)
    says = "all-to-all: rank 0 sends shape [2] in event 1, but peer 1 another one of 1 axes"
    assert str(results[0]) == says


def test_everything_not_in_the_table_is_refused_by_name() -> None:
    for state, move in itertools.product(CollectiveState, CollectiveMove):
        rank = Machine(MOVES, state, "rank 3")
        if (state, move) in MOVES:
            assert rank.after(move) is MOVES[state, move]
        else:
            with pytest.raises(ProtocolError, match=f"rank 3 cannot {move.value} while {state.value}"):
                rank.move(move)


# ---- callers that err -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda r: r.all_gather(np.ones((4, 4), np.float32)[:, 0], 1), "all-gather: arrays must be contig"),
        (lambda r: r.all_gather(np.ones(65, np.float32), 1), "all-gather: 260 bytes exceed the layout's 256"),
        (lambda r: r.all_reduce(np.ones(4, np.float64), 1), "cannot reduce float64, only float32 and int32"),
        (lambda r: r.reduce_scatter(np.float32(1).reshape(()), 1), "x must have rows to scatter"),
        (lambda r: r.all_reduce(np.ones(4, np.float32), 1, "prod"), "no reduction 'prod': there are sum and"),
        (lambda r: r.reduce_scatter(np.ones(4, np.int32), 1, "min"), "no reduction 'min': there are sum and"),
        (
            lambda r: r.reduce_scatter(np.ones(4, np.int32), 1, counts=[3]),
            r"4 rows cannot be cut in \[3\] for 1 ranks",
        ),
        (
            lambda r: r.reduce_scatter(np.ones(4, np.int32), 1, counts=[5, -1]),
            r"4 rows cannot be cut in \[5, -1\] for 1",
        ),
        (lambda r: r.all_reduce(np.ones(4, ">f4"), 1), "all-reduce: cannot send >f4, only float32, int32, b"),
        (
            lambda r: r.all_gather(np.array(["a"]), 1),
            "all-gather: cannot send <U1, only float32, int32, bool",
        ),
        (lambda r: r.all_to_all([np.ones((3, 0), np.int8)], 1), r"rows of int8 \(0,\) have no elements"),
        (lambda r: r.all_gather([1, 2], 1), "all-gather: what it sends must be a NumPy array, not list"),
        (lambda r: r.all_reduce(None, 1), "all-reduce: what it sends must be a NumPy array, not NoneType"),
        (lambda r: r.all_to_all(None, 1), "all-to-all: parts must be a list of arrays, not NoneType"),
        (lambda r: r.all_to_all([[1]], 1), "all-to-all: what it sends must be a NumPy array, not list"),
        (lambda r: r.all_to_all([], 1), "all-to-all: 0 parts for 1 ranks"),
        (lambda r: r.all_to_all([np.float32(1).reshape(())], 1), "all-to-all: parts differ"),
        (lambda r: r.all_to_all([np.ones((80, 1), np.float32)], 1), "320 bytes exceed the layout's 256"),
    ],
)
def test_arrays_that_the_layout_does_not_hold_are_refused(use: Any, message: str) -> None:
    async def program(rank: Collectives) -> None:
        before = bytes(rank.die.memory.buffer)
        with pytest.raises(AddressError, match=message):
            await use(rank)
        assert bytes(rank.die.memory.buffer) == before
        await rank.barrier(1)  # a refused call has not happened

    (result,) = run(program, 1, max_bytes=256)
    assert result is None


def test_wrong_order_is_refused() -> None:
    async def program(rank: Collectives) -> None:
        for event_id in (2**64, 0, -1, 1.5, "1", True, None):
            with pytest.raises(ProtocolError, match=r"event IDs are integers from 1 to 2\*\*64 - 1"):
                await rank.barrier(event_id)  # type: ignore[arg-type]
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
