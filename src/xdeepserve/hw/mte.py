"""MTE2 and MTE3, the memory transfer engines of a die, with its unified buffers (XDS 2.2, 3.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import index

import numpy as np
import numpy.typing as npt

from ..errors import AddressError
from .engines import (
    Copy,
    Fabric,
    Gather,
    Targets,
    carried,
    move,
    traffic_of,
    whole_copies,
    whole_pieces,
)
from .gate import Gate
from .memory import Address, Bytes
from .topology import Plane
from .traffic import Integers, Place, Traffic


class MTE:
    """Two memory transfer engines of a die's AIV cores, and the unified buffers between them.

    MTE2 moves memory -> unified buffer, MTE3 unified buffer -> memory. `cores` is the number of AIV cores
    that share an operation (all by default).
    """

    def __init__(self, fabric: Fabric, node: int, gate: Gate) -> None:
        self.fabric, self.node, self.gate = fabric, node, gate
        self.place = Place.of(node, fabric.topology, fabric.spec, fabric.links)
        self.mte2_busy_until = 0
        self.mte3_busy_until = 0
        self._cores = fabric.spec.num_cores("aiv")

    async def load(
        self, pieces: Sequence[tuple[Address, int]], cores: int | None = None, name: str = "load"
    ) -> list[bytes]:
        """MTE2 only: read pieces of memory into the unified buffers; return their contents at completion."""
        fabric, traffic = self.fabric, Traffic(self.place)
        pieces = [(address, index(nbytes)) for address, nbytes in whole_pieces(pieces)]
        for address, nbytes in pieces:
            fabric.memories[address.node].check(address.offset, nbytes)
            traffic.add(address.node, nbytes)
        await self._load(traffic, len(pieces), cores, name)
        return [bytes(fabric.memories.read(address, nbytes)) for address, nbytes in pieces]

    async def scatter(
        self,
        targets: Targets,
        data: npt.NDArray[np.uint8],
        cores: int | None = None,
        name: str = "scatter",
    ) -> None:
        """Store many pieces of equal size: data [N, size] goes, row by row, to the N targets."""
        count = len(targets.nodes)
        if data.shape != (count, targets.size):
            raise AddressError(f"{count} targets of {targets.size} bytes take no {list(data.shape)} bytes")
        if self.fabric.trace.is_on:
            for node in targets.nodes:
                self.fabric.trace.move(self.node, node, targets.size)
        await self._store(targets.traffic, count, cores, name)
        self.fabric.memories.write_many(targets.nodes, targets.offsets, data)

    async def gather(
        self,
        nodes: Integers,
        offsets: Integers,
        sizes: Integers,
        dst_offset: int,
        cores: int | None = None,
        name: str = "gather",
        copies: Integers | None = None,
        is_running: bool = False,
    ) -> None:
        """Copy pieces from many places, in their order, into consecutive bytes of the die's own memory.

        With `copies` piece i is copies[i] messages of an exchange, from different nodes: the ports have their
        price, if the bytes do not take longer.
        """
        pieces = Gather(self.fabric, self.place, nodes, offsets, sizes, dst_offset)
        crossing = None if copies is None else (nodes, copies)
        num_pieces = None if is_running else len(nodes)
        how = num_pieces, cores or self._cores, name
        await self._spend(pieces.loads, pieces.stores, *how, crossing)
        pieces.move()

    async def store_view(
        self,
        nbytes: int,
        num_accesses: int | None,
        cores: int | None = None,
        name: str = "store",
        since_ns: int | None = None,
    ) -> None:
        """MTE3 only: let the time to store `nbytes` in the die's own memory pass. The caller then writes them
        in a view.

        `num_accesses` None is for a kernel that is running, and `since_ns` when its first store could begin:
        MTE3 stores what MTE2 has loaded while that loads more.
        """
        await self._store(Traffic(self.place, nbytes), num_accesses, cores, name, since_ns)

    async def load_view(
        self, nbytes: int, cores: int | None = None, name: str = "load", is_running: bool = False
    ) -> None:
        """MTE2 only: let the time pass in which a kernel loads `nbytes` of the die's own memory through a
        view."""
        await self._load(Traffic(self.place, nbytes), None if is_running else 1, cores, name)

    async def store(
        self,
        pieces: Sequence[tuple[Address, Bytes]],
        cores: int | None = None,
        name: str = "store",
    ) -> None:
        """MTE3 only: write pieces from the unified buffers (computed there, or loaded) to memory."""
        fabric, traffic = self.fabric, Traffic(self.place)
        pieces, targets = whole_pieces(pieces), []
        for (node, offset), data in pieces:
            memory = fabric.memories[node]
            memory.check(offset, len(data))
            traffic.add(node, len(data))
            fabric.trace.move(self.node, node, len(data))
            targets.append(memory)
        await self._store(traffic, len(pieces), cores, name)
        for memory, (address, data) in zip(targets, pieces, strict=True):
            memory.write_checked(address.offset, data)

    async def copy(self, pieces: Iterable[Copy], cores: int | None = None, name: str = "copy") -> None:
        """Copy by MTE2 and MTE3 in ping-pong: memory -> unified buffer -> memory, chunk by chunk."""
        pieces = whole_copies(pieces)
        loads, stores = traffic_of(self.fabric, self.place, pieces)
        await self._spend(loads, stores, len(pieces), cores or self._cores, name)
        move(self.fabric, pieces, die=self.node)

    async def _spend(
        self,
        loads: Traffic,
        stores: Traffic,
        num_pieces: int | None,
        cores: int,
        name: str,
        crossing: tuple[Integers, Integers] | None = None,
    ) -> None:
        """Let the time of a copy pass, at both engines and at the ports that it crosses."""
        if self.gate.is_shut:
            await self.gate.passed()
        fabric, spec = self.fabric, self.fabric.spec
        load_ns = spec.link_ns(loads.local, loads.near, loads.far, cores)
        store_ns = spec.link_ns(stores.local, stores.near, stores.far, cores)
        load_end, store_start, store_end = spec.ping_pong_ns(load_ns, store_ns, loads.nbytes, cores)
        # MTE3 may still be busy with an earlier operation: then the whole copy waits for it, so that the
        # ping-pong of one operation never interleaves with another's.
        fixed = self._fixed_ns(num_pieces, cores)
        start = max(fabric.clock.now, self.mte2_busy_until, self.mte3_busy_until - fixed - store_start)
        start = max(start, loads.free_ns, stores.free_ns)
        ready = start + fixed + loads.latency_ns
        end = ready + store_end + stores.latency_ns
        if crossing is not None:
            end = max(end, fabric.ports.pull(self.node, *crossing, ready))
        end += fabric.checksums.time_ns(loads.near + loads.far, spec)
        self.mte2_busy_until = ready + load_end
        self.mte3_busy_until = end
        fabric.trace.span(self.node, "MTE2", name, start, ready + load_end, {"bytes": loads.nbytes})
        fabric.trace.span(self.node, "MTE3", name, ready + store_start, end, {"bytes": stores.nbytes})
        await fabric.clock.sleep_until(end)

    async def push(
        self,
        pieces: Sequence[tuple[Address, Bytes]],
        *,
        load_nbytes: int,
        work_ns: int,
        num_steps: int,
        cores: int | None = None,
        name: str = "push",
        copies: tuple[Integers, Integers] | None = None,
    ) -> None:
        """Store results computed on the way, in three stages: MTE2 loads, vector units work, MTE3 stores.

        `num_steps` equal steps are dealt to the `cores`; each loads its share of `load_nbytes` of the die's
        own memory, works for its share of `work_ns`, and issues one access. The stages of successive steps
        overlap. `pieces` is what is stored in the end; contiguous accesses may be one piece. With `copies`,
        different nodes and the number of messages for each, this is the push of an exchange whose kernel is
        running: the ports have their price, if the bytes do not take longer.
        """
        fabric, cores = self.fabric, cores or self._cores
        spec = fabric.spec
        stores = Traffic(self.place)
        pieces = whole_pieces(pieces)
        for (node, offset), data in pieces:
            fabric.memories[node].check(offset, len(data))
            stores.add(node, len(data))
            fabric.trace.move(self.node, node, len(data))
        load_ns = spec.link_ns(load_nbytes, 0, 0, cores)
        store_ns = spec.link_ns(stores.local, stores.near, stores.far, cores)
        if copies is None:
            store_ns += spec.pieces_ns(num_steps, cores)
        load_end, _, store_start, end_ns = spec.pipeline_ns([load_ns, work_ns, store_ns], num_steps, cores)
        if self.gate.is_shut:
            await self.gate.passed()
        fixed = spec.startup_ns("mte") if copies is None else 0
        start = max(fabric.clock.now, self.mte2_busy_until, self.mte3_busy_until - fixed - store_start)
        start = max(start, stores.free_ns)
        ready = start + fixed
        end = ready + end_ns
        if copies is not None:
            end = max(end, fabric.ports.push(self.node, *copies, ready))
        end += stores.latency_ns + fabric.checksums.time_ns(stores.near + stores.far, spec)
        self.mte2_busy_until, self.mte3_busy_until = ready + load_end, end
        fabric.trace.span(self.node, "MTE2", name, start, ready + load_end, {"bytes": load_nbytes})
        fabric.trace.span(self.node, "MTE3", name, ready + store_start, end, {"bytes": stores.nbytes})
        await fabric.clock.sleep_until(end)
        here = Address(self.node, 0)
        for (node, offset), data in pieces:
            arrived = carried(fabric, Plane.UB, here, Address(node, offset), data, self.node)
            fabric.memories[node].write_checked(offset, arrived)

    async def atomic_add(
        self, pieces: Sequence[tuple[Address, int]], cores: int | None = None, name: str = "atomic add"
    ) -> None:
        """MTE3: add a number to the u32 at each address, in order. Each read-modify-write is indivisible.

        Raises AddressError for an address that is not aligned to its 4 bytes.
        """
        fabric, traffic = self.fabric, Traffic(self.place)
        pieces = [(address, index(amount)) for address, amount in whole_pieces(pieces)]
        for address, _ in pieces:
            fabric.memories[address.node].check(address.offset, 4)
            if address.offset % 4:
                raise AddressError(
                    f"node {address.node}: atomic add at offset {address.offset}: no multiple of 4"
                )
            traffic.add(address.node, 4)
        await self._store(traffic, len(pieces), cores, name)
        for address, amount in pieces:
            value = int.from_bytes(fabric.memories.read(address, 4), "little") + amount & 0xFFFFFFFF
            fabric.memories[address.node].write_checked(address.offset, value.to_bytes(4, "little"))

    async def _load(self, traffic: Traffic, num_pieces: int | None, cores: int | None, name: str) -> None:
        """Occupy MTE2 alone with a load, as soon as it is free."""
        if self.gate.is_shut:
            await self.gate.passed()
        fabric = self.fabric
        start = max(fabric.clock.now, self.mte2_busy_until, traffic.free_ns)
        end = self.mte2_busy_until = start + self._one_way_ns(traffic, num_pieces, cores)
        fabric.trace.span(self.node, "MTE2", name, start, end, {"bytes": traffic.nbytes})
        await fabric.clock.sleep_until(end)

    async def _store(
        self,
        traffic: Traffic,
        num_pieces: int | None,
        cores: int | None,
        name: str,
        since_ns: int | None = None,
    ) -> None:
        """Occupy MTE3 alone with a store, as soon as it is free. An earlier `since_ns` lets it begin in the
        past."""
        if self.gate.is_shut:
            await self.gate.passed()
        fabric = self.fabric
        begun = fabric.clock.now if since_ns is None else max(since_ns, self.gate.opens_ns)
        start = max(begun, self.mte3_busy_until)
        start = max(start, traffic.free_ns)
        end = self.mte3_busy_until = start + self._one_way_ns(traffic, num_pieces, cores)
        fabric.trace.span(self.node, "MTE3", name, start, end, {"bytes": traffic.nbytes})
        await fabric.clock.sleep_until(end)

    def _one_way_ns(self, traffic: Traffic, num_pieces: int | None, cores: int | None) -> int:
        cores = cores or self._cores
        link_ns = self.fabric.spec.link_ns(traffic.local, traffic.near, traffic.far, cores)
        return self._fixed_ns(num_pieces, cores) + traffic.latency_ns + math.ceil(link_ns)

    def _fixed_ns(self, num_pieces: int | None, cores: int) -> int:
        """Return the startup and issue time (ns) of an operation's pieces; 0 inside a running kernel
        (None)."""
        if num_pieces is None:
            return 0
        spec = self.fabric.spec
        return spec.startup_ns("mte") + spec.pieces_ns(num_pieces, cores)
