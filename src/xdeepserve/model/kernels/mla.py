"""Absorbed MLA over a paged latent cache, as two calls: what precedes attention per token, and attention.

The cache is tiled like CloudMatrix's NZ format (section 4.2.2): a tile is 16 positions x 16 columns, stored
together, position after position. So a vector of 16 columns of one position and a number of it are both at
hand, and neither of attention's two products needs a transposed copy:

    scores [position, lane] = latent [position, k] @ query [k, lane]             16 lanes side by side
    output [lane, column] = weight [lane, position] @ latent [position, column]  16 columns side by side

A lane is one head of one query row. All rows of a sequence that are computed together (a prefill chunk, or a
token and its MTP draft) share lanes, up to 64 at a time, so that each latent that is read serves them all.
INT8 latents become float32 tiles in the thread's scratch memory, once for all lanes.

Order of operations: canonical.attention. Each score ascends in k, each output in position; the softmax takes
the maximum over all positions first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from xdeepserve.model.cache_layout import BLOCK, MAX_LANES, TILE
from xdeepserve.model.kernels.base import kernel, part
from xdeepserve.model.kernels.rows import inverse_rms, quantize_row
from xdeepserve.model.kernels.simd import LANES, load, maximum, splat, store
from xdeepserve.model.kernels.tiles import (
    add_outer,
    add_tiles,
    load_tile,
    scale_rows,
    scale_tile,
    store_tile,
    zeros,
)
from xdeepserve.model.kernels.vector_math import exp, put, take

TILE_SIZE = TILE * TILE
ZERO = np.float32(0.0)
MINUS_INFINITY = np.float32(-np.inf)

# ---------------------------------------------------------------- before attention


@kernel
def rope_heads(x, heads, positions, cos, sin):
    """In place: rotate the last 2 * cos.shape[1] entries of each head of x [T, heads * D]."""
    half = cos.shape[1]
    width = x.shape[1] // heads
    for t in range(x.shape[0]):
        c, s = cos[positions[t]], sin[positions[t]]
        for h in range(heads):
            row = x[t, h * width + width - 2 * half : (h + 1) * width]
            for i in range(half):
                even, odd = row[2 * i], row[2 * i + 1]
                row[2 * i] = even * c[i] - odd * s[i]
                row[2 * i + 1] = even * s[i] + odd * c[i]


@part
def _slot_start(slot, size, columns):
    """Flat index of column 0 of a cache slot; the next 16 columns are TILE_SIZE further."""
    block, i = slot // size, slot % size
    return (block * (size // TILE) + i // TILE) * (columns // TILE) * TILE_SIZE + i % TILE * TILE


@kernel
def append_kv(c_cache, s_cache, pe_cache, slots, kv, norm, eps, positions, cos, sin):
    """Normalise, rotate and store kv [T, C + R] in cache slots [T] (block * size + offset).

    c_cache, pe_cache: see cache_shape; c_cache float32, or int8 with its scales in s_cache [blocks, size].
    """
    rank, half = norm.size, cos.shape[1]
    size, width, pe_width = pe_cache.shape[1] * TILE, c_cache.shape[2] * TILE, pe_cache.shape[2] * TILE
    row, quantized = np.zeros(width, np.float32), np.zeros(width, np.int8)
    pe = np.zeros(pe_width, np.float32)
    for t in range(slots.size):
        start = t * kv.shape[1]
        inverse = splat(inverse_rms(kv, start, rank, eps))
        for i in range(0, rank, LANES):
            store(row, i, take(kv, start + i, rank - i) * inverse * take(norm, i, rank - i))
        to = _slot_start(slots[t], size, width)
        if s_cache.size > 0:
            s_cache[slots[t] // size, slots[t] % size] = quantize_row(quantized, 0, row, 0, rank)
            for i in range(0, width, LANES):
                store(c_cache, to + i * TILE, load(quantized, i))
        else:
            for i in range(0, width, LANES):
                store(c_cache, to + i * TILE, load(row, i))
        c, s, source = cos[positions[t]], sin[positions[t]], kv[t, rank:]
        for i in range(half):
            even, odd = source[2 * i], source[2 * i + 1]
            pe[2 * i] = even * c[i] - odd * s[i]
            pe[2 * i + 1] = even * s[i] + odd * c[i]
        to = _slot_start(slots[t], size, pe_width)
        for i in range(0, pe_width, LANES):
            store(pe_cache, to + i * TILE, load(pe, i))


# ---------------------------------------------------------------- attention


@part
def _tile_start(table, position, size, width):
    """Flat index of the cache tile that begins at `position`, a multiple of 16."""
    return (table[position // size] * (size // TILE) + position % size // TILE) * width * TILE


def _values(cache, start, scratch, at, count):
    """`count` values from cache[start] as float32: an array that holds them, and where."""
    raise NotImplementedError


@overload(_values, jit_options={"nogil": True})
def _values_of(cache, start, scratch, at, count):
    if cache.dtype == types.float32:
        return lambda cache, start, scratch, at, count: (cache, start)

    def widen(cache, start, scratch, at, count):
        for i in range(0, count, LANES):
            store(scratch, at + i, load(cache, start + i))
        return scratch, at

    return widen


def _score_tile(mr: int, nr: int) -> Any:
    """Scores of mr positions x nr vectors of lanes. mr and nr are constants in its code."""

    @part
    def tile(scratch, o, lanes, c, i, rank, pe, i_pe, rope_dim, query, is_int8, scale, softmax_scale):
        ldw = (rank + rope_dim) * LANES
        acc, acc_pe = zeros(mr, nr), zeros(mr, nr)
        for column in range(0, rank, TILE):
            for k in range(min(TILE, rank - column)):
                at = i + column * TILE + k
                acc = add_outer(acc, c, at, TILE, scratch, query + (column + k) * LANES, ldw)
        if is_int8:
            acc = scale_rows(acc, scratch, scale)
        for column in range(0, rope_dim, TILE):
            for k in range(min(TILE, rope_dim - column)):
                at = i_pe + column * TILE + k
                acc_pe = add_outer(acc_pe, pe, at, TILE, scratch, query + (rank + column + k) * LANES, ldw)
        acc = scale_tile(add_tiles(acc, acc_pe), softmax_scale)
        store_tile(scratch, o, lanes, acc, nr * LANES)

    return tile


_score_4x4, _score_4x2, _score_8x1 = _score_tile(4, 4), _score_tile(4, 2), _score_tile(8, 1)


def _value_tile(nr: int) -> Any:
    """Outputs of 4 lanes x nr vectors of columns over some tiles of positions."""

    @part
    def tile(scratch, o, width, weight, lanes, c, starts, column, num_positions):
        acc = load_tile(4, nr, scratch, o, width, LANES)
        for first in range(0, num_positions, TILE):
            start = starts[first // TILE] + column * TILE
            for p in range(min(TILE, num_positions - first)):
                at = weight + (first + p) * lanes
                acc = add_outer(acc, scratch, at, 1, c, start + p * TILE, TILE_SIZE)
        store_tile(scratch, o, width, acc, nr * LANES)

    return tile


_value_4x4, _value_4x1 = _value_tile(4), _value_tile(1)


@part
def _transpose_queries(scratch, query, lane0, num_lanes, lanes, q_lat, rank, q, rope_dim, q_width):
    """[vectors of lanes, k, 16] with k over the latent and then the RoPE part; zeros in lanes that idle."""
    depth = rank + rope_dim
    latents, rotated = q_lat.reshape(-1), q.reshape(-1)
    scratch[query : query + lanes * depth] = ZERO
    for n in range(num_lanes):
        to = query + n // LANES * LANES * depth + n % LANES
        start = (lane0 + n) * rank
        for k in range(rank):
            scratch[to + k * LANES] = latents[start + k]
        start, to = (lane0 + n) * q_width + q_width - rope_dim, to + rank * LANES
        for k in range(rope_dim):
            scratch[to + k * LANES] = rotated[start + k]


@part
def _exp_minus_maximum(scratch, scores, lanes, length):
    """Scores [length, lanes] become exp(score - maximum of the lane)."""
    for lane in range(0, lanes, LANES):
        at = scores + lane
        top = load(scratch, at)
        for p in range(1, length):
            top = maximum(top, load(scratch, at + p * lanes))
        for p in range(length):
            store(scratch, at + p * lanes, exp(load(scratch, at + p * lanes) - top))


@part
def _sum_weights(scratch, weights, lanes, length, sums, totals):
    """totals [lanes] = canonical.lane_sum over positions of weights [length, lanes]."""
    for lane in range(0, lanes, LANES):
        for i in range(LANES):
            store(scratch, sums + i * LANES, splat(ZERO))
        for p in range(length):
            to = sums + p % LANES * LANES
            store(scratch, to, load(scratch, to) + load(scratch, weights + lane + p * lanes))
        half = LANES // 2
        while half > 0:
            for i in range(half):
                to = sums + i * LANES
                store(scratch, to, load(scratch, to) + load(scratch, to + half * LANES))
            half //= 2
        store(scratch, totals + lane, load(scratch, sums))


@part
def _hide_future(scratch, scores, lanes, lane0, num_lanes, heads, positions, length, value):
    """Put `value` where a lane must not look: positions behind its own."""
    for n in range(num_lanes):
        for p in range(positions[(lane0 + n) // heads] + 1, length):
            scratch[scores + p * lanes + n] = value


@part
def _attend(
    o_lat, q_lat, q, lane0, num_lanes, heads, rope_dim, positions, table,
    c_cache, s_cache, pe_cache, softmax_scale, scratch,
):  # fmt: skip
    """Lanes lane0, ... (counted over all rows), which belong to one sequence."""
    rank, is_int8 = q_lat.shape[1] // heads, s_cache.size > 0
    size, width, pe_width = pe_cache.shape[1] * TILE, c_cache.shape[2] * TILE, pe_cache.shape[2] * TILE
    lanes = (num_lanes + LANES - 1) // LANES * LANES
    length = positions[(lane0 + num_lanes - 1) // heads] + 1

    # Scratch memory, in order; see scratch_size.
    query = 0
    scores = query + lanes * (rank + rope_dim)
    scales = scores + (length + TILE - 1) // TILE * TILE * lanes
    sums = scales + (length + TILE - 1) // TILE * TILE
    totals = sums + LANES * LANES
    result = totals + MAX_LANES
    values = result + lanes * width

    _transpose_queries(scratch, query, lane0, num_lanes, lanes, q_lat, rank, q, rope_dim, q.shape[1] // heads)
    if is_int8:
        for p in range(length):
            scratch[scales + p] = s_cache[table[p // size], p % size]

    for first in range(0, length, TILE):
        start = _tile_start(table, first, size, width)
        c, i = _values(c_cache, start, scratch, values, TILE * width)
        i_pe = _tile_start(table, first, size, pe_width)
        for p in range(0, TILE, 8):
            o, scale = scores + (first + p) * lanes, scales + first + p
            lane = 0
            while lane < lanes:
                to, vectors = query + lane * (rank + rope_dim), (lanes - lane) // LANES
                if vectors >= 2:
                    for half in range(0, 8, 4):
                        at, at_pe = i + (p + half) * TILE, i_pe + (p + half) * TILE
                        row = o + half * lanes + lane
                        if vectors >= 4:
                            _score_4x4(
                                scratch, row, lanes, c, at, rank, pe_cache, at_pe, rope_dim, to,
                                is_int8, scale + half, softmax_scale,
                            )  # fmt: skip
                        else:
                            _score_4x2(
                                scratch, row, lanes, c, at, rank, pe_cache, at_pe, rope_dim, to,
                                is_int8, scale + half, softmax_scale,
                            )  # fmt: skip
                    lane += 4 * LANES if vectors >= 4 else 2 * LANES
                else:
                    _score_8x1(
                        scratch, o + lane, lanes, c, i + p * TILE, rank, pe_cache, i_pe + p * TILE,
                        rope_dim, to, is_int8, scale, softmax_scale,
                    )  # fmt: skip
                    lane += LANES

    _hide_future(scratch, scores, lanes, lane0, num_lanes, heads, positions, length, MINUS_INFINITY)
    _exp_minus_maximum(scratch, scores, lanes, length)
    _hide_future(scratch, scores, lanes, lane0, num_lanes, heads, positions, length, ZERO)
    _sum_weights(scratch, scores, lanes, length, sums, totals)
    if is_int8:
        for p in range(length):
            scale = splat(scratch[scales + p])
            for lane in range(0, lanes, LANES):
                at = scores + p * lanes + lane
                store(scratch, at, load(scratch, at) * scale)

    scratch[result : result + lanes * width] = ZERO
    starts = np.empty(BLOCK // TILE, np.int64)
    for block in range(0, length, BLOCK):
        num_positions = min(BLOCK, length - block)
        for n in range(0, num_positions, TILE):
            start = _tile_start(table, block + n, size, width)
            c, i = _values(c_cache, start, scratch, values + n * width, TILE * width)
            starts[n // TILE] = i
        column = 0
        while column < width:
            is_wide = column + 4 * TILE <= width
            for lane in range(0, lanes, 4):
                o, weight = result + lane * width + column, scores + block * lanes + lane
                if is_wide:
                    _value_4x4(scratch, o, width, weight, lanes, c, starts, column, num_positions)
                else:
                    _value_4x1(scratch, o, width, weight, lanes, c, starts, column, num_positions)
            column += 4 * TILE if is_wide else TILE

    for n in range(num_lanes):
        total = splat(scratch[totals + n])
        for i in range(0, rank, LANES):
            put(o_lat, (lane0 + n) * rank + i, load(scratch, result + n * width + i) / total, rank - i)


@kernel
def attention(
    o_lat, q_lat, q, heads, rope_dim, seq_of, positions, c_cache, s_cache, pe_cache, block_tables,
    softmax_scale, scratch, worker, num_workers,
):  # fmt: skip
    """Absorbed MLA over a paged latent cache; see canonical.attention.

    o_lat, q_lat [T, heads * C]; q [T, heads * (nope + R)], each head's tail is q_pe; c_cache, pe_cache as in
    cache_shape, c_cache float32, or int8 with scales in s_cache [blocks, size] (size 0 if float32);
    block_tables int32 [seqs, max_blocks], seq_of int32 [T], positions int32 [T]: token t of sequence
    seq_of[t] sees the positions 0 .. positions[t] inclusive. Rows of a sequence are neighbours and ascend.
    scratch float32, see scratch_size. Worker `worker` of `num_workers` takes every num_workers-th piece.
    """
    num_rows, piece, t = seq_of.size, 0, 0
    while t < num_rows:
        stop = t + 1
        while stop < num_rows and seq_of[stop] == seq_of[t]:
            stop += 1
        for lane in range(t * heads, stop * heads, MAX_LANES):
            if piece % num_workers == worker:
                _attend(
                    o_lat, q_lat, q, lane, min(MAX_LANES, stop * heads - lane), heads, rope_dim, positions,
                    block_tables[seq_of[t]], c_cache, s_cache, pe_cache, np.float32(softmax_scale), scratch,
                )  # fmt: skip
            piece += 1
        t = stop
