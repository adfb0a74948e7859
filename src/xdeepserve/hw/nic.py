"""Network cards of the slower planes: one RoCE card per die, one VPC card per server (CM 3.3, 4.4).

A transfer occupies the sending card's transmit side and the receiving card's receive side for startup plus
bytes over bandwidth; each side serves one transfer after another. Bytes are read, and become visible, at the
end. Switches are not modelled: neither plane is oversubscribed within a pod.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ..errors import HardwareError
from .engines import Copy, Fabric, move
from .topology import Plane

Side = Literal["transmit", "receive"]


class Cards:
    """Network cards of a plane, with the time until each side is busy."""

    def __init__(self, fabric: Fabric, plane: Plane) -> None:
        spec = fabric.spec
        if plane is Plane.ROCE:
            bandwidth, startup = spec.roce_bandwidth, spec.roce_startup
        elif plane is Plane.VPC:
            bandwidth, startup = spec.vpc_bandwidth, spec.vpc_startup
        else:
            raise HardwareError("the UB plane has no network cards: dies reach it through their own engines")
        self.fabric, self.plane = fabric, plane
        self._ns_per_byte, self.startup_ns = 1e9 / bandwidth.value, math.ceil(startup.value * 1e9 - 1e-6)
        self._busy_until: dict[tuple[int, Side], int] = {}

    def card_of(self, node: int) -> int:
        """Return the node with the card that serves `node`: a die itself for RoCE, its server's host for
        VPC."""
        topology = self.fabric.topology
        if self.plane is Plane.VPC:
            return topology.host(topology.server_of(node))
        topology.check_path(node, node, self.plane)
        return node

    def reserve(self, node: int, side: Side, nbytes: int, name: str) -> int:
        """Occupy a side of a node's card for bytes from or to a volume or the object store. Returns when they
        have passed (virtual ns)."""
        card, fabric = self.card_of(node), self.fabric
        start = max(fabric.clock.now, self._busy_until.get((card, side), 0))
        end = start + self.startup_ns + math.ceil(nbytes * self._ns_per_byte)
        self._busy_until[card, side] = end
        fabric.trace.span(card, self.plane.name, name, start, end, {"bytes": nbytes})
        return end

    def idle_ns(self, num_dies: int, nbytes: float) -> int:
        """Return the time (ns) of a transfer between idle cards, `num_dies` of whose ends are dies."""
        # A die reaches its server's VPC card through host memory: a DMA on the way, overlapped but for
        # startup.
        staging_ns = num_dies * self.fabric.spec.startup_ns("dma") if self.plane is Plane.VPC else 0
        return self.startup_ns + staging_ns + math.ceil(nbytes * self._ns_per_byte)

    async def move(self, copies: Sequence[Copy], name: str, weight: float = 1.0) -> None:
        """Move pieces between two cards; a byte takes the time of `weight` bytes."""
        fabric = self.fabric
        for src, dst, nbytes in copies:
            fabric.memories[src.node].check(src.offset, nbytes)
            fabric.memories[dst.node].check(dst.offset, nbytes)
        routes = {(self.card_of(src.node), self.card_of(dst.node)) for src, dst, _ in copies}
        if len(routes) != 1:
            raise HardwareError(f"one transfer has one route, not {sorted(routes)}")
        ((sender, receiver),) = routes
        nodes = {src.node for src, _, _ in copies} | {dst.node for _, dst, _ in copies}
        num_dies = sum(map(fabric.topology.is_die, nodes))
        nbytes = sum(copy.nbytes for copy in copies)
        counted, free_ns = nbytes, 0
        if fabric.links and sender != receiver:
            counted, free_ns = fabric.links.passes(self.plane, receiver, sender, nbytes)
        billed = weight * counted
        sides: list[tuple[int, Side]] = [(sender, "transmit"), (receiver, "receive")]
        start = max(fabric.clock.now, free_ns, *(self._busy_until.get(side, 0) for side in sides))
        end = start + self.idle_ns(min(num_dies, 2), billed)
        end += fabric.checksums.time_ns(billed, fabric.spec)
        for side in sides:
            self._busy_until[side] = end
        fabric.trace.span(sender, self.plane.name, name, start, end, {"bytes": nbytes})
        fabric.trace.move(sender, receiver, nbytes, self.plane.name)
        await fabric.clock.sleep_until(end)
        move(fabric, list(copies), self.plane)
