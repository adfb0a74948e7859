"""Byte twin of FusedDispatch and FusedCombine, for dies in lockstep: every message and flag.

    push_tokens     FusedDispatch 1-2   messages into the peers' buffers, and a flag at every peer
    gather_tokens   FusedDispatch 3     the messages that came, contiguous and by expert
    push_answers    FusedCombine 1-2    answers into their origins' buffers, a bit in each token's flag
    sum_answers     FusedCombine 3      the own tokens' answers, added up by weight

`s` has of `FusedLayout`: hidden, copies (top_k), is_int8 (quantize), int8_answers, num_ranks, max_tokens
(local_batch), max_messages (max_tokens) and held (experts_per_rank); dispatch_nbytes, slot_offset and
combine_nbytes of a message, payload_nbytes of what of it is gathered, and flag_nbytes of a dispatch flag; and
top_k, the routed experts among a token's copies. `which` is the set of flags that a dispatch uses, 0 or 1.
Padding is never written, so it stays zero.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.comm.exchange.twin import store_answer, unpack_answer
from xdeepserve.comm.fused.layout import SLOT_DTYPE
from xdeepserve.comm.twin import LOST_ANSWER, NO_ROOM, WRONG_EVENT, WRONG_TOKENS, copy_payload
from xdeepserve.jit.compiling import array_part, part
from xdeepserve.jit.pointers import add_at, f32_flat, i32_flat, i64_flat

SLOT_NBYTES = SLOT_DTYPE.itemsize
SLOT_WORDS = SLOT_NBYTES // 4
SCALE, SOURCE_RANK, BATCH_SLOT, KEY_OFFSET, EXPERT = range(SLOT_WORDS)
COUNTS_AT = 8  # behind a flag's event ID
# Columns of a table: addresses on a die with experts.
FLAGS, TOKEN_FLAGS, DISPATCH, COMBINE, OUTPUT, OUTPUT_SLOTS, COMBINED = range(7)
NUM_END_COLUMNS = 7


@array_part
def push_tokens(s, x, ends, expert_rank, local_idx, event, which, num_tokens, tokens):
    """FusedDispatch, steps 1 and 2, of rank x: `tokens` to the ranks of their experts.

    ends [R, 7]; expert_rank, local_idx: of each physical expert, its rank, and its number among those there.
    """
    counts = np.zeros((s.num_ranks, s.held), np.int64)
    sent = np.zeros(s.num_ranks, np.int64)
    for t in range(num_tokens):
        idx = i32_flat(tokens.experts + t * tokens.experts_step, s.copies)
        scale = i32_flat(tokens.scales + t * tokens.scales_step, 1)[0]
        for key in range(s.copies):
            expert = idx[key]
            peer = expert_rank[expert]
            message = ends[peer, DISPATCH] + (x * s.max_messages + sent[peer]) * s.dispatch_nbytes
            sent[peer] += 1
            counts[peer, local_idx[expert]] += 1
            copy_payload(message, tokens.payloads + t * tokens.payloads_step, s.payload_nbytes)
            slot = i32_flat(message + s.slot_offset, SLOT_WORDS)
            slot[SCALE], slot[SOURCE_RANK], slot[BATCH_SLOT] = scale, x, t
            slot[KEY_OFFSET], slot[EXPERT] = key, expert
    for peer in range(s.num_ranks):
        flag = _flag(s, ends[peer], which, x)
        i64_flat(flag, 1)[0] = event
        posted = i32_flat(flag + COUNTS_AT, s.held)
        for e in range(s.held):
            posted[e] = counts[peer, e]


@part
def _flag(s, end, which, peer):
    """Return the address of a peer's dispatch flag."""
    return end[FLAGS] + (which * s.num_ranks + peer) * s.flag_nbytes


@array_part
def gather_tokens(s, x, end, expert_rank, local_idx, event, which, received):
    """FusedDispatch, step 3, of rank x: return the number of messages received, or -fault. received [R]: from
    each."""
    at = np.zeros(s.held, np.int64)
    for peer in range(s.num_ranks):
        flag = _flag(s, end, which, peer)
        if i64_flat(flag, 1)[0] != event:
            return -WRONG_EVENT
        posted = i32_flat(flag + COUNTS_AT, s.held)
        received[peer] = 0
        for e in range(s.held):
            received[peer] += posted[e]
            at[e] += posted[e]
        if received[peer] > s.max_messages:
            return -NO_ROOM
    total = 0
    for e in range(s.held):  # prefix sums: where each expert's messages begin
        total, at[e] = total + at[e], total
    found = np.empty(s.held, np.int64)
    for peer in range(s.num_ranks):
        found[:] = 0
        for i in range(received[peer]):
            message = end[DISPATCH] + (peer * s.max_messages + i) * s.dispatch_nbytes
            slot = i32_flat(message + s.slot_offset, SLOT_WORDS)
            expert = slot[EXPERT]
            if not 0 <= expert < expert_rank.size or expert_rank[expert] != x:
                return -WRONG_TOKENS
            e = local_idx[expert]
            found[e] += 1
            if at[e] >= total:
                return -WRONG_TOKENS
            copy_payload(end[OUTPUT] + at[e] * s.payload_nbytes, message, s.payload_nbytes)
            out = i32_flat(end[OUTPUT_SLOTS] + at[e] * SLOT_NBYTES, SLOT_WORDS)
            out[:] = slot
            at[e] += 1
        posted = i32_flat(_flag(s, end, which, peer) + COUNTS_AT, s.held)
        for e in range(s.held):
            if found[e] != posted[e]:
                return -WRONG_TOKENS
    return total


@part
def _origin(ends, end, i):
    """Return the origin of a rank's i-th message: its row in `ends`, the token there, and its key."""
    slot = i32_flat(end[OUTPUT_SLOTS] + i * SLOT_NBYTES, SLOT_WORDS)
    return ends[slot[SOURCE_RANK]], np.int64(slot[BATCH_SLOT]), np.int64(slot[KEY_OFFSET])


@part
def answer_message(s, ends, end, i):
    """Return the address of the answer to a rank's i-th message, at its origin."""
    origin, token, key = _origin(ends, end, i)
    return origin[COMBINE] + (token * s.copies + key) * s.combine_nbytes


@part
def push_answers(s, ends, end, out, total):
    """FusedCombine, steps 1 and 2: the answers `out` float32 [total, H] to a rank's messages, in order.

    INT8 answers are in their messages already: who calls this has quantised them.
    """
    for i in range(total):
        if not s.int8_answers:
            store_answer(s, answer_message(s, ends, end, i), out + 4 * i * s.hidden)
        origin, token, key = _origin(ends, end, i)
        add_at(origin[TOKEN_FLAGS] + 4 * token, np.int64(1) << key)


@array_part
def sum_answers(s, end, num_tokens, weights, weights_step):
    """FusedCombine, step 3: a rank's tokens, their answers added up in the order of their keys. 0 or a fault.

    weights: address of the first token's, float32 [top_k]; the copy for the shared expert, if there is one,
    has weight 1. The sums are in the die's buffer `combined`, and the token flags are clear again.
    """
    full = (np.int64(1) << s.copies) - 1
    flags = i32_flat(end[TOKEN_FLAGS], s.max_tokens)
    for t in range(num_tokens):
        if np.int64(flags[t]) & 0xFFFFFFFF != full:
            return LOST_ANSWER
    flags[:] = 0
    values = np.empty(s.hidden, np.float32)
    for t in range(num_tokens):
        total = f32_flat(end[COMBINED] + 4 * t * s.hidden, s.hidden)
        total[:] = np.float32(0.0)
        own = f32_flat(weights + t * weights_step, s.top_k)
        for key in range(s.copies):
            unpack_answer(s, values, end[COMBINE] + (t * s.copies + key) * s.combine_nbytes)
            weight = own[key] if key < s.top_k else np.float32(1.0)
            for j in range(s.hidden):
                total[j] += values[j] * weight
    return 0
