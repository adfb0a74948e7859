"""Attention dies: a layer of one microbatch on each of them, from the answers that come back to A2E's field.

The stages and their buffers are those of `programs/layers.py` and `programs/attention.py`, the arithmetic is
the same kernels', the rows and fields those of `comm/a2e.py`; the tests compare every byte.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.engine.lockstep.kernels.fields import WRONG_COUNT, WRONG_EVENT, field, post
from xdeepserve.engine.lockstep.kernels.linear import groups_of, linear
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import TILE
from xdeepserve.model.kernels.base import kernel, part
from xdeepserve.model.kernels.gemm import ALL_ROWS, gemm_f32
from xdeepserve.model.kernels.pointers import (
    copy_bytes,
    f32,
    f32_flat,
    f32_tiles,
    i8,
    i32,
    i32_flat,
    u8_tiles,
)
from xdeepserve.model.packing import COLUMNS

# Columns of the tables: addresses on an attention die.
BUFFERS = (
    "x", "y", "q8", "q8_scale", "kv", "q_a", "q", "q_lat", "o_lat", "o", "gate_up", "act",
    "gate_logits", "topk_idx", "topk_weights",
)  # fmt: skip
(X, Y, Q8, Q8_SCALE, KV, Q_A, Q, Q_LAT, O_LAT, HEADS_OUT, GATE_UP, ACT, LOGITS, TOPK_IDX, TOPK_WEIGHTS) = (
    range(15)
)
COS, SIN = 15, 16

LINEARS = ("wq_a", "wq_b", "wkv_a", "wo", "mlp.w13", "mlp.w2")
WQ_A, WQ_B, WKV_A, WO, W13, W2 = range(0, 12, 2)  # each followed by its scale's address, 0 if it has none
VECTORS = ("attn_norm", "q_norm", "kv_norm", "w_uk", "w_uv", "ffn_norm", "gate", "bias")
ATTN_NORM, Q_NORM, KV_NORM, W_UK, W_UV, FFN_NORM, GATE, BIAS = range(12, 20)
LATENT, SCALE, K_PE = range(20, 23)
INT8_ATTENTION = 23  # 0 or 1
NUM_WEIGHTS = 24

H, POSITIONS, SLOTS, SEQ_OF, BLOCK_TABLES, NUM_SEQS = range(6)

(
    TOKENS, TOKENS_POINTER, TRAMPOLINE_FIELD, TRAMPOLINE_BASE, ANSWER_FIELD, ANSWERS, SHARED_EXPERT, NUM_SENT
) = range(8)  # fmt: skip


@part
def layer_linear(out, x, q8, q8_scale, weights, at, k_size, n, num_blocks):
    """out [T, N] = linear layer `at` of the table's row."""
    linear(out, x, q8, q8_scale, weights[at], weights[at + 1], k_size, n, ALL_ROWS, 1, num_blocks)


@part
def heads_product(out, x, weight, heads, depth, n):
    """out [T, heads * N]: each head's first `depth` columns of x times its own matrix."""
    packed = f32_flat(weight, heads * groups_of(n) * COLUMNS * depth)
    gemm_f32(out, x, packed, depth, n, 1, heads, x.shape[1] // heads, n, ALL_ROWS, 0, groups_of(n))


@part
def norm(out, q8, q8_scale, x, w, eps, is_int8):
    """The RMS norm, and its INT8 rows if the recipe takes these."""
    if is_int8:
        k.rms_norm_quantize(out, q8, q8_scale, x, w, eps)
    else:
        k.rms_norm(out, x, w, eps)


@part
def mla(s, h, ws, weights, inputs, lo, scratch):
    """Absorbed MLA on the rows h [T, H] that begin at row `lo` of the step, added to them."""
    rows = h.shape[0]
    positions, slots = i32_flat(inputs[POSITIONS] + 4 * lo, rows), i32_flat(inputs[SLOTS] + 4 * lo, rows)
    seq_of = i32_flat(inputs[SEQ_OF] + 4 * lo, rows)
    tables = i32(inputs[BLOCK_TABLES], inputs[NUM_SEQS], s.blocks_per_seq)
    cos, sin = f32(ws[COS], ws[COS + 2], s.rope // 2), f32(ws[SIN], ws[COS + 2], s.rope // 2)
    q8_scale = f32_flat(ws[Q8_SCALE], rows)

    # MLAProlog: norm, projections, the new latents into the cache, RoPE, absorption.
    x, x8 = f32(ws[X], rows, s.hidden), i8(ws[Q8], rows, s.hidden)
    norm(x, x8, q8_scale, h, f32_flat(weights[ATTN_NORM], s.hidden), s.eps, s.is_int8)
    kv = f32(ws[KV], rows, s.kv_lora + s.rope)
    layer_linear(kv, x, x8, q8_scale, weights, WKV_A, s.hidden, s.kv_lora + s.rope, 1)
    q = f32(ws[Q], rows, s.heads * (s.nope + s.rope))
    if s.q_lora:
        q_a, q_a8 = f32(ws[Q_A], rows, s.q_lora), i8(ws[Q8], rows, s.q_lora)
        layer_linear(q_a, x, x8, q8_scale, weights, WQ_A, s.hidden, s.q_lora, 1)
        norm(q_a, q_a8, q8_scale, q_a, f32_flat(weights[Q_NORM], s.q_lora), s.latent_eps, s.is_int8)
        layer_linear(q, q_a, q_a8, q8_scale, weights, WQ_B, s.q_lora, q.shape[1], 1)
    else:
        layer_linear(q, x, x8, q8_scale, weights, WQ_B, s.hidden, q.shape[1], 1)
    kv_norm = f32_flat(weights[KV_NORM], s.kv_lora)
    c_width, pe_width = (s.kv_lora + TILE - 1) // TILE, (s.rope + TILE - 1) // TILE
    tiles = s.block_size // TILE
    pe_cache = f32_tiles(weights[K_PE], s.num_blocks, tiles, pe_width, TILE, TILE)
    q_lat, o_lat = f32(ws[Q_LAT], rows, s.heads * s.kv_lora), f32(ws[O_LAT], rows, s.heads * s.kv_lora)
    softmax_scale = s.softmax_scale
    if s.is_int8:
        latent8 = u8_tiles(weights[LATENT], s.num_blocks, tiles, c_width, TILE, TILE)
        scales = f32(weights[SCALE], s.num_blocks, s.block_size)
        k.append_kv(latent8, scales, pe_cache, slots, kv, kv_norm, s.latent_eps, positions, cos, sin)
        k.rope_heads(q, s.heads, positions, cos, sin)
        heads_product(q_lat, q, weights[W_UK], s.heads, s.nope, s.kv_lora)
        k.attention(
            o_lat, q_lat, q, s.heads, s.rope, seq_of, positions, latent8, scales, pe_cache, tables,
            softmax_scale, weights[INT8_ATTENTION] != 0, scratch, 0, 1,
        )  # fmt: skip
    else:
        latent = f32_tiles(weights[LATENT], s.num_blocks, tiles, c_width, TILE, TILE)
        none = f32(weights[LATENT], 0, 0)
        k.append_kv(latent, none, pe_cache, slots, kv, kv_norm, s.latent_eps, positions, cos, sin)
        k.rope_heads(q, s.heads, positions, cos, sin)
        heads_product(q_lat, q, weights[W_UK], s.heads, s.nope, s.kv_lora)
        k.attention(
            o_lat, q_lat, q, s.heads, s.rope, seq_of, positions, latent, none, pe_cache, tables,
            softmax_scale, False, scratch, 0, 1,
        )  # fmt: skip

    # Output projection.
    o = f32(ws[HEADS_OUT], rows, s.heads * s.v_dim)
    heads_product(o, o_lat, weights[W_UV], s.heads, s.kv_lora, s.v_dim)
    o8, y = i8(ws[Q8], rows, o.shape[1]), f32(ws[Y], rows, s.hidden)
    if s.is_int8:
        k.quantize_rows(o8, q8_scale, o)
    layer_linear(y, o, o8, q8_scale, weights, WO, o.shape[1], s.hidden, c.TP_BLOCKS)
    k.add(h, h, y)


@part
def dense(s, h, ws, weights):
    """The MLP of a layer without experts, added to h [T, H]."""
    rows = h.shape[0]
    x, x8, q8_scale = f32(ws[X], rows, s.hidden), i8(ws[Q8], rows, s.hidden), f32_flat(ws[Q8_SCALE], rows)
    norm(x, x8, q8_scale, h, f32_flat(weights[FFN_NORM], s.hidden), s.eps, s.is_int8)
    gate_up = f32(ws[GATE_UP], rows, 2 * s.dense)
    layer_linear(gate_up, x, x8, q8_scale, weights, W13, s.hidden, 2 * s.dense, 1)
    act, act8 = f32(ws[ACT], rows, s.dense), i8(ws[Q8], rows, s.dense)
    if s.is_int8:
        k.swiglu_quantize(act8, q8_scale, gate_up)
    else:
        k.swiglu(act, gate_up)
    y = f32(ws[Y], rows, s.hidden)
    layer_linear(y, act, act8, q8_scale, weights, W2, s.dense, s.hidden, c.TP_BLOCKS)
    k.add(h, h, y)


@part
def gate(s, h, ws, weights):
    """Norm and routing of h [T, H], in the die's x, topk_idx and topk_weights."""
    rows = h.shape[0]
    x, x8, q8_scale = f32(ws[X], rows, s.hidden), i8(ws[Q8], rows, s.hidden), f32_flat(ws[Q8_SCALE], rows)
    norm(x, x8, q8_scale, h, f32_flat(weights[FFN_NORM], s.hidden), s.eps, s.is_int8)
    logits = f32(ws[LOGITS], rows, s.experts)
    packed = f32_flat(weights[GATE], groups_of(s.experts) * COLUMNS * s.hidden)
    gemm_f32(logits, x, packed, s.hidden, s.experts, 1, 1, 0, 0, ALL_ROWS, 0, groups_of(s.experts))
    k.gate(
        i32(ws[TOPK_IDX], rows, s.top_k), f32(ws[TOPK_WEIGHTS], rows, s.top_k), logits,
        f32_flat(weights[BIAS], s.experts), s.groups, s.top_groups, s.is_norm, s.scaling,
    )  # fmt: skip


@part
def a2e(s, rows, ws, way, event):
    """A2E, steps 2 to 4: one row per token in the die's managed area, one field at its trampoline."""
    x, idx = f32(ws[X], rows, s.hidden), i32(ws[TOPK_IDX], rows, s.top_k)
    weight = f32(ws[TOPK_WEIGHTS], rows, s.top_k)
    for t in range(rows):
        row = way[TOKENS] + t * s.token_nbytes
        experts, weights = i32_flat(row, s.copies), f32_flat(row + 4 * s.copies, s.copies)
        for slot in range(s.top_k):
            experts[slot], weights[slot] = idx[t, slot], weight[t, slot]
        if s.copies > s.top_k:  # the shared expert is one more, of weight 1
            experts[s.top_k], weights[s.top_k] = way[SHARED_EXPERT], np.float32(1.0)
        scale = f32_flat(row + 8 * s.copies, 1)
        payload = row + 8 * s.copies + 4
        if s.is_int8:
            k.quantize_rows(i8(payload, 1, s.hidden), scale, f32(ws[X] + 4 * t * s.hidden, 1, s.hidden))
        else:
            scale[0] = np.float32(1.0)
            to = f32_flat(payload, s.hidden)
            for i in range(s.hidden):
                to[i] = x[t, i]
    post(way[TRAMPOLINE_FIELD], event, way[TOKENS_POINTER], rows)
    way[NUM_SENT] = rows


@part
def come_back(s, h, way, event):
    """E2A', steps 5 to 7, and the residual: add the answers of `event` to h [T, H]. 0, or what is wrong."""
    found, pointer, count = field(way[ANSWER_FIELD])
    if found != event:
        return WRONG_EVENT
    if count != way[NUM_SENT] or count != h.shape[0]:
        return WRONG_COUNT
    copy_bytes(way[ANSWERS], way[TRAMPOLINE_BASE] + pointer, count * s.answer_nbytes)
    for t in range(count):
        answer = f32_flat(way[ANSWERS] + t * s.answer_nbytes, s.hidden)
        for i in range(s.hidden):
            h[t, i] += answer[i]
    return 0


@kernel
def attention_stage(s, ws, weights, inputs, cuts, ways, back, event, faults, worker, num_workers):
    """Every num_workers-th attention die: the answers of event `back` if it is not 0, then, if `weights` has
    any, a layer with A2E under `event`, or a dense layer if `event` is 0.

    ws [A, buffers], weights [A, NUM_WEIGHTS], inputs [A, 6] and ways [A, 8] hold addresses; cuts [A, 2] the
    rows of the microbatch. faults [A]: what is wrong with an answer, 0 if nothing is.
    """
    scratch = np.empty(s.scratch, np.float32)
    for a in range(worker, ws.shape[0], num_workers):
        lo, hi = cuts[a, 0], cuts[a, 1]
        h = f32(inputs[a, H] + 4 * lo * s.hidden, hi - lo, s.hidden)
        if back:
            faults[a] = come_back(s, h, ways[a], back)
            if faults[a]:
                continue
        if not weights.size:
            continue
        if hi > lo:
            mla(s, h, ws[a], weights[a], inputs[a], lo, scratch)
            if event:
                gate(s, h, ws[a], weights[a])
            else:
                dense(s, h, ws[a], weights[a])
        if event:
            a2e(s, hi - lo, ws[a], ways[a], event)
