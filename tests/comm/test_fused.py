"""FusedDispatch and FusedCombine: what `contract` does not say of them already."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.contract import FULL, Scene, answers, exchange, one_token, opened
from tests.comm.tools import expert, quantize, same_bits
from xdeepserve.comm import oracles
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.fused.combine import Contributions
from xdeepserve.comm.fused.handle import FusedXCCL
from xdeepserve.comm.fused.layout import SLOT_DTYPE, FusedLayout
from xdeepserve.comm.means import Means
from xdeepserve.errors import AddressError, DeploymentError, ProtocolError
from xdeepserve.hw.memory import Memory, MemoryPlan
from xdeepserve.hw.pod import Pod

SMALL = {**FULL, "way": "push", "num_ranks": 3}  # every rank sends to every rank


def made(group: Group, layout: FusedLayout) -> list[FusedXCCL]:
    pod = Pod()
    for die in group.dies:
        layout.plan(pod.plan(die))
    pod.materialise()
    return [FusedXCCL(pod.dies[die], rank, group, layout, quantize) for rank, die in enumerate(group.dies)]


async def test_a_rank_that_owes_nothing_runs_ahead_and_harms_nobody() -> None:
    """Rank 2 holds no experts' tokens of rank 0, so it is in D(n+1) while rank 0 still waits in D(n)."""
    group = Group((0, 1, 16), (0, 1, 1))
    layout = FusedLayout.for_group(group, local_batch=2, top_k=1, hidden=4, quantize=False)
    handles = made(group, layout)
    # Rank 0's expert is used by rank 0 alone; rank 1's by ranks 1 and 2.
    topk, weights = [np.array([[e], [e]], np.int32) for e in (0, 1, 2)], np.ones((2, 1), np.float32)
    overtaken = []

    def watch(op: str, step: int) -> None:
        # Others post in D(n+1) while rank 0 is still at work in C(n) or D(n).
        if (op, step) == ("fused combine", 3):
            field = handles[0].region("flags")
            raw = handles[0].die.memory.read(field.offset, field.nbytes)
            posted = np.frombuffer(raw, layout.flag_dtype)["event_id"]
            overtaken.append(int(posted.max()) > max(handles[0].place.board.latest_events))

    async def program(xccl: FusedXCCL) -> None:
        x = np.full((2, 4), xccl.rank + 1, np.float32)
        out = oracles.combine(x, topk[xccl.rank], expert)
        for event in (1, 2, 3):
            got = await xccl.dispatch(x, topk[xccl.rank], event)
            if xccl.rank == 0:
                await xccl.die.clock.sleep(300_000)
            result = await xccl.combine(answers(got), weights, event)
            assert same_bits(result, oracles.fused_combine(out, weights))

    handles[0].steps.on_step = watch
    await asyncio.gather(*[xccl.die.spawn(program(xccl)) for xccl in handles])
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


# ---- peers and callers that err ---------------------------------------------------------------------


@pytest.mark.parametrize("expert_idx", [0, 99])
def test_messages_that_belie_the_counts_are_refused(expert_idx: int) -> None:
    async def body(scene: Scene) -> None:
        handles = [rank.handle for rank in scene.ranks]
        layout, victim = handles[2].layout, handles[2]

        def corrupt(op: str, step: int) -> None:
            if (op, step) == ("fused dispatch", 2):
                shape = (3, layout.max_tokens, layout.dispatch_message)
                buffer = victim.die.memory.view(victim.region("dispatch"), np.uint8, shape)
                slot = buffer[0, 0, layout.slot_offset :][: SLOT_DTYPE.itemsize].view(SLOT_DTYPE)
                slot["expert_idx"] = expert_idx

        handles[0].steps.on_step = corrupt
        tasks = [rank.die.spawn(rank.call(0, 1)) for rank in scene.ranks]
        error = (await asyncio.gather(*tasks, return_exceptions=True))[2]
        assert isinstance(error, ProtocolError)
        said = (
            "rank 2: peer 0 posts [2, 0, 0] tokens for the experts here, but its messages are for [1, 0, 0]"
        )
        assert said in str(error)

    opened(exchange, body, **SMALL, timeout_ns=500_000)


def test_wrong_order_and_shapes_are_refused() -> None:
    async def program(xccl: FusedXCCL) -> None:
        x, topk, weights = one_token(xccl.layout)
        got = await xccl.dispatch(x, topk, 3)
        with pytest.raises(ProtocolError, match="rank 0 cannot fused dispatch while holding"):
            await xccl.dispatch(x, topk, 4)
        out = np.ascontiguousarray(got.payload)
        wrong: list[tuple[Any, str]] = [
            ((out[:-1], weights, 3), "expert_out must be contiguous float32"),
            ((out.tolist(), weights, 3), "fused combine: expert_out must be a NumPy array, not list"),
            ((out, weights[:0], 3), "topk_weights must be contiguous float32"),
            ((out, weights, 3, out), "shared must be contiguous float32"),
        ]
        for arguments, message in wrong:
            with pytest.raises(AddressError, match=message):
                await xccl.combine(*arguments)
        # The caller's routing may be used again between the two.
        topk[:] = 3
        assert xccl.topk_idx.tolist() == [[0, 1, 2]]
        assert np.array_equal(await xccl.combine(out, weights, 3), np.full((1, 8), 3, np.float32))
        with pytest.raises(ProtocolError, match="given event 3 after"):
            await xccl.dispatch(x, topk, 3)

    async def body(scene: Scene) -> None:
        (rank,) = scene.ranks
        await rank.die.spawn(program(rank.handle))

    opened(exchange, body, **{**SMALL, "num_ranks": 1, "quantized": False})


def test_handles_that_cannot_be_are_refused() -> None:
    group = Group((0, 1, 16), (0, 1, 2))
    layout = FusedLayout.for_group(group, local_batch=2, top_k=3, hidden=8)
    die = made(group, layout)[0].die
    with pytest.raises(DeploymentError, match="is not rank 1 of the group"):
        FusedXCCL(die, 1, group, layout, quantize)
    with pytest.raises(DeploymentError, match="needs a kernel"):
        FusedXCCL(die, 0, group, layout)
    with pytest.raises(DeploymentError, match=r"1\.\.48 AIV cores to use, not 49"):
        FusedXCCL(die, 0, group, layout, quantize, Means(49))
    with pytest.raises(DeploymentError, match="the layout is for 3 ranks of 1 experts, the group has 1 of"):
        FusedXCCL(die, 0, Group((0,), (0, 0)), layout, quantize)
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
