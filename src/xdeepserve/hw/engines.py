"""The engines that move bytes between memories: MTE2 and MTE3, DMA, URMA.

Either end may be another node's memory (global shared memory). All operations are batched: one await moves
many pieces for startup + issue of the pieces + bytes, and is one event of the clock. Bytes are read, and
become visible at the destination, at the completion time, in the order of the pieces; operations of one
engine complete in the order of their calls. So a flag that is stored with or after its data by the same
engine is never seen before them; two engines promise each other nothing.

Only the issuing die's port is a bottleneck: contention at the far end is not modelled. Sources: XDS 2.2, 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from .clock import Clock, Process
from .memory import Address, AddressSpace
from .spec import Spec
from .topology import Topology
from .trace import Trace

Bytes: TypeAlias = bytes | bytearray | memoryview


class Copy(NamedTuple):
    """One piece of a batch: `nbytes` from `src` to `dst`."""

    src: Address
    dst: Address
    nbytes: int


class Fabric(NamedTuple):
    """What every engine of a pod shares."""

    clock: Clock
    memories: AddressSpace
    topology: Topology
    spec: Spec
    trace: Trace


class _Traffic:
    """Bytes of a batch by distance from the die that issues it."""

    __slots__ = ("_far_latency_ns", "_first", "_host", "_last", "_node", "far", "latency_ns", "local", "near")

    def __init__(self, fabric: Fabric, node: int) -> None:
        self._node = node
        topology = fabric.topology
        server = topology.server_of(node)
        self._first = server * topology.dies_per_server
        self._last = self._first + topology.dies_per_server
        self._host = topology.host(server)
        self._far_latency_ns = fabric.spec.far_latency_ns()
        self.local = self.near = self.far = 0
        self.latency_ns = 0

    def add(self, node: int, nbytes: int) -> None:
        if node == self._node:
            self.local += nbytes
        elif self._first <= node < self._last or node == self._host:
            self.near += nbytes
        else:
            self.far += nbytes
            self.latency_ns = self._far_latency_ns

    @property
    def nbytes(self) -> int:
        return self.local + self.near + self.far


class MTE:
    """The two memory transfer engines of a die's AIV cores and the unified buffers between them.

    MTE2 moves memory -> unified buffer, MTE3 unified buffer -> memory. `cores` is the number of AIV cores
    that share an operation (all by default).
    """

    def __init__(self, fabric: Fabric, node: int) -> None:
        self.fabric, self.node = fabric, node
        self.mte2_busy_until = 0
        self.mte3_busy_until = 0
        self._cores = fabric.spec.num_cores("aiv")

    async def load(
        self, pieces: Sequence[tuple[Address, int]], cores: int | None = None, name: str = "load"
    ) -> list[bytes]:
        """MTE2 only: read pieces of memory into the unified buffers; their contents at completion."""
        fabric, cores = self.fabric, cores or self._cores
        traffic = _Traffic(fabric, self.node)
        for address, nbytes in pieces:
            fabric.memories[address.node].check(address.offset, nbytes)
            traffic.add(address.node, nbytes)
        start = max(fabric.clock.now, self.mte2_busy_until)
        end = self.mte2_busy_until = start + self._one_way_ns(traffic, len(pieces), cores)
        fabric.trace.span(self.node, "MTE2", name, start, end)
        await fabric.clock.sleep_until(end)
        return [bytes(fabric.memories.read(address, nbytes)) for address, nbytes in pieces]

    async def load_view(self, nbytes: int, cores: int | None = None, name: str = "load") -> None:
        """MTE2 only: the time to load `nbytes` of the die's own memory that a kernel reads through a view."""
        fabric = self.fabric
        traffic = _Traffic(fabric, self.node)
        traffic.add(self.node, nbytes)
        start = max(fabric.clock.now, self.mte2_busy_until)
        end = self.mte2_busy_until = start + self._one_way_ns(traffic, 1, cores or self._cores)
        fabric.trace.span(self.node, "MTE2", name, start, end)
        await fabric.clock.sleep_until(end)

    async def store(
        self,
        pieces: Sequence[tuple[Address, Bytes]],
        cores: int | None = None,
        name: str = "store",
        num_accesses: int | None = None,
    ) -> None:
        """MTE3 only: write pieces that are in the unified buffers (computed there, or loaded) to memory.

        `num_accesses` is how many accesses the AIVs issue if not one for each piece.
        """
        fabric, cores = self.fabric, cores or self._cores
        traffic = _Traffic(fabric, self.node)
        targets = []
        for (node, offset), data in pieces:
            memory = fabric.memories[node]
            memory.check(offset, len(data))
            traffic.add(node, len(data))
            targets.append(memory)
        start = max(fabric.clock.now, self.mte3_busy_until)
        num_accesses = len(pieces) if num_accesses is None else num_accesses
        end = self.mte3_busy_until = start + self._one_way_ns(traffic, num_accesses, cores)
        fabric.trace.span(self.node, "MTE3", name, start, end)
        await fabric.clock.sleep_until(end)
        for memory, (address, data) in zip(targets, pieces, strict=True):
            memory.write_checked(address.offset, data)

    async def copy(self, pieces: Iterable[Copy], cores: int | None = None, name: str = "copy") -> None:
        """MTE2 and MTE3 in ping-pong: memory -> unified buffer -> memory, chunk by chunk."""
        fabric, cores = self.fabric, cores or self._cores
        spec = fabric.spec
        pieces = list(pieces)
        loads, stores = _traffic(fabric, self.node, pieces)
        load_ns = spec.link_ns(loads.local, loads.near, loads.far, cores)
        store_ns = spec.link_ns(stores.local, stores.near, stores.far, cores)
        load_end, store_start, store_end = spec.ping_pong_ns(load_ns, store_ns, loads.nbytes, cores)
        # MTE3 may still be busy with an earlier operation: then the whole copy waits for it, so that the
        # ping-pong of one operation never interleaves with another's.
        fixed = spec.startup_ns("mte") + spec.pieces_ns(len(pieces), cores)
        start = max(fabric.clock.now, self.mte2_busy_until, self.mte3_busy_until - fixed - store_start)
        ready = start + fixed + loads.latency_ns
        end = ready + store_end + stores.latency_ns
        self.mte2_busy_until = ready + load_end
        self.mte3_busy_until = end
        fabric.trace.span(self.node, "MTE2", name, start, ready + load_end)
        fabric.trace.span(self.node, "MTE3", name, ready + store_start, end)
        await fabric.clock.sleep_until(end)
        _move(fabric, pieces)

    def _one_way_ns(self, traffic: _Traffic, num_pieces: int, cores: int) -> int:
        spec = self.fabric.spec
        link_ns = spec.link_ns(traffic.local, traffic.near, traffic.far, cores)
        fixed = spec.startup_ns("mte") + spec.pieces_ns(num_pieces, cores)
        return fixed + traffic.latency_ns + math.ceil(link_ns)


class DMA:
    """An engine that moves any amount from memory to memory, without AIV cores or unified buffers.

    `kind` "dma" is asked by a CPU; "urma" by an AIV core directly (NPU-Direct URMA, XDS 3.3): a lower startup
    than DMA's, higher than MTE's, and `start` lets the core go on at once.
    """

    def __init__(self, fabric: Fabric, node: int, kind: Literal["dma", "urma"]) -> None:
        self.fabric, self.node, self.kind = fabric, node, kind
        self.lane = kind.upper()
        self.busy_until = 0

    async def copy(self, pieces: Iterable[Copy], name: str = "copy") -> None:
        """Move the pieces; returns when the last byte is visible."""
        pieces = list(pieces)
        end = self._reserve(pieces, name)
        await self.fabric.clock.sleep_until(end)
        _move(self.fabric, pieces)

    def start(self, pieces: Iterable[Copy], name: str = "copy") -> Process:
        """Begin to move the pieces and return at once. Await the result for completion.

        The sources must not change before completion: bytes are read as they are then.
        """
        pieces = list(pieces)
        end = self._reserve(pieces, name)

        async def complete() -> None:
            await self.fabric.clock.sleep_until(end)
            _move(self.fabric, pieces)

        process = self.fabric.clock.spawn(complete(), name=f"{self.lane} of node {self.node}: {name}")
        assert isinstance(process, Process)
        return process

    def _reserve(self, pieces: list[Copy], name: str) -> int:
        fabric, spec = self.fabric, self.fabric.spec
        loads, stores = _traffic(fabric, self.node, pieces)
        # Reading and writing overlap: the slower side is the time.
        link_ns = max(
            spec.link_ns(loads.local, loads.near, loads.far),
            spec.link_ns(stores.local, stores.near, stores.far),
        )
        start = max(fabric.clock.now, self.busy_until)
        fixed = spec.startup_ns(self.kind) + spec.pieces_ns(len(pieces), 1)
        end = start + fixed + max(loads.latency_ns, stores.latency_ns) + math.ceil(link_ns)
        self.busy_until = end
        fabric.trace.span(self.node, self.lane, name, start, end)
        return end


def _traffic(fabric: Fabric, node: int, pieces: list[Copy]) -> tuple[_Traffic, _Traffic]:
    """Check the bounds of every piece; what is read and what is written, by distance."""
    loads, stores = _Traffic(fabric, node), _Traffic(fabric, node)
    for src, dst, nbytes in pieces:
        fabric.memories[src.node].check(src.offset, nbytes)
        fabric.memories[dst.node].check(dst.offset, nbytes)
        loads.add(src.node, nbytes)
        stores.add(dst.node, nbytes)
    return loads, stores


def _move(fabric: Fabric, pieces: list[Copy]) -> None:
    for src, dst, nbytes in pieces:
        data = fabric.memories.read(src, nbytes)
        fabric.memories[dst.node].write_checked(dst.offset, data)
