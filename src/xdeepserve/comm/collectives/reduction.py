"""Reductions across ranks, in the one canonical order.

Floating-point addition is not associative, so a sum over ranks needs an order that does not depend on their
number. It is a fixed binary tree of neighbours:

    ranks   0   1   2   3   4   5   6   7
             \\ /     \\ /     \\ /     \\ /
              \\-------/       \\-------/
                  \\---------------/

Row-parallel layers cut K into eight blocks and add the partial products as the same tree, so each of 2 or 4
ranks adds its own blocks first and TP = 1, 2, 4 and 8 give the same bits. In a group whose size is no power
of two, the last of an odd row passes up by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Reduction = Literal["sum", "max"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "max")
Array = npt.NDArray[Any]
DTYPES = ("float32", "int32")
"""What can be reduced."""
TYPES = (
    *DTYPES,
    *("bool", "int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"),
    *("float16", "float64", "complex64", "complex128"),
)
"""What can be sent, in the machine's byte order: peers are told a type as its place here."""
_ADD = {"sum": np.add, "max": np.maximum}


def tree_reduce(parts: Sequence[Array], reduction: Reduction = "sum") -> Array:
    """Reduce equal arrays, given per rank in rank order, by the canonical tree. int32 sums wrap around."""
    row, operator = list(parts), _ADD[reduction]
    while len(row) > 1:
        pairs = [operator(a, b) for a, b in zip(row[::2], row[1::2], strict=False)]
        row = pairs + row[len(row) - len(row) % 2 :]
    return row[0]


def segment(length: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return the bounds of a rank's segment of `length` elements: as equal as possible, in rank order."""
    return length * rank // num_ranks, length * (rank + 1) // num_ranks
