"""Common parts of the engines for moving bytes between memories (MTE2 and MTE3, DMA, URMA).

Either end may be another node's memory (global shared memory). All operations are batched: one await moves
many pieces for startup + issue of the pieces + bytes, and is one event of the clock. Bytes are read, and
become visible at the destination, at the completion time, in the order of the pieces; operations of one
engine complete in the order of their calls. So a flag that is stored with or after its data by the same
engine is never seen before them; two engines promise each other nothing.

Bytes are bound by the issuing die's port. Transfers of DMA and URMA, and the copies of an exchange, are also
bound by the port at the far end, which others may be using (`hw.ports`); loads and stores of cores are not. A
kernel's accesses after its first one ("is_running") have no startup, and their issue hides behind their
bytes. Sources: XDS 2.2, 3.1.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from operator import index
from typing import NamedTuple, TypeVar

import numpy as np

from ..errors import AddressError, DriverReport, GlitchError, IntegrityError
from .address_space import AddressSpace
from .clock import Clock
from .fault_kinds import Moments
from .faulty_links import FaultyLinks
from .memory import Address, Bytes
from .ports import Ports
from .spec import Spec
from .topology import Plane, Topology
from .trace import Trace
from .traffic import Integers, Place, Traffic

# Checksums over payloads that engines and network cards bring from one node to another.
#
# The sender's is compared with that of what arrives, before a byte of it is written: what was damaged on the
# way is refused, not computed with. Both ends read the payload once more for it, side by side, which takes
# the time of its bytes in HBM.
#
# Covered: KV on its way from prefill to decode, blocks between dies and DRAM (the memory pool and a group's
# own), weights and replicas; and what kernels gather and push, the tokens of exchanges and their answers:
# there damage is an error code of the die that finds it, and the step is run again. Not covered: fields and
# flags, which protocols check by themselves, and messages between hosts. Values on volumes have digests of
# their own.


class Checksums:
    """Compares payloads by checksum before and after a transfer, if switched on; by default it is off."""

    def __init__(self) -> None:
        self.is_on = False

    def time_ns(self, nbytes: float, spec: Spec) -> int:
        """Return the time (ns) for both ends to read a payload for its checksums; 0 if they are off."""
        return math.ceil(spec.hbm_ns(nbytes)) if self.is_on else 0

    def check(self, sent: Bytes, arrived: Bytes, src: Address, dst: Address) -> None:
        """Compare checksums of a payload. Raises IntegrityError if they differ."""
        if not self.is_on or src.node == dst.node or arrived is sent:
            return
        expected, seen = zlib.crc32(sent), zlib.crc32(arrived)
        if expected != seen:
            raise IntegrityError(
                f"{len(sent)} bytes from node {src.node} to node {dst.node} are not those that were sent: "
                f"checksum {expected:#010x} became {seen:#010x}"
            )


T = TypeVar("T")


class Copy(NamedTuple):
    """A piece of a batch: `nbytes` from `src` to `dst`."""

    src: Address
    dst: Address
    nbytes: int


def whole_copies(pieces: Iterable[Copy]) -> list[Copy]:
    """Convert pieces to Python's integers, whose sums do not wrap around. Raises AddressError for a
    non-integer."""
    try:
        return [
            Copy(Address(index(a), index(b)), Address(index(c), index(d)), index(n))
            for (a, b), (c, d), n in pieces
        ]
    except TypeError as error:
        raise AddressError(f"a copy is two addresses and a size, in whole numbers: {error}") from None


def whole_pieces(pieces: Iterable[tuple[Address, T]]) -> list[tuple[Address, T]]:
    """Convert addresses to Python's integers, keeping what belongs to each. Raises AddressError for a
    non-integer."""
    try:
        return [(Address(index(node), index(offset)), what) for (node, offset), what in pieces]
    except TypeError as error:
        raise AddressError(f"a piece has an address in whole numbers: {error}") from None


class Fabric(NamedTuple):
    """Parts of a pod shared by all engines."""

    clock: Clock
    memories: AddressSpace
    topology: Topology
    spec: Spec
    trace: Trace
    ports: Ports
    links: FaultyLinks
    moments: Moments
    checksums: Checksums
    on_report: dict[object, Callable[[DriverReport], None]]  # by listener

    def report(self, report: DriverReport) -> None:
        """Pass a report by the driver of a die on to listeners, at once."""
        for tell in list(self.on_report.values()):
            tell(report)


class Gather:
    """Transfer of many pieces from any memories to consecutive bytes of a die's own.

    Bounds are checked on construction.
    """

    def __init__(
        self,
        fabric: Fabric,
        place: Place,
        nodes: Integers,
        offsets: Integers,
        sizes: Integers,
        dst_offset: int,
    ) -> None:
        self.fabric, self.links = fabric, fabric.links
        self.memories, self.target = fabric.memories, fabric.memories[place.node]
        nodes, offsets, sizes = (np.asarray(x, np.int64) for x in (nodes, offsets, sizes))
        dst_offset = index(dst_offset)
        self.nodes, self.offsets, self.sizes, self.dst_offset = nodes, offsets, sizes, dst_offset
        self.nbytes = int(sizes.sum())
        self.memories.check_many(nodes, offsets, sizes)
        self.target.check(dst_offset, self.nbytes)
        self.loads, self.stores = Traffic(place), Traffic(place, self.nbytes)
        self.loads.add_many(nodes, sizes)
        if fabric.trace.is_on:
            for node, nbytes in zip(nodes.tolist(), sizes.tolist(), strict=True):
                fabric.trace.move(node, place.node, nbytes)

    def move(self) -> None:
        """Move the bytes. Raises GlitchError, before a byte is written, if checksums show damage on the
        way."""
        target = self.target.read(self.dst_offset, self.nbytes)
        if self.links and (damaged := self._damaged()):
            target[:] = damaged
            self.target.notify(self.dst_offset, self.nbytes)
            return
        self.memories.gather(self.nodes, self.offsets, self.sizes, target)
        self.target.notify(self.dst_offset, self.nbytes)

    def _damaged(self) -> bytes:
        """Return the arriving bytes if they differ from those sent, else b""."""
        here, arrived, is_damaged = Address(self.target.node, 0), [], False
        places = zip(self.nodes.tolist(), self.offsets.tolist(), self.sizes.tolist(), strict=True)
        for node, offset, nbytes in places:
            src = Address(node, offset)
            sent = self.memories.read(src, nbytes)
            arrived.append(carried(self.fabric, Plane.UB, src, here, sent, self.target.node))
            is_damaged |= arrived[-1] is not sent
        return b"".join(arrived) if is_damaged else b""


def carried(
    fabric: Fabric, plane: Plane, src: Address, dst: Address, sent: Bytes, die: int | None = None
) -> Bytes:
    """Return the bytes of a payload after its way over a plane.

    Raises IntegrityError if checksums show damage. Where a kernel of `die` moves the payload, GlitchError
    with a link's code instead, so that the step is run again.
    """
    if src.node == dst.node or not fabric.links:
        return sent
    arrived = fabric.links.carry(plane, src.node, dst.node, sent)
    try:
        fabric.checksums.check(sent, arrived, src, dst)
    except IntegrityError as error:
        if die is None:
            raise
        raise GlitchError(die, "link-error", str(error)) from None
    return arrived


class Targets:
    """Places for pieces of `size` bytes, one at each of nodes and offsets [N].

    Bounds are checked on construction, so repeated stores need no check.
    """

    def __init__(self, fabric: Fabric, place: Place, nodes: Integers, offsets: Integers, size: int) -> None:
        nodes, offsets = np.asarray(nodes, np.int64), np.asarray(offsets, np.int64)
        fabric.memories.check_many(nodes, offsets, size)
        self.nodes, self.offsets, self.size = nodes.tolist(), offsets.tolist(), size
        self._place, self._known = place, None if place.links else self._traffic(place)

    def _traffic(self, place: Place) -> Traffic:
        traffic = Traffic(place)
        traffic.add_many(np.asarray(self.nodes, np.int64), self.size)
        return traffic

    @property
    def traffic(self) -> Traffic:
        """Traffic of a store to all targets."""
        if self._known is None or self._place.links:
            return self._traffic(self._place)
        return self._known


def traffic_of(
    fabric: Fabric, place: Place, pieces: list[Copy], is_checked: bool = True
) -> tuple[Traffic, Traffic]:
    """Check the bounds of every piece, unless bytes will not be moved. Returns the read and written traffic,
    by distance."""
    loads, stores = Traffic(place), Traffic(place)
    for src, dst, nbytes in pieces:
        if is_checked:
            fabric.memories[src.node].check(src.offset, nbytes)
            fabric.memories[dst.node].check(dst.offset, nbytes)
        loads.add(src.node, nbytes)
        stores.add(dst.node, nbytes)
    if fabric.trace.is_on:
        for src, dst, nbytes in pieces:
            fabric.trace.move(src.node, dst.node, nbytes)
    return loads, stores


def move(fabric: Fabric, pieces: list[Copy], plane: Plane = Plane.UB, die: int | None = None) -> None:
    """Move payloads over a plane. `die` names the die whose kernel moves them; None if no kernel does."""
    for src, dst, nbytes in pieces:
        arrived = carried(fabric, plane, src, dst, fabric.memories.read(src, nbytes), die)
        fabric.memories[dst.node].write_checked(dst.offset, arrived)
