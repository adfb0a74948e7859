"""Kernels on each token's row by itself: norm, quantisation, SwiGLU, sums of rows."""

from __future__ import annotations

import numpy as np

from xdeepserve.jit.compiling import kernel, part
from xdeepserve.model import canonical as c
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.division import MOST, quotient
from xdeepserve.model.kernels.simd import absolute, load, max_of, maximum, rint, splat, store, tree_sum
from xdeepserve.model.kernels.vector_math import put, silu, take

QUANT_FLOOR, QUANT_MAX = c.QUANT_FLOOR, c.QUANT_MAX
ZERO, ONE = np.float32(0.0), np.float32(1.0)


@part
def inverse_rms(x, start, size, eps):
    """Return 1 / sqrt(mean of the squares + eps) of x[start : start + size]."""
    lanes = splat(ZERO)
    for i in range(0, size, LANES):
        v = take(x, start + i, size - i)
        lanes = lanes + v * v
    return ONE / np.sqrt(tree_sum(lanes) / np.float32(size) + np.float32(eps))


@part
def row_scale(largest):
    """Return the scale of a row whose largest magnitudes are in 16 lanes."""
    return max(max_of(largest), QUANT_FLOOR) / QUANT_MAX


@part
def round_row(q, to, x, start, size, scale):
    """q[to : to + size] = round(x[start : start + size] / scale)."""
    divisor, inverse = splat(scale), splat(ONE / scale)
    whole = size // LANES * LANES if scale <= MOST else 0
    for i in range(0, whole, LANES):
        store(q, to + i, rint(quotient(load(x, start + i), divisor, inverse)))
    for i in range(whole, size, LANES):
        put(q, to + i, rint(take(x, start + i, size - i) / divisor), size - i)


@part
def quantize_row(q, to, x, start, size):
    """q[to : to + size] from x[start : start + size]; returns the scale. See canonical.quantize_rows."""
    # Two maxima: one comparison would wait for the other.
    largest, other = splat(ZERO), splat(ZERO)
    pairs = size // (2 * LANES) * 2 * LANES
    for i in range(start, start + pairs, 2 * LANES):
        largest = maximum(largest, absolute(load(x, i)))
        other = maximum(other, absolute(load(x, i + LANES)))
    for i in range(pairs, size, LANES):
        largest = maximum(largest, absolute(take(x, start + i, size - i)))
    scale = row_scale(maximum(largest, other))
    round_row(q, to, x, start, size, scale)
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
def rms_norm_quantize(out, q, scale, x, w, eps):
    """rms_norm, then quantize_rows of the result: out [T, N], q int8 [T, N], scale [T], x [T, N]."""
    size = w.size
    for t in range(x.shape[0]):
        start = t * size
        inverse, largest = splat(inverse_rms(x, start, size, eps)), splat(ZERO)
        for i in range(0, size, LANES):
            v = take(x, start + i, size - i) * inverse * take(w, i, size - i)
            put(out, start + i, v, size - i)
            largest = maximum(largest, absolute(v))
        scale[t] = row_scale(largest)
        round_row(q, start, out, start, size, scale[t])


@kernel
def quantize_rows(q, scale, x):
    """q int8 [T, K], scale [T], x [T, K]."""
    size = x.shape[1]
    for t in range(x.shape[0]):
        scale[t] = quantize_row(q, t * size, x, t * size, size)


@kernel
def round_to_int8(x):
    """In place, canonical.rounded_to_int8 of x [T, K]: rows as INT8 and their scales give them back."""
    size = x.shape[1]
    q = np.empty((1, size), np.int8)
    for t in range(x.shape[0]):
        scale = quantize_row(q, 0, x, t * size, size)
        for i in range(size):
            x[t, i] = np.float32(q[0, i]) * scale


@kernel
def row_maxima(out, x):
    """out [T] = the largest absolute value of each row of x [T, K]."""
    size = x.shape[1]
    for t in range(x.shape[0]):
        largest = splat(ZERO)
        for i in range(0, size, LANES):
            largest = maximum(largest, absolute(take(x, t * size + i, size - i)))
        out[t] = max_of(largest)


@kernel
def quantize_by_maxima(q, scale, x, maxima):
    """q int8 [T, K], scale [T] from x [T, K], a part of rows whose largest absolute values are maxima [T]."""
    size = x.shape[1]
    for t in range(x.shape[0]):
        scale[t] = max(maxima[t], QUANT_FLOOR) / QUANT_MAX
        round_row(q, t * size, x, t * size, size, scale[t])


@kernel
def scale_sums(out, sums, scale, w_scale):
    """out [T, N] = float(sums) * scale * w_scale; sums int32 [T, N], scale [T], w_scale [N]."""
    for t in range(out.shape[0]):
        for n in range(out.shape[1]):
            out[t, n] = np.float32(sums[t, n]) * scale[t] * w_scale[n]


@kernel
def swiglu(out, gate_up):
    """out [T, I], gate_up [T, 2I]."""
    half = gate_up.shape[1] // 2
    for t in range(gate_up.shape[0]):
        gate = t * 2 * half
        for i in range(0, half, LANES):
            g, up = take(gate_up, gate + i, half - i), take(gate_up, gate + half + i, half - i)
            put(out, t * half + i, silu(g) * up, half - i)


@kernel
def swiglu_quantize(q, scale, gate_up):
    """swiglu, then quantize_rows: q int8 [T, I], scale [T], gate_up [T, 2I]; the first half is lost."""
    half = gate_up.shape[1] // 2
    for t in range(gate_up.shape[0]):
        gate = t * 2 * half
        for i in range(0, half, LANES):
            g, up = take(gate_up, gate + i, half - i), take(gate_up, gate + half + i, half - i)
            put(gate_up, gate + i, silu(g) * up, half - i)
        scale[t] = quantize_row(q, t * half, gate_up, gate, half)


@kernel
def add(out, x, y):
    """out = x + y, all [T, N]; out may be x."""
    for i in range(0, x.size, LANES):
        put(out, i, take(x, i, x.size - i) + take(y, i, x.size - i), x.size - i)


@kernel
def gather_rows(out, x, index):
    """out[i] = x[index[i]]."""
    size = x.shape[1]
    for i in range(index.size):
        source = index[i]
        for column in range(size):
            out[i, column] = x[source, column]


@kernel
def scatter_rows(out, x, index):
    """out[index[i]] = x[i]."""
    size = x.shape[1]
    for i in range(index.size):
        to = index[i]
        for column in range(size):
            out[to, column] = x[i, column]
