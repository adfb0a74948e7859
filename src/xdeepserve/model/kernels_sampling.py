"""Numba twin of `sampling.py`, bit for bit."""

from __future__ import annotations

import numpy as np

from xdeepserve.model import sampling as s
from xdeepserve.model.kernels import exp1, kernel

M0, M1 = np.uint64(s.PHILOX_M0), np.uint64(s.PHILOX_M1)
W0, W1 = np.uint64(s.PHILOX_W0), np.uint64(s.PHILOX_W1)
MASK32, SHIFT32 = np.uint64(s.MASK32), np.uint64(32)


@kernel
def uniform(seed, choice, position):  # type: ignore[no-untyped-def]
    """seed, choice, position as uint64; see sampling.uniform."""
    c0, c1, c2, c3 = position & MASK32, choice & MASK32, np.uint64(0), np.uint64(0)
    k0, k1 = seed & MASK32, seed >> SHIFT32
    for _ in range(10):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (p1 >> SHIFT32) ^ c1 ^ k0, p1 & MASK32, (p0 >> SHIFT32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + W0) & MASK32, (k1 + W1) & MASK32
    high, low = np.float64(c0 >> np.uint64(5)), np.float64(c1 >> np.uint64(6))
    return (high * 67108864.0 + low) / 9007199254740992.0


@kernel
def _sample_one(logits, temperature, top_k, top_p, seed, choice, position):  # type: ignore[no-untyped-def]
    if temperature == np.float32(0.0):
        return np.argmax(logits)
    top = logits.max()
    scaled = np.empty(logits.size, np.float32)
    for i in range(logits.size):
        scaled[i] = -((logits[i] - top) / temperature)
    order = np.argsort(scaled, kind="mergesort")
    keep = min(top_k, logits.size) if top_k > 0 else logits.size
    running = np.empty(keep, np.float64)
    total = 0.0
    for i in range(keep):
        total += np.float64(exp1(-scaled[order[i]]))
        running[i] = total
    if top_p < 1.0:
        cut, i = top_p * total, 0
        while i < keep - 1 and running[i] < cut:
            i += 1
        keep = i + 1
    target, picked = uniform(seed, choice, position) * running[keep - 1], 0
    while picked < keep - 1 and running[picked] <= target:
        picked += 1
    return order[picked]


@kernel
def sample(out, logits, temperature, top_k, top_p, seed, choice, position):  # type: ignore[no-untyped-def]
    """out int32 [R] from logits [R, V]; per row: temperature float32, top_k int32, top_p float64, and
    seed, choice, position uint64, all [R]."""
    for r in range(logits.shape[0]):
        out[r] = _sample_one(logits[r], temperature[r], top_k[r], top_p[r], seed[r], choice[r], position[r])
