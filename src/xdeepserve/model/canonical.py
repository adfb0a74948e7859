"""Canonical arithmetic in NumPy: the one order of operations that every path must follow.

Floating-point addition is not associative, so "the same bits everywhere" means "the same order
everywhere". These are the rules. Each function here is the slow, obvious twin of the function with
the same name in `kernels`; the tests compare the two with `array_equal`.

    reduction              order
    ---------------------  --------------------------------------------------------------------------
    matmul, FP32           per output: k ascending, one rounding per multiply and one per add (no FMA)
    matmul_blocked, FP32   row-parallel layers: K in 8 blocks, each ascending, then a fixed binary tree
                           of neighbours, so that TP = 1, 2, 4 and 8 add the same pairs
    matmul_int8            int32, exact in any order; then (float(acc) * token scale) * channel scale
    matmul_exact, INT8     what the `int8` recipe multiplies in floating point, in a GEMM or in attention: see
                           below
    lane_sum               norms and softmax: 16 interleaved lanes, each ascending, then a fixed tree
    attention              scores along k, values along absolute position, whatever chunks and pages they
                           come in; the maximum is order-free and is taken first. FP32: ascending. INT8
                           latents: each head's query is quantised, too, and their product is a matmul_int8;
                           the RoPE part and the values are a matmul_exact
    combine                top-k slot order, then the shared expert, whatever order results arrive in;
                           INT8: each expert's output, the shared one's too, is BF16 as it crosses the pod
    exp, sigmoid, silu     one polynomial of plain multiplies and adds; never the C library's

Exact products. The INT8 recipe rounds both factors of a product to BF16, as the papers' hardware does, and
those below 2**-45 to zero (INT8 integers are BF16 numbers already). A matrix unit computes in the following
order, and so does every other path. It takes 32 values of k (or absolute positions) at a time, in a chain of
the even ones and a chain of the odd ones, each from zero and ascending; then sum += even + odd. Why this
gives one set of bits on a matrix unit (AMX's TDPBF16PS), with fused multiply-adds, and with multiplications
and additions:

    a product is exact      two factors of 8 significant bits have one of 16, and float32 holds 24. So whether
                            it is rounded before it is added does not matter: there is nothing to round
    nothing is denormal     a factor is a multiple of 2**-52, a product of 2**-104, and so is every sum, since
                            rounding leaves multiples what they are. None but zero is below 2**-104, and what
                            flushes denormals (a matrix unit does), below 2**-126, finds none
    a zero changes nothing  a chain begins with +0, so no sum is ever -0, and +0 or -0 may be added to it:
                            padding, whether with zeros for k or with hidden positions of weight zero, is free

Products stay finite as long as factors are below 2**63, and sums as long as they are below 2**128. A model
has no larger numbers.

No BLAS: its rows depend on the batch they are computed in. Division and square root are IEEE exact.
All arrays are float32 unless a docstring says otherwise. T counts token rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xdeepserve.bf16 import round_bf16

Array = NDArray[Any]

F32 = np.float32
LANES = 16
TP_BLOCKS = 8
EXACT_CHUNK = 32  # values of k, or positions, of a pair of chains
LEAST_FACTOR = F32(2.0**-45)  # smaller magnitudes are zero as factors of exact products
EXP_MIN, EXP_MAX = F32(-87.0), F32(88.0)
LOG2E = F32(1.44269504)
LN2_HI, LN2_LO = F32(0.693359375), F32(-2.12194440e-4)
# exp(r) = 1 + r + r^2 * P(r) on |r| <= ln(2)/2, coefficients of Cephes' expf
EXP_POLY = tuple(
    F32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
QUANT_FLOOR = F32(1e-12)  # a row of zeros still has a positive scale
QUANT_MAX = F32(127.0)
GATE_EPS = F32(1e-20)  # DeepSeek's guard in the normalisation of the top-k weights


def exp(x: Array) -> Array:
    """Compute e**x elementwise, clamped to [-87, 88]; relative error below 2e-7."""
    x = np.asarray(np.clip(x, EXP_MIN, EXP_MAX), F32)
    n: Array = np.rint(x * LOG2E)
    r: Array = x - n * LN2_HI
    r = r - n * LN2_LO
    p = np.full_like(r, EXP_POLY[0])
    for c in EXP_POLY[1:]:
        p = p * r + c
    p = p * (r * r) + (r + F32(1.0))
    power_of_two = ((n.astype(np.int32) + np.int32(127)) << np.int32(23)).view(F32)
    return p * power_of_two


def sigmoid(x: Array) -> Array:
    """Compute 1 / (1 + exp(-x)) elementwise."""
    return F32(1.0) / (F32(1.0) + exp(-x))


def silu(x: Array) -> Array:
    """Compute x / (1 + exp(-x)) elementwise."""
    return x / (F32(1.0) + exp(-x))


def lane_sum(x: Array) -> Array:
    """Sum over the last axis: element i goes to lane i mod 16; lanes ascend, then halve into each other."""
    pad = -x.shape[-1] % LANES
    x = np.concatenate([x, np.zeros((*x.shape[:-1], pad), F32)], axis=-1)
    x = x.reshape(*x.shape[:-1], -1, LANES)
    lanes = np.zeros((*x.shape[:-2], LANES), F32)
    for i in range(x.shape[-2]):
        lanes = lanes + x[..., i, :]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def matmul(x: Array, w: Array) -> Array:
    """Multiply x [..., M, K] @ w [..., K, N] -> [..., M, N]; k ascending from zero."""
    out = np.zeros((*np.broadcast_shapes(x.shape[:-2], w.shape[:-2]), x.shape[-2], w.shape[-1]), F32)
    for k in range(w.shape[-2]):
        out += x[..., :, k, None] * w[..., k, None, :]
    return out


def factors(x: Array) -> Array:
    """Round x as for exact products: to the nearest BF16 values, with magnitudes below LEAST_FACTOR as
    zeros."""
    rounded = round_bf16(x)
    return np.where(np.abs(rounded) < LEAST_FACTOR, F32(0.0), rounded)


def matmul_exact(x: Array, w: Array) -> Array:
    """Multiply x [..., M, K] @ w [..., K, N] -> [..., M, N], both of `factors`; two chains for each chunk of
    k."""
    depth = w.shape[-2]
    out = np.zeros((*np.broadcast_shapes(x.shape[:-2], w.shape[:-2]), x.shape[-2], w.shape[-1]), F32)
    for start in range(0, depth, EXACT_CHUNK):
        even, odd = np.zeros_like(out), np.zeros_like(out)
        for chain, first in ((even, start), (odd, start + 1)):
            for k in range(first, min(start + EXACT_CHUNK, depth), 2):
                chain += x[..., :, k, None] * w[..., k, None, :]
        out += even + odd
    return out


def tp_block(k: int, block: int, num_blocks: int = TP_BLOCKS) -> tuple[int, int]:
    """Return the bounds [lo, hi) of a block, among the blocks into which a row-parallel layer cuts its `k`
    inputs."""
    return k * block // num_blocks, k * (block + 1) // num_blocks


def matmul_blocked(
    x: Array, w: Array, num_blocks: int = TP_BLOCKS, product: Callable[[Array, Array], Array] = matmul
) -> Array:
    """Multiply row-parallel x [M, K] @ w [K, N]: partial products, added as a tree of neighbours.

    Each of R ranks has K / R of the columns of x and TP_BLOCKS / R of the blocks. `product` computes a block:
    `matmul`, or `matmul_exact`, whose chunks begin anew in each block.
    """
    bounds = [tp_block(w.shape[0], b, num_blocks) for b in range(num_blocks)]
    parts = [product(x[:, lo:hi], w[lo:hi]) for lo, hi in bounds]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """Quantise symmetrically to INT8 per row: x [T, K] -> q int8 [T, K], scale [T] with x ~ q * scale, |q| <=
    127."""
    return quantize_by_maxima(x, row_maxima(x))


def row_maxima(x: Array) -> Array:
    """Return the largest absolute value of each row of x [T, K], [T]."""
    return np.max(np.abs(x), axis=-1, initial=0.0).astype(F32)


def quantize_by_maxima(x: Array, maxima: Array) -> tuple[Array, Array]:
    """Quantise a part x [T, K] of rows whose largest absolute values are maxima [T], as quantize_rows
    does."""
    scale = np.maximum(maxima, QUANT_FLOOR) / QUANT_MAX
    return np.rint(x / scale[..., None]).astype(np.int8), scale


def matmul_int8(q: Array, scale: Array, w: Array, w_scale: Array) -> Array:
    """Multiply q int8 [M, K], scale [M], w int8 [N, K], w_scale [N] -> [M, N]; int32 sum, then the two
    scales."""
    return scale_sums(q.astype(np.int32) @ w.astype(np.int32).T, scale, w_scale)


def scale_sums(sums: Array, scale: Array, w_scale: Array) -> Array:
    """Compute (float(sums) * scale) * w_scale: sums int32 [T, N], scale [T], w_scale [N]."""
    return (sums.astype(F32) * scale[:, None]) * w_scale[None, :]


def rms_norm(x: Array, w: Array, eps: float) -> Array:
    """Compute (x * 1/sqrt(mean(x^2) + eps)) * w over the last axis."""
    mean = lane_sum(x * x) / F32(x.shape[-1])
    inverse = F32(1.0) / np.sqrt(mean + F32(eps))
    return (x * inverse[..., None]) * w


def layer_norm(x: Array, w: Array, b: Array, eps: float) -> Array:
    """Compute rms_norm, weights included, of x less its mean; plus b."""
    centred = x - (lane_sum(x) / F32(x.shape[-1]))[..., None]
    return rms_norm(centred, w, eps) + b


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate neighbouring pairs: x [..., d], cos/sin [..., d/2] (broadcast against x's leading axes)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def swiglu(gate_up: Array) -> Array:
    """Compute gate_up [T, 2I] = [gate | up] -> silu(gate) * up, [T, I]."""
    half = gate_up.shape[-1] // 2
    return silu(gate_up[..., :half]) * gate_up[..., half:]


def attention(
    q_lat: Array,
    q_pe: Array,
    c: Array,
    c_scale: Array | None,
    k_pe: Array,
    softmax_scale: float,
    int8_weights: bool = False,
) -> Array:
    """Attend with absorbed MLA, a single token over its context (DeepSeek-V2, section 2.1; weight-absorbed
    form).

    q_lat [H, C], q_pe [H, R]; c [S, C] float32, or int8 with c_scale [S]; k_pe [S, R] -> o_lat [H, C]. With
    INT8 latents the first product is in INT8, and all others are exact products: a position's weight includes
    its scale before it is rounded. With `int8_weights` (xDeepServe 4.7) a head's weights, latents' scales
    included, are quantised like a row instead. Sums of the resulting integers are exact in any order up to
    1040 positions (127 x 127 each, below 2^24).
    """
    if c_scale is None:
        scores = matmul(q_lat, c.T) + matmul(q_pe, k_pe.T)
    else:
        scores = matmul_int8(c, c_scale, *quantize_rows(q_lat)).T
        scores = scores + matmul_exact(factors(q_pe), factors(k_pe).T)
    scores = scores * F32(softmax_scale)
    p = exp(scores - scores.max(axis=-1, keepdims=True))
    total = lane_sum(p)
    if c_scale is None:
        return matmul(p, c) / total[:, None]
    if int8_weights:
        q, scale = quantize_rows(p * c_scale)
        return matmul_exact(q.astype(F32), c.astype(F32)) * scale[:, None] / total[:, None]
    return matmul_exact(factors(p * c_scale), c.astype(F32)) / total[:, None]


def unabsorbed_attention(
    q_nope: Array, q_pe: Array, c: Array, k_pe: Array, w_uk: Array, w_uv: Array, softmax_scale: float
) -> Array:
    """Attend with MLA as CloudMatrix prefills (4.3.1), a single token: keys and values of all heads, as for
    ordinary heads.

    q_nope [H, N], q_pe [H, R]; c [S, C], k_pe [S, R], float32; w_uk [H, N, C], w_uv [H, C, V] -> [H, V]. In
    the real numbers this is the same function as the absorbed form (`attention` between two products with
    w_uk and w_uv). It rounds differently, so its results are near but not equal; no deployment runs it.
    """
    keys, values = np.einsum("sc,hnc->hsn", c, w_uk), np.einsum("sc,hcv->hsv", c, w_uv)
    scores = (np.einsum("hn,hsn->hs", q_nope, keys) + q_pe @ k_pe.T) * F32(softmax_scale)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: Array = np.einsum("hs,hsv->hv", p, values) / p.sum(axis=-1)[:, None]
    return total


def grouped_attention(q: Array, k: Array, v: Array, v_scale: Array | None, softmax_scale: float) -> Array:
    """Attend with GQA (arXiv:2305.13245), a single token: the queries that share a head of keys and values.

    q [H, D]; k [S, D]; v [S, V] float32, or int8 with v_scale [S] -> [H, V]. With INT8 values both are exact
    products, like MLA's products with the RoPE part and the latents: see `attention`.
    """
    scores = matmul(q, k.T) if v_scale is None else matmul_exact(factors(q), factors(k).T)
    scores = scores * F32(softmax_scale)
    p = exp(scores - scores.max(axis=-1, keepdims=True))
    total = lane_sum(p)
    if v_scale is None:
        return matmul(p, v) / total[:, None]
    return matmul_exact(factors(p * v_scale), v.astype(F32)) / total[:, None]


def index_scores(q: Array, k: Array, weights: Array, is_exact: bool) -> Array:
    """Scores of the lightning indexer for a token (DeepSeek-V3.2, section 2.1): I = sum_j w_j relu(q_j . k).

    q [H, D], k [S, D], weights [H] -> [S]. Products are scaled by D^-1/2, weights by H^-1/2; heads ascend.
    NaN becomes the smallest value: 0 for a product, -inf for a score.
    """
    heads, depth = q.shape
    products = matmul_exact(factors(q), factors(k).T) if is_exact else matmul(q, k.T)
    relu = np.fmax(products * F32(depth**-0.5), F32(0.0))
    scores: Array = np.fmax(matmul((weights * F32(heads**-0.5))[None], relu)[0], F32(-np.inf))
    return scores


def top_positions(scores: Array, top_k: int) -> Array:
    """Return the positions of the top_k best scores [S], ascending; of equal scores the lowest positions."""
    return np.sort(np.argsort(-scores, kind="stable")[:top_k])


def softmax(x: Array) -> Array:
    """Compute exp(x - max) / sum over the last axis."""
    p = exp(x - x.max(axis=-1, keepdims=True))
    return p / lane_sum(p)[..., None]


def gate(
    scores: Array,
    bias: Array,
    n_group: int,
    topk_group: int,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    best_of_group: int = 2,
) -> tuple[Array, Array]:
    """Group-limited routing (DeepSeek-V3, section 2.1.2): scores = sigmoid(x @ Wg) [T, E], or softmax of it.

    A group's score is the sum of its two best, or its best one alone (DeepSeek-V2, section 2.2.2). The bias,
    if there is one, only selects; weights are the unbiased scores. Groups that lose are masked with -inf.
    Ties go to the lower index. Returns topk_idx int32 [T, K] (best first) and topk_weights [T, K].
    """
    num_tokens, num_experts = scores.shape
    choice = scores + bias if bias.size else scores
    grouped = choice.reshape(num_tokens, n_group, num_experts // n_group)
    best = -np.sort(-grouped, axis=-1)
    group_score = best[..., 0] + best[..., 1] if min(best_of_group, best.shape[-1]) > 1 else best[..., 0]
    winners = np.argsort(-group_score, axis=-1, kind="stable")[:, :topk_group]
    is_open = np.zeros((num_tokens, n_group), bool)
    np.put_along_axis(is_open, winners, True, axis=-1)
    masked = np.where(is_open[..., None], grouped, F32(-np.inf)).reshape(num_tokens, num_experts)
    topk_idx = np.argsort(-masked, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, topk_idx, axis=-1)
    if norm_topk_prob:
        total = np.zeros(num_tokens, F32)
        for slot in range(top_k):
            total = total + weights[:, slot]
        weights = weights / (total + GATE_EPS)[:, None]
    return topk_idx.astype(np.int32), weights * F32(routed_scaling_factor)


def combine(expert_out: Array, topk_weights: Array, shared: Array | None) -> Array:
    """Sum expert_out [T, K, H] by weight in slot order, then add shared [T, H] unscaled -> [T, H]."""
    total = np.zeros((expert_out.shape[0], expert_out.shape[2]), F32)
    for slot in range(expert_out.shape[1]):
        total = total + expert_out[:, slot] * topk_weights[:, slot, None]
    return total if shared is None else total + shared
