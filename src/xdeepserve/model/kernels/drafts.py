"""Index lists of multi-token prediction: accepted drafts, and the rows of MTP's passes (xDeepServe 4.6).

T counts token rows of a step, S sequences, R logit rows, K drafts of a sequence; all arrays are int32. Rows
of a sequence are consecutive, ascend in position, and end with its drafts; `seq_of` [T] and `logit_rows` [R]
ascend. Rows of a pass are the columns of an array [5, T], of which the first counts[ROWS] are used.
"""

from __future__ import annotations

from xdeepserve.jit.compiling import kernel, part

SEQ, STATE, TOKEN, POSITION, SLOT = range(5)  # of a pass's row; STATE: its place in the depth before
END_ROW, END_SEQ, END_LOGITS = range(3)  # of a sequence that sampled a token: its last row, and its logit row
ROWS, ENDS, MENDED, KEPT = range(4)  # what is counted


@kernel
def accept(num_accepted, token_ids, seq_of, num_drafts, logit_rows, sampled):
    """Count num_accepted [S]: each sequence's leading drafts that equal the tokens sampled by the main model.

    token_ids [T]; num_drafts [S]; sampled [R] has the token that follows each logit row.
    """
    num_accepted[:] = 0
    stop, at = 0, 0
    for seq in range(num_drafts.size):
        while stop < seq_of.size and seq_of[stop] == seq:
            stop += 1
        for draft in range(stop - num_drafts[seq], stop):
            while logit_rows[at] < draft - 1:
                at += 1
            if sampled[at] != token_ids[draft]:
                break
            num_accepted[seq] += 1


@part
def _put(rows, number, seq, state, token, position, slot):
    """Write the row `number` of a pass to rows [5, T]."""
    rows[SEQ, number], rows[STATE, number], rows[TOKEN, number] = seq, state, token
    rows[POSITION, number], rows[SLOT, number] = position, slot


@kernel
def first_rows(
    rows, ends, counts, drafts,
    seq_of, positions, slots, next_token_ids, num_drafts, num_accepted, logit_rows, sampled,
):  # fmt: skip
    """Make the rows of depth 1: all rows of the step but rejected drafts, whose next tokens are unknown.

    Outputs: rows [5, T]; ends [3, S], in order, the sequences that sampled a token; counts of both; drafts
    [S, K], which are all set to -1. next_token_ids [T] has -1 where the next token is one of sampled [R].
    """
    num_rows, num_ends, start, at = 0, 0, 0, 0
    drafts[:] = -1
    for seq in range(num_drafts.size):
        stop = start
        while stop < seq_of.size and seq_of[stop] == seq:
            stop += 1
        # A step that samples nothing leaves the acceptance of an earlier step, and has no drafts.
        num_rejected = num_drafts[seq] - num_accepted[seq] if num_drafts[seq] else 0
        has_sampled = False
        for row in range(start, stop - num_rejected):
            token = next_token_ids[row]
            if token < 0:
                while logit_rows[at] < row:
                    at += 1
                token, has_sampled = sampled[at], True
            _put(rows, num_rows, seq, row, token, positions[row], slots[row])
            num_rows += 1
        if has_sampled:
            ends[END_ROW, num_ends], ends[END_SEQ, num_ends] = num_rows - 1, seq
            ends[END_LOGITS, num_ends] = at
            num_ends += 1
        start = stop
    counts[ROWS], counts[ENDS] = num_rows, num_ends


@kernel
def next_rows(
    rows, ends, mended, kept, counts,
    rows_before, drafts, token_after, num_drafts, num_accepted, block_size,
):  # fmt: skip
    """Make the rows of depth 2 from those of depth 1, rows_before [5, T], and the first of drafts [S, K].

    A sequence without accepted drafts has a wrong KV entry just before this step. If the entry's block is
    still its own, a row more mends it, from the state kept in the block mended [S]. These states follow those
    of depth 1. kept [2, S] has the last row of each sequence in depth 1, and its block. In `ends` [3, S] the
    rows are moved to where they are now; `counts` has the rows of depth 1, and then all numbers of depth 2.
    token_after [S] follows the next token of a sequence's last row; -1: unknown, and the row is left out.
    """
    num_before, num_rows, num_mended, num_kept, end = counts[ROWS], 0, 0, 0, 0
    for row in range(num_before):
        seq, token = rows_before[SEQ, row], rows_before[TOKEN, row]
        position, slot = rows_before[POSITION, row], rows_before[SLOT, row]
        is_first = row == 0 or rows_before[SEQ, row - 1] != seq
        is_last = row + 1 == num_before or rows_before[SEQ, row + 1] != seq
        if is_first and num_drafts[seq] and not num_accepted[seq] and slot % block_size:
            _put(rows, num_rows, seq, num_before + num_mended, token, position - 1, slot - 1)
            num_rows += 1
            mended[num_mended] = slot // block_size
            num_mended += 1
        if not is_last:
            token = rows_before[TOKEN, row + 1]
        elif end < counts[ENDS] and ends[END_SEQ, end] == seq:
            token = drafts[seq, 0]
            ends[END_ROW, end] = num_rows
            end += 1
        else:
            token = token_after[seq]
        if is_last:
            kept[0, num_kept], kept[1, num_kept] = row, slot // block_size
            num_kept += 1
        if token >= 0:
            _put(rows, num_rows, seq, row, token, position, slot)
            num_rows += 1
    counts[ROWS], counts[MENDED], counts[KEPT] = num_rows, num_mended, num_kept
