"""Byte twin of A2E and E2A, for dies in lockstep: both ends, step by step.

    write_token, post_tokens   A2E 3-4             attention dies post their tokens
    a2e_stage                  A2E 5-7, A2E' 3     trampolines pull, and write a row for each expert's die
    e2a_stage                  E2A 4-7, E2A' 2-4   answers are pulled; trampolines sum up by weight, and post
    come_back                  E2A' 5-7            attention dies add them

`s` has, besides what the twin of `exchange` needs, the bytes of rows and of a block of answers (`A2ELayout`):
token_nbytes, answer_nbytes, answer_block; and top_k, the routed experts among a token's copies.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.comm.exchange.twin import (
    ANSWER_BLOCKS,
    ANSWERS_POINTER,
    NUM_TOKENS,
    TOKEN_FIELDS,
    TOKEN_ROWS,
    load_answer,
    post_answers,
    pull_answers,
    write_rows,
)
from xdeepserve.comm.twin import (
    FIELD_NBYTES,
    NO_ROOM,
    WRONG_COUNT,
    WRONG_EVENT,
    Tokens,
    blocks_of,
    dies_of,
    field,
    post,
)
from xdeepserve.jit.compiling import array_part, kernel, part
from xdeepserve.jit.pointers import copy_bytes, f32_flat, i32_flat

# Columns of a table: addresses on an attention die, and the number of the rows that are away.
(
    TOKENS, TOKENS_POINTER, TRAMPOLINE_FIELD, TRAMPOLINE_BASE, ANSWER_FIELD, ANSWERS, SHARED_EXPERT, NUM_SENT
) = range(8)  # fmt: skip
NUM_ATTENTION_COLUMNS = 8

# ---- attention dies -------------------------------------------------------------------------------------


@part
def write_token(s, way, t, idx, weight):
    """A2E, step 3: write the routing of token t, int32 and float32 [top_k], into its row; return the address
    of its scale.

    The payload follows the scale, four bytes further on.
    """
    row = way[TOKENS] + t * s.token_nbytes
    experts, weights = i32_flat(row, s.copies), f32_flat(row + 4 * s.copies, s.copies)
    for slot in range(s.top_k):
        experts[slot], weights[slot] = idx[slot], weight[slot]
    if s.copies > s.top_k:  # the shared expert is one more, of weight 1
        experts[s.top_k], weights[s.top_k] = way[SHARED_EXPERT], np.float32(1.0)
    return row + 8 * s.copies


@part
def post_tokens(way, event, rows):
    """A2E, step 4: post a single field, at the trampoline."""
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


@part
def arrived_tokens(s, way):
    """View the tokens pulled by a trampoline, as they are sent on."""
    rows, step = way[TOKEN_ROWS], s.token_nbytes
    scales = rows + 8 * s.copies
    return Tokens(rows, step, scales, step, scales + 4, step)


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
    """A share of the expert dies, for the tokens of each domain: pull_tokens on trampolines, then write_rows.

    By domain, a first axis of all: ways [R, NUM_WAY_COLUMNS]; served: attention ranks, those of expert rank x
    from bounds[x] to bounds[x + 1]; bases [A]; expert_rank: of each physical expert; counts [A] out; orders
    [R, max_tokens * copies] out; sents [R, R] out: rows to each rank; faults [R].
    """
    for d in range(ways.shape[0]):
        for x in dies_of(worker, num, s.num_ranks):
            way, mine = ways[d, x], served[d, bounds[d, x] : bounds[d, x + 1]]
            faults[d, x] = pull_tokens(s, way, mine, bases[d], event, counts[d])
            num_tokens = 0 if faults[d, x] else way[NUM_TOKENS]
            tokens = arrived_tokens(s, way)
            write_rows(s, way, expert_rank[d], event, orders[d, x], sents[d, x], num_tokens, tokens)


@kernel
def e2a_stage(
    s, ways, served, bounds, answer_fields, event, counts, orders, sents, received, faults, worker, num
):  # fmt: skip
    """A share of the expert dies, for each domain: post and pull the answers to the rows sent; trampolines
    hand them on. received [R, R], a domain first: rows that each rank has answered."""
    answered, senders = np.empty(s.num_ranks, np.int64), np.empty(s.num_ranks, np.int64)
    values = np.empty(s.hidden, np.float32)
    for first, last in blocks_of(worker, num, s.num_ranks):
        for d in range(ways.shape[0]):
            post_answers(s, ways[d], first, last, received[d])
            for x in range(first, last):
                way = ways[d, x]
                faults[d, x] = pull_answers(s, way, ways[d], event, sents[d, x], answered, senders)
                if not faults[d, x]:
                    mine = served[d, bounds[d, x] : bounds[d, x + 1]]
                    answer_tokens(s, way, mine, answer_fields[d], event, orders[d, x], counts[d], values)
