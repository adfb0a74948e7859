"""Backends for a transfer's bytes: one class for each kind of fabric (DeepServe 4.4, xDeepServe 5.1).

A backend says which pairs of nodes it can reach, and moves copies between them. DistFlow takes the backend
that it is given. `backend_between` finds the first that reaches: UB within a SuperPod; RoCE, else VPC, from
and to servers beside it (Ascend 910B).

Each byte takes the time of `weight` bytes: more than 1 in time-only runs, where few bytes in memory stand for
many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from xdeepserve.errors import HardwareError
from xdeepserve.hw.dma import DMA
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.gate import Gate
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.topology import Plane


class Backend(Protocol):
    """Way to move bytes, with all operations that DistFlow asks for."""

    name: str

    def check_path(self, src: int, dst: int) -> None:
        """Check the way for bytes from node to node. Raises HardwareError if there is none."""
        ...

    async def move(self, copies: Sequence[Copy], name: str) -> None:
        """Move all copies; return when the last byte is visible. Raises before a byte moves, or not at
        all."""
        ...

    def idle_ns(self, src: int, dst: int, nbytes: int) -> int:
        """Bound the time (ns) of a copy in one piece between dies whose link and engines are idle."""
        ...


def path_ns(pod: Pod, src: int, dst: int, nbytes: float) -> int:
    """Return the time (ns) of bytes between dies on the UB plane, which is idle, without any engine's
    startup."""
    spec, is_near = pod.spec_of(dst), pod.topology.server_of(src) == pod.topology.server_of(dst)
    link_ns = spec.link_ns(0, nbytes, 0) if is_near else spec.far_latency_ns() + spec.link_ns(0, 0, nbytes)
    return math.ceil(link_ns)


class UbBackend:
    """Memory copy on the UB plane, where dies and hosts share one address space.

    The destination pulls with its DMA engine; the source pushes where the destination is host memory.
    """

    name = "ub"

    def __init__(self, pod: Pod, weight: float = 1.0) -> None:
        self.pod, self.weight = pod, weight
        self._host_engines: dict[int, DMA] = {}

    def check_path(self, src: int, dst: int) -> None:
        self.pod.topology.check_path(src, dst, Plane.UB)

    async def move(self, copies: Sequence[Copy], name: str) -> None:
        batches: dict[int, list[Copy]] = {}
        for copy in copies:
            issuer = next((n for n in (copy.dst.node, copy.src.node) if n in self.pod.dies), copy.dst.node)
            batches.setdefault(issuer, []).append(copy)
        await self.pod.clock.gather(
            *[self._engine(n).copy(batch, name, self.weight) for n, batch in batches.items()]
        )

    def idle_ns(self, src: int, dst: int, nbytes: int) -> int:
        spec = self.pod.spec_of(dst)
        start_ns = spec.startup_ns("dma") + spec.pieces_ns(1, 1)
        return start_ns + path_ns(self.pod, src, dst, self.weight * nbytes)

    def _engine(self, node: int) -> DMA:
        if node in self.pod.dies:
            return self.pod.dies[node].dma
        if node not in self._host_engines:
            self._host_engines[node] = DMA(self.pod.fabric, node, "dma", Gate(self.pod.clock))
        return self._host_engines[node]


class _CardBackend:
    """Base of backends between network cards: one transfer for each pair of cards."""

    name: str
    plane: Plane

    def __init__(self, pod: Pod, weight: float = 1.0) -> None:
        self.pod, self.weight = pod, weight
        self.cards = pod.cards(self.plane)

    def check_path(self, src: int, dst: int) -> None:
        self.pod.topology.check_path(self.cards.card_of(src), self.cards.card_of(dst), self.plane)

    async def move(self, copies: Sequence[Copy], name: str) -> None:
        batches: dict[tuple[int, int], list[Copy]] = {}
        for copy in copies:
            route = self.cards.card_of(copy.src.node), self.cards.card_of(copy.dst.node)
            batches.setdefault(route, []).append(copy)
        await self.pod.clock.gather(
            *[self.cards.move(batch, name, self.weight) for batch in batches.values()]
        )

    def idle_ns(self, src: int, dst: int, nbytes: int) -> int:
        return self.cards.idle_ns(2, self.weight * nbytes)


class RoceBackend(_CardBackend):
    """RDMA between dies, each of which has a card of its own."""

    name, plane = "roce", Plane.ROCE


class VpcBackend(_CardBackend):
    """Ethernet between servers. Dies reach their server's single card through host memory."""

    name, plane = "vpc", Plane.VPC


BACKENDS: dict[str, Callable[..., Backend]] = {"ub": UbBackend, "roce": RoceBackend, "vpc": VpcBackend}


def backend_between(
    pod: Pod, nodes: Sequence[int], others: Sequence[int], fabric: str = "auto", weight: float = 1.0
) -> Backend:
    """Make the backend for two groups of nodes: over `fabric`, or for "auto" over the best fabric that they
    have in common. Raises HardwareError if there is none."""
    reasons = []
    for name in BACKENDS if fabric == "auto" else (fabric,):
        backend = BACKENDS[name](pod, weight)
        try:
            for node in nodes:
                for other in others:
                    backend.check_path(node, other)
        except HardwareError as error:
            reasons.append(f"{name}: {error}")
        else:
            return backend
    raise HardwareError("; ".join(reasons))
