"""All layers of one die in one call: threads share every stage, and wait for each other in between.

Products are shared by columns, so that each weight is read once; attention by heads and sequences; what
treats each row by itself, by rows. A stage is what lies between two waits: in it a thread reads what others
wrote before the last one, and writes its own part. The stages, their arithmetic and the buffers that they
leave their results in are those of `attention` and `dispatch`, for any number of threads.
"""

from __future__ import annotations

import os
from typing import Any

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
    LOGITS,
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
    TOPK_IDX,
    TOPK_WEIGHTS,
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
    X,
    Y,
    append,
    attend,
    norm,
)
from xdeepserve.engine.lockstep.kernels.linear import groups_of, linear_part
from xdeepserve.jit.compiling import array_part, kernel, part
from xdeepserve.jit.pointers import f32, f32_flat, flat_like, i8, i32, i32_flat
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.kernels.gemm import ALL_ROWS, gemm_f32
from xdeepserve.model.packing import COLUMNS

SPINS = 4000  # looks at the others before a thread lets them have its core
PATIENCE = 100_000_000  # such offers, some ten seconds at least, before it gives the others up
CAME, LOST = 0, 8  # in `sync`, on cache lines of their own
SYNC_SIZE = 16

HAS_TEAMS = hasattr(os, "sched_yield")  # what threads that wait do; without it there can be one only

if HAS_TEAMS:
    _yield = types.ExternalFunction("sched_yield", types.int32())
else:

    @part
    def _yield():
        return 0


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


@array_part
def _norm_rows(s, h, ws, w, first, last):
    """The norm, by the weight at address w, rows [first, last) of h [T, H] in the die's x, q8, q8_scale."""
    x, x8, scale = _inputs(ws, s.hidden, h.shape[0])
    weight = f32_flat(w, s.hidden)
    norm(x[first:last], x8[first:last], scale[first:last], h[first:last], weight, s.eps, s.is_int8)


@array_part
def _inputs(ws, size, rows):
    """What a product of `size` numbers a row reads: the die's x (if that is its size), q8 and q8_scale."""
    return f32(ws[X], rows, size), i8(ws[Q8], rows, size), f32_flat(ws[Q8_SCALE], rows)


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
    """Absorbed MLA on the rows h [T, H]: what it adds to them is left in the die's y."""
    rows = h.shape[0]
    first, last = _share(rows, worker, num)

    # MLAProlog: norm, projections, the new latents into the cache, RoPE, absorption.
    _norm_rows(s, h, ws, weights[ATTN_NORM], first, last)
    wait(sync, num)
    x, x8, scale = _inputs(ws, s.hidden, rows)
    kv, q = f32(ws[KV], rows, s.kv_lora + s.rope), f32(ws[Q], rows, s.heads * (s.nope + s.rope))
    _columns(kv, x, x8, scale, weights, WKV_A, s.hidden, 1, worker, num)
    if s.q_lora:
        q_a, q_a8 = f32(ws[Q_A], rows, s.q_lora), i8(ws[Q8], rows, s.q_lora)
        _columns(q_a, x, x8, scale, weights, WQ_A, s.hidden, 1, worker, num)
        wait(sync, num)
        own, weight = q_a[first:last], f32_flat(weights[Q_NORM], s.q_lora)
        norm(own, q_a8[first:last], scale[first:last], own, weight, s.latent_eps, s.is_int8)
        wait(sync, num)
        _columns(q, q_a, q_a8, scale, weights, WQ_B, s.q_lora, 1, worker, num)
    else:
        _columns(q, x, x8, scale, weights, WQ_B, s.hidden, 1, worker, num)
    wait(sync, num)
    append(s, kv[first:last], q[first:last], ws, weights, inputs, first)
    # What append turns is the end of each head, and what this reads the beginning.
    q_width, width, o_width = q.shape[1], s.heads * s.kv_lora, s.heads * s.v_dim
    _heads(s, ws[Q_LAT], width, ws[Q], q_width, rows, weights[W_UK], s.nope, s.kv_lora, worker, num)
    wait(sync, num)
    attend(s, q, ws, weights, inputs, 0, scratch, worker, num)
    wait(sync, num)

    # Output projection.
    _heads(s, ws[HEADS_OUT], o_width, ws[O_LAT], width, rows, weights[W_UV], s.kv_lora, s.v_dim, worker, num)
    wait(sync, num)
    o, o8 = f32(ws[HEADS_OUT], rows, o_width), i8(ws[Q8], rows, o_width)
    if s.is_int8:
        k.quantize_rows(o8[first:last], scale[first:last], o[first:last])
        wait(sync, num)
    _columns(f32(ws[Y], rows, s.hidden), o, o8, scale, weights, WO, o_width, c.TP_BLOCKS, worker, num)
    wait(sync, num)


@array_part
def _add_rows(s, h, ws, first, last):
    """The rows [first, last) of the die's y added to those of h [T, H]."""
    own = h[first:last]
    k.add(own, own, f32(ws[Y], h.shape[0], s.hidden)[first:last])


@array_part
def _dense(s, h, ws, weights, sync, worker, num):
    """The MLP of a layer without experts on the rows h [T, H]: its result is left in y."""
    rows = h.shape[0]
    x, x8, scale = _inputs(ws, s.hidden, rows)
    gate_up = f32(ws[GATE_UP], rows, 2 * s.dense)
    act, act8 = f32(ws[ACT], rows, s.dense), i8(ws[Q8], rows, s.dense)
    _columns(gate_up, x, x8, scale, weights, W13, s.hidden, 1, worker, num)
    wait(sync, num)
    _activate(s, act, act8, scale, gate_up, worker, num)
    wait(sync, num)
    y = f32(ws[Y], rows, s.hidden)
    _columns(y, act, act8, scale, weights, W2, s.dense, c.TP_BLOCKS, worker, num)
    wait(sync, num)


@array_part
def _gate(s, ws, weights, rows, first, last):
    """Routing of the rows [first, last), in the die's topk_idx and topk_weights."""
    x, logits = f32(ws[X], rows, s.hidden)[first:last], f32(ws[LOGITS], rows, s.experts)[first:last]
    packed = flat_like(weights[GATE], groups_of(s.experts) * COLUMNS * s.hidden, s.matrix)
    gemm_f32(logits, x, packed, s.hidden, s.experts, 1, 1, 0, 0, ALL_ROWS, 0, groups_of(s.experts))
    topk_idx, topk_weights = _routes(ws, rows, s.top_k)
    bias = f32_flat(weights[BIAS], s.experts)
    k.gate(
        topk_idx[first:last], topk_weights[first:last], logits, bias,
        s.groups, s.top_groups, s.is_norm, s.scaling,
    )  # fmt: skip


@array_part
def _routes(ws, rows, top_k):
    """The die's topk_idx and topk_weights."""
    return i32(ws[TOPK_IDX], rows, top_k), f32(ws[TOPK_WEIGHTS], rows, top_k)


@array_part
def _moe(s, inter, h, ws, weights, die, sync, worker, num):
    """Experts and the shared one of the rows h [T, H], added to them. die: the row of `experts`' table."""
    rows = h.shape[0]
    total, num_shared = rows * s.top_k, rows if s.shared else 0
    first, last = _share(rows, worker, num)
    topk_idx, topk_weights = _routes(ws, rows, s.top_k)
    order, bounds = i32_flat(die[e.ORDER], total), i32_flat(die[e.OFFSETS], s.experts + 1)
    if worker == 0:
        k.group_rows(order, bounds, topk_idx.reshape(-1))
    wait(sync, num)

    x, x8, scale = _inputs(ws, s.hidden, rows)
    given, given8 = f32(die[e.IN], total, s.hidden), i8(die[e.IN], total, s.hidden)
    given_scale, (begin, end) = f32_flat(die[e.IN_SCALE], total), _share(total, worker, num)
    if s.is_int8:
        k.gather_tokens(given8[begin:end], given_scale[begin:end], x8, scale, order[begin:end], s.top_k)
    else:
        k.gather_tokens(given[begin:end], given_scale[begin:end], x, scale[:0], order[begin:end], s.top_k)
    shared_up, shared_act = f32(ws[GATE_UP], num_shared, 2 * s.shared), f32(ws[ACT], num_shared, s.shared)
    shared_act8 = i8(ws[Q8], num_shared, s.shared)
    if num_shared:
        _columns(shared_up, x, x8, scale, weights, SHARED_W13, s.hidden, 1, worker, num)
    wait(sync, num)
    gate_up, act, act8, act_scale = e.activations(die, total, inter)
    _grouped(gate_up, given, given8, given_scale, die[e.W13], die[e.SCALE13], bounds, worker, num)
    wait(sync, num)
    _activate(s, act, act8, act_scale, gate_up, worker, num)
    if num_shared:
        _activate(s, shared_act, shared_act8, scale, shared_up, worker, num)
    wait(sync, num)
    out, shared = f32(die[e.OUT], total, s.hidden), f32(ws[SHARED], num_shared, s.hidden)
    _grouped(out, act, act8, act_scale, die[e.W2], die[e.SCALE2], bounds, worker, num)
    if num_shared:
        _columns(
            shared, shared_act, shared_act8, scale, weights, SHARED_W2, s.shared, c.TP_BLOCKS, worker, num
        )
    wait(sync, num)
    slot_out = f32(ws[SLOT_OUT], total, s.hidden)
    for i in range(total):
        if first * s.top_k <= order[i] < last * s.top_k:
            slot_out[order[i]] = out[i]
    slots = slot_out[first * s.top_k : last * s.top_k]
    k.combine(h[first:last], slots, topk_weights[first:last], shared[first:last], s.is_int8)


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
    first, last = _share(rows, worker, num)
    for layer in range(weights.shape[0]):
        # A thread has its rows of h to itself, from one layer's end to the next one's beginning, too.
        _mla(s, h, ws, weights[layer], inputs, scratch[worker], sync, worker, num)
        _add_rows(s, h, ws, first, last)
        _norm_rows(s, h, ws, weights[layer, FFN_NORM], first, last)
        if is_moe[layer]:
            _gate(s, ws, weights[layer], rows, first, last)
        wait(sync, num)
        if is_moe[layer]:
            _moe(s, inter, h, ws, weights[layer], dies[layer], sync, worker, num)
        else:
            _dense(s, h, ws, weights[layer], sync, worker, num)
            _add_rows(s, h, ws, first, last)
