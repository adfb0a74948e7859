"""GEMM on packed weights: float32 in canonical order, its weights in float32 or BF16, and INT8.

A kernel walks over the column groups [first, last) of the result, four at a time, and for each over the rows
in tiles, so that four groups of weights stay in the cache while all rows use them. With FEW rows it is the
weights' way from memory that takes time: then one group follows the other, and weights are read from first
to last as they lie, which the CPU foresees. With MANY rows of float32 it is the arithmetic (with some more,
if the weights are in no cache): one group at a time, too, and of it CHUNK weights of each column, so that
they and the rows' part stay in the innermost caches; sums wait in memory between chunks, which changes no
bit. Threads share a GEMM by column groups: each weight is read once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xdeepserve.model import canonical as c
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels.base import kernel, part, tile_part
from xdeepserve.model.kernels.tiles import (
    add_dot,
    add_dot_part,
    add_outer,
    add_tiles,
    dot_start,
    load_tile,
    store_scaled,
    store_tile,
    zeros,
)
from xdeepserve.model.packing import COLUMNS, DEPTH

WIDE = 4  # column groups of a wide tile
MANY, MANY_UNCACHED, CACHED, CHUNK = 8, 32, 1 << 21, 1024
FEW, FEW_F32 = 6, 1  # rows that are computed group by group
ALL_ROWS = np.empty(0, np.int32)  # `bounds` of a GEMM that is not grouped by rows
NO_SCALE = np.empty(0, np.float32)
PARTIAL_TILES = 3  # sums of a tree over canonical.TP_BLOCKS blocks that wait for their neighbour at a time

# ---------------------------------------------------------------- float32


def _f32_tile(mr: int, nr: int) -> Any:
    """The kernel of an mr x nr tile. mr and nr are constants in its code."""
    size = mr * nr * COLUMNS

    @tile_part
    def tile(out, o, ldo, x, i, ldx, w, j, k_size, num_blocks, partial, count):
        """out[o...] = x[i...] @ w[j...]; see `tiles` for strides. Blocks as in canonical.matmul_blocked."""
        ldw = k_size * COLUMNS
        acc = zeros(mr, nr)
        for block in range(num_blocks):
            acc = zeros(mr, nr)
            for k in range(k_size * block // num_blocks, k_size * (block + 1) // num_blocks):
                acc = add_outer(acc, x, i + k, ldx, w, j + COLUMNS * k, ldw)
            # Blocks 0 and 1 make a pair, it and the pair of 2 and 3 make a pair, ... : a binary counter.
            level, pairs = 0, block
            while pairs & 1:
                acc = add_tiles(load_tile(mr, nr, partial, level * size, nr * COLUMNS, COLUMNS), acc)
                level += 1
                pairs >>= 1
            if block + 1 < num_blocks:
                store_tile(partial, level * size, nr * COLUMNS, acc, nr * COLUMNS)
        store_tile(out, o, ldo, acc, count)

    return tile


_f32_4x4, _f32_2x4, _f32_1x4 = (_f32_tile(mr, WIDE) for mr in (4, 2, 1))
_f32_4x1, _f32_2x1, _f32_1x1 = (_f32_tile(mr, 1) for mr in (4, 2, 1))


@part
def _f32_wide(out, o, ldo, x, i, ldx, rows, w, j, k_size, num_blocks, partial, count):
    """All rows of four column groups."""
    m = 0
    while m + 4 <= rows:
        _f32_4x4(out, o + m * ldo, ldo, x, i + m * ldx, ldx, w, j, k_size, num_blocks, partial, count)
        m += 4
    if m + 2 <= rows:
        _f32_2x4(out, o + m * ldo, ldo, x, i + m * ldx, ldx, w, j, k_size, num_blocks, partial, count)
        m += 2
    if m < rows:
        _f32_1x4(out, o + m * ldo, ldo, x, i + m * ldx, ldx, w, j, k_size, num_blocks, partial, count)


@part
def _f32_narrow(out, o, ldo, x, i, ldx, rows, w, j, k_size, num_blocks, partial, count):
    """All rows of one column group."""
    m = 0
    while m + 4 <= rows:
        _f32_4x1(out, o + m * ldo, ldo, x, i + m * ldx, ldx, w, j, k_size, num_blocks, partial, count)
        m += 4
    if m + 2 <= rows:
        _f32_2x1(out, o + m * ldo, ldo, x, i + m * ldx, ldx, w, j, k_size, num_blocks, partial, count)
        m += 2
    if m < rows:
        _f32_1x1(out, o + m * ldo, ldo, x, i + m * ldx, ldx, w, j, k_size, num_blocks, partial, count)


def _f32_chunk(mr: int) -> Any:
    """The kernel of an mr x 1 tile that goes on from the sums of the chunks before."""

    @tile_part
    def tile(out, o, ldo, x, i, ldx, w, j, first, last, k_size, sums, s, count):
        """The k of [first, last) of k_size; `sums` has the tile's at s until all are done."""
        acc = zeros(mr, 1)
        if first > 0:
            acc = load_tile(mr, 1, sums, s, COLUMNS, COLUMNS)
        for k in range(first, last):
            acc = add_outer(acc, x, i + k, ldx, w, j + COLUMNS * k, 0)
        if last < k_size:
            store_tile(sums, s, COLUMNS, acc, COLUMNS)
        else:
            store_tile(out, o, ldo, acc, count)

    return tile


_chunk_8, _chunk_4, _chunk_2, _chunk_1 = (_f32_chunk(mr) for mr in (8, 4, 2, 1))


@part
def _f32_many(out, o, ldo, x, i, ldx, rows, w, j, k_size, sums, count):
    """All rows of one column group, chunk by chunk."""
    for first in range(0, k_size, CHUNK):
        last, m = min(first + CHUNK, k_size), 0
        while m + 8 <= rows:
            to, at = o + m * ldo, i + m * ldx
            _chunk_8(out, to, ldo, x, at, ldx, w, j, first, last, k_size, sums, m * COLUMNS, count)
            m += 8
        if m + 4 <= rows:
            to, at = o + m * ldo, i + m * ldx
            _chunk_4(out, to, ldo, x, at, ldx, w, j, first, last, k_size, sums, m * COLUMNS, count)
            m += 4
        if m + 2 <= rows:
            to, at = o + m * ldo, i + m * ldx
            _chunk_2(out, to, ldo, x, at, ldx, w, j, first, last, k_size, sums, m * COLUMNS, count)
            m += 2
        if m < rows:
            to, at = o + m * ldo, i + m * ldx
            _chunk_1(out, to, ldo, x, at, ldx, w, j, first, last, k_size, sums, m * COLUMNS, count)


@kernel
def gemm_f32(out, x, w, k_size, n, num_blocks, batches, x_step, out_step, bounds, first, last):
    """`batches` products with one weight each: of the rows between two bounds, or of all rows, whose columns
    then start x_step and out_step further right each time."""
    partial = np.empty(PARTIAL_TILES * 4 * WIDE * COLUMNS, np.float32)
    sums = np.empty(x.shape[0] * COLUMNS, np.float32)
    ldx, ldo = x.shape[1], out.shape[1]
    group = k_size * COLUMNS
    per_batch = (n + COLUMNS - 1) // COLUMNS * group
    many = MANY if per_batch <= CACHED else MANY_UNCACHED
    for b in range(batches):
        start, stop = 0, x.shape[0]
        if bounds.size > 0:
            start, stop = bounds[b], bounds[b + 1]
        rows = stop - start
        if rows == 0:
            continue
        i, o = start * ldx + b * x_step, start * ldo + b * out_step
        g = first
        while g < last:
            j, column = b * per_batch + g * group, g * COLUMNS
            if rows >= many and num_blocks == 1:
                _f32_many(out, o + column, ldo, x, i, ldx, rows, w, j, k_size, sums, n - column)
                g += 1
            elif rows > FEW_F32 and g + WIDE <= last:
                _f32_wide(
                    out, o + column, ldo, x, i, ldx, rows, w, j, k_size, num_blocks, partial, n - column
                )
                g += WIDE
            else:
                _f32_narrow(
                    out, o + column, ldo, x, i, ldx, rows, w, j, k_size, num_blocks, partial, n - column
                )
                g += 1


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
    def tile(out, o, ldo, q, i, ldq, w, j, k_size, start, scale, m, w_scale, n, count):
        """out[o...] = (float(q[i...] . w[j...]) * scale[m...]) * w_scale[n...], k_size >= 1.

        An int32 `out` takes the sums unscaled.
        """
        steps = k_size // DEPTH
        ldw = (k_size + DEPTH - 1) // DEPTH * DEPTH * COLUMNS
        acc = dot_start(mr, nr, start, m)
        for step in range(steps):
            acc = add_dot(acc, q, i + DEPTH * step, ldq, w, j + DEPTH * COLUMNS * step, ldw)
        if steps * DEPTH < k_size:
            left = k_size - steps * DEPTH
            acc = add_dot_part(acc, q, i + DEPTH * steps, ldq, w, j + DEPTH * COLUMNS * steps, ldw, left)
        store_scaled(out, o, ldo, acc, scale, m, w_scale, n, count)

    return tile


_int8_6x4, _int8_4x4, _int8_2x4, _int8_1x4 = (_int8_tile(mr, WIDE) for mr in (6, 4, 2, 1))
_int8_4x1, _int8_2x1, _int8_1x1 = (_int8_tile(mr, 1) for mr in (4, 2, 1))


@part
def _int8_wide(out, o, ldo, q, i, ldq, m, stop, w, j, k_size, start, scale, w_scale, n, count):
    """Rows [m, stop) of four column groups; o and i are those of row 0."""
    while m + 6 <= stop:
        _int8_6x4(
            out, o + m * ldo, ldo, q, i + m * ldq, ldq, w, j, k_size, start, scale, m, w_scale, n, count
        )
        m += 6
    if m + 4 <= stop:
        _int8_4x4(
            out, o + m * ldo, ldo, q, i + m * ldq, ldq, w, j, k_size, start, scale, m, w_scale, n, count
        )
        m += 4
    if m + 2 <= stop:
        _int8_2x4(
            out, o + m * ldo, ldo, q, i + m * ldq, ldq, w, j, k_size, start, scale, m, w_scale, n, count
        )
        m += 2
    if m < stop:
        _int8_1x4(
            out, o + m * ldo, ldo, q, i + m * ldq, ldq, w, j, k_size, start, scale, m, w_scale, n, count
        )


@part
def _int8_narrow(out, o, ldo, q, i, ldq, m, stop, w, j, k_size, start, scale, w_scale, n, count):
    """Rows [m, stop) of one column group."""
    while m + 4 <= stop:
        _int8_4x1(
            out, o + m * ldo, ldo, q, i + m * ldq, ldq, w, j, k_size, start, scale, m, w_scale, n, count
        )
        m += 4
    if m + 2 <= stop:
        _int8_2x1(
            out, o + m * ldo, ldo, q, i + m * ldq, ldq, w, j, k_size, start, scale, m, w_scale, n, count
        )
        m += 2
    if m < stop:
        _int8_1x1(
            out, o + m * ldo, ldo, q, i + m * ldq, ldq, w, j, k_size, start, scale, m, w_scale, n, count
        )


@kernel
def gemm_int8(out, q, scale, w, w_scale, n, bounds, first, last):
    """Grouped by the rows between bounds, or one group of all rows."""
    num_rows, k_size = q.shape
    ldo = out.shape[1]
    group = (k_size + DEPTH - 1) // DEPTH * DEPTH * COLUMNS
    per_batch = (n + COLUMNS - 1) // COLUMNS * group
    # The dot product takes unsigned weights w + 128, so 128 times the row's sum comes off to begin with.
    start = np.empty(num_rows, np.int32)
    for m in range(num_rows):
        row, total = q[m], np.int32(0)
        for k in range(k_size):
            total += np.int32(row[k])
        start[m] = np.int32(-128) * total
    for b in range(max(bounds.size - 1, 1)):
        m, stop = 0, num_rows
        if bounds.size > 0:
            m, stop = bounds[b], bounds[b + 1]
        if m == stop:
            continue
        g = first
        while g < last:
            j, column = b * per_batch + g * group, g * COLUMNS
            channel, count = b * n + column, n - column
            if stop - m > FEW and g + WIDE <= last:
                _int8_wide(
                    out,
                    column,
                    ldo,
                    q,
                    0,
                    k_size,
                    m,
                    stop,
                    w,
                    j,
                    k_size,
                    start,
                    scale,
                    w_scale,
                    channel,
                    count,
                )
                g += WIDE
            else:
                _int8_narrow(
                    out,
                    column,
                    ldo,
                    q,
                    0,
                    k_size,
                    m,
                    stop,
                    w,
                    j,
                    k_size,
                    start,
                    scale,
                    w_scale,
                    channel,
                    count,
                )
                g += 1


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
