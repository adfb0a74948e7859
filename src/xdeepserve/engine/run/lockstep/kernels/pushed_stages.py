"""The stages of an exchange by push (CloudMatrix 4.2.1), where experts are with attention or on dies apart.

Messages, flags and buffers are those of `comm/fused`, whose twin writes them. Between two kernels lies a
barrier.

    dispatch_stage   FusedDispatch 1-2                     each die's own tokens
    forward_stage    A2E 5-7, A2E' 1-2                     what trampolines have pulled
    expert_stage     FusedDispatch 3, FusedCombine 1-2     gather, run the experts, push the answers
    combine_stage    FusedCombine 3                        sums; shared expert, residual
    back_stage       E2A 3, E2A' 2-4                       sums; trampolines hand them to attention dies
"""

from __future__ import annotations

from xdeepserve.comm.exchange.twin import ANSWER_BLOCKS, ANSWERS_POINTER, NUM_RECEIVED, NUM_TOKENS, TOKEN_ROWS
from xdeepserve.comm.fused import twin as fused
from xdeepserve.comm.trampoline.twin import arrived_tokens, pull_tokens
from xdeepserve.comm.twin import Tokens, copy_payload, dies_of, post
from xdeepserve.engine.run.lockstep.kernels.attention import SHARED, TOPK_WEIGHTS, H
from xdeepserve.engine.run.lockstep.kernels.colocated_stages import own_tokens
from xdeepserve.engine.run.lockstep.kernels.experts import quantise_answer, run_experts, scratch_of
from xdeepserve.engine.run.lockstep.kernels.side_by_side import layer_stage, shared_expert
from xdeepserve.engine.run.lockstep.kernels.sync import are_lost, wait
from xdeepserve.jit.compiling import as_part, kernel, part
from xdeepserve.jit.pointers import f32
from xdeepserve.model import kernels as k


@kernel
def dispatch_stage(s, ws, cuts, ends, expert_rank, local_idx, event, which, one, worker, num):
    """Push the tokens of a worker's share of the dies, under `event`, with the set `which` of flags.

    ends [R, 7]: the table of `comm.fused.twin`; expert_rank, local_idx: of each physical expert; one: address
    of the scale of rows that are not quantised.
    """
    for x in dies_of(worker, num, s.num_ranks):
        rows, tokens = cuts[x, 1] - cuts[x, 0], own_tokens(s, ws[x], one)
        fused.push_tokens(s, x, ends, expert_rank, local_idx, event, which, rows, tokens)


@kernel
def forward_stage(
    s, ways, ends, served, bounds, bases, expert_rank, local_idx, event, which, counts, faults, worker, num
):  # fmt: skip
    """Pull each domain's tokens on a worker's share of trampolines, and push them on to the experts.

    Arguments as for `a2e_stage`.
    """
    for x in dies_of(worker, num, s.num_ranks):
        for d in range(ways.shape[0]):
            way, mine = ways[d, x], served[d, bounds[d, x] : bounds[d, x + 1]]
            faults[d, x] = pull_tokens(s, way, mine, bases[d], event, counts[d])
            if not faults[d, x]:
                num_tokens, tokens = way[NUM_TOKENS], arrived_tokens(s, way)
                fused.push_tokens(
                    s, x, ends[d], expert_rank[d], local_idx[d], event, which, num_tokens, tokens
                )


@part
def gathered_tokens(s, end):
    """Describe the tokens pushed to a die, as it has gathered them."""
    slots, step = end[fused.OUTPUT_SLOTS], fused.SLOT_NBYTES
    experts, scales = slots + 4 * fused.EXPERT, slots + 4 * fused.SCALE
    return Tokens(experts, step, scales, step, end[fused.OUTPUT], s.payload_nbytes)


@kernel
def expert_stage(
    s, ways, ends, dies, expert_rank, local_idx, sent, received, event, which, faults, worker, num
):  # fmt: skip
    """Gather tokens, run the experts of a layer and push the answers, on a worker's share of the dies.

    dies [R, NUM_EXPERT_COLUMNS]. The other tables have a first axis of exchanges, which follow one another:
    sent [R]: addresses of the answers' buffers; received [R, R] out: messages from each rank, and their
    number in the die's row of `ways`; faults [R] out.
    """
    mine, space = scratch_of(s)
    for x in dies_of(worker, num, s.num_ranks):
        for d in range(ways.shape[0]):
            end, counts = ends[d, x], received[d, x]
            total = fused.gather_tokens(s, x, end, expert_rank[d], local_idx[d], event, which, counts)
            if total < 0:
                faults[d, x] = -total
                continue
            faults[d, x] = 0
            ways[d, x, NUM_RECEIVED] = total
            if total:
                tokens = gathered_tokens(s, end)
                faults[d, x] = run_experts(s, tokens, total, dies[x], sent[d, x], mine, space)
            if s.int8_answers:
                for i in range(total):
                    message = fused.answer_message(s, ends[d], end, i)
                    quantise_answer(s, message, sent[d, x] + 4 * i * s.hidden)
            fused.push_answers(s, ends[d], end, sent[d, x], total)


@kernel
def combine_stage(s, e, ws, beside, weights, inputs, cuts, ends, faults, sync, worker, num):
    """Compute the shared expert of all dies, then sum the answers to tokens on a share of the dies.

    The sums are added to the dies' rows in place. faults [R] out. s, e: shapes of the layers and of the
    exchange; weights: of the layer that the rows come from; beside: see `layer_stage`.
    """
    shared_expert(s, ws, beside, weights, cuts, sync, worker, num)
    for x in dies_of(worker, num, e.num_ranks):
        rows = cuts[x, 1] - cuts[x, 0]
        faults[x] = fused.sum_answers(e, ends[x], rows, ws[x, TOPK_WEIGHTS], 4 * s.top_k)
        if faults[x] or not rows:
            continue
        h, sums = f32(inputs[x, H], rows, s.hidden), f32(ends[x, fused.COMBINED], rows, s.hidden)
        shared = f32(ws[x, SHARED], rows if s.shared else 0, s.hidden)
        k.add_sums(h, sums, shared, s.bf16_answers)


layer_part, dispatch_part, expert_part, combine_part = map(
    as_part, (layer_stage, dispatch_stage, expert_stage, combine_stage)
)


@kernel
def run_layers(
    s, e, ws, beside, weights, experts, passes, is_moe, events, inputs, cuts, ways, ends, expert_rank,
    local_idx, which, one, sent, received, faults, scratch, sync, worker, num,
):  # fmt: skip
    """Run all layers of a run on the rows of all dies.

    The first layer with experts uses the set `which` of flags. The other arguments are those of the kernel of
    this name in `colocated_stages`, and of the stages.
    """
    for i in range(passes.size):
        at, event = passes[i], events[i]
        if are_lost(sync):
            return
        layer_part(s, ws, beside, weights[at], inputs, cuts, is_moe[i], scratch, sync, worker, num)
        if is_moe[i]:
            dispatch_part(e, ws, cuts, ends, expert_rank, local_idx, event, which, one, worker, num)
            wait(sync, num)
            expert_part(
                e, ways[None], ends[None], experts[at], expert_rank[None], local_idx[None], sent[None],
                received[at][None], event, which, faults[at, :1], worker, num,
            )  # fmt: skip
            wait(sync, num)
            combine_part(s, e, ws, beside, weights[at], inputs, cuts, ends, faults[at, 1], sync, worker, num)
            which ^= 1


@kernel
def back_stage(s, ways, ends, served, bounds, answer_fields, event, counts, faults, worker, num):
    """Sum each domain's forwarded answers on a worker's share of trampolines, and hand them back.

    A field is written for every attention die that a trampoline serves.
    """
    for x in dies_of(worker, num, s.num_ranks):
        for d in range(ways.shape[0]):
            way, end = ways[d, x], ends[d, x]
            weights = way[TOKEN_ROWS] + 4 * s.copies
            faults[d, x] = fused.sum_answers(s, end, way[NUM_TOKENS], weights, s.token_nbytes)
            if not faults[d, x]:
                mine = served[d, bounds[d, x] : bounds[d, x + 1]]
                hand_back(s, way, end, mine, answer_fields[d], event, counts[d])


@part
def hand_back(s, way, end, served, answer_fields, event, counts):
    """Copy a trampoline's sums to the blocks of the attention dies that it serves, and write their fields."""
    token = 0
    for i in range(served.size):
        attention, block = served[i], i * s.answer_block
        for row in range(counts[attention]):
            to = way[ANSWER_BLOCKS] + block + row * s.answer_nbytes
            copy_payload(to, end[fused.COMBINED] + 4 * token * s.hidden, 4 * s.hidden)
            token += 1
        post(answer_fields[attention], event, way[ANSWERS_POINTER] + block, counts[attention])
