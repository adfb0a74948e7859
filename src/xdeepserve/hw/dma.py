"""DMA and URMA engines. Both move any amount without AIV cores or unified buffers (XDS 3.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from .engines import Copy, Fabric, Gather, move, traffic_of, whole_copies
from .gate import Gate
from .traffic import Integers, Place, Traffic


class DMA:
    """Engine for moving any amount from memory to memory, without AIV cores or unified buffers.

    `kind` "dma" is asked by a CPU; "urma" by an AIV core directly (NPU-Direct URMA, XDS 3.3): a lower startup
    than DMA's, higher than MTE's.
    """

    def __init__(self, fabric: Fabric, node: int, kind: Literal["dma", "urma"], gate: Gate) -> None:
        self.fabric, self.node, self.kind, self.gate = fabric, node, kind, gate
        self.place = Place.of(node, fabric.topology, fabric.spec, fabric.links)
        self.lane = kind.upper()
        self.busy_until = 0
        # By a link, blocked or slow: a port is booked from when a transfer begins, so what waits behind the
        # link would book the far port from then on, and keep it from others until then.
        self.held_until = 0

    async def copy(self, pieces: Iterable[Copy], name: str = "copy", weight: float = 1.0) -> None:
        """Move the pieces; return when the last byte is visible. A byte takes the time of `weight` bytes."""
        pieces = whole_copies(pieces)
        traffic = traffic_of(self.fabric, self.place, pieces)
        routes: dict[tuple[int, int], int] = {}
        for src, dst, nbytes in pieces:
            way = src.node, dst.node
            routes[way] = routes.get(way, 0) + nbytes
        await self._spend(*traffic, len(pieces), name, weight=weight, is_payload=True, routes=routes)
        move(self.fabric, pieces, die=self.node if self.kind == "urma" else None)

    async def pass_time(self, src: int, dst: int, nbytes: int, name: str = "copy") -> None:
        """Let the time of a one-piece `copy` between two nodes pass, without moving bytes."""
        loads, stores = Traffic(self.place), Traffic(self.place)
        loads.add(src, nbytes)
        stores.add(dst, nbytes)
        await self._spend(loads, stores, 1, name, routes={(src, dst): nbytes})

    async def gather(
        self,
        nodes: Integers,
        offsets: Integers,
        sizes: Integers,
        dst_offset: int,
        name: str = "gather",
        copies: Integers | None = None,
        cores: int = 1,
    ) -> None:
        """Copy pieces from many places, in their order, into consecutive bytes of the die's own memory.

        `copies` as for `MTE.gather`; `cores` AIVs ask the engine.
        """
        pieces = Gather(self.fabric, self.place, nodes, offsets, sizes, dst_offset)
        crossing = None if copies is None else (nodes, copies)
        await self._spend(pieces.loads, pieces.stores, len(nodes), name, cores, crossing, is_payload=True)
        pieces.move()

    async def _spend(
        self,
        loads: Traffic,
        stores: Traffic,
        num_pieces: int,
        name: str,
        cores: int = 1,
        crossing: tuple[Integers, Integers] | None = None,
        weight: float = 1.0,
        is_payload: bool = False,
        routes: Mapping[tuple[int, int], int] = MappingProxyType({}),
    ) -> None:
        """Let the time of a transfer pass, from when the engine is free, at both ends' ports."""
        if self.gate.is_shut:
            await self.gate.passed()
        fabric, spec = self.fabric, self.fabric.spec
        # Reading and writing overlap: the slower side is the time.
        link_ns = weight * max(
            spec.link_ns(loads.local, loads.near, loads.far),
            spec.link_ns(stores.local, stores.near, stores.far),
        )
        now, free_ns = fabric.clock.now, max(loads.free_ns, stores.free_ns)
        start = max(now, self.busy_until, free_ns)
        is_held = now < start <= max(self.held_until, free_ns)
        fixed = spec.startup_ns(self.kind) + spec.pieces_ns(num_pieces, cores)
        ready = start + fixed + max(loads.latency_ns, stores.latency_ns)
        end = ready + math.ceil(link_ns)
        if crossing is not None:
            end = max(end, fabric.ports.pull(self.node, *crossing, ready))
        # Both ends' ports: what crosses them otherwise is waited for, and waits.
        for (src, dst), nbytes in routes.items() if not is_held else ():
            end = max(end, fabric.ports.carry(src, dst, weight * nbytes, ready))
        if is_payload and loads.local + stores.local < loads.nbytes + stores.nbytes:
            end += fabric.checksums.time_ns(weight * stores.nbytes, spec)
        self.busy_until = end
        if is_held or loads.is_slowed or stores.is_slowed:
            self.held_until = end
        if fabric.trace.is_on:
            fabric.trace.span(self.node, self.lane, name, start, end, {"bytes": stores.nbytes})
        await fabric.clock.sleep_until(end)
