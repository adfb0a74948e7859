"""Twins of canonical's exp and related functions on 16 lanes, with loads and stores that stop at a row's
end."""

from __future__ import annotations

import numpy as np

from xdeepserve.jit.compiling import part
from xdeepserve.model import canonical as c
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.simd import (
    load,
    load_part,
    maximum,
    minimum,
    negative,
    power_of_two,
    rint,
    splat,
    store,
    store_part,
)

EXP_MIN, EXP_MAX, LOG2E, LN2_HI, LN2_LO = c.EXP_MIN, c.EXP_MAX, c.LOG2E, c.LN2_HI, c.LN2_LO
P0, P1, P2, P3, P4, P5 = c.EXP_POLY
ONE = np.float32(1.0)


@part
def exp(x):
    """exp(x) of each lane, by the polynomial of canonical.exp."""
    x = minimum(maximum(x, splat(EXP_MIN)), splat(EXP_MAX))
    n = rint(x * splat(LOG2E))
    r = x - n * splat(LN2_HI)
    r = r - n * splat(LN2_LO)
    p = splat(P0) * r + splat(P1)
    p = p * r + splat(P2)
    p = p * r + splat(P3)
    p = p * r + splat(P4)
    p = p * r + splat(P5)
    p = p * (r * r) + (r + splat(ONE))
    return p * power_of_two(n)


@part
def sigmoid(x):
    """1 / (1 + exp(-x)) of each lane, as canonical.sigmoid."""
    return splat(ONE) / (splat(ONE) + exp(negative(x)))


@part
def silu(x):
    """x * sigmoid(x) of each lane, in the one division of canonical.silu."""
    return x / (splat(ONE) + exp(negative(x)))


@part
def take(array, index, left):
    """Load 16 elements from `index`, or the `left` that the row still has and zeros."""
    return load(array, index) if left >= LANES else load_part(array, index, left)


@part
def put(array, index, value, left):
    """Store 16 elements at `index`, or the `left` that the row still has."""
    if left >= LANES:
        store(array, index, value)
    else:
        store_part(array, index, value, left)
