"""Attention of absorbed MLA over a paged latent cache.

The cache is tiled like CloudMatrix's NZ format (section 4.2.2): a tile is 16 positions x 16 columns, stored
together, position after position. So a vector of 16 columns of one position and a number of it are both at
hand, and neither of attention's two products needs a transposed copy:

    scores [position, lane] = latent [position, k] @ query [k, lane]             16 lanes side by side
    output [lane, column] = weight [lane, position] @ latent [position, column]  16 columns side by side

A lane is one head of one query row. All rows of a sequence that are computed together (a prefill chunk, or a
token and its MTP draft) share lanes, up to 64 at a time, so that each latent that is read serves them all.
With INT8 latents the first product is one of bytes, too: a lane's query is quantised like a token's row. The
second is one of exact products, whose weights are rounded to BF16, or to whole numbers. Latents are stored
plus 128 as uint8, which is what the dot product takes on one of its sides.

Order of operations: canonical.attention. The softmax takes the maximum over all positions first. The products
themselves: mla_products.py.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.jit.compiling import kernel, part
from xdeepserve.model.cache_layout import BLOCK, MAX_LANES, TILE
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.division import divide
from xdeepserve.model.kernels.exact_tiles import factor
from xdeepserve.model.kernels.matrix_unit import ATTENTION_OPS
from xdeepserve.model.kernels.mla_matrix import four_starts, four_tiles, scratch_for_tiles, tile_start
from xdeepserve.model.kernels.mla_products import add_values, score_positions
from xdeepserve.model.kernels.rows import QUANT_FLOOR, QUANT_MAX, quantize_row
from xdeepserve.model.kernels.simd import (
    less_zero_points,
    load,
    maximum,
    prefetch,
    rint,
    splat,
    store,
    transpose,
)
from xdeepserve.model.kernels.vector_math import exp, put
from xdeepserve.model.packing import DEPTH

ZERO, ONE = np.float32(0.0), np.float32(1.0)
MINUS_INFINITY = np.float32(-np.inf)
COLUMNS_AT_ONCE = 4 * LANES
ROWS_AHEAD = 2  # queries that are asked for before their turn


@part
def _side_by_side(out, to, x, start, ldx, rows, size):
    """Transpose out[to + k * LANES + n] = x[start + n * ldx + k] for n < rows, at most LANES, and k <
    size."""
    whole = size // LANES * LANES if rows == LANES else 0
    for k in range(0, whole, LANES):
        transpose(out, to + k * LANES, LANES, x, start + k, ldx)
    for n in range(rows):
        for k in range(whole, size):
            out[to + k * LANES + n] = x[start + n * ldx + k]


@part
def _load_queries(
    scratch, query, query_pe, q_scale, start, spare, lane0, num_lanes, lanes,
    q_lat, rank, width, q, rope_dim, q_width, is_int8,
):  # fmt: skip
    """Load queries side by side in lanes: latent parts, and RoPE parts [lanes / 16, k, 16].

    Latent parts are [lanes / 16, k, 16] in FP32. In INT8 they are [lanes / 16, k / 4, 16, 4], with a scale
    and -128 times the sum for each, and zeros up to `width`. Idle lanes are zero. GQA has no latent parts.

    spare: start of scratch memory for LANES queries in INT8.
    """
    words = (rank + DEPTH - 1) // DEPTH
    scratch[query : query + lanes // LANES * (width * DEPTH if is_int8 else rank * LANES)] = ZERO
    scratch[query_pe : query_pe + lanes * rope_dim] = ZERO
    scratch[spare : spare + LANES * words] = ZERO
    latents, rotated = q_lat.reshape(-1), q.reshape(-1)
    quantised, packed = scratch.view(np.int8), scratch.view(np.int32)
    for n in range(lanes):
        packed[start + n] = 0
        scratch[q_scale + n] = ZERO
    for group in range(lanes // LANES):
        first = group * LANES
        rows, lane = min(LANES, num_lanes - first), lane0 + first
        if is_int8:
            for n in range(rows):
                row = (spare + n * words) * DEPTH
                for k in range(0, rank, LANES):
                    prefetch(latents, (lane + n + ROWS_AHEAD) * rank + k)
                scratch[q_scale + first + n] = quantize_row(quantised, row, latents, (lane + n) * rank, rank)
            to, points = query + group * width * DEPTH, load(packed, start + first)
            _side_by_side(packed, to, packed, spare, words, rows, words)
            for k in range(to, to + words * LANES, LANES):
                points = less_zero_points(points, load(packed, k))
            store(packed, start + first, points)
        else:
            _side_by_side(scratch, query + group * rank * LANES, latents, lane * rank, rank, rows, rank)
        rope = lane * q_width + q_width - rope_dim
        _side_by_side(scratch, query_pe + group * rope_dim * LANES, rotated, rope, q_width, rows, rope_dim)
    if is_int8:
        _round_factors(scratch, query_pe, lanes * rope_dim)


@part
def _round_factors(scratch, start, size):
    """Round scratch[start : start + size] as for exact products; size is a multiple of 16."""
    for i in range(start, start + size, LANES):
        store(scratch, i, factor(load(scratch, i)))


@part
def _exp_minus_maximum(scratch, scores, lanes, length):
    """Replace scores [length, lanes] by exp(score - maximum of the lane)."""
    for lane in range(0, lanes, LANES):
        at = scores + lane
        top = load(scratch, at)
        for p in range(1, length):
            top = maximum(top, load(scratch, at + p * lanes))
        for p in range(length):
            store(scratch, at + p * lanes, exp(load(scratch, at + p * lanes) - top))


@part
def _sum_weights(scratch, weights, lanes, length, sums, totals):
    """Sum weights [length, lanes] over positions by canonical.lane_sum, into totals [lanes]."""
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
    """Round weights [length, lanes], none negative, to whole numbers up to 127, with a scale for each
    lane."""
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
    """Put `value` at positions behind a lane's own, which it must not see."""
    for n in range(num_lanes):
        for p in range(positions[(lane0 + n) // heads] + 1, length):
            scratch[scores + p * lanes + n] = value


@part
def _hand_out(o_lat, lane0, num_lanes, rank, scratch, result, lanes, totals, inverses, scales, is_scaled):
    """Divide the summed values by the sums of their weights, and store them in their place.

    A few columns of all lanes are done at a time: those of one lane lie so far apart that they compete for
    places in the cache. inverses: start of scratch memory with one number per lane.
    """
    for lane in range(0, lanes, LANES):
        store(scratch, inverses + lane, splat(ONE) / load(scratch, totals + lane))
    for first in range(0, rank, COLUMNS_AT_ONCE):
        last = min(first + COLUMNS_AT_ONCE, rank)
        for n in range(num_lanes):
            total, inverse = splat(scratch[totals + n]), splat(scratch[inverses + n])
            scale = splat(scratch[scales + n])
            for i in range(first, last, LANES):
                out = load(scratch, result + (i // LANES * lanes + n) * LANES)
                if is_scaled:
                    out = out * scale
                put(o_lat, (lane0 + n) * rank + i, divide(out, total, inverse), rank - i)


@part
def _attend(
    o_lat, q_lat, q, lane0, num_lanes, heads, rope_dim, positions, table,
    c_cache, s_cache, pe_cache, softmax_scale, int8_weights, scratch, tiles, unit, ahead,
):  # fmt: skip
    """Attend for lanes lane0, ... (counted over all rows), all of one sequence. tiles, unit: scratch; ahead:
    cache tiles to be needed next."""
    rank, depth, is_int8 = o_lat.shape[1] // heads, q_lat.shape[1] // heads, s_cache.size > 0
    size, width, pe_width = pe_cache.shape[1] * TILE, c_cache.shape[2] * TILE, pe_cache.shape[2] * TILE
    lanes = (num_lanes + LANES - 1) // LANES * LANES
    length = positions[(lane0 + num_lanes - 1) // heads] + 1
    whole = (length + TILE - 1) // TILE * TILE

    if num_lanes * length * width < ATTENTION_OPS:
        unit = unit[:0]

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
        q_lat, depth, width, q, rope_dim, q.shape[1] // heads, is_int8,
    )  # fmt: skip
    if is_int8:
        for p in range(length):
            scratch[c_scale + p] = s_cache[table[p // size], p % size]

    score_positions(
        scratch, scores, lanes, num_lanes, length, table, size, c_cache, width, depth, pe_cache, pe_width,
        rope_dim, query, query_pe, q_scale, start, c_scale, softmax_scale, values, unit,
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
        else:
            _round_factors(scratch, scores, length * lanes)

    scratch[result : result + lanes * width] = ZERO
    for block in range(0, length, BLOCK):
        num_positions = min(BLOCK, length - block)
        for n in range((num_positions + TILE - 1) // TILE):
            tiles[n] = tile_start(table, block + n * TILE, size, width)
        weights = scores + block * lanes
        add_values(
            scratch, result, values, weights, lanes, num_lanes, num_positions, c_cache, tiles, width, unit,
            ahead,
        )  # fmt: skip
    _hand_out(
        o_lat, lane0, num_lanes, rank, scratch, result, lanes, totals, start, q_scale,
        is_int8 and int8_weights,
    )  # fmt: skip


@kernel
def attention(
    o_lat, q_lat, q, heads, rope_dim, seq_of, positions, c_cache, s_cache, pe_cache, block_tables,
    softmax_scale, int8_weights, scratch, worker, num_workers,
):  # fmt: skip
    """Attend with absorbed MLA over a paged latent cache; see canonical.attention.

    Or GQA over a paged cache of values and keys, of heads that share them: q_lat [T, 0], without latents to
    compare, o_lat [T, heads * V], rope_dim that of a whole query; see canonical.grouped_attention.

    o_lat, q_lat [T, heads * C]; q [T, heads * (nope + R)], each head's tail is q_pe; c_cache, pe_cache as in
    cache_shape, c_cache float32, or uint8 with scales in s_cache [blocks, size] (size 0 if float32);
    block_tables int32 [seqs, max_blocks], seq_of int32 [T], positions int32 [T]: token t of sequence
    seq_of[t] sees the positions 0 .. positions[t] inclusive. Rows of a sequence are neighbours and ascend.
    int8_weights concerns INT8 latents only.
    scratch float32, see scratch_size. Worker `worker` of `num_workers` takes every num_workers-th piece.
    """
    tiles = np.empty(BLOCK // TILE, np.int64)
    num_rows, piece, t = seq_of.size, 0, 0
    size, width = c_cache.shape[1] * TILE, c_cache.shape[2] * TILE
    unit = scratch_for_tiles(c_cache, width, rope_dim, positions, num_rows * heads)
    while t < num_rows:
        stop = t + 1
        while stop < num_rows and seq_of[stop] == seq_of[t]:
            stop += 1
        # What this worker has to do next, if each sequence has a row.
        following = min(stop + num_workers - 1, num_rows - 1)
        four = four_tiles(0, positions[following] // TILE * TILE)
        ahead = four_starts(block_tables[seq_of[following]], four, size, width)
        for lane in range(t * heads, stop * heads, MAX_LANES):
            if piece % num_workers == worker:
                _attend(
                    o_lat, q_lat, q, lane, min(MAX_LANES, stop * heads - lane), heads, rope_dim, positions,
                    block_tables[seq_of[t]], c_cache, s_cache, pe_cache, np.float32(softmax_scale),
                    int8_weights, scratch, tiles, unit, ahead,
                )  # fmt: skip
            piece += 1
        t = stop
