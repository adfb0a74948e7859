"""Walkthrough 16: one exchange by pull and by push, in bytes and in nanoseconds.

xDeepServe's dispatch keeps rows at home, posts where they are, and lets peers pull them (walkthrough 2).
CloudMatrix's FusedDispatch writes each token straight into its reader's buffer, and FusedCombine each answer.
Eight ranks with 32 tokens each, of DeepSeek-R1's width, eight experts a token; then the same way on any
deployment: `xdeepserve generate --deployment colocated --set exchange=push` has the same digest.

    python examples/22_push_and_pull.py
"""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np

from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.fused.handle import FusedXCCL
from xdeepserve.comm.fused.layout import SLOT_DTYPE, FusedLayout
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.trace import Trace
from xdeepserve.progress import working

RANKS, BATCH, TOP_K, HIDDEN, EXPERTS = 8, 32, 8, 7168, 16
GROUP = Group(tuple(range(RANKS)), tuple(e * RANKS // EXPERTS for e in range(EXPERTS)))
PULL = Layout.for_group(GROUP, max_tokens=BATCH, top_k=TOP_K, hidden=HIDDEN)
PUSH = FusedLayout.for_group(GROUP, local_batch=BATCH, top_k=TOP_K, hidden=HIDDEN)
WEIGHTS = np.full((BATCH, TOP_K), 1 / TOP_K, np.float32)
Handle = XCCL | FusedXCCL


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric INT8 with one scale per token."""
    scale = np.abs(x).max(axis=1, initial=0).astype(np.float32) / np.float32(127)
    return np.rint(x / scale[:, None]).astype(np.int8), scale


def tokens(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's tokens [T, H], and their experts [T, K]."""
    rng = np.random.default_rng(rank)
    chosen = np.argsort(rng.random((BATCH, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    return rng.standard_normal((BATCH, HIDDEN)).astype(np.float32), chosen


def show_arrivals(xccl: FusedXCCL) -> None:
    """What FusedDispatch has left in this rank's memory."""
    memory = xccl.die.memory
    flag = np.frombuffer(
        memory.read(xccl.region("flags").offset + xccl.layout.board.field_offset(1, 3), 16), np.uint8
    )
    event, counts = int(flag[:8].view("<u8")[0]), flag[8:16].view("<u4").tolist()
    print(f"  the flag that rank 3 set here: {flag.tobytes().hex(' ', 4)}")
    print(f"    = event {event}, {counts} messages for the experts here")
    block = xccl.region("dispatch").offset + xccl.layout.dispatch_offset(3, 0)
    slot = np.frombuffer(memory.read(block + xccl.layout.slot_offset, SLOT_DTYPE.itemsize), SLOT_DTYPE)[0]
    print(
        f"  its first message, {xccl.layout.dispatch_message} bytes: {HIDDEN} INT8, then a slot of 512 with"
    )
    print(
        f"    scale {slot['scale']:.6f}, from rank {slot['source_rank']}, token {slot['batch_slot']}, "
        f"key {slot['key_offset']}, for expert {slot['expert_idx']}"
    )


async def exchange(way: str) -> tuple[list[np.ndarray], Counter[tuple[str, str]]]:
    """Each rank's sums, and what engines moved by (operation, engine), with the ends of operations."""
    pod = Pod(trace=Trace())
    layout = PUSH if way == "push" else PULL
    for die in GROUP.dies:
        layout.plan(pod.plan(die))
    pod.materialise()
    found: Counter[tuple[str, str]] = Counter()

    async def program(rank: int) -> np.ndarray:
        die, (x, chosen) = pod.dies[rank], tokens(rank)
        xccl: Handle
        if way == "push":
            xccl = FusedXCCL(die, rank, GROUP, PUSH, quantize)
        else:
            xccl = XCCL(die, rank, GROUP, PULL, quantize)
        got = await xccl.dispatch(x, chosen, 1)
        found["dispatch", "ns"] = max(found["dispatch", "ns"], pod.clock.now)
        if isinstance(xccl, FusedXCCL) and rank == 0:
            show_arrivals(xccl)
        answers = got.payload * got.scale[:, None] * (got.expert_idx[:, None] + 1).astype(np.float32)
        start = pod.clock.now
        if isinstance(xccl, FusedXCCL):
            result = (await xccl.combine(answers, WEIGHTS, 1)).copy()
        else:
            back = await xccl.combine(answers, 1)
            result = np.zeros_like(x)
            for slot in range(TOP_K):
                result += WEIGHTS[:, slot, None] * back[:, slot]
        found["combine", "ns"] = max(found["combine", "ns"], pod.clock.now - start)
        return result

    results = await asyncio.gather(*[pod.dies[rank].spawn(program(rank)) for rank in range(RANKS)])
    for span in pod.trace.spans:
        if span.node == 0 and span.lane in ("MTE2", "MTE3") and span.args:
            op = "dispatch" if "dispatch" in span.name else "combine"
            found[op, span.lane] += span.args["bytes"]
    return list(results), found


async def main() -> None:
    print(f"{RANKS} ranks, {BATCH} tokens each, {TOP_K} of {EXPERTS} experts; width {HIDDEN}\n")
    print(f"a row to pull has {PULL.dispatch_row} bytes there and {PULL.combine_row} back;")
    print(f"a message to push {PUSH.dispatch_message} there and {PUSH.combine_message} back\n")
    print("after FusedDispatch, in the memory of rank 0:")
    with working("Exchanging rows"):
        pushed, push = await exchange("push")
        pulled, pull = await exchange("pull")

    print("\nby the engines of rank 0, in MB, and in all:")
    print(f"{'':10}{'MTE2 loads':>14}{'MTE3 stores':>14}{'longest rank':>16}")
    for op in ("dispatch", "combine"):
        for way, found in (("pull", pull), ("push", push)):
            loads, stores = (found[op, lane] / 1e6 for lane in ("MTE2", "MTE3"))
            print(f"{op:>9} {way} {loads:>9.2f}{stores:>14.2f}{found[op, 'ns']:>13} ns")
    print("a copy at a port costs the same either way; push saves a pass of each row through its own die's")
    print("memory, and its combine a meeting of all cores, since each answer has a flag of its own")
    is_equal = all(np.array_equal(a, b) for a, b in zip(pulled, pushed, strict=True))
    print(f"\nthe sums are the same bits: {is_equal}")


if __name__ == "__main__":
    asyncio.run(main())
