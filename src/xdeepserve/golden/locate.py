"""Meaning of each byte in a memory image: its region, the peer's field or row, and the member of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xdeepserve.comm.cells import Cells, members


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
