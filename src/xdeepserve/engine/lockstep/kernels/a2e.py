"""A2E and E2A where experts have dies of their own: both ends, step by step.

Rows, fields and buffers are those of `comm/trampoline/a2e.py`. Between two kernels lies a barrier.

    post_stage        A2E 2-4             attention dies post their tokens
    a2e_stage         A2E 5-7, A2E' 3-4   trampolines pull; a row goes to the die of each expert
    expert_stage      A2E' 5-7, E2A 2-4   see `exchange`
    e2a_stage         E2A 5-7, E2A' 2-4   answers are pulled; trampolines sum up by weight, and post
    come_back_stage   E2A' 5-7            attention dies add them
"""

from __future__ import annotations

import numpy as np

from xdeepserve.engine.lockstep.kernels.attention import TOPK_IDX, TOPK_WEIGHTS, H, X
from xdeepserve.engine.lockstep.kernels.exchange import (
    ANSWER_BLOCKS,
    ANSWERS_POINTER,
    NUM_TOKENS,
    TOKEN_FIELDS,
    TOKEN_ROWS,
    load_answer,
    pull_answers,
    send_tokens,
)
from xdeepserve.engine.lockstep.kernels.fields import (
    FIELD_NBYTES,
    NO_ROOM,
    WRONG_COUNT,
    WRONG_EVENT,
    field,
    post,
)
from xdeepserve.jit.compiling import array_part, kernel, part
from xdeepserve.jit.pointers import copy_bytes, f32, f32_flat, i8, i32, i32_flat
from xdeepserve.model import kernels as k

# Columns of a table: addresses on an attention die, and the number of the rows that are away.
(
    TOKENS, TOKENS_POINTER, TRAMPOLINE_FIELD, TRAMPOLINE_BASE, ANSWER_FIELD, ANSWERS, SHARED_EXPERT, NUM_SENT
) = range(8)  # fmt: skip
NUM_ATTENTION_COLUMNS = 8

# ---- attention dies -------------------------------------------------------------------------------------


@part
def a2e(s, rows, ws, way, event):
    """A2E, steps 2 to 4: one row per token in the die's managed area, one field at its trampoline."""
    x, idx = f32(ws[X], rows, s.hidden), i32(ws[TOPK_IDX], rows, s.top_k)
    weight = f32(ws[TOPK_WEIGHTS], rows, s.top_k)
    for t in range(rows):
        row = way[TOKENS] + t * s.token_nbytes
        experts, weights = i32_flat(row, s.copies), f32_flat(row + 4 * s.copies, s.copies)
        for slot in range(s.top_k):
            experts[slot], weights[slot] = idx[t, slot], weight[t, slot]
        if s.copies > s.top_k:  # the shared expert is one more, of weight 1
            experts[s.top_k], weights[s.top_k] = way[SHARED_EXPERT], np.float32(1.0)
        scale = f32_flat(row + 8 * s.copies, 1)
        payload = row + 8 * s.copies + 4
        if s.is_int8:
            k.quantize_rows(i8(payload, 1, s.hidden), scale, f32(ws[X] + 4 * t * s.hidden, 1, s.hidden))
        else:
            scale[0] = np.float32(1.0)
            to = f32_flat(payload, s.hidden)
            for i in range(s.hidden):
                to[i] = x[t, i]
    post(way[TRAMPOLINE_FIELD], event, way[TOKENS_POINTER], rows)
    way[NUM_SENT] = rows


@part
def come_back(s, h, way, event):
    """E2A', steps 5 to 7, and the residual: add the answers of `event` to h [T, H]. 0, or what is wrong."""
    found, pointer, count = field(way[ANSWER_FIELD])
    if found != event:
        return WRONG_EVENT
    if count != way[NUM_SENT] or count != h.shape[0]:
        return WRONG_COUNT
    copy_bytes(way[ANSWERS], way[TRAMPOLINE_BASE] + pointer, count * s.answer_nbytes)
    for t in range(count):
        answer = f32_flat(way[ANSWERS] + t * s.answer_nbytes, s.hidden)
        for i in range(s.hidden):
            h[t, i] += answer[i]
    return 0


@kernel
def post_stage(s, ws, cuts, ways, event, worker, num):
    """Every num-th attention die: its rows of a microbatch, under `event`."""
    for a in range(worker, ws.shape[0], num):
        a2e(s, cuts[a, 1] - cuts[a, 0], ws[a], ways[a], event)


@kernel
def come_back_stage(s, inputs, cuts, ways, event, faults, worker, num):
    """Every num-th attention die: the answers of `event`. faults [A]: what is wrong with them."""
    for a in range(worker, ways.shape[0], num):
        lo, hi = cuts[a, 0], cuts[a, 1]
        h = f32(inputs[a, H] + 4 * lo * s.hidden, hi - lo, s.hidden)
        faults[a] = come_back(s, h, ways[a], event)


# ---- trampolines ----------------------------------------------------------------------------------------


@part
def pull_tokens(s, way, served, bases, event, counts):
    """A2E, steps 5 to 7, of a trampoline: the tokens of the attention dies that it serves. 0 or a fault.

    served [n]: attention ranks; bases [A]: where their memories begin; counts [A]: rows of each, an output.
    """
    total = 0
    for i in range(served.size):
        found, pointer, count = field(way[TOKEN_FIELDS] + i * FIELD_NBYTES)
        if found != event:
            return WRONG_EVENT
        if total + count > s.max_tokens:
            return NO_ROOM
        copy_bytes(
            way[TOKEN_ROWS] + total * s.token_nbytes, bases[served[i]] + pointer, count * s.token_nbytes
        )
        counts[served[i]] = count
        total += count
    way[NUM_TOKENS] = total
    return 0


@array_part
def answer_tokens(s, way, served, answer_fields, event, order, counts, values):
    """E2A', steps 2 to 4, of a trampoline: weighted sums in top-k slot order, posted to whom it serves.

    The answers lie in the die's combine rows, in the order in which their questions were sent.
    answer_fields [A]: where attention dies have their field; values: float32 [hidden] of scratch.
    """
    copies, hidden, token = s.copies, s.hidden, 0
    where = np.empty(way[NUM_TOKENS] * copies, np.int64)
    for i in range(where.size):
        where[order[i]] = i
    for i in range(served.size):
        block, attention = i * s.answer_block, served[i]
        for row in range(counts[attention]):
            weights = f32_flat(way[TOKEN_ROWS] + token * s.token_nbytes + 4 * copies, copies)
            total = f32_flat(way[ANSWER_BLOCKS] + block + row * s.answer_nbytes, hidden)
            total[:] = np.float32(0.0)
            for slot in range(copies):
                load_answer(s, values, way, where[token * copies + slot])
                weight = weights[slot]
                for j in range(hidden):
                    total[j] += values[j] * weight
            token += 1
        post(answer_fields[attention], event, way[ANSWERS_POINTER] + block, counts[attention])


@kernel
def a2e_stage(s, ways, served, bounds, bases, expert_rank, event, counts, orders, sents, faults, worker, num):
    """Every num-th expert die: pull_tokens if it is a trampoline, then send_tokens.

    ways [R, 15]; served: attention ranks, those of expert rank x from bounds[x] to bounds[x + 1];
    bases [A]; expert_rank: of each physical expert; counts [A] out; orders [R, max_tokens * copies] out;
    sents [R, R] out: rows to each rank; faults [R].
    """
    for x in range(worker, s.num_ranks, num):
        faults[x] = pull_tokens(s, ways[x], served[bounds[x] : bounds[x + 1]], bases, event, counts)
        if not faults[x]:
            rows, step = ways[x, TOKEN_ROWS], s.token_nbytes
            scales = rows + 8 * s.copies
            send_tokens(
                s, x, ways, expert_rank, event, orders[x], sents[x], ways[x, NUM_TOKENS],
                rows, step, scales, step, scales + 4, step,
            )  # fmt: skip


@kernel
def e2a_stage(s, ways, served, bounds, answer_fields, event, counts, orders, sents, faults, worker, num):
    """Every num-th expert die: pull the answers to what it sent; a trampoline hands them on."""
    answered = np.empty(s.num_ranks, np.int64)
    values = np.empty(s.hidden, np.float32)
    for x in range(worker, s.num_ranks, num):
        way = ways[x]
        faults[x] = pull_answers(s, way, ways, event, sents[x], answered)
        if faults[x]:
            continue
        mine = served[bounds[x] : bounds[x + 1]]
        answer_tokens(s, way, mine, answer_fields, event, orders[x], counts, values)
