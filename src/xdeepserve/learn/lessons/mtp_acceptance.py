"""Exercise 8: how many drafts a step confirms. The story is beside this file."""

from __future__ import annotations

from xdeepserve.engine.plans import StepPlan
from xdeepserve.model.canonical import Array


def accepted(plan: StepPlan, sampled: Array) -> list[int]:
    """Count for each sequence the drafts, from the first on, that the main model samples there too.

    By row: plan.token_ids, plan.seq_of; plan.num_tokens rows in all. By sequence: plan.num_drafts, how many
    of its last rows are drafts. plan.logit_rows: the rows whose logits were computed, ascending; sampled
    int32 has for each of these the token that follows the row. The row before each draft is one of them.
    """
    raise NotImplementedError
