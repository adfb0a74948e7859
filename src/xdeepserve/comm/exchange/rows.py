"""Rows of bytes for tokens and answers, as dispatch, combine, A2E and E2A put them into blocks and take them
out."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.channel import Inbox, Outbox
from xdeepserve.comm.checks import check_array
from xdeepserve.comm.exchange.layout import HEADER_DTYPE, Layout
from xdeepserve.errors import AddressError, ProtocolError

HEADER = HEADER_DTYPE.itemsize
Float32: TypeAlias = npt.NDArray[np.float32]
Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]
Rows: TypeAlias = npt.NDArray[np.uint8]


def weighted_sum(slot_out: Float32, topk_weights: Float32) -> Float32:
    """Sum [T, K, H] by weights [T, K] to float32 [T, H], slot by slot, with one rounding per multiply and per
    add."""
    total = np.zeros((slot_out.shape[0], slot_out.shape[2]), np.float32)
    for slot in range(slot_out.shape[1]):
        total += slot_out[:, slot] * topk_weights[:, slot, None]
    return total


class Received(NamedTuple):
    """Token copies for the experts of a rank: grouped by source rank, in it by (token, slot)."""

    payload: npt.NDArray[np.int8] | Float32  # [N, H]
    scale: Float32  # [N]; 1 if not quantised
    expert_idx: Int32  # [N], physical
    token_idx: Int32  # [N], row of x at the source
    slot: Int32  # [N], which of its token's top-k
    num_tokens_per_rank: Int64  # [R], by source; sums to N

    def __len__(self) -> int:
        return len(self.scale)


class TokenCopies(Protocol):
    """Token copies received for a rank's experts, by pull or by push, in the order of that way."""

    @property
    def payload(self) -> npt.NDArray[np.int8] | Float32: ...  # [N, H]

    @property
    def scale(self) -> Float32: ...  # [N]

    @property
    def expert_idx(self) -> Int32: ...  # [N], physical

    def __len__(self) -> int: ...


class SentRows(NamedTuple):
    """Order and counts of the rows sent, so that answers find their places."""

    order: Int64  # [N], the flat (token, slot) of each row sent
    counts: Int64  # [R], rows by destination
    shape: tuple[int, int]  # tokens, top-k


def pack_tokens(
    op: str,
    layout: Layout,
    expert_rank: Int64,
    num_ranks: int,
    payload: npt.NDArray[np.generic],
    scale: Float32,
    topk_idx: Int32,
    chosen: Int64 | None = None,
) -> tuple[Rows, SentRows]:
    """Pack a row per (token, slot), grouped by destination rank; in each group in the order (token, slot).

    payload: [T, H] of the layout's dtype, scale [T], topk_idx [T, K]; `chosen`, if not all of them, are flat
    (token, slot), ascending. Raises AddressError if a block cannot hold its rows.
    """
    num_tokens, top_k = topk_idx.shape
    destination = expert_rank[topk_idx.reshape(-1)]
    if chosen is not None:
        destination = destination[chosen]
    order = np.argsort(destination, kind="stable")
    if chosen is not None:
        order = chosen[order]
    counts = np.bincount(destination, minlength=num_ranks)
    if counts.max() > layout.rows_per_block:
        raise AddressError(
            f"{op}: {counts.max()} rows for rank {counts.argmax()}, whose block holds "
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
    return rows, SentRows(order, counts, (num_tokens, top_k))


def unpack_tokens(layout: Layout, rows: Rows, counts: Int64) -> Received:
    """View pulled rows as token copies; `counts` says how many came from each source."""
    header = rows[:, :HEADER].view(HEADER_DTYPE)[:, 0]
    return Received(
        payload=rows[:, HEADER : HEADER + layout.dispatch_nbytes].view(layout.dispatch_payload),
        scale=header["scale"],
        expert_idx=header["expert_idx"],
        token_idx=header["token_idx"],
        slot=header["slot"],
        num_tokens_per_rank=counts,
    )


def unpack_answers(layout: Layout, rows: Rows, sent: SentRows) -> Float32:
    """Unpack answers to float32 [T, K, H]: row i answers the i-th row sent, and goes back to its (token,
    slot)."""
    num_tokens, top_k = sent.shape
    result = np.empty((num_tokens * top_k, layout.hidden), np.float32)
    result[sent.order] = layout.answers.unpack(rows)
    return result.reshape(num_tokens, top_k, layout.hidden)


def check_tokens(
    op: str,
    layout: Layout,
    num_experts: int,
    x: npt.NDArray[np.generic],
    scale: npt.NDArray[np.generic] | None,
    topk_idx: npt.NDArray[np.generic],
    max_tokens: int | None = None,
) -> None:
    """Check x [T, H], scale [T] (if x is quantised) and topk_idx [T, K]. Raises AddressError if they do not
    fit the layout.

    `max_tokens` is the layout's by default.
    """
    for name, array in (("x", x), ("topk_idx", topk_idx), *([("scale", scale)] if scale is not None else [])):
        check_array(op, name, array)
    max_tokens = max_tokens or layout.max_tokens
    dtype = np.float32 if scale is None else np.int8
    if x.dtype != dtype or x.ndim != 2 or x.shape[1] != layout.hidden or not x.flags.c_contiguous:
        raise AddressError(
            f"{op}: x must be contiguous {np.dtype(dtype)} [T, {layout.hidden}], not {x.dtype} {x.shape}"
        )
    if scale is not None:
        check_scale(op, len(x), layout.quantize, scale)
    if len(x) > max_tokens:
        raise AddressError(f"{op}: {len(x)} tokens exceed the layout's {max_tokens}")
    if topk_idx.dtype != np.int32 or topk_idx.shape != (len(x), layout.top_k):
        expected = f"int32 [{len(x)}, {layout.top_k}]"
        raise AddressError(f"{op}: topk_idx must be {expected}, not {topk_idx.dtype} {topk_idx.shape}")
    if topk_idx.size and not (int(topk_idx.min()) >= 0 and int(topk_idx.max()) < num_experts):
        raise AddressError(f"{op}: topk_idx has values outside the physical experts 0..{num_experts - 1}")
    # With more than one expert a rank, a repeated expert could still fit the block of its rank.
    experts = np.sort(topk_idx, axis=1)
    is_twice = (experts[:, 1:] == experts[:, :-1]).any(axis=1)
    if is_twice.any():
        token = int(is_twice.argmax())
        raise AddressError(f"{op}: token {token} goes to an expert twice: {topk_idx[token].tolist()}")


def check_scale(op: str, num_tokens: int, is_quantised: bool, scale: npt.NDArray[np.generic]) -> None:
    """Check the scale [T] of quantised tokens; the layout must quantise. Raises AddressError if they do not
    fit."""
    if not is_quantised:
        raise AddressError(f"{op}: quantised tokens need a layout with quantize=True")
    if scale.dtype != np.float32 or scale.shape != (num_tokens,):
        raise AddressError(f"{op}: scale must be float32 [{num_tokens}], not {scale.dtype} {scale.shape}")


def check_received(op: str, rank: object, writers: Sequence[object], mine: Int64, received: Received) -> None:
    """Check the experts of received rows: all must be in `mine`, the rank's physical experts, ascending.
    Raises ProtocolError, naming the first writer of others."""
    if not len(received):
        return
    found = received.expert_idx
    if len(mine) and mine[-1] - mine[0] == len(mine) - 1:  # without a gap, as a rule
        is_wrong = (found < mine[0]) | (found > mine[-1])
    else:
        is_wrong = ~np.isin(found, mine)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        writer = int(np.searchsorted(np.cumsum(received.num_tokens_per_rank), row, side="right"))
        raise ProtocolError(
            f"{op}: rank {rank} has the physical experts {mine.tolist()}, but peer {writers[writer]} sends "
            f"it a row for expert {received.expert_idx[row]}: groups must be equal"
        )


def check_answers(
    op: str, layout: Layout, received: Sized | None, expert_out: npt.NDArray[np.generic]
) -> None:
    """Check the answers: expert_out must be contiguous float32 with a row for each received row. Raises
    AddressError if not."""
    check_array(op, "expert_out", expert_out)
    expected = (len(received) if received is not None else 0, layout.hidden)
    if expert_out.dtype != np.float32 or expert_out.shape != expected or not expert_out.flags.c_contiguous:
        found = f"{expert_out.dtype} {expert_out.shape}"
        raise AddressError(f"{op}: expert_out must be contiguous float32 {expected}, not {found}")


# The boxes of one rank of an exchange, for both ways, and what combine needs of the dispatch before it.


class Direction(NamedTuple):
    """Dispatch or combine at a rank: its name in traces and errors, with outbox and inbox."""

    op: str
    outbox: Outbox
    inbox: Inbox


@dataclass
class Boxes:
    """State of dispatch and combine at a rank, beside the die."""

    layout: Layout
    expert_rank: Int64  # of each physical expert
    own_experts: Int64
    num_ranks: int
    dispatch: Direction
    combine: Direction
    sent: SentRows  # by the last dispatch
    received: Received | None = None  # by the last dispatch
