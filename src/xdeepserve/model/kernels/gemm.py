"""GEMM on packed weights: float32 in canonical order. INT8: see gemm_int8.py, exact products: gemm_exact.py.

A kernel walks over the column groups [first, last) of the result, and for each over the rows in tiles, so
that a group's weights stay in the caches while all rows use them. During the first tile those of the group
that follows are asked for, so that their way from memory takes no time of its own. With FEW_F32 rows there is
nothing else to do meanwhile, and the CPU foresees by itself what is read from first to last as it lies. A row
alone has SIDE_BY_SIDE groups at a time, or each of its additions would wait for the one before.

Other tiles have up to 8 x 1 vectors, as many rows as the registers hold: a sum is a multiplication and an
addition, and a vector load takes the place of one of them, but for those inside a multiplication, as the
numbers of x are. CHUNK weights of each column come at a time, so that they and the rows' part stay in the
innermost caches; sums wait in memory between chunks, which changes no bit.

Threads can share a GEMM by column groups, each of which is read by one of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xdeepserve.jit.compiling import kernel, part, tile_part
from xdeepserve.model import canonical as c
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels.simd import prefetch
from xdeepserve.model.kernels.tiles import TALLEST, add_outer, add_tiles, load_tile, store_tile, zeros
from xdeepserve.model.packing import COLUMNS

F32_ROWS = min(8, TALLEST)
CHUNK = 1024  # rows of weights, if there is more than one tile of rows to use them
FEW_F32 = 1  # rows that have no need for weights before their turn
SIDE_BY_SIDE = 4  # column groups of one row
ALL_ROWS = np.empty(0, np.int32)  # `bounds` of a GEMM that is not grouped by rows
PARTIAL_TILES = 3  # sums of a tree over canonical.TP_BLOCKS blocks that wait for their neighbour at a time


@tile_part
def _add_products(acc, x, i, ldx, w, j, ahead, first, last):
    """acc[r] += x[i + r * ldx + k] * w[j + COLUMNS * k ...] for each k of [first, last) in turn.

    What lies `ahead` of each is asked for.
    """
    for k in range(first, last):
        prefetch(w, j + COLUMNS * k + ahead)
        acc = add_outer(acc, x, i + k, ldx, w, j + COLUMNS * k, 0)
    return acc


def _f32_tile(mr: int) -> Any:
    """Make the kernel of an mr x 1 tile, which continues the sums of earlier chunks. mr is a constant."""

    @tile_part
    def tile(out, o, ldo, x, i, ldx, w, j, ahead, first, last, k_size, sums, s, count):
        """out[o...] = x[i...] @ w[j...] over the k of [first, last) of k_size; see `tiles` for strides.

        `sums` has the tile's sums at s until all are done.
        """
        acc = zeros(mr, 1)
        if first > 0:
            acc = load_tile(mr, 1, sums, s, COLUMNS, COLUMNS)
        acc = _add_products(acc, x, i, ldx, w, j, ahead, first, last)
        if last < k_size:
            store_tile(sums, s, COLUMNS, acc, COLUMNS)
        else:
            store_tile(out, o, ldo, acc, count)

    return tile


@tile_part
def _f32_row(out, o, x, i, w, j, ldw, k_size, count):
    """out[o...] = x[i...] @ w[j...]: one row, SIDE_BY_SIDE groups, ldw apart."""
    acc = zeros(1, SIDE_BY_SIDE)
    for k in range(k_size):
        acc = add_outer(acc, x, i + k, 0, w, j + COLUMNS * k, ldw)
    store_tile(out, o, 0, acc, count)


def _f32_tree_tile(mr: int) -> Any:
    """Make the kernel of an mr x 1 tile of a product in blocks of K, see canonical.matmul_blocked."""

    @tile_part
    def tile(out, o, ldo, x, i, ldx, w, j, ahead, k_size, num_blocks, partial, count):
        """out[o...] = x[i...] @ w[j...]; `partial` has the sums of blocks that wait for their neighbour."""
        acc = zeros(mr, 1)
        for block in range(num_blocks):
            first, last = k_size * block // num_blocks, k_size * (block + 1) // num_blocks
            acc = _add_products(zeros(mr, 1), x, i, ldx, w, j, ahead, first, last)
            # Blocks 0 and 1 make a pair, it and the pair of 2 and 3 make a pair, ... : a binary counter.
            level, pairs = 0, block
            while pairs & 1:
                acc = add_tiles(load_tile(mr, 1, partial, level * mr * COLUMNS, COLUMNS, COLUMNS), acc)
                level += 1
                pairs >>= 1
            if block + 1 < num_blocks:
                store_tile(partial, level * mr * COLUMNS, COLUMNS, acc, COLUMNS)
        store_tile(out, o, ldo, acc, count)

    return tile


_f32_rows, _f32_4, _f32_2, _f32_1 = (_f32_tile(mr) for mr in (F32_ROWS, 4, 2, 1))
_tree_rows, _tree_4, _tree_2, _tree_1 = (_f32_tree_tile(mr) for mr in (F32_ROWS, 4, 2, 1))


@part
def _f32_group(out, o, ldo, x, i, ldx, rows, w, j, ahead, first, last, k_size, sums, count):
    """Compute all rows of a column group, over the k of [first, last)."""
    m = 0
    while m + F32_ROWS <= rows:
        to, at, s = o + m * ldo, i + m * ldx, m * COLUMNS
        _f32_rows(out, to, ldo, x, at, ldx, w, j, ahead, first, last, k_size, sums, s, count)
        m += F32_ROWS
        ahead = 0
    if m + 4 <= rows:
        to, at, s = o + m * ldo, i + m * ldx, m * COLUMNS
        _f32_4(out, to, ldo, x, at, ldx, w, j, ahead, first, last, k_size, sums, s, count)
        m += 4
        ahead = 0
    if m + 2 <= rows:
        to, at, s = o + m * ldo, i + m * ldx, m * COLUMNS
        _f32_2(out, to, ldo, x, at, ldx, w, j, ahead, first, last, k_size, sums, s, count)
        m += 2
    if m < rows:
        to, at, s = o + m * ldo, i + m * ldx, m * COLUMNS
        _f32_1(out, to, ldo, x, at, ldx, w, j, 0, first, last, k_size, sums, s, count)


@part
def _tree_group(out, o, ldo, x, i, ldx, rows, w, j, ahead, k_size, num_blocks, partial, count):
    """Compute a column group for `rows` rows whose sums are made in `num_blocks` blocks and added as a
    tree."""
    m = 0
    while m + F32_ROWS <= rows:
        to, at = o + m * ldo, i + m * ldx
        _tree_rows(out, to, ldo, x, at, ldx, w, j, ahead, k_size, num_blocks, partial, count)
        m += F32_ROWS
        ahead = 0
    if m + 4 <= rows:
        to, at = o + m * ldo, i + m * ldx
        _tree_4(out, to, ldo, x, at, ldx, w, j, ahead, k_size, num_blocks, partial, count)
        m += 4
        ahead = 0
    if m + 2 <= rows:
        to, at = o + m * ldo, i + m * ldx
        _tree_2(out, to, ldo, x, at, ldx, w, j, ahead, k_size, num_blocks, partial, count)
        m += 2
    if m < rows:
        to, at = o + m * ldo, i + m * ldx
        _tree_1(out, to, ldo, x, at, ldx, w, j, 0, k_size, num_blocks, partial, count)


@part
def f32_columns(out, o, x, i, rows, w, j, k_size, sums, n, first, last):
    """Multiply `rows` rows x[i ...] by the column groups [first, last) of the weights at w[j ...], into out[o
    ...]."""
    ldx, ldo, group = x.shape[1], out.shape[1], k_size * COLUMNS
    ahead, chunk = group if rows > FEW_F32 else 0, CHUNK if rows > F32_ROWS else k_size
    while rows == 1 and first + SIDE_BY_SIDE <= last:
        at, to, count = j + first * group, o + first * COLUMNS, n - first * COLUMNS
        _f32_row(out, to, x, i, w, at, group, k_size, count)
        first += SIDE_BY_SIDE
    for g in range(first, last):
        at, to, count = j + g * group, o + g * COLUMNS, n - g * COLUMNS
        for k in range(0, k_size, chunk):
            until = min(k + chunk, k_size)
            _f32_group(out, to, ldo, x, i, ldx, rows, w, at, ahead, k, until, k_size, sums, count)


@kernel
def gemm_f32(out, x, w, k_size, n, num_blocks, batches, x_step, out_step, bounds, first, last):
    """Compute `batches` products with a weight each: of the rows between two bounds, or of all rows. Without
    bounds, the columns start x_step and out_step further right each time."""
    partial = np.empty(PARTIAL_TILES * F32_ROWS * COLUMNS, np.float32)
    sums = np.empty(x.shape[0] * COLUMNS, np.float32)
    ldx, ldo = x.shape[1], out.shape[1]
    group = k_size * COLUMNS
    per_batch = (n + COLUMNS - 1) // COLUMNS * group
    for b in range(batches):
        start, stop = 0, x.shape[0]
        if bounds.size > 0:
            start, stop = bounds[b], bounds[b + 1]
        rows = stop - start
        if rows == 0:
            continue
        i, o, w_at = start * ldx + b * x_step, start * ldo + b * out_step, b * per_batch
        if num_blocks == 1:
            f32_columns(out, o, x, i, rows, w, w_at, k_size, sums, n, first, last)
            continue
        ahead = group if rows > FEW_F32 else 0
        for g in range(first, last):
            j, to, count = w_at + g * group, o + g * COLUMNS, n - g * COLUMNS
            _tree_group(out, to, ldo, x, i, ldx, rows, w, j, ahead, k_size, num_blocks, partial, count)


def num_groups(n: int) -> int:
    """Return the number of column groups of n columns."""
    return -(-n // COLUMNS)


def matmul(out: Array, x: Array, w: Array, first: int = 0, last: int | None = None) -> None:
    """out [M, N] = x [M, K] @ w, packed [K, N]; of the column groups [first, last) only."""
    n = out.shape[1]
    gemm_f32(out, x, w, x.shape[1], n, 1, 1, 0, 0, ALL_ROWS, first, num_groups(n) if last is None else last)


def matmul_blocked(
    out: Array,
    x: Array,
    w: Array,
    first: int = 0,
    last: int | None = None,
    num_blocks: int = c.TP_BLOCKS,
) -> None:
    """Row-parallel twin of matmul: blocks of K, then a tree of neighbours.

    One of R ranks has K / R of the columns of x and TP_BLOCKS / R of the blocks.
    """
    n = out.shape[1]
    last = num_groups(n) if last is None else last
    gemm_f32(out, x, w, x.shape[1], n, num_blocks, 1, 0, 0, ALL_ROWS, first, last)


def grouped_matmul(
    out: Array, x: Array, bounds: Array, w: Array, first: int = 0, last: int | None = None
) -> None:
    """out [R, N]: rows bounds[e]:bounds[e+1] of x [R, K] by w, packed [E, K, N]. Empty ones are free."""
    n = out.shape[1]
    last = num_groups(n) if last is None else last
    gemm_f32(out, x, w, x.shape[1], n, 1, len(bounds) - 1, 0, 0, bounds, first, last)


def matmul_heads(
    out: Array, x: Array, w: Array, heads: int, k_size: int, first: int = 0, last: int | None = None
) -> None:
    """out [T, heads * N] = per head the first k_size columns of x [T, heads * D] @ w, packed [heads, K, N].

    Absorbs the query (x = q, whose heads end in q_pe, which is left out) and projects the attended latent.
    """
    n = out.shape[1] // heads
    last = num_groups(n) if last is None else last
    gemm_f32(out, x, w, k_size, n, 1, heads, x.shape[1] // heads, n, ALL_ROWS, first, last)
