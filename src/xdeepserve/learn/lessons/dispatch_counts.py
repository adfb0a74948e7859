"""Exercise 2: rows and counts of a dispatch. The story is beside this file."""

from __future__ import annotations

import numpy as np

from xdeepserve.comm.exchange.layout import HEADER_DTYPE, Layout
from xdeepserve.comm.exchange.rows import Float32, Int32, Int64, Rows, SentRows

HEADER = HEADER_DTYPE.itemsize  # bytes; its fields: expert_idx, token_idx, slot, scale


def pack_tokens(
    op: str,
    layout: Layout,
    expert_rank: Int64,
    num_ranks: int,
    payload: np.ndarray,
    scale: Float32,
    topk_idx: Int32,
    chosen: Int64 | None = None,
) -> tuple[Rows, SentRows]:
    """Pack a row for each (token, slot), grouped by destination rank; each group in the order (token, slot).

    op: the operation's name, for errors. expert_rank int64 [E]: the rank of each physical expert.
    payload [T, H], int8 or float32; scale float32 [T]; topk_idx int32 [T, K], physical experts.
    chosen: None for all, else flat (token, slot), ascending int64.
    Returns rows uint8 [N, layout.dispatch_row] and SentRows(order int64 [N], the flat (token, slot) of each
    row; counts int64 [num_ranks]; shape (T, K)). AddressError (xdeepserve.errors) if a rank would get
    more rows than layout.rows_per_block.
    """
    raise NotImplementedError
