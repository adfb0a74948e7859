"""`xdeepserve bench comm --ranks`: wall time on this computer of one MoE layer's exchange, by ranks.

A dispatch and a combine run with as many experts as ranks, hidden 64, top-8, INT8. Every byte moves, and
every result is compared with arithmetic that does not use ranks. A2E and E2A are run the same way.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from xdeepserve.bench.report import Row
from xdeepserve.bf16 import round_bf16
from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.exchange.rows import TokenCopies, weighted_sum
from xdeepserve.comm.trampoline.a2e import AttentionSide, ExpertSide
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.die import Die
from xdeepserve.hw.pod import Pod

HIDDEN, TOP_K = 64, 8
EXCHANGES = ((32, 8), (128, 8), (288, 8), (768, 8), (288, 96), (768, 96))  # ranks, tokens of each
A2ES = ((160, 288, 8), (480, 288, 8))  # attention dies, expert dies, tokens


def all_rows() -> list[Row]:
    """Measure all rows in seconds. Raises XDeepServeError if a byte is wrong."""
    rows = []
    for num_ranks, num_tokens in EXCHANGES:
        for name, seconds in exchange(num_ranks, num_tokens).items():
            rows.append(
                Row(f"ranks/exchange/ep={num_ranks}/tokens={num_tokens}/{name}", seconds, "s", "measured")
            )
    for attention, experts, num_tokens in A2ES:
        for name, seconds in a2e(attention, experts, num_tokens).items():
            where = f"ranks/a2e/attention={attention}/experts={experts}/tokens={num_tokens}"
            rows.append(Row(f"{where}/{name}", seconds, "s", "measured"))
    return rows


def exchange(num_ranks: int, num_tokens: int) -> dict[str, float]:
    """Measure wall seconds to allocate the memories, and to dispatch and combine."""
    pod, group = Pod(), Group(tuple(range(num_ranks)), tuple(range(num_ranks)))
    layout = Layout.for_group(group, max_tokens=num_tokens, top_k=TOP_K, hidden=HIDDEN)
    for die in group.dies:
        layout.plan(pod.plan(die))
    allocated = _timed(pod.materialise)
    handles = [XCCL(pod.dies[rank], rank, group, layout, _quantize) for rank in range(num_ranks)]
    inputs = [_inputs(rank, num_tokens, num_ranks) for rank in range(num_ranks)]

    async def program(xccl: XCCL) -> np.ndarray:
        x, topk_idx, _ = inputs[xccl.rank]
        received = await xccl.dispatch(x, topk_idx, 1)
        return await xccl.combine(run_experts(received), 1)

    results, seconds = _run([(xccl.die, partial(program, xccl)) for xccl in handles])
    for result, (x, topk_idx, _) in zip(results, inputs, strict=True):
        _compare(result, _answers(x, topk_idx))
    return {"allocate": allocated, "run": seconds}


def a2e(attention: int, experts: int, num_tokens: int) -> dict[str, float]:
    """Measure wall seconds to allocate the memories, and for A2E and E2A."""
    dies = tuple(range(attention + experts))
    sides = Sides(dies[:attention], Group(dies[attention:], tuple(range(experts))))
    layout, pod = A2ELayout(sides, num_tokens, TOP_K, HIDDEN), Pod()
    for die in dies:
        (layout.plan_attention if die < attention else layout.plan_expert)(pod.plan(die))
    allocated = _timed(pod.materialise)
    sources = [AttentionSide(pod.dies[i], i, layout, _quantize) for i in range(attention)]
    targets = [ExpertSide(pod.dies[attention + i], i, layout, _quantize) for i in range(experts)]
    inputs = [_inputs(rank, num_tokens, experts) for rank in range(attention)]

    async def attend(side: AttentionSide) -> np.ndarray:
        await side.a2e(*inputs[side.rank], 1)
        return await side.e2a(1)

    async def serve(side: ExpertSide) -> None:
        await side.e2a(run_experts(await side.a2e(1)), 1)

    attending = [(side.die, partial(attend, side)) for side in sources]
    results, seconds = _run([*attending, *((side.die, partial(serve, side)) for side in targets)])
    for result, (x, topk_idx, topk_weights) in zip(results, inputs, strict=False):
        _compare(result, weighted_sum(_answers(x, topk_idx), topk_weights))
    return {"allocate": allocated, "run": seconds}


def _inputs(rank: int, num_tokens: int, num_experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw tokens [T, H], experts [T, K] all different within a token, and weights [T, K]."""
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    topk_idx = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :TOP_K].astype(np.int32)
    return x, topk_idx, rng.random((num_tokens, TOP_K)).astype(np.float32)


def _quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(x).max(axis=1, initial=0).astype(np.float32) / np.float32(127)
    return np.rint(x / scale[:, None]).astype(np.int8), scale


def _expert(x: np.ndarray, expert_idx: np.ndarray) -> np.ndarray:
    """Compute a stand-in for an expert whose output depends on its number: x [..., H], expert_idx [...]."""
    return x * (expert_idx[..., None] + 1).astype(np.float32)


def run_experts(received: TokenCopies) -> np.ndarray:
    """Compute a rank's answers to the token copies that it has received."""
    return _expert(received.payload * received.scale[:, None], received.expert_idx)


def _answers(x: np.ndarray, topk_idx: np.ndarray) -> np.ndarray:
    """Compute the expected answers [T, K, H]: INT8 on the way there, bfloat16 on the way back."""
    q, scale = _quantize(x)
    tokens = (q * scale[:, None])[:, None]
    return round_bf16(_expert(np.broadcast_to(tokens, (*topk_idx.shape, HIDDEN)), topk_idx))


def _compare(found: np.ndarray, expected: np.ndarray) -> None:
    if found.tobytes() != expected.tobytes():
        raise XDeepServeError("an exchange returned other bytes than the arithmetic without ranks")


def _timed(call: Callable[[], Any]) -> float:
    gc.collect()  # a pod is full of cycles, and the one before may hold gigabytes
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _run(programs: Sequence[tuple[Die, Callable[[], Any]]]) -> tuple[list[Any], float]:
    """Spawn all programs at once; return their results, and the wall seconds until the last one ended."""

    async def main() -> list[Any]:
        return await asyncio.gather(*[die.spawn(program()) for die, program in programs])

    results: list[Any] = []
    seconds = _timed(lambda: results.extend(asyncio.run(main())))
    return results, seconds
