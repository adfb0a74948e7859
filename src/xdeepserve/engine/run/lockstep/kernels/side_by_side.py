"""Runs a layer and the shared experts of all dies; those with few rows go as if one die had all rows.

Dies with attention hold the same weights. So each weight is read once for the rows of many dies, and tiles of
the products are full. The rows are gathered in buffers outside of the dies' memories, and results that later
stages read are handed out to the dies' own buffers. Scratch that nobody reads stays there: `SCRATCH` in
`kernels/attention.py` names it. The KV cache and the map of replicas remain each die's own.

Threads share the products of a layer by columns, so that each weight comes from memory once. Weights that
stay in a core's cache need not be shared. Then each thread takes some of the dies, and does not wait.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.comm.twin import copy_payload
from xdeepserve.engine.run.lockstep.kernels import attention as a
from xdeepserve.engine.run.lockstep.kernels.layer import find_physical, layer, layer_phase, mlp_phase, skips
from xdeepserve.engine.run.lockstep.kernels.sync import SYNC_SIZE, share, wait
from xdeepserve.jit.compiling import array_part, kernel, part
from xdeepserve.jit.pointers import f32
from xdeepserve.model import kernels as k


@kernel
def layer_stage(s, ws, beside, weights, inputs, cuts, is_moe, scratch, sync, worker, num):
    """Run a layer on all dies' rows of a microbatch, up to the gate if the layer `is_moe`.

    ws [A, buffers], weights [A, NUM_WEIGHTS] and inputs [A, 6] hold addresses; beside [workers, NUM_COLUMNS +
    1]: those of buffers for rows side by side, the last one for h; cuts [A, 2] the rows of the microbatch;
    scratch: float32 [workers, at least s.scratch].
    """
    wait(sync, num)  # what came before was shared by dies
    is_alone = s.is_light and _are_even(cuts, num)
    first, last, team, place, size = 0, ws.shape[0], sync, worker, num
    if is_alone:
        (first, last), team = share(ws.shape[0], worker, num), np.zeros(SYNC_SIZE, np.int64)
        place, size = 0, 1
    space, own = beside[worker if is_alone else 0], scratch[worker]
    _layer_of(s, ws, space, weights, inputs, cuts, first, last, is_moe, own, team, place, size)
    if is_alone:
        wait(sync, num)


@part
def _are_even(cuts, num):
    """Whether all of `num` threads have about as many rows, if each takes as many dies."""
    most, total = 0, 0
    for worker in range(num):
        first, last = share(cuts.shape[0], worker, num)
        rows = 0
        for die in range(first, last):
            rows += cuts[die, 1] - cuts[die, 0]
        most, total = max(most, rows), total + rows
    return 4 * num * most <= 5 * total


@array_part
def _layer_of(s, ws, beside, weights, inputs, cuts, first, last, is_moe, scratch, sync, worker, num):
    """Run a layer on the rows of the dies [first, last), as `num` threads or alone; scratch: the thread's."""
    while first < last:
        dies, first = next_dies(cuts, first, last)
        size = dies.which.size
        if size == 1:
            die, lo, rows = dies.which[0], dies.from_row[0], dies.starts[1]
            h = f32(inputs[die, a.H] + 4 * lo * s.hidden, rows, s.hidden)
            layer(s, h, ws[die], weights, inputs, dies, is_moe, scratch, sync, worker, num)
        elif size:
            _side_by_side(s, ws, beside, weights, inputs, dies, is_moe, scratch, sync, worker, num)
        if is_moe and ws[0, a.TOPK_PHYSICAL]:
            for i in range(worker, size, num):
                die = dies.which[i]
                find_physical(s, ws[die], weights[die], dies.starts[i + 1] - dies.starts[i])
        wait(sync, num)


@array_part
def shared_expert(s, ws, beside, weights, cuts, sync, worker, num):
    """Run the shared expert on all dies' rows, into the buffer `shared`; rounded if answers are INT8."""
    after, together = 0, beside[0]
    while after < ws.shape[0] and s.shared:
        dies, after = next_dies(cuts, after, ws.shape[0])
        if dies.which.size == 0:
            continue
        lead, rows = weights[0], dies.starts[-1]
        first, last = share(rows, worker, num)
        is_beside = dies.which.size > 1
        own = together if is_beside else ws[dies.which[0]]
        if is_beside:
            _carry(ws, together, a.X, 4 * s.hidden, dies, first, last, False)
            if s.is_int8:
                _carry(ws, together, a.Q8, s.hidden, dies, first, last, False)
                _carry(ws, together, a.Q8_SCALE, 4, dies, first, last, False)
            wait(sync, num)
        shared = f32(own[a.SHARED], rows, s.hidden)
        for phase in range(a.UP, a.ADD):
            mlp_phase(phase, s, shared, own, lead, a.SHARED_W13, a.SHARED_W2, s.shared, worker, num)
            wait(sync, num)
        if s.int8_answers:
            k.round_to_int8(shared[first:last])
        if is_beside:
            _carry(ws, together, a.SHARED, 4 * s.hidden, dies, first, last, True)
        wait(sync, num)


@array_part
def next_dies(cuts, first, end):
    """Take the next dies with rows of [first, end): one, or several with at most AT_ONCE rows together.

    Returns the dies, and the number of the die after the last.
    """
    which, starts = np.empty(end - first, np.int64), np.zeros(end - first + 1, np.int64)
    size, at = 0, first
    while at < end:
        rows = cuts[at, 1] - cuts[at, 0]
        if size and starts[size] + rows > a.AT_ONCE:
            break
        if rows:
            which[size], starts[size + 1] = at, starts[size] + rows
            size += 1
        at += 1
    which = which[:size]
    return a.Dies(which, starts[: size + 1], cuts[which, 0]), at


@part
def _side_by_side(s, ws, beside, weights, inputs, dies, is_moe, scratch, sync, worker, num):
    """Run `layer` on the rows of several dies together."""
    rows = dies.starts[-1]
    h, (first, last) = f32(beside[a.BESIDE_H], rows, s.hidden), share(rows, worker, num)
    _carry_h(s, inputs, beside, dies, first, last, False)
    if s.first_phase > a.NORM:
        _carry(ws, beside, a.HEADS_OUT, 4 * s.heads * s.v_dim, dies, first, last, False)
        wait(sync, num)
    for phase in range(s.first_phase, a.NUM_PHASES):
        if skips(s, phase, is_moe):
            continue
        layer_phase(phase, s, h, beside, weights, inputs, dies, is_moe, scratch, worker, num)
        if phase == (a.GATE_OR_NORM if is_moe else a.ADD):
            _carry_h(s, inputs, beside, dies, first, last, True)
            if is_moe:
                _hand_out(s, ws, beside, dies, first, last)
        if phase != a.ADD:
            wait(sync, num)


@part
def _hand_out(s, ws, beside, dies, first, last):
    """Copy rows [first, last) of what stages after the gate read: normalised rows and their routes."""
    _carry(ws, beside, a.X, 4 * s.hidden, dies, first, last, True)
    if s.is_int8:
        _carry(ws, beside, a.Q8, s.hidden, dies, first, last, True)
        _carry(ws, beside, a.Q8_SCALE, 4, dies, first, last, True)
    _carry(ws, beside, a.TOPK_IDX, 4 * s.top_k, dies, first, last, True)
    _carry(ws, beside, a.TOPK_WEIGHTS, 4 * s.top_k, dies, first, last, True)


@part
def _carry(ws, beside, column, width, dies, first, last, is_out):
    """Copy rows [first, last) of a buffer, `width` bytes each, to the dies' own buffers, or from there."""
    for i in range(dies.which.size):
        at, end, _ = a.rows_of_die(dies, i, first, last)
        own = ws[dies.which[i], column] + (at - dies.starts[i]) * width
        _copy(own, beside[column] + at * width, (end - at) * width, is_out)


@part
def _carry_h(s, inputs, beside, dies, first, last, is_out):
    """Copy rows [first, last) of h to the dies' own rows, or from there."""
    width = 4 * s.hidden
    for i in range(dies.which.size):
        at, end, lo = a.rows_of_die(dies, i, first, last)
        own = inputs[dies.which[i], a.H] + (lo + at) * width
        _copy(own, beside[a.BESIDE_H] + at * width, (end - at) * width, is_out)


@part
def _copy(own, other, nbytes, is_out):
    if nbytes > 0:
        if is_out:
            copy_payload(own, other, nbytes)
        else:
            copy_payload(other, own, nbytes)
