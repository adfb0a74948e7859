"""Faults of links between two nodes on a plane, in both directions, for as long as they last.

    down      nothing goes by it, and who wants to send or to read learns so at once (`LinkError`)
    blocked   nothing begins to go by it, and nobody is told
    slow      its bytes take the time of `factor` times as many
    flipped   one bit of the next payload that an engine or a card brings by it, and that is all
    late      of a die, to everybody: what it asks its engines for begins `by_us` later

Bytes that are on their way when a fault begins arrive.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ..errors import LinkError
from .clock import Clock
from .memory import Bytes
from .topology import Plane


class LinkFault(NamedTuple):
    """Fault of a link, with kind, end and severity."""

    kind: str
    until_ns: float
    factor: float = 1.0
    by_ns: int = 0


class FaultyLinks(dict[tuple[Plane, int, int], LinkFault]):
    """Faults by plane and pair, the lower node first; a node's own way to all others is its pair with itself.

    Empty unless something is wrong, so that engines ask whether it is and go on.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def spoil(self, plane: Plane, a: int, b: int, fault: LinkFault) -> None:
        """Let a fault of a link begin now."""
        self[plane, min(a, b), max(a, b)] = fault

    def mend(self) -> None:
        """Remove the link faults of the past."""
        for key in [key for key, fault in self.items() if fault.until_ns <= self._clock.now]:
            del self[key]

    def free_ns(self, nodes: Collection[int]) -> int:
        """Return the time (virtual ns) from which some nodes can reach each other on the UB plane. Raises
        LinkError if a link is down."""
        pairs = [(a, b) for plane, a, b in self if plane is Plane.UB and a in nodes and b in nodes]
        return max((self.passes(Plane.UB, a, b, 0)[1] for a, b in pairs), default=0)

    def carry(self, plane: Plane, src: int, dst: int, data: Bytes) -> Bytes:
        """Return the bytes of a payload on arrival, with a bit flipped if that fault is due."""
        key = plane, min(src, dst), max(src, dst)
        if key not in self or self[key].kind != "flipped" or not data:
            return data
        del self[key]
        damaged = bytearray(data)
        damaged[len(damaged) // 2] ^= 1
        return bytes(damaged)

    def passes(self, plane: Plane, node: int, other: int, nbytes: int) -> tuple[int, int]:
        """Bill a transfer of `node` from or to `other`: return (billed bytes, time from which it may begin).
        Raises LinkError if the link is down."""
        now, free_ns = self._clock.now, 0
        own = self.get((plane, node, node))
        if own is not None and now < own.until_ns:
            free_ns = now + own.by_ns
        fault = self.get((plane, min(node, other), max(node, other)))
        if fault is None or now >= fault.until_ns:
            return nbytes, free_ns
        if fault.kind == "down":
            raise LinkError(
                f"node {node} cannot reach node {other}: their link on the {plane.name} plane is down"
            )
        if fault.kind == "blocked":
            return nbytes, max(free_ns, int(fault.until_ns))
        return round(nbytes * fault.factor), free_ns
