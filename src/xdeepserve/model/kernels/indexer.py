"""Kernels of the lightning indexer: the norm of its keys, the choice of positions, and gathering their cache
entries.

The cache of its keys has them column by column of 16 positions, [blocks, tiles, D, 16]: so one number of a
query meets 16 positions side by side, and two blocks side by side are the bytes of one of twice the size.
Order of operations: canonical.index_scores, canonical.top_positions.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.jit.compiling import kernel, part
from xdeepserve.model.cache_layout import TILE
from xdeepserve.model.canonical import EXACT_CHUNK
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.rows import inverse_rms
from xdeepserve.model.kernels.simd import load, maximum, splat, tree_sum
from xdeepserve.model.kernels.vector_math import put, take

ZERO, LOWEST = np.float32(0.0), np.float32(-np.inf)


@kernel
def layer_norm(out, x, w, b, eps):
    """out [T, N], x [T, N], w, b [N]; out may be x. See canonical.layer_norm."""
    size = w.size
    for t in range(x.shape[0]):
        start, lanes = t * size, splat(ZERO)
        for i in range(0, size, LANES):
            lanes = lanes + take(x, start + i, size - i)
        mean = splat(tree_sum(lanes) / np.float32(size))
        for i in range(0, size, LANES):
            put(out, start + i, take(x, start + i, size - i) - mean, size - i)
        inverse = splat(inverse_rms(out, start, size, eps))
        for i in range(0, size, LANES):
            v = take(out, start + i, size - i) * inverse * take(w, i, size - i)
            put(out, start + i, v + take(b, i, size - i), size - i)


@part
def _dots(cache, one, other, q, at, depth, is_exact):
    """Multiply a query with the keys of two tiles of 16 positions, which begin at `one` and `other`."""
    dot, dot2 = splat(ZERO), splat(ZERO)
    if not is_exact:
        for k in range(depth):
            x = splat(q[at + k])
            dot = dot + x * load(cache, one + k * TILE)
            dot2 = dot2 + x * load(cache, other + k * TILE)
        return dot, dot2
    for start in range(0, depth, EXACT_CHUNK):
        stop = min(start + EXACT_CHUNK, depth)
        even, odd, even2, odd2 = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for k in range(start, stop, 2):
            x = splat(q[at + k])
            even = even + x * load(cache, one + k * TILE)
            even2 = even2 + x * load(cache, other + k * TILE)
        for k in range(start + 1, stop, 2):
            x = splat(q[at + k])
            odd = odd + x * load(cache, one + k * TILE)
            odd2 = odd2 + x * load(cache, other + k * TILE)
        dot, dot2 = dot + (even + odd), dot2 + (even2 + odd2)
    return dot, dot2


@part
def _score_tiles(scores, first, length, cache, one, other, q, at, weights, w_at, heads, depth, is_exact):
    """Compute the scores of up to 32 positions from `first` on, from two tiles. NaN becomes the least score,
    because otherwise fewer positions than fit might be chosen."""
    by_head, by_product = np.float32(heads**-0.5), splat(np.float32(depth**-0.5))
    total, total2 = splat(ZERO), splat(ZERO)
    for h in range(heads):
        dot, dot2 = _dots(cache, one, other, q, at + h * depth, depth, is_exact)
        weight = splat(weights[w_at + h] * by_head)
        total = total + weight * maximum(dot * by_product, splat(ZERO))
        total2 = total2 + weight * maximum(dot2 * by_product, splat(ZERO))
    put(scores, first, maximum(total, splat(LOWEST)), length - first)
    if length - first > TILE:
        put(scores, first + TILE, maximum(total2, splat(LOWEST)), length - first - TILE)


@part
def _choose(chosen, t, scores, length, threshold):
    """Fill chosen[t] with the best positions, ascending: those above the threshold, and those equal to it
    while there is room."""
    count, room = 0, chosen.shape[1]
    for p in range(length):
        if scores[p] > threshold:
            room -= 1
    for p in range(length):
        is_tie = scores[p] == threshold and room > 0
        if is_tie:
            room -= 1
        if is_tie or scores[p] > threshold:
            chosen[t, count] = p
            count += 1


@kernel
def choose_positions(
    chosen, q, weights, seq_of, positions, cache, block_tables, is_exact, scratch, worker, num_workers
):  # fmt: skip
    """Fill chosen int32 [T, K] with the K best positions of each token that sees more; other tokens' rows
    stay unwritten.

    q [T, heads * D], weights [T, heads]; cache [blocks, tiles, D, 16]; block_tables, seq_of, positions as in
    `attention`. is_exact: products of BF16 numbers, which q and cache hold then. scratch float32 [S].
    """
    heads, depth, size = weights.shape[1], cache.shape[2], cache.shape[1] * TILE
    flat_q, flat_weights, step = q.reshape(-1), weights.reshape(-1), depth * TILE
    for t in range(worker, positions.size, num_workers):
        length = positions[t] + 1
        if length <= chosen.shape[1]:
            continue
        table = block_tables[seq_of[t]]
        for first in range(0, length, 2 * TILE):
            one = (table[first // size] * (size // TILE) + first % size // TILE) * step
            second = first + TILE if first + TILE < length else first
            other = (table[second // size] * (size // TILE) + second % size // TILE) * step
            _score_tiles(
                scratch, first, length, cache, one, other, flat_q, t * heads * depth, flat_weights, t * heads,
                heads, depth, is_exact,
            )  # fmt: skip
        at = length - chosen.shape[1]
        _choose(chosen, t, scratch, length, np.partition(scratch[:length], at)[at])


@kernel
def gather_positions(out, source, chosen, tables):
    """Gather the chosen positions [T, K] of each token, side by side, from `source`. Shapes: source [blocks,
    tiles, columns / 16, 16, 16], a part of the cache; out [T, tiles, columns / 16, 16, 16]; tables int32 [T,
    max blocks]."""
    size = source.shape[1] * TILE
    for t in range(chosen.shape[0]):
        for p in range(chosen.shape[1]):
            position = chosen[t, p]
            block, tile, row = tables[t, position // size], position % size // TILE, position % TILE
            for c in range(source.shape[2]):
                for i in range(TILE):
                    out[t, p // TILE, c, p % TILE, i] = source[block, tile, c, row, i]
