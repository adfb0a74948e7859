"""Expert dies: the two stages of A2E and of E2A over all of them, step by step.

Rows, fields and buffers are those of `comm/a2e.py`, `dispatch.py` and `combine.py`. Between two kernels lies
a barrier: what the first of them posts, the second one reads. Padding is never written, so it stays zero.

    a2e_stage       A2E 5-7, A2E' 3-4   trampolines pull; a row goes to the die of each expert
    expert_stage    A2E' 5-7, E2A 2-4   rows are pulled, the experts run, answers are posted
    e2a_stage       E2A 5-7, E2A' 2-4   answers are pulled; trampolines sum up by weight, and post
"""

from __future__ import annotations

import numpy as np

from xdeepserve.engine.lockstep.kernels.experts import run_experts
from xdeepserve.engine.lockstep.kernels.fields import (
    FIELD_NBYTES,
    NO_ROOM,
    WRONG_COUNT,
    WRONG_EVENT,
    field,
    post,
)
from xdeepserve.engine.lockstep.shapes import HEADER_NBYTES
from xdeepserve.model.kernels.base import kernel, part
from xdeepserve.model.kernels.pointers import (
    copy_bytes,
    f32_flat,
    i32_flat,
    u8_flat,
    u16_flat,
)

# Columns of a table: addresses on an expert die.
(
    BASE, TOKEN_FIELDS, TOKEN_ROWS, DISPATCH_FIELDS, DISPATCH_BLOCKS, DISPATCH_POINTER, DISPATCH_ROWS,
    COMBINE_FIELDS, COMBINE_BLOCKS, COMBINE_POINTER, COMBINE_ROWS, ANSWER_BLOCKS, ANSWERS_POINTER,
    NUM_TOKENS, NUM_RECEIVED,
) = range(15)  # fmt: skip


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


@part
def send_tokens(s, x, ways, expert_rank, event, order, sent):
    """A2E', steps 3 and 4, of rank x: rows by destination, and a field at every peer.

    order [copies]: the flat (token, slot) of each row sent; sent [R]: rows for each rank.
    """
    way, num_ranks = ways[x], s.num_ranks
    total = way[NUM_TOKENS] * s.copies
    sent[:] = 0
    for t in range(way[NUM_TOKENS]):
        experts = i32_flat(way[TOKEN_ROWS] + t * s.token_nbytes, s.copies)
        for slot in range(s.copies):
            sent[expert_rank[experts[slot]]] += 1
    if total:
        place = np.empty(num_ranks, np.int64)
        at = 0
        for peer in range(num_ranks):
            place[peer] = at
            at += sent[peer]
        starts = place.copy()
        for t in range(way[NUM_TOKENS]):
            token = way[TOKEN_ROWS] + t * s.token_nbytes
            experts = i32_flat(token, s.copies)
            scale = i32_flat(token + 8 * s.copies, 1)[0]
            payload = token + 8 * s.copies + 4
            for slot in range(s.copies):
                peer = expert_rank[experts[slot]]
                order[place[peer]] = t * s.copies + slot
                block = way[DISPATCH_BLOCKS] + peer * s.dispatch_block
                row = block + (place[peer] - starts[peer]) * s.dispatch_nbytes
                place[peer] += 1
                words = i32_flat(row, 4)
                words[0], words[1], words[2], words[3] = experts[slot], t, slot, scale
                if s.is_int8:
                    _copy_payload8(row + HEADER_NBYTES, payload, s.hidden)
                else:
                    _copy_payload(row + HEADER_NBYTES, payload, s.hidden)
    for peer in range(num_ranks):
        pointer = way[DISPATCH_POINTER] + peer * s.dispatch_block
        post(ways[peer, DISPATCH_FIELDS] + x * FIELD_NBYTES, event, pointer, sent[peer])


@part
def _copy_payload8(target, source, size):
    to, of = u8_flat(target, size), u8_flat(source, size)
    for i in range(size):
        to[i] = of[i]


@part
def _copy_payload(target, source, size):
    to, of = i32_flat(target, size), i32_flat(source, size)
    for i in range(size):
        to[i] = of[i]


@part
def pull(rows, row_nbytes, max_rows, fields, ways, event, counts):
    """Steps 5 to 7 among the expert dies: every peer's rows for this rank, side by side; how many, or -fault.

    counts [R]: rows of each peer, written here.
    """
    total = 0
    for peer in range(ways.shape[0]):
        found, pointer, count = field(fields + peer * FIELD_NBYTES)
        if found != event:
            return -WRONG_EVENT
        counts[peer] = count
        if count:
            if total + count > max_rows:
                return -NO_ROOM
            copy_bytes(rows + total * row_nbytes, ways[peer, BASE] + pointer, count * row_nbytes)
            total += count
    return total


@part
def send_answers(s, x, ways, out, event, received):
    """E2A, steps 2 to 4, of rank x: its answers `out` [N, H], by source rank, and a field at every peer."""
    way, n = ways[x], 0
    for peer in range(s.num_ranks):
        block = way[COMBINE_BLOCKS] + peer * s.combine_block
        for i in range(received[peer]):
            row, at = block + i * s.combine_nbytes, out + 4 * n * s.hidden
            if s.is_int8:
                _to_bf16(row, at, s.hidden)
            else:
                _copy_payload(row, at, s.hidden)
            n += 1
        pointer = way[COMBINE_POINTER] + peer * s.combine_block
        post(ways[peer, COMBINE_FIELDS] + x * FIELD_NBYTES, event, pointer, received[peer])


@part
def _to_bf16(target, source, size):
    """See comm.bf16.to_bf16."""
    to, bits = u16_flat(target, size), i32_flat(source, size)
    for i in range(size):
        b = np.uint32(bits[i])
        if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            to[i] = (b >> np.uint32(16)) | np.uint32(0x40)
        else:
            to[i] = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@part
def answer_tokens(s, way, served, answer_fields, event, order, counts, values):
    """E2A', steps 2 to 4, of a trampoline: weighted sums in top-k slot order, posted to whom it serves.

    The answers lie in the die's combine rows, in the order in which their questions were sent.
    answer_fields [A]: where attention dies have their field; values: float32 [copies * hidden] of scratch.
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
                at = way[COMBINE_ROWS] + where[token * copies + slot] * s.combine_nbytes
                weight = weights[slot]
                if s.is_int8:
                    bits = u16_flat(at, hidden)
                    words = values.view(np.uint32)
                    for j in range(hidden):
                        words[j] = np.uint32(bits[j]) << np.uint32(16)
                    for j in range(hidden):
                        total[j] += values[j] * weight
                else:
                    answer = f32_flat(at, hidden)
                    for j in range(hidden):
                        total[j] += answer[j] * weight
            token += 1
        post(answer_fields[attention], event, way[ANSWERS_POINTER] + block, counts[attention])


# ---- over all expert dies -------------------------------------------------------------------------------


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
            send_tokens(s, x, ways, expert_rank, event, orders[x], sents[x])


@kernel
def expert_stage(s, ways, dies, sent, received, event, faults, worker, num):
    """Every num-th expert die: receive, run the experts of one layer, send the answers.

    dies [R, NUM_EXPERT_COLUMNS]: see `experts`; sent [R]: addresses of the answers' buffers, one for each
    item of the round; received [R, R] out: rows from each rank.
    """
    space = np.empty(s.max_rows * s.hidden, np.float32)
    for x in range(worker, s.num_ranks, num):
        way = ways[x]
        total = pull(
            way[DISPATCH_ROWS], s.dispatch_nbytes, s.max_rows, way[DISPATCH_FIELDS], ways, event, received[x]
        )
        if total < 0:
            faults[x] = -total
            continue
        faults[x] = 0
        way[NUM_RECEIVED] = total
        if total:
            run_experts(s, way[DISPATCH_ROWS], total, dies[x], sent[x], space)
        send_answers(s, x, ways, sent[x], event, received[x])


@kernel
def e2a_stage(s, ways, served, bounds, answer_fields, event, counts, orders, sents, faults, worker, num):
    """Every num-th expert die: pull the answers to what it sent; a trampoline hands them on."""
    answered = np.empty(s.num_ranks, np.int64)
    values = np.empty(s.hidden, np.float32)
    for x in range(worker, s.num_ranks, num):
        way = ways[x]
        limit = s.max_tokens * s.copies
        total = pull(way[COMBINE_ROWS], s.combine_nbytes, limit, way[COMBINE_FIELDS], ways, event, answered)
        if total < 0:
            faults[x] = -total
            continue
        faults[x] = 0
        for peer in range(s.num_ranks):
            if answered[peer] != sents[x, peer]:
                faults[x] = WRONG_COUNT
        if faults[x]:
            continue
        mine = served[bounds[x] : bounds[x + 1]]
        answer_tokens(s, way, mine, answer_fields, event, orders[x], counts, values)
