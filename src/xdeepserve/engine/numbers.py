"""Integer types for easily confused numbers: a type checker keeps them apart.

DieNumber    number of a die in its pod, from 0 on; it never changes
DieRank      rank of a die among those of its TE that have DP groups
GroupRank    rank of a DP group in its TE: `tp` dies with successive ranks are a group
StepNo       number of a step of a TE, or of a DP group that numbers its own; a repeated step gets a new one
Epoch        number of times that a TE's dies have been called back so far
"""

from __future__ import annotations

from typing import NewType

DieNumber = NewType("DieNumber", int)
DieRank = NewType("DieRank", int)
GroupRank = NewType("GroupRank", int)
StepNo = NewType("StepNo", int)
Epoch = NewType("Epoch", int)


def group_of(rank: DieRank, tp: int) -> GroupRank:
    """Return the rank of the DP group that a die belongs to."""
    return GroupRank(rank // tp)


def first_die_of(group: GroupRank, tp: int) -> DieRank:
    """Return the rank of the first die of a DP group."""
    return DieRank(group * tp)
