"""The engines that move bytes between memories: MTE2 and MTE3, DMA, URMA.

Either end may be another node's memory (global shared memory). All operations are batched: one await moves
many pieces for startup + issue of the pieces + bytes, and is one event of the clock. Bytes are read, and
become visible at the destination, at the completion time, in the order of the pieces; operations of one
engine complete in the order of their calls. So a flag that is stored with or after its data by the same
engine is never seen before them; two engines promise each other nothing.

Bytes are bound by the issuing die's port alone; contention at the far end is modelled for the copies of an
exchange (`hw.ports`), not for bytes. What a kernel does after its first access ("is_running") has no startup
of its own, and the issue of its accesses hides behind their bytes. Sources: XDS 2.2, 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import index
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import AddressError
from .clock import Clock, Process
from .memory import Address, AddressSpace, Integers
from .ports import Ports
from .spec import Spec
from .topology import Topology
from .trace import Trace
from .traffic import Place, Traffic

Bytes: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")


class Copy(NamedTuple):
    """One piece of a batch: `nbytes` from `src` to `dst`."""

    src: Address
    dst: Address
    nbytes: int


def whole_copies(pieces: Iterable[Copy]) -> list[Copy]:
    """The pieces with Python's numbers, whose sums do not wrap around. AddressError if one is not whole."""
    try:
        return [
            Copy(Address(index(a), index(b)), Address(index(c), index(d)), index(n))
            for (a, b), (c, d), n in pieces
        ]
    except TypeError as error:
        raise AddressError(f"a copy is two addresses and a size, in whole numbers: {error}") from None


def whole_pieces(pieces: Iterable[tuple[Address, T]]) -> list[tuple[Address, T]]:
    """The same of addresses with something each."""
    try:
        return [(Address(index(node), index(offset)), what) for (node, offset), what in pieces]
    except TypeError as error:
        raise AddressError(f"a piece has an address in whole numbers: {error}") from None


class Fabric(NamedTuple):
    """What every engine of a pod shares."""

    clock: Clock
    memories: AddressSpace
    topology: Topology
    spec: Spec
    trace: Trace
    ports: Ports


class Gather:
    """Many pieces of anybody's memory that go to consecutive bytes of one die's own; checked when made."""

    def __init__(
        self,
        fabric: Fabric,
        place: Place,
        nodes: Integers,
        offsets: Integers,
        sizes: Integers,
        dst_offset: int,
    ) -> None:
        self.memories, self.target = fabric.memories, fabric.memories[place.node]
        nodes, offsets, sizes = (np.asarray(x, np.int64) for x in (nodes, offsets, sizes))
        dst_offset = index(dst_offset)
        self.nodes, self.offsets, self.sizes, self.dst_offset = nodes, offsets, sizes, dst_offset
        self.nbytes = int(sizes.sum())
        self.memories.check_many(nodes, offsets, sizes)
        self.target.check(dst_offset, self.nbytes)
        self.loads, self.stores = Traffic(place), Traffic(place, self.nbytes)
        self.loads.add_many(nodes, sizes)

    def move(self) -> None:
        target = self.target.read(self.dst_offset, self.nbytes)
        self.memories.gather(self.nodes, self.offsets, self.sizes, target)
        self.target.notify(self.dst_offset, self.nbytes)


class Targets:
    """Where pieces of `size` bytes go, one to each of nodes and offsets [N]. Checked when made, so that who
    stores to the same places again and again need not have them checked again."""

    def __init__(self, fabric: Fabric, place: Place, nodes: Integers, offsets: Integers, size: int) -> None:
        nodes, offsets = np.asarray(nodes, np.int64), np.asarray(offsets, np.int64)
        fabric.memories.check_many(nodes, offsets, size)
        self.nodes, self.offsets, self.size = nodes.tolist(), offsets.tolist(), size
        self.traffic = Traffic(place)
        self.traffic.add_many(nodes, size)


class MTE:
    """The two memory transfer engines of a die's AIV cores and the unified buffers between them.

    MTE2 moves memory -> unified buffer, MTE3 unified buffer -> memory. `cores` is the number of AIV cores
    that share an operation (all by default).
    """

    def __init__(self, fabric: Fabric, node: int) -> None:
        self.fabric, self.node = fabric, node
        self.place = Place.of(node, fabric.topology, fabric.spec)
        self.mte2_busy_until = 0
        self.mte3_busy_until = 0
        self._cores = fabric.spec.num_cores("aiv")

    async def load(
        self, pieces: Sequence[tuple[Address, int]], cores: int | None = None, name: str = "load"
    ) -> list[bytes]:
        """MTE2 only: read pieces of memory into the unified buffers; their contents at completion."""
        fabric, cores = self.fabric, cores or self._cores
        traffic = Traffic(self.place)
        pieces = [(address, index(nbytes)) for address, nbytes in whole_pieces(pieces)]
        for address, nbytes in pieces:
            fabric.memories[address.node].check(address.offset, nbytes)
            traffic.add(address.node, nbytes)
        start = max(fabric.clock.now, self.mte2_busy_until)
        end = self.mte2_busy_until = start + self._one_way_ns(traffic, len(pieces), cores)
        fabric.trace.span(self.node, "MTE2", name, start, end)
        await fabric.clock.sleep_until(end)
        return [bytes(fabric.memories.read(address, nbytes)) for address, nbytes in pieces]

    async def scatter(
        self,
        targets: Targets,
        data: npt.NDArray[np.uint8],
        cores: int | None = None,
        name: str = "scatter",
    ) -> None:
        """`store` of many pieces of one size: data [N, size] goes, row by row, to the N targets."""
        fabric, traffic, count = self.fabric, targets.traffic, len(targets.nodes)
        if data.shape != (count, targets.size):
            raise AddressError(f"{count} targets of {targets.size} bytes take no {list(data.shape)} bytes")
        start = max(fabric.clock.now, self.mte3_busy_until)
        end = self.mte3_busy_until = start + self._one_way_ns(traffic, count, cores or self._cores)
        fabric.trace.span(self.node, "MTE3", name, start, end)
        await fabric.clock.sleep_until(end)
        fabric.memories.write_many(targets.nodes, targets.offsets, data)

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
        """`copy` of many pieces, one after another, into consecutive bytes of the die's own memory.

        With `copies` piece i is copies[i] messages of an exchange, from different nodes: the ports have their
        price, if the bytes do not take longer.
        """
        pieces = Gather(self.fabric, self.place, nodes, offsets, sizes, dst_offset)
        crossing = None if copies is None else (nodes, copies)
        num_pieces = None if is_running else len(nodes)
        end = self._reserve_copy(
            pieces.loads, pieces.stores, num_pieces, cores or self._cores, name, crossing
        )
        await self.fabric.clock.sleep_until(end)
        pieces.move()

    async def store_view(
        self,
        nbytes: int,
        num_accesses: int | None,
        cores: int | None = None,
        name: str = "store",
        since_ns: int | None = None,
    ) -> None:
        """MTE3 only: the time to store `nbytes` in the die's own memory; the caller then does, in a view.

        `num_accesses` None is for a kernel that is running, and `since_ns` when its first store could begin:
        MTE3 stores what MTE2 has loaded while that loads more.
        """
        fabric = self.fabric
        traffic = Traffic(self.place, nbytes)
        start = max(fabric.clock.now if since_ns is None else since_ns, self.mte3_busy_until)
        end = self.mte3_busy_until = start + self._one_way_ns(traffic, num_accesses, cores or self._cores)
        fabric.trace.span(self.node, "MTE3", name, start, end)
        await fabric.clock.sleep_until(end)

    async def load_view(
        self, nbytes: int, cores: int | None = None, name: str = "load", is_running: bool = False
    ) -> None:
        """MTE2 only: the time to load `nbytes` of the die's own memory that a kernel reads through a view."""
        fabric = self.fabric
        traffic = Traffic(self.place, nbytes)
        start = max(fabric.clock.now, self.mte2_busy_until)
        end = self.mte2_busy_until = start + self._one_way_ns(
            traffic, None if is_running else 1, cores or self._cores
        )
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
        traffic = Traffic(self.place)
        pieces, targets = whole_pieces(pieces), []
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
        pieces = whole_copies(pieces)
        loads, stores = traffic_of(self.fabric, self.place, pieces)
        end = self._reserve_copy(loads, stores, len(pieces), cores or self._cores, name)
        await self.fabric.clock.sleep_until(end)
        move(self.fabric, pieces)

    def _reserve_copy(
        self,
        loads: Traffic,
        stores: Traffic,
        num_pieces: int | None,
        cores: int,
        name: str,
        crossing: tuple[Integers, Integers] | None = None,
    ) -> int:
        """Book both engines, and the ports for what crosses them, for a copy; when it will be complete."""
        fabric, spec = self.fabric, self.fabric.spec
        load_ns = spec.link_ns(loads.local, loads.near, loads.far, cores)
        store_ns = spec.link_ns(stores.local, stores.near, stores.far, cores)
        load_end, store_start, store_end = spec.ping_pong_ns(load_ns, store_ns, loads.nbytes, cores)
        # MTE3 may still be busy with an earlier operation: then the whole copy waits for it, so that the
        # ping-pong of one operation never interleaves with another's.
        fixed = self._fixed_ns(num_pieces, cores)
        start = max(fabric.clock.now, self.mte2_busy_until, self.mte3_busy_until - fixed - store_start)
        ready = start + fixed + loads.latency_ns
        end = ready + store_end + stores.latency_ns
        if crossing is not None:
            end = max(end, fabric.ports.pull(self.node, *crossing, ready))
        self.mte2_busy_until = ready + load_end
        self.mte3_busy_until = end
        fabric.trace.span(self.node, "MTE2", name, start, ready + load_end)
        fabric.trace.span(self.node, "MTE3", name, ready + store_start, end)
        return end

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
        """Store what is computed on the way, in three stages: MTE2 loads, vector units work, MTE3 stores.

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
        load_ns = spec.link_ns(load_nbytes, 0, 0, cores)
        store_ns = spec.link_ns(stores.local, stores.near, stores.far, cores)
        if copies is None:
            store_ns += spec.pieces_ns(num_steps, cores)
        load_end, _, store_start, end_ns = spec.pipeline_ns([load_ns, work_ns, store_ns], num_steps, cores)
        fixed = spec.startup_ns("mte") if copies is None else 0
        start = max(fabric.clock.now, self.mte2_busy_until, self.mte3_busy_until - fixed - store_start)
        ready = start + fixed
        end = ready + end_ns
        if copies is not None:
            end = max(end, fabric.ports.push(self.node, *copies, ready))
        end += stores.latency_ns
        self.mte2_busy_until, self.mte3_busy_until = ready + load_end, end
        fabric.trace.span(self.node, "MTE2", name, start, ready + load_end)
        fabric.trace.span(self.node, "MTE3", name, ready + store_start, end)
        await fabric.clock.sleep_until(end)
        for (node, offset), data in pieces:
            fabric.memories[node].write_checked(offset, data)

    async def atomic_add(
        self, pieces: Sequence[tuple[Address, int]], cores: int | None = None, name: str = "atomic add"
    ) -> None:
        """MTE3: add a number to the u32 at each address, in order. Each read-modify-write is indivisible.

        AddressError for an address that is not aligned to its 4 bytes.
        """
        fabric, cores = self.fabric, cores or self._cores
        traffic = Traffic(self.place)
        pieces = [(address, index(amount)) for address, amount in whole_pieces(pieces)]
        for address, _ in pieces:
            fabric.memories[address.node].check(address.offset, 4)
            if address.offset % 4:
                raise AddressError(
                    f"node {address.node}: atomic add at offset {address.offset}: no multiple of 4"
                )
            traffic.add(address.node, 4)
        start = max(fabric.clock.now, self.mte3_busy_until)
        end = self.mte3_busy_until = start + self._one_way_ns(traffic, len(pieces), cores)
        fabric.trace.span(self.node, "MTE3", name, start, end)
        await fabric.clock.sleep_until(end)
        for address, amount in pieces:
            value = int.from_bytes(fabric.memories.read(address, 4), "little") + amount & 0xFFFFFFFF
            fabric.memories[address.node].write_checked(address.offset, value.to_bytes(4, "little"))

    def _one_way_ns(self, traffic: Traffic, num_pieces: int | None, cores: int) -> int:
        link_ns = self.fabric.spec.link_ns(traffic.local, traffic.near, traffic.far, cores)
        return self._fixed_ns(num_pieces, cores) + traffic.latency_ns + math.ceil(link_ns)

    def _fixed_ns(self, num_pieces: int | None, cores: int) -> int:
        """Startup and issue of an operation's pieces; None for a kernel that is running."""
        if num_pieces is None:
            return 0
        spec = self.fabric.spec
        return spec.startup_ns("mte") + spec.pieces_ns(num_pieces, cores)


class DMA:
    """An engine that moves any amount from memory to memory, without AIV cores or unified buffers.

    `kind` "dma" is asked by a CPU; "urma" by an AIV core directly (NPU-Direct URMA, XDS 3.3): a lower startup
    than DMA's, higher than MTE's, and `start` lets the core go on at once.
    """

    def __init__(self, fabric: Fabric, node: int, kind: Literal["dma", "urma"]) -> None:
        self.fabric, self.node, self.kind = fabric, node, kind
        self.place = Place.of(node, fabric.topology, fabric.spec)
        self.lane = kind.upper()
        self.busy_until = 0

    async def copy(self, pieces: Iterable[Copy], name: str = "copy", weight: float = 1.0) -> None:
        """Move the pieces; returns when the last byte is visible. A byte takes the time of `weight` bytes."""
        pieces = whole_copies(pieces)
        traffic = traffic_of(self.fabric, self.place, pieces)
        end = self._reserve(*traffic, len(pieces), name, weight=weight)
        await self.fabric.clock.sleep_until(end)
        move(self.fabric, pieces)

    def start(self, pieces: Iterable[Copy], name: str = "copy") -> Process:
        """Begin to move the pieces and return at once. Await the result for completion.

        The sources must not change before completion: bytes are read as they are then.
        """
        pieces = whole_copies(pieces)
        end = self._reserve(*traffic_of(self.fabric, self.place, pieces), len(pieces), name)

        async def complete() -> None:
            await self.fabric.clock.sleep_until(end)
            move(self.fabric, pieces)

        process = self.fabric.clock.spawn(complete(), name=f"{self.lane} of node {self.node}: {name}")
        assert isinstance(process, Process)
        return process

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
        """`copy` of many pieces, one after another, into consecutive bytes of the die's own memory.

        `copies` as for `MTE.gather`; `cores` AIVs ask the engine.
        """
        pieces = Gather(self.fabric, self.place, nodes, offsets, sizes, dst_offset)
        crossing = None if copies is None else (nodes, copies)
        end = self._reserve(pieces.loads, pieces.stores, len(nodes), name, cores, crossing)
        await self.fabric.clock.sleep_until(end)
        pieces.move()

    def _reserve(
        self,
        loads: Traffic,
        stores: Traffic,
        num_pieces: int,
        name: str,
        cores: int = 1,
        crossing: tuple[Integers, Integers] | None = None,
        weight: float = 1.0,
    ) -> int:
        fabric, spec = self.fabric, self.fabric.spec
        # Reading and writing overlap: the slower side is the time.
        link_ns = weight * max(
            spec.link_ns(loads.local, loads.near, loads.far),
            spec.link_ns(stores.local, stores.near, stores.far),
        )
        start = max(fabric.clock.now, self.busy_until)
        fixed = spec.startup_ns(self.kind) + spec.pieces_ns(num_pieces, cores)
        ready = start + fixed + max(loads.latency_ns, stores.latency_ns)
        end = ready + math.ceil(link_ns)
        if crossing is not None:
            end = max(end, fabric.ports.pull(self.node, *crossing, ready))
        self.busy_until = end
        fabric.trace.span(self.node, self.lane, name, start, end)
        return end


def traffic_of(fabric: Fabric, place: Place, pieces: list[Copy]) -> tuple[Traffic, Traffic]:
    """Check the bounds of every piece; what is read and what is written, by distance."""
    loads, stores = Traffic(place), Traffic(place)
    for src, dst, nbytes in pieces:
        fabric.memories[src.node].check(src.offset, nbytes)
        fabric.memories[dst.node].check(dst.offset, nbytes)
        loads.add(src.node, nbytes)
        stores.add(dst.node, nbytes)
    return loads, stores


def move(fabric: Fabric, pieces: list[Copy]) -> None:
    for src, dst, nbytes in pieces:
        data = fabric.memories.read(src, nbytes)
        fabric.memories[dst.node].write_checked(dst.offset, data)
