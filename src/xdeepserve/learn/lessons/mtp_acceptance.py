"""Exercise 8: how many drafts a step confirms. The story is beside this file."""

from __future__ import annotations

from xdeepserve.model.canonical import Array


def accept(
    num_accepted: Array,
    token_ids: Array,
    seq_of: Array,
    num_drafts: Array,
    logit_rows: Array,
    sampled: Array,
) -> None:
    """Count for each sequence the drafts, from the first on, that the main model samples there too.

    The counts go to num_accepted, where those of an earlier step still stand. All arrays are int32. By row:
    token_ids, and seq_of, ascending. By sequence: num_accepted, and num_drafts, how many of its last rows are
    drafts. logit_rows: the rows whose logits were computed, ascending; sampled has the token that follows
    each of them. The row before each draft is one of them.
    """
    raise NotImplementedError
