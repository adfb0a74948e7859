"""What a TE tells of itself: to the endpoint, and for metrics."""

from __future__ import annotations

import msgspec


class TEHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How many DP groups a TE has, and which of them are not healthy."""

    name: str
    num_groups: int
    suspect: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How uneven the load of a layer's experts was in the latest time slice: hottest over mean, 1 if even."""

    te: str
    layer: int
    hottest_expert: float
    hottest_die: float  # with the replicas that there are
