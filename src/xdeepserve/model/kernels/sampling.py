"""Numba twin of `sampling.py`, bit for bit.

scaled = (logit - largest logit) / temperature is never positive, so the bits of -scaled, read as an integer,
ascend while the logits descend. Hence sorting is a radix sort of integers, which is stable as
`sampling.sample` asks, and top-k sorts only what can be among the first k.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.model import sampling as s
from xdeepserve.model.kernels.base import kernel, part
from xdeepserve.model.kernels.simd import LANES, load, max_of, maximum, negative
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
    """seed, choice, position as uint64; see sampling.uniform."""
    c0, c1, c2, c3 = position & MASK32, choice & MASK32, np.uint64(0), np.uint64(0)
    k0, k1 = seed & MASK32, seed >> SHIFT32
    for _ in range(10):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (p1 >> SHIFT32) ^ c1 ^ k0, p1 & MASK32, (p0 >> SHIFT32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + W0) & MASK32, (k1 + W1) & MASK32
    high, low = np.float64(c0 >> np.uint64(5)), np.float64(c1 >> np.uint64(6))
    return (high * 67108864.0 + low) / 9007199254740992.0


@part
def _largest(logits):
    """The largest of logits [V] and its lowest index."""
    size = logits.size
    top = logits[0]
    if size >= LANES:
        lanes = load(logits, 0)
        for i in range(0, size - LANES + 1, LANES):
            lanes = maximum(lanes, load(logits, i))
        top = max_of(lanes)
    for i in range(size // LANES * LANES, size):
        top = max(top, logits[i])
    first = 0
    while logits[first] != top:
        first += 1
    return top, first


@part
def _keep_first(keys, ids, count):
    """Move the `count` smallest keys, and what shares their top digit, to the front; how many those are."""
    histogram = np.zeros(BUCKETS, np.int64)
    for key in keys:
        histogram[key >> TOP_SHIFT] += 1
    last, covered = -1, 0
    while covered < count:
        last += 1
        covered += histogram[last]
    kept = 0
    for i in range(keys.size):
        if keys[i] >> TOP_SHIFT <= last:
            keys[kept], ids[kept] = keys[i], ids[i]
            kept += 1
    return kept


@part
def _sort(keys, ids):
    """Sort ids by their keys (31 bits each), stable; both in place."""
    other_keys, other_ids = np.empty_like(keys), np.empty_like(ids)
    place = np.empty(BUCKETS, np.int64)
    for shift in range(0, 3 * DIGIT, DIGIT):
        place[:] = 0
        for key in keys:
            place[(key >> shift) & (BUCKETS - 1)] += 1
        total = 0
        for digit in range(BUCKETS):
            place[digit], total = total, total + place[digit]
        for i in range(keys.size):
            digit = (keys[i] >> shift) & (BUCKETS - 1)
            other_keys[place[digit]], other_ids[place[digit]] = keys[i], ids[i]
            place[digit] += 1
        keys[:], ids[:] = other_keys, other_ids


@part
def _sample_one(logits, temperature, top_k, top_p, seed, choice, position):
    top, first = _largest(logits)
    if temperature == ZERO:
        return first
    size = logits.size
    negated, ids = np.empty(size, np.float32), np.empty(size, np.int32)
    for i in range(size):
        # Adding zero makes a zero of a minus zero, which has other bits.
        negated[i] = -((logits[i] - top) / temperature) + ZERO
        ids[i] = i
    keys = negated.view(np.int32)
    keep = min(top_k, size) if top_k > 0 else size
    if keep < size:
        kept = _keep_first(keys, ids, keep)
        keys, ids = keys[:kept], ids[:kept]
    _sort(keys, ids)
    weights = np.empty(keep, np.float32)
    for i in range(0, keep, LANES):
        put(weights, i, exp(negative(take(negated, i, keep - i))), keep - i)
    running = np.empty(keep, np.float64)
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
    return np.int64(ids[picked])


@kernel
def sample(out, logits, temperature, top_k, top_p, seed, choice, position):
    """out int32 [R] from logits [R, V]; per row: temperature float32, top_k int32, top_p float64, and
    seed, choice, position uint64, all [R]."""
    for r in range(logits.shape[0]):
        out[r] = _sample_one(logits[r], temperature[r], top_k[r], top_p[r], seed[r], choice[r], position[r])
