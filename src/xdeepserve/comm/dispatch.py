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
    xccl: XCCL,
    x: npt.NDArray[np.float32] | npt.NDArray[np.int8],
    scale: npt.NDArray[np.float32] | None,
    topk_idx: npt.NDArray[np.int32],
    event_id: int,
) -> Received:
    """See `XCCL.dispatch`."""
    die, layout, means, step_done = xccl.die, xccl.layout, xccl.means, xccl.steps.done
    _check_arguments(xccl, x, scale, topk_idx)
    num_tokens, top_k = topk_idx.shape

    # Step 1: a kernel is launched; MTE2 copies the tokens from the app area to the unified buffers.
    await die.clock.sleep(die.spec.kernel_ns(0, 0))
    await die.mte.load_view(x.nbytes, means.cores, name="dispatch 1 load")
    step_done("dispatch", 1)

    # Step 2: the vector units quantise each token to INT8 with a scale of its own.
    payload: npt.NDArray[np.generic] = x
    if layout.quantize and scale is None:
        assert xccl.kernels is not None
        kernel, tokens = xccl.kernels.quantize, x.view(np.float32)
        payload, scale = await die.compute(
            "dispatch 2 quantise",
            lambda: kernel(tokens),
            flops=4 * x.size,
            core="aiv",
            cores=means.cores,
            is_fused=True,
        )
    if scale is None:
        scale = np.ones(num_tokens, np.float32)
    step_done("dispatch", 2)

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
    data = np.ascontiguousarray(payload).view(np.uint8)
    rows[:, HEADER : HEADER + layout.dispatch_nbytes] = data[token_idx]
    await xccl.outboxes["dispatch"].write(rows, counts, means, "dispatch 3 write rows")
    xccl.sent_order, xccl.sent_counts, xccl.sent_shape = order, counts, (num_tokens, top_k)
    step_done("dispatch", 3)

    # Step 4: tell every rank, also those that get nothing.
    await xccl.outboxes["dispatch"].post(event_id, counts, means, "dispatch 4 post fields")
    step_done("dispatch", 4)

    # Step 5: wait until all ranks have told. A barrier: here the slowest attention is waited for.
    inbox = xccl.inboxes["dispatch"]
    received = await inbox.wait("dispatch", event_id, xccl.event_before, means)
    step_done("dispatch", 5)

    # Steps 6-7: MTE2 pulls the peers' rows, MTE3 writes them to the local app area, in ping-pong.
    rows = await inbox.pull("dispatch", received, means)
    step_done("dispatch", 7)
    header = rows[:, :HEADER].view(HEADER_DTYPE)[:, 0]
    xccl.received = Received(
        payload=rows[:, HEADER : HEADER + layout.dispatch_nbytes].view(layout.dispatch_payload),
        scale=header["scale"],
        expert_idx=header["expert_idx"],
        token_idx=header["token_idx"],
        slot=header["slot"],
        num_tokens_per_rank=received,
    )
    return xccl.received


def _check_arguments(
    xccl: XCCL,
    x: npt.NDArray[np.generic],
    scale: npt.NDArray[np.generic] | None,
    topk_idx: npt.NDArray[np.generic],
) -> None:
    layout = xccl.layout
    dtype = np.float32 if scale is None else np.int8
    if scale is not None and not layout.quantize:
        raise AddressError("dispatch: quantised tokens need a layout with quantize=True")
    if x.dtype != dtype or x.ndim != 2 or x.shape[1] != layout.hidden or not x.flags.c_contiguous:
        raise AddressError(
            f"dispatch: x must be contiguous {np.dtype(dtype)} [T, {layout.hidden}], not {x.dtype} {x.shape}"
        )
    if scale is not None and (scale.dtype != np.float32 or scale.shape != x.shape[:1]):
        raise AddressError(f"dispatch: scale must be float32 [{len(x)}], not {scale.dtype} {scale.shape}")
    check_routing("dispatch", len(x), layout.max_tokens, layout.top_k, len(xccl.expert_rank), topk_idx)


def check_routing(
    op: str,
    num_tokens: int,
    max_tokens: int,
    top_k: int,
    num_experts: int,
    topk_idx: npt.NDArray[np.generic],
) -> None:
    """AddressError unless `topk_idx` routes that many tokens to experts that there are."""
    if num_tokens > max_tokens:
        raise AddressError(f"{op}: {num_tokens} tokens exceed the layout's {max_tokens}")
    if topk_idx.dtype != np.int32 or topk_idx.shape != (num_tokens, top_k):
        expected = f"int32 [{num_tokens}, {top_k}]"
        raise AddressError(f"{op}: topk_idx must be {expected}, not {topk_idx.dtype} {topk_idx.shape}")
    if topk_idx.size and not (int(topk_idx.min()) >= 0 and int(topk_idx.max()) < num_experts):
        raise AddressError(f"{op}: topk_idx has values outside the physical experts 0..{num_experts - 1}")
