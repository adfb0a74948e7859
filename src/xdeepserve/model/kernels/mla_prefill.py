"""Absorbed MLA for many rows of a sequence on a matrix unit: from queries to the heads' outputs.

It has the results of absorption, `mla.attention` and absorption's other half, one after the other, but what
lies between them never leaves the caches. It takes up to 32 rows, two left tiles, of two heads at a time:

    absorbed [row, k]         = q [row, nope] @ w_uk          pairs of BF16
    scores   [row, position]  = absorbed, in INT8 @ latents   bytes; and the RoPE parts, pairs of BF16
    values   [row, column]    = softmax weights @ latents     pairs of BF16
    out      [row, column]    = values @ w_uv                 pairs of BF16

All heads share right tiles that are made of the cache first, whose tiles are a quarter as large. A row's
scores lie side by side: its softmax goes from vector to vector, and its weights are a row of a left tile.
Rows that are missing in a left tile are whatever was there; nobody looks at what becomes of them. So are
positions behind the last one, up to the end of a chunk: their scores may be anything, and `only_first` puts
other numbers in their place; their scales and values are zero.

Order of operations: canonical.attention.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from xdeepserve.jit.compiling import ARRAY_OPTIONS, kernel, part, tile_part, uses_amx
from xdeepserve.model.cache_layout import TILE, TILE_SIZE
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.division import MOST, quotient
from xdeepserve.model.kernels.exact_tiles import EXACT_CHUNK, factor
from xdeepserve.model.kernels.gemm_matrix import copy_factors
from xdeepserve.model.kernels.matrix_unit import (
    BLOCK_TILES,
    TALL_COLUMNS,
    TALL_TILES,
    TILE_BYTES,
    TILE_ROWS,
    begin_tiles,
    bf16_pairs,
    end_tiles,
    exact_tall,
    misalignment,
    signed_tall,
    store_bf16,
    turn_quarter,
)
from xdeepserve.model.kernels.matrix_unit import TILE_SIZE as UNIT_SIZE
from xdeepserve.model.kernels.mla_matrix import tile_start
from xdeepserve.model.kernels.rows import QUANT_FLOOR, QUANT_MAX, row_scale
from xdeepserve.model.kernels.simd import (
    absolute,
    load,
    max_of,
    maximum,
    only_first,
    rint,
    splat,
    store,
    to_f32,
    transpose,
    tree_sum,
)
from xdeepserve.model.kernels.vector_math import exp, put
from xdeepserve.model.packing import COLUMNS, PAIR

ROWS, HEADS = TALL_TILES * TILE_ROWS, 2  # at a time
LANES_AT_ONCE = HEADS * ROWS  # no more than other attention has, whose scratch memory is used
FEWEST = 8  # rows that make it worth while: the matrix unit takes as long for one row as for sixteen
FARTHEST = 1 << 15  # position; copies of more would take a thread 60 MB and more, of DeepSeek's latents
GROUP_SIZE = TALL_TILES * UNIT_SIZE  # bytes of the sums of 16 columns
ZERO, ONE = np.float32(0.0), np.float32(1.0)
TAME = np.float32(2.0**40)  # scale of latents whose sums are far below what division.quotient bears
MINUS_INFINITY = np.float32(-np.inf)


class TilePlaces(NamedTuple):
    """Offsets of the parts of a thread's memory, in bytes, and its size."""

    sums: int  # of a block of products
    turned: int  # and of its RoPE part
    absorbed: int  # float32 sums, as blocks leave them
    query: int  # left tiles, as the next four
    latent: int
    rope: int
    weights: int
    values: int
    scales: int  # float32 of each position; from here on what all heads share
    latents: int  # right tiles [position tiles, k, ...] of bytes
    keys: int  # right tiles [position tiles, k, ...] of RoPE parts
    columns: int  # right tiles [column tiles, chunks of positions, ...]
    size: int


@part
def _places(rank, nope, rope_dim, length):
    """Lay out a thread's memory for `length` positions."""
    chunks = (length + EXACT_CHUNK - 1) // EXACT_CHUNK
    sums = 0
    turned = sums + BLOCK_TILES * UNIT_SIZE
    absorbed = turned + BLOCK_TILES * UNIT_SIZE
    query = absorbed + ROWS * rank * 4
    latent = query + ROWS * nope * PAIR
    rope = latent + LANES_AT_ONCE * rank
    weights = rope + LANES_AT_ONCE * rope_dim * PAIR
    values = weights + LANES_AT_ONCE * chunks * TILE_BYTES
    scales = values + LANES_AT_ONCE * rank * PAIR
    latents = scales + chunks * EXACT_CHUNK * 4
    keys = latents + chunks * EXACT_CHUNK * rank
    columns = keys + chunks * EXACT_CHUNK * rope_dim * PAIR
    size = columns + chunks * EXACT_CHUNK * rank * PAIR
    return TilePlaces(
        sums, turned, absorbed, query, latent, rope, weights, values, scales, latents, keys, columns, size
    )


@part
def _share_cache(memory, at, length, table, c, scales, pe, rank, rope_dim):
    """Fill the right tiles, scales and keys that all heads share. RoPE parts are BF16 numbers already.
    Returns whether the scales are TAME."""
    size, depth_pe = c.shape[1] * TILE, rope_dim // EXACT_CHUNK
    words, floats = memory.view(np.int32), memory.view(np.float32)
    chunks = (length + EXACT_CHUNK - 1) // EXACT_CHUNK
    for first in range(0, chunks * EXACT_CHUNK, TILE):
        for p in range(first, first + TILE):
            floats[at.scales // 4 + p] = scales[table[p // size], p % size] if p < length else ZERO
        # 16 positions are half a right tile of each 16 columns.
        half = at.columns + first // EXACT_CHUNK * UNIT_SIZE + first % EXACT_CHUNK * TILE * PAIR
        if first >= length:
            for j in range(rank // TILE):
                to = half + j * chunks * UNIT_SIZE
                memory[to : to + UNIT_SIZE // 2] = np.uint8(0)
            continue
        start = tile_start(table, first, size, rank)
        for j in range(rank // TILE):
            i, to = start + j * TILE_SIZE, (half + j * chunks * UNIT_SIZE) // 4
            turn_quarter(memory, at.latents + first * rank + j * TILE_SIZE, c, i)
            for p in range(0, TILE, PAIR):
                even, odd = load(c, i + p * TILE), load(c, i + (p + 1) * TILE)
                store(words, to + p // PAIR * LANES, bf16_pairs(even, odd))
        start = tile_start(table, first, size, rope_dim)
        for k in range(depth_pe):
            i, to = start + k * PAIR * TILE_SIZE, at.keys + (first // TILE * depth_pe + k) * UNIT_SIZE
            for p in range(TILE):
                row = at.sums + p * TILE_BYTES
                store_bf16(memory, row, load(pe, i + p * TILE))
                store_bf16(memory, row + TILE_BYTES // 2, load(pe, i + TILE_SIZE + p * TILE))
            transpose(words, to // 4, LANES, words, at.sums // 4, LANES)
    largest = ZERO
    for p in range(length):
        largest = max(largest, floats[at.scales // 4 + p])
    return largest <= TAME


@part
def _absorb(memory, at, left, depth, w_uk, j, rows, tiles, rank, q_scale, lane):
    """Multiply queries by a head's matrix at w_uk[j]: in INT8 as left tiles at memory[left], with their
    scales."""
    floats, quantised, group = memory.view(np.float32), memory.view(np.int8), depth * UNIT_SIZE
    maxima, sums = at.sums // 4, at.absorbed // 4
    for r in range(rows):
        store(floats, maxima + r * LANES, splat(ZERO))
    for c in range(0, rank // COLUMNS, TALL_COLUMNS):
        i = sums + c * GROUP_SIZE // 4
        exact_tall(
            memory, 4 * i, GROUP_SIZE, False, memory, at.query, group,
            w_uk, j + c * group // PAIR, group, group, depth, tiles, TALL_COLUMNS,
        )  # fmt: skip
        for r in range(0, rows * LANES, LANES):
            one, two = absolute(load(floats, i + r)), absolute(load(floats, i + GROUP_SIZE // 4 + r))
            store(floats, maxima + r, maximum(load(floats, maxima + r), maximum(one, two)))
    is_tame = True
    for r in range(rows):
        scale = row_scale(load(floats, maxima + r * LANES))
        q_scale[lane + r] = scale
        floats[maxima + r] = ONE / scale  # of which there are fewer than maxima
        is_tame = is_tame and scale <= MOST
    for k in range(0, rank, LANES):
        to = left + k // TILE_BYTES * UNIT_SIZE + k % TILE_BYTES
        for r in range(rows):
            x, scale = load(floats, sums + (k // COLUMNS * ROWS + r) * LANES), splat(q_scale[lane + r])
            x = quotient(x, scale, splat(floats[maxima + r])) if is_tame else x / scale
            store(quantised, to + r // TILE_ROWS * TILE_ROWS * rank + r % TILE_ROWS * TILE_BYTES, rint(x))


@part
def _score(memory, at, scratch, ld, heads, rows, tiles, chunks, rank, depth_pe, q_scale, softmax_scale):
    """Fill scratch [heads, ROWS, ld] with the scores of all positions of some chunks. Right tiles stay in
    place for all heads."""
    words, floats, depth = memory.view(np.int32), memory.view(np.float32), rank // TILE_BYTES
    size, size_pe = TILE_ROWS * rank, depth_pe * UNIT_SIZE
    for n in range(0, chunks * EXACT_CHUNK // TILE, TALL_COLUMNS):
        for head in range(heads):
            signed_tall(
                memory, at.sums, GROUP_SIZE, False, memory, at.latent + head * TALL_TILES * size, size,
                memory, at.latents + n * size, size, size, depth, tiles, TALL_COLUMNS,
            )  # fmt: skip
            exact_tall(
                memory, at.turned, GROUP_SIZE, False, memory, at.rope + head * TALL_TILES * size_pe, size_pe,
                memory, at.keys + n * size_pe, size_pe, size_pe, depth_pe, tiles, TALL_COLUMNS,
            )  # fmt: skip
            for c in range(TALL_COLUMNS):
                c_scale, to = load(floats, at.scales // 4 + (n + c) * TILE), head * ROWS * ld + (n + c) * TILE
                for r in range(rows):
                    i, scale = (c * GROUP_SIZE + r * TILE_BYTES) // 4, splat(q_scale[head * ROWS + r])
                    score = to_f32(load(words, at.sums // 4 + i)) * c_scale * scale
                    score = (score + load(floats, at.turned // 4 + i)) * splat(softmax_scale)
                    store(scratch, to + r * ld, score)


@part
def _weigh(memory, at, scratch, row, to, num_positions, chunks, int8_weights):
    """Compute the softmax of a row's scores, times the scales of positions, as a row of left tiles at
    memory[to].

    Returns the sum of weights, and the scale of INT8 weights.
    """
    floats, last = memory.view(np.float32), (num_positions - 1) // EXACT_CHUNK * EXACT_CHUNK
    left = num_positions - last
    top = only_first(load(scratch, row + last), left, MINUS_INFINITY)
    other = only_first(load(scratch, row + last + LANES), left - LANES, MINUS_INFINITY)
    for p in range(0, last, EXACT_CHUNK):
        top, other = maximum(top, load(scratch, row + p)), maximum(other, load(scratch, row + p + LANES))
    top, lanes = splat(max_of(maximum(top, other))), splat(ZERO)
    largest, scale = splat(QUANT_FLOOR), ONE
    for p in range(0, last + 1, EXACT_CHUNK):
        one, two = exp(load(scratch, row + p) - top), exp(load(scratch, row + p + LANES) - top)
        if p == last:
            one, two = only_first(one, left, ZERO), only_first(two, left - LANES, ZERO)
        lanes = lanes + one
        lanes = lanes + two
        one, two = one * load(floats, at.scales // 4 + p), two * load(floats, at.scales // 4 + p + LANES)
        if int8_weights:
            largest = maximum(largest, maximum(one, two))
            store(scratch, row + p, one)
            store(scratch, row + p + LANES, two)
        else:
            _put_two(memory, to + p // EXACT_CHUNK * UNIT_SIZE, factor(one), factor(two))
    if int8_weights:
        scale = max_of(largest) / QUANT_MAX
        for p in range(0, last + 1, EXACT_CHUNK):
            one, two = load(scratch, row + p) / splat(scale), load(scratch, row + p + LANES) / splat(scale)
            _put_two(memory, to + p // EXACT_CHUNK * UNIT_SIZE, rint(one), rint(two))
    for chunk in range(last // EXACT_CHUNK + 1, chunks):
        _put_two(memory, to + chunk * UNIT_SIZE, splat(ZERO), splat(ZERO))
    return tree_sum(lanes), scale


@part
def _weigh_rows(memory, at, scratch, ld, positions, chunks, int8_weights, totals, scales, first):
    """Weigh a head's rows, with lanes from `first` on: left tiles, the sums of weights, and their scales."""
    for r in range(positions.size):
        lane = first + r
        to = at.weights + lane // TILE_ROWS * chunks * UNIT_SIZE + lane % TILE_ROWS * TILE_BYTES
        totals[lane], scales[lane] = _weigh(
            memory, at, scratch, lane * ld, to, positions[r] + 1, chunks, int8_weights
        )


@tile_part
def _put_two(memory, to, one, two):
    """Store 32 BF16 numbers as a row of a left tile."""
    store_bf16(memory, to, one)
    store_bf16(memory, to + TILE_BYTES // 2, two)


@part
def _sum_values(memory, at, heads, rows, tiles, chunks, apart, rank, totals, scales, int8_weights, is_tame):
    """Sum latents by weight, as left tiles. apart: bytes between right tiles of the next 16 columns.

    is_tame: no quotient is too large for division.quotient; those too small for it become zero.
    """
    floats, size = memory.view(np.float32), chunks * UNIT_SIZE
    for j in range(0, rank // TILE, TALL_COLUMNS):
        for head in range(heads):
            exact_tall(
                memory, at.sums, GROUP_SIZE, False, memory, at.weights + head * TALL_TILES * size, size,
                memory, at.columns + j * apart, apart, apart, chunks, tiles, TALL_COLUMNS,
            )  # fmt: skip
            to = at.values + head * ROWS * rank * PAIR + j // PAIR * UNIT_SIZE
            for r in range(rows):
                i, lane = (at.sums + r * TILE_BYTES) // 4, head * ROWS + r
                total, scale = splat(totals[lane]), splat(scales[lane])
                one, two, inverse = load(floats, i), load(floats, i + GROUP_SIZE // 4), splat(ONE) / total
                if int8_weights:
                    one, two = one * scale, two * scale
                if is_tame:
                    one, two = quotient(one, total, inverse), quotient(two, total, inverse)
                else:
                    one, two = one / total, two / total
                row = r // TILE_ROWS * TILE_ROWS * rank * PAIR + r % TILE_ROWS * TILE_BYTES
                _put_two(memory, to + row, factor(one), factor(two))


@part
def _unabsorb(memory, at, left, out, o, ldo, rows, tiles, w_uv, j, rank, v_dim):
    """Multiply a head's values, left tiles at memory[left], by its matrix at w_uv[j], into out[o ...]."""
    floats, group, groups = memory.view(np.float32), rank * TILE_BYTES // 2, (v_dim + COLUMNS - 1) // COLUMNS
    for g in range(0, groups, TALL_COLUMNS):
        columns = min(TALL_COLUMNS, groups - g)
        exact_tall(
            memory, at.sums, GROUP_SIZE, False, memory, left, group,
            w_uv, j + g * group // PAIR, group, group, rank // EXACT_CHUNK, tiles, columns,
        )  # fmt: skip
        for r in range(rows):
            for c in range(columns):
                n = (g + c) * COLUMNS
                sums = load(floats, (at.sums + c * GROUP_SIZE + r * TILE_BYTES) // 4)
                put(out, o + r * ldo + n, sums, v_dim - n)


@part
def _has_room(scratch, length):
    """Whether scores of all lanes fit into scratch memory, at whatever address it begins."""
    return scratch.size >= LANES_AT_ONCE * (length + EXACT_CHUNK + LANES) + LANES


@part
def _fills_tiles(rank, nope, rope_dim, v_dim, v_size):
    """Whether each product's K is a number of whole tiles; v_size: numbers of a head's w_uv."""
    is_whole = rank % TILE_BYTES == nope % EXACT_CHUNK == rope_dim % EXACT_CHUNK == 0
    # The cache may be wider than the latents are.
    return (
        is_whole and min(nope, rope_dim) > 0 and v_size == (v_dim + COLUMNS - 1) // COLUMNS * COLUMNS * rank
    )


def _by_tiles(
    out, q, heads, rope_dim, w_uk, w_uv, positions, table, c_cache, s_cache, pe_cache, softmax_scale,
    int8_weights, scratch,
):  # fmt: skip
    raise NotImplementedError


@overload(_by_tiles, jit_options=ARRAY_OPTIONS)
def _by_tiles_of(
    out, q, heads, rope_dim, w_uk, w_uv, positions, table, c_cache, s_cache, pe_cache, softmax_scale,
    int8_weights, scratch,
):  # fmt: skip
    def nothing(
        out, q, heads, rope_dim, w_uk, w_uv, positions, table, c_cache, s_cache, pe_cache, softmax_scale,
        int8_weights, scratch,
    ):  # fmt: skip
        return False

    def by_tiles(
        out, q, heads, rope_dim, w_uk, w_uv, positions, table, c_cache, s_cache, pe_cache, softmax_scale,
        int8_weights, scratch,
    ):  # fmt: skip
        num_rows, ldq, ldo = q.shape[0], q.shape[1], out.shape[1]
        size, v_dim, rank, v_size = ldq // heads, ldo // heads, c_cache.shape[2] * TILE, w_uv.size // heads
        nope, length = size - rope_dim, positions[num_rows - 1] + 1
        is_worth = num_rows >= FEWEST and length <= FARTHEST and _has_room(scratch, length)
        if not is_worth or not _fills_tiles(rank, nope, rope_dim, v_dim, v_size):
            return False
        at = _places(rank, nope, rope_dim, length)
        memory = np.empty(at.size + TILE_BYTES, np.uint8)
        memory = memory[misalignment(memory) :][: at.size]
        scratch = scratch[misalignment(scratch.view(np.uint8)) // 4 :]
        totals, scales = np.empty(LANES_AT_ONCE, np.float32), np.empty(LANES_AT_ONCE, np.float32)
        q_flat, out_flat = q.reshape(-1), out.reshape(-1)
        apart, depth_pe = (length + EXACT_CHUNK - 1) // EXACT_CHUNK * UNIT_SIZE, rope_dim // EXACT_CHUNK
        begin_tiles()
        is_tame = _share_cache(memory, at, length, table, c_cache, s_cache, pe_cache, rank, rope_dim)
        for first in range(0, heads, HEADS):
            count = min(HEADS, heads - first)
            for t in range(0, num_rows, ROWS):
                rows = min(ROWS, num_rows - t)
                tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
                chunks = (positions[t + rows - 1] + EXACT_CHUNK) // EXACT_CHUNK
                ld = chunks * EXACT_CHUNK + LANES
                for n in range(count):
                    i, lane = t * ldq + (first + n) * size, n * ROWS
                    rope, latent = at.rope + lane * rope_dim * PAIR, at.latent + lane * rank
                    copy_factors(memory, at.query, nope // EXACT_CHUNK, q_flat, i, ldq, rows, nope)
                    copy_factors(memory, rope, depth_pe, q_flat, i + nope, ldq, rows, rope_dim)
                    _absorb(
                        memory, at, latent, nope // EXACT_CHUNK, w_uk, (first + n) * nope * rank, rows,
                        tiles, rank, scales, lane,
                    )  # fmt: skip
                _score(
                    memory, at, scratch, ld, count, rows, tiles, chunks, rank, depth_pe, scales, softmax_scale
                )
                for n in range(count):
                    lane, own = n * ROWS, positions[t : t + rows]
                    _weigh_rows(memory, at, scratch, ld, own, chunks, int8_weights, totals, scales, lane)
                _sum_values(
                    memory, at, count, rows, tiles, chunks, apart, rank, totals, scales, int8_weights, is_tame
                )
                for n in range(count):
                    values, o = at.values + n * ROWS * rank * PAIR, t * ldo + (first + n) * v_dim
                    _unabsorb(
                        memory, at, values, out_flat, o, ldo, rows, tiles, w_uv, (first + n) * v_size, rank,
                        v_dim,
                    )  # fmt: skip
        end_tiles()
        return True

    return by_tiles if uses_amx() and c_cache.dtype == types.uint8 and w_uk.dtype == types.uint16 else nothing


@kernel
def prefill(
    out, q, heads, rope_dim, w_uk, w_uv, positions, table, c_cache, s_cache, pe_cache, softmax_scale,
    int8_weights, scratch,
):  # fmt: skip
    """Attend for rows of a sequence, in ascending order. Returns whether it was done; if not, nothing is.

    out [T, heads * V]; q [T, heads * (nope + R)]; w_uk [heads, nope, C] and w_uv [heads, C, V], packed; the
    caches as in mla.attention, table int32 [max_blocks]: token t sees the positions 0 .. positions[t]
    inclusive. scratch float32, see cache_layout.scratch_size.
    """
    return _by_tiles(
        out, q, heads, rope_dim, w_uk, w_uv, positions, table, c_cache, s_cache, pe_cache,
        np.float32(softmax_scale), int8_weights, scratch,
    )  # fmt: skip
