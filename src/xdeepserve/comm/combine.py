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
    assert received is not None  # the phase says so
    expected = (len(received), layout.hidden)
    if expert_out.dtype != np.float32 or expert_out.shape != expected or not expert_out.flags.c_contiguous:
        found = f"{expert_out.dtype} {expert_out.shape}"
        raise AddressError(f"combine: expert_out must be contiguous float32 {expected}, not {found}")

    # Step 1: a kernel is launched; MTE2 copies the experts' answers to the unified buffers.
    await die.clock.sleep(die.spec.kernel_ns(0, 0))
    await die.mte.load_view(expert_out.nbytes, name="combine 1 load")
    xccl.step_done("combine", 1)

    # Step 2: no quantisation on the way back, but answers of the int8 recipe travel as bfloat16.
    payload: npt.NDArray[np.generic] = expert_out
    if layout.quantize:
        assert xccl.kernels is not None
        to_bf16 = xccl.kernels.to_bf16
        payload = await die.compute(
            "combine 2 to bf16", lambda: to_bf16(expert_out), flops=expert_out.size, core="aiv", is_fused=True
        )
    xccl.step_done("combine", 2)

    # Step 3: MTE3 writes the rows to the local managed area. They are grouped by source rank already, and a
    # token's answer goes to where the token came from.
    counts = received.num_tokens_per_rank
    payload_nbytes = layout.hidden * layout.combine_payload.itemsize
    rows = np.zeros((len(received), layout.combine_row), np.uint8)
    rows[:, :payload_nbytes] = payload.view(np.uint8)
    pieces = xccl.write_pieces("combine", rows, counts)
    if pieces:
        await die.mte.store(pieces, name="combine 3 write rows", num_accesses=len(rows))
    xccl.step_done("combine", 3)

    # Step 4: tell every rank.
    await xccl.post_fields("combine", event_id, counts)
    xccl.step_done("combine", 4)

    # Step 5: wait until all ranks have told. The second barrier: here the slowest expert is waited for.
    fields = await xccl.wait_for_fields("combine", event_id)
    for peer, (field, sent) in enumerate(zip(fields, xccl.sent_counts.tolist(), strict=True)):
        if field.num_tokens != sent:
            raise ProtocolError(
                f"combine: rank {xccl.rank} sent {sent} rows to peer {peer} in event {event_id}, "
                f"which answers with {field.num_tokens}"
            )
    xccl.step_done("combine", 5)

    # Steps 6-7: pull the answers. Row i answers the i-th row sent: put each back at its (token, slot).
    rows = await xccl.pull("combine", fields, layout.combine_row)
    xccl.step_done("combine", 7)
    answers = np.ascontiguousarray(rows[:, :payload_nbytes]).view(layout.combine_payload)
    if layout.quantize:
        assert xccl.kernels is not None
        answers = xccl.kernels.from_bf16(answers)
    num_tokens, top_k = xccl.sent_shape
    result = np.empty((num_tokens * top_k, layout.hidden), np.float32)
    result[xccl.sent_order] = answers
    return result.reshape(num_tokens, top_k, layout.hidden)
