"""Engines with different models on a common pod: do any of them serve requests now?"""

from __future__ import annotations

from typing import Protocol, cast
from weakref import WeakSet

from xdeepserve.hw.pod import Pod


class Neighbour(Protocol):
    """Interface of an engine as seen by the other engines on its pod."""

    @property
    def num_served(self) -> int:
        """Number of requests in service, without those waiting for the pod to rest."""


def join(pod: Pod, engine: Neighbour) -> None:
    """Register a loaded engine with its pod, for as long as the engine object lives."""
    _engines(pod).add(engine)


def is_quiet(pod: Pod) -> bool:
    """Whether no engine on the pod serves a request: only then is the pod sure to come to rest."""
    return not any(each.num_served for each in _engines(pod))


def _engines(pod: Pod) -> WeakSet[Neighbour]:
    return cast(WeakSet[Neighbour], pod.services.setdefault("engines", WeakSet()))
