"""dispatch: tokens go to the ranks of their top-k experts, pull based, in seven steps (XDS 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import AddressError
from .layout import HEADER_DTYPE

if TYPE_CHECKING:
    from .xccl import XCCL

HEADER = HEADER_DTYPE.itemsize


class Received(NamedTuple):
    """N token copies for this rank's experts: grouped by source rank, in it by (token, slot)."""

    payload: npt.NDArray[np.int8] | npt.NDArray[np.float32]  # [N, H]
    scale: npt.NDArray[np.float32]  # [N]; 1 if not quantised
    expert_idx: npt.NDArray[np.int32]  # [N], physical
    token_idx: npt.NDArray[np.int32]  # [N], row of x at the source
    slot: npt.NDArray[np.int32]  # [N], which of its token's top-k
    num_tokens_per_rank: npt.NDArray[np.int64]  # [R], by source; sums to N

    def __len__(self) -> int:
        return len(self.scale)


async def dispatch(
    xccl: XCCL, x: npt.NDArray[np.float32], topk_idx: npt.NDArray[np.int32], event_id: int
) -> Received:
    """See `XCCL.dispatch`."""
    die, layout = xccl.die, xccl.layout
    _check_arguments(xccl, x, topk_idx)
    num_tokens, top_k = topk_idx.shape

    # Step 1: a kernel is launched; MTE2 copies the tokens from the app area to the unified buffers.
    await die.clock.sleep(die.spec.kernel_ns(0, 0))
    await die.mte.load_view(x.nbytes, name="dispatch 1 load")
    xccl.step_done("dispatch", 1)

    # Step 2: the vector units quantise each token to INT8 with a scale of its own.
    payload: npt.NDArray[np.generic]
    if layout.quantize:
        assert xccl.kernels is not None
        quantize = xccl.kernels.quantize
        payload, scale = await die.compute(
            "dispatch 2 quantise", lambda: quantize(x), flops=4 * x.size, core="aiv", is_fused=True
        )
    else:
        payload, scale = x, np.ones(num_tokens, np.float32)
    xccl.step_done("dispatch", 2)

    # Step 3: MTE3 writes one row per (token, slot) to the local managed area, partitioned by destination.
    # A stable sort by destination keeps the order (token, slot) within each block.
    destination = xccl.expert_rank[topk_idx.reshape(-1)]
    order = np.argsort(destination, kind="stable")
    counts = np.bincount(destination, minlength=layout.num_ranks)
    if counts.max() > layout.rows_per_block:
        raise AddressError(
            f"dispatch: {counts.max()} rows for rank {counts.argmax()}, whose block holds "
            f"{layout.rows_per_block}: a token's experts must be different"
        )
    token_idx, slot = np.divmod(order, top_k)
    rows = np.zeros((len(order), layout.dispatch_row), np.uint8)
    header = rows[:, :HEADER].view(HEADER_DTYPE)[:, 0]
    header["expert_idx"] = topk_idx.reshape(-1)[order]
    header["token_idx"] = token_idx
    header["slot"] = slot
    header["scale"] = scale[token_idx]
    rows[:, HEADER : HEADER + layout.hidden * payload.itemsize] = np.ascontiguousarray(payload).view(
        np.uint8
    )[token_idx]
    pieces = xccl.write_pieces("dispatch", rows, counts)
    if pieces:
        await die.mte.store(pieces, name="dispatch 3 write rows", num_accesses=len(rows))
    xccl.sent_order, xccl.sent_counts, xccl.sent_shape = order, counts, (num_tokens, top_k)
    xccl.step_done("dispatch", 3)

    # Step 4: tell every rank, also those that get nothing.
    await xccl.post_fields("dispatch", event_id, counts)
    xccl.step_done("dispatch", 4)

    # Step 5: wait until all ranks have told. A barrier: here the slowest attention is waited for.
    fields = await xccl.wait_for_fields("dispatch", event_id)
    xccl.step_done("dispatch", 5)

    # Steps 6-7: MTE2 pulls the peers' rows, MTE3 writes them to the local app area, in ping-pong.
    rows = await xccl.pull("dispatch", fields, layout.dispatch_row)
    xccl.step_done("dispatch", 7)
    header = rows[:, :HEADER].view(HEADER_DTYPE)[:, 0]
    xccl.received = Received(
        payload=rows[:, HEADER : HEADER + layout.hidden * payload.itemsize].view(layout.dispatch_payload),
        scale=header["scale"],
        expert_idx=header["expert_idx"],
        token_idx=header["token_idx"],
        slot=header["slot"],
        num_tokens_per_rank=np.array([field.num_tokens for field in fields], np.int64),
    )
    return xccl.received


def _check_arguments(xccl: XCCL, x: npt.NDArray[np.float32], topk_idx: npt.NDArray[np.int32]) -> None:
    layout = xccl.layout
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != layout.hidden or not x.flags.c_contiguous:
        raise AddressError(
            f"dispatch: x must be contiguous float32 [T, {layout.hidden}], not {x.dtype} {x.shape}"
        )
    if len(x) > layout.max_tokens:
        raise AddressError(f"dispatch: {len(x)} tokens exceed the layout's {layout.max_tokens}")
    if topk_idx.dtype != np.int32 or topk_idx.shape != (len(x), layout.top_k):
        expected = f"int32 [{len(x)}, {layout.top_k}]"
        raise AddressError(f"dispatch: topk_idx must be {expected}, not {topk_idx.dtype} {topk_idx.shape}")
    num_experts = len(xccl.expert_rank)
    if topk_idx.size and not 0 <= topk_idx.min() <= topk_idx.max() < num_experts:
        raise AddressError(f"dispatch: topk_idx has values outside the physical experts 0..{num_experts - 1}")
