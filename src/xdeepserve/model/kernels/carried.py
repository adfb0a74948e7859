"""Completes rows of a step that was planned before the previous step had ended: the die has values the host
lacked."""

from __future__ import annotations

import numpy as np

from xdeepserve.jit.compiling import kernel


@kernel
def resolve(
    token_ids, positions, slots, seq_of, block_tables, carried_seq, carried_row,
    sampled, accepted, drafts, block_size,
):  # fmt: skip
    """Fill in place token_ids, positions and slots int32 [T] of the rows of carried sequences.

    seq_of int32 [T] ascends; by sequence int32 [S] carried_seq, its number in the step before or -1, and
    carried_row, the logit row there that sampled its first token; block_tables int32 [S, B]. From that step:
    sampled int32 [R] by logit row; by sequence there accepted int32 and drafts int32 [., K].
    """
    num_done, last = 0, -1
    for row in range(seq_of.size):
        seq = seq_of[row]
        num_done = num_done + 1 if seq == last else 0
        last = seq
        before = carried_seq[seq]
        if before < 0:
            continue
        shift = accepted[before]
        if num_done:
            token_ids[row] = drafts[before, num_done - 1]
        else:
            token_ids[row] = sampled[carried_row[seq] + shift]
        position = positions[row] + shift
        positions[row] = position
        slots[row] = np.int32(block_tables[seq, position // block_size] * block_size + position % block_size)
