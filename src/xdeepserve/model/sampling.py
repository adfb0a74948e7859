"""Sampling from logits with counter-based random numbers, in NumPy.

The random number of a token is a pure function of (seed, choice, position): no generator state exists, so
a request draws the same tokens alone or among others, after a preemption, and with or without MTP (a draft
is accepted iff it equals the token that is sampled at its position anyway).

Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from xdeepserve.model.canonical import F32, Array, exp, lane_sum

PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
MASK32 = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Run ten rounds of Philox: 128 random bits as four 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(PHILOX_M0 * c0, 1 << 32)
        high1, low1 = divmod(PHILOX_M1 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_W0) & MASK32, (k1 + PHILOX_W1) & MASK32
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """Draw a float64 in [0, 1) with 53 random bits, for choice `choice` (of n) at absolute `position`."""
    words = philox4x32((position & MASK32, choice & MASK32, 0, 0), (seed & MASK32, (seed >> 32) & MASK32))
    return ((words[0] >> 5) * 67108864 + (words[1] >> 6)) / 9007199254740992.0


def sample(
    logits: Array,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    choice: int,
    position: int,
) -> int:
    """Token id from logits float32 [V]. temperature 0 (in float32) is the arg max; ties go to the lower id.

    top_k <= 0, top_p = 1 and min_p = 0 are off. Tokens are sorted by logit, cut to the first top_k, then
    before the first that is less than min_p (in float32) times as likely as the likeliest, then to the
    shortest prefix that holds top_p of what is left; the uniform number picks from its running sum,
    which is kept in float64 and ascends in sorted order. -1 if there is a NaN, or, unless it is the arg max
    that is wanted, the largest is infinite.
    """
    if np.isnan(logits).any():
        return -1
    if F32(temperature) == 0.0:
        return int(np.argmax(logits))
    if not np.isfinite(logits.max()):
        return -1
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
        scaled = (logits - logits.max()) / F32(temperature)
    order = np.argsort(-scaled, kind="stable")
    keep = min(top_k, logits.size) if top_k > 0 else logits.size
    weights = exp(scaled[order[:keep]])
    too_small = np.flatnonzero(weights[1:] < F32(min_p))
    keep = int(too_small[0]) + 1 if len(too_small) else keep
    running = np.cumsum(weights[:keep].astype(np.float64))
    if top_p < 1.0:
        keep = min(int(np.searchsorted(running, top_p * running[-1], side="left")) + 1, keep)
    target = uniform(seed, choice, position) * running[keep - 1]
    picked = min(int(np.searchsorted(running[:keep], target, side="right")), keep - 1)
    return int(order[picked])


def edit(
    logits: Array,
    *,
    bias: Mapping[int, float],
    repetition_penalty: float,
    seen: Sequence[int],
    frequency_penalty: float,
    presence_penalty: float,
    counts: Mapping[int, int],
    allowed: bytes | None,
) -> None:
    """Change logits float32 [V] in place, before a token is drawn from them. Each step is rounded to float32:

    1. `bias` is added to the tokens that it names;
    2. tokens `seen` in prompt or output: divided by the repetition penalty if positive, else multiplied;
    3. tokens of the output: less frequency_penalty * count, itself rounded first;
    4. the same tokens: less presence_penalty;
    5. those that are not `allowed` become -inf. Bit i % 8, from the lowest, of byte i // 8 is token i's.

    A step whose parameter is neutral (nothing, 1, 0, 0, None) changes no bit.
    """
    with np.errstate(over="ignore"):
        if bias:
            logits[np.fromiter(bias, np.int64)] += np.fromiter(bias.values(), F32)
        if repetition_penalty != 1.0:
            ids, penalty = np.asarray(seen, np.int64), F32(repetition_penalty)
            logits[ids] = np.where(logits[ids] > 0, logits[ids] / penalty, logits[ids] * penalty)
        if counts:
            ids, numbers = np.fromiter(counts, np.int64), np.fromiter(counts.values(), F32)
            logits[ids] -= F32(frequency_penalty) * numbers
            logits[ids] -= F32(presence_penalty)
    if allowed is not None:
        bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=logits.size, bitorder="little")
        logits[bits == 0] = -np.inf


def log_probs(logits: Array) -> Array:
    """Return the log softmax of logits [V] at temperature 1, float32 [V]; the logarithm is taken in
    float64."""
    shifted = logits - logits.max()
    return (shifted.astype(np.float64) - np.log(np.float64(lane_sum(exp(shifted))))).astype(F32)
