"""Sets how often Python's garbage collector looks for reference cycles."""

from __future__ import annotations

import gc

FEW_OBJECTS = 10_000  # new ones, before it looks


def collect_seldom() -> None:
    """Make garbage collection rare: a pod has many long-lived objects, and scanning them takes a fifth of a
    step."""
    young, *old = gc.get_threshold()
    if young:  # 0: this program wants no collection at all
        gc.set_threshold(max(young, FEW_OBJECTS), *old)
