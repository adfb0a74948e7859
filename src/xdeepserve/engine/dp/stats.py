"""Counters of a DP group's work so far; only its scheduler counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class StepStats:
    """Counters over all steps of a DP group that had rows.

    rows_per_step   number of token rows -> steps that had so many
    num_drafted     drafts offered to the main model, by position in the step, from 0
    num_accepted    of these, accepted
    """

    def __init__(self) -> None:
        self.rows_per_step: Counter[int] = Counter()
        self.num_drafted: list[int] = []
        self.num_accepted: list[int] = []

    def count_step(self, num_rows: int) -> None:
        self.rows_per_step[num_rows] += 1

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count a sequence's drafts in a step; the accepted ones come first."""
        count_drafts(self.num_drafted, self.num_accepted, num_drafts, num_accepted)


def count_drafts(offered: list[int], accepted: list[int], num_drafts: int, num_accepted: int) -> None:
    """Add a step's drafts of one sequence, the accepted ones first, to counts by position in the step."""
    missing = num_drafts - len(offered)
    offered += [0] * missing
    accepted += [0] * missing
    for position in range(num_drafts):
        offered[position] += 1
        accepted[position] += position < num_accepted


def summed(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Add lists of different lengths, position by position."""
    longest = max(map(len, lists), default=0)
    return tuple(sum(each[i] for each in lists if i < len(each)) for i in range(longest))
