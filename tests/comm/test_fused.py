"""FusedDispatch and FusedCombine against plain NumPy, over random groups; and peers that fail."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.tools import expert, quantize, same_bits
from xdeepserve.comm import oracles
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.fused.combine import Contributions
from xdeepserve.comm.fused.dispatch import FusedReceived
from xdeepserve.comm.fused.handle import FusedXCCL
from xdeepserve.comm.fused.layout import SLOT_DTYPE, FusedLayout
from xdeepserve.comm.means import Means
from xdeepserve.comm.turns import Phase
from xdeepserve.errors import AddressError, DeadlineError, DeploymentError, ProtocolError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.memory import Memory, MemoryPlan
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.topology import Topology
from xdeepserve.hw.trace import Trace


class Case(NamedTuple):
    group: Group
    layout: FusedLayout
    tokens: list[list[np.ndarray]]  # [layer][rank] float32 [T, H]
    topk: list[list[np.ndarray]]  # [layer][rank] int32 [T, K]
    weights: list[list[np.ndarray]]  # [layer][rank] float32 [T, K]
    shared: list[list[np.ndarray | None]]  # [layer][rank] float32 [T, H]


def make_case(
    seed: int,
    num_ranks: int = 3,
    num_experts: int = 6,
    top_k: int = 2,
    batch: int = 4,
    quantized: bool = True,
    num_layers: int = 1,
    one_target: bool = False,
    hidden: int | None = None,
) -> Case:
    """`one_target`: all tokens go to the rank with the most experts, if they can."""
    rng = np.random.default_rng(seed)
    hidden = hidden or int(rng.integers(1, 40))
    dies = tuple(int(d) for d in rng.permutation(32)[:num_ranks])
    group = Group(dies, tuple(int(r) for r in rng.integers(0, num_ranks, num_experts)))
    layout = FusedLayout.for_group(group, local_batch=batch, top_k=top_k, hidden=hidden, quantize=quantized)
    pool = np.arange(num_experts)
    if one_target:
        ranks = np.array(group.expert_rank)
        pool = np.flatnonzero(ranks == np.bincount(ranks).argmax())
        pool = pool if len(pool) >= top_k else np.arange(num_experts)
    sizes = rng.integers(0, batch + 1, (num_layers, num_ranks))

    def per_rank(make: Callable[[int], Any]) -> list[list[Any]]:
        return [[make(int(n)) for n in row] for row in sizes]

    return Case(
        group,
        layout,
        per_rank(lambda n: rng.standard_normal((n, hidden)).astype(np.float32)),
        per_rank(
            lambda n: np.array([rng.permutation(pool)[:top_k] for _ in range(n)], np.int32).reshape(n, top_k)
        ),
        per_rank(lambda n: rng.random((n, top_k)).astype(np.float32)),
        per_rank(
            lambda n: rng.standard_normal((n, hidden)).astype(np.float32) if rng.random() < 0.5 else None
        ),
    )


def make_handles(case: Case, seed: int | None = None, **options: Any) -> tuple[Pod, list[FusedXCCL]]:
    pod = Pod(Topology(servers=4, chips_per_server=4), clock=Clock(seed), trace=Trace())
    for die in case.group.dies:
        case.layout.plan(pod.plan(die))
    pod.materialise()
    handles = [
        FusedXCCL(pod.dies[die], rank, case.group, case.layout, quantize, Means(**options))
        for rank, die in enumerate(case.group.dies)
    ]
    return pod, handles


def answers_of(received: FusedReceived) -> np.ndarray:
    x = (received.payload * received.scale[:, None]).astype(np.float32)
    rows = [expert(e, row) for e, row in zip(received.expert_idx, x, strict=True)]
    return np.array(rows, np.float32).reshape(x.shape)


class Run(NamedTuple):
    handles: list[FusedXCCL]
    received: dict[tuple[int, int], dict[str, np.ndarray]]  # by (layer, rank)
    results: dict[tuple[int, int], np.ndarray]
    digest: str


def run(case: Case, seed: int | None, delays: list[int] | None = None, **options: Any) -> Run:
    received, results = {}, {}

    async def program(xccl: FusedXCCL) -> None:
        rank = xccl.rank
        for layer in range(len(case.tokens)):
            if delays is not None:
                await xccl.die.clock.sleep(delays[rank])
            event = 3 * layer + 2
            got = await xccl.dispatch(case.tokens[layer][rank], case.topk[layer][rank], event)
            received[layer, rank] = {name: np.array(value) for name, value in got._asdict().items()}
            result = await xccl.combine(
                answers_of(got), case.weights[layer][rank], event, case.shared[layer][rank]
            )
            results[layer, rank] = result.copy()

    async def main() -> Run:
        pod, handles = make_handles(case, seed, **options)
        await asyncio.gather(*[xccl.die.spawn(program(xccl)) for xccl in handles])
        for die in case.group.dies:
            pod.memory(die).check_integrity()
            assert pod.memory(die).watches == []
        return Run(handles, received, results, pod.trace.digest())

    return asyncio.run(main())


def oracle_received(case: Case, layer: int, rank: int) -> dict[str, np.ndarray]:
    quantizer = quantize if case.layout.quantize else None
    group = case.group.expert_rank
    return oracles.fused_dispatch(case.tokens[layer], case.topk[layer], group, rank, quantizer)


def oracle_result(case: Case, layer: int, rank: int) -> np.ndarray:
    quantizer = quantize if case.layout.quantize else None
    out = oracles.combine(case.tokens[layer][rank], case.topk[layer][rank], expert, quantizer)
    return oracles.fused_combine(out, case.weights[layer][rank], case.shared[layer][rank])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_experts = draw(st.integers(1, 10))
    return make_case(
        seed=draw(st.integers(0, 2**16)),
        num_ranks=draw(st.integers(1, 8)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(4, num_experts))),
        batch=draw(st.integers(1, 6)),
        quantized=draw(st.booleans()),
        num_layers=draw(st.integers(1, 4)),
        one_target=draw(st.booleans()),
    )


@given(cases(), st.none() | st.integers(0, 99), st.integers(1, 48), st.data())
def test_every_bit_is_the_oracles(case: Case, seed: int | None, cores: int, data: st.DataObject) -> None:
    num_ranks = case.group.num_ranks
    # Slow and fast ranks: delays of up to several operations' length, so that some run ahead.
    delays = data.draw(st.lists(st.integers(0, 200_000), min_size=num_ranks, max_size=num_ranks))
    done = run(case, seed, delays, cores=cores)
    for layer in range(len(case.tokens)):
        for rank in range(num_ranks):
            expected = oracle_received(case, layer, rank)
            found = done.received[layer, rank]
            assert found.keys() == expected.keys()
            for name in expected:
                assert same_bits(found[name], expected[name]), name
            assert same_bits(done.results[layer, rank], oracle_result(case, layer, rank))
    for xccl in done.handles:
        assert xccl.phase is Phase.READY
        flags = xccl.region("token_flags")
        assert not any(xccl.die.memory.read(flags.offset, flags.nbytes)), "token flags are clean afterwards"
    assert run(case, seed, delays, cores=cores).digest == done.digest


def test_a_rank_that_owes_nothing_runs_ahead_and_harms_nobody() -> None:
    """Rank 2 holds no experts' tokens of rank 0, so it is in D(n+1) while rank 0 still waits in D(n)."""
    group = Group((0, 1, 16), (0, 1, 1))
    layout = FusedLayout.for_group(group, local_batch=2, top_k=1, hidden=4, quantize=False)
    ones = [np.full((2, 4), rank + 1, np.float32) for rank in range(3)]
    # Rank 0's expert is used by rank 0 alone; rank 1's by ranks 1 and 2.
    topk = [np.array([[e], [e]], np.int32) for e in (0, 1, 2)]
    weights = [np.ones((2, 1), np.float32)] * 3
    case = Case(group, layout, [ones] * 3, [topk] * 3, [weights] * 3, [[None] * 3] * 3)
    overtaken = []

    async def main() -> None:
        _, handles = make_handles(case)

        def watch(rank: int, op: str, step: int) -> None:
            # Others post in D(n+1) while rank 0 is still at work in C(n) or D(n).
            if rank == 0 and (op, step) == ("fused combine", 3):
                events = [int(f) for f in handles[0].place.board.latest_events]
                field = handles[0].region("flags")
                raw = handles[0].die.memory.read(field.offset, field.nbytes)
                posted = np.frombuffer(raw, layout.flag_dtype)["event_id"]
                overtaken.append(int(posted.max()) > max(events))

        async def program(xccl: FusedXCCL) -> None:
            for layer in range(3):
                got = await xccl.dispatch(ones[xccl.rank], topk[xccl.rank], layer + 1)
                if xccl.rank == 0:
                    await xccl.die.clock.sleep(300_000)
                result = await xccl.combine(answers_of(got), weights[xccl.rank], layer + 1)
                assert same_bits(result, oracle_result(case, layer, xccl.rank))

        for xccl in handles:
            xccl.steps.on_step = lambda op, step, rank=xccl.rank: watch(rank, op, step)
        await asyncio.gather(*[xccl.die.spawn(program(xccl)) for xccl in handles])

    asyncio.run(main())
    assert overtaken == [True, True, False]


def test_sizes_are_the_papers() -> None:
    layout = FusedLayout(num_ranks=320, local_batch=96, top_k=8, hidden=7168, experts_per_rank=1)
    assert layout.dispatch_message == 7680  # 7.5 KB
    assert layout.combine_message == 14 * 1024
    assert layout.slot_offset % 512 == 0
    assert layout.max_tokens == 96
    assert layout.dispatch_buffer == 225 * 2**20
    assert layout.combine_buffer == 420 * 2**20
    # "Up to two experts" a die, taken at its word, doubles both.
    assert FusedLayout(320, 96, 8, 7168, 2).dispatch_buffer == 450 * 2**20


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 8), st.integers(1, 2000), st.integers(1, 5))
def test_places_are_disjoint_and_inside(
    ranks: int, batch: int, top_k: int, hidden: int, experts: int
) -> None:
    if top_k > ranks * experts:
        with pytest.raises(DeploymentError, match=f"top_k {top_k} exceeds the {ranks * experts} experts"):
            FusedLayout(ranks, batch, top_k, hidden, experts)
        return
    layout = FusedLayout(ranks, batch, top_k, hidden, experts)
    answers = [layout.combine_offset(t, k) for t in range(batch) for k in range(top_k)]
    assert answers == list(range(0, batch * top_k * layout.combine_message, layout.combine_message))
    assert answers[-1] + layout.combine_message <= layout.combine_buffer
    places = [layout.dispatch_offset(r, i) for r in range(ranks) for i in range(layout.max_tokens)]
    assert places == list(range(0, layout.dispatch_buffer, layout.dispatch_message))
    assert layout.slot_offset >= hidden
    assert layout.slot_offset + SLOT_DTYPE.itemsize <= layout.dispatch_message
    memory = MemoryPlan(0)
    layout.plan(memory)
    assert memory.managed.nbytes == layout.dispatch_buffer + layout.combine_buffer


# ---- contributions ----------------------------------------------------------------------------------


@given(st.integers(0, 999))
def test_contributions_are_complete_with_the_last_and_name_the_silent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks_of = rng.integers(0, 5, (4, 3))
    table = Contributions(0, ranks_of)
    silent = set(ranks_of.reshape(-1).tolist())
    for peer in rng.permutation(5).tolist():
        assert table.awaited == tuple(sorted(silent))
        for token, key in np.argwhere(ranks_of == peer).tolist():
            assert token in table.open_tokens
            table.look(token, table.flags[token] + (1 << key))
        silent.discard(peer)
        assert table.is_complete == (not silent)
    assert (table.open_tokens, table.awaited) == ([], ())


@given(st.integers(1, 31), st.data())
def test_an_answer_that_comes_twice_is_refused(top_k: int, data: st.DataObject) -> None:
    table = Contributions(7, np.zeros((1, top_k), np.int64))
    flag = data.draw(st.integers(1, 2**top_k - 1))
    key = data.draw(st.sampled_from([k for k in range(top_k) if flag >> k & 1]))
    table.look(0, flag)
    table.look(0, flag)  # a second look is no second answer
    with pytest.raises(ProtocolError, match="rank 7: token 0 was answered for the same key twice"):
        table.look(0, flag + (1 << key))


# ---- peers that fail --------------------------------------------------------------------------------

# Every rank sends to every rank: 3 ranks, one expert each, all of them chosen.
FULL = Case(
    group := Group((0, 1, 16), (0, 1, 2)),
    FusedLayout.for_group(group, local_batch=2, top_k=3, hidden=8),
    [[np.random.default_rng(rank).standard_normal((2, 8)).astype(np.float32) for rank in range(3)]],
    [[np.array([[0, 1, 2], [2, 0, 1]], np.int32)] * 3],
    [[np.full((2, 3), 0.5, np.float32)] * 3],
    [[None] * 3],
)


async def once(xccl: FusedXCCL, event_id: int, rank: int | None = None) -> np.ndarray:
    rank = xccl.rank if rank is None else rank
    got = await xccl.dispatch(FULL.tokens[0][rank], FULL.topk[0][rank], event_id)
    return (await xccl.combine(answers_of(got), FULL.weights[0][rank], event_id)).copy()


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("op", ["dispatch", "combine"])
@pytest.mark.parametrize("seed", [None, 1])
def test_a_rank_that_dies_at_any_step_is_named_and_the_others_go_on(
    op: str, step: int, seed: int | None
) -> None:
    def dies(op_now: str, step_now: int) -> None:
        if (op_now, step_now) == (f"fused {op}", step):
            raise RuntimeError("die 1 lost power")

    # The survivors then run without rank 1, whose expert 1 now lives on what was rank 2: new ranks 0 and 1.
    smaller = Group((0, 16), (0, 1, 1))
    layout = FusedLayout(3, 2, 3, 8, experts_per_rank=2)
    case = FULL._replace(layout=layout)

    async def survivor(xccl: FusedXCCL) -> np.ndarray:
        first = xccl.rank

        async def until_missed() -> None:
            await once(xccl, 1)
            await once(xccl, 2)  # whoever dies at the end of an exchange is missed in the next

        with pytest.raises(DeadlineError) as caught:
            await until_missed()
        error = caught.value
        before_flags = op == "dispatch" and step == 1
        after_answers = op == "combine" and step >= 2
        waits_in = "fused dispatch" if before_flags or after_answers else "fused combine"
        assert (error.op, error.rank, error.peer) == (waits_in, first, (1,))
        if waits_in == "fused dispatch":
            event = 2 if after_answers else 1
            assert (error.field, error.expected, error.seen) == ("event ID", event, {1: 0})
        else:
            # Expert 1 is the second key of token 0 and the last of token 1.
            assert (error.field, error.expected) == ("token flag", "0b111")
            assert error.seen == {0: "0b101", 1: "0b11"}
        with pytest.raises(ProtocolError, match="cannot fused dispatch while failed"):
            await once(xccl, 3)
        await xccl.die.clock.sleep_until(3_000_000)
        xccl.reset(smaller)
        await xccl.die.clock.sleep_until(3_000_001)
        return await once(xccl, 4, first)

    async def main() -> list[Any]:
        _, handles = make_handles(case, seed, timeout_ns=500_000)
        handles[1].steps.on_step = dies
        programs = [survivor(handles[0]), once(handles[1], 1), survivor(handles[2])]
        tasks = [x.die.spawn(p) for x, p in zip(handles, programs, strict=True)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    assert isinstance(results[1], RuntimeError)
    for rank in (0, 2):
        if isinstance(results[rank], BaseException):
            raise results[rank]
        # Same experts, other places: the same bits.
        assert same_bits(results[rank], oracle_result(FULL, 0, rank))


def test_a_stall_is_survived_by_reset() -> None:
    async def program(xccl: FusedXCCL) -> np.ndarray:
        if xccl.rank == 1:
            await xccl.die.clock.sleep(2_000_000)
        else:
            with pytest.raises(DeadlineError):
                await once(xccl, 1)
            await xccl.die.clock.sleep_until(2_000_000)
        xccl.reset()
        await xccl.die.clock.sleep(1)
        return await once(xccl, 10)

    async def main() -> list[np.ndarray]:
        _, handles = make_handles(FULL, timeout_ns=500_000)
        return await asyncio.gather(*[xccl.die.spawn(program(xccl)) for xccl in handles])

    for rank, result in enumerate(asyncio.run(main())):
        assert same_bits(result, oracle_result(FULL, 0, rank))


def test_a_rank_with_another_event_is_named_with_both() -> None:
    async def main() -> list[Any]:
        _, handles = make_handles(FULL)
        tasks = [xccl.die.spawn(once(xccl, 5 if xccl.rank == 1 else 4)) for xccl in handles]
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    for rank in (0, 2):
        assert str(results[rank]) == (
            f"fused dispatch: rank {rank} expects event 4, but peer 1 is ahead: its field says event 5"
        )
    assert "rank 1 expects event 5, but peer 0 is behind" in str(results[1])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda m: m.__setitem__("expert_idx", 0), "posts .* for the experts here, but its messages are for"),
        (
            lambda m: m.__setitem__("expert_idx", 99),
            "posts .* for the experts here, but its messages are for",
        ),
    ],
)
def test_messages_that_belie_the_counts_are_refused(break_it: Any, message: str) -> None:
    async def main() -> list[Any]:
        _, handles = make_handles(FULL)
        layout, victim = FULL.layout, handles[2]

        def corrupt(op: str, step: int) -> None:
            if (op, step) == ("fused dispatch", 2):
                buffer = victim.die.memory.view(
                    victim.region("dispatch"), np.uint8, (3, layout.max_tokens, layout.dispatch_message)
                )
                slot = buffer[0, 0, layout.slot_offset :][: SLOT_DTYPE.itemsize].view(SLOT_DTYPE)
                break_it(slot)

        handles[0].steps.on_step = corrupt
        tasks = [xccl.die.spawn(once(xccl, 1)) for xccl in handles]
        return await asyncio.gather(*tasks, return_exceptions=True)

    error = asyncio.run(main())[2]
    assert isinstance(error, ProtocolError)
    assert "rank 2: peer 0 posts [2]" in str(error)


# ---- callers that err -------------------------------------------------------------------------------


async def one_call(call: Callable[[FusedXCCL], Any]) -> Any:
    group = Group((0,), (0, 0, 0, 0))
    layout = FusedLayout.for_group(group, local_batch=3, top_k=2, hidden=8, quantize=False)
    pod = Pod()
    layout.plan(pod.plan(0))
    pod.materialise()
    xccl = FusedXCCL(pod.dies[0], 0, group, layout)
    return await xccl.die.spawn(call(xccl))


def arguments(num_tokens: int = 2) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((num_tokens, 8), np.float32), np.tile(np.array([0, 1], np.int32), (num_tokens, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, e: (x.astype(np.float64), e), "x must be contiguous float32"),
        (lambda x, e: (x[:, :0], e), "x must be contiguous float32"),
        (lambda x, e: (x.tolist(), e), "fused dispatch: x must be a NumPy array, not list"),
        (lambda x, e: (x, None), "fused dispatch: topk_idx must be a NumPy array, not NoneType"),
        (lambda x, e: (np.repeat(x, 2, 0), np.repeat(e, 2, 0)), "4 tokens exceed the layout's batch of 3"),
        (lambda x, e: (x, e.astype(np.int64)), r"topk_idx must be int32 \[2, 2\], not int64"),
        (lambda x, e: (x, e[:1]), r"topk_idx must be int32 \[2, 2\]"),
        (lambda x, e: (x, e - 1), r"outside the physical experts 0\.\.3"),
        (lambda x, e: (x, e + 3), r"outside the physical experts 0\.\.3"),
        (lambda x, e: (x, e * 0), "a token's experts must be different"),
    ],
)
async def test_arguments_that_the_layout_does_not_hold_are_refused(change: Any, message: str) -> None:
    async def program(xccl: FusedXCCL) -> None:
        before = bytes(xccl.die.memory.buffer)
        with pytest.raises(AddressError, match=message):
            await xccl.dispatch(*change(*arguments()), 1)
        assert bytes(xccl.die.memory.buffer) == before, "refused before a byte moves"
        await xccl.dispatch(*arguments(), 1)  # a refused call has not happened

    await one_call(program)


async def test_wrong_order_and_shapes_are_refused() -> None:
    weights = np.ones((2, 2), np.float32)

    async def program(xccl: FusedXCCL) -> None:
        with pytest.raises(ProtocolError, match="rank 0 cannot fused combine while ready"):
            await xccl.combine(np.zeros((0, 8), np.float32), weights, 1)
        with pytest.raises(ProtocolError, match="given event 0: event IDs are integers"):
            await xccl.dispatch(*arguments(), 0)
        got = await xccl.dispatch(*arguments(), 3)
        with pytest.raises(ProtocolError, match="rank 0 cannot fused dispatch while holding"):
            await xccl.dispatch(*arguments(), 4)
        out = np.ascontiguousarray(got.payload)
        for wrong, message in [
            ((out[:-1], weights, 3), "expert_out must be contiguous float32"),
            ((out, weights[:1], 3), "topk_weights must be contiguous float32"),
            ((out, weights, 3, out), "shared must be contiguous float32"),
        ]:
            with pytest.raises(AddressError, match=message):
                await xccl.combine(*wrong)
        await xccl.combine(np.ascontiguousarray(got.payload), weights, 3)
        with pytest.raises(ProtocolError, match="given event 3 after"):
            await xccl.dispatch(*arguments(), 3)

    await one_call(program)


def test_handles_that_cannot_be_are_refused() -> None:
    pod, _ = make_handles(FULL)
    die = pod.dies[0]
    with pytest.raises(DeploymentError, match="is not rank 1 of the group"):
        FusedXCCL(die, 1, FULL.group, FULL.layout, quantize)
    with pytest.raises(DeploymentError, match="needs a kernel"):
        FusedXCCL(die, 0, FULL.group, FULL.layout)
    with pytest.raises(DeploymentError, match=r"1\.\.48 AIV cores to use, not 49"):
        FusedXCCL(die, 0, FULL.group, FULL.layout, quantize, Means(49))
    with pytest.raises(DeploymentError, match="the layout is for 3 ranks of 1 experts, the group has 1 of"):
        FusedXCCL(die, 0, Group((0,), (0, 0)), FULL.layout, quantize)
    with pytest.raises(DeploymentError, match="local_batch must be at least 1"):
        FusedLayout(1, 0, 1, 1, 1)


@pytest.mark.parametrize("shape", [(8, 128, 64), (5, 3, 24), (320, 1, 64)])
def test_messages_begin_at_multiples_of_512_in_memory(shape: tuple[int, int, int]) -> None:
    ranks, batch, hidden = shape
    layout = FusedLayout(ranks, batch, top_k=2, hidden=hidden, experts_per_rank=2)
    plan = MemoryPlan(0)
    plan.metadata.alloc("before", 32)
    layout.plan(plan)
    Memory(plan)
    for part in ("dispatch", "combine"):
        assert plan.managed.regions[layout.region(part)].offset % 512 == 0


async def test_the_callers_routing_may_be_reused_between_the_two_operators() -> None:
    async def program(xccl: FusedXCCL) -> None:
        x, topk_idx = arguments()
        got = await xccl.dispatch(x, topk_idx, 1)
        topk_idx[:] = 3
        assert xccl.topk_idx.tolist() == [[0, 1], [0, 1]]
        with pytest.raises(AddressError, match="fused combine: expert_out must be a NumPy array, not list"):
            await xccl.combine(got.payload.tolist(), np.ones((2, 2), np.float32), 1)
        result = await xccl.combine(got.payload.copy(), np.ones((2, 2), np.float32), 1)
        assert np.array_equal(result, np.full((2, 8), 2, np.float32))

    await one_call(program)
