"""Reports of a TE about itself: for the endpoint and for metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from xdeepserve.engine.balance.trigger import Skew
from xdeepserve.engine.deploy.deployment import Role
from xdeepserve.engine.te.life import Life

Health: TypeAlias = Literal["healthy", "suspect", "lost"]


class TEHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Health of a TE's shell (first tier of heartbeats) and DP groups (second tier).

    Groups are numbered within their TE, dies within the pod.
    """

    name: str
    num_groups: int  # 0 while it loads
    shell: Health = "healthy"
    suspect_groups: tuple[int, ...] = ()
    lost_groups: tuple[int, ...] = ()
    lost_dies: tuple[int, ...] = ()  # that do not answer; not those that were given up with them
    life: Life = "ready"
    reason: str | None = None  # why it is lost
    replaced_by: str | None = None  # the TE that has come in its place
    num_rollbacks: int = 0  # times that it has run steps again, kept when it is lost
    recovering: str | None = None  # the stage of recovery that it is at, and why
    num_servers: int = 0  # expert servers, where experts are services
    lost_servers: tuple[int, ...] = ()  # of these, that the monitor does not hear of: clients leave them out
    suspect_servers: tuple[int, ...] = ()  # that clients leave out because an answer is late
    links: tuple[str, ...] = ()  # that have failed: to which TE, and what became of the latest dummy payload


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How uneven the load of a layer's experts was in the latest time slice: hottest over mean, 1 if even."""

    te: str
    layer: int
    hottest_expert: float
    hottest_die: float  # with the replicas that there are


def expert_loads(te: str, layers: Sequence[int], skews: Sequence[Skew]) -> list[ExpertLoad]:
    """Return the skew of expert load for each layer collected so far."""
    return [
        ExpertLoad(te=te, layer=layer, hottest_expert=skew.experts, hottest_die=skew.dies)
        for layer, skew in zip(layers, skews, strict=False)
    ]


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of an expert server's seat, for users who add and remove servers."""

    te: str
    server: int
    presence: str  # there, lost, leaving, absent, or coming
    die: int | None
    epoch: int  # how many have been there
    experts: tuple[int, ...]  # routed ones, its copies included
    is_shared: bool
    is_late: bool = False  # clients leave it out until its late answer comes


class TEReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a TE, for users who add and remove TEs."""

    name: str
    role: Role
    life: Life
    dies: tuple[int, ...]  # all of them, those of experts alone included
    num_sequences: int = 0
    kv_load: float = 0.0
    source: str | None = None  # while it loads: where its weights come from, and which share is there
    loaded: float = 1.0
