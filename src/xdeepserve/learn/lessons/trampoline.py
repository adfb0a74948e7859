"""Exercise 10: whom a trampoline serves. The story is beside this file."""

from __future__ import annotations

from xdeepserve.comm.trampoline.layout import Sides


def served(self: Sides, expert_rank: int) -> list[int]:
    """List the attention ranks with the die of this expert rank as trampoline, ascending; perhaps none.

    self.attention: the dies of the attention ranks; self.experts.num_ranks: how many expert ranks there are.
    """
    raise NotImplementedError
