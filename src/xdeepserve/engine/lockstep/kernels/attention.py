"""Dies with attention: a layer of one microbatch on each of them, up to the gate if it has experts.

The stages and their buffers are those of `programs/layers.py`, the arithmetic is the same kernels'; the tests
compare every byte.
"""

from __future__ import annotations

from xdeepserve.engine.lockstep.kernels.linear import groups_of, linear
from xdeepserve.jit.compiling import array_part, kernel, part
from xdeepserve.jit.pointers import f32, f32_flat, f32_tiles, flat_like, i8, i32, i32_flat, u8_tiles
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import TILE
from xdeepserve.model.kernels.gemm import ALL_ROWS, gemm_f32
from xdeepserve.model.packing import COLUMNS

# Columns of the tables: addresses on a die. 0 for buffers that a die without experts, or gate, does not have.
BUFFERS = (
    "x", "y", "q8", "q8_scale", "kv", "q_a", "q", "q_lat", "o_lat", "o", "gate_up", "act",
    "gate_logits", "topk_idx", "topk_weights", "shared", "slot_out",
)  # fmt: skip
(
    X, Y, Q8, Q8_SCALE, KV, Q_A, Q, Q_LAT, O_LAT, HEADS_OUT, GATE_UP, ACT,
    LOGITS, TOPK_IDX, TOPK_WEIGHTS, SHARED, SLOT_OUT,
) = range(17)  # fmt: skip
COS, SIN, ROTARY_SIZE = 17, 18, 19

LINEARS = ("wq_a", "wq_b", "wkv_a", "wo", "mlp.w13", "mlp.w2", "shared.w13", "shared.w2")
# Each is followed by its scale's address, 0 if it has none.
WQ_A, WQ_B, WKV_A, WO, W13, W2, SHARED_W13, SHARED_W2 = range(0, 16, 2)
VECTORS = ("attn_norm", "q_norm", "kv_norm", "w_uk", "w_uv", "ffn_norm", "gate", "bias")
ATTN_NORM, Q_NORM, KV_NORM, W_UK, W_UV, FFN_NORM, GATE, BIAS = range(16, 24)
LATENT, SCALE, K_PE = range(24, 27)
INT8_ATTENTION = 27  # 0 or 1
NUM_WEIGHTS = 28

H, POSITIONS, SLOTS, SEQ_OF, BLOCK_TABLES, NUM_SEQS = range(6)
NUM_INPUTS = 6


@part
def layer_linear(out, x, q8, q8_scale, weights, at, k_size, n, num_blocks):
    """out [T, N] = linear layer `at` of the table's row."""
    linear(out, x, q8, q8_scale, weights[at], weights[at + 1], k_size, n, ALL_ROWS, 1, num_blocks)


@part
def heads_product(out, x, weight, heads, depth, n, matrix):
    """out [T, heads * N]: each head's first `depth` columns of x times its own matrix, as `s.matrix`."""
    packed = flat_like(weight, heads * groups_of(n) * COLUMNS * depth, matrix)
    gemm_f32(out, x, packed, depth, n, 1, heads, x.shape[1] // heads, n, ALL_ROWS, 0, groups_of(n))


@part
def norm(out, q8, q8_scale, x, w, eps, is_int8):
    """The RMS norm, and its INT8 rows if the recipe takes these."""
    if is_int8:
        k.rms_norm_quantize(out, q8, q8_scale, x, w, eps)
    else:
        k.rms_norm(out, x, w, eps)


@array_part
def _caches(s, weights):
    """A layer's part of the KV cache: latents in INT8, with scales, and in float32, without; RoPE."""
    c_width, pe_width = (s.kv_lora + TILE - 1) // TILE, (s.rope + TILE - 1) // TILE
    tiles = s.block_size // TILE
    return (
        u8_tiles(weights[LATENT], s.num_blocks, tiles, c_width, TILE, TILE),
        f32(weights[SCALE], s.num_blocks, s.block_size),
        f32_tiles(weights[LATENT], s.num_blocks, tiles, c_width, TILE, TILE),
        f32(weights[LATENT], 0, 0),
        f32_tiles(weights[K_PE], s.num_blocks, tiles, pe_width, TILE, TILE),
    )


@part
def append(s, kv, q, ws, weights, inputs, lo):
    """The new latents kv of the rows from `lo` on into the cache, and RoPE of their queries."""
    rows = kv.shape[0]
    positions, slots = i32_flat(inputs[POSITIONS] + 4 * lo, rows), i32_flat(inputs[SLOTS] + 4 * lo, rows)
    cos, sin = f32(ws[COS], ws[ROTARY_SIZE], s.rope // 2), f32(ws[SIN], ws[ROTARY_SIZE], s.rope // 2)
    kv_norm = f32_flat(weights[KV_NORM], s.kv_lora)
    latent8, scales, latent, none, pe_cache = _caches(s, weights)
    if s.is_int8:
        k.append_kv(latent8, scales, pe_cache, slots, kv, kv_norm, s.latent_eps, positions, cos, sin)
    else:
        k.append_kv(latent, none, pe_cache, slots, kv, kv_norm, s.latent_eps, positions, cos, sin)
    k.rope_heads(q, s.heads, positions, cos, sin)


@part
def attend(s, q, ws, weights, inputs, lo, scratch, worker, num):
    """A worker's part of attention of the rows from `lo` on, from q_lat to o_lat."""
    rows = q.shape[0]
    positions, seq_of = i32_flat(inputs[POSITIONS] + 4 * lo, rows), i32_flat(inputs[SEQ_OF] + 4 * lo, rows)
    tables = i32(inputs[BLOCK_TABLES], inputs[NUM_SEQS], s.blocks_per_seq)
    q_lat, o_lat = f32(ws[Q_LAT], rows, s.heads * s.kv_lora), f32(ws[O_LAT], rows, s.heads * s.kv_lora)
    latent8, scales, latent, none, pe_cache = _caches(s, weights)
    if s.is_int8:
        k.attention(
            o_lat, q_lat, q, s.heads, s.rope, seq_of, positions, latent8, scales, pe_cache, tables,
            s.softmax_scale, weights[INT8_ATTENTION] != 0, scratch, worker, num,
        )  # fmt: skip
    else:
        k.attention(
            o_lat, q_lat, q, s.heads, s.rope, seq_of, positions, latent, none, pe_cache, tables,
            s.softmax_scale, False, scratch, worker, num,
        )  # fmt: skip


@part
def mla(s, h, ws, weights, inputs, lo, scratch):
    """Absorbed MLA on the rows h [T, H] that begin at row `lo` of the step, added to them."""
    rows = h.shape[0]
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
    append(s, kv, q, ws, weights, inputs, lo)
    q_lat, o_lat = f32(ws[Q_LAT], rows, s.heads * s.kv_lora), f32(ws[O_LAT], rows, s.heads * s.kv_lora)
    heads_product(q_lat, q, weights[W_UK], s.heads, s.nope, s.kv_lora, s.matrix)
    attend(s, q, ws, weights, inputs, lo, scratch, 0, 1)

    # Output projection.
    o = f32(ws[HEADS_OUT], rows, s.heads * s.v_dim)
    heads_product(o, o_lat, weights[W_UV], s.heads, s.kv_lora, s.v_dim, s.matrix)
    o8, y = i8(ws[Q8], rows, o.shape[1]), f32(ws[Y], rows, s.hidden)
    if s.is_int8:
        k.quantize_rows(o8, q8_scale, o)
    layer_linear(y, o, o8, q8_scale, weights, WO, o.shape[1], s.hidden, c.TP_BLOCKS)
    k.add(h, h, y)


@part
def mlp(s, out, ws, weights, w13, w2, inter):
    """out [T, H] = the MLP at columns w13 and w2 of the table's row, of what is in x, or q8 and q8_scale."""
    rows = out.shape[0]
    x, x8, q8_scale = f32(ws[X], rows, s.hidden), i8(ws[Q8], rows, s.hidden), f32_flat(ws[Q8_SCALE], rows)
    gate_up = f32(ws[GATE_UP], rows, 2 * inter)
    layer_linear(gate_up, x, x8, q8_scale, weights, w13, s.hidden, 2 * inter, 1)
    act, act8 = f32(ws[ACT], rows, inter), i8(ws[Q8], rows, inter)
    if s.is_int8:
        k.swiglu_quantize(act8, q8_scale, gate_up)
    else:
        k.swiglu(act, gate_up)
    layer_linear(out, act, act8, q8_scale, weights, w2, inter, s.hidden, c.TP_BLOCKS)


@array_part
def feed_norm(s, h, ws, weights):
    """The norm of h [T, H] before experts or MLP, in x, and in q8 and q8_scale."""
    rows = h.shape[0]
    x, x8, q8_scale = f32(ws[X], rows, s.hidden), i8(ws[Q8], rows, s.hidden), f32_flat(ws[Q8_SCALE], rows)
    norm(x, x8, q8_scale, h, f32_flat(weights[FFN_NORM], s.hidden), s.eps, s.is_int8)
    return x


@part
def dense(s, h, ws, weights):
    """The MLP of a layer without experts, added to h [T, H]."""
    feed_norm(s, h, ws, weights)
    y = f32(ws[Y], h.shape[0], s.hidden)
    mlp(s, y, ws, weights, W13, W2, s.dense)
    k.add(h, h, y)


@part
def gate(s, h, ws, weights):
    """Norm and routing of h [T, H], in the die's x, topk_idx and topk_weights."""
    rows = h.shape[0]
    x = feed_norm(s, h, ws, weights)
    logits = f32(ws[LOGITS], rows, s.experts)
    packed = flat_like(weights[GATE], groups_of(s.experts) * COLUMNS * s.hidden, s.matrix)
    gemm_f32(logits, x, packed, s.hidden, s.experts, 1, 1, 0, 0, ALL_ROWS, 0, groups_of(s.experts))
    k.gate(
        i32(ws[TOPK_IDX], rows, s.top_k), f32(ws[TOPK_WEIGHTS], rows, s.top_k), logits,
        f32_flat(weights[BIAS], s.experts), s.groups, s.top_groups, s.is_norm, s.scaling,
    )  # fmt: skip


@kernel
def find_inputs(row, h, positions, slots, seq_of, block_tables):
    """row [6] = addresses of a step's arrays. Python would take longer to ask for one of them."""
    row[H], row[POSITIONS], row[SLOTS] = h.ctypes.data, positions.ctypes.data, slots.ctypes.data
    row[SEQ_OF], row[BLOCK_TABLES], row[NUM_SEQS] = (
        seq_of.ctypes.data,
        block_tables.ctypes.data,
        len(block_tables),
    )


@kernel
def layer_stage(s, ws, weights, inputs, cuts, is_moe, scratch, worker, num_workers):
    """Every num_workers-th die: a layer on its rows of a microbatch, up to the gate if the layer `is_moe`.

    ws [A, buffers], weights [A, NUM_WEIGHTS] and inputs [A, 6] hold addresses; cuts [A, 2] the rows of the
    microbatch; scratch: float32 [workers, at least s.scratch].
    """
    for a in range(worker, ws.shape[0], num_workers):
        lo, hi = cuts[a, 0], cuts[a, 1]
        if hi == lo:
            continue
        h = f32(inputs[a, H] + 4 * lo * s.hidden, hi - lo, s.hidden)
        mla(s, h, ws[a], weights[a], inputs[a], lo, scratch[worker])
        if is_moe:
            gate(s, h, ws[a], weights[a])
        else:
            dense(s, h, ws[a], weights[a])
