"""Walkthrough 2: dispatch and combine, the seven steps of XCCL over real bytes.

Three ranks, four experts, a handful of tokens. Each token goes to the ranks of its two experts and the
experts' answers come back. At every step this script reads a die's memory and shows what is there.

    python examples/02_dispatch_combine.py
"""

from __future__ import annotations

import asyncio
import textwrap

import numpy as np

from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.comm.exchange.layout import HEADER_DTYPE, Group, Layout
from xdeepserve.comm.wire import FIELD
from xdeepserve.hw.pod import Pod

GROUP = Group(dies=(0, 1, 16), expert_rank=(0, 1, 2, 2))  # experts 2 and 3 share rank 2
LAYOUT = Layout.for_group(GROUP, max_tokens=4, top_k=2, hidden=8, quantize=True)
WATCHED = 2  # the rank whose memory is shown

# What the gate of each rank chose: for each token its two experts and their weights. Rank 1 has no tokens.
TOPK_IDX = [
    np.array([[0, 2], [3, 2], [1, 3]], np.int32),
    np.zeros((0, 2), np.int32),
    np.array([[2, 0]], np.int32),
]
TOPK_WEIGHTS = [np.tile(np.array([0.75, 0.25], np.float32), (len(topk), 1)) for topk in TOPK_IDX]
TOKENS = [
    np.array(
        [[rank + 1, token + 1, 0.5, -1, 2, -0.25, 0, 1] for token in range(len(topk))], np.float32
    ).reshape(-1, 8)
    for rank, topk in enumerate(TOPK_IDX)
]


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric INT8 with one scale per token."""
    scale = np.abs(x).max(axis=1, initial=0).astype(np.float32) / np.float32(127)
    return np.rint(x / scale[:, None]).astype(np.int8), scale


def expert(expert_idx: int, x: np.ndarray) -> np.ndarray:
    """A stand-in for an expert's network: expert e multiplies by e + 1."""
    return x * np.float32(expert_idx + 1)


def title(text: str) -> None:
    print(f"\n--- {text}")


def show_row(row: bytes, op: str) -> str:
    if op == "combine":
        return f"{row[:16].hex(' ', 2)} (8 x bfloat16)"
    header = np.frombuffer(row, HEADER_DTYPE, 1)[0]
    values = np.frombuffer(row, np.int8, LAYOUT.hidden, HEADER_DTYPE.itemsize)
    return (
        f"{row[:16].hex(' ', 4)} | {row[16:24].hex(' ')}\n"
        f"         = expert {header['expert_idx']}, token {header['token_idx']}, slot {header['slot']}, "
        f"scale {header['scale']:.6f}, int8 {values.tolist()}"
    )


class Narrator:
    """Shows one rank's memory when it completes a step."""

    def __init__(self, xccl: XCCL) -> None:
        self.xccl = xccl

    def __call__(self, op: str, step: int) -> None:
        xccl = self.xccl
        clock, memory = xccl.die.clock, xccl.die.memory
        print(f"\n{clock.now:6d} ns  {op} step {'6-7' if step == 7 else step}:", end=" ")
        if step == 1:
            print("kernel launched; MTE2 loaded the rows into the unified buffers")
        elif step == 2:
            print("vector units made INT8 and scales of them" if op == "dispatch" else "rounded to bfloat16")
        elif step == 3:
            print("rows written to the local managed area, one block per destination")
            row_nbytes = LAYOUT.dispatch_row if op == "dispatch" else LAYOUT.combine_row
            counts = xccl.boxes.sent.counts if op == "dispatch" else xccl.received.num_tokens_per_rank
            for peer, count in enumerate(counts):
                offset = xccl.block_offset(op, peer)
                print(f"    block for rank {peer} at {offset}: {count} row(s)")
                for i in range(count):
                    print(f"      {show_row(bytes(memory.read(offset + i * row_nbytes, row_nbytes)), op)}")
        elif step == 4:
            print("one field stored in every rank's metadata, even with nothing to fetch")
        elif step == 5:
            print("all ranks have posted; my metadata area holds")
            region = xccl.region(op, "fields")
            for peer, field in enumerate(xccl.fields(op)):
                raw = bytes(memory.read(region.offset + peer * FIELD.size, FIELD.size))
                print(f"    from rank {peer}: {raw[:16].hex(' ', 8)} {raw[16:20].hex()} {raw[20:].hex()}")
                print(f"      = event {field.event_id}, pointer {field.pointer}, {field.num_tokens} token(s)")
        else:
            print("rows pulled from the peers by MTE2, stored in my app area by MTE3")


async def program(xccl: XCCL) -> np.ndarray:
    """What every rank runs for one MoE layer."""
    rank = xccl.rank
    received = await xccl.dispatch(TOKENS[rank], TOPK_IDX[rank], event_id=1)
    if rank == WATCHED:
        for i in range(len(received)):
            print(
                f"    row {i}: expert {received.expert_idx[i]}, token {received.token_idx[i]} "
                f"slot {received.slot[i]}, "
                f"int8 {received.payload[i].tolist()}"
            )
        print(f"    num_tokens_per_rank = {received.num_tokens_per_rank.tolist()}")
        title(f"The experts of rank {rank} compute; then combine takes their answers back")
    x = received.payload * received.scale[:, None]
    answers = np.array([expert(e, row) for e, row in zip(received.expert_idx, x, strict=True)], np.float32)
    back = await xccl.combine(answers.reshape(x.shape), event_id=1)
    # The weighted sum, in slot order, is the model's business.
    result = np.zeros_like(TOKENS[rank])
    for slot in range(LAYOUT.top_k):
        result += TOPK_WEIGHTS[rank][:, slot, None] * back[:, slot]
    return result


async def main() -> None:
    title("The group and its layout")
    pod = Pod()
    for die in GROUP.dies:
        LAYOUT.plan(pod.plan(die))
    pod.materialise()
    handles = [XCCL(pod.dies[die], rank, GROUP, LAYOUT, quantize) for rank, die in enumerate(GROUP.dies)]
    for xccl in handles:
        experts = [e for e, rank in enumerate(GROUP.expert_rank) if rank == xccl.rank]
        print(f"rank {xccl.rank} = die {xccl.die.name}, experts {experts}, {len(TOKENS[xccl.rank])} token(s)")
    print(
        f"a dispatch row has {LAYOUT.dispatch_row} bytes, a combine row {LAYOUT.combine_row}, "
        f"a field {FIELD.size}"
    )
    print(f"a block holds {LAYOUT.rows_per_block} rows; each die holds {len(pod.memory(0)):,} bytes in all")

    title(f"One exchange, as rank {WATCHED} sees it")
    handles[WATCHED].steps.on_step = Narrator(handles[WATCHED])
    results = await asyncio.gather(*[xccl.die.spawn(program(xccl)) for xccl in handles])

    title("What each rank has in the end: the weighted sum of its experts' answers")
    for rank, result in enumerate(results):
        if not len(result):
            print(f"rank {rank}: no tokens, but it took part")
        for token, (got, x) in enumerate(zip(result, TOKENS[rank], strict=True)):
            exact = sum(
                w * expert(e, x)
                for w, e in zip(TOPK_WEIGHTS[rank][token], TOPK_IDX[rank][token], strict=True)
            )
            error = np.abs(got - exact).max() / np.abs(exact).max()
            head = f"rank {rank} token {token}: "
            print(textwrap.fill(f"{head}{got.tolist()}", 100, subsequent_indent=" " * (len(head) + 1)))
            print(f"  (INT8 and bfloat16 cost {error:.2%})")
    print(f"\ndone at {pod.clock.now} ns of virtual time")


if __name__ == "__main__":
    asyncio.run(main())
