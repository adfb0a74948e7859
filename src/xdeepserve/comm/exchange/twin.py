"""Byte twin of dispatch and combine, for dies in lockstep: every row and field, step by step.

The stages of A2E and E2A between expert dies are the same. Padding is never written, so it stays zero.
`s` has of `Layout`: hidden, copies (top_k), is_int8 (quantize), int8_answers, num_ranks, max_tokens;
dispatch_nbytes and combine_nbytes of a row, dispatch_block and combine_block of the rows for one reader.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.comm.exchange.answers import SCALE_NBYTES
from xdeepserve.comm.exchange.layout import HEADER_DTYPE
from xdeepserve.comm.twin import FIELD_NBYTES, NO_ROOM, WRONG_COUNT, WRONG_EVENT, copy_payload, field, post
from xdeepserve.jit.bf16 import round_at, widen_at
from xdeepserve.jit.compiling import array_part, part
from xdeepserve.jit.pointers import copy_bytes, f32_flat, i8, i32_flat, prefetch_at

HEADER_NBYTES = HEADER_DTYPE.itemsize
SCALE_AT = HEADER_NBYTES - 4  # the header ends with the scale
AHEAD = 16  # rows of a table of counts that are asked for before their turn
# Columns of a table: addresses on a die with experts; those of A2E only where experts have dies of their own.
(
    BASE, DISPATCH_FIELDS, DISPATCH_BLOCKS, DISPATCH_POINTER, DISPATCH_ROWS,
    COMBINE_FIELDS, COMBINE_BLOCKS, COMBINE_POINTER, COMBINE_ROWS,
    NUM_RECEIVED, NUM_TOKENS, TOKEN_FIELDS, TOKEN_ROWS, ANSWER_BLOCKS, ANSWERS_POINTER,
    DISPATCH_EVENT, COMBINE_EVENT,  # under which the die has written rows last
) = range(17)  # fmt: skip
NUM_WAY_COLUMNS = 17


@array_part
def write_rows(s, way, expert_rank, event, order, sent, num_tokens, tokens):
    """Dispatch, step 3, of a rank: rows by destination, to be posted under `event`.

    expert_rank: of each physical expert; order [copies] out: the flat (token, slot) of each row sent; sent
    [R] out: rows for each rank.
    """
    num_ranks = s.num_ranks
    way[DISPATCH_EVENT] = event
    sent[:] = 0
    for t in range(num_tokens):
        idx = i32_flat(tokens.experts + t * tokens.experts_step, s.copies)
        for slot in range(s.copies):
            peer = expert_rank[idx[slot]]
            prefetch_at(way[DISPATCH_BLOCKS] + peer * s.dispatch_block)
            sent[peer] += 1
    if num_tokens:
        place = np.empty(num_ranks, np.int64)
        at = 0
        for peer in range(num_ranks):
            place[peer] = at
            at += sent[peer]
        starts = place.copy()
        for t in range(num_tokens):
            idx = i32_flat(tokens.experts + t * tokens.experts_step, s.copies)
            scale = i32_flat(tokens.scales + t * tokens.scales_step, 1)[0]
            payload = tokens.payloads + t * tokens.payloads_step
            for slot in range(s.copies):
                peer = expert_rank[idx[slot]]
                order[place[peer]] = t * s.copies + slot
                block = way[DISPATCH_BLOCKS] + peer * s.dispatch_block
                row = block + (place[peer] - starts[peer]) * s.dispatch_nbytes
                place[peer] += 1
                words = i32_flat(row, 4)
                words[0], words[1], words[2], words[3] = idx[slot], t, slot, scale
                copy_payload(row + HEADER_NBYTES, payload, s.hidden if s.is_int8 else 4 * s.hidden)


@part
def _post(ways, first, last, event, pointer, fields, block, counts):
    """Post the fields of all ranks at the ranks [first, last), which read them next.

    event, pointer, fields: columns of the table; block: bytes of the block for one reader; counts [R, R]:
    rows by writer and reader. Fields at a reader follow one another, so a thread that posts all of them
    writes whole cache lines in order. Posted by their writers, they would be scattered over all readers.
    """
    first_count, step = counts.ctypes.data + counts.itemsize * first, counts.itemsize * counts.shape[1]
    for x in range(ways.shape[0]):
        prefetch_at(first_count + (x + AHEAD) * step)
        found, start = ways[x, event], ways[x, pointer]
        for peer in range(first, last):
            post(ways[peer, fields] + x * FIELD_NBYTES, found, start + peer * block, counts[x, peer])


@part
def post_rows(s, ways, first, last, sents):
    """Dispatch, step 4, at the ranks [first, last): the fields of all ranks. sents [R, R]: rows of each, by
    destination."""
    _post(ways, first, last, DISPATCH_EVENT, DISPATCH_POINTER, DISPATCH_FIELDS, s.dispatch_block, sents)


@part
def pull(rows, row_nbytes, max_rows, fields, ways, event, counts, senders):
    """Steps 5 to 7: pull every peer's rows for this rank, side by side; return how many, or -fault.

    Outputs: counts [R], rows of each peer; senders [R], the peers with rows, in order. All rows are asked for
    before the first one is copied, because they lie in the memories of as many dies.
    """
    total, num_senders, wrong = 0, 0, 0
    for peer in range(ways.shape[0]):  # without branches: who sends rows cannot be foreseen
        found, _, count = field(fields + peer * FIELD_NBYTES)
        wrong |= found ^ event
        counts[peer] = count
        total += count
        senders[num_senders] = peer
        num_senders += count > 0
    if wrong:
        return -WRONG_EVENT
    if total > max_rows:
        return -NO_ROOM
    for i in range(num_senders):
        _, pointer, _ = field(fields + senders[i] * FIELD_NBYTES)
        prefetch_at(ways[senders[i], BASE] + pointer)
    to = rows
    for i in range(num_senders):
        _, pointer, count = field(fields + senders[i] * FIELD_NBYTES)
        copy_bytes(to, ways[senders[i], BASE] + pointer, count * row_nbytes)
        to += count * row_nbytes
    return total


@part
def answer_row(s, way, peer, i):
    """Return the address of the i-th answer to a peer."""
    return way[COMBINE_BLOCKS] + peer * s.combine_block + i * s.combine_nbytes


@part
def write_answers(s, way, out, total, received, senders):
    """Combine, steps 2 and 3, of a rank: `total` answers `out` [N, H], not INT8 ones, by source rank.

    received [R], senders: see `pull`.
    """
    n, at = 0, 0
    while n < total:
        peer = senders[at]
        at += 1
        for i in range(received[peer]):
            store_answer(s, answer_row(s, way, peer, i), out + 4 * n * s.hidden)
            n += 1


@part
def post_answers(s, ways, first, last, received):
    """Combine, step 4, at the ranks [first, last): the fields of all ranks. received [R, R]: rows that each
    has answered, by their source."""
    _post(ways, first, last, COMBINE_EVENT, COMBINE_POINTER, COMBINE_FIELDS, s.combine_block, received)


@part
def pull_answers(s, way, ways, event, sent, answered, senders):
    """Combine, steps 5 to 7: an answer to each of the rows `sent` [R], in their order. 0 or a fault.

    answered [R], senders [R]: scratch.
    """
    rows, fields, limit = way[COMBINE_ROWS], way[COMBINE_FIELDS], s.max_tokens * s.copies
    total = pull(rows, s.combine_nbytes, limit, fields, ways, event, answered, senders)
    if total < 0:
        return -total
    wrong = 0
    for peer in range(s.num_ranks):
        wrong |= answered[peer] ^ sent[peer]
    return WRONG_COUNT if wrong else 0


@part
def load_answer(s, values, way, i):
    """Load the i-th pulled answer into values, float32 [hidden]."""
    unpack_answer(s, values, way[COMBINE_ROWS] + i * s.combine_nbytes)


# ---- answers, as `answers` has them -----------------------------------------------------------------


@part
def store_answer(s, row, at):
    """Store an answer, float32 [hidden] at address `at`, as a row; INT8 answers are stored elsewhere."""
    if s.is_int8:
        round_at(row, at, s.hidden)
    else:
        copy_payload(row, at, 4 * s.hidden)


@part
def unpack_answer(s, values, row):
    """Unpack the answer in a row into values, float32 [hidden]."""
    if s.int8_answers:
        scale, payload = f32_flat(row, 1)[0], i8(row + SCALE_NBYTES, 1, s.hidden)
        for j in range(s.hidden):
            values[j] = np.float32(payload[0, j]) * scale
    elif s.is_int8:
        widen_at(values, row)
    else:
        answer = f32_flat(row, s.hidden)
        for j in range(s.hidden):
            values[j] = answer[j]
