"""A number following a workload with patience: not at once, and not back and forth.

Another number must be better, on the same side, at every look for a while. After a change comes a time
without changes.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """State for the next look."""

    reason: str = ""  # of the last change
    changed_s: float = 0.0
    better: int = 0  # the number that has been the better one since `since`
    since: float | None = None


S = TypeVar("S", bound=Followed)


def still_waits(before: S, now_s: float, count: int, best: int, patience_s: float, calm_s: float) -> S | None:
    """Decide whether to keep waiting when `best` beats `count` at a look. Returns the new state while
    waiting, None when the change is due."""
    if before.since is None or (before.better > count) != (best > count):
        return msgspec.structs.replace(before, since=now_s, better=best)
    if now_s - before.since < patience_s or now_s - before.changed_s < calm_s:
        return msgspec.structs.replace(before, better=best)
    return None
