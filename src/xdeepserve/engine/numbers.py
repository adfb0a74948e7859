"""Integer types for easily confused numbers: a type checker keeps them apart.

DieNumber    of a die in its pod, from 0 on; it never changes
DieRank      of a die among those of its TE that have DP groups
GroupRank    of a DP group in its TE: `tp` dies with successive ranks are a group
StepNo       of a step of a TE, or of a DP group that numbers its own; one that is run again gets another
Seat         of an expert server in its TE: servers come and go, a seat keeps its experts
Epoch        of a TE: how many times its dies have been called back so far
"""

from __future__ import annotations

from typing import NewType

DieNumber = NewType("DieNumber", int)
DieRank = NewType("DieRank", int)
GroupRank = NewType("GroupRank", int)
Seat = NewType("Seat", int)
StepNo = NewType("StepNo", int)
Epoch = NewType("Epoch", int)


def group_of(rank: DieRank, tp: int) -> GroupRank:
    """Return the rank of the DP group that a die belongs to."""
    return GroupRank(rank // tp)


def first_die_of(group: GroupRank, tp: int) -> DieRank:
    """Return the rank of the first die of a DP group."""
    return DieRank(group * tp)
