"""Dispatch and combine between dies with attention and experts (XDS 3.2), step by step.

Rows, fields and buffers are those of `comm/exchange`, whose twin writes them; the arithmetic before and after
is that of `step`. Between two kernels of an exchange lies a barrier.

    dispatch_stage   dispatch 2-3                write every row for the die of each of its experts
    expert_stage     dispatch 4-7, combine 2-3   see `experts`
    combine_stage    combine 4-7                 pull answers; add weighted sum, shared expert and residual
"""

from __future__ import annotations

import numpy as np

from xdeepserve.comm.exchange.twin import load_answer, post_answers, pull_answers, write_rows
from xdeepserve.comm.twin import Tokens, blocks_of, dies_of
from xdeepserve.engine.run.lockstep.kernels.attention import (
    Q8,
    Q8_SCALE,
    ROUTES,
    SHARED,
    TOPK_WEIGHTS,
    H,
    X,
)
from xdeepserve.engine.run.lockstep.kernels.experts import expert_stage
from xdeepserve.engine.run.lockstep.kernels.side_by_side import layer_stage, shared_expert
from xdeepserve.engine.run.lockstep.kernels.sync import are_lost, wait
from xdeepserve.jit.compiling import as_part, kernel, part
from xdeepserve.jit.pointers import f32
from xdeepserve.model import kernels as k


@part
def own_tokens(s, ws, one):
    """Describe a die's own tokens for sending. one: address of the scale of rows that are not quantised."""
    if s.is_int8:
        return Tokens(ws[ROUTES], 4 * s.copies, ws[Q8_SCALE], 4, ws[Q8], s.hidden)
    return Tokens(ws[ROUTES], 4 * s.copies, one, 0, ws[X], 4 * s.hidden)


@kernel
def dispatch_stage(s, ws, cuts, ways, expert_rank, event, orders, sents, one, worker, num):
    """Dispatch the rows of a worker's share of the dies, under `event`.

    ways [R, NUM_WAY_COLUMNS], expert_rank: of each physical expert; orders [R, max_tokens * K] and sents
    [R, R] out; one: address of the scale of rows that are not quantised.
    """
    for x in dies_of(worker, num, s.num_ranks):
        rows, tokens = cuts[x, 1] - cuts[x, 0], own_tokens(s, ws[x], one)
        write_rows(s, ways[x], expert_rank, event, orders[x], sents[x], rows, tokens)


@kernel
def combine_stage(
    s, e, ws, beside, weights, inputs, cuts, ways, event, orders, sents, received, scratch, faults, sync,
    worker, num,
):  # fmt: skip
    """Compute the shared expert of all dies, then combine the answers of `event` on a share of the dies.

    The sums are added to the dies' rows in place. received [R, R]: rows answered; faults [R] out. s, e:
    shapes of the layers and of the exchange; weights: of the layer that the rows come from; beside: see
    `layer_stage`; scratch: float32 [workers, at least max_tokens * copies * hidden].
    """
    shared_expert(s, ws, beside, weights, cuts, sync, worker, num)
    answered, senders = np.empty(e.num_ranks, np.int64), np.empty(e.num_ranks, np.int64)
    for first, last in blocks_of(worker, num, e.num_ranks):
        post_answers(e, ways, first, last, received)
        for x in range(first, last):
            rows = cuts[x, 1] - cuts[x, 0]
            faults[x] = pull_answers(e, ways[x], ways, event, sents[x], answered, senders)
            if not faults[x] and rows:
                _add_up(s, e, ws[x], inputs[x], rows, ways[x], orders[x], scratch[worker])


@part
def _add_up(s, e, ws, inputs, rows, way, order, scratch):
    """Add the answers that a die has pulled, by weight, and its shared expert's to its rows."""
    count, num_copied = rows * s.top_k, rows if s.copies > s.top_k else 0
    outputs = scratch[: (count + num_copied) * s.hidden].reshape(count + num_copied, s.hidden)
    for i in range(count + num_copied):
        token, slot = order[i] // s.copies, order[i] % s.copies
        load_answer(e, outputs[token * s.top_k + slot if slot < s.top_k else count + token], way, i)
    h = f32(inputs[H], rows, s.hidden)
    shared = f32(ws[SHARED], rows, s.hidden) if s.shared else outputs[count:]
    topk_weights = f32(ws[TOPK_WEIGHTS], rows, s.top_k)
    k.combine(h, outputs[:count], k.IN_ORDER, topk_weights, shared, s.bf16_answers)


layer_part, dispatch_part, expert_part, combine_part = map(
    as_part, (layer_stage, dispatch_stage, expert_stage, combine_stage)
)


@kernel
def run_layers(
    s, e, ws, beside, weights, experts, passes, is_moe, events, inputs, cuts, ways, expert_rank, orders,
    sents, one, sent, received, faults, scratch, sync, worker, num,
):  # fmt: skip
    """Run all layers of a run on the rows of all dies.

    weights [P, R, NUM_WEIGHTS] and experts [P, R, NUM_EXPERT_COLUMNS]: the tables of all passes; passes [L],
    is_moe [L], events [L]: the layers; received [P, R, R] and faults [P, 2, R] out. The rest is that of the
    stages.
    """
    for i in range(passes.size):
        at, event = passes[i], events[i]
        if are_lost(sync):
            return
        layer_part(s, ws, beside, weights[at], inputs, cuts, is_moe[i], scratch, sync, worker, num)
        if is_moe[i]:
            dispatch_part(e, ws, cuts, ways, expert_rank, event, orders, sents, one, worker, num)
            wait(sync, num)
            expert_part(
                e, ways[None], experts[at], sents[None], sent[None], received[at][None], event,
                faults[at, :1], worker, num,
            )  # fmt: skip
            wait(sync, num)
            combine_part(
                s, e, ws, beside, weights[at], inputs, cuts, ways, event, orders, sents, received[at],
                scratch, faults[at, 1], sync, worker, num,
            )  # fmt: skip
