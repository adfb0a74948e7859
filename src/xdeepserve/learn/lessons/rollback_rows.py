"""Exercise 12: the rows restored by a rollback. The story is beside this file."""

from __future__ import annotations

from xdeepserve.model.canonical import Array


def rows_before(overwritten: dict[int, dict[int, Array]], step: int) -> dict[int, Array]:
    """Map each block to the row float32 [H] that lay there before step number `step`.

    overwritten has, by step number and block, the row that the step found and overwrote. Blocks that no step
    from number `step` on has overwritten are not in the result. Nothing given is changed.
    """
    raise NotImplementedError
