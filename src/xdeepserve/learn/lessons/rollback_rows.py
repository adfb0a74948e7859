"""Exercise 12: what a rollback puts back. The story is beside this file."""

from __future__ import annotations

from xdeepserve.model.canonical import Array


def rows_before(overwritten: dict[int, dict[int, Array]], step: int) -> dict[int, Array]:
    """By block, the row float32 [H] that lay there before step number `step`.

    overwritten has, by step number and block, the row that the step found and overwrote. Blocks that no step
    from number `step` on has overwritten are not in the result. Nothing given is changed.
    """
    raise NotImplementedError
