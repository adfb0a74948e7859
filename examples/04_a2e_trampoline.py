"""Walkthrough 4: A2E and E2A, where attention and experts live on different dies.

Three attention dies, five expert dies. Instead of telling all five expert dies, an attention die hands its
tokens to one of them, its trampoline, which forwards them (A2E, then A2E'). The answers take the same way
back (E2A, then E2A'). At every step this script shows what moved, and of each of the four stages the bytes
of one field and one row, as they lie in their reader's memory; in the end it compares with the naive pull.

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
from xdeepserve.comm.wire import FIELD, Blocks
from xdeepserve.hw.pod import Pod
from xdeepserve.jit.bf16 import from_bf16

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


def raw(side: Any, area: str, region: str, start: int, nbytes: int) -> bytes:
    """Bytes of a region of a die's own memory."""
    memory = side.die.memory
    return bytes(memory.read(getattr(memory, area).regions[region].offset + start, nbytes))


def show_field(side: Any, blocks: Blocks, writer: int, who: str) -> None:
    """The 32 bytes of a writer's field: event ID, pointer, number of tokens, and room to spare."""
    data = raw(side, "metadata", blocks.region("fields"), blocks.field_offset(writer), FIELD.size)
    event_id, pointer, tokens = FIELD.unpack(data)
    print(f"            field {data.hex(' ', 4)}")
    print(f"            = {who}: event {event_id}, {tokens} tokens, at {pointer} in the writer's memory")


def show_row(side: Any, blocks: Blocks, *parts: tuple[str, str, int]) -> None:
    """The first row that was pulled, part by part: (meaning, dtype, how many); the rest is padding."""
    data = raw(side, "app", blocks.region("rows"), 0, blocks.row_nbytes)
    shown, said, at = [], [], 0
    for meaning, dtype, count in parts:
        values = np.frombuffer(data, dtype, count, at)
        at += values.nbytes
        shown.append(values.tobytes().hex(" ", 4))
        numbers = from_bf16(values) if meaning == "bfloat16" else values
        said.append(f"{meaning} {[round(each, 6) for each in numbers.tolist()]}")
    print(f"            row   {' | '.join(shown)}")
    for line in said:
        print(f"            = {line}")
    print(f"            and {len(data) - at} bytes of padding")


def watch(side: Any, name: str) -> None:
    """Say what each step has done on one die."""
    experts = LAYOUT.experts

    def on_step(op: str, step: int) -> None:
        now = side.die.clock.now
        if (op, step) == ("A2E", 4):
            print(f"{now:6d} ns  {name}: A2E steps 1-4: tokens in its own memory, and one field posted")
        elif (op, step) == ("A2E", 5):
            print(f"{now:6d} ns  {name}: A2E step 5: has seen the field of its attention die")
            show_field(side, LAYOUT.tokens, 0, f"attention {side.served[0]}")
        elif (op, step) == ("A2E", 7):
            print(f"{now:6d} ns  {name}: A2E steps 6-7: has pulled them, each once")
            routing = ("experts", "<i4", LAYOUT.top_k), ("weights", "<f4", LAYOUT.top_k)
            show_row(side, LAYOUT.tokens, *routing, ("scale", "<f4", 1), ("int8", "<i1", LAYOUT.hidden))
        elif (op, step) == ("A2E'", 4):
            counts = side.xccl.boxes.sent.counts.tolist()
            says = f"forwards {counts} copies to expert dies 0..4"
            if not any(counts):
                says = "serves nobody, posts 'nothing for you' at expert dies 0..4"
            print(f"{now:6d} ns  {name}: A2E' steps 1-4: {says}")
        elif (op, step) == ("A2E'", 7):
            print(f"{now:6d} ns  {name}: A2E' steps 5-7: has pulled the copies for its experts")
            if not side.is_trampoline:
                show_field(side, experts.dispatch, 0, "expert 0, a trampoline")
                header = ("expert, token, slot", "<i4", 3), ("scale", "<f4", 1)
                show_row(side, experts.dispatch, *header, ("int8", "<i1", LAYOUT.hidden))
        elif (op, step) == ("E2A", 7):
            print(f"{now:6d} ns  {name}: E2A steps 1-7: answers combined among the expert dies")
            if side.is_trampoline:
                show_field(side, experts.combine, 3, "expert 3")
                show_row(side, experts.combine, ("bfloat16", "<u2", LAYOUT.hidden))
        elif (op, step) == ("E2A'", 2):
            print(f"{now:6d} ns  {name}: E2A' steps 1-2: weighted sums of its attention dies' tokens")
        elif (op, step) == ("E2A'", 4):
            print(f"{now:6d} ns  {name}: E2A' steps 3-4: rows written, field posted")
        elif (op, step) == ("E2A'", 7):
            print(f"{now:6d} ns  {name}: E2A' steps 5-7: has pulled one row for each token")
            show_field(side, LAYOUT.answers, 0, "expert 0, its trampoline")
            show_row(side, LAYOUT.answers, ("float32", "<f4", LAYOUT.hidden))

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
