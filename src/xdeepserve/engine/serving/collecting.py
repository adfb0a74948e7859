"""How often Python looks for cycles among objects."""

from __future__ import annotations

import gc

FEW_OBJECTS = 10_000  # new ones, before it looks


def collect_seldom() -> None:
    """A pod is many objects that stay: looking through them at every turn takes a fifth of a step."""
    young, *old = gc.get_threshold()
    if young:  # 0: this program wants no collection at all
        gc.set_threshold(max(young, FEW_OBJECTS), *old)
