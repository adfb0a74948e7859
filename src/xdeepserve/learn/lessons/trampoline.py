"""Exercise 10: whom a trampoline serves. The story is beside this file."""

from __future__ import annotations

from xdeepserve.comm.trampoline.layout import Sides


def served(self: Sides, expert_rank: int) -> list[int]:
    """The attention ranks whose trampoline is the die of this expert rank, ascending; perhaps none.

    self.attention: the dies of the attention ranks; self.experts.num_ranks: how many expert ranks there are.
    """
    raise NotImplementedError
