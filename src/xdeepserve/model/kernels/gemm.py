"""GEMM on packed weights: float32 in canonical order, and INT8. Exact products: see gemm_exact.py.

A kernel walks over the column groups [first, last) of the result, and for each over the rows in tiles, so
that a group's weights stay in the caches while all rows use them. During the first tile those of the group
that follows are asked for, so that their way from memory takes no time of its own. With FEW rows there is
nothing else to do meanwhile, and the CPU foresees by itself what is read from first to last as it lies.

    float32   tiles of up to 8 x 1 vectors, as many rows as the registers hold: a sum is a multiplication and
              an addition, and a vector load takes the place of one of them, but for those inside a
              multiplication, as the numbers of x are. CHUNK weights of each column at a time, so that they
              and the rows' part stay in the innermost caches; sums wait in memory between chunks, which
              changes no bit.
    INT8      tiles of 8 x 2: one instruction multiplies and adds, so there is room for loads. Of FEW rows
              4 x 1, one group after the other.

Threads can share a GEMM by column groups, each of which is read by one of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xdeepserve.jit.compiling import kernel, part, register_floats, tile_part
from xdeepserve.model import canonical as c
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels.gemm_matrix import int8_by_matrix_unit
from xdeepserve.model.kernels.simd import prefetch
from xdeepserve.model.kernels.tiles import (
    TALLEST,
    add_dot,
    add_dot_part,
    add_outer,
    add_tiles,
    dot_start,
    load_tile,
    no_dots,
    store_scaled,
    store_tile,
    zeros,
)
from xdeepserve.model.packing import COLUMNS, DEPTH

ROWS = 8  # of an INT8 tile
F32_ROWS = min(8, TALLEST)
WIDE = 2  # column groups of an INT8 tile
GROUP = DEPTH * COLUMNS  # bytes of INT8 weights of one column group that belong to the same four of k
CHUNK = 1024  # rows of weights, if there is more than one tile of rows to use them
NEAR = 1 << 18  # bytes of INT8 rows that are computed together: they stay in the second-level cache
# Rows that have no need for weights before their turn. Four keep a wide tile busy, if registers hold it.
FEW, FEW_F32 = 3 if register_floats() == 512 else 4, 1
ALL_ROWS = np.empty(0, np.int32)  # `bounds` of a GEMM that is not grouped by rows
NO_SCALE = np.empty(0, np.float32)
PARTIAL_TILES = 3  # sums of a tree over canonical.TP_BLOCKS blocks that wait for their neighbour at a time

# ---------------------------------------------------------------- float32


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
    """The kernel of an mr x 1 tile, which goes on from the sums of the chunks before. mr is a constant."""

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


def _f32_tree_tile(mr: int) -> Any:
    """The kernel of an mr x 1 tile of a product in blocks of K, see canonical.matmul_blocked."""

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
    """All rows of one column group, over the k of [first, last)."""
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
    """A column group for `rows` rows whose sums are made in `num_blocks` blocks and added as a tree."""
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
    """`rows` rows x[i ...] by the column groups [first, last) of the weights at w[j ...], to out[o ...]."""
    ldx, ldo, group = x.shape[1], out.shape[1], k_size * COLUMNS
    ahead, chunk = group if rows > FEW_F32 else 0, CHUNK if rows > F32_ROWS else k_size
    for g in range(first, last):
        at, to, count = j + g * group, o + g * COLUMNS, n - g * COLUMNS
        for k in range(0, k_size, chunk):
            until = min(k + chunk, k_size)
            _f32_group(out, to, ldo, x, i, ldx, rows, w, at, ahead, k, until, k_size, sums, count)


@kernel
def gemm_f32(out, x, w, k_size, n, num_blocks, batches, x_step, out_step, bounds, first, last):
    """`batches` products with one weight each: of the rows between two bounds, or of all rows, whose columns
    then start x_step and out_step further right each time."""
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
    """Column groups of n columns."""
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


# ---------------------------------------------------------------- INT8


def _int8_tile(mr: int, nr: int) -> Any:
    """The kernel of an mr x nr tile. mr and nr are constants in its code."""

    @tile_part
    def tile(out, o, ldo, q, i, w, j, ahead, k_size, start, scale, m, w_scale, n, count):
        """out[o...] = (float(q[i...] . w[j...]) * scale[m...]) * w_scale[n...], k_size >= 1.

        An int32 `out` takes the sums unscaled. What lies `ahead` of each weight is asked for, unless the tile
        is so small that each of its sums is made in four parts, or one addition would wait for the other.
        """
        steps = k_size // DEPTH
        ldw = (k_size + DEPTH - 1) // DEPTH * DEPTH * COLUMNS
        acc, first = dot_start(mr, nr, start, m), 0
        if mr * nr <= 2:
            second, third, fourth = no_dots(mr, nr), no_dots(mr, nr), no_dots(mr, nr)
            for step in range(0, steps - 3, 4):
                x, at = i + DEPTH * step, j + GROUP * step
                acc = add_dot(acc, q, x, k_size, w, at, ldw)
                second = add_dot(second, q, x + DEPTH, k_size, w, at + GROUP, ldw)
                third = add_dot(third, q, x + 2 * DEPTH, k_size, w, at + 2 * GROUP, ldw)
                fourth = add_dot(fourth, q, x + 3 * DEPTH, k_size, w, at + 3 * GROUP, ldw)
            acc, first = add_tiles(add_tiles(acc, second), add_tiles(third, fourth)), steps // 4 * 4
        for step in range(first, steps):
            at = j + GROUP * step
            for group in range(nr):
                prefetch(w, at + ahead + group * ldw)
            acc = add_dot(acc, q, i + DEPTH * step, k_size, w, at, ldw)
        if steps * DEPTH < k_size:
            left = k_size - steps * DEPTH
            acc = add_dot_part(acc, q, i + DEPTH * steps, k_size, w, j + GROUP * steps, ldw, left)
        store_scaled(out, o, ldo, acc, scale, m, w_scale, n, count)

    return tile


_int8_8x2, _int8_4x2, _int8_2x2, _int8_1x2 = (_int8_tile(mr, WIDE) for mr in (ROWS, 4, 2, 1))
_int8_4x1, _int8_2x1, _int8_1x1 = (_int8_tile(mr, 1) for mr in (4, 2, 1))


@part
def _int8_wide(out, o, ldo, q, m, stop, w, j, ahead, k_size, start, scale, w_scale, n, count):
    """Rows [m, stop) of two column groups; o is that of row 0."""
    while m + ROWS <= stop:
        to, i = o + m * ldo, m * k_size
        _int8_8x2(out, to, ldo, q, i, w, j, ahead, k_size, start, scale, m, w_scale, n, count)
        m += ROWS
        ahead = 0
    if m + 4 <= stop:
        to, i = o + m * ldo, m * k_size
        _int8_4x2(out, to, ldo, q, i, w, j, ahead, k_size, start, scale, m, w_scale, n, count)
        m += 4
        ahead = 0
    if m + 2 <= stop:
        to, i = o + m * ldo, m * k_size
        _int8_2x2(out, to, ldo, q, i, w, j, ahead, k_size, start, scale, m, w_scale, n, count)
        m += 2
    if m < stop:
        to, i = o + m * ldo, m * k_size
        _int8_1x2(out, to, ldo, q, i, w, j, 0, k_size, start, scale, m, w_scale, n, count)


@part
def _int8_narrow(out, o, ldo, q, m, stop, w, j, k_size, start, scale, w_scale, n, count):
    """Rows [m, stop) of one column group."""
    while m + 4 <= stop:
        to, i = o + m * ldo, m * k_size
        _int8_4x1(out, to, ldo, q, i, w, j, 0, k_size, start, scale, m, w_scale, n, count)
        m += 4
    if m + 2 <= stop:
        to, i = o + m * ldo, m * k_size
        _int8_2x1(out, to, ldo, q, i, w, j, 0, k_size, start, scale, m, w_scale, n, count)
        m += 2
    if m < stop:
        to, i = o + m * ldo, m * k_size
        _int8_1x1(out, to, ldo, q, i, w, j, 0, k_size, start, scale, m, w_scale, n, count)


@part
def int8_start(start, q):
    """start int32 [M]: the dot product takes unsigned weights w + 128, so 128 times the row's sum comes off
    to begin with."""
    for m in range(q.shape[0]):
        row, total = q[m], np.int32(0)
        for k in range(q.shape[1]):
            total += np.int32(row[k])
        start[m] = np.int32(-128) * total


@part
def int8_columns(out, q, m, stop, w, weights, group, start, scale, w_scale, columns, n, first, last):
    """Rows [m, stop), so few that they stay in the second-level cache, of the column groups [first, last)."""
    k_size, ldo, g = q.shape[1], out.shape[1], first
    while g < last:
        j, o = weights + g * group, g * COLUMNS
        at, left = columns + o, n - o
        if stop - m > FEW and g + WIDE <= last:
            ahead = WIDE * group
            _int8_wide(out, o, ldo, q, m, stop, w, j, ahead, k_size, start, scale, w_scale, at, left)
            g += WIDE
        else:
            _int8_narrow(out, o, ldo, q, m, stop, w, j, k_size, start, scale, w_scale, at, left)
            g += 1


@part
def rows_near(k_size):
    """How many INT8 rows are computed together."""
    return max(NEAR // k_size // ROWS, 1) * ROWS


@kernel
def gemm_int8(out, q, scale, w, w_scale, n, bounds, first, last):
    """Grouped by the rows between bounds, or one group of all rows."""
    num_rows, k_size = q.shape
    group = (k_size + DEPTH - 1) // DEPTH * DEPTH * COLUMNS
    per_batch = (n + COLUMNS - 1) // COLUMNS * group
    start, near = np.empty(num_rows, np.int32), rows_near(k_size)
    int8_start(start, q)
    for b in range(max(bounds.size - 1, 1)):
        begin, end = 0, num_rows
        if bounds.size > 0:
            begin, end = bounds[b], bounds[b + 1]
        weights, columns = b * per_batch, b * n
        if int8_by_matrix_unit(
            out, q, begin, end, scale, w, weights, group, start, w_scale, columns, n, first, last
        ):
            continue
        for m in range(begin, end, near):
            stop = min(m + near, end)
            int8_columns(out, q, m, stop, w, weights, group, start, scale, w_scale, columns, n, first, last)


def matmul_int8(
    out: Array, q: Array, scale: Array, w: Array, w_scale: Array, first: int = 0, last: int | None = None
) -> None:
    """out [M, N]; q int8 [M, K], scale [M], w packed [N, K], w_scale [N]; groups [first, last) only."""
    n = out.shape[1]
    gemm_int8(out, q, scale, w, w_scale, n, ALL_ROWS, first, num_groups(n) if last is None else last)


def matmul_int8_sums(out: Array, q: Array, w: Array, first: int = 0, last: int | None = None) -> None:
    """out int32 [M, N] = q int8 [M, K] @ w, packed [N, K]; see scale_sums."""
    n = out.shape[1]
    gemm_int8(out, q, NO_SCALE, w, NO_SCALE, n, ALL_ROWS, first, num_groups(n) if last is None else last)


def grouped_matmul_int8(
    out: Array,
    q: Array,
    scale: Array,
    bounds: Array,
    w: Array,
    w_scale: Array,
    first: int = 0,
    last: int | None = None,
) -> None:
    """out [R, N]: rows bounds[e]:bounds[e+1] of q [R, K] by w, packed [E, N, K]; w_scale [E * N]."""
    n = out.shape[1]
    gemm_int8(out, q, scale, w, w_scale, n, bounds, first, num_groups(n) if last is None else last)
