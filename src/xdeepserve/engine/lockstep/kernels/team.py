"""A few rows of one die: the threads share every product by columns, and wait for each other in between.

With few rows the time goes into reading weights, of which each thread reads its part here. What is small is
done by every thread for itself, or by the first. The stages, their arithmetic and where they leave the new
latents and h are those of `attention` and `dispatch`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from xdeepserve.engine.lockstep.kernels import experts as e
from xdeepserve.engine.lockstep.kernels.attention import (
    ACT,
    ATTN_NORM,
    BIAS,
    FFN_NORM,
    GATE,
    GATE_UP,
    HEADS_OUT,
    KV,
    O_LAT,
    Q8,
    Q8_SCALE,
    Q_A,
    Q_LAT,
    Q_NORM,
    SHARED,
    SHARED_W2,
    SHARED_W13,
    SLOT_OUT,
    W2,
    W13,
    W_UK,
    W_UV,
    WKV_A,
    WO,
    WQ_A,
    WQ_B,
    H,
    Q,
    Y,
    append,
    attend,
    norm,
)
from xdeepserve.engine.lockstep.kernels.linear import groups_of, linear_part
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.kernels.base import array_part, kernel, part
from xdeepserve.model.kernels.gemm import ALL_ROWS, gemm_f32
from xdeepserve.model.kernels.pointers import f32, f32_flat, flat_like, i8
from xdeepserve.model.packing import COLUMNS

SPINS = 4000  # looks at the others before a thread lets them have its core
PATIENCE = 100_000_000  # such offers, some ten seconds at least, before it gives the others up
CAME, LOST = 0, 8  # in `sync`, on cache lines of their own
SYNC_SIZE = 16

_yield = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def _count(typingctx: Any, sync: Any, index: Any) -> Any:
    """sync[index] += 1 in one piece; what it was. Everything written before is seen by who sees this."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        data = context.make_array(sync)(context, builder, args[0]).data
        return builder.atomic_rmw(
            "add", builder.gep(data, [args[1]]), ir.Constant(ir.IntType(64), 1), "seq_cst"
        )

    return types.int64(sync, types.intp), codegen


@intrinsic
def _look(typingctx: Any, sync: Any, index: Any) -> Any:
    """sync[index] as the other threads have left it."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        data = context.make_array(sync)(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", 8)

    return types.int64(sync, types.intp), codegen


@part
def wait(sync, num):
    """Go on when all `num` threads have come here. sync int64 [SYNC_SIZE], zeros before the first time."""
    goal = (_count(sync, CAME) // num + 1) * num
    looks = 0
    while _look(sync, CAME) < goal:
        looks += 1
        if looks > SPINS:
            _yield()
            if looks > PATIENCE or _look(sync, LOST):
                _count(sync, LOST)
                return


@part
def _share(size, worker, num):
    """Of `size` neighbouring things: the first of a thread, and the last + 1."""
    return size * worker // num, size * (worker + 1) // num


@part
def _columns(out, x, q8, q8_scale, weights, at, k_size, num_blocks, worker, num):
    """A thread's columns of out [T, N] = linear layer `at` of the table's row."""
    n = out.shape[1]
    first, last = _share(groups_of(n), worker, num)
    weight, scale = weights[at], weights[at + 1]
    linear_part(out, x, q8, q8_scale, weight, scale, k_size, n, ALL_ROWS, 1, num_blocks, first, last)


@part
def _heads(s, out, width, x, x_width, rows, weight, depth, n, worker, num):
    """A thread's heads of out [T, heads * n]: the first `depth` columns of x times their own matrix.

    out and x are addresses; `width` and `x_width` the columns of all heads.
    """
    first, last = _share(s.heads, worker, num)
    size, step = groups_of(n) * COLUMNS * depth, x_width // s.heads
    packed = flat_like(weight + s.matrix.itemsize * first * size, (last - first) * size, s.matrix)
    mine, source = f32(out + 4 * first * n, rows, width), f32(x + 4 * first * step, rows, x_width)
    gemm_f32(mine, source, packed, depth, n, 1, last - first, step, n, ALL_ROWS, 0, groups_of(n))


@part
def _activate(s, act, act8, scale, gate_up, worker, num):
    """A thread's rows of the activation."""
    first, last = _share(gate_up.shape[0], worker, num)
    if s.is_int8:
        k.swiglu_quantize(act8[first:last], scale[first:last], gate_up[first:last])
    else:
        k.swiglu(act[first:last], gate_up[first:last])


@array_part
def _mla(s, h, ws, weights, inputs, scratch, sync, worker, num):
    """Absorbed MLA on the rows h [T, H], added to them."""
    rows = h.shape[0]

    # MLAProlog: norm, projections, the new latents into the cache, RoPE, absorption.
    x, x8, scale = _rows(rows, s.hidden)
    norm(x, x8, scale, h, f32_flat(weights[ATTN_NORM], s.hidden), s.eps, s.is_int8)
    kv, q = f32(ws[KV], rows, s.kv_lora + s.rope), f32(ws[Q], rows, s.heads * (s.nope + s.rope))
    _columns(kv, x, x8, scale, weights, WKV_A, s.hidden, 1, worker, num)
    if s.q_lora:
        q_a = f32(ws[Q_A], rows, s.q_lora)
        _columns(q_a, x, x8, scale, weights, WQ_A, s.hidden, 1, worker, num)
        wait(sync, num)
        a, a8, a_scale = _rows(rows, s.q_lora)
        norm(a, a8, a_scale, q_a, f32_flat(weights[Q_NORM], s.q_lora), s.latent_eps, s.is_int8)
        _columns(q, a, a8, a_scale, weights, WQ_B, s.q_lora, 1, worker, num)
    else:
        _columns(q, x, x8, scale, weights, WQ_B, s.hidden, 1, worker, num)
    wait(sync, num)
    if worker == 0:
        append(s, kv, q, ws, weights, inputs, 0)
    wait(sync, num)
    q_width, width, o_width = q.shape[1], s.heads * s.kv_lora, s.heads * s.v_dim
    _heads(s, ws[Q_LAT], width, ws[Q], q_width, rows, weights[W_UK], s.nope, s.kv_lora, worker, num)
    wait(sync, num)
    attend(s, q, ws, weights, inputs, 0, scratch, worker, num)
    wait(sync, num)

    # Output projection.
    _heads(s, ws[HEADS_OUT], o_width, ws[O_LAT], width, rows, weights[W_UV], s.kv_lora, s.v_dim, worker, num)
    wait(sync, num)
    o, y = f32(ws[HEADS_OUT], rows, o_width), f32(ws[Y], rows, s.hidden)
    o8, o_scale = np.empty((rows, o_width), np.int8), np.empty(rows, np.float32)
    if s.is_int8:
        k.quantize_rows(o8, o_scale, o)
    _columns(y, o, o8, o_scale, weights, WO, o_width, c.TP_BLOCKS, worker, num)
    wait(sync, num)
    if worker == 0:
        k.add(h, h, y)
    wait(sync, num)


@array_part
def _rows(rows, size):
    """Rows of a thread's own: float32 [T, N], and INT8 with scales."""
    return (
        np.empty((rows, size), np.float32),
        np.empty((rows, size), np.int8),
        np.empty(rows, np.float32),
    )


@array_part
def _dense(s, h, ws, weights, sync, worker, num):
    """The MLP of a layer without experts, added to h [T, H]."""
    rows = h.shape[0]
    x, x8, scale = _rows(rows, s.hidden)
    norm(x, x8, scale, h, f32_flat(weights[FFN_NORM], s.hidden), s.eps, s.is_int8)
    gate_up, y = f32(ws[GATE_UP], rows, 2 * s.dense), f32(ws[Y], rows, s.hidden)
    act, act8, act_scale = (
        f32(ws[ACT], rows, s.dense),
        i8(ws[Q8], rows, s.dense),
        f32_flat(ws[Q8_SCALE], rows),
    )
    _columns(gate_up, x, x8, scale, weights, W13, s.hidden, 1, worker, num)
    wait(sync, num)
    _activate(s, act, act8, act_scale, gate_up, worker, num)
    wait(sync, num)
    _columns(y, act, act8, act_scale, weights, W2, s.dense, c.TP_BLOCKS, worker, num)
    wait(sync, num)
    if worker == 0:
        k.add(h, h, y)
    wait(sync, num)


@array_part
def _moe(s, inter, h, ws, weights, die, sync, worker, num):
    """Gate, experts and the shared one, added to h [T, H]. die: the row of `experts`' table."""
    rows = h.shape[0]
    total, num_shared = rows * s.top_k, rows if s.shared else 0
    x, x8, scale = _rows(rows, s.hidden)
    norm(x, x8, scale, h, f32_flat(weights[FFN_NORM], s.hidden), s.eps, s.is_int8)
    logits = np.empty((rows, s.experts), np.float32)
    packed = flat_like(weights[GATE], groups_of(s.experts) * COLUMNS * s.hidden, s.matrix)
    gemm_f32(logits, x, packed, s.hidden, s.experts, 1, 1, 0, 0, ALL_ROWS, 0, groups_of(s.experts))
    topk_idx, topk_weights = np.empty((rows, s.top_k), np.int32), np.empty((rows, s.top_k), np.float32)
    bias = f32_flat(weights[BIAS], s.experts)
    k.gate(topk_idx, topk_weights, logits, bias, s.groups, s.top_groups, s.is_norm, s.scaling)
    order, bounds = np.empty(total, np.int32), np.empty(s.experts + 1, np.int32)
    k.group_rows(order, bounds, topk_idx.reshape(-1))
    given, given8, given_scale = _rows(total, s.hidden)
    if s.is_int8:
        k.gather_tokens(given8, given_scale, x8, scale, order, s.top_k)
    else:
        k.gather_tokens(given, given_scale, x, scale[:0], order, s.top_k)

    gate_up, act, act8, act_scale = e.activations(die, total, inter)
    shared_up, shared_act = f32(ws[GATE_UP], num_shared, 2 * s.shared), f32(ws[ACT], num_shared, s.shared)
    shared_act8, shared_scale = i8(ws[Q8], num_shared, s.shared), f32_flat(ws[Q8_SCALE], num_shared)
    _grouped(gate_up, given, given8, given_scale, die[e.W13], die[e.SCALE13], bounds, worker, num)
    if num_shared:
        _columns(shared_up, x, x8, scale, weights, SHARED_W13, s.hidden, 1, worker, num)
    wait(sync, num)
    _activate(s, act, act8, act_scale, gate_up, worker, num)
    if num_shared:
        _activate(s, shared_act, shared_act8, shared_scale, shared_up, worker, num)
    wait(sync, num)
    out, shared = f32(die[e.OUT], total, s.hidden), f32(ws[SHARED], num_shared, s.hidden)
    _grouped(out, act, act8, act_scale, die[e.W2], die[e.SCALE2], bounds, worker, num)
    if num_shared:
        _columns(
            shared,
            shared_act,
            shared_act8,
            shared_scale,
            weights,
            SHARED_W2,
            s.shared,
            c.TP_BLOCKS,
            worker,
            num,
        )
    wait(sync, num)
    if worker == 0:
        slot_out = f32(ws[SLOT_OUT], total, s.hidden)
        k.scatter_rows(slot_out, out, order)
        k.combine(h, slot_out, topk_weights, shared, s.is_int8)
    wait(sync, num)


@part
def _grouped(out, x, x8, x_scale, weight, scale, bounds, worker, num):
    """A thread's columns of the routed experts' products: rows between `bounds` each."""
    k_size, n = x.shape[1], out.shape[1]
    first, last = _share(groups_of(n), worker, num)
    linear_part(out, x, x8, x_scale, weight, scale, k_size, n, bounds, bounds.size - 1, 1, first, last)


@kernel
def run_together(s, inter, ws, weights, dies, is_moe, inputs, rows, scratch, sync, worker, num):
    """All layers on the `rows` rows of one die: thread `worker` of `num`, which all run this at a time.

    inter: width of a routed expert; weights [L, NUM_WEIGHTS], dies [L, NUM_EXPERT_COLUMNS], is_moe [L]: the
    layers' rows in the tables; ws and inputs: the die's; scratch: float32 [workers, at least s.scratch].
    """
    h = f32(inputs[H], rows, s.hidden)
    for layer in range(weights.shape[0]):
        _mla(s, h, ws, weights[layer], inputs, scratch[worker], sync, worker, num)
        if is_moe[layer]:
            _moe(s, inter, h, ws, weights[layer], dies[layer], sync, worker, num)
        else:
            _dense(s, h, ws, weights[layer], sync, worker, num)
