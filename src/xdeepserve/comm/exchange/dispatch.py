"""Dispatch: tokens go to the ranks of their top-k experts, pull-based, in seven steps (XDS 3.2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.exchange.rows import (
    Boxes,
    Float32,
    Int32,
    Received,
    check_received,
    pack_tokens,
    unpack_tokens,
)
from xdeepserve.comm.handle import Handle


async def dispatch(
    handle: Handle,
    boxes: Boxes,
    x: npt.NDArray[np.generic],
    scale: Float32 | None,
    topk_idx: Int32,
    event_id: int,
) -> Received:
    """Dispatch on a rank, in seven steps: x [T, H] goes to the ranks of its experts, topk_idx [T, K]."""
    die, means, steps, layout = handle.die, handle.means, handle.steps, boxes.layout
    op, outbox, inbox = boxes.dispatch

    payload, scale = await load_tokens(handle, op, x, scale)

    # Step 3: MTE3 writes one row per (token, slot) to the local managed area, partitioned by destination.
    rows, sent = pack_tokens(op, layout, boxes.expert_rank, boxes.num_ranks, payload, scale, topk_idx)
    await outbox.write(rows, sent.counts, means, f"{op} 3 write rows")
    boxes.sent = sent
    await steps.passed(op, 3)

    # Step 4: tell every rank, also those that get nothing.
    await outbox.post(event_id, sent.counts, means, f"{op} 4 post fields")
    await steps.passed(op, 4)

    # Step 5: wait until all ranks have told. A barrier: here the slowest attention is waited for.
    counts = await inbox.wait(op, event_id, handle.turns.event_before, means, steps.lane)
    await steps.passed(op, 5)

    # Where a row goes follows from all counts, so the cores meet. They need not in combine: a rank knows how
    # many answers will come from whom.
    if counts.any():
        await die.clock.sleep(die.spec.meeting_ns())

    # Steps 6-7: MTE2 pulls the peers' rows, MTE3 writes them to the local app area, in ping-pong.
    rows = await inbox.pull(op, counts, means)
    await steps.passed(op, 7)
    received = unpack_tokens(layout, rows, counts)
    check_received(op, inbox.rank, inbox.names, boxes.own_experts, received)
    boxes.received = received
    return received


async def load_tokens(
    handle: Handle, op: str, x: npt.NDArray[np.generic], scale: Float32 | None
) -> tuple[npt.NDArray[np.generic], Float32]:
    """Steps 1 and 2: load tokens into the unified buffers, and quantise them if the layout wants it and they
    are not yet."""
    die, means, steps = handle.die, handle.means, handle.steps
    # Step 1: a kernel is launched; MTE2 copies the tokens from the app area to the unified buffers.
    await die.clock.sleep(die.spec.kernel_ns(0, 0))
    await die.mte.load_view(x.nbytes, means.cores, f"{op} 1 load", is_running=True)
    await steps.passed(op, 1)

    # Step 2: the vector units quantise each token to INT8 with a scale of its own.
    payload = x
    if (quantize := handle.quantize) is not None and scale is None:
        tokens = x.view(np.float32)
        payload, scale = await handle.work(f"{op} 2 quantise", lambda: quantize(tokens), 4 * x.size)
    if scale is None:
        scale = np.ones(len(x), np.float32)
    await steps.passed(op, 2)
    return payload, scale
