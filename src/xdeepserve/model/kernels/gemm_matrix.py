"""GEMM on a matrix unit: INT8, and exact products, for gemm.py and gemm_exact.py, with the same results.

The rows are copied first, as many at a time as stay in the second-level cache, and filled up with zeros to 64
bytes of k. Rows that are missing in a block are whatever was there; nobody looks at their sums. Weights are
taken as they lie, since a group of 16 columns is a row of right tiles already. Where K does not fill its last
tile, that one reaches back to weights that the tile before it had, for which the row has zeros: so nothing
behind a group is read, and products with zeros change nothing (canonical.py).

A block's sums go through a scratch block of [4 column groups, 32 rows, 16], from which columns that exist are
taken. Without a matrix unit, or where one would not pay, nothing is done, and the kernel that asked does it.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from xdeepserve.jit.compiling import ARRAY_OPTIONS, TILE_OPTIONS, part, uses_amx
from xdeepserve.model.kernels.exact_tiles import EXACT_CHUNK, factor
from xdeepserve.model.kernels.matrix_unit import (
    FLAT_COLUMNS,
    MATRIX_ROWS,
    TALL_COLUMNS,
    TALL_TILES,
    TILE_BYTES,
    TILE_ROWS,
    TILE_SIZE,
    begin_tiles,
    end_tiles,
    exact_flat,
    exact_tall,
    int8_flat,
    int8_tall,
    misalignment,
    store_bf16,
)
from xdeepserve.model.kernels.tiles import add_sums, dot_start, load_tile, store_scaled, store_tile
from xdeepserve.model.kernels.vector_math import take
from xdeepserve.model.packing import COLUMNS, DEPTH, PAIR

NEAR = 1 << 18  # bytes of rows that are computed together
GROUP_SIZE = TALL_TILES * TILE_SIZE  # bytes between column groups of the scratch block
SUMS_SIZE = FLAT_COLUMNS * GROUP_SIZE
SUMS_ROWS = 4  # of the scratch block that are taken from it at once
TALL_ROWS = TALL_TILES * TILE_ROWS


@part
def rows_at_once(rows, width):
    """How many of `rows` rows of `width` bytes are computed together: a tile of them, or whole blocks."""
    if rows <= TILE_ROWS:
        return TILE_ROWS
    blocks = max(min(NEAR // width, rows + TALL_ROWS - 1) // TALL_ROWS, 1)
    return blocks * TALL_ROWS


@part
def _copy_bytes(to, start, width, q, m, rows, k_size):
    """`rows` rows q[m ...] int8 as left tiles at to[start ...], rows of `width` bytes."""
    whole = k_size // TILE_BYTES * TILE_BYTES
    shift = width - (k_size + DEPTH - 1) // DEPTH * DEPTH
    for r in range(rows):
        source, row = q[m + r].view(np.uint8), to[start + r * width : start + (r + 1) * width]
        for k in range(whole):
            row[k] = source[k]
        if whole < width:
            row[whole:] = np.uint8(0)
            for k in range(whole, k_size):
                row[k + shift] = source[k]


@part
def _copy_factors(to, start, width, x, i, ldx, rows, k_size):
    """The factors of rows x[i ...], ldx apart, in BF16 as left tiles at to[start ...]; see `_copy_bytes`."""
    whole = k_size // EXACT_CHUNK * EXACT_CHUNK
    shift = width // PAIR - (k_size + PAIR - 1) // PAIR * PAIR
    for r in range(rows):
        at = start + r * width
        for k in range(0, whole, COLUMNS):
            store_bf16(to, at + k * PAIR, factor(take(x, i + r * ldx + k, COLUMNS)))
        if whole < k_size:
            to[at + whole * PAIR : at + width] = np.uint8(0)
            # What the last of these stores behind the row is zero, or the next row's and still to come.
            for k in range(whole, k_size, COLUMNS):
                store_bf16(to, at + (k + shift) * PAIR, factor(take(x, i + r * ldx + k, k_size - k)))


@part
def _take_dots(out, o, ldo, sums, s, rows, columns, start, scale, m, w_scale, n, count):
    """out[o ...] = a block's sums at sums[s ...] as numbers, see tiles.store_scaled."""
    for c in range(columns):
        at, to, left = s + c * (GROUP_SIZE // 4), o + c * COLUMNS, count - c * COLUMNS
        r = 0
        while r + SUMS_ROWS <= rows:
            acc = add_sums(dot_start(SUMS_ROWS, 1, start, m + r), sums, at + r * COLUMNS, COLUMNS)
            store_scaled(out, to + r * ldo, ldo, acc, scale, m + r, w_scale, n + c * COLUMNS, left)
            r += SUMS_ROWS
        while r < rows:
            acc = add_sums(dot_start(1, 1, start, m + r), sums, at + r * COLUMNS, COLUMNS)
            store_scaled(out, to + r * ldo, ldo, acc, scale, m + r, w_scale, n + c * COLUMNS, left)
            r += 1


@part
def _take_sums(out, o, ldo, sums, s, rows, columns, count):
    """out[o ...] = a block's float32 sums at sums[s ...]."""
    for c in range(columns):
        for r in range(rows):
            acc = load_tile(1, 1, sums, s + c * (GROUP_SIZE // 4) + r * COLUMNS, COLUMNS, COLUMNS)
            store_tile(out, o + r * ldo + c * COLUMNS, ldo, acc, count - c * COLUMNS)


def int8_by_matrix_unit(out, q, begin, end, scale, w, j, group, start, w_scale, at, n, first, last):
    """Rows [begin, end) by the weights at w[j ...]: out = (float(q . w) * scale) * w_scale[at ...].

    Of the column groups [first, last), which are `group` bytes each. Whether it was done.
    """
    raise NotImplementedError


@overload(int8_by_matrix_unit, jit_options=ARRAY_OPTIONS if uses_amx() else TILE_OPTIONS)
def _int8_of(out, q, begin, end, scale, w, j, group, start, w_scale, at, n, first, last):
    def nothing(out, q, begin, end, scale, w, j, group, start, w_scale, at, n, first, last):
        return False

    def by_tiles(out, q, begin, end, scale, w, j, group, start, w_scale, at, n, first, last):
        k_size, ldo = q.shape[1], out.shape[1]
        if end - begin < MATRIX_ROWS or k_size < TILE_BYTES:
            return False
        depth = (k_size + TILE_BYTES - 1) // TILE_BYTES
        width, tail = depth * TILE_BYTES, group - TILE_SIZE
        near = rows_at_once(end - begin, width)
        memory = np.empty(TILE_BYTES + SUMS_SIZE + near * width, np.uint8)
        sums_at = misalignment(memory)
        rows_at = sums_at + SUMS_SIZE
        sums = memory[sums_at : sums_at + SUMS_SIZE].view(np.int32)
        block = FLAT_COLUMNS if near == TILE_ROWS else TALL_COLUMNS
        begin_tiles()
        for m in range(begin, end, near):
            rows = min(near, end - m)
            _copy_bytes(memory, rows_at, width, q, m, rows, k_size)
            for g in range(first, last, block):
                columns, o = min(block, last - g), g * COLUMNS
                weights = j + g * group
                if near == TILE_ROWS:
                    int8_flat(
                        sums, 0, GROUP_SIZE, False, memory, rows_at, width, w, weights, group, tail, depth,
                        1, columns,
                    )  # fmt: skip
                    _take_dots(
                        out, m * ldo + o, ldo, sums, 0, rows, columns, start, scale, m, w_scale, at + o, n - o
                    )
                    continue
                for r in range(0, rows, TALL_ROWS):
                    int8_tall(
                        sums, 0, GROUP_SIZE, False, memory, rows_at + r * width, width, w, weights, group,
                        tail, depth, TALL_TILES, columns,
                    )  # fmt: skip
                    _take_dots(
                        out, (m + r) * ldo + o, ldo, sums, 0, min(TALL_ROWS, rows - r), columns, start,
                        scale, m + r, w_scale, at + o, n - o,
                    )  # fmt: skip
        end_tiles()
        return True

    return by_tiles if uses_amx() else nothing


def exact_by_matrix_unit(out, o, x, i, w, j, group, k_size, n, first, last):
    """All rows of x, from x[i] on in each, by the weights at w[j ...] to out[o ...] of each, exact products.

    Of the column groups [first, last), which are `group` numbers each. Whether it was done.
    """
    raise NotImplementedError


@overload(exact_by_matrix_unit, jit_options=ARRAY_OPTIONS if uses_amx() else TILE_OPTIONS)
def _exact_of(out, o, x, i, w, j, group, k_size, n, first, last):
    def nothing(out, o, x, i, w, j, group, k_size, n, first, last):
        return False

    def by_tiles(out, o, x, i, w, j, group, k_size, n, first, last):
        num_rows, ldx = x.shape
        ldo = out.shape[1]
        if num_rows < MATRIX_ROWS or k_size < EXACT_CHUNK:
            return False
        depth = (k_size + EXACT_CHUNK - 1) // EXACT_CHUNK
        width, size = depth * TILE_BYTES, group * PAIR
        tail = size - TILE_SIZE
        near = rows_at_once(num_rows, width)
        # The last number of a row may be stored with a vector's worth of zeros behind it.
        memory = np.empty(TILE_BYTES + SUMS_SIZE + near * width + TILE_BYTES, np.uint8)
        sums_at = misalignment(memory)
        rows_at = sums_at + SUMS_SIZE
        sums = memory[sums_at : sums_at + SUMS_SIZE].view(np.float32)
        block = FLAT_COLUMNS if near == TILE_ROWS else TALL_COLUMNS
        begin_tiles()
        for m in range(0, num_rows, near):
            rows = min(near, num_rows - m)
            _copy_factors(memory, rows_at, width, x, m * ldx + i, ldx, rows, k_size)
            for g in range(first, last, block):
                columns, to = min(block, last - g), o + m * ldo + g * COLUMNS
                count, weights = n - g * COLUMNS, j + g * group
                if near == TILE_ROWS:
                    exact_flat(
                        sums, 0, GROUP_SIZE, False, memory, rows_at, width, w, weights, size, tail, depth,
                        1, columns,
                    )  # fmt: skip
                    _take_sums(out, to, ldo, sums, 0, rows, columns, count)
                    continue
                for r in range(0, rows, TALL_ROWS):
                    exact_tall(
                        sums, 0, GROUP_SIZE, False, memory, rows_at + r * width, width, w, weights, size,
                        tail, depth, TALL_TILES, columns,
                    )  # fmt: skip
                    _take_sums(out, to + r * ldo, ldo, sums, 0, min(TALL_ROWS, rows - r), columns, count)
        end_tiles()
        return True

    return by_tiles if uses_amx() and w.dtype == types.uint16 else nothing
