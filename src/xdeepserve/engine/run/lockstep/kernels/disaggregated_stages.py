"""Ends of attention dies in A2E and E2A: tokens sent to expert dies, and answers added.

The rows, fields and buffers are those of `comm/trampoline`, whose twin writes them, those of trampolines
included. Between two kernels lies a barrier.

    post_stage        A2E 2-4    attention dies post their tokens
    come_back_stage   E2A' 5-7   attention dies add the answers
"""

from __future__ import annotations

import numpy as np

from xdeepserve.comm.trampoline.twin import come_back, post_tokens, write_token
from xdeepserve.comm.twin import dies_of
from xdeepserve.engine.run.lockstep.kernels.attention import ROUTES, TOPK_WEIGHTS, H, X
from xdeepserve.jit.compiling import kernel, part
from xdeepserve.jit.pointers import f32, f32_flat, i8, i32
from xdeepserve.model import kernels as k


@part
def a2e(s, rows, ws, way, event):
    """A2E, steps 2 to 4: write one row per token to the die's managed area, and a field at its trampoline."""
    x, idx = f32(ws[X], rows, s.hidden), i32(ws[ROUTES], rows, s.top_k)
    weight = f32(ws[TOPK_WEIGHTS], rows, s.top_k)
    for t in range(rows):
        at = write_token(s, way, t, idx[t], weight[t])
        scale, payload = f32_flat(at, 1), at + 4
        if s.is_int8:
            k.quantize_rows(i8(payload, 1, s.hidden), scale, f32(ws[X] + 4 * t * s.hidden, 1, s.hidden))
        else:
            scale[0] = np.float32(1.0)
            to = f32_flat(payload, s.hidden)
            for i in range(s.hidden):
                to[i] = x[t, i]
    post_tokens(way, event, rows)


@kernel
def post_stage(s, ws, cuts, ways, event, worker, num):
    """Post the rows of a microbatch on a worker's share of the attention dies, under `event`."""
    for a in dies_of(worker, num, ws.shape[0]):
        a2e(s, cuts[a, 1] - cuts[a, 0], ws[a], ways[a], event)


@kernel
def come_back_stage(s, inputs, cuts, ways, event, faults, worker, num):
    """Add the answers of `event` on a worker's share of the attention dies; faults [A] out."""
    for a in dies_of(worker, num, ways.shape[0]):
        lo, hi = cuts[a, 0], cuts[a, 1]
        h = f32(inputs[a, H] + 4 * lo * s.hidden, hi - lo, s.hidden)
        faults[a] = come_back(s, h, ways[a], event)
