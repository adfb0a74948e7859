"""Dispatch and combine where each die has attention and a share of the experts (XDS 3.2), step by step.

Rows, fields and buffers are those of `comm/exchange`, whose twin writes them; the arithmetic before and after
is that of `step`. Between two kernels of an exchange lies a barrier.

    dispatch_stage   dispatch 2-4                every row to the die of each of its experts
    expert_stage     dispatch 5-7, combine 2-4   see `exchange`
    combine_stage    combine 5-7                 answers are pulled; sum by weight, shared expert, residual
"""

from __future__ import annotations

import numpy as np

from xdeepserve.comm.exchange.twin import load_answer, post_rows, pull_answers, write_rows
from xdeepserve.comm.twin import Tokens, blocks_of, dies_of
from xdeepserve.engine.run.gang.kernels.attention import (
    ACTIVATE,
    DOWN,
    Q8,
    Q8_SCALE,
    ROUTES,
    SHARED,
    SHARED_W2,
    SHARED_W13,
    TOPK_WEIGHTS,
    UP,
    H,
    X,
)
from xdeepserve.engine.run.gang.kernels.layer import mlp_phase
from xdeepserve.jit.compiling import array_part, kernel, part
from xdeepserve.jit.pointers import f32
from xdeepserve.model import kernels as k


@array_part
def own_shared(s, rows, ws, weights):
    """float32 [rows, H]: the shared expert of a die's own rows, rounded if answers are INT8."""
    shared = f32(ws[SHARED], rows, s.hidden)
    for phase in (UP, ACTIVATE, DOWN):
        mlp_phase(phase, s, shared, ws, weights, SHARED_W13, SHARED_W2, s.shared, 0, 1)
    if s.int8_answers:
        k.round_to_int8(shared)
    return shared


@part
def add_outputs(s, h, slot_out, answered, ws, weights):
    """The shared expert of the rows h [T, H], if it is here, and the sum of all outputs, added to h.

    slot_out: float32 [T * K, H], what the routed experts made of them; answered [T, H]: and the shared one on
    another die, if it is there.
    """
    rows, shared = h.shape[0], answered
    if s.shared:
        shared = own_shared(s, rows, ws, weights)
    k.combine(h, slot_out, k.IN_ORDER, f32(ws[TOPK_WEIGHTS], rows, s.top_k), shared, s.bf16_answers)


@part
def own_tokens(s, ws, one):
    """A die's own tokens as they leave. one: address of the scale of rows that are not quantised."""
    if s.is_int8:
        return Tokens(ws[ROUTES], 4 * s.copies, ws[Q8_SCALE], 4, ws[Q8], s.hidden)
    return Tokens(ws[ROUTES], 4 * s.copies, one, 0, ws[X], 4 * s.hidden)


@kernel
def dispatch_stage(s, ws, cuts, ways, expert_rank, event, orders, sents, one, worker, num):
    """A share of the dies: its rows, under `event`.

    ways [R, 15], expert_rank: of each physical expert; orders [R, max_tokens * K] and sents [R, R] out; one:
    address of the scale of rows that are not quantised.
    """
    for first, last in blocks_of(worker, num, s.num_ranks):
        for x in range(first, last):
            tokens = own_tokens(s, ws[x], one)
            write_rows(s, ways[x], expert_rank, orders[x], sents[x], cuts[x, 1] - cuts[x, 0], tokens)
        post_rows(s, ways, first, last, event, sents)


@kernel
def combine_stage(
    s, e, ws, weights, inputs, cuts, ways, event, orders, sents, scratch, faults, worker, num
):  # fmt: skip
    """A share of the dies: the answers of `event`, in place on its rows. faults [R]: what is wrong with them.

    s, e: shapes of the layers and of the exchange; weights: of the layer that the rows come from; scratch:
    float32 [workers, at least max_tokens * copies * hidden].
    """
    answered = np.empty(e.num_ranks, np.int64)
    for x in dies_of(worker, num, e.num_ranks):
        faults[x] = pull_answers(e, ways[x], ways, event, sents[x], answered)
        rows = cuts[x, 1] - cuts[x, 0]
        if faults[x] or not rows:
            continue
        num, num_copied = rows * s.top_k, rows if s.copies > s.top_k else 0
        outputs = scratch[worker, : (num + num_copied) * s.hidden].reshape(num + num_copied, s.hidden)
        for i in range(num + num_copied):
            token, slot = orders[x, i] // s.copies, orders[x, i] % s.copies
            load_answer(e, outputs[token * s.top_k + slot if slot < s.top_k else num + token], ways[x], i)
        h = f32(inputs[x, H], rows, s.hidden)
        add_outputs(s, h, outputs[:num], outputs[num:], ws[x], weights[x])
