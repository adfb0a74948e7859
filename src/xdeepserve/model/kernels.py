"""Numba kernels: the fast twins of `canonical.py`, bit for bit.

Plain arrays in, plain arrays out: outputs first, then inputs. Every array is C-contiguous. No
`fastmath` and no parallel reductions: LLVM may use any SIMD across outputs, and never reorders the
additions of one output. Where a loop is unrolled over k it is to save loads and stores; the sum of
each output still ascends. T counts token rows, and an output may have more rows than are written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from xdeepserve.model import canonical as c

LANES = c.LANES
TP_BLOCKS = c.TP_BLOCKS
EXP_MIN, EXP_MAX, LOG2E, LN2_HI, LN2_LO = c.EXP_MIN, c.EXP_MAX, c.LOG2E, c.LN2_HI, c.LN2_LO
P0, P1, P2, P3, P4, P5 = c.EXP_POLY
QUANT_FLOOR, QUANT_MAX, GATE_EPS = c.QUANT_FLOOR, c.QUANT_MAX, c.GATE_EPS
ZERO, ONE = np.float32(0.0), np.float32(1.0)


def kernel(function: Any) -> Any:
    """Compile on first call, release the GIL, and keep the machine code in Numba's cache."""
    return njit(nogil=True, cache=True)(function)


# ---------------------------------------------------------------- elementwise


@kernel
def exp1(x):  # type: ignore[no-untyped-def]
    """One exp; see canonical.exp."""
    x = min(max(x, EXP_MIN), EXP_MAX)
    n = np.rint(x * LOG2E)
    r = x - n * LN2_HI
    r = r - n * LN2_LO
    p = P0 * r + P1
    p = p * r + P2
    p = p * r + P3
    p = p * r + P4
    p = p * r + P5
    p = p * (r * r) + (r + ONE)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@kernel
def sigmoid(out, x):  # type: ignore[no-untyped-def]
    """out, x [T, N]."""
    for t in range(x.shape[0]):
        for i in range(x.shape[1]):
            out[t, i] = ONE / (ONE + exp1(-x[t, i]))


@kernel
def swiglu(out, gate_up):  # type: ignore[no-untyped-def]
    """out [T, I], gate_up [T, 2I]."""
    half = gate_up.shape[1] // 2
    for t in range(gate_up.shape[0]):
        gate, up, row = gate_up[t, :half], gate_up[t, half:], out[t]
        for i in range(half):
            row[i] = gate[i] / (ONE + exp1(-gate[i])) * up[i]


@kernel
def round_bf16(x):  # type: ignore[no-untyped-def]
    """In place, x [T, N]."""
    for t in range(x.shape[0]):
        bits = x[t].view(np.uint32)
        for i in range(bits.size):
            b = bits[i]
            bits[i] = np.uint32(
                np.uint32(b + np.uint32(0x7FFF)) + np.uint32((b >> np.uint32(16)) & np.uint32(1))
            )
            bits[i] = bits[i] & np.uint32(0xFFFF0000)


@kernel
def add(out, x, y):  # type: ignore[no-untyped-def]
    """out = x + y, all [T, N]; out may be x."""
    for t in range(x.shape[0]):
        for i in range(x.shape[1]):
            out[t, i] = x[t, i] + y[t, i]


# ---------------------------------------------------------------- reductions


@kernel
def _tree(lanes):  # type: ignore[no-untyped-def]
    """Fold 16 lanes into lanes[0] by halves."""
    half = LANES // 2
    while half > 0:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@kernel
def lane_sum(x):  # type: ignore[no-untyped-def]
    """Sum of the vector x."""
    lanes = np.zeros(LANES, np.float32)
    full = x.size // LANES * LANES
    for base in range(0, full, LANES):
        for i in range(LANES):
            lanes[i] += x[base + i]
    for i in range(x.size - full):
        lanes[i] += x[full + i]
    return _tree(lanes)


@kernel
def rms_norm(out, x, w, eps):  # type: ignore[no-untyped-def]
    """out, x [T, N], w [N]; rows of x may be longer than w (the norm is over the first N)."""
    n = w.size
    square = np.empty(n, np.float32)
    for t in range(x.shape[0]):
        row = x[t, :n]
        for i in range(n):
            square[i] = row[i] * row[i]
        inverse = ONE / np.sqrt(lane_sum(square) / np.float32(n) + np.float32(eps))
        for i in range(n):
            out[t, i] = row[i] * inverse * w[i]


# ---------------------------------------------------------------- GEMM


@kernel
def _accumulate(out, x, w, k0, k1):  # type: ignore[no-untyped-def]
    """out [N] += x[k0:k1] @ w[k0:k1, N], k ascending."""
    k = k0
    while k + 4 <= k1:
        a, b, c, d = x[k], x[k + 1], x[k + 2], x[k + 3]
        wa, wb, wc, wd = w[k], w[k + 1], w[k + 2], w[k + 3]
        for n in range(out.size):
            out[n] = out[n] + a * wa[n] + b * wb[n] + c * wc[n] + d * wd[n]
        k += 4
    while k < k1:
        a, wa = x[k], w[k]
        for n in range(out.size):
            out[n] = out[n] + a * wa[n]
        k += 1


@kernel
def matmul(out, x, w):  # type: ignore[no-untyped-def]
    """out [M, N] = x [M, K] @ w [K, N]."""
    for m in range(x.shape[0]):
        row = out[m]
        row[:] = ZERO
        _accumulate(row, x[m], w, 0, w.shape[0])


@kernel
def matmul_blocked(out, x, w):  # type: ignore[no-untyped-def]
    """Row-parallel twin of matmul: eight blocks of K, then a tree of neighbours."""
    parts = np.empty((TP_BLOCKS, w.shape[1]), np.float32)
    k = w.shape[0]
    for m in range(x.shape[0]):
        parts[:] = ZERO
        for b in range(TP_BLOCKS):
            _accumulate(parts[b], x[m], w, k * b // TP_BLOCKS, k * (b + 1) // TP_BLOCKS)
        row = out[m]
        for n in range(row.size):
            row[n] = ((parts[0, n] + parts[1, n]) + (parts[2, n] + parts[3, n])) + (
                (parts[4, n] + parts[5, n]) + (parts[6, n] + parts[7, n])
            )


@kernel
def quantize_rows(q, scale, x):  # type: ignore[no-untyped-def]
    """q int8 [T, K], scale [T], x [T, K]."""
    for t in range(x.shape[0]):
        row, out = x[t], q[t]
        amax = ZERO
        for i in range(row.size):
            amax = max(amax, abs(row[i]))
        s = max(amax, QUANT_FLOOR) / QUANT_MAX
        scale[t] = s
        for i in range(row.size):
            out[i] = np.int8(np.rint(row[i] / s))


@kernel
def matmul_int8(out, q, scale, w, w_scale):  # type: ignore[no-untyped-def]
    """out [M, N]; q int8 [M, K], scale [M], w int8 [N, K], w_scale [N]."""
    for m in range(q.shape[0]):
        row = q[m]
        for n in range(w.shape[0]):
            channel = w[n]
            acc = np.int32(0)
            for k in range(row.size):
                acc = np.int32(acc + np.int32(np.int32(row[k]) * np.int32(channel[k])))
            out[m, n] = np.float32(acc) * scale[m] * w_scale[n]


@kernel
def grouped_matmul(out, x, offsets, w):  # type: ignore[no-untyped-def]
    """Rows offsets[e]:offsets[e+1] of x [M, K] go through w[e] [K, N]; out [M, N]."""
    for e in range(w.shape[0]):
        if offsets[e + 1] > offsets[e]:
            matmul(out[offsets[e] : offsets[e + 1]], x[offsets[e] : offsets[e + 1]], w[e])


@kernel
def grouped_matmul_int8(out, q, scale, offsets, w, w_scale):  # type: ignore[no-untyped-def]
    """The INT8 twin: w int8 [E, N, K], w_scale [E, N]."""
    for e in range(w.shape[0]):
        lo, hi = offsets[e], offsets[e + 1]
        if hi > lo:
            matmul_int8(out[lo:hi], q[lo:hi], scale[lo:hi], w[e], w_scale[e])


# ---------------------------------------------------------------- MLA


@kernel
def absorb_query(q_lat, q, w_uk):  # type: ignore[no-untyped-def]
    """q_lat [T, H, C] = per head q[:, :, :nope] @ w_uk [H, nope, C]; q [T, H, nope + rope]."""
    for t in range(q.shape[0]):
        for h in range(w_uk.shape[0]):
            row = q_lat[t, h]
            row[:] = ZERO
            _accumulate(row, q[t, h], w_uk[h], 0, w_uk.shape[1])


@kernel
def project_value(out, o_lat, w_uv):  # type: ignore[no-untyped-def]
    """out [T, H, V] = per head o_lat [T, H, C] @ w_uv [H, C, V]."""
    for t in range(o_lat.shape[0]):
        for h in range(w_uv.shape[0]):
            row = out[t, h]
            row[:] = ZERO
            _accumulate(row, o_lat[t, h], w_uv[h], 0, w_uv.shape[1])


@kernel
def rope_heads(x, positions, cos, sin):  # type: ignore[no-untyped-def]
    """In place: rotate the last 2 * cos.shape[1] entries of each head of x [T, H, D]."""
    half = cos.shape[1]
    start = x.shape[2] - 2 * half
    for t in range(x.shape[0]):
        c, s = cos[positions[t]], sin[positions[t]]
        for h in range(x.shape[1]):
            row = x[t, h, start:]
            for i in range(half):
                even, odd = row[2 * i], row[2 * i + 1]
                row[2 * i] = even * c[i] - odd * s[i]
                row[2 * i + 1] = even * s[i] + odd * c[i]


@kernel
def append_kv(c_cache, pe_cache, slots, latent, k_pe):  # type: ignore[no-untyped-def]
    """Write a latent [T, C] and RoPE key [T, R] per token into slots [T] (block * size + offset)."""
    size = c_cache.shape[1]
    for t in range(slots.size):
        c_cache[slots[t] // size, slots[t] % size, :] = latent[t]
        pe_cache[slots[t] // size, slots[t] % size, :] = k_pe[t]


@kernel
def append_kv_int8(c_cache, s_cache, pe_cache, slots, latent, k_pe):  # type: ignore[no-untyped-def]
    """The INT8 twin: the latent is quantised per token, its scale goes to s_cache [blocks, size]."""
    size = c_cache.shape[1]
    for t in range(slots.size):
        block, i = slots[t] // size, slots[t] % size
        quantize_rows(c_cache[block, i : i + 1], s_cache[block, i : i + 1], latent[t : t + 1])
        pe_cache[block, i, :] = k_pe[t]


@kernel
def _score_tile(scores, q, tile):  # type: ignore[no-untyped-def]
    """scores [16] = q [K] @ tile [K, 16], k ascending."""
    scores[:LANES] = ZERO
    k = 0
    while k + 8 <= q.size:
        for j in range(LANES):
            v = scores[j] + q[k] * tile[k, j]
            v = v + q[k + 1] * tile[k + 1, j]
            v = v + q[k + 2] * tile[k + 2, j]
            v = v + q[k + 3] * tile[k + 3, j]
            v = v + q[k + 4] * tile[k + 4, j]
            v = v + q[k + 5] * tile[k + 5, j]
            v = v + q[k + 6] * tile[k + 6, j]
            scores[j] = v + q[k + 7] * tile[k + 7, j]
        k += 8
    while k < q.size:
        for j in range(LANES):
            scores[j] = scores[j] + q[k] * tile[k, j]
        k += 1


@kernel
def _softmax_in_place(scores):  # type: ignore[no-untyped-def]
    """Replace scores [S] by exp(score - max); return their sum. Two passes over absolute positions."""
    top = scores[0]
    for i in range(scores.size):
        top = max(top, scores[i])
    for i in range(scores.size):
        scores[i] = exp1(scores[i] - top)
    return lane_sum(scores)


@kernel
def attention(o_lat, q_lat, q, seq_of, positions, c_cache, s_cache, pe_cache, block_tables, softmax_scale):  # type: ignore[no-untyped-def]
    """Absorbed MLA over a paged latent cache; see canonical.attention.

    o_lat, q_lat [T, H, C]; q [T, H, nope + R] whose tail is q_pe; c_cache [blocks, size, C] float32 or
    int8, s_cache [blocks, size] (its scales; size 0 if float32), pe_cache [blocks, size, R];
    block_tables int32 [seqs, max_blocks], seq_of int32 [T], positions int32 [T]: token t of sequence
    seq_of[t] sees the positions 0 .. positions[t] inclusive. `size` is a multiple of 16.
    """
    num_heads, rank = q_lat.shape[1], q_lat.shape[2]
    size, rope_dim = pe_cache.shape[1], pe_cache.shape[2]
    is_int8 = s_cache.size > 0
    nope = q.shape[2] - rope_dim
    scale = np.float32(softmax_scale)
    tile = np.empty((rank, LANES), np.float32)
    tile_pe = np.empty((rope_dim, LANES), np.float32)
    lat, pe = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    values = np.empty((4, rank), np.float32)
    for t in range(q_lat.shape[0]):
        length = positions[t] + 1
        table = block_tables[seq_of[t]]
        scores = np.empty((num_heads, length), np.float32)
        for base in range(0, length, LANES):
            block, start = table[base // size], base % size
            width = min(LANES, length - base)
            for j in range(width):
                for k in range(rank):
                    tile[k, j] = np.float32(c_cache[block, start + j, k])
                for k in range(rope_dim):
                    tile_pe[k, j] = pe_cache[block, start + j, k]
            for j in range(width, LANES):
                tile[:, j] = ZERO
                tile_pe[:, j] = ZERO
            for h in range(num_heads):
                _score_tile(lat, q_lat[t, h], tile)
                _score_tile(pe, q[t, h, nope:], tile_pe)
                for j in range(width):
                    s = lat[j] * s_cache[block, start + j] if is_int8 else lat[j]
                    scores[h, base + j] = (s + pe[j]) * scale
        for h in range(num_heads):
            total = _softmax_in_place(scores[h])
            weight, row = scores[h], o_lat[t, h]
            if is_int8:
                for i in range(length):
                    weight[i] = weight[i] * s_cache[table[i // size], i % size]
            row[:] = ZERO
            for base in range(0, length, 4):
                width = min(4, length - base)
                for j in range(width):
                    source = c_cache[table[(base + j) // size], (base + j) % size]
                    for k in range(rank):
                        values[j, k] = np.float32(source[k])
                _accumulate(row, weight[base : base + width], values, 0, width)
            for k in range(rank):
                row[k] = row[k] / total


# ---------------------------------------------------------------- MoE


@kernel
def gate(topk_idx, topk_weights, scores, bias, n_group, topk_group, norm_topk_prob, routed_scaling_factor):  # type: ignore[no-untyped-def]
    """topk_idx int32 [T, K], topk_weights [T, K] from scores [T, E] = sigmoid(x @ Wg); see canonical.gate."""
    num_experts, top_k = scores.shape[1], topk_idx.shape[1]
    per_group = num_experts // n_group
    choice = np.empty(num_experts, np.float32)
    group_score = np.empty(n_group, np.float32)
    for t in range(scores.shape[0]):
        for g in range(n_group):
            first, second = np.float32(-np.inf), np.float32(-np.inf)
            for e in range(g * per_group, (g + 1) * per_group):
                choice[e] = scores[t, e] + bias[e]
                if choice[e] > first:
                    first, second = choice[e], first
                elif choice[e] > second:
                    second = choice[e]
            group_score[g] = first + second if per_group > 1 else first
        # A group stays open if fewer than topk_group groups beat it; ties go to the lower index.
        for g in range(n_group):
            better = 0
            for other in range(n_group):
                if group_score[other] > group_score[g] or (
                    group_score[other] == group_score[g] and other < g
                ):
                    better += 1
            if better >= topk_group:
                choice[g * per_group : (g + 1) * per_group] = np.float32(-np.inf)
        total = ZERO
        for slot in range(top_k):
            best = 0
            for e in range(1, num_experts):
                if choice[e] > choice[best]:
                    best = e
            topk_idx[t, slot] = best
            topk_weights[t, slot] = scores[t, best]
            total += scores[t, best]
            choice[best] = np.float32(-np.inf)
        for slot in range(top_k):
            w = topk_weights[t, slot]
            if norm_topk_prob:
                w = w / (total + GATE_EPS)
            topk_weights[t, slot] = w * np.float32(routed_scaling_factor)


@kernel
def group_rows(order, offsets, expert_idx):  # type: ignore[no-untyped-def]
    """Stable counting sort: order int32 [N] lists the rows by expert, offsets int32 [E + 1] bounds each."""
    offsets[:] = 0
    for e in expert_idx:
        offsets[e + 1] += 1
    for e in range(offsets.size - 1):
        offsets[e + 1] += offsets[e]
    place = offsets[:-1].copy()
    for row in range(expert_idx.size):
        e = expert_idx[row]
        order[place[e]] = row
        place[e] += 1


@kernel
def gather_rows(out, x, index):  # type: ignore[no-untyped-def]
    """out[i] = x[index[i]]."""
    for i in range(index.size):
        out[i] = x[index[i]]


@kernel
def scatter_rows(out, x, index):  # type: ignore[no-untyped-def]
    """out[index[i]] = x[i]."""
    for i in range(index.size):
        out[index[i]] = x[i]


@kernel
def combine(out, expert_out, topk_weights, shared):  # type: ignore[no-untyped-def]
    """out [T, H] from expert_out [T, K, H] in slot order, then shared [T, H] (no rows: none)."""
    for t in range(expert_out.shape[0]):
        row = out[t]
        row[:] = ZERO
        for slot in range(expert_out.shape[1]):
            weight, source = topk_weights[t, slot], expert_out[t, slot]
            for i in range(row.size):
                row[i] = row[i] + source[i] * weight
        if shared.shape[0] > 0:
            for i in range(row.size):
                row[i] = row[i] + shared[t, i]
