"""Kernels of dies with experts: the grouped MLP on received rows, or the shared expert's MLP.

The stages are those of `engine/die/experts.py` and, for dies that have attention too, `step/feed.py`.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.comm.exchange.answers import SCALE_NBYTES
from xdeepserve.comm.exchange.twin import (
    COMBINE_EVENT,
    DISPATCH_FIELDS,
    DISPATCH_ROWS,
    HEADER_NBYTES,
    NUM_RECEIVED,
    SCALE_AT,
    answer_row,
    post_rows,
    pull,
    write_answers,
)
from xdeepserve.comm.twin import EMPTY_SLOT, Tokens, blocks_of
from xdeepserve.engine.run.lockstep.kernels.linear import linear
from xdeepserve.jit.compiling import array_part, kernel, part
from xdeepserve.jit.pointers import f32, f32_flat, i8, i32_flat, i64_flat, u8_flat
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.kernels.gemm import ALL_ROWS

# Columns of the table: what a die holds, and addresses on it.
FIRST_EXPERT, NUM_EXPERTS, W13, SCALE13, W2, SCALE2 = range(6)
BUFFERS = ("in", "in_scale", "idx", "order", "offsets", "gate_up", "act", "q8", "q8_scale", "out")
IN, IN_SCALE, IDX, ORDER, OFFSETS, GATE_UP, ACT, Q8, Q8_SCALE, OUT = range(6, 16)
SLOT_EXPERT, NUM_ROWS, NUM_PRIMARIES = 16, 17, 18  # of redundant slots; 0 where there are none
# Of a copy of the shared expert that is there for the tokens of many dies.
SHARED_W13, SHARED_SCALE13, SHARED_W2, SHARED_SCALE2 = range(19, 23)
SHARED_BUFFERS = ("gate_up", "act", "q8", "q8_scale")
SHARED_GATE_UP = 23
NUM_EXPERT_COLUMNS = 27


@part
def _fetch(s, tokens, i, x, x8, scale, to):
    """Copy the i-th of `tokens` to row `to` of x; in INT8 to x8, with its scale."""
    payload = tokens.payloads + i * tokens.payloads_step
    if s.is_int8:
        source, target = u8_flat(payload, s.hidden), u8_flat(x8 + to * s.hidden, s.hidden)
        for j in range(s.hidden):
            target[j] = source[j]
        scale[to] = f32_flat(tokens.scales + i * tokens.scales_step, 1)[0]
    else:
        given = f32_flat(payload, s.hidden)
        for j in range(s.hidden):
            x[to, j] = given[j]


@part
def expert_of(tokens, i):
    """Return the physical expert of the i-th of `tokens`."""
    return i32_flat(tokens.experts + i * tokens.experts_step, 1)[0]


@part
def run_experts(s, tokens, total, die, sent, mine, space):
    """Compute the answers to `total` tokens, in order, float32 [total, hidden] at `sent`; return 0 or a
    fault.

    mine: int64 [max_rows] of scratch; space: float32 [max_rows * hidden], if some die has a shared expert.
    """
    result, num_routed, num_shared = f32(sent, total, s.hidden), 0, 0
    for i in range(total):
        if expert_of(tokens, i) < s.num_slots:
            mine[num_routed] = i
            num_routed += 1
    if num_routed and not _run_routed(s, tokens, mine[:num_routed], result, die):
        return EMPTY_SLOT
    if num_routed == total:
        return 0
    for i in range(total):
        if expert_of(tokens, i) >= s.num_slots:
            mine[num_shared] = i
            num_shared += 1
    _run_shared(s, tokens, mine[:num_shared], result, die, space)
    return 0


@part
def _run_routed(s, tokens, mine, result, die):
    """Answer the tokens `mine` [N] for routed experts; return False if a slot without an expert is asked
    for."""
    total = mine.size
    idx, order = i32_flat(die[IDX], total), i32_flat(die[ORDER], total)
    for i in range(total):
        idx[i] = expert_of(tokens, mine[i]) - die[FIRST_EXPERT]
    if die[SLOT_EXPERT] and not _accept(die, idx):
        return False
    k.group_rows(order, i32_flat(die[OFFSETS], die[NUM_EXPERTS] + 1), idx)
    x, scale = f32(die[IN], total, s.hidden), f32_flat(die[IN_SCALE], total)
    for i in range(total):
        _fetch(s, tokens, mine[order[i]], x, die[IN], scale, i)
    _run_grouped(s, die, result, mine, order)
    return True


@part
def _accept(die, idx):
    """Count the rows for the experts idx [N] of a die; return whether all these experts are there."""
    i64_flat(die[NUM_ROWS], 1)[0] += idx.size
    num_primaries = die[NUM_PRIMARIES]
    slots = i32_flat(die[SLOT_EXPERT], die[NUM_EXPERTS] - num_primaries)
    is_whole = True
    for e in idx:
        is_whole &= e < num_primaries or slots[e - num_primaries] >= 0
    return is_whole


@part
def _run_grouped(s, die, result, mine, order):
    """Run the grouped MLP on the rows gathered by expert: row i's answer goes to result[mine[order[i]]]."""
    total, count = mine.size, die[NUM_EXPERTS]
    bounds = i32_flat(die[OFFSETS], count + 1)
    x, x8, scale = f32(die[IN], total, s.hidden), i8(die[IN], total, s.hidden), f32_flat(die[IN_SCALE], total)
    gate_up, act, act8, act_scale = activations(die, GATE_UP, total, s.inter)
    linear(gate_up, x, x8, scale, die[W13], die[SCALE13], s.hidden, 2 * s.inter, bounds, count, 1, s.is_int8)
    _activate(die[SCALE2] != 0, act, act8, act_scale, gate_up)
    out = f32(die[OUT], total, s.hidden)
    linear(out, act, act8, act_scale, die[W2], die[SCALE2], s.inter, s.hidden, bounds, count, 1, s.is_int8)
    for i in range(total):
        at = mine[order[i]]
        for j in range(s.hidden):
            result[at, j] = out[i, j]


@part
def _run_shared(s, tokens, mine, result, die, space):
    """Compute the shared expert's answers to the received tokens `mine` [N]."""
    total, address = mine.size, space.ctypes.data
    x, x8 = f32(address, total, s.hidden), i8(address, total, s.hidden)
    scale = f32_flat(address + (total * s.hidden + 3) // 4 * 4, total)  # behind the INT8 rows
    for i in range(total):
        _fetch(s, tokens, mine[i], x, address, scale, i)
    gate_up, act, act8, act_scale = activations(die, SHARED_GATE_UP, total, s.wide)
    w13, scale13, w2, scale2 = die[SHARED_W13], die[SHARED_SCALE13], die[SHARED_W2], die[SHARED_SCALE2]
    linear(gate_up, x, x8, scale, w13, scale13, s.hidden, 2 * s.wide, ALL_ROWS, 1, 1, s.is_int8)
    _activate(scale2 != 0, act, act8, act_scale, gate_up)
    # What was gathered is no longer needed.
    linear(x, act, act8, act_scale, w2, scale2, s.wide, s.hidden, ALL_ROWS, 1, c.TP_BLOCKS, s.is_int8)
    for i in range(total):
        for j in range(s.hidden):
            result[mine[i], j] = x[i, j]


@array_part
def activations(die, at, total, inter):
    """Return views of gate_up, act, and act in INT8 with its scales: the columns from `at` on."""
    return (
        f32(die[at], total, 2 * inter),
        f32(die[at + 1], total, inter),
        i8(die[at + 2], total, inter),
        f32_flat(die[at + 3], total),
    )


@part
def _activate(is_int8, act, act8, act_scale, gate_up):
    """Compute SwiGLU in the form that the next product takes.

    An INT8 recipe may keep the shared expert's matrices in floating point.
    """
    if is_int8:
        k.swiglu_quantize(act8, act_scale, gate_up)
    else:
        k.swiglu(act, gate_up)


@array_part
def scratch_of(s):
    """Allocate the scratch memory of `run_experts`, besides the die's buffers."""
    return np.empty(s.max_rows, np.int64), np.empty(s.max_rows * (s.hidden + 1) if s.wide else 0, np.float32)


@part
def quantise_answer(s, row, at):
    """Write the row of an INT8 answer, scale and payload, from float32 [hidden] at address `at`."""
    k.quantize_rows(i8(row + SCALE_NBYTES, 1, s.hidden), f32_flat(row, 1), f32(at, 1, s.hidden))


@part
def _quantise_answers(s, way, out, total, received, senders):
    """Write the rows of `total` INT8 answers from `out`, float32 [N, H], by source rank."""
    n, at = 0, 0
    while n < total:
        peer = senders[at]
        at += 1
        for i in range(received[peer]):
            quantise_answer(s, answer_row(s, way, peer, i), out + 4 * n * s.hidden)
            n += 1


@part
def pulled_tokens(s, way):
    """Describe the tokens in a die's pulled rows."""
    rows, step = way[DISPATCH_ROWS], s.dispatch_nbytes
    return Tokens(rows, step, rows + SCALE_AT, step, rows + HEADER_NBYTES, step)


@part
def _answer(s, ways, x, die, sent, received, senders, event, mine, space):
    """Pull the tokens for rank x, run its experts, and write the answers; return 0 or a fault.

    After a fault no answer rows are sent.
    """
    way = ways[x]
    rows, fields = way[DISPATCH_ROWS], way[DISPATCH_FIELDS]
    total = pull(rows, s.dispatch_nbytes, s.max_rows, fields, ways, event, received, senders)
    way[NUM_RECEIVED], way[COMBINE_EVENT] = max(total, 0), event
    fault = max(-total, 0)
    if total > 0:
        fault = run_experts(s, pulled_tokens(s, way), total, die, sent, mine, space)
    if fault:
        received[:] = 0
    elif s.int8_answers:
        _quantise_answers(s, way, sent, total, received, senders)
    else:
        write_answers(s, way, sent, total, received, senders)
    return fault


@kernel
def expert_stage(s, ways, dies, sents, sent, received, event, faults, worker, num):
    """Receive tokens, run the experts of a layer and write the answers, on a worker's share of the dies.

    dies [R, NUM_EXPERT_COLUMNS]. The other tables have a first axis of exchanges, which follow one another:
    ways [R, NUM_WAY_COLUMNS]; sents [R, R]: rows of each rank by destination; sent [R]: addresses of the
    answers' buffers; received [R, R] out: rows from each rank; faults [R] out.
    """
    mine, space = scratch_of(s)
    senders = np.empty(s.num_ranks, np.int64)
    for first, last in blocks_of(worker, num, s.num_ranks):
        for d in range(ways.shape[0]):
            post_rows(s, ways[d], first, last, sents[d])
            for x in range(first, last):
                faults[d, x] = _answer(
                    s, ways[d], x, dies[x], sent[d, x], received[d, x], senders, event, mine, space
                )
