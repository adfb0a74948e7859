"""A number that follows a workload, but not at once and not back and forth.

Another number has to be the better one, on the same side, at every look for a while; and after a change comes
a time without one.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be remembered for the next look."""

    reason: str = ""  # of the last change
    changed_s: float = 0.0
    better: int = 0  # the number that has been the better one since `since`
    since: float | None = None


S = TypeVar("S", bound=Followed)


def still_waits(before: S, now_s: float, count: int, best: int, patience_s: float, calm_s: float) -> S | None:
    """`best` is better than `count` at this look: the state if that is not enough yet, None if it is."""
    if before.since is None or (before.better > count) != (best > count):
        return msgspec.structs.replace(before, since=now_s, better=best)
    if now_s - before.since < patience_s or now_s - before.changed_s < calm_s:
        return msgspec.structs.replace(before, better=best)
    return None
