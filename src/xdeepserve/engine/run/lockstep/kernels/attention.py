"""Attention on packed bytes at addresses: the phases of a `layer` up to the output projection."""

from __future__ import annotations

from typing import NamedTuple

from xdeepserve.engine.run.lockstep.kernels.linear import groups_of, linear, linear_part, stacked_product
from xdeepserve.engine.run.lockstep.kernels.sync import share
from xdeepserve.jit.compiling import array_part, kernel, part
from xdeepserve.jit.pointers import f32, f32_flat, f32_tiles, flat_like, i8, i32, i32_flat, u8_tiles
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import TILE
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels.gemm import ALL_ROWS
from xdeepserve.model.packing import COLUMNS, PAIR

# Columns of the tables: addresses on a die. 0 for buffers that a die without experts, or gate, does not have.
BUFFERS = (
    "x", "y", "q8", "q8_scale", "kv", "q_a", "q", "q_lat", "o_lat", "o", "gate_up", "act",
    "gate_logits", "topk_idx", "topk_weights", "shared", "slot_out", "topk_physical",
)  # fmt: skip
(
    X, Y, Q8, Q8_SCALE, KV, Q_A, Q, Q_LAT, O_LAT, HEADS_OUT, GATE_UP, ACT,
    LOGITS, TOPK_IDX, TOPK_WEIGHTS, SHARED, SLOT_OUT, TOPK_PHYSICAL,
) = range(18)  # fmt: skip
# What no stage of a later layer reads. Of it dies in lockstep leave other bytes than by tasks, or none.
SCRATCH = frozenset(BUFFERS) - {"topk_idx", "topk_weights", "topk_physical"}
COS, SIN, ROTARY_SIZE, RANK = range(18, 22)
ROUTES = 22  # the buffer that tells where tokens go: topk_physical if there is one, else topk_idx
SHARED_EXPERT = 23  # the physical expert that the die's tokens take for the shared one, if dispatched
NUM_COLUMNS = 24
BESIDE_H = NUM_COLUMNS  # of buffers beside the dies only: rows of h

LINEARS = ("wq_a", "wq_b", "wkv_a", "wo", "mlp.w13", "mlp.w2", "shared.w13", "shared.w2")
# Each is followed by its scale's address, 0 if it has none.
WQ_A, WQ_B, WKV_A, WO, W13, W2, SHARED_W13, SHARED_W2 = range(0, 16, 2)
VECTORS = ("attn_norm", "q_norm", "kv_norm", "w_uk", "w_uv", "ffn_norm", "gate", "bias")
ATTN_NORM, Q_NORM, KV_NORM, W_UK, W_UV, FFN_NORM, GATE, BIAS = range(16, 24)
LATENT, SCALE, K_PE = range(24, 27)
INT8_ATTENTION = 27  # 0 or 1
LOG2PHY, LOGCNT, LOAD = 28, 29, 30  # of the experts; 0 without replicas, or if nobody counts
NUM_WEIGHTS = 31

# Rows, see `attention`. AT_ONCE is also how many of several dies go side by side, and through a head.
MANY, AT_ONCE, FEW = 64, 128, 32
MANY_OF_A_DIE = 8

H, POSITIONS, SLOTS, SEQ_OF, BLOCK_TABLES, NUM_SEQS = range(6)
NUM_INPUTS = 6


# The phases of a layer, see `layer`.
(
    NORM, PROJECT, NORM_Q, PROJECT_Q, APPEND, ATTEND, HEADS, QUANTIZE, PROJECT_O, GATE_OR_NORM,
    UP, ACTIVATE, DOWN, ADD,
) = range(14)  # fmt: skip
NUM_PHASES = 14


class Dies(NamedTuple):
    """Dies with rows in a layer: one die, or several, with their rows one behind another."""

    which: Array  # int64 [N]: rows of the tables
    starts: Array  # int64 [N + 1]: where each one's rows begin, and the number of all
    from_row: Array  # int64 [N]: the row of a step that its first one is


@part
def rows_of_die(dies, i, first, last):
    """Find the i-th die's part of rows [first, last): its first row and last + 1, less if it has none.

    Also returns the row of the die's step that row 0 would be.
    """
    first, last = max(first, dies.starts[i]), min(last, dies.starts[i + 1])
    return first, last, dies.from_row[i] - dies.starts[i]


@part
def norm(out, q8, q8_scale, x, w, eps, is_int8):
    """Compute the RMS norm of x, and its INT8 rows in the INT8 recipe."""
    if is_int8:
        k.rms_norm_quantize(out, q8, q8_scale, x, w, eps)
    else:
        k.rms_norm(out, x, w, eps)


@array_part
def _caches(s, weights):
    """Return views of a layer's KV cache: INT8 latents with scales, float32 latents without, RoPE keys."""
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
def append(s, kv, q, ws, lead, weights, inputs, lo):
    """Append the new latents kv of rows from `lo` on to the cache, and apply RoPE to their queries.

    lead, weights: rows of the table, of the die that lends its weights and of the die with the cache.
    """
    rows = kv.shape[0]
    positions, slots = i32_flat(inputs[POSITIONS] + 4 * lo, rows), i32_flat(inputs[SLOTS] + 4 * lo, rows)
    cos, sin = f32(ws[COS], ws[ROTARY_SIZE], s.rope // 2), f32(ws[SIN], ws[ROTARY_SIZE], s.rope // 2)
    kv_norm = f32_flat(lead[KV_NORM], s.kv_lora)
    latent8, scales, latent, none, pe_cache = _caches(s, weights)
    if s.is_int8:
        k.append_kv(latent8, scales, pe_cache, slots, kv, kv_norm, s.latent_eps, positions, cos, sin)
    else:
        k.append_kv(latent, none, pe_cache, slots, kv, kv_norm, s.latent_eps, positions, cos, sin)
    k.rope_heads(q, s.heads, positions, cos, sin)


@part
def attend(s, q, ws, weights, inputs, lo, first, last, scratch, worker, num):
    """Compute a worker's part of attention for rows [first, last), counted from `lo`, from q_lat to o_lat."""
    rows, start, width = last - first, 4 * (lo + first), s.heads * s.kv_lora
    positions, seq_of = i32_flat(inputs[POSITIONS] + start, rows), i32_flat(inputs[SEQ_OF] + start, rows)
    tables = i32(inputs[BLOCK_TABLES], inputs[NUM_SEQS], s.blocks_per_seq)
    q_lat, o_lat = (
        f32(ws[Q_LAT] + 4 * first * width, rows, width),
        f32(ws[O_LAT] + 4 * first * width, rows, width),
    )
    q = q[first:last]
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
def columns(s, out, x, q8, q8_scale, weights, at, k_size, num_blocks, worker, num):
    """Compute a thread's columns of out [T, N] = linear layer `at` of the table's row."""
    n = out.shape[1]
    first, last = share(groups_of(n), worker, num)
    weight, scale = weights[at], weights[at + 1]
    linear_part(
        out, x, q8, q8_scale, weight, scale, k_size, n, ALL_ROWS, 1, num_blocks, s.is_int8, first, last
    )


@part
def rows_of(s, out, x, q8, q8_scale, weights, at, num_blocks):
    """Compute linear layer `at` of the table's row for some rows, all columns."""
    weight, scale = weights[at], weights[at + 1]
    linear(out, x, q8, q8_scale, weight, scale, x.shape[1], out.shape[1], ALL_ROWS, 1, num_blocks, s.is_int8)


@array_part
def head_weights(s, weight, depth, n, first, last):
    """Return the packed matrices [depth, n] of the heads [first, last), from the address of all."""
    rows = (depth + PAIR - 1) // PAIR * PAIR if s.is_int8 else depth
    size = groups_of(n) * COLUMNS * rows
    return flat_like(weight + s.matrix.itemsize * first * size, (last - first) * size, s.matrix)


@part
def heads_product(s, out, width, x, x_width, first_row, rows, weight, depth, n, worker, num):
    """Compute a thread's heads of out [T, heads * n]: the first `depth` columns of x times the head's matrix.

    For the rows from `first_row` on. out and x are addresses; `width` and `x_width` are the columns of all
    heads.
    """
    first, last = share(s.heads, worker, num)
    packed, step = head_weights(s, weight, depth, n, first, last), x_width // s.heads
    mine = f32(out + 4 * (first_row * width + first * n), rows, width)
    source = f32(x + 4 * (first_row * x_width + first * step), rows, x_width)
    stacked_product(mine, source, packed, depth, n, last - first, step, 0, groups_of(n))


@part
def absorb(s, ws, weights, first, rows, worker, num):
    """Compute a thread's heads of q_lat for some rows."""
    width, q_width = s.heads * s.kv_lora, s.heads * (s.nope + s.rope)
    w = weights[W_UK]
    heads_product(s, ws[Q_LAT], width, ws[Q], q_width, first, rows, w, s.nope, s.kv_lora, worker, num)


@part
def unabsorb(s, ws, weights, first, rows, worker, num):
    """Compute a thread's heads of the attention output from o_lat, for some rows."""
    width, v_width, w = s.heads * s.kv_lora, s.heads * s.v_dim, weights[W_UV]
    heads_product(
        s, ws[HEADS_OUT], v_width, ws[O_LAT], width, first, rows, w, s.kv_lora, s.v_dim, worker, num
    )


@array_part
def norm_rows(s, h, ws, w, first, last):
    """Normalise rows [first, last) of h [T, H] by the weight at address w, into the die's x, q8 and
    q8_scale."""
    x, x8, scale = inputs_of(ws, s.hidden, h.shape[0])
    weight = f32_flat(w, s.hidden)
    norm(x[first:last], x8[first:last], scale[first:last], h[first:last], weight, s.eps, s.is_int8)


@array_part
def inputs_of(ws, size, rows):
    """Return views of a product's inputs with `size` numbers a row: the die's x, q8 and q8_scale."""
    return f32(ws[X], rows, size), i8(ws[Q8], rows, size), f32_flat(ws[Q8_SCALE], rows)


@part
def activate(is_int8, act, act8, scale, gate_up, worker, num):
    """Compute a thread's rows of the activation, in the form that the next product takes."""
    first, last = share(gate_up.shape[0], worker, num)
    if is_int8:
        k.swiglu_quantize(act8[first:last], scale[first:last], gate_up[first:last])
    else:
        k.swiglu(act[first:last], gate_up[first:last])


@array_part
def project(phase, s, h, ws, weights, worker, num):
    """Run a phase of MLAProlog: a norm or a projection."""
    rows, (first, last) = h.shape[0], share(h.shape[0], worker, num)
    x, x8, scale = inputs_of(ws, s.hidden, rows)
    q, q_a = f32(ws[Q], rows, s.heads * (s.nope + s.rope)), f32(ws[Q_A], rows, s.q_lora)
    q_a8 = i8(ws[Q8], rows, s.q_lora)
    if phase == NORM:
        norm_rows(s, h, ws, weights[ATTN_NORM], first, last)
    elif phase == PROJECT:
        kv = f32(ws[KV], rows, s.kv_lora + s.rope)
        columns(s, kv, x, x8, scale, weights, WKV_A, s.hidden, 1, worker, num)
        out, at = (q_a, WQ_A) if s.q_lora else (q, WQ_B)
        columns(s, out, x, x8, scale, weights, at, s.hidden, 1, worker, num)
    elif phase == NORM_Q:
        own, weight = q_a[first:last], f32_flat(weights[Q_NORM], s.q_lora)
        norm(own, q_a8[first:last], scale[first:last], own, weight, s.latent_eps, s.is_int8)
    else:
        columns(s, q, q_a, q_a8, scale, weights, WQ_B, s.q_lora, 1, worker, num)


@array_part
def attention(phase, s, rows, ws, weights, inputs, dies, scratch, worker, num):
    """Run a phase of attention: append to the cache and absorb, attend, or apply the value matrices.

    From MANY rows for each thread on, a thread takes some rows through all phases, about AT_ONCE at a time.
    Absorbed queries, float32 for each head, would not stay in its cache until the next phase. With fewer
    rows, or only a few of each die, threads share the weights, which are equal on all dies.
    """
    (first, last), lead = share(rows, worker, num), weights[0]
    is_apart = rows >= MANY * num and rows >= MANY_OF_A_DIE * dies.which.size
    q = f32(ws[Q], rows, s.heads * (s.nope + s.rope))
    if phase == APPEND:
        kv = f32(ws[KV], rows, s.kv_lora + s.rope)
        for i in range(dies.which.size):
            at, end, lo = rows_of_die(dies, i, first, last)
            if at < end:
                die = dies.which[i]
                append(s, kv[at:end], q[at:end], ws, lead, weights[die], inputs[die], lo + at)
        if not is_apart:
            # What append turns is the end of each head, and what this reads the beginning.
            absorb(s, ws, lead, 0, rows, worker, num)
    elif phase == HEADS:
        if not is_apart:
            unabsorb(s, ws, lead, 0, rows, worker, num)
    elif not is_apart:
        for i in range(dies.which.size):
            at, end, lo = rows_of_die(dies, i, 0, rows)
            die, turn = dies.which[i], (worker - at) % num
            attend(s, q, ws, weights[die], inputs[die], lo, at, end, scratch, turn, num)
    else:
        turns = (rows + AT_ONCE * num - 1) // (AT_ONCE * num)
        for turn in range(turns):
            # To and fro: later rows have more to look at.
            place = worker if turn % 2 == 0 else num - 1 - worker
            first, last = share(rows, turn * num + place, turns * num)
            for i in range(dies.which.size):
                at, end, lo = rows_of_die(dies, i, first, last)
                die = dies.which[i]
                _all_the_way(s, q, ws, lead, weights[die], inputs[die], lo, at, end, scratch)


@array_part
def _all_the_way(s, q, ws, lead, weights, inputs, lo, at, end, scratch):
    """Absorb, attend and unabsorb the rows [at, end), counted from `lo`.

    A matrix unit takes all rows of a sequence at once; rows between such sequences go step by step.
    """
    seq_of, positions = i32_flat(inputs[SEQ_OF] + 4 * lo, end), i32_flat(inputs[POSITIONS] + 4 * lo, end)
    tables = i32(inputs[BLOCK_TABLES], inputs[NUM_SEQS], s.blocks_per_seq)
    latent8, scales, _, _, pe_cache = _caches(s, weights)
    out = f32(ws[HEADS_OUT], end, s.heads * s.v_dim)
    w_uk = head_weights(s, lead[W_UK], s.nope, s.kv_lora, 0, s.heads)
    w_uv = head_weights(s, lead[W_UV], s.kv_lora, s.v_dim, 0, s.heads)
    first = at
    while at < end:
        stop = at + 1
        while stop < end and seq_of[stop] == seq_of[at]:
            stop += 1
        if s.is_int8 and k.prefill(
            out[at:stop], q[at:stop], s.heads, s.rope, w_uk, w_uv, positions[at:stop], tables[seq_of[at]],
            latent8, scales, pe_cache, s.softmax_scale, weights[INT8_ATTENTION] != 0, scratch,
        ):  # fmt: skip
            _step_by_step(s, q, ws, lead, weights, inputs, lo, first, at, scratch)
            first = stop
        at = stop
    _step_by_step(s, q, ws, lead, weights, inputs, lo, first, end, scratch)


@part
def _step_by_step(s, q, ws, lead, weights, inputs, lo, first, last, scratch):
    """Absorb, attend and unabsorb the rows [first, last), about FEW at a time.

    So q_lat and o_lat stay in the processor's cache.
    """
    turns = (last - first + FEW - 1) // FEW
    for turn in range(turns):
        at, end = share(last - first, turn, turns)
        at, end = first + at, first + end
        absorb(s, ws, lead, at, end - at, 0, 1)
        attend(s, q, ws, weights, inputs, lo, at, end, scratch, 0, 1)
        unabsorb(s, ws, lead, at, end - at, 0, 1)


@array_part
def project_out(phase, s, rows, ws, weights, worker, num):
    """Run a phase of the output projection, which leaves attention's result in y."""
    (first, last), width = share(rows, worker, num), s.heads * s.v_dim
    x, o8, scale = f32(ws[HEADS_OUT], rows, width), i8(ws[Q8], rows, width), f32_flat(ws[Q8_SCALE], rows)
    if phase == QUANTIZE:
        k.quantize_rows(o8[first:last], scale[first:last], x[first:last])
    else:
        columns(s, f32(ws[Y], rows, s.hidden), x, o8, scale, weights, WO, width, c.TP_BLOCKS, worker, num)


@kernel
def find_inputs(row, h, positions, slots, seq_of, block_tables):
    """Write the addresses of a step's arrays into row [6]; in Python even one of them would take longer."""
    row[H], row[POSITIONS], row[SLOTS] = h.ctypes.data, positions.ctypes.data, slots.ctypes.data
    row[SEQ_OF], row[BLOCK_TABLES], row[NUM_SEQS] = (
        seq_of.ctypes.data,
        block_tables.ctypes.data,
        len(block_tables),
    )
