"""What the host left open in a plan that it made while the step before was running.

The host counted: this sequence goes on with one token more, and then so many drafts. The die has the rest in
its memory: the token, the drafts, and how many of the step before's drafts were accepted, by which all rows
of the sequence shift (CloudMatrix 4.2.4 keeps the metadata of MTP's graphs on the NPU for the same reason).
"""

from __future__ import annotations

import msgspec

from xdeepserve.engine.messages import StepPlan


def resolve(
    plan: StepPlan, block_size: int, sampled: list[int], accepted: list[int], drafts: list[list[int]]
) -> StepPlan:
    """The plan with its token ids, positions and slots, from the results of the step before.

    sampled   by logit row
    accepted  by sequence: its drafts that were accepted
    drafts    by sequence: those for this step
    """
    tokens, positions, slots = list(plan.token_ids), list(plan.positions), list(plan.slots)
    num_done = [0] * len(plan.carried_seq)  # rows of each sequence
    for row, seq in enumerate(plan.seq_of):
        before = plan.carried_seq[seq]
        if before < 0:
            continue
        shift, number = accepted[before], num_done[seq]
        tokens[row] = drafts[before][number - 1] if number else sampled[plan.carried_row[seq] + shift]
        positions[row] += shift
        block, offset = divmod(positions[row], block_size)
        slots[row] = plan.block_tables[seq][block] * block_size + offset
        num_done[seq] += 1
    return msgspec.structs.replace(plan, token_ids=tokens, positions=positions, slots=slots)
