"""Kernels that treat each token's row by itself: norm, quantisation, SwiGLU, sums of rows."""

from __future__ import annotations

import numpy as np

from xdeepserve.model import canonical as c
from xdeepserve.model.kernels.base import kernel, part
from xdeepserve.model.kernels.simd import LANES, absolute, max_of, maximum, rint, splat, tree_sum
from xdeepserve.model.kernels.simd import round_bf16 as to_bf16
from xdeepserve.model.kernels.vector_math import put, take
from xdeepserve.model.kernels.vector_math import sigmoid as vector_sigmoid
from xdeepserve.model.kernels.vector_math import silu as vector_silu

QUANT_FLOOR, QUANT_MAX = c.QUANT_FLOOR, c.QUANT_MAX
ZERO, ONE = np.float32(0.0), np.float32(1.0)


@part
def lane_sum(x, start, size):
    """Sum of x[start : start + size]; see canonical.lane_sum."""
    lanes = splat(ZERO)
    for i in range(0, size, LANES):
        lanes = lanes + take(x, start + i, size - i)
    return tree_sum(lanes)


@part
def inverse_rms(x, start, size, eps):
    """1 / sqrt(mean of the squares + eps) of x[start : start + size]."""
    lanes = splat(ZERO)
    for i in range(0, size, LANES):
        v = take(x, start + i, size - i)
        lanes = lanes + v * v
    return ONE / np.sqrt(tree_sum(lanes) / np.float32(size) + np.float32(eps))


@part
def quantize_row(q, to, x, start, size):
    """q[to : to + size] from x[start : start + size]; returns the scale. See canonical.quantize_rows."""
    largest = splat(ZERO)
    for i in range(0, size, LANES):
        largest = maximum(largest, absolute(take(x, start + i, size - i)))
    scale = max(max_of(largest), QUANT_FLOOR) / QUANT_MAX
    divisor = splat(scale)
    for i in range(0, size, LANES):
        put(q, to + i, rint(take(x, start + i, size - i) / divisor), size - i)
    return scale


@kernel
def rms_norm(out, x, w, eps):
    """out [T, N], x [T, >= N], w [N]: the norm is over the first N of a row. out may be x."""
    size = w.size
    for t in range(x.shape[0]):
        start, to = t * x.shape[1], t * out.shape[1]
        inverse = splat(inverse_rms(x, start, size, eps))
        for i in range(0, size, LANES):
            v = take(x, start + i, size - i) * inverse * take(w, i, size - i)
            put(out, to + i, v, size - i)


@kernel
def quantize_rows(q, scale, x):
    """q int8 [T, K], scale [T], x [T, K]."""
    size = x.shape[1]
    for t in range(x.shape[0]):
        scale[t] = quantize_row(q, t * size, x, t * size, size)


@kernel
def sigmoid(out, x):
    """out, x [T, N]; out may be x."""
    for i in range(0, x.size, LANES):
        put(out, i, vector_sigmoid(take(x, i, x.size - i)), x.size - i)


@kernel
def swiglu(out, gate_up):
    """out [T, I], gate_up [T, 2I]."""
    half = gate_up.shape[1] // 2
    for t in range(gate_up.shape[0]):
        gate = t * 2 * half
        for i in range(0, half, LANES):
            g, up = take(gate_up, gate + i, half - i), take(gate_up, gate + half + i, half - i)
            put(out, t * half + i, vector_silu(g) * up, half - i)


@kernel
def swiglu_quantize(q, scale, gate_up):
    """swiglu, then quantize_rows: q int8 [T, I], scale [T], gate_up [T, 2I]; the first half is lost."""
    half = gate_up.shape[1] // 2
    for t in range(gate_up.shape[0]):
        gate = t * 2 * half
        for i in range(0, half, LANES):
            g, up = take(gate_up, gate + i, half - i), take(gate_up, gate + half + i, half - i)
            put(gate_up, gate + i, vector_silu(g) * up, half - i)
        scale[t] = quantize_row(q, t * half, gate_up, gate, half)


@kernel
def round_bf16(x):
    """In place, x [T, N]."""
    for i in range(0, x.size, LANES):
        put(x, i, to_bf16(take(x, i, x.size - i)), x.size - i)


@kernel
def add(out, x, y):
    """out = x + y, all [T, N]; out may be x."""
    for i in range(0, x.size, LANES):
        put(out, i, take(x, i, x.size - i) + take(y, i, x.size - i), x.size - i)


@kernel
def gather_rows(out, x, index):
    """out[i] = x[index[i]]."""
    for i in range(index.size):
        out[i] = x[index[i]]


@kernel
def scatter_rows(out, x, index):
    """out[index[i]] = x[i]."""
    for i in range(index.size):
        out[index[i]] = x[i]
