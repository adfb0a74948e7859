"""Absorbed MLA's attention over a paged latent cache.

The cache is tiled like CloudMatrix's NZ format (section 4.2.2): a tile is 16 positions x 16 columns, stored
together, position after position. So a vector of 16 columns of one position and a number of it are both at
hand, and neither of attention's two products needs a transposed copy:

    scores [position, lane] = latent [position, k] @ query [k, lane]             16 lanes side by side
    output [lane, column] = weight [lane, position] @ latent [position, column]  16 columns side by side

A lane is one head of one query row. All rows of a sequence that are computed together (a prefill chunk, or a
token and its MTP draft) share lanes, up to 64 at a time, so that each latent that is read serves them all.
With INT8 latents the first product is one of bytes, too: a lane's query is quantised like a token's row. For
the second they become float32 tiles in the thread's scratch memory, once for all lanes; weights may be
rounded to whole numbers before it, which makes it one of INT8. Latents are stored plus 128 as uint8, which is
what the dot product takes on one of its sides.

Order of operations: canonical.attention. Each score ascends in k, each output in position; the softmax takes
the maximum over all positions first.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from xdeepserve.jit.compiling import PART_OPTIONS, TILE_OPTIONS, kernel, part, tile_part
from xdeepserve.model.cache_layout import BLOCK, MAX_LANES, TILE, TILE_SIZE
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.rows import QUANT_FLOOR, QUANT_MAX, quantize_row
from xdeepserve.model.kernels.simd import load, maximum, prefetch, rint, splat, store
from xdeepserve.model.kernels.tiles import (
    add_dot,
    add_outer,
    add_tiles,
    dot_start_columns,
    load_tile,
    scale_dots,
    scale_tile,
    store_tile,
    zeros,
)
from xdeepserve.model.kernels.vector_math import exp, put
from xdeepserve.model.packing import DEPTH

ZERO = np.float32(0.0)
MINUS_INFINITY = np.float32(-np.inf)


@part
def _tile_start(table, position, size, width):
    """Flat index of the cache tile that begins at `position`, a multiple of 16."""
    return (table[position // size] * (size // TILE) + position % size // TILE) * width * TILE


def _values(cache, start, scratch, at):
    """A cache tile from cache[start] as float32: an array that holds it, and where."""
    raise NotImplementedError


@overload(_values, jit_options=PART_OPTIONS)
def _values_of(cache, start, scratch, at):
    if cache.dtype == types.float32:
        return lambda cache, start, scratch, at: (cache, start)

    def widen(cache, start, scratch, at):
        for i in range(0, TILE_SIZE, LANES):
            store(scratch, at + i, load(cache, start + i))
        return scratch, at

    return widen


def _latent_product(c, i, ahead, rank, scratch, query, q_scale, start, c_scale):
    """A tile of products of 16 latents with one vector of lanes, scaled: one way for each type of cache.

    c[i ...] holds the latents, scratch[query ...] the queries as `_load_queries` puts them there;
    c[i + ahead ...] is what will be needed next.
    """
    raise NotImplementedError


@overload(_latent_product, jit_options=TILE_OPTIONS)
def _latent_product_of(c, i, ahead, rank, scratch, query, q_scale, start, c_scale):
    if c.dtype == types.float32:

        def in_f32(c, i, ahead, rank, scratch, query, q_scale, start, c_scale):
            acc = zeros(TILE, 1)
            for column in range(0, rank, TILE):
                for row in range(TILE):
                    prefetch(c, i + ahead + (column + row) * TILE)
                for k in range(min(TILE, rank - column)):
                    acc = add_outer(
                        acc, c, i + column * TILE + k, TILE, scratch, query + (column + k) * LANES, 0
                    )
            return acc

        return in_f32

    def in_int8(c, i, ahead, rank, scratch, query, q_scale, start, c_scale):
        packed, at_packed = scratch.view(np.int8), query * 4
        acc = dot_start_columns(TILE, 1, scratch.view(np.int32), start)
        for column in range(0, (rank + TILE - 1) // TILE * TILE, TILE):
            for row in range(0, TILE, DEPTH):
                prefetch(c, i + ahead + (column + row) * TILE)
            for k in range(0, TILE, DEPTH):
                acc = add_dot(
                    acc, c, i + column * TILE + k, TILE, packed, at_packed + (column + k) * LANES, 0
                )
        return scale_dots(acc, scratch, c_scale, scratch, q_scale)

    return in_int8


@tile_part
def _score_16x1(
    scratch, o, lanes, c, i, ahead, rank, pe, i_pe, rope_dim,
    query, query_pe, q_scale, start, c_scale, softmax_scale,
):  # fmt: skip
    """Scores of the positions of a cache tile x one vector of lanes: see `gemm` on why one."""
    acc = _latent_product(c, i, ahead, rank, scratch, query, q_scale, start, c_scale)
    acc_pe = zeros(TILE, 1)
    for column in range(0, rope_dim, TILE):
        for k in range(min(TILE, rope_dim - column)):
            at, w = i_pe + column * TILE + k, query_pe + (column + k) * LANES
            acc_pe = add_outer(acc_pe, pe, at, TILE, scratch, w, 0)
    store_tile(scratch, o, lanes, scale_tile(add_tiles(acc, acc_pe), softmax_scale), LANES)


@tile_part
def _value_16x1(scratch, o, weight, lanes, c, starts, num_positions, is_first):
    """Outputs of 16 lanes x 16 columns over some tiles of positions, whose values start at c[starts ...]."""
    acc = load_tile(LANES, 1, scratch, o, LANES, LANES)
    for first in range(0, num_positions, TILE):
        start = starts[first // TILE]
        for p in range(min(TILE, num_positions - first)):
            if is_first:
                prefetch(c, start + p * TILE + TILE_SIZE)  # the next 16 columns
            acc = add_outer(acc, scratch, weight + (first + p) * lanes, 1, c, start + p * TILE, 0)
    store_tile(scratch, o, LANES, acc, LANES)


@part
def _load_queries(
    scratch, query, query_pe, q_scale, start, spare, lane0, num_lanes, lanes,
    q_lat, rank, q, rope_dim, q_width, is_int8,
):  # fmt: skip
    """Lanes side by side: their latent parts [lanes / 16, k, 16], or INT8 [lanes / 16, k / 4, 16, 4] with a
    scale and -128 times the sum for each; and the RoPE parts [lanes / 16, k, 16]. Idle lanes are zero.

    spare: where scratch memory for a query in INT8 is."""
    width, words = (rank + TILE - 1) // TILE * TILE, (rank + DEPTH - 1) // DEPTH
    scratch[query : query + lanes // LANES * (width * DEPTH if is_int8 else rank * LANES)] = ZERO
    scratch[query_pe : query_pe + lanes * rope_dim] = ZERO
    scratch[spare : spare + words] = ZERO
    latents, rotated = q_lat.reshape(-1), q.reshape(-1)
    row, packed = scratch[spare : spare + words].view(np.int8), scratch.view(np.int32)
    for n in range(lanes):
        packed[start + n] = 0
        scratch[q_scale + n] = ZERO
    for n in range(num_lanes):
        group, lane = n // LANES, n % LANES
        if is_int8:
            scratch[q_scale + n] = quantize_row(row, 0, latents, (lane0 + n) * rank, rank)
            total = np.int32(0)
            for k in range(rank):
                total += np.int32(row[k])
            packed[start + n] = np.int32(-128) * total
            to = query + group * width * DEPTH + lane
            for k in range(words):
                packed[to + k * LANES] = packed[spare + k]
        else:
            to = query + group * rank * LANES + lane
            for k in range(rank):
                scratch[to + k * LANES] = latents[(lane0 + n) * rank + k]
        source, to = (lane0 + n) * q_width + q_width - rope_dim, query_pe + group * rope_dim * LANES + lane
        for k in range(rope_dim):
            scratch[to + k * LANES] = rotated[source + k]


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
def _round_weights(scratch, weights, lanes, length, scales):
    """Weights [length, lanes], none negative, become whole numbers up to 127; a scale for each lane."""
    for lane in range(0, lanes, LANES):
        largest = splat(QUANT_FLOOR)
        for p in range(length):
            largest = maximum(largest, load(scratch, weights + lane + p * lanes))
        scale = largest / splat(QUANT_MAX)
        store(scratch, scales + lane, scale)
        for p in range(length):
            at = weights + lane + p * lanes
            store(scratch, at, rint(load(scratch, at) / scale))


@part
def _hide_future(scratch, scores, lanes, lane0, num_lanes, heads, positions, length, value):
    """Put `value` where a lane must not look: positions behind its own."""
    for n in range(num_lanes):
        for p in range(positions[(lane0 + n) // heads] + 1, length):
            scratch[scores + p * lanes + n] = value


@part
def _add_values(scratch, result, values, scores, lanes, length, c_cache, table, size, width, tiles, starts):
    """Outputs at `result`, [column tiles, lanes, 16]: the weights at `scores` times the latents' values.

    values: where scratch memory for those of 16 columns is.
    """
    scratch[result : result + lanes * width] = ZERO
    for block in range(0, length, BLOCK):
        num_positions = min(BLOCK, length - block)
        num_tiles = (num_positions + TILE - 1) // TILE
        for n in range(num_tiles):
            tiles[n] = _tile_start(table, block + n * TILE, size, width)
        for column in range(0, width, TILE):
            for n in range(num_tiles):
                c, starts[n] = _values(c_cache, tiles[n] + column * TILE, scratch, values + n * TILE_SIZE)
            for lane in range(0, lanes, LANES):
                o, weight = result + (column // TILE * lanes + lane) * LANES, scores + block * lanes + lane
                _value_16x1(scratch, o, weight, lanes, c, starts, num_positions, lane == 0)


@part
def _attend(
    o_lat, q_lat, q, lane0, num_lanes, heads, rope_dim, positions, table,
    c_cache, s_cache, pe_cache, softmax_scale, int8_weights, scratch, tiles, starts,
):  # fmt: skip
    """Lanes lane0, ... (counted over all rows), all of one sequence; tiles, starts: scratch."""
    rank, is_int8 = q_lat.shape[1] // heads, s_cache.size > 0
    size, width, pe_width = pe_cache.shape[1] * TILE, c_cache.shape[2] * TILE, pe_cache.shape[2] * TILE
    lanes = (num_lanes + LANES - 1) // LANES * LANES
    length = positions[(lane0 + num_lanes - 1) // heads] + 1
    whole = (length + TILE - 1) // TILE * TILE

    # Scratch memory, in order; see scratch_size.
    query = 0
    query_pe = query + lanes * width
    scores = query_pe + lanes * rope_dim
    c_scale = scores + whole * lanes
    sums = c_scale + whole
    totals = sums + LANES * LANES
    q_scale = totals + MAX_LANES
    start = q_scale + MAX_LANES
    result = start + MAX_LANES
    values = result + lanes * width

    _load_queries(
        scratch, query, query_pe, q_scale, start, result, lane0, num_lanes, lanes,
        q_lat, rank, q, rope_dim, q.shape[1] // heads, is_int8,
    )  # fmt: skip
    if is_int8:
        for p in range(length):
            scratch[c_scale + p] = s_cache[table[p // size], p % size]

    query_size = width * DEPTH if is_int8 else rank * LANES  # of a vector of lanes
    for first in range(0, length, TILE):
        i, i_pe = _tile_start(table, first, size, width), _tile_start(table, first, size, pe_width)
        following = min(first + TILE, (length - 1) // TILE * TILE)
        ahead = _tile_start(table, following, size, width) - i
        for lane in range(0, lanes, LANES):
            group = lane // LANES
            to, to_pe = query + group * query_size, query_pe + group * rope_dim * LANES
            o = scores + first * lanes + lane
            _score_16x1(
                scratch, o, lanes, c_cache, i, ahead, rank, pe_cache, i_pe, rope_dim,
                to, to_pe, q_scale + lane, start + lane, c_scale + first, softmax_scale,
            )  # fmt: skip

    _hide_future(scratch, scores, lanes, lane0, num_lanes, heads, positions, length, MINUS_INFINITY)
    _exp_minus_maximum(scratch, scores, lanes, length)
    _hide_future(scratch, scores, lanes, lane0, num_lanes, heads, positions, length, ZERO)
    _sum_weights(scratch, scores, lanes, length, sums, totals)
    if is_int8:
        for p in range(length):
            scale = splat(scratch[c_scale + p])
            for lane in range(0, lanes, LANES):
                at = scores + p * lanes + lane
                store(scratch, at, load(scratch, at) * scale)
        if int8_weights:
            _round_weights(scratch, scores, lanes, length, q_scale)

    _add_values(
        scratch, result, values, scores, lanes, length, c_cache, table, size, width, tiles, starts
    )  # fmt: skip
    for n in range(num_lanes):
        total, scale = splat(scratch[totals + n]), splat(scratch[q_scale + n])
        for i in range(0, rank, LANES):
            out = load(scratch, result + (i // LANES * lanes + n) * LANES)
            if is_int8 and int8_weights:
                out = out * scale
            put(o_lat, (lane0 + n) * rank + i, out / total, rank - i)


@kernel
def attention(
    o_lat, q_lat, q, heads, rope_dim, seq_of, positions, c_cache, s_cache, pe_cache, block_tables,
    softmax_scale, int8_weights, scratch, worker, num_workers,
):  # fmt: skip
    """Absorbed MLA over a paged latent cache; see canonical.attention.

    o_lat, q_lat [T, heads * C]; q [T, heads * (nope + R)], each head's tail is q_pe; c_cache, pe_cache as in
    cache_shape, c_cache float32, or uint8 with scales in s_cache [blocks, size] (size 0 if float32);
    block_tables int32 [seqs, max_blocks], seq_of int32 [T], positions int32 [T]: token t of sequence
    seq_of[t] sees the positions 0 .. positions[t] inclusive. Rows of a sequence are neighbours and ascend.
    int8_weights concerns INT8 latents only.
    scratch float32, see scratch_size. Worker `worker` of `num_workers` takes every num_workers-th piece.
    """
    tiles, starts = np.empty(BLOCK // TILE, np.int64), np.empty(BLOCK // TILE, np.int64)
    num_rows, piece, t = seq_of.size, 0, 0
    while t < num_rows:
        stop = t + 1
        while stop < num_rows and seq_of[stop] == seq_of[t]:
            stop += 1
        for lane in range(t * heads, stop * heads, MAX_LANES):
            if piece % num_workers == worker:
                _attend(
                    o_lat, q_lat, q, lane, min(MAX_LANES, stop * heads - lane), heads, rope_dim, positions,
                    block_tables[seq_of[t]], c_cache, s_cache, pe_cache, np.float32(softmax_scale),
                    int8_weights, scratch, tiles, starts,
                )  # fmt: skip
            piece += 1
        t = stop
