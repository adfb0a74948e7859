"""A2E and E2A against plain NumPy, with and without trampolines, for more and for fewer attention dies."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.tools import expert, quantize, same_bits
from xdeepserve.comm import oracles
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.exchange.rows import Received
from xdeepserve.comm.means import Means
from xdeepserve.comm.trampoline.a2e import AttentionSide, ExpertSide
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.comm.trampoline.naive import NaiveAttentionSide, NaiveExpertSide
from xdeepserve.comm.turns import Phase
from xdeepserve.errors import AddressError, DeadlineError, DeploymentError, ProtocolError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.pod import Pod


class Case(NamedTuple):
    layout: A2ELayout
    tokens: list[list[np.ndarray]]  # [layer][attention rank] float32 [T, H]
    topk: list[list[np.ndarray]]  # [layer][attention rank] int32 [T, K]
    weights: list[list[np.ndarray]]  # [layer][attention rank] float32 [T, K]


def make_case(
    seed: int, attention: int, experts: int, top_k: int, quantized: bool, reduce: bool = True, layers: int = 2
) -> Case:
    rng = np.random.default_rng(seed)
    num_physical = max(top_k, int(rng.integers(1, 3 * experts + 1)))
    hidden, max_tokens = int(rng.integers(1, 40)), int(rng.integers(1, 6))
    dies = [int(die) for die in rng.permutation(48)[: attention + experts]]
    expert_rank = tuple(int(rank) for rank in rng.integers(0, experts, num_physical))
    sides = Sides(tuple(dies[:attention]), Group(tuple(dies[attention:]), expert_rank))
    layout = A2ELayout(sides, max_tokens, top_k, hidden, quantized, reduce)
    sizes = rng.integers(0, max_tokens + 1, (layers, attention))
    return Case(
        layout,
        [[rng.standard_normal((n, hidden)).astype(np.float32) for n in row] for row in sizes],
        [
            [
                np.array([rng.permutation(num_physical)[:top_k] for _ in range(n)], np.int32).reshape(
                    n, top_k
                )
                for n in row
            ]
            for row in sizes
        ],
        [[rng.random((n, top_k)).astype(np.float32) for n in row] for row in sizes],
    )


def oracle(case: Case, layer: int, rank: int) -> np.ndarray:
    """What an attention die must get back, token by token and slot by slot."""
    quantizer = quantize if case.layout.quantize else None
    slots = oracles.combine(case.tokens[layer][rank], case.topk[layer][rank], expert, quantizer)
    return oracles.weighted_sum(slots, case.weights[layer][rank]) if case.layout.reduce else slots


class Built(NamedTuple):
    pod: Pod
    attention: list[Any]
    experts: list[Any]


def build(case: Case, seed: int | None = None, is_naive: bool = False, **options: Any) -> Built:
    pod, layout = Pod(clock=Clock(seed)), case.layout
    for die in layout.sides.attention:
        (layout.plan_naive_attention if is_naive else layout.plan_attention)(pod.plan(die))
    for die in layout.sides.experts.dies:
        (layout.plan_naive_expert if is_naive else layout.plan_expert)(pod.plan(die))
    pod.materialise()
    kinds = (NaiveAttentionSide, NaiveExpertSide) if is_naive else (AttentionSide, ExpertSide)
    groups = (layout.sides.attention, layout.sides.experts.dies)
    attention, experts = (
        [kind(pod.dies[die], rank, layout, quantize, Means(**options)) for rank, die in enumerate(dies)]
        for kind, dies in zip(kinds, groups, strict=True)
    )
    return Built(pod, attention, experts)


async def attend(side: Any, case: Case, event_id: int = 1, layers: range | None = None) -> list[np.ndarray]:
    results = []
    for layer in layers or range(len(case.tokens)):
        arguments = (batch[layer][side.rank] for batch in (case.tokens, case.topk, case.weights))
        await side.a2e(*arguments, event_id + layer)
        results.append(await side.e2a(event_id + layer))
    return results


async def serve(side: Any, case: Case, event_id: int = 1) -> list[list[tuple[int, ...]]]:
    seen = []
    for layer in range(len(case.tokens)):
        got = await side.a2e(event_id + layer)
        is_pulled = isinstance(got, Received)
        slot = got.slot if is_pulled else got.key_offset
        seen.append([tuple(row) for row in zip(got.expert_idx.tolist(), slot.tolist(), strict=True)])
        assert (got.num_tokens_per_rank if is_pulled else got.num_tokens_per_expert).sum() == len(got)
        x = got.payload * got.scale[:, None]
        out = np.array([expert(e, row) for e, row in zip(got.expert_idx, x, strict=True)], np.float32)
        await side.e2a(out.reshape(x.shape), event_id + layer)
    return seen


async def run(built: Built, case: Case, event_id: int = 1, safe: bool = False) -> tuple[list[Any], list[Any]]:
    tasks = [side.die.spawn(attend(side, case, event_id)) for side in built.attention]
    tasks += [side.die.spawn(serve(side, case, event_id)) for side in built.experts]
    results = await asyncio.gather(*tasks, return_exceptions=safe)
    return results[: len(built.attention)], results[len(built.attention) :]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return make_case(
        seed=draw(st.integers(0, 2**16)),
        attention=draw(st.integers(1, 9)),
        experts=draw(st.integers(1, 6)),
        top_k=draw(st.integers(1, 4)),
        quantized=draw(st.booleans()),
        reduce=draw(st.booleans()),
    )


def test_answers_that_are_not_to_be_added_up_cannot_be_pushed() -> None:
    with pytest.raises(DeploymentError, match="pushes=True is for reduce"):
        msgspec.structs.replace(make_case(0, 2, 2, 2, True, reduce=False).layout, pushes=True)


@given(
    cases(),
    st.none() | st.integers(0, 99),
    st.sampled_from(["pull", "push", "naive"]),
    st.sampled_from(["mte", "urma"]),
    st.integers(1, 48),
)
def test_every_bit_is_the_oracles(case: Case, seed: int | None, way: str, carrier: Any, cores: int) -> None:
    if way == "push" and case.layout.reduce:
        case = case._replace(layout=msgspec.structs.replace(case.layout, pushes=True))
    is_naive = way == "naive"
    built = build(case, seed, is_naive, carrier=carrier, cores=cores)
    results, seen = asyncio.run(run(built, case))
    for layer in range(len(case.tokens)):
        for rank, result in enumerate(results):
            assert same_bits(result[layer], oracle(case, layer, rank))
        # Every copy came to the rank of its expert, once.
        for rank, copies in enumerate(seen):
            expected = [
                (e, k)
                for topk in case.topk[layer]
                for row in topk.tolist()
                for k, e in enumerate(row)
                if case.layout.sides.experts.expert_rank[e] == rank
            ]
            assert sorted(copies[layer]) == sorted(expected)
    for side in built.attention + built.experts:
        assert side.phase is Phase.READY
        side.die.memory.check_integrity()
        assert side.die.memory.watches == []
        assert {field.event_id for field in side.inbox.fields()} <= {len(case.tokens)}


@pytest.mark.parametrize(("attention", "experts"), [(3, 5), (4, 4), (5, 2), (1, 1)])
async def test_an_attention_die_posts_one_field_where_the_naive_one_posts_as_many_as_there_are_experts(
    attention: int, experts: int
) -> None:
    case = make_case(1, attention, experts, top_k=1, quantized=True)
    sides = case.layout.sides
    served = [sides.served(rank) for rank in range(experts)]
    assert sorted(itertools.chain(*served)) == list(range(attention))
    assert sum(map(bool, served)) == sides.num_trampolines == min(attention, experts)
    assert max(map(len, served)) == sides.max_served
    for is_naive, num_fields in ((False, 1), (True, experts)):
        built = build(case, is_naive=is_naive)
        posted: list[int] = []
        for side in built.attention:
            scatter = side.die.mte.scatter

            async def count(targets: Any, *rest: Any, scatter: Any = scatter, posted: Any = posted) -> None:
                posted.append(len(targets.nodes))
                await scatter(targets, *rest)

            side.die.mte.scatter = count
        await run(built, case)
        assert posted == [num_fields] * attention * len(case.tokens)


async def test_domains_on_handles_of_their_own_overlap_on_the_same_expert_dies() -> None:
    """Two domains of attention dies; expert dies take A2E of one before they have sent E2A of the other."""
    base = make_case(8, attention=2, experts=3, top_k=2, quantized=True, layers=1)
    other_dies = (46, 47)
    assert not set(other_dies) & set(base.layout.sides.attention + base.layout.sides.experts.dies)
    pod, layouts = Pod(), []
    for domain, dies in enumerate((base.layout.sides.attention, other_dies)):
        sides = Sides(dies, base.layout.sides.experts)
        layouts.append(
            A2ELayout(
                sides,
                *[getattr(base.layout, f) for f in ("max_tokens", "top_k", "hidden")],
                name=f"d{domain}",
            )
        )
    for layout in layouts:
        for die in layout.sides.attention:
            layout.plan_attention(pod.plan(die))
        for die in layout.sides.experts.dies:
            layout.plan_expert(pod.plan(die))
    pod.materialise()

    async def both(rank: int, die: int) -> None:
        ends = [ExpertSide(pod.dies[die], rank, layout, quantize) for layout in layouts]
        received = [await end.a2e(1) for end in ends]
        for end, got in zip(ends, received, strict=True):
            x = got.payload * got.scale[:, None]
            out = np.array([expert(e, row) for e, row in zip(got.expert_idx, x, strict=True)], np.float32)
            await end.e2a(out.reshape(x.shape), 1)

    tasks = [pod.dies[die].spawn(both(rank, die)) for rank, die in enumerate(base.layout.sides.experts.dies)]
    attention = [
        AttentionSide(pod.dies[die], rank, layout, quantize)
        for layout in layouts
        for rank, die in enumerate(layout.sides.attention)
    ]
    results = await asyncio.gather(*[side.die.spawn(attend(side, base)) for side in attention], *tasks)
    for side, (result,) in zip(attention, results, strict=False):
        assert same_bits(result, oracle(base, 0, side.rank))


# ---- peers that fail --------------------------------------------------------------------------------

CASE = make_case(21, attention=2, experts=3, top_k=2, quantized=True, layers=1)
ATTENTION_STEPS = [("A2E", 1), ("A2E", 2), ("A2E", 3), ("A2E", 4), ("E2A'", 5), ("E2A'", 7)]
EXPERT_STEPS = [
    *[("A2E", step) for step in (5, 7)],
    *[("A2E'", step) for step in (1, 2, 3, 4, 5, 7)],
    *[("E2A", step) for step in (1, 2, 3, 4, 5, 7)],
    *[("E2A'", step) for step in (2, 3, 4)],
]


def break_at(side: Any, op: str, step: int) -> None:
    def dies(op_now: str, step_now: int) -> None:
        if (op_now, step_now) == (op, step):
            raise RuntimeError("lost power")

    side.steps.on_step = dies


async def check_fault(which: str, rank: int, op: str, step: int) -> list[DeadlineError]:
    """Break one die at a step; everybody else ends well or at a deadline, and goes on after a reset."""
    built = build(CASE, timeout_ns=300_000)
    side = getattr(built, which)[rank]
    break_at(side, op, step)
    attention, experts = await run(built, CASE, safe=True)
    errors = []
    for other, result in zip(built.attention + built.experts, attention + experts, strict=True):
        if other is side:
            assert isinstance(result, RuntimeError), result
        elif isinstance(result, BaseException):
            assert isinstance(result, DeadlineError), result
            assert result.field == "event ID"
            assert result.expected == 1
            assert isinstance(result.seen, dict)
            errors.append(result)
            assert other.phase is Phase.FAILED
    # The die is repaired: with a fresh event all go on.
    side.steps.on_step = None
    await built.pod.dies[side.die.index].spawn(built.pod.clock.sleep(1_000_000))
    for end in built.attention + built.experts:
        end.reset()
    results, _ = await run(built, CASE, event_id=10)
    for attention_rank, (result,) in enumerate(results):
        assert same_bits(result, oracle(CASE, 0, attention_rank))
    return errors


@pytest.mark.parametrize(("op", "step"), ATTENTION_STEPS)
async def test_an_attention_die_that_dies_is_named_by_its_trampoline(op: str, step: int) -> None:
    errors = await check_fault("attention", 1, op, step)
    if (op, step) < ("A2E", 4):
        (first,) = [error for error in errors if error.op == "A2E"]
        assert (first.rank, first.peer, first.seen) == ("expert 1", ("attention 1",), {"attention 1": 0})
        assert "A2E: deadline passed at" in str(first)
        assert "rank expert 1 waits for peer [attention 1], field event ID: expected 1" in str(first)
        # The other attention die and the other expert dies are held up as well, each by whom it waits for.
        assert {(e.op, e.rank, e.peer) for e in errors} == {
            ("A2E", "expert 1", ("attention 1",)),
            ("A2E'", "expert 0", ("expert 1",)),
            ("A2E'", "expert 2", ("expert 1",)),
            ("E2A'", "attention 0", ("expert 0",)),
        }
    else:
        assert errors == []  # it is dead after its last store, so that it harms nobody


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(("op", "step"), EXPERT_STEPS)
async def test_an_expert_die_that_dies_is_named_by_those_who_wait_for_it(
    op: str, step: int, rank: int
) -> None:
    is_trampoline = rank == 1
    if not is_trampoline and (op == "A2E" or op == "E2A'"):
        return  # only trampolines have these steps
    errors = await check_fault("experts", rank, op, step)
    found = {(e.op, e.rank, e.peer) for e in errors}
    dead, others = f"expert {rank}", ("expert 0", f"expert {3 - rank}")
    if op == "A2E" or (op == "A2E'" and step < 4):
        assert {("A2E'", waiting, (dead,)) for waiting in others} <= found
    elif op == "A2E'" or (op == "E2A" and step < 4):
        assert {("E2A", waiting, (dead,)) for waiting in others} <= found
    elif is_trampoline and (op, step) != ("E2A'", 4):
        assert found == {("E2A'", "attention 1", ("expert 1",))}
    else:
        assert found == set()


@pytest.mark.parametrize(
    ("which", "rank", "op", "step"), [("attention", 0, "A2E", 3), ("experts", 2, "E2A", 3)]
)
async def test_without_trampolines_a_dead_die_is_named_by_all(
    which: str, rank: int, op: str, step: int
) -> None:
    built = build(CASE, is_naive=True, timeout_ns=300_000)
    break_at(getattr(built, which)[rank], op, step)
    attention, experts = await run(built, CASE, safe=True)
    waiting = experts if which == "attention" else attention
    dead = f"{which.removesuffix('s')} {rank}"
    for result in waiting:
        if isinstance(result, RuntimeError):
            continue
        assert isinstance(result, DeadlineError)
        assert (result.op, result.peer) == (op, (dead,))
    for end in built.attention + built.experts:
        end.steps.on_step = None
        end.reset()
    results, _ = await run(built, CASE, event_id=10)
    assert all(same_bits(result, oracle(CASE, 0, r)) for r, (result,) in enumerate(results))


@pytest.mark.parametrize("is_naive", [False, True])
async def test_the_survivors_of_lost_dies_go_on_without_them(is_naive: bool) -> None:
    """An expert die and an attention die are lost; fewer experts now serve fewer attention dies."""
    rng = np.random.default_rng(2)
    planned = Sides((1, 2, 3, 4), Group((20, 21, 22), (0, 0, 1, 1, 2, 2)))
    layout = A2ELayout(planned, max_tokens=3, top_k=2, hidden=8)
    case = make_case(2, attention=4, experts=3, top_k=2, quantized=True, layers=1)._replace(layout=layout)
    built = build(case, is_naive=is_naive, timeout_ns=300_000)
    break_at(built.attention[2], "A2E", 3)
    break_at(built.experts[0], *(("A2E", 5) if is_naive else ("A2E'", 3)))
    sizes = [3, 0, 2]
    tokens = [rng.standard_normal((n, 8)).astype(np.float32) for n in sizes]
    topk = [np.array([rng.permutation(4)[:2] for _ in range(n)], np.int32).reshape(n, 2) for n in sizes]
    weights = [rng.random((n, 2)).astype(np.float32) for n in sizes]
    idle = case._replace(
        tokens=[[np.zeros((0, 8), np.float32)] * 4],
        topk=[[np.zeros((0, 2), np.int32)] * 4],
        weights=[[np.zeros((0, 2), np.float32)] * 4],
    )
    attention, experts = await run(built, idle, safe=True)
    assert any(isinstance(result, DeadlineError) for result in attention + experts)

    left = Sides((1, 2, 4), Group((21, 22), (0, 0, 1, 1)))
    after = Case(A2ELayout(left, 3, 2, 8), [tokens], [topk], [weights])
    kinds = (NaiveAttentionSide, NaiveExpertSide) if is_naive else (AttentionSide, ExpertSide)
    fresh = Built(
        built.pod,
        *(
            [kind(built.pod.dies[die], rank, layout, quantize, sides=left) for rank, die in enumerate(dies)]
            for kind, dies in zip(kinds, (left.attention, left.experts.dies), strict=True)
        ),
    )
    for side in fresh.attention + fresh.experts:
        side.reset()
    results, _ = await run(fresh, after, event_id=2)
    for rank, (result,) in enumerate(results):
        assert same_bits(result, oracle(after, 0, rank))
    with pytest.raises(DeploymentError, match="cannot hold 4 attention dies on a trampoline, planned for 2"):
        AttentionSide(built.pod.dies[1], 0, layout, quantize, sides=Sides((1, 2, 3, 4), Group((21,), (0,))))


async def test_a_trampoline_that_answers_another_count_is_named() -> None:
    built = build(CASE)
    side = built.attention[0]

    async def forgetful() -> None:
        arguments = (batch[0][side.rank] for batch in (CASE.tokens, CASE.topk, CASE.weights))
        await side.a2e(*arguments, 1)
        side.num_sent += 1
        await side.e2a(1)

    tasks = [end.die.spawn(serve(end, CASE)) for end in built.experts]
    tasks += [side.die.spawn(forgetful()), built.attention[1].die.spawn(attend(built.attention[1], CASE))]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [str(result) for result in results if isinstance(result, BaseException)]
    n = len(CASE.tokens[0][0])
    assert errors == [
        f"E2A': attention 0 handed {n + 1} tokens to expert 0 in event 1, which answers with {n}"
    ]


# ---- callers that err -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_naive", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, e, w: (x.astype(np.float64), e, w), "A2E: x must be contiguous float32"),
        (
            lambda x, e, w: (np.repeat(x, 9, 0), np.repeat(e, 9, 0), np.repeat(w, 9, 0)),
            "tokens exceed the layout's",
        ),
        (lambda x, e, w: (x, e[:, :1], w), "A2E: topk_idx must be int32"),
        (lambda x, e, w: (x, e - 1, w), "A2E: topk_idx has values outside the physical experts"),
        (lambda x, e, w: (x, e * 0 + 2, w), r"A2E: token 0 goes to an expert twice: \[2, 2\]"),
        (lambda x, e, w: (x, e, w[:, :1]), "A2E: topk_weights must be float32"),
        (lambda x, e, w: (x, e, w.astype(np.float64)), "A2E: topk_weights must be float32"),
    ],
)
async def test_arguments_that_the_layout_does_not_hold_are_refused(
    change: Callable[..., Any], message: str, is_naive: bool
) -> None:
    built = build(CASE, is_naive=is_naive)
    before = {node: bytes(built.pod.memory(node).buffer) for node in built.pod.memories.plans}
    side = built.attention[0]
    x = np.ones((1, CASE.layout.hidden), np.float32)
    arguments = change(x, np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32))
    with pytest.raises(AddressError, match=message):
        await side.die.spawn(side.a2e(*arguments, 1))
    assert {node: bytes(built.pod.memory(node).buffer) for node in built.pod.memories.plans} == before


async def test_wrong_order_and_old_events_are_refused() -> None:
    built = build(CASE)
    attention, expert_side = built.attention[0], built.experts[0]
    with pytest.raises(ProtocolError, match="cannot E2A while ready"):
        await attention.die.spawn(attention.e2a(1))
    with pytest.raises(ProtocolError, match="A2E: rank expert 0 was given event 0: event IDs are integers"):
        await expert_side.die.spawn(expert_side.a2e(0))
    with pytest.raises(DeploymentError, match="is not attention rank 1"):
        AttentionSide(attention.die, 1, CASE.layout, quantize)
    with pytest.raises(DeploymentError, match="needs a kernel"):
        ExpertSide(expert_side.die, 0, CASE.layout)
    with pytest.raises(DeploymentError, match=r"1\.\.48 AIV cores to use, not 49"):
        AttentionSide(attention.die, 0, CASE.layout, quantize, Means(49))
    with pytest.raises(DeploymentError, match="carried by mte or urma, not 'tcp'"):
        AttentionSide(attention.die, 0, CASE.layout, quantize, Means(carrier="tcp"))  # type: ignore[arg-type]
    with pytest.raises(DeploymentError, match="attention and experts need different dies"):
        Sides((1, 2), Group((2, 3), (0, 1)))


def test_to_lose_an_expert_die_of_as_many_needs_planned_room() -> None:
    attention, experts = (0, 1, 2), (16, 17, 18)
    after = Sides(attention, Group(experts[:2], (0, 1, 1)))
    exact = A2ELayout(Sides(attention, Group(experts, (0, 1, 2))), max_tokens=2, top_k=2, hidden=8)
    with pytest.raises(
        DeploymentError,
        match="hold 2 attention dies on a trampoline, planned for 1, 2 experts on a die, planned for 1",
    ):
        exact.check_sides(after)
    spare = A2ELayout(Sides((*attention, 3), Group(experts, (0, 1, 2, 2))), max_tokens=2, top_k=2, hidden=8)
    spare.check_sides(exact.sides)
    spare.check_sides(after)
