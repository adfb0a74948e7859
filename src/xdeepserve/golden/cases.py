"""Golden cases of the protocols: exchanges of three or four ranks, small enough to read byte by byte.

Inputs come from a seeded Philox generator, so they are the same everywhere. All outputs are exact:
quantisation and sums follow the canonical order (`model.canonical`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.collectives.handle import Collectives
from xdeepserve.comm.collectives.layout import CollectiveLayout
from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.exchange.rows import Received
from xdeepserve.comm.fused.dispatch import FusedReceived
from xdeepserve.comm.fused.handle import FusedXCCL
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.comm.trampoline.a2e import AttentionSide, ExpertSide
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.comm.trampoline.naive import NaiveAttentionSide, NaiveExpertSide
from xdeepserve.golden import expected
from xdeepserve.golden.choices import sparse_attention
from xdeepserve.golden.harness import Done, floats, rng_of, run_case
from xdeepserve.golden.recorder import Arrays, Recorder
from xdeepserve.golden.transfers import distflow, send_receive
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import MemoryPlan
from xdeepserve.model.canonical import quantize_rows

GROUP = Group(dies=(0, 1, 16), expert_rank=(0, 1, 2, 2))  # experts 2 and 3 share rank 2
TOP_K, HIDDEN, EVENT_ID = 2, 8, 7
NUM_TOKENS = (3, 0, 4, 1)  # by rank


class GoldenCase(NamedTuple):
    """A recorded case: a description, and a function to record it.

    The seed of `run(seed)` changes the order in which dies wake up, but no byte.
    """

    description: str
    run: Callable[[int | None], Done]


def expert(expert_idx: int, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Stand in for an expert's network: expert e multiplies by e + 1."""
    return x * np.float32(expert_idx + 1)


def _routing(num_ranks: int = 3) -> Arrays:
    arrays: Arrays = {}
    for rank, num_tokens in enumerate(NUM_TOKENS[:num_ranks]):
        rng = rng_of(rank)
        chosen = [rng.permutation(len(GROUP.expert_rank))[:TOP_K] for _ in range(num_tokens)]
        arrays[f"rank{rank}.x"] = floats(rng, (num_tokens, HIDDEN))
        arrays[f"rank{rank}.topk_idx"] = np.array(chosen, np.int32).reshape(num_tokens, TOP_K)
        arrays[f"rank{rank}.topk_weights"] = np.abs(floats(rng, (num_tokens, TOP_K))) / np.float32(8)
        arrays[f"rank{rank}.shared"] = floats(rng, (num_tokens, HIDDEN))
    return arrays


def _answered(got: Received | FusedReceived) -> Arrays:
    """Collect the arrays a rank has received, with its experts' answers: `expert_out`, a row for each
    received row."""
    received = {f"received.{name}": np.array(value) for name, value in got._asdict().items()}
    tokens = got.payload.astype(np.float32) * got.scale[:, None]
    out = [expert(e, row) for e, row in zip(got.expert_idx.tolist(), tokens, strict=True)]
    return received | {"expert_out": np.array(out, np.float32).reshape(len(got), HIDDEN)}


# ---- dispatch and combine -------------------------------------------------------------------------------


def pull(quantize: bool, seed: int | None) -> Done:
    """Record dispatch and combine (xDeepServe 3.2), with rows in INT8 if `quantize`.

    `seed` sets the order in which dies wake up.
    """
    layout = Layout.for_group(GROUP, max_tokens=4, top_k=TOP_K, hidden=HIDDEN, quantize=quantize)
    inputs = {name: x for name, x in _routing().items() if name.split(".")[1] in ("x", "topk_idx")}

    async def program(die: Die, rank: int, recorder: Recorder) -> Arrays:
        xccl = XCCL(die, rank, GROUP, layout, quantize_rows, on_step=recorder.lockstep)
        x, topk_idx = inputs[f"rank{rank}.x"], inputs[f"rank{rank}.topk_idx"]
        left = _answered(await xccl.dispatch(x, topk_idx, EVENT_ID))
        return left | {"combined": await xccl.combine(left["expert_out"], EVENT_ID)}

    parameters = {"expert_rank": list(GROUP.expert_rank), "event_id": EVENT_ID}
    done = run_case(layout, GROUP.dies, layout.cells(), inputs, program, seed, parameters)
    return expected.verified(done, expected.exchange(inputs, GROUP.expert_rank, expert, quantize))


def push(quantize: bool, seed: int | None) -> Done:
    """Record FusedDispatch and FusedCombine (CloudMatrix384 4.2.1); arguments as for `pull`."""
    layout = FusedLayout.for_group(GROUP, local_batch=4, top_k=TOP_K, hidden=HIDDEN, quantize=quantize)
    inputs = _routing()

    async def program(die: Die, rank: int, recorder: Recorder) -> Arrays:
        xccl = FusedXCCL(die, rank, GROUP, layout, quantize_rows, on_step=recorder.lockstep)
        x, topk_idx, weights, shared = (
            inputs[f"rank{rank}.{name}"] for name in ("x", "topk_idx", "topk_weights", "shared")
        )
        left = _answered(await xccl.dispatch(x, topk_idx, EVENT_ID))
        combined = await xccl.combine(left["expert_out"], weights, EVENT_ID, shared)
        return left | {"combined": combined.copy()}

    parameters = {"expert_rank": list(GROUP.expert_rank), "event_id": EVENT_ID}
    done = run_case(layout, GROUP.dies, layout.cells(), inputs, program, seed, parameters)
    return expected.verified(
        done, expected.exchange(inputs, GROUP.expert_rank, expert, quantize, is_fused=True)
    )


# ---- A2E and E2A ----------------------------------------------------------------------------------------


def a2e(num_attention: int, seed: int | None, is_naive: bool = False) -> Done:
    """Record A2E and E2A, through trampolines or, with `is_naive`, without them.

    Ranks are the attention dies, then the expert dies.
    """
    sides = Sides(tuple(range(32, 32 + num_attention)), GROUP)
    layout = A2ELayout(sides, max_tokens=4, top_k=TOP_K, hidden=HIDDEN)
    dies, num_experts = sides.attention + GROUP.dies, len(GROUP.dies)
    inputs = {name: x for name, x in _routing(num_attention).items() if not name.endswith("shared")}
    participants = {("A2E", step): num_attention for step in (1, 2, 3, 4)}
    attention: type[AttentionSide | NaiveAttentionSide]
    experts: type[ExpertSide | NaiveExpertSide]
    if is_naive:
        attention, plan_attention = NaiveAttentionSide, layout.plan_naive_attention
        experts, plan_expert = NaiveExpertSide, layout.plan_naive_expert
        participants |= {("A2E", step): num_experts for step in (5, 7)}
        participants |= {("E2A", step): num_experts for step in (1, 2, 3, 4)}
        participants |= {("E2A", step): num_attention for step in (5, 7)}
    else:
        attention, plan_attention = AttentionSide, layout.plan_attention
        experts, plan_expert = ExpertSide, layout.plan_expert
        participants |= {(op, step): num_experts for op in ("A2E'", "E2A") for step in range(1, 8)}
        participants |= {("E2A'", step): num_attention for step in (5, 7)}
        trampolines = [("A2E", 5), ("A2E", 7), ("E2A'", 2), ("E2A'", 3), ("E2A'", 4)]
        participants |= dict.fromkeys(trampolines, sides.num_trampolines)

    async def program(die: Die, rank: int, recorder: Recorder) -> Arrays:
        how: dict[str, Any] = {"quantize": quantize_rows, "on_step": recorder.lockstep}
        if rank < num_attention:
            return await _attend(attention(die, rank, layout, **how), inputs)
        return await _serve(experts(die, rank - num_attention, layout, **how))

    def plan(rank: int, memory: MemoryPlan) -> None:
        (plan_attention if rank < num_attention else plan_expert)(memory)

    cells = layout.naive_cells() if is_naive else layout.cells()
    parameters = {"event_id": EVENT_ID}
    done = run_case(layout, dies, cells, inputs, program, seed, parameters, participants, plan)
    return expected.verified(done, expected.a2e(inputs, expert))


async def _attend(side: AttentionSide | NaiveAttentionSide, inputs: Arrays) -> Arrays:
    x, topk_idx, weights = (inputs[f"rank{side.rank}.{name}"] for name in ("x", "topk_idx", "topk_weights"))
    await side.a2e(x, topk_idx, weights, EVENT_ID)
    return {"combined": await side.e2a(EVENT_ID)}


async def _serve(side: ExpertSide | NaiveExpertSide) -> Arrays:
    left = _answered(await side.a2e(EVENT_ID))
    await side.e2a(left["expert_out"], EVENT_ID)
    return left


# ---- collectives ----------------------------------------------------------------------------------------

ROOT = 2


def collective(op: str, seed: int | None) -> Done:
    """Record the collective `op` on four dies of two servers; `seed` as for `pull`."""
    dies = (0, 1, 16, 17)
    layout = CollectiveLayout(num_ranks=len(dies), max_bytes=256)
    inputs: Arrays = {}
    for rank in range(len(dies)):
        rng = rng_of(10 + rank)
        if op == "barrier":
            inputs[f"rank{rank}.event_ids"] = np.array([EVENT_ID, EVENT_ID + 1], np.uint64)
        elif op == "all_to_all":
            for peer in range(len(dies)):
                inputs[f"rank{rank}.to{peer}"] = floats(rng, (int(rng.integers(0, 4)), 4))
        else:
            # Sums whose order shows: magnitudes differ, so roundings do.
            scale = np.float32(10.0) ** rng.integers(-3, 4, (5, 3)).astype(np.float32)
            inputs[f"rank{rank}.x"] = (floats(rng, (5, 3)) * scale).astype(np.float32)

    async def program(die: Die, rank: int, recorder: Recorder) -> Arrays:
        handle, me = Collectives(die, dies, layout, on_step=recorder.lockstep), f"rank{rank}"
        if op == "barrier":
            event_ids = inputs[f"{me}.event_ids"]
            for event_id in event_ids.tolist():
                await handle.barrier(event_id)
            return {"passed": event_ids}
        if op == "all_to_all":
            parts = [inputs[f"{me}.to{peer}"] for peer in range(len(dies))]
            got = await handle.all_to_all(parts, EVENT_ID)
            return {f"from{peer}": part.copy() for peer, part in enumerate(got)}
        if op == "broadcast":
            return {"result": (await handle.broadcast(inputs[f"{me}.x"], ROOT, EVENT_ID)).copy()}
        result = await getattr(handle, op)(inputs[f"{me}.x"], EVENT_ID)
        return {"result": result.copy()}

    parameters = {"op": op, "event_id": EVENT_ID} | ({"root": ROOT} if op == "broadcast" else {})
    done = run_case(layout, dies, layout.cells(), inputs, program, seed, parameters)
    return expected.verified(done, expected.collective(op, inputs, len(dies), ROOT))


CASES = {
    "dispatch-combine-int8": GoldenCase(
        "pull-based dispatch and combine, quantised (XDS 3.2)", partial(pull, True)
    ),
    "dispatch-combine-fp32": GoldenCase(
        "pull-based dispatch and combine, not quantised", partial(pull, False)
    ),
    "fused-int8": GoldenCase("FusedDispatch and FusedCombine, quantised (CM 4.2.1)", partial(push, True)),
    "fused-fp32": GoldenCase("FusedDispatch and FusedCombine, not quantised", partial(push, False)),
    "a2e": GoldenCase("A2E and E2A, two attention dies, three expert dies (XDS 3.3)", partial(a2e, 2)),
    "a2e-wide": GoldenCase("A2E and E2A, four attention dies, three expert dies", partial(a2e, 4)),
    "a2e-naive": GoldenCase(
        "A2E and E2A without trampolines: every attention die posts to every expert die",
        partial(a2e, 2, is_naive=True),
    ),
    "send-receive": GoldenCase("three messages over a ring of two slots (XDS 3.1)", send_receive),
    "send-receive-zero-copy": GoldenCase(
        "three messages that the receiver takes from the sender's buffer",
        partial(send_receive, zero_copy=True),
    ),
    "send-receive-dma": GoldenCase("the same over the ring, by DMA", partial(send_receive, engine="dma")),
    "send-receive-urma": GoldenCase("the same over the ring, by URMA", partial(send_receive, engine="urma")),
    "distflow": GoldenCase("tensors of two dies to two others, cut differently (DeepServe 4.4)", distflow),
    "sparse-attention-int8": GoldenCase(
        "what an indexer chooses, with ties, and what is attended to: BF16 factors, INT8 latents",
        partial(sparse_attention, True),
    ),
    "sparse-attention-fp32": GoldenCase("the same in float32", partial(sparse_attention, False)),
    "barrier": GoldenCase("four ranks, two barriers", partial(collective, "barrier")),
    "broadcast": GoldenCase(f"four ranks, from rank {ROOT}", partial(collective, "broadcast")),
    "all-gather": GoldenCase("four ranks", partial(collective, "all_gather")),
    "all-to-all": GoldenCase("four ranks, different lengths", partial(collective, "all_to_all")),
    "reduce-scatter": GoldenCase(
        "four ranks, sums in canonical order", partial(collective, "reduce_scatter")
    ),
    "all-reduce": GoldenCase("four ranks, sums in canonical order", partial(collective, "all_reduce")),
}
