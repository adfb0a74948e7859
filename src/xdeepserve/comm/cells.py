"""Cells: the fields and rows of which a region of a memory is made.

A layout's `cells()` maps its regions to them, so that images of a die's memory can be read in words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NO_HEADER = np.dtype([])


class Cells(NamedTuple):
    """A region seen as an array of `dtype`, possibly a struct; `dims` has the names and lengths of its
    axes."""

    dtype: np.dtype[Any]
    dims: tuple[tuple[str, int], ...]


def members(dtype: np.dtype[Any]) -> dict[str, tuple[np.dtype[Any], int]]:
    """Map the members of a struct to their types and offsets in bytes; empty for a plain type."""
    return {name: field[:2] for name, field in (dtype.fields or {}).items()}


def row_dtype(
    header: np.dtype[Any], payload: npt.DTypeLike, hidden: int, header_at: int, itemsize: int
) -> np.dtype[Any]:
    """Build the struct of a row: a header at `header_at` and a payload of `hidden` elements, padded to
    `itemsize` bytes."""
    inner = members(header)
    dtype: Any = {
        "names": [*inner, "payload"],
        "formats": [*(this for this, _ in inner.values()), (payload, (hidden,))],
        "offsets": [*(header_at + first for _, first in inner.values()), 0 if header_at else header.itemsize],
        "itemsize": itemsize,
    }
    return np.dtype(dtype)
