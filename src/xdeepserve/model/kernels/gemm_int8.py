"""GEMM of INT8 rows and packed INT8 weights, with a scale for each row and each column.

A kernel walks over column groups and tiles of rows as that of float32 does (gemm.py). Tiles have 8 x 2
vectors: one instruction multiplies and adds, so there is room for loads. The last of an odd number of groups
has tiles of 4 x 1 at most, and so has each group of FEW rows; those of one or two rows make each sum in four
parts, since a dot product that waits for the one before it takes several times as long. A matrix unit, where
there is one, takes what pays (gemm_matrix.py). Sums are whole numbers, so none of this changes a bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xdeepserve.jit.compiling import kernel, part, register_floats, tile_part
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels.gemm import ALL_ROWS, num_groups
from xdeepserve.model.kernels.gemm_matrix import int8_by_matrix_unit
from xdeepserve.model.kernels.matrix_unit import INT8_ROWS
from xdeepserve.model.kernels.simd import prefetch
from xdeepserve.model.kernels.tiles import (
    add_dot,
    add_dot_part,
    add_tiles,
    dot_start,
    no_dots,
    store_scaled,
)
from xdeepserve.model.packing import COLUMNS, DEPTH

ROWS = 8  # of a tile
WIDE = 2  # column groups of a tile
GROUP = DEPTH * COLUMNS  # bytes of weights of one column group that belong to the same four of k
NEAR = 1 << 18  # bytes of rows that are computed together: they stay in the second-level cache
# Rows that have no need for weights before their turn.
FEW = 3 if register_floats() == 512 else 2
NO_SCALE = np.empty(0, np.float32)


def _int8_tile(mr: int, nr: int) -> Any:
    """Make the kernel of an mr x nr tile. mr and nr are constants in its code."""

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
    """Compute rows [m, stop) of two column groups; o belongs to row 0."""
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
    """Compute rows [m, stop) of a single column group."""
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
    """Fill start int32 [M] with -128 times each row's sum, because the dot product takes unsigned weights w +
    128."""
    for m in range(q.shape[0]):
        row, total = q[m], np.int32(0)
        for k in range(q.shape[1]):
            total += np.int32(row[k])
        start[m] = np.int32(-128) * total


@part
def int8_columns(out, q, m, stop, w, weights, group, start, scale, w_scale, columns, n, first, last):
    """Compute rows [m, stop), few enough to stay in the second-level cache, of the column groups [first,
    last)."""
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
    """Return how many INT8 rows are computed together."""
    return max(NEAR // k_size // ROWS, 1) * ROWS


@kernel
def gemm_int8(out, q, scale, w, w_scale, n, bounds, first, last):
    """Multiply INT8 rows by packed INT8 weights, grouped by the rows between bounds, or as one group of all
    rows."""
    num_rows, k_size = q.shape
    group = (k_size + DEPTH - 1) // DEPTH * DEPTH * COLUMNS
    per_batch = (n + COLUMNS - 1) // COLUMNS * group
    start, near = np.empty(num_rows, np.int32), rows_near(k_size)
    int8_start(start, q)
    for b in range(max(bounds.size - 1, 1)):
        begin, end = 0, num_rows
        if bounds.size > 0:
            begin, end = bounds[b], bounds[b + 1]
        if begin == end:
            continue
        weights, columns = b * per_batch, b * n
        # The call alone takes longer than a narrow product of one row.
        if end - begin >= INT8_ROWS and int8_by_matrix_unit(
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
