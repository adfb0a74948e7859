"""Rows among dies with experts: a copy of a token to the die of each of its experts, and the answers back.

Dispatch and combine are this, and the stages of A2E and E2A between expert dies. Rows, fields and buffers are
those of `comm/exchange`. Between two kernels lies a barrier: what the first of them
posts, the second one reads. Padding is never written, so it stays zero.
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
from xdeepserve.jit.compiling import array_part, kernel, part
from xdeepserve.jit.pointers import copy_bytes, f32_flat, i32_flat, u8_flat, u16_flat

# Columns of a table: addresses on a die with experts; those of A2E only where experts have dies of their own.
(
    BASE, DISPATCH_FIELDS, DISPATCH_BLOCKS, DISPATCH_POINTER, DISPATCH_ROWS,
    COMBINE_FIELDS, COMBINE_BLOCKS, COMBINE_POINTER, COMBINE_ROWS,
    NUM_RECEIVED, NUM_TOKENS, TOKEN_FIELDS, TOKEN_ROWS, ANSWER_BLOCKS, ANSWERS_POINTER,
) = range(15)  # fmt: skip
NUM_WAY_COLUMNS = 15


@array_part
def send_tokens(
    s, x, ways, expert_rank, event, order, sent, num_tokens,
    experts, experts_step, scales, scales_step, payloads, payloads_step,
):  # fmt: skip
    """Dispatch, steps 3 and 4, of rank x: rows by destination, and a field at every peer.

    expert_rank: of each physical expert; order [copies] out: the flat (token, slot) of each row sent; sent
    [R] out: rows for each rank. Of a token's experts (int32 [copies]), scale and payload there is the first
    one's address, and the bytes from one to the next.
    """
    way, num_ranks = ways[x], s.num_ranks
    sent[:] = 0
    for t in range(num_tokens):
        idx = i32_flat(experts + t * experts_step, s.copies)
        for slot in range(s.copies):
            sent[expert_rank[idx[slot]]] += 1
    if num_tokens:
        place = np.empty(num_ranks, np.int64)
        at = 0
        for peer in range(num_ranks):
            place[peer] = at
            at += sent[peer]
        starts = place.copy()
        for t in range(num_tokens):
            idx = i32_flat(experts + t * experts_step, s.copies)
            scale = i32_flat(scales + t * scales_step, 1)[0]
            payload = payloads + t * payloads_step
            for slot in range(s.copies):
                peer = expert_rank[idx[slot]]
                order[place[peer]] = t * s.copies + slot
                block = way[DISPATCH_BLOCKS] + peer * s.dispatch_block
                row = block + (place[peer] - starts[peer]) * s.dispatch_nbytes
                place[peer] += 1
                words = i32_flat(row, 4)
                words[0], words[1], words[2], words[3] = idx[slot], t, slot, scale
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
    """Steps 5 to 7: every peer's rows for this rank, side by side; how many, or -fault.

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
    """Combine, steps 2 to 4, of rank x: answers `out` [N, H], by source rank, and a field at every peer."""
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
    """See jit.bf16."""
    to, bits = u16_flat(target, size), i32_flat(source, size)
    for i in range(size):
        b = np.uint32(bits[i])
        if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            to[i] = (b >> np.uint32(16)) | np.uint32(0x40)
        else:
            to[i] = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@part
def pull_answers(s, way, ways, event, sent, answered):
    """Combine, steps 5 to 7: an answer to each of the rows `sent` [R], in their order. 0 or a fault.

    answered [R]: scratch.
    """
    limit = s.max_tokens * s.copies
    total = pull(way[COMBINE_ROWS], s.combine_nbytes, limit, way[COMBINE_FIELDS], ways, event, answered)
    if total < 0:
        return -total
    for peer in range(s.num_ranks):
        if answered[peer] != sent[peer]:
            return WRONG_COUNT
    return 0


@part
def load_answer(s, values, way, i):
    """values float32 [hidden] = the i-th of the answers that were pulled; see jit.bf16."""
    at = way[COMBINE_ROWS] + i * s.combine_nbytes
    if s.is_int8:
        bits, words = u16_flat(at, s.hidden), values.view(np.uint32)
        for j in range(s.hidden):
            words[j] = np.uint32(bits[j]) << np.uint32(16)
    else:
        answer = f32_flat(at, s.hidden)
        for j in range(s.hidden):
            values[j] = answer[j]


@kernel
def expert_stage(s, ways, dies, sent, received, event, faults, worker, num):
    """Every num-th die with experts: receive, run the experts of one layer, send the answers.

    dies [R, NUM_EXPERT_COLUMNS]: see `experts`; sent [R]: addresses of the answers' buffers, one for each
    item of the round; received [R, R] out: rows from each rank.
    """
    space = np.empty(s.max_rows * s.hidden if s.wide else 0, np.float32)
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
