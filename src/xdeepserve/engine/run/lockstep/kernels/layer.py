"""A decoder layer on packed bytes at addresses: the stages of `step/layer.py` up to the gate or MLP's end.

A layer goes phase by phase. `num` threads share a phase, one of them `worker`, or one thread runs it all.
Products are shared by columns, so each weight is read once. Attention is shared by heads and sequences, or by
rows where there are many. Work on single rows is shared by rows. A phase lies between two waits: in it a
thread reads what others wrote before the last wait, and writes its own part.

The arithmetic and the buffers' final contents are those of `step`, for any number of threads. The tests
compare every byte except q_lat and o_lat, which many rows on a matrix unit skip. Attention of another kind
than MLA has run before, die by die (`staged.py`). Then a layer begins with that attention's output in the
buffer `o`.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.engine.run.lockstep.kernels import attention as a
from xdeepserve.engine.run.lockstep.kernels.linear import groups_of
from xdeepserve.engine.run.lockstep.kernels.sync import share, wait
from xdeepserve.jit.compiling import array_part, part
from xdeepserve.jit.pointers import f32, f32_flat, i8, i32, i32_flat
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.kernels.gemm import ALL_ROWS, gemm_f32
from xdeepserve.model.packing import COLUMNS


@part
def skips(s, phase, is_moe):
    """Whether a layer has nothing to do in a phase.

    Phases are skipped without a query bottleneck, in FP32, and in layers with experts.
    """
    has_no_bottleneck = s.q_lora == 0 and a.NORM_Q <= phase <= a.PROJECT_Q
    return has_no_bottleneck or (phase == a.QUANTIZE and not s.is_int8) or (phase >= a.UP and is_moe)


@array_part
def add_rows(s, h, ws, first, last):
    """Add rows [first, last) of the die's y to the same rows of h [T, H]."""
    own = h[first:last]
    k.add(own, own, f32(ws[a.Y], h.shape[0], s.hidden)[first:last])


@part
def mlp_phase(phase, s, out, ws, weights, w13, w2, inter, worker, num):
    """Run a phase of the MLP at columns w13 and w2 of the table's row: out [T, H] from x, or from q8 and
    q8_scale."""
    rows = out.shape[0]
    x, x8, scale = a.inputs_of(ws, s.hidden, rows)
    gate_up, act = f32(ws[a.GATE_UP], rows, 2 * inter), f32(ws[a.ACT], rows, inter)
    act8 = i8(ws[a.Q8], rows, inter)
    if phase == a.UP:
        a.columns(s, gate_up, x, x8, scale, weights, w13, s.hidden, 1, worker, num)
    elif phase == a.ACTIVATE:
        a.activate(weights[w2 + 1] != 0, act, act8, scale, gate_up, worker, num)
    else:
        a.columns(s, out, act, act8, scale, weights, w2, inter, c.TP_BLOCKS, worker, num)


@array_part
def gate(s, ws, weights, rows, first, last):
    """Route the rows [first, last): write the die's topk_idx and topk_weights."""
    x, logits = f32(ws[a.X], rows, s.hidden)[first:last], f32(ws[a.LOGITS], rows, s.experts)[first:last]
    packed = f32_flat(weights[a.GATE], groups_of(s.experts) * COLUMNS * s.hidden)
    gemm_f32(logits, x, packed, s.hidden, s.experts, 1, 1, 0, 0, ALL_ROWS, 0, groups_of(s.experts))
    topk_idx, topk_weights = routes(ws, rows, s.top_k)
    bias = f32_flat(weights[a.BIAS], s.experts if s.has_bias else 0)
    k.gate(
        topk_idx[first:last], topk_weights[first:last], logits, bias,
        s.groups, s.top_groups, s.is_norm, s.scaling, s.best_of_group, s.is_softmax,
    )  # fmt: skip


@array_part
def find_physical(s, ws, weights, rows):
    """Find the physical experts of a die's topk_idx [T, K], and count its tokens by logical expert if asked
    for.

    Row i takes replica (rank + i) mod r. If the shared expert is dispatched, it is the last of a token's
    experts.
    """
    topk_idx, physical = i32(ws[a.TOPK_IDX], rows, s.top_k), i32(ws[a.TOPK_PHYSICAL], rows, s.copies)
    if s.copies > s.top_k:
        physical[:, s.top_k] = ws[a.SHARED_EXPERT]
    if not s.replicas:
        physical[:, : s.top_k] = topk_idx
        return
    log2phy, logcnt = i32(weights[a.LOG2PHY], s.experts, s.replicas), i32_flat(weights[a.LOGCNT], s.experts)
    load = i32_flat(weights[a.LOAD], s.experts if weights[a.LOAD] else 0)
    for t in range(rows):
        for slot in range(s.top_k):
            expert = topk_idx[t, slot]
            if load.size:
                load[expert] += 1
            physical[t, slot] = log2phy[expert, (ws[a.RANK] + t) % logcnt[expert]]


@array_part
def routes(ws, rows, top_k):
    """Return views of the die's topk_idx and topk_weights."""
    return i32(ws[a.TOPK_IDX], rows, top_k), f32(ws[a.TOPK_WEIGHTS], rows, top_k)


@part
def layer_phase(phase, s, h, ws, weights, inputs, dies, is_moe, scratch, worker, num):
    """Run a thread's part of a phase of a layer on the rows h [T, H] of `dies`, whose buffers are ws."""
    rows, (first, last), lead = h.shape[0], share(h.shape[0], worker, num), weights[0]
    if phase < a.APPEND:
        a.project(phase, s, h, ws, lead, worker, num)
    elif phase < a.QUANTIZE:
        a.attention(phase, s, rows, ws, weights, inputs, dies, scratch, worker, num)
    elif phase < a.GATE_OR_NORM:
        a.project_out(phase, s, rows, ws, lead, worker, num)
    elif phase == a.GATE_OR_NORM:
        add_rows(s, h, ws, first, last)
        a.norm_rows(s, h, ws, lead[a.FFN_NORM], first, last)
        if is_moe:
            gate(s, ws, lead, rows, first, last)
    elif phase < a.ADD:
        mlp_phase(phase, s, f32(ws[a.Y], rows, s.hidden), ws, lead, a.W13, a.W2, s.dense, worker, num)
    else:
        add_rows(s, h, ws, first, last)


@part
def layer(s, h, ws, weights, inputs, dies, is_moe, scratch, sync, worker, num):
    """Run a layer on the rows h [T, H] of a step, up to the gate if it `is_moe`.

    A thread has its rows of h to itself, from one layer's end to the next one's beginning, too.
    """
    for phase in range(s.first_phase, a.NUM_PHASES):
        if skips(s, phase, is_moe):
            continue
        layer_phase(phase, s, h, ws, weights, inputs, dies, is_moe, scratch, worker, num)
        if phase != a.ADD:
            wait(sync, num)


@array_part
def all_of(rows):
    """Return all of a die's rows of a step as `Dies`."""
    starts = np.zeros(2, np.int64)
    starts[1] = rows
    return a.Dies(starts[:1], starts, starts[:1])
