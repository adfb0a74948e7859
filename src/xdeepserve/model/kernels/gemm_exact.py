"""GEMM of exact products: canonical.matmul_exact on packed weights, in BF16 or in float32 (packing.py).

The rows are rounded first, as many at a time as stay in the second-level cache with what they are multiplied
by. Tiles of 4 x 2 vectors where there is room for them, each a chain of even k, one of odd k and their sum:
24 registers. One load of weights gives 32 numbers, and each number of x two multiply-adds; so the
multiply-adds are the limit, from four rows on.

Where tiles are two column groups wide, a thread's last one of an odd number goes with the one before it once
more, or with itself if there is none: that leaves the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xdeepserve.jit.compiling import kernel, part, tile_part
from xdeepserve.model import canonical as c
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels.exact_tiles import (
    EXACT_CHUNK,
    ROWS,
    WIDE,
    add_chunk,
    entering_row,
    factor,
)
from xdeepserve.model.kernels.gemm import PARTIAL_TILES, num_groups
from xdeepserve.model.kernels.gemm_matrix import exact_by_matrix_unit
from xdeepserve.model.kernels.matrix_unit import EXACT_ROWS
from xdeepserve.model.kernels.simd import store
from xdeepserve.model.kernels.tiles import add_tiles, load_tile, store_tile, zeros
from xdeepserve.model.kernels.vector_math import take
from xdeepserve.model.packing import COLUMNS, PAIR

ALONE = 2  # rows that have no need for weights before their turn
NEAR = 1 << 16  # numbers of rounded rows that are computed together


def _exact_tile(mr: int, nr: int) -> Any:
    """Make the kernel of an mr x nr tile of a product in blocks of K, see canonical.matmul_blocked."""

    @tile_part
    def tile(out, o, ldo, x, i, ldx, w, j, ldw, ahead, k_size, num_blocks, partial, count):
        """out[o...] = x[i...] @ w[j...]; `partial` has the sums of blocks that wait for their neighbour."""
        size, acc = mr * nr * COLUMNS, zeros(mr, nr)
        for block in range(num_blocks):
            first, last = k_size * block // num_blocks, k_size * (block + 1) // num_blocks
            acc = zeros(mr, nr)
            for k in range(first, last, EXACT_CHUNK):
                size_k = min(EXACT_CHUNK, last - k)
                acc = add_chunk(acc, x, i + k, ldx, 1, w, j + COLUMNS * k, ldw, ahead, size_k)
            # Blocks 0 and 1 make a pair, it and the pair of 2 and 3 make a pair, ... : a binary counter.
            level, pairs = 0, block
            while pairs & 1:
                waiting = load_tile(mr, nr, partial, level * size, nr * COLUMNS, COLUMNS)
                acc = add_tiles(waiting, acc)
                level += 1
                pairs >>= 1
            if block + 1 < num_blocks:
                store_tile(partial, level * size, nr * COLUMNS, acc, nr * COLUMNS)
        store_tile(out, o, ldo, acc, count)

    return tile


_wide_rows, _wide_2, _wide_1 = (_exact_tile(mr, WIDE) for mr in (ROWS, 2, 1))


@part
def _wide_group(out, o, ldo, x, ldx, rows, w, j, ldw, ahead, k_size, num_blocks, partial, count):
    """Compute all rows of WIDE column groups."""
    m = 0
    while m + ROWS <= rows:
        to, at = o + m * ldo, m * ldx
        _wide_rows(out, to, ldo, x, at, ldx, w, j, ldw, ahead, k_size, num_blocks, partial, count)
        m += ROWS
        ahead = 0
    if m + 2 <= rows:
        to, at = o + m * ldo, m * ldx
        _wide_2(out, to, ldo, x, at, ldx, w, j, ldw, 0, k_size, num_blocks, partial, count)
        m += 2
    if m < rows:
        to, at = o + m * ldo, m * ldx
        _wide_1(out, to, ldo, x, at, ldx, w, j, ldw, 0, k_size, num_blocks, partial, count)


@part
def _round_rows(rounded, width, x, start, ldx, rows, size, w):
    """rounded [rows, width] = the factors of the first `size` of each row from x[start], then zeros."""
    for m in range(rows):
        for i in range(0, size, COLUMNS):
            row = factor(take(x, start + m * ldx + i, size - i))
            store(rounded, m * width + i, entering_row(row, w))
        if size % COLUMNS == 0:
            rounded[m * width + size] = np.float32(0.0)


@kernel
def gemm_exact(out, x, w, k_size, n, num_blocks, batches, x_step, out_step, first, last):
    """Compute `batches` products with a weight each, of all rows and the column groups [first, last). The
    columns start x_step and out_step further right each time."""
    partial = np.empty(PARTIAL_TILES * ROWS * WIDE * COLUMNS, np.float32)
    ldx, ldo, num_rows = x.shape[1], out.shape[1], x.shape[0]
    # Never a multiple of a page, or rows would compete for places in the cache.
    width = (k_size + COLUMNS) // COLUMNS * COLUMNS
    near = max(NEAR // width // ROWS, 1) * ROWS
    rounded = np.empty(min(near, num_rows) * width, np.float32)
    depth = (k_size + PAIR - 1) // PAIR * PAIR if w.itemsize == 2 else k_size
    group = depth * COLUMNS
    per_batch = (n + COLUMNS - 1) // COLUMNS * group
    for b in range(batches):
        if num_rows >= EXACT_ROWS and exact_by_matrix_unit(
            out, b * out_step, x, b * x_step, w, b * per_batch, group, k_size, n, first, last
        ):
            continue
        for m in range(0, num_rows, near):
            rows = min(near, num_rows - m)
            ahead = WIDE * group if rows > ALONE else 0
            _round_rows(rounded, width, x, m * ldx + b * x_step, ldx, rows, k_size, w)
            for g in range(first, last, WIDE):
                at, ldw, count = g, group, n - g * COLUMNS
                if g + WIDE > last:
                    if g > first:
                        at, count = g - 1, n - (g - 1) * COLUMNS
                    else:
                        ldw, count = 0, min(COLUMNS, count)
                j, o = b * per_batch + at * group, m * ldo + b * out_step + at * COLUMNS
                _wide_group(
                    out, o, ldo, rounded, width, rows, w, j, ldw, ahead, k_size, num_blocks, partial, count
                )


def matmul_exact(out: Array, x: Array, w: Array, first: int = 0, last: int | None = None) -> None:
    """out [M, N] = exact products of x [M, K] and w, packed [K, N]; of column groups [first, last) only."""
    n = out.shape[1]
    gemm_exact(out, x, w, x.shape[1], n, 1, 1, 0, 0, first, num_groups(n) if last is None else last)


def matmul_exact_blocked(
    out: Array,
    x: Array,
    w: Array,
    first: int = 0,
    last: int | None = None,
    num_blocks: int = c.TP_BLOCKS,
) -> None:
    """Row-parallel twin of matmul_exact, see gemm.matmul_blocked.

    TypeError if w is not float32: pairs of BF16 need not end where blocks do.
    """
    if w.dtype != np.float32:
        raise TypeError(f"a product in blocks of K takes float32 weights, not {w.dtype}")
    n = out.shape[1]
    last = num_groups(n) if last is None else last
    gemm_exact(out, x, w, x.shape[1], n, num_blocks, 1, 0, 0, first, last)


def matmul_exact_heads(
    out: Array, x: Array, w: Array, heads: int, k_size: int, first: int = 0, last: int | None = None
) -> None:
    """Compute gemm.matmul_heads in exact products: w packed [heads, K, N]."""
    n = out.shape[1] // heads
    last = num_groups(n) if last is None else last
    gemm_exact(out, x, w, k_size, n, 1, heads, x.shape[1] // heads, n, first, last)
