"""GEMM on a matrix unit: INT8, and exact products, for gemm_int8.py and gemm_exact.py, with the same results.

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
    INT8_OPS,
    TALL_COLUMNS,
    TALL_TILES,
    TILE_BYTES,
    TILE_ROWS,
    TILE_SIZE,
    begin_tiles,
    copy_row,
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
# Rows and column groups of the scratch block that are taken from it at once. Neighbours in a row of the
# result may share a line of the cache, and rows lie so far apart that few of their lines stay there.
SUMS_ROWS, TAKEN = 4, 2
TALL_ROWS = TALL_TILES * TILE_ROWS


@part
def tile_row(row, depth):
    """Return the offset (bytes) at which a row begins among left tiles, `depth` of 16 rows. A row is 64 bytes
    of each tile. So no tile's rows are a power of two apart, for which the innermost cache has few places."""
    return row // TILE_ROWS * depth * TILE_SIZE + row % TILE_ROWS * TILE_BYTES


@part
def rows_at_once(rows, width):
    """Return how many of `rows` rows of `width` bytes are computed together: a tile of them, or whole
    blocks."""
    if rows <= TILE_ROWS:
        return TILE_ROWS
    blocks = max(min(NEAR // width, rows + TALL_ROWS - 1) // TALL_ROWS, 1)
    return blocks * TALL_ROWS


@part
def _copy_bytes(to, start, depth, q, m, rows, k_size):
    """Copy `rows` rows q[m ...] int8 as left tiles to to[start ...], `depth` of 16 rows."""
    whole = k_size // TILE_BYTES * TILE_BYTES
    shift = depth * TILE_BYTES - (k_size + DEPTH - 1) // DEPTH * DEPTH
    for r in range(rows):
        source, at = (m + r) * k_size, start + tile_row(r, depth)
        for k in range(0, whole, TILE_BYTES):
            copy_row(to, at, q, source + k)
            at += TILE_SIZE
        if whole < k_size:
            row, rest = to[at : at + TILE_BYTES], q[m + r, whole:].view(np.uint8)
            row[:] = np.uint8(0)
            for k in range(k_size - whole):
                row[k + shift] = rest[k]


@part
def copy_factors(to, start, depth, x, i, ldx, rows, k_size):
    """Copy the factors of rows x[i ...], ldx apart, in BF16 as left tiles to to[start ...]; see
    `_copy_bytes`."""
    whole = k_size // EXACT_CHUNK * EXACT_CHUNK
    shift = depth * EXACT_CHUNK - (k_size + PAIR - 1) // PAIR * PAIR
    for r in range(rows):
        at, source = start + tile_row(r, depth), i + r * ldx
        for k in range(0, whole, EXACT_CHUNK):
            store_bf16(to, at, factor(take(x, source + k, COLUMNS)))
            store_bf16(to, at + TILE_BYTES // 2, factor(take(x, source + k + COLUMNS, COLUMNS)))
            at += TILE_SIZE
        if whole < k_size:
            to[at : at + TILE_BYTES] = np.uint8(0)
            # What the last of these stores behind the row is zero, and the next row's is still to come.
            for k in range(whole, k_size, COLUMNS):
                store_bf16(to, at + (k - whole + shift) * PAIR, factor(take(x, source + k, k_size - k)))


@part
def _take_dots(out, o, ldo, sums, s, rows, columns, start, scale, m, w_scale, n, count):
    """out[o ...] = a block's sums at sums[s ...] as numbers, see tiles.store_scaled."""
    ldc = GROUP_SIZE // 4
    for c in range(0, columns, TAKEN):
        at, to, left = s + c * ldc, o + c * COLUMNS, min(count, columns * COLUMNS) - c * COLUMNS
        r = 0
        while r + SUMS_ROWS <= rows:
            acc = dot_start(SUMS_ROWS, TAKEN, start, m + r)
            acc = add_sums(acc, sums, at + r * COLUMNS, COLUMNS, ldc)
            store_scaled(out, to + r * ldo, ldo, acc, scale, m + r, w_scale, n + c * COLUMNS, left)
            r += SUMS_ROWS
        while r < rows:
            acc = add_sums(dot_start(1, TAKEN, start, m + r), sums, at + r * COLUMNS, COLUMNS, ldc)
            store_scaled(out, to + r * ldo, ldo, acc, scale, m + r, w_scale, n + c * COLUMNS, left)
            r += 1


@part
def _take_sums(out, o, ldo, sums, s, rows, columns, count):
    """out[o ...] = a block's float32 sums at sums[s ...]."""
    ldc = GROUP_SIZE // 4
    for c in range(0, columns, TAKEN):
        for r in range(rows):
            acc = load_tile(1, TAKEN, sums, s + c * ldc + r * COLUMNS, COLUMNS, ldc)
            left = min(count, columns * COLUMNS) - c * COLUMNS
            store_tile(out, o + r * ldo + c * COLUMNS, ldo, acc, left)


def int8_by_matrix_unit(out, q, begin, end, scale, w, j, group, start, w_scale, at, n, first, last):
    """Multiply rows [begin, end) by the weights at w[j ...]: out = (float(q . w) * scale) * w_scale[at ...].

    For the column groups [first, last), which are `group` bytes each. Returns whether it was done.
    """
    raise NotImplementedError


@overload(int8_by_matrix_unit, jit_options=ARRAY_OPTIONS if uses_amx() else TILE_OPTIONS)
def _int8_of(out, q, begin, end, scale, w, j, group, start, w_scale, at, n, first, last):
    def nothing(out, q, begin, end, scale, w, j, group, start, w_scale, at, n, first, last):
        return False

    def by_tiles(out, q, begin, end, scale, w, j, group, start, w_scale, at, n, first, last):
        k_size, ldo = q.shape[1], out.shape[1]
        count, num_ops = end - begin, (end - begin) * k_size * (last - first) * COLUMNS
        if num_ops < INT8_OPS or k_size < TILE_BYTES:
            return False
        depth = (k_size + TILE_BYTES - 1) // TILE_BYTES
        width, apart, tail = depth * TILE_BYTES, depth * TILE_SIZE, group - TILE_SIZE
        near = rows_at_once(count, width)
        memory = np.empty(TILE_BYTES + SUMS_SIZE + near * width, np.uint8)
        sums_at = misalignment(memory)
        rows_at = sums_at + SUMS_SIZE
        sums = memory[sums_at : sums_at + SUMS_SIZE].view(np.int32)
        block = FLAT_COLUMNS if near == TILE_ROWS else TALL_COLUMNS
        begin_tiles()
        for m in range(begin, end, near):
            rows = min(near, end - m)
            _copy_bytes(memory, rows_at, depth, q, m, rows, k_size)
            for g in range(first, last, block):
                columns, o = min(block, last - g), g * COLUMNS
                weights = j + g * group
                if near == TILE_ROWS:
                    int8_flat(
                        sums, 0, GROUP_SIZE, False, memory, rows_at, apart, w, weights, group, tail, depth,
                        1, columns,
                    )  # fmt: skip
                    _take_dots(
                        out, m * ldo + o, ldo, sums, 0, rows, columns, start, scale, m, w_scale, at + o, n - o
                    )
                    continue
                for r in range(0, rows, TALL_ROWS):
                    int8_tall(
                        sums, 0, GROUP_SIZE, False, memory, rows_at + r * width, apart, w, weights, group,
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
    """Multiply all rows of x, each from x[i] on, by the weights at w[j ...] into out[o ...], in exact
    products.

    For the column groups [first, last), which are `group` numbers each. Returns whether it was done.
    """
    raise NotImplementedError


@overload(exact_by_matrix_unit, jit_options=ARRAY_OPTIONS if uses_amx() else TILE_OPTIONS)
def _exact_of(out, o, x, i, w, j, group, k_size, n, first, last):
    def nothing(out, o, x, i, w, j, group, k_size, n, first, last):
        return False

    def by_tiles(out, o, x, i, w, j, group, k_size, n, first, last):
        num_rows, ldx = x.shape
        ldo = out.shape[1]
        if k_size < EXACT_CHUNK:
            return False
        depth = (k_size + EXACT_CHUNK - 1) // EXACT_CHUNK
        width, apart, size = depth * TILE_BYTES, depth * TILE_SIZE, group * PAIR
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
            copy_factors(memory, rows_at, depth, x, m * ldx + i, ldx, rows, k_size)
            for g in range(first, last, block):
                columns, to = min(block, last - g), o + m * ldo + g * COLUMNS
                count, weights = n - g * COLUMNS, j + g * group
                if near == TILE_ROWS:
                    exact_flat(
                        sums, 0, GROUP_SIZE, False, memory, rows_at, apart, w, weights, size, tail, depth,
                        1, columns,
                    )  # fmt: skip
                    _take_sums(out, to, ldo, sums, 0, rows, columns, count)
                    continue
                for r in range(0, rows, TALL_ROWS):
                    exact_tall(
                        sums, 0, GROUP_SIZE, False, memory, rows_at + r * width, apart, w, weights, size,
                        tail, depth, TALL_TILES, columns,
                    )  # fmt: skip
                    _take_sums(out, to + r * ldo, ldo, sums, 0, min(TALL_ROWS, rows - r), columns, count)
        end_tiles()
        return True

    return by_tiles if uses_amx() and w.dtype == types.uint16 else nothing
