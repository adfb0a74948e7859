"""Engines that share a pod, each with a model of its own: whether any of them serves somebody now."""

from __future__ import annotations

from typing import Protocol, cast
from weakref import WeakSet

from xdeepserve.hw.pod import Pod


class Neighbour(Protocol):
    """What an engine tells the others."""

    @property
    def num_served(self) -> int:
        """Requests that do not wait for the pod to rest."""


def join(pod: Pod, engine: Neighbour) -> None:
    """One more engine, which has been loaded. It is one of them for as long as it is there."""
    _engines(pod).add(engine)


def is_quiet(pod: Pod) -> bool:
    """Whether nobody is served: then, and only then, a pod is sure to come to rest."""
    return not any(each.num_served for each in _engines(pod))


def _engines(pod: Pod) -> WeakSet[Neighbour]:
    return cast(WeakSet[Neighbour], pod.services.setdefault("engines", WeakSet()))
