"""Exercise 7: make a block writable. The story is beside this file."""

from __future__ import annotations

from xdeepserve.engine.dp.block_table import BlockTable, Holding
from xdeepserve.engine.plans import BlockCopy


def copy(self: BlockTable, holding: Holding, block_idx: int) -> BlockCopy | None:
    """Make a block writable: return None if it is private, else the copy that the die must make first.

    holding.slots has the sequence's slots by block, holding.nodes what the prefix index knows of the first of
    them. BlockCopy("hbm", from slot, "hbm", to slot). XDeepServeError (xdeepserve.errors) if a slot is needed
    and none is available.
    """
    raise NotImplementedError
