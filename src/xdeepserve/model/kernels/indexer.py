"""The lightning indexer's kernels: the norm of its keys, and the positions that it chooses.

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
from xdeepserve.model.kernels.simd import splat, tree_sum
from xdeepserve.model.kernels.vector_math import put, take

ZERO = np.float32(0.0)


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
def _add_chain(sums, tile, q, at, first, stop, step):
    """sums [16] += the products of q's numbers first, first + step, ... with those of 16 keys."""
    for k in range(first, stop, step):
        number = q[at + k]
        for p in range(TILE):
            sums[p] += number * tile[k, p]


@part
def _score_tile(scores, first, length, tile, q, at, weights, w_at, heads, depth, is_exact, sums):
    """Scores of the 16 positions from `first` on, to scores; sums [4, 16] is scratch memory."""
    total, dot, even, odd = sums[0], sums[1], sums[2], sums[3]
    by_head, by_product = np.float32(heads**-0.5), np.float32(depth**-0.5)
    for p in range(TILE):
        total[p] = ZERO
    for h in range(heads):
        for p in range(TILE):
            dot[p] = ZERO
        if is_exact:
            for start in range(0, depth, EXACT_CHUNK):
                stop = min(start + EXACT_CHUNK, depth)
                for p in range(TILE):
                    even[p] = odd[p] = ZERO
                _add_chain(even, tile, q, at + h * depth, start, stop, 2)
                _add_chain(odd, tile, q, at + h * depth, start + 1, stop, 2)
                for p in range(TILE):
                    dot[p] += even[p] + odd[p]
        else:
            _add_chain(dot, tile, q, at + h * depth, 0, depth, 1)
        weight = weights[w_at + h] * by_head
        for p in range(TILE):
            total[p] += weight * max(dot[p] * by_product, ZERO)
    for p in range(min(TILE, length - first)):
        scores[first + p] = total[p]


@part
def _choose(chosen, t, scores, length, threshold):
    """chosen[t] = the best positions, ascending: what is above the threshold, and what equals it, as long as
    there is room."""
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
    """chosen int32 [T, K]: the K best positions of each token that sees more of them; of others nothing.

    q [T, heads * D], weights [T, heads]; cache [blocks, tiles, D, 16]; block_tables, seq_of, positions as in
    `attention`. is_exact: products of BF16 numbers, which q and cache hold then. scratch float32 [S].
    """
    heads, depth, size = weights.shape[1], cache.shape[2], cache.shape[1] * TILE
    sums, flat_q, flat_weights = np.empty((4, TILE), np.float32), q.reshape(-1), weights.reshape(-1)
    for t in range(worker, positions.size, num_workers):
        length = positions[t] + 1
        if length <= chosen.shape[1]:
            continue
        for first in range(0, length, TILE):
            tile = cache[block_tables[seq_of[t], first // size], first % size // TILE]
            _score_tile(
                scratch, first, length, tile, flat_q, t * heads * depth, flat_weights, t * heads,
                heads, depth, is_exact, sums,
            )  # fmt: skip
        at = length - chosen.shape[1]
        _choose(chosen, t, scratch, length, np.partition(scratch[:length], at)[at])
