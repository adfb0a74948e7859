"""Numba twin of `sampling.py`, equal bit for bit.

scaled = (logit - largest logit) / temperature is never positive, so the bits of -scaled, read as an integer,
ascend while the logits descend. Hence sorting is a radix sort of integers, which is stable as
`sampling.sample` asks, and top-k sorts only what can be among the first k.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.jit.compiling import array_part, kernel, part
from xdeepserve.model import sampling as s
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.simd import load, max_of, maximum, negative, splat
from xdeepserve.model.kernels.vector_math import exp, put, take

M0, M1 = np.uint64(s.PHILOX_M0), np.uint64(s.PHILOX_M1)
W0, W1 = np.uint64(s.PHILOX_W0), np.uint64(s.PHILOX_W1)
MASK32, SHIFT32 = np.uint64(s.MASK32), np.uint64(32)

DIGIT = 11  # bits that one pass of the radix sort looks at; three passes cover the 31 bits of a key
BUCKETS = 1 << DIGIT
TOP_SHIFT = 2 * DIGIT
ZERO = np.float32(0.0)


@kernel
def uniform(seed, choice, position):
    """Return a uniform random number; seed, choice, position as uint64; see sampling.uniform."""
    c0, c1, c2, c3 = position & MASK32, choice & MASK32, np.uint64(0), np.uint64(0)
    k0, k1 = seed & MASK32, seed >> SHIFT32
    for _ in range(10):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (p1 >> SHIFT32) ^ c1 ^ k0, p1 & MASK32, (p0 >> SHIFT32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + W0) & MASK32, (k1 + W1) & MASK32
    high, low = np.float64(c0 >> np.uint64(5)), np.float64(c1 >> np.uint64(6))
    return (high * 67108864.0 + low) / 9007199254740992.0


@part
def _largest(logits, row):
    """Return the largest of logits[row] and its lowest index; -1 if there is a NaN."""
    size, num_nans = logits.shape[1], 0
    for i in range(size):
        num_nans += logits[row, i] != logits[row, i]
    if num_nans > 0:
        return logits[row, 0], -1
    start = row * size
    lanes = splat(logits[row, 0])
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        lanes = maximum(lanes, load(logits, start + i))
    top = max_of(lanes)
    for i in range(whole, size):
        top = max(top, logits[row, i])
    first = 0
    while logits[row, first] != top:
        first += 1
    return top, first


@array_part
def _keep_first(keys, ids, size, count):
    """Move the `count` smallest keys, with all that share their top digit, to the front; return their
    number."""
    histogram = np.zeros(BUCKETS, np.int64)
    for i in range(size):
        histogram[keys[i] >> TOP_SHIFT] += 1
    last, covered = -1, 0
    while covered < count:
        last += 1
        covered += histogram[last]
    kept = 0
    for i in range(size):
        if keys[i] >> TOP_SHIFT <= last:
            keys[kept] = keys[i]
            ids[kept] = ids[i]
            kept += 1
    return kept


@part
def _sort_by_digit(to_keys, to_ids, keys, ids, size, shift, place):
    """Sort by a single digit: a stable pass of the radix sort."""
    for digit in range(BUCKETS):
        place[digit] = 0
    for i in range(size):
        place[(keys[i] >> shift) & (BUCKETS - 1)] += 1
    total = 0
    for digit in range(BUCKETS):
        count = place[digit]
        place[digit] = total
        total += count
    for i in range(size):
        digit = (keys[i] >> shift) & (BUCKETS - 1)
        to_keys[place[digit]] = keys[i]
        to_ids[place[digit]] = ids[i]
        place[digit] += 1


@array_part
def sample_one(logits, row, temperature, top_k, top_p, min_p, seed, choice, position):
    """Return the token sampled from a row of logits; -1 if no token can be drawn. Numbers as in `sample`."""
    size = logits.shape[1]
    top, first = _largest(logits, row)
    if temperature == ZERO or first < 0:
        return first
    if not np.isfinite(top):
        return -1
    negated, ids = np.empty(size, np.float32), np.empty(size, np.int32)
    for i in range(size):
        # Adding zero makes a zero of a minus zero, which has other bits.
        negated[i] = -((logits[row, i] - top) / temperature) + ZERO
        ids[i] = i
    keys = negated.view(np.int32)
    keep = min(top_k, size) if top_k > 0 else size
    kept = size if keep == size else _keep_first(keys, ids, size, keep)
    other_negated, other_ids = np.empty(kept, np.float32), np.empty(kept, np.int32)
    other_keys, place = other_negated.view(np.int32), np.empty(BUCKETS, np.int64)
    _sort_by_digit(other_keys, other_ids, keys, ids, kept, 0, place)
    _sort_by_digit(keys, ids, other_keys, other_ids, kept, DIGIT, place)
    _sort_by_digit(other_keys, other_ids, keys, ids, kept, 2 * DIGIT, place)

    weights, running = negated, np.empty(keep, np.float64)
    for i in range(0, keep, LANES):
        put(weights, i, exp(negative(take(other_negated, i, keep - i))), keep - i)
    if min_p > ZERO:
        end = 1
        while end < keep and weights[end] >= min_p:
            end += 1
        keep = end
    total = 0.0
    for i in range(keep):
        total += np.float64(weights[i])
        running[i] = total
    if top_p < 1.0:
        cut, i = top_p * total, 0
        while i < keep - 1 and running[i] < cut:
            i += 1
        keep = i + 1
    target, picked = uniform(seed, choice, position) * running[keep - 1], 0
    while picked < keep - 1 and running[picked] <= target:
        picked += 1
    return np.int64(other_ids[picked])


@kernel
def sample(out, logits, temperature, top_k, top_p, min_p, seed, choice, position):
    """Sample a token per row: out int32 [R] from logits [R, V], -1 if no token can be drawn. Per row, all
    [R]: temperature float32, top_k int32, top_p float64, min_p float32, and seed, choice, position uint64."""
    for r in range(logits.shape[0]):
        out[r] = sample_one(
            logits, r, temperature[r], top_k[r], top_p[r], min_p[r], seed[r], choice[r], position[r]
        )
