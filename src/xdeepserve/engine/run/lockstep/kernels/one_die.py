"""All layers of a single die in a call; threads share the stages (see `layer`)."""

from __future__ import annotations

import numpy as np

from xdeepserve.engine.run.lockstep.kernels import experts as e
from xdeepserve.engine.run.lockstep.kernels.attention import (
    ACT,
    GATE_UP,
    Q8,
    SHARED,
    SHARED_W2,
    SHARED_W13,
    H,
    activate,
    columns,
    inputs_of,
    rows_of,
)
from xdeepserve.engine.run.lockstep.kernels.layer import all_of, layer, routes
from xdeepserve.engine.run.lockstep.kernels.linear import groups_of, linear, linear_part
from xdeepserve.engine.run.lockstep.kernels.sync import are_lost, share, wait
from xdeepserve.jit.compiling import array_part, kernel, part
from xdeepserve.jit.pointers import f32, f32_flat, i8, i32_flat
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.kernels.gemm import ALL_ROWS
from xdeepserve.model.packing import COLUMNS, DEPTH

MANY_OF_AN_EXPERT = 16  # rows, on average, from which on threads share experts, not columns


@array_part
def _moe(s, inter, h, ws, weights, die, sync, worker, num):
    """Run the routed experts and the shared expert on the rows h [T, H], and add the results.

    die: the row of `experts`' table.
    """
    rows = h.shape[0]
    total, (first, last) = rows * s.top_k, share(rows, worker, num)
    topk_idx, topk_weights = routes(ws, rows, s.top_k)
    order, bounds = i32_flat(die[e.ORDER], total), i32_flat(die[e.OFFSETS], s.experts + 1)
    if worker == 0:
        k.group_rows(order, bounds, topk_idx.reshape(-1))
    wait(sync, num)
    taker = np.empty(s.experts, np.int64)
    if total >= MANY_OF_AN_EXPERT * s.experts and 4 * num * deal(taker, bounds, num) <= 5 * total:
        _by_experts(s, inter, rows, ws, weights, die, order, bounds, taker, sync, worker, num)
    else:
        _by_columns(s, inter, rows, ws, weights, die, order, bounds, sync, worker, num)
    wait(sync, num)
    out, shared = f32(die[e.OUT], total, s.hidden), f32(ws[SHARED], rows if s.shared else 0, s.hidden)
    _add_up(s, h, topk_weights, order, out, shared, first, last)


@array_part
def deal(taker, bounds, num):
    """Deal experts to threads: largest first, each to the thread with the least rows so far.

    taker [E] out: the thread of each expert. Returns the rows of the thread that has most.
    """
    taken = np.zeros(num, np.int64)
    for expert in np.argsort(bounds[:-1] - bounds[1:], kind="mergesort"):
        taker[expert] = np.argmin(taken)
        taken[taker[expert]] += bounds[expert + 1] - bounds[expert]
    return taken.max()


@array_part
def _by_columns(s, inter, rows, ws, weights, die, order, bounds, sync, worker, num):
    """Run experts with the columns of each product shared among threads: each weight is read once."""
    total, num_shared = order.size, rows if s.shared else 0
    x, x8, scale = inputs_of(ws, s.hidden, rows)
    given, given8, given_scale = _given(s, die, total)
    begin, end = share(total, worker, num)
    _gather(s, given, given8, given_scale, x, x8, scale, order, begin, end)
    shared_up, shared_act = f32(ws[GATE_UP], num_shared, 2 * s.shared), f32(ws[ACT], num_shared, s.shared)
    shared_act8 = i8(ws[Q8], num_shared, s.shared)
    if num_shared:
        columns(s, shared_up, x, x8, scale, weights, SHARED_W13, s.hidden, 1, worker, num)
    wait(sync, num)
    gate_up, act, act8, act_scale = e.activations(die, e.GATE_UP, total, inter)
    _grouped(s.is_int8, gate_up, given, given8, given_scale, die[e.W13], die[e.SCALE13], bounds, worker, num)
    wait(sync, num)
    activate(s.is_int8, act, act8, act_scale, gate_up, worker, num)
    if num_shared:
        is_int8 = weights[SHARED_W2 + 1] != 0
        activate(is_int8, shared_act, shared_act8, scale, shared_up, worker, num)
    wait(sync, num)
    out, shared = f32(die[e.OUT], total, s.hidden), f32(ws[SHARED], num_shared, s.hidden)
    _grouped(s.is_int8, out, act, act8, act_scale, die[e.W2], die[e.SCALE2], bounds, worker, num)
    if num_shared:
        columns(
            s, shared, shared_act, shared_act8, scale, weights, SHARED_W2, s.shared, c.TP_BLOCKS, worker, num
        )


@array_part
def _by_experts(s, inter, rows, ws, weights, die, order, bounds, taker, sync, worker, num):
    """Run experts with each thread taking whole experts, whose rows stay in its cache meanwhile."""
    total, num_shared, (first, last) = order.size, rows if s.shared else 0, share(rows, worker, num)
    x, x8, scale = inputs_of(ws, s.hidden, rows)
    given, given8, given_scale = _given(s, die, total)
    gate_up, act, act8, act_scale = e.activations(die, e.GATE_UP, total, inter)
    out = f32(die[e.OUT], total, s.hidden)
    for expert in np.flatnonzero(taker == worker):
        begin, end = bounds[expert], bounds[expert + 1]
        _gather(s, given, given8, given_scale, x, x8, scale, order, begin, end)
        up, own, own8, own_scale = gate_up[begin:end], act[begin:end], act8[begin:end], act_scale[begin:end]
        row, row8, row_scale = given[begin:end], given8[begin:end], given_scale[begin:end]
        _one(s.is_int8, up, row, row8, row_scale, die[e.W13], die[e.SCALE13], expert)
        activate(s.is_int8, own, own8, own_scale, up, 0, 1)
        _one(s.is_int8, out[begin:end], own, own8, own_scale, die[e.W2], die[e.SCALE2], expert)
    shared_up = f32(ws[GATE_UP], num_shared, 2 * s.shared)[first:last]
    if num_shared:
        rows_of(s, shared_up, x[first:last], x8[first:last], scale[first:last], weights, SHARED_W13, 1)
    wait(sync, num)  # what follows takes the place of x8 and its scales, from which others may still gather
    if num_shared:
        shared_act = f32(ws[ACT], rows, s.shared)[first:last]
        shared_act8 = i8(ws[Q8], rows, s.shared)[first:last]
        is_int8, shared = weights[SHARED_W2 + 1] != 0, f32(ws[SHARED], rows, s.hidden)[first:last]
        activate(is_int8, shared_act, shared_act8, scale[first:last], shared_up, 0, 1)
        rows_of(s, shared, shared_act, shared_act8, scale[first:last], weights, SHARED_W2, c.TP_BLOCKS)


@array_part
def _given(s, die, total):
    """Return views of the experts' inputs: float32, or INT8 with scales, at the same place."""
    return f32(die[e.IN], total, s.hidden), i8(die[e.IN], total, s.hidden), f32_flat(die[e.IN_SCALE], total)


@part
def _gather(s, given, given8, given_scale, x, x8, scale, order, begin, end):
    """Gather the rows [begin, end) of the experts' inputs."""
    own, own_scale = order[begin:end], given_scale[begin:end]
    if s.is_int8:
        k.gather_tokens(given8[begin:end], own_scale, x8, scale, own, s.top_k)
    else:
        k.gather_tokens(given[begin:end], own_scale, x, scale[:0], own, s.top_k)


@array_part
def _add_up(s, h, topk_weights, order, out, shared, first, last):
    """Add the experts' answers and the shared expert's to rows [first, last) of h."""
    place = np.empty(order.size, np.int32)
    for i in range(order.size):
        place[order[i]] = i
    own, mine = shared[first:last], place[first * s.top_k : last * s.top_k]
    if s.int8_answers:
        for row in mine:
            k.round_to_int8(out[row : row + 1])
        k.round_to_int8(own)
    k.combine(h[first:last], out, mine, topk_weights[first:last], own, s.bf16_answers)


@part
def _grouped(is_int8, out, x, x8, x_scale, weight, scale, bounds, worker, num):
    """Compute a thread's columns of the routed experts' products: rows between `bounds` each."""
    k_size, n = x.shape[1], out.shape[1]
    first, last = share(groups_of(n), worker, num)
    count = bounds.size - 1
    linear_part(out, x, x8, x_scale, weight, scale, k_size, n, bounds, count, 1, is_int8, first, last)


@part
def _one(is_int8, out, x, x8, x_scale, weight, scale, expert):
    """Compute all columns of a single routed expert's product."""
    k_size, n = x.shape[1], out.shape[1]
    size = groups_of(n) * COLUMNS * ((k_size + DEPTH - 1) // DEPTH * DEPTH if is_int8 else 4 * k_size)
    own_scale = scale + 4 * expert * n if scale else 0
    linear(out, x, x8, x_scale, weight + expert * size, own_scale, k_size, n, ALL_ROWS, 1, 1, is_int8)


@kernel
def run_together(s, inter, ws, weights, dies, passes, is_moe, inputs, rows, scratch, sync, worker, num):
    """Run all layers on the `rows` rows of one die, on thread `worker` of `num` threads.

    All threads run this kernel at the same time. inter: width of a routed expert; weights [P, 1, NUM_WEIGHTS]
    and dies [P, 1, NUM_EXPERT_COLUMNS]: the tables of all passes; passes [L], is_moe [L]: the layers; ws [1,
    buffers] and inputs [1, 6]: the die's; scratch: float32 [workers, at least s.scratch].
    """
    h, die = f32(inputs[0, H], rows, s.hidden), all_of(rows)
    for i in range(passes.size):
        at = passes[i]
        if are_lost(sync):
            return
        layer(s, h, ws[0], weights[at], inputs, die, is_moe[i], scratch[worker], sync, worker, num)
        if is_moe[i]:
            _moe(s, inter, h, ws[0], weights[at, 0], dies[at, 0], sync, worker, num)
