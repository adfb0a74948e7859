"""dispatch and combine against plain NumPy, over random groups; and all that can go wrong with a peer."""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.tools import expert, quantize, same_bits
from xdeepserve.comm import oracles
from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.means import Means
from xdeepserve.comm.turns import Phase, Step
from xdeepserve.errors import AddressError, DeadlineError, DeploymentError, ProtocolError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.topology import Topology
from xdeepserve.hw.trace import Trace


class Case(NamedTuple):
    """One group and what each of its ranks sends in each layer."""

    group: Group
    layout: Layout
    tokens: list[list[np.ndarray]]  # [layer][rank] float32 [T, H]
    topk: list[list[np.ndarray]]  # [layer][rank] int32 [T, K]


def make_case(
    seed: int, num_ranks: int, num_experts: int, top_k: int, max_tokens: int, quantized: bool, num_layers: int
) -> Case:
    rng = np.random.default_rng(seed)
    hidden = int(rng.integers(1, 40))
    dies = tuple(int(d) for d in rng.permutation(32)[:num_ranks])
    group = Group(dies, tuple(int(r) for r in rng.integers(0, num_ranks, num_experts)))
    layout = Layout.for_group(group, max_tokens=max_tokens, top_k=top_k, hidden=hidden, quantize=quantized)
    sizes = rng.integers(0, max_tokens + 1, (num_layers, num_ranks))
    tokens = [[rng.standard_normal((n, hidden)).astype(np.float32) for n in row] for row in sizes]
    topk = [
        [
            np.array([rng.permutation(num_experts)[:top_k] for _ in range(n)], np.int32).reshape(n, top_k)
            for n in row
        ]
        for row in sizes
    ]
    return Case(group, layout, tokens, topk)


class Run(NamedTuple):
    pod: Pod
    handles: list[XCCL]
    received: list[list[dict[str, np.ndarray]]]  # [layer][rank]
    results: list[list[np.ndarray]]
    digest: str


def make_pod(case: Case, seed: int | None, trace: bool = False) -> Pod:
    topology = Topology(servers=4, chips_per_server=4)
    pod = Pod(topology, clock=Clock(seed), trace=Trace(trace))
    for die in case.group.dies:
        case.layout.plan(pod.plan(die))
    pod.materialise()
    return pod


def make_handles(case: Case, pod: Pod, **options: Any) -> list[XCCL]:
    return [
        XCCL(pod.dies[die], rank, case.group, case.layout, quantize, Means(**options))
        for rank, die in enumerate(case.group.dies)
    ]


def run(case: Case, seed: int | None, expert_of: Callable[[int], int] = int, **options: Any) -> Run:
    received: list[list[dict[str, np.ndarray]]] = []
    results: list[list[np.ndarray]] = []
    for row in case.tokens:
        received.append([{} for _ in row])
        results.append([np.empty(0)] * len(row))

    async def program(xccl: XCCL) -> None:
        rank = xccl.rank
        for layer, (tokens, topk) in enumerate(zip(case.tokens, case.topk, strict=True)):
            got = await xccl.dispatch(tokens[rank], topk[rank], event_id=7 * layer + 1)
            received[layer][rank] = {name: np.array(value) for name, value in got._asdict().items()}
            x = got.payload * got.scale[:, None]
            out = [expert(expert_of(e), row) for e, row in zip(got.expert_idx, x, strict=True)]
            out = np.array(out, np.float32)
            results[layer][rank] = await xccl.combine(out.reshape(x.shape), event_id=7 * layer + 1)

    async def main() -> Run:
        pod = make_pod(case, seed, trace=True)
        handles = make_handles(case, pod, **options)
        await asyncio.gather(*[xccl.die.spawn(program(xccl)) for xccl in handles])
        for die in case.group.dies:
            pod.memory(die).check_integrity()
            assert pod.memory(die).watches == []
        return Run(pod, handles, received, results, pod.trace.digest())

    return asyncio.run(main())


def oracle_received(case: Case, layer: int, rank: int) -> dict[str, np.ndarray]:
    quantizer = quantize if case.layout.quantize else None
    return oracles.dispatch(case.tokens[layer], case.topk[layer], case.group.expert_rank, rank, quantizer)


def oracle_result(case: Case, layer: int, rank: int) -> np.ndarray:
    quantizer = quantize if case.layout.quantize else None
    return oracles.combine(case.tokens[layer][rank], case.topk[layer][rank], expert, quantizer)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_experts = draw(st.integers(1, 10))
    return make_case(
        seed=draw(st.integers(0, 2**16)),
        num_ranks=draw(st.integers(1, 8)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(4, num_experts))),
        max_tokens=draw(st.integers(1, 6)),
        quantized=draw(st.booleans()),
        num_layers=draw(st.integers(1, 3)),
    )


@given(cases(), st.none() | st.integers(0, 99))
def test_every_bit_is_the_oracles(case: Case, seed: int | None) -> None:
    done = run(case, seed)
    for layer in range(len(case.tokens)):
        for rank in range(case.group.num_ranks):
            expected = oracle_received(case, layer, rank)
            found = done.received[layer][rank]
            assert found.keys() == expected.keys()
            for name in expected:
                assert same_bits(found[name], expected[name]), name
            assert same_bits(done.results[layer][rank], oracle_result(case, layer, rank))
    last_event = 7 * len(case.tokens) - 6
    for xccl in done.handles:
        assert xccl.phase is Phase.READY
        for op in ("dispatch", "combine"):
            fields = xccl.fields(op)
            assert [field.event_id for field in fields] == [last_event] * case.group.num_ranks
            assert [f.pointer for f in fields] == [peer.block_offset(op, xccl.rank) for peer in done.handles]
    assert run(case, seed).digest == done.digest


def test_a_seed_changes_the_order_but_no_byte() -> None:
    case = make_case(3, num_ranks=4, num_experts=8, top_k=2, max_tokens=4, quantized=True, num_layers=2)
    runs = [run(case, seed) for seed in range(6)]
    for other in runs[1:]:
        for layer in range(2):
            for rank in range(4):
                assert same_bits(other.results[layer][rank], runs[0].results[layer][rank])
    assert len({other.digest for other in runs}) > 1


def test_the_trace_shows_every_step_and_who_was_waited_for(tmp_path: Path) -> None:
    case = make_case(3, num_ranks=3, num_experts=6, top_k=2, max_tokens=4, quantized=True, num_layers=1)
    done = run(case, None)
    trace = done.pod.trace
    for die in case.group.dies:
        steps = [span for span in trace.spans if (span.node, span.lane) == (die, "XCCL")]
        rank = case.group.dies.index(die)
        sends, receives = len(case.tokens[0][rank]) > 0, len(done.received[0][rank]["scale"]) > 0
        # Without rows, a step takes no time; and few rows are stored (step 3) while the kernel still loads.
        busy = {"dispatch": (sends, receives), "combine": (receives, sends)}
        assert [span.name for span in steps if not span.name.endswith(" 3")] == [
            f"{op} {step}"
            for op in ("dispatch", "combine")
            for step in ("1", "2", "4", "5", "6-7")
            if step in {"1", "4", "5"} or busy[op][step == "6-7"]
        ]
        assert all(first.end_ns <= second.start_ns for first, second in itertools.pairwise(steps))
    assert {flow.name for flow in trace.flows} <= {"dispatch last field", "combine last field"}
    for flow in trace.flows:
        # An arrow starts in the store that was waited for and ends in the wait.
        (store,) = [
            s for s in trace.spans if (s.node, s.lane) == (flow.node, "MTE3") and s.end_ns == flow.at_ns + 1
        ]
        assert store.name.endswith("4 post fields")
        (wait,) = [
            s for s in trace.spans if (s.node, s.lane, s.end_ns) == (flow.to_node, "XCCL", flow.to_ns + 1)
        ]
        assert wait.name == flow.name.split()[0] + " 5"
    assert trace.flows
    trace.write(tmp_path / "exchange.trace.json")
    events = json.loads((tmp_path / "exchange.trace.json").read_text())["traceEvents"]
    assert (
        sum(event["ph"] == "s" for event in events)
        == sum(event["ph"] == "f" for event in events)
        == len(trace.flows)
    )


# ---- peers that fail --------------------------------------------------------------------------------

CASE = make_case(5, num_ranks=3, num_experts=6, top_k=2, max_tokens=4, quantized=True, num_layers=1)


async def run_programs(
    program: Callable[[XCCL], Any], on_step: Callable[[int, str, int], None] | None = None
) -> list[Any]:
    pod = make_pod(CASE, None)
    handles = make_handles(CASE, pod, timeout_ns=500_000)
    for xccl in handles:
        if on_step is not None:
            xccl.steps.on_step = lambda op, step, rank=xccl.rank: on_step(rank, op, step)
    tasks = [xccl.die.spawn(program(xccl)) for xccl in handles]
    return await asyncio.gather(*tasks, return_exceptions=True)


async def once(xccl: XCCL, event_id: int = 1) -> np.ndarray:
    got = await xccl.dispatch(CASE.tokens[0][xccl.rank], CASE.topk[0][xccl.rank], event_id)
    return await xccl.combine(got.payload * got.scale[:, None], event_id)


@pytest.mark.parametrize(("op", "step"), [("dispatch", 1), ("dispatch", 3), ("dispatch", 7), ("combine", 3)])
async def test_a_rank_that_dies_is_named_at_the_deadline(op: str, step: int) -> None:
    def dies(rank: int, op_now: str, step_now: int) -> None:
        if (rank, op_now, step_now) == (1, op, step):
            raise RuntimeError("die 1 lost power")

    results = await run_programs(once, dies)
    assert isinstance(results[1], RuntimeError)
    waits_in = "dispatch" if op == "dispatch" and step < 4 else "combine"
    for rank in (0, 2):
        error = results[rank]
        assert isinstance(error, DeadlineError)
        assert (error.op, error.rank, error.peer, error.field) == (waits_in, rank, (1,), "event ID")
        assert (error.expected, error.seen) == (1, {1: 0})
        assert f"{waits_in}: deadline passed at {error.at_ns} ns: rank {rank} waits for peer [1]" in str(
            error
        )


async def test_a_rank_that_dies_after_posting_harms_nobody_in_that_operation() -> None:
    def dies(rank: int, op: str, step: int) -> None:
        if (rank, op, step) == (1, "combine", 4):
            raise RuntimeError("die 1 lost power")

    results = await run_programs(once, dies)
    assert isinstance(results[1], RuntimeError)
    for rank in (0, 2):
        assert isinstance(results[rank], np.ndarray)


async def test_survivors_reset_and_go_on_with_a_fresh_event() -> None:
    async def program(xccl: XCCL) -> np.ndarray:
        clock = xccl.die.clock
        if xccl.rank == 1:
            await clock.sleep(2_000_000)  # a stall, long enough for the others to give up
        else:
            with pytest.raises(DeadlineError):
                await once(xccl)
            with pytest.raises(ProtocolError, match="cannot dispatch while failed"):
                await once(xccl, 2)
            await clock.sleep_until(2_000_000)
        xccl.reset()
        return await once(xccl, event_id=10)

    results = await run_programs(program)
    # The three answers are those of an undisturbed run, with the experts of `once`: identities.
    undisturbed = await run_programs(once)
    for result, expected in zip(results, undisturbed, strict=True):
        assert same_bits(result, expected)


async def test_a_rank_with_another_event_is_named_with_both_events() -> None:
    async def program(xccl: XCCL) -> np.ndarray:
        return await once(xccl, event_id=5 if xccl.rank == 1 else 4)

    results = await run_programs(program)
    for rank in (0, 2):
        assert isinstance(results[rank], ProtocolError)
        assert str(results[rank]) == (
            f"dispatch: rank {rank} expects event 4, but peer 1 is ahead: its field says event 5"
        )
    assert "rank 1 expects event 5, but peer 0 is behind: its field says event 4" in str(results[1])


async def test_an_expert_rank_that_answers_with_another_count_is_named() -> None:
    async def program(xccl: XCCL) -> np.ndarray:
        got = await xccl.dispatch(CASE.tokens[0][xccl.rank], CASE.topk[0][xccl.rank], 1)
        out = got.payload * got.scale[:, None]
        if xccl.rank == 2:  # loses its last row
            source = int(np.flatnonzero(got.num_tokens_per_rank)[-1])
            counts = got.num_tokens_per_rank.copy()
            counts[source] -= 1
            columns = [column[:-1] for column in got[:-1]]
            xccl.boxes.received = type(got)(*columns, num_tokens_per_rank=counts)
            out = out[:-1]
        return await xccl.combine(out, 1)

    results = await run_programs(program)
    errors = [str(result) for result in results if isinstance(result, ProtocolError)]
    assert len(errors) == 1
    assert "rows to peer 2 in event 1, which answers with" in errors[0]


async def test_groups_that_differ_are_found_by_the_rank_that_gets_the_wrong_rows() -> None:
    layout, pod = Layout(2, 4, 1, 8, 1, False), Pod()
    for die in (0, 1):
        layout.plan(pod.plan(die))
    pod.materialise()
    handles = [
        XCCL(pod.dies[0], 0, Group((0, 1), (0, 1)), layout, means=Means(timeout_ns=100_000)),
        XCCL(pod.dies[1], 1, Group((0, 1), (1, 0)), layout, means=Means(timeout_ns=100_000)),
    ]

    async def program(xccl: XCCL) -> Any:
        topk_idx = np.full((2, 1), xccl.rank, np.int32)
        return await xccl.dispatch(np.ones((2, 8), np.float32), topk_idx, 1)

    results = await asyncio.gather(*[x.die.spawn(program(x)) for x in handles], return_exceptions=True)
    assert str(results[0]) == (
        "dispatch: rank 0 has the physical experts [0], but peer 1 sends it a row for expert 1: "
        "groups must be equal"
    )
    assert results[1].num_tokens_per_rank.tolist() == [0, 0]
    assert handles[0].phase is Phase.FAILED


# ---- callers that err -------------------------------------------------------------------------------


async def one_call(call: Callable[[XCCL], Any]) -> Any:
    case = make_case(1, num_ranks=1, num_experts=4, top_k=2, max_tokens=3, quantized=False, num_layers=1)
    pod = make_pod(case, None)
    (xccl,) = make_handles(case, pod)
    return await xccl.die.spawn(call(xccl))


def arguments(xccl: XCCL, num_tokens: int = 2) -> tuple[np.ndarray, np.ndarray]:
    x = np.ones((num_tokens, xccl.layout.hidden), np.float32)
    return x, np.tile(np.array([0, 1], np.int32), (num_tokens, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, e: (x.astype(np.float64), e), "x must be contiguous float32"),
        (lambda x, e: (x[:, :0], e), "x must be contiguous float32"),
        (lambda x, e: (x.tolist(), e), "dispatch: x must be a NumPy array, not list"),
        (lambda x, e: (None, e), "dispatch: x must be a NumPy array, not NoneType"),
        (lambda x, e: (x, e.tolist()), "dispatch: topk_idx must be a NumPy array, not list"),
        (lambda x, e: (np.repeat(x, 2, 0), np.repeat(e, 2, 0)), "4 tokens exceed the layout's 3"),
        (lambda x, e: (x, e.astype(np.int64)), r"topk_idx must be int32 \[2, 2\], not int64"),
        (lambda x, e: (x, e[:1]), r"topk_idx must be int32 \[2, 2\]"),
        (lambda x, e: (x, e - 1), r"outside the physical experts 0\.\.3"),
        (lambda x, e: (x, e + 3), r"outside the physical experts 0\.\.3"),
        # The only rank has four experts, so that its block has room for both copies.
        (lambda x, e: (x, e * [[1, 1], [1, 0]]), r"dispatch: token 1 goes to an expert twice: \[0, 0\]"),
    ],
)
async def test_arguments_that_the_layout_does_not_hold_are_refused(change: Any, message: str) -> None:
    async def program(xccl: XCCL) -> None:
        before = bytes(xccl.die.memory.buffer)
        x, topk_idx = change(*arguments(xccl))
        if isinstance(topk_idx, np.ndarray) and topk_idx.dtype == np.int64 and "int64" not in message:
            topk_idx = topk_idx.astype(np.int32)
        with pytest.raises(AddressError, match=message):
            await xccl.dispatch(x, topk_idx, 1)
        assert bytes(xccl.die.memory.buffer) == before
        # A refused call has not happened: neither the handle nor the event ID is lost.
        got = await xccl.dispatch(*arguments(xccl), 1)
        with pytest.raises(AddressError, match="expert_out must be contiguous float32"):
            await xccl.combine(got.payload[:-1], 1)
        with pytest.raises(AddressError, match="combine: expert_out must be a NumPy array, not list"):
            await xccl.combine(got.payload.tolist(), 1)
        await xccl.combine(np.ascontiguousarray(got.payload), 1)
        assert xccl.phase is Phase.READY

    await one_call(program)


async def test_wrong_order_and_old_events_are_refused() -> None:
    async def program(xccl: XCCL) -> None:
        nothing = np.zeros((0, xccl.layout.hidden), np.float32)
        with pytest.raises(ProtocolError, match="rank 0 cannot combine while ready"):
            await xccl.combine(nothing, 1)
        with pytest.raises(AddressError, match="the layout is for quantize=False, not True"):
            await xccl.dispatch(*arguments(xccl), 1, quantize=True)
        with pytest.raises(ProtocolError, match="given event 0: event IDs are integers"):
            await xccl.dispatch(*arguments(xccl), 0)
        got = await xccl.dispatch(*arguments(xccl), 3)
        with pytest.raises(ProtocolError, match="cannot dispatch while holding"):
            await xccl.dispatch(*arguments(xccl), 4)
        await xccl.combine(np.ascontiguousarray(got.payload), 3)
        with pytest.raises(ProtocolError, match="given event 3 after 3: event IDs must increase"):
            await xccl.dispatch(*arguments(xccl), 3)
        await xccl.dispatch(*arguments(xccl), 4)
        with pytest.raises(AddressError, match="expert_out must be contiguous float32"):
            await xccl.combine(nothing, 4)

    await one_call(program)


async def test_a_token_twice_to_one_expert_is_refused() -> None:
    case = make_case(1, num_ranks=1, num_experts=1, top_k=1, max_tokens=2, quantized=False, num_layers=1)
    layout = Layout(1, max_tokens=2, top_k=2, hidden=4, max_experts_per_rank=1, quantize=False)
    pod = Pod()
    layout.plan(pod.plan(0))
    pod.materialise()
    xccl = XCCL(pod.dies[0], 0, Group((0,), case.group.expert_rank), layout)
    with pytest.raises(AddressError, match="token 0 goes to an expert twice"):
        await xccl.die.spawn(xccl.dispatch(np.ones((2, 4), np.float32), np.zeros((2, 2), np.int32), 1))


def test_handles_that_cannot_be_are_refused() -> None:
    pod = make_pod(CASE, None)
    die = pod.dies[CASE.group.dies[0]]
    with pytest.raises(DeploymentError, match="is not rank 1 of the group"):
        XCCL(die, 1, CASE.group, CASE.layout, quantize)
    with pytest.raises(DeploymentError, match="needs a kernel"):
        XCCL(die, 0, CASE.group, CASE.layout)
    with pytest.raises(
        DeploymentError, match=r"the layout is for 3 ranks with \d experts each, the group has 4"
    ):
        XCCL(die, 0, Group((*CASE.group.dies, 47), (0,)), CASE.layout, quantize)
    with pytest.raises(DeploymentError, match="the group has 3 with up to 9"):
        XCCL(die, 0, Group(CASE.group.dies, (0,) * 9), CASE.layout, quantize)


# ---- what operators are given -----------------------------------------------------------------------


@given(cases(), st.integers(1, 48), st.sampled_from(["mte", "urma"]))
def test_cores_and_carriers_change_the_time_and_no_byte(case: Case, cores: int, carrier: Any) -> None:
    done = run(case, None, cores=cores, carrier=carrier)
    for layer in range(len(case.tokens)):
        for rank in range(case.group.num_ranks):
            for name, expected in oracle_received(case, layer, rank).items():
                assert same_bits(done.received[layer][rank][name], expected), name
            assert same_bits(done.results[layer][rank], oracle_result(case, layer, rank))


def test_fewer_cores_take_longer() -> None:
    case = make_case(3, num_ranks=4, num_experts=8, top_k=4, max_tokens=6, quantized=True, num_layers=1)
    times = [run(case, None, cores=cores).pod.clock.now for cores in (1, 4, 48)]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3


@given(st.integers(0, 2**16), st.booleans(), st.integers(1, 4))
def test_redundant_physical_experts_change_no_bit(seed: int, quantized: bool, replicas: int) -> None:
    """Logical expert e has copies on several ranks; row i of a rank's tokens goes to copy i mod replicas."""
    num_logical, num_ranks = 5, 4
    plain = make_case(seed, num_ranks, num_logical, 2, max_tokens=5, quantized=quantized, num_layers=1)
    rng = np.random.default_rng(seed)
    homes = tuple(int(rank) for rank in rng.integers(0, num_ranks, num_logical * replicas))
    group = Group(plain.group.dies, homes)  # physical expert p is a copy of logical expert p // replicas
    options = {"max_tokens": 5, "top_k": 2, "hidden": plain.layout.hidden, "quantize": quantized}
    physical = [
        topk * replicas + (np.arange(len(topk), dtype=np.int32) % replicas)[:, None] for topk in plain.topk[0]
    ]
    case = Case(group, Layout.for_group(group, **options), plain.tokens, [physical])
    spread = run(case, None, expert_of=lambda physical_idx: physical_idx // replicas)
    for rank in range(num_ranks):
        assert same_bits(spread.results[0][rank], oracle_result(plain, 0, rank))
        # Each copy came to where that very replica lives.
        expert_idx = spread.received[0][rank]["expert_idx"]
        assert all(homes[p] == rank for p in expert_idx)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("num_experts", [1, 3])
def test_all_tokens_of_all_ranks_to_one_rank(num_experts: int, quantized: bool) -> None:
    case = make_case(9, 5, num_experts, num_experts, max_tokens=4, quantized=quantized, num_layers=2)
    group = Group(case.group.dies, (3,) * num_experts)
    options = {"max_tokens": 4, "top_k": num_experts, "hidden": case.layout.hidden, "quantize": quantized}
    tokens = [[np.resize(x, (4, case.layout.hidden)).astype(np.float32) for x in row] for row in case.tokens]
    topk = [[np.tile(np.arange(num_experts, dtype=np.int32), (4, 1)) for _ in row] for row in case.topk]
    case = Case(group, Layout.for_group(group, **options), tokens, topk)
    done = run(case, None)
    for layer, rank in itertools.product(range(2), range(5)):
        counts = done.received[layer][rank]["num_tokens_per_rank"]
        assert counts.tolist() == [4 * num_experts * (rank == 3)] * 5
        assert same_bits(done.results[layer][rank], oracle_result(case, layer, rank))


async def test_tokens_that_are_quantised_already_are_forwarded_as_they_are() -> None:
    async def program(xccl: XCCL) -> Any:
        x, topk = CASE.tokens[0][xccl.rank], CASE.topk[0][xccl.rank]
        q, scale = quantize(x)
        got = await xccl.dispatch(q, topk, 1, scale=scale)
        return {name: np.array(value) for name, value in got._asdict().items()}

    for rank, found in enumerate(await run_programs(program)):
        for name, expected in oracle_received(CASE, 0, rank).items():
            assert same_bits(found[name], expected), name

    async def wrong(xccl: XCCL) -> None:
        q, scale = quantize(CASE.tokens[0][xccl.rank])
        with pytest.raises(AddressError, match="scale must be float32"):
            await xccl.dispatch(q, CASE.topk[0][xccl.rank], 1, scale=scale[:0].astype(np.float64))

    await run_programs(wrong)


ALL_STEPS = [(op, step) for op in ("dispatch", "combine") for step in (1, 2, 3, 4, 5, 7)]


@pytest.mark.parametrize("dead", [0, 1, 2])
@pytest.mark.parametrize(("op", "step"), ALL_STEPS)
async def test_a_rank_may_die_at_any_step(op: str, step: int, dead: int) -> None:
    """The others end well, or at the deadline of the first operation that it did not post; then all go on."""

    def dies(rank: int, op_now: str, step_now: int) -> None:
        if (rank, op_now, step_now) == (dead, op, step):
            raise RuntimeError("lost power")

    pod = make_pod(CASE, None)
    handles = make_handles(CASE, pod, timeout_ns=500_000)
    for xccl in handles:
        xccl.steps.on_step = lambda op, step, rank=xccl.rank: dies(rank, op, step)
    results = await asyncio.gather(*[x.die.spawn(once(x)) for x in handles], return_exceptions=True)
    awaited = op if step < 4 else {"dispatch": "combine"}.get(op)
    for rank, result in enumerate(results):
        if rank == dead:
            assert isinstance(result, RuntimeError)
        elif awaited is None:
            assert same_bits(result, (await run_programs(once))[rank])
        else:
            assert isinstance(result, DeadlineError)
            assert (result.op, result.rank, result.peer, result.expected) == (awaited, rank, (dead,), 1)
            assert result.seen == {dead: 0}
    for xccl in handles:
        xccl.steps.on_step = None
        xccl.reset()
    again = await asyncio.gather(*[x.die.spawn(once(x, event_id=10)) for x in handles])
    for result, expected in zip(again, await run_programs(once), strict=True):
        assert same_bits(result, expected)


async def test_refused_arguments_move_no_byte() -> None:
    pod = make_pod(CASE, None)
    xccl = make_handles(CASE, pod)[0]
    before = [bytes(pod.memory(die).buffer) for die in CASE.group.dies]
    x = np.ones((1, CASE.layout.hidden), np.float32)
    for topk in (np.array([[0, 99]], np.int32), np.array([[0]], np.int32)):
        with pytest.raises(AddressError):
            await xccl.die.spawn(xccl.dispatch(x, topk, xccl.turns.last_event_id[Step.DISPATCH] + 1))
        xccl.reset()
    assert [bytes(pod.memory(die).buffer) for die in CASE.group.dies] == before
    for options in ({"cores": 0}, {"cores": 49}, {"carrier": "tcp"}):
        with pytest.raises(DeploymentError):
            make_handles(CASE, pod, **options)


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_the_survivors_of_a_lost_die_go_on_without_it(dead: int) -> None:
    """Their experts move to the ranks that are left, which the layout has room for."""
    layout = Layout(3, max_tokens=4, top_k=2, hidden=CASE.layout.hidden, max_experts_per_rank=6)
    before = Case(CASE.group, layout, CASE.tokens, CASE.topk)
    pod = make_pod(before, None)
    group = Group(CASE.group.dies, CASE.group.expert_rank)
    handles = [
        XCCL(pod.dies[d], r, group, layout, quantize, Means(timeout_ns=500_000))
        for r, d in enumerate(group.dies)
    ]
    alive = [xccl for xccl in handles if xccl.rank != dead]
    failed = await asyncio.gather(*[x.die.spawn(once(x)) for x in alive], return_exceptions=True)
    assert all(isinstance(error, DeadlineError) and error.peer == (dead,) for error in failed)

    dies = tuple(xccl.die.index for xccl in alive)
    smaller = Group(dies, tuple(e % 2 for e in range(len(group.expert_rank))))
    tokens = [[CASE.tokens[0][xccl.rank] for xccl in alive]]
    topk = [[CASE.topk[0][xccl.rank] for xccl in alive]]
    after = Case(smaller, layout, tokens, topk)
    fresh = [XCCL(xccl.die, rank, smaller, layout, quantize) for rank, xccl in enumerate(alive)]

    async def program(xccl: XCCL, event_id: int) -> np.ndarray:
        got = await xccl.dispatch(tokens[0][xccl.rank], topk[0][xccl.rank], event_id)
        x = got.payload * got.scale[:, None]
        out = np.array([expert(e, row) for e, row in zip(got.expert_idx, x, strict=True)], np.float32)
        return await xccl.combine(out.reshape(x.shape), event_id)

    for xccl in fresh:
        xccl.reset()
    for event_id in (2, 3):
        results = await asyncio.gather(*[x.die.spawn(program(x, event_id)) for x in fresh])
        for rank, result in enumerate(results):
            assert same_bits(result, oracle_result(after, 0, rank))
