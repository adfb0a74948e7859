"""Meaning of each byte in a memory image: its region, the peer's field or row, and the member of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.collectives.layout import COLLECTIVE_FIELD, CollectiveLayout
from xdeepserve.comm.exchange.layout import HEADER_DTYPE, Layout
from xdeepserve.comm.fused.layout import SLOT_DTYPE, FusedLayout
from xdeepserve.comm.p2p.layout import RingLayout
from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.comm.wire import FIELD_DTYPE, Blocks

RING_FIELD_DTYPE = np.dtype(
    [
        ("event_id", "<u8"),
        ("chunk_id", "<u8"),
        ("pointer", "<u8"),
        ("nbytes", "<u4"),
        ("num_cores", "<u2"),
        ("mode", "<u2"),
    ]
)


class Cells(NamedTuple):
    """A region seen as an array of `dtype`, possibly a struct; `dims` has the names and lengths of its
    axes."""

    dtype: np.dtype[Any]
    dims: tuple[tuple[str, int], ...]


def members(dtype: np.dtype[Any]) -> dict[str, tuple[np.dtype[Any], int]]:
    """Map the members of a struct to their types and offsets in bytes; empty for a plain type."""
    return {name: field[:2] for name, field in (dtype.fields or {}).items()}


class ManifestRegion(NamedTuple):
    """A region of a memory area, as the manifest describes it."""

    area: str
    name: str
    offset: int
    nbytes: int
    cells: Cells


def locate(regions: Sequence[ManifestRegion], area: str, offset: int) -> tuple[str, slice, np.dtype[Any]]:
    """Find the element at byte `offset` of an area.

    Returns its name in words, its bytes within the area, and the type to read them with.
    """
    for region in regions:
        if region.area == area and region.offset <= offset < region.offset + region.nbytes:
            return _within(region, offset - region.offset)
    return f"{area} byte {offset}, between regions", slice(offset, offset + 1), np.dtype(np.uint8)


def _within(region: ManifestRegion, offset: int) -> tuple[str, slice, np.dtype[Any]]:
    dtype, dims = region.cells
    index, inner = divmod(offset, dtype.itemsize)
    words = [region.name]
    for (name, _), i in zip(dims, np.unravel_index(index, [n for _, n in dims]), strict=True):
        words.append(f"{name} {i}")
    start = region.offset + index * dtype.itemsize
    member, member_dtype, member_start = "", dtype, 0
    if dtype.names is not None:
        member, member_dtype, member_start = "padding", np.dtype(np.uint8), inner
        for name, (this, first) in members(dtype).items():
            if first <= inner < first + this.itemsize:
                member, member_dtype, member_start = name, this, first
    if member_dtype.subdtype is not None:
        base, _ = member_dtype.subdtype
        element = (inner - member_start) // base.itemsize
        member += f"[{element}]"
        member_start += element * base.itemsize
        member_dtype = base
    if member:
        words.append(member)
    start += member_start
    return ", ".join(words), slice(start, start + member_dtype.itemsize), member_dtype


# ---- the layouts ----------------------------------------------------------------------------------------


def _row(header: np.dtype[Any], payload: npt.DTypeLike, hidden: int, header_at: int, itemsize: int) -> Any:
    """Build the struct of a row: a header at `header_at` and a payload of `hidden` elements, padded to
    `itemsize` bytes."""
    inner = members(header)
    names, formats = list(inner), [this for this, _ in inner.values()]
    offsets = [header_at + first for _, first in inner.values()]
    payload_at = 0 if header_at else header.itemsize
    return np.dtype(
        {
            "names": [*names, "payload"],
            "formats": [*formats, (payload, (hidden,))],
            "offsets": [*offsets, payload_at],
            "itemsize": itemsize,
        }
    )


NO_HEADER = np.dtype([])


def exchange_cells(layout: Layout) -> dict[str, Cells]:
    """Map the regions of dispatch and combine to their cells."""
    row = _row(HEADER_DTYPE, layout.dispatch_payload, layout.hidden, 0, layout.dispatch_row)
    answer = _row(NO_HEADER, layout.combine_payload, layout.hidden, 0, layout.combine_row)
    return _block_cells(layout.dispatch, row, "peer") | _block_cells(layout.combine, answer, "peer")


def _block_cells(blocks: Blocks, dtype: np.dtype[Any], reader: str = "reader") -> dict[str, Cells]:
    """Map the regions of a direction to cells with rows of `dtype`; `reader` is what its writers call their
    peers."""
    return {
        blocks.region("fields"): Cells(FIELD_DTYPE, (("peer", blocks.num_writers),)),
        blocks.region("blocks"): Cells(dtype, ((reader, blocks.num_readers), ("row", blocks.rows_per_block))),
        blocks.region("rows"): Cells(dtype, (("row", blocks.max_rows),)),
    }


def a2e_cells(layout: A2ELayout) -> dict[str, Cells]:
    """Map the regions of A2E's first stage, E2A's second, and the exchange among expert dies to cells."""
    result = exchange_cells(layout.experts)
    for blocks, row in ((layout.tokens, layout.token_dtype), (layout.answers, layout.answer_dtype)):
        inner = members(row)
        dtype = np.dtype(
            {
                "names": list(inner),
                "formats": [this for this, _ in inner.values()],
                "offsets": [first for _, first in inner.values()],
                "itemsize": blocks.row_nbytes,
            }
        )
        result |= _block_cells(blocks, dtype)
    return result


def a2e_naive_cells(layout: A2ELayout) -> dict[str, Cells]:
    """Map the regions of A2E and E2A without trampolines to cells: rows as in dispatch and combine."""
    rows = exchange_cells(layout.naive)
    tokens, answers = layout.naive.dispatch.region("rows"), layout.naive.combine.region("rows")
    return _block_cells(layout.naive_tokens, rows[tokens].dtype) | _block_cells(
        layout.naive_answers, rows[answers].dtype
    )


def fused_cells(layout: FusedLayout) -> dict[str, Cells]:
    """Map the regions of FusedDispatch and FusedCombine to their cells."""
    ranks, payload = layout.num_ranks, layout.dispatch_payload
    message = _row(SLOT_DTYPE, payload, layout.hidden, layout.slot_offset, layout.dispatch_message)
    answer = _row(NO_HEADER, layout.combine_payload, layout.hidden, 0, layout.combine_message)
    answers = layout.combine_buffer // layout.combine_message
    hidden = ("element", layout.hidden)
    return {
        layout.region("flags"): Cells(layout.flag_dtype, (("set", 2), ("peer", ranks))),
        layout.region("token_flags"): Cells(np.dtype("<u4"), (("token", layout.local_batch),)),
        layout.region("dispatch"): Cells(message, (("peer", ranks), ("message", layout.max_tokens))),
        layout.region("combine"): Cells(answer, (("answer", answers),)),
        layout.region("output"): Cells(payload, (("row", layout.capacity), hidden)),
        layout.region("output_slots"): Cells(SLOT_DTYPE, (("row", layout.capacity),)),
        layout.region("combined"): Cells(np.dtype("<f4"), (("token", layout.local_batch), hidden)),
    }


def collective_cells(layout: CollectiveLayout) -> dict[str, Cells]:
    """Map the regions of a collective to their cells."""
    byte = np.dtype(np.uint8)
    staging = layout.staging_nbytes
    return {
        layout.region("fields"): Cells(COLLECTIVE_FIELD, (("set", 2), ("peer", layout.num_ranks))),
        layout.region("staging"): Cells(byte, (("set", 2), ("byte", staging))),
        layout.region("pulled"): Cells(byte, (("byte", layout.pulled_nbytes),)),
        layout.region("result"): Cells(byte, (("byte", staging),)),
    }


def ring_cells(layout: RingLayout) -> dict[str, Cells]:
    fields = Cells(RING_FIELD_DTYPE, (("peer", layout.num_ranks), ("core", layout.num_cores)))
    dims = (("peer", layout.num_ranks), ("slot", layout.num_slots), ("byte", layout.slot_nbytes))
    return {
        layout.region("tails"): fields,
        layout.region("acks"): fields,
        layout.region("rings"): Cells(np.dtype(np.uint8), dims),
    }
