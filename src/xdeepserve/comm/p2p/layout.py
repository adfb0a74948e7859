"""Layout of fields and ring buffers for send and receive (XDS 3.1).

On each rank, with R ranks and C AIV cores:

    metadata   tails [R, C] | acks [R, C]   one field per peer, AIV core and direction, written by the peer
    managed    rings [R]                    one per peer, of num_slots slots, written by the peer

A field (32 bytes, little endian):
    event ID u64 | chunk ID u64 | pointer u64 | message bytes u32 | AIV cores u16 | mode u16

A message is cut into chunks of a slot each, the last one perhaps shorter; an empty message has one empty
chunk. Chunk i of a message goes through core i mod n, and into slot (position of the message + i) mod
num_slots; positions count a ring's chunks for ever. In a tail field, chunk ID is the number of chunks up to
and with the last that this core has written, and pointer the ring position behind it; in an ack field, the
same of what the receiver has taken out. In zero-copy mode there is one chunk, and pointer is where it lies in
the sender's memory; a message of pieces tells where the first one lies.

A die may have several such sets of fields and rings, one behind the other in each region. A set is for one
group of ranks, and its number on each die is its place there.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import msgspec
import numpy as np

from xdeepserve.comm.cells import Cells
from xdeepserve.comm.checks import check_count
from xdeepserve.comm.wire import ROW_ALIGNMENT
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.memory import MemoryPlan
from xdeepserve.hw.spec import Spec

RING_FIELD = struct.Struct("<QQQIHH")
RING_FIELD_DTYPE = np.dtype(
    [
        ("event_id", "<u8"),
        ("chunk_id", "<u8"),
        ("pointer", "<u8"),
        ("nbytes", "<u4"),
        ("num_cores", "<u2"),
        ("mode", "<u2"),
    ]
)
MAX_MESSAGE = 2**32 - 1
SPEC = Spec()


class Mode(enum.IntEnum):
    RING = 0
    ZERO_COPY = 1


class RingField(NamedTuple):
    """Field of send and receive: the latest word of a peer's core."""

    event_id: int
    chunk_id: int
    pointer: int
    nbytes: int
    num_cores: int
    mode: int

    @classmethod
    def unpack_all(cls, raw: bytes | memoryview) -> list[RingField]:
        """Unpack fields from memory, where they lie side by side."""
        return [cls(*values) for values in RING_FIELD.iter_unpack(raw)]


def last_chunks(base: int, first: int, stop: int, num_cores: int) -> list[tuple[int, int, int]]:
    """Compute the fields after a message's chunks [first, stop), with chunk i through core i mod num_cores.
    Returns (core, chunk ID, pointer) of each core concerned, cores ascending, for a message at ring position
    `base`."""
    chunks = range(max(first, stop - num_cores), stop)
    return sorted((chunk % num_cores, chunk + 1, base + chunk + 1) for chunk in chunks)


class RingLayout(msgspec.Struct, frozen=True):
    """Sizes (bytes) of rings and fields.

    All ranks of a group must use equal layouts; `name` keeps several on one die apart.

    The geometry is by default that of the parameter table, `hw.spec`. `num_slots` bounds the bytes under way:
    a ring that is too small for the round trip slows a transfer down. In runs that only take time, each byte
    of the app area stands for `weight` bytes: messages have the usual fields and chunks, and rings are empty.
    Without `has_rings` there are none either: all messages are zero copy.
    """

    num_ranks: int
    num_cores: int = 48
    slot_nbytes: int = int(SPEC.ring_slot.value)
    num_slots: int = int(SPEC.ring_slots.value)
    name: str = "p2p"
    weight: float = 1.0
    has_rings: bool = True

    def __post_init__(self) -> None:
        for field in ("num_ranks", "num_cores", "slot_nbytes", "num_slots"):
            check_count("ring layout", field, getattr(self, field))
        if self.slot_nbytes % ROW_ALIGNMENT:
            raise DeploymentError(
                f"ring layout: slot_nbytes must be a multiple of {ROW_ALIGNMENT}, not {self.slot_nbytes}"
            )

    @property
    def ring_nbytes(self) -> int:
        return self.num_slots * self.slot_nbytes

    def num_chunks(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self.slot_nbytes))

    def region(self, part: str) -> str:
        """Name of a region; part is tails, acks or rings."""
        return f"{self.name}.{part}"

    def plan(self, memory: MemoryPlan, num_sets: int = 1) -> None:
        """Reserve a rank's regions, for so many sets of fields and rings.

        Raises OutOfMemoryError if the metadata area cannot take the fields.
        """
        for part, nbytes in self.region_nbytes.items():
            area = memory.managed if part == "rings" else memory.metadata
            area.alloc(self.region(part), num_sets * nbytes)

    @property
    def region_nbytes(self) -> dict[str, int]:
        """Sizes (bytes) of a set's share of the regions, by part."""
        fields = self.num_ranks * self.num_cores * RING_FIELD.size
        rings = self.num_ranks * self.ring_nbytes if self.has_bytes and self.has_rings else 0
        return {"tails": fields, "acks": fields, "rings": rings}

    def cells(self) -> dict[str, Cells]:
        """Map the regions of one set to their cells: fields of both directions, and bytes."""
        fields = Cells(RING_FIELD_DTYPE, (("peer", self.num_ranks), ("core", self.num_cores)))
        dims = (("peer", self.num_ranks), ("slot", self.num_slots), ("byte", self.slot_nbytes))
        rings = Cells(np.dtype(np.uint8), dims)
        return {self.region("tails"): fields, self.region("acks"): fields, self.region("rings"): rings}

    @property
    def has_bytes(self) -> bool:
        """Whether bytes really go through the rings."""
        return self.weight == 1.0

    def field(self, peer: int, core: int) -> int:
        """Return the offset of a field in the tails or acks."""
        return (peer * self.num_cores + core) * RING_FIELD.size

    def slots(self, peer: int, position: int, nbytes: int) -> list[tuple[int, int]]:
        """Return the pieces (offset in the rings, size) that hold `nbytes` from a ring position on: one, or
        two at the wrap."""
        start = position % self.num_slots * self.slot_nbytes
        first = min(nbytes, self.ring_nbytes - start)
        base = peer * self.ring_nbytes
        pieces = [(base + start, first)]
        if nbytes > first:
            pieces.append((base, nbytes - first))
        return pieces
