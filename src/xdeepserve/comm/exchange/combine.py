"""Combine: experts' answers go back to the tokens' ranks, by dispatch's seven steps (XDS 3.2)."""

from __future__ import annotations

from functools import partial

import numpy as np

from xdeepserve.comm.exchange.layout import Layout
from xdeepserve.comm.exchange.rows import Boxes, Float32, Int64, Rows, unpack_answers
from xdeepserve.comm.handle import Handle
from xdeepserve.errors import ProtocolError


async def combine(handle: Handle, boxes: Boxes, expert_out: Float32, event_id: int) -> Float32:
    """Combine on a rank: answers [N, H] go back to their tokens' ranks. Returns float32 [T, K, H]."""
    means, steps, layout, received = handle.means, handle.steps, boxes.layout, boxes.received
    op, outbox, inbox = boxes.combine
    assert received is not None  # the phase says so

    rows = await load_answers(handle, op, layout, expert_out)

    # Step 3: MTE3 writes the rows to the local managed area. They are grouped by source rank already, and a
    # token's answer goes to where the token came from.
    counts = received.num_tokens_per_rank
    await outbox.write(rows, counts, means, f"{op} 3 write rows")
    await steps.passed(op, 3)

    # Step 4: tell every rank.
    await outbox.post(event_id, counts, means, f"{op} 4 post fields")
    await steps.passed(op, 4)

    # Step 5: wait until all ranks have told. The second barrier: here the slowest expert is waited for.
    answered = await inbox.wait(op, event_id, handle.turns.event_before, means, steps.lane)
    check_counts(op, inbox.rank, event_id, boxes.sent.counts, answered)
    await steps.passed(op, 5)

    # Steps 6-7: pull the answers.
    rows = await inbox.pull(op, answered, means)
    await steps.passed(op, 7)
    return unpack_answers(layout, rows, boxes.sent)


async def load_answers(handle: Handle, op: str, layout: Layout, expert_out: Float32) -> Rows:
    """Steps 1 and 2: load the experts' answers into the unified buffers, as rows in the format in which they
    travel."""
    die, means, steps = handle.die, handle.means, handle.steps
    # Step 1: a kernel is launched; MTE2 copies the experts' answers to the unified buffers.
    await die.clock.sleep(die.spec.kernel_ns(0, 0))
    await die.mte.load_view(expert_out.nbytes, means.cores, f"{op} 1 load", is_running=True)
    await steps.passed(op, 1)

    # Step 2: answers of the int8 recipe travel as bfloat16, without quantisation, unless the layout says so.
    (name, operations), answers = layout.answers.work, layout.answers
    pack = partial(answers.pack, expert_out, layout.combine_row, handle.quantize)
    if operations:
        rows = await handle.work(f"{op} 2 {name}", pack, operations * expert_out.size)
    else:
        rows = pack()
    await steps.passed(op, 2)
    return rows


def check_counts(op: str, rank: object, event_id: int, sent: Int64, answered: Int64) -> None:
    """Check the numbers of answers: each peer must answer as many rows as it was sent. Raises ProtocolError,
    naming the first that does not."""
    if not np.array_equal(answered, sent):
        peer = int((answered != sent).argmax())
        raise ProtocolError(
            f"{op}: rank {rank} sent {sent[peer]} rows to peer {peer} in event {event_id}, "
            f"which answers with {answered[peer]}"
        )
