"""Walkthrough 4: A2E and E2A, where attention and experts live on different dies.

Three attention dies, five expert dies. Instead of telling all five expert dies, an attention die hands its
tokens to one of them, its trampoline, which forwards them (A2E, then A2E'). The answers take the same way
back (E2A, then E2A'). At every step this script shows what moved; in the end it compares with the naive pull.

    python examples/04_a2e_trampoline.py
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.exchange.rows import Received
from xdeepserve.comm.trampoline.a2e import AttentionSide, ExpertSide
from xdeepserve.comm.trampoline.layout import A2ELayout, Sides
from xdeepserve.comm.trampoline.naive import NaiveAttentionSide, NaiveExpertSide
from xdeepserve.comm.wire import FIELD
from xdeepserve.hw.pod import Pod

SIDES = Sides(
    attention=(0, 1, 2),
    experts=Group(dies=(16, 17, 18, 19, 20), expert_rank=(0, 1, 2, 3, 4)),  # expert e on expert die e
)
LAYOUT = A2ELayout(SIDES, max_tokens=2, top_k=2, hidden=8)
TOKENS = [
    np.array([[rank + 1, token + 1, 0.5, -1, 2, -0.25, 0, 1] for token in range(2)], np.float32)
    for rank in range(3)
]
TOPK_IDX = [
    np.array([[0, 3], [4, 1]], np.int32),
    np.array([[3, 4], [2, 0]], np.int32),
    np.array([[4, 3], [1, 2]], np.int32),
]
TOPK_WEIGHTS = [np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)] * 3


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric INT8 with one scale per token."""
    scale = np.abs(x).max(axis=1, initial=0).astype(np.float32) / np.float32(127)
    return np.rint(x / scale[:, None]).astype(np.int8), scale


def title(text: str) -> None:
    print(f"\n--- {text}")


def watch(side: Any, name: str) -> None:
    """Say what each step has done on one die."""

    def on_step(op: str, step: int) -> None:
        now = side.die.clock.now
        if (op, step) == ("A2E", 4):
            print(f"{now:6d} ns  {name}: A2E steps 1-4: tokens in its own memory, and one field posted")
        elif (op, step) == ("A2E", 5):
            region = side.inbox.region
            for field, peer in zip(side.inbox.fields(), side.served, strict=True):
                raw = bytes(side.die.memory.read(region.offset, FIELD.size))
                print(f"{now:6d} ns  {name}: A2E step 5: field {raw[:20].hex(' ', 4)}")
                print(f"            = attention {peer}: event {field.event_id}, {field.num_tokens} tokens")
        elif (op, step) == ("A2E", 7):
            print(f"{now:6d} ns  {name}: A2E steps 6-7: has pulled them, each once")
        elif (op, step) == ("A2E'", 4):
            counts = side.xccl.sent.counts.tolist()
            print(f"{now:6d} ns  {name}: A2E' steps 1-4: forwards {counts} copies to expert dies 0..4")
        elif (op, step) == ("A2E'", 7):
            print(f"{now:6d} ns  {name}: A2E' steps 5-7: has pulled the copies for its experts")
        elif (op, step) == ("E2A", 7):
            print(f"{now:6d} ns  {name}: E2A steps 1-7: answers combined among the expert dies")
        elif (op, step) == ("E2A'", 2):
            print(f"{now:6d} ns  {name}: E2A' steps 1-2: weighted sums of its attention dies' tokens")
        elif (op, step) == ("E2A'", 4):
            print(f"{now:6d} ns  {name}: E2A' steps 3-4: rows written, field posted")
        elif (op, step) == ("E2A'", 7):
            print(f"{now:6d} ns  {name}: E2A' steps 5-7: has pulled one row for each token")

    side.steps.on_step = on_step


async def attention(side: Any) -> np.ndarray:
    """What an attention die runs for one MoE layer."""
    rank = side.rank
    await side.a2e(TOKENS[rank], TOPK_IDX[rank], TOPK_WEIGHTS[rank], event_id=1)
    return await side.e2a(event_id=1)


async def expert(side: Any, is_shown: bool) -> None:
    """What an expert die runs: expert e multiplies by e + 1."""
    received: Received = await side.a2e(event_id=1)
    if is_shown:
        for i in range(len(received)):
            print(
                f"            expert {side.rank} has expert {received.expert_idx[i]}, token "
                f"{received.token_idx[i]} slot {received.slot[i]}, int8 {received.payload[i].tolist()}"
            )
    x = received.payload * received.scale[:, None]
    await side.e2a(x * (received.expert_idx[:, None] + 1).astype(np.float32), event_id=1)


async def exchange(is_naive: bool) -> tuple[Pod, list[np.ndarray]]:
    pod = Pod()
    for die in SIDES.attention:
        (LAYOUT.plan_naive_attention if is_naive else LAYOUT.plan_attention)(pod.plan(die))
    for die in SIDES.experts.dies:
        (LAYOUT.plan_naive_expert if is_naive else LAYOUT.plan_expert)(pod.plan(die))
    pod.materialise()
    kinds: tuple[Any, Any] = (
        (NaiveAttentionSide, NaiveExpertSide) if is_naive else (AttentionSide, ExpertSide)
    )
    sources = [kinds[0](pod.dies[d], rank, LAYOUT, quantize) for rank, d in enumerate(SIDES.attention)]
    targets = [kinds[1](pod.dies[d], rank, LAYOUT, quantize) for rank, d in enumerate(SIDES.experts.dies)]
    if not is_naive:
        watch(sources[0], "attention 0")
        watch(targets[0], "   expert 0")  # attention 0's trampoline
        watch(targets[3], "   expert 3")  # no trampoline
    shown = 3 if not is_naive else -1
    tasks = [side.die.spawn(attention(side)) for side in sources]
    tasks += [side.die.spawn(expert(side, side.rank == shown)) for side in targets]
    results = await asyncio.gather(*tasks)
    return pod, results[: len(sources)]


async def main() -> None:
    title("Who is who")
    for rank, die in enumerate(SIDES.attention):
        print(f"attention {rank} = die {die:2d}: trampoline is expert {SIDES.trampoline(rank)}")
    for rank, die in enumerate(SIDES.experts.dies):
        served = SIDES.served(rank)
        print(
            f"expert {rank}    = die {die:2d}: " + (f"trampoline of {served}" if served else "no trampoline")
        )

    title("One layer, as attention 0, its trampoline expert 0, and expert 3 see it")
    pod, results = await exchange(is_naive=False)

    title("What the attention dies get back: for each token the weighted sum of its experts' answers")
    for rank, result in enumerate(results):
        for token, row in enumerate(result):
            factor = float(TOPK_WEIGHTS[rank][token] @ (TOPK_IDX[rank][token] + 1))
            print(f"attention {rank} token {token} (exactly x {factor}): {row[:4].tolist()} ...")

    title("The naive pull, without trampolines")
    naive_pod, naive = await exchange(is_naive=True)
    print(f"equal bits: {all(a.tobytes() == b.tobytes() for a, b in zip(results, naive, strict=True))}")
    num_experts = SIDES.experts.num_ranks
    print(f"fields that an attention die posts: 1 with trampolines, {num_experts} without")
    print("and in the paper's deployment, 160 attention dies and 288 expert dies: 1, and 288")
    print(f"virtual time of this small example: {pod.clock.now} ns with, {naive_pod.clock.now} ns without:")
    print(
        "trampolines cost a stage, and pay where the few AIV cores that an attention die spares need longer"
    )
    print("for hundreds of fields: at the paper's size, as `xdeepserve bench comm` shows")


if __name__ == "__main__":
    asyncio.run(main())
