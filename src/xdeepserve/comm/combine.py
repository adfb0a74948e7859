"""combine: experts' answers go back to where the tokens came from, by dispatch's seven steps (XDS 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import AddressError, ProtocolError

if TYPE_CHECKING:
    from .xccl import XCCL


async def combine(xccl: XCCL, expert_out: npt.NDArray[np.float32], event_id: int) -> npt.NDArray[np.float32]:
    """See `XCCL.combine`."""
    die, layout, received = xccl.die, xccl.layout, xccl.received
    means, step_done = xccl.means, xccl.steps.done
    assert received is not None  # the phase says so
    expected = (len(received), layout.hidden)
    if expert_out.dtype != np.float32 or expert_out.shape != expected or not expert_out.flags.c_contiguous:
        found = f"{expert_out.dtype} {expert_out.shape}"
        raise AddressError(f"combine: expert_out must be contiguous float32 {expected}, not {found}")

    # Step 1: a kernel is launched; MTE2 copies the experts' answers to the unified buffers.
    await die.clock.sleep(die.spec.kernel_ns(0, 0))
    await die.mte.load_view(expert_out.nbytes, means.cores, name="combine 1 load")
    step_done("combine", 1)

    # Step 2: no quantisation on the way back, but answers of the int8 recipe travel as bfloat16.
    payload: npt.NDArray[np.generic] = expert_out
    if layout.quantize:
        assert xccl.kernels is not None
        to_bf16 = xccl.kernels.to_bf16
        payload = await die.compute(
            "combine 2 to bf16",
            lambda: to_bf16(expert_out),
            flops=expert_out.size,
            core="aiv",
            cores=means.cores,
            is_fused=True,
        )
    step_done("combine", 2)

    # Step 3: MTE3 writes the rows to the local managed area. They are grouped by source rank already, and a
    # token's answer goes to where the token came from.
    counts = received.num_tokens_per_rank
    nbytes = layout.combine_nbytes
    rows = np.zeros((len(received), layout.combine_row), np.uint8)
    rows[:, :nbytes] = payload.view(np.uint8)
    await xccl.outboxes["combine"].write(rows, counts, means, "combine 3 write rows")
    step_done("combine", 3)

    # Step 4: tell every rank.
    await xccl.outboxes["combine"].post(event_id, counts, means, "combine 4 post fields")
    step_done("combine", 4)

    # Step 5: wait until all ranks have told. The second barrier: here the slowest expert is waited for.
    inbox = xccl.inboxes["combine"]
    answered = await inbox.wait("combine", event_id, xccl.event_before, means)
    if not np.array_equal(answered, xccl.sent_counts):
        peer = int((answered != xccl.sent_counts).argmax())
        raise ProtocolError(
            f"combine: rank {xccl.rank} sent {xccl.sent_counts[peer]} rows to peer {peer} in event "
            f"{event_id}, which answers with {answered[peer]}"
        )
    step_done("combine", 5)

    # Steps 6-7: pull the answers. Row i answers the i-th row sent: put each back at its (token, slot).
    rows = await inbox.pull("combine", answered, means)
    step_done("combine", 7)
    answers = np.ascontiguousarray(rows[:, :nbytes]).view(layout.combine_payload)
    if layout.quantize:
        assert xccl.kernels is not None
        answers = xccl.kernels.from_bf16(answers)
    num_tokens, top_k = xccl.sent_shape
    result = np.empty((num_tokens * top_k, layout.hidden), np.float32)
    result[xccl.sent_order] = answers
    return result.reshape(num_tokens, top_k, layout.hidden)
