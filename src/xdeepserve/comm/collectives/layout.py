"""Every offset and size of the collectives: fields, staging, results.

On each rank, for R ranks and at most M bytes that a rank contributes to, or gets from, one collective:

    metadata   fields [2][R]      one 32-byte field a peer, in two sets, written by that peer
    managed    staging [2] x M    what a rank contributes, pulled by its peers
    app        pulled             where pulled pieces land
               result x M         what a reduction leaves

A field (32 bytes, little endian):
    event ID u64 | pointer u64 | size u64 | kind u8 | type u8 | reduction u8 | axes u8 | shape u32

    The pointer is the offset, in its writer's memory, of what the reader is to pull; kind is the collective;
    type and reduction are the places of both in `reduction.TYPES` and `reduction.REDUCTIONS`; axes is the
    number and shape the CRC-32, each as u64, of the lengths of the array's axes, or in all-to-all of a row's;
    in a broadcast the root's rank comes before them.

Every collective is made of *rounds*, each a barrier: stage, post to all, wait for all, pull. Rounds use the
two sets in turn, and two sets are enough: a rank that begins round n+2 has completed n+1, so all had posted
n+1, so all had completed n, and nobody still pulls, or has yet to read, what n+2 overwrites.
"""

from __future__ import annotations

import msgspec
import numpy as np

from xdeepserve.comm.board import BoardLayout
from xdeepserve.comm.cells import Cells
from xdeepserve.comm.checks import check_count
from xdeepserve.hw.memory import MemoryPlan

COLLECTIVE_FIELD = np.dtype(
    {
        "names": ["event_id", "pointer", "nbytes", "kind", "type", "reduction", "axes", "shape"],
        "formats": ["<u8", "<u8", "<u8", "u1", "u1", "u1", "u1", "<u4"],
        "itemsize": 32,
    }
)
STAGING_ALIGNMENT = 64


class CollectiveLayout(msgspec.Struct, frozen=True):
    """Sizes (bytes) of collectives; equal on all ranks. A group may have fewer ranks than `num_ranks`."""

    num_ranks: int
    max_bytes: int
    name: str = "collectives"

    def __post_init__(self) -> None:
        for field in ("num_ranks", "max_bytes"):
            check_count("collective layout", field, getattr(self, field))

    @property
    def staging_nbytes(self) -> int:
        """Size (bytes) of each of the two staging buffers."""
        return -(-self.max_bytes // STAGING_ALIGNMENT) * STAGING_ALIGNMENT

    @property
    def pulled_nbytes(self) -> int:
        """Size (bytes) of the pulled pieces. Ranks pull equal segments of a reduction, with up to R - 1
        surplus elements at the end."""
        return self.staging_nbytes + 8 * self.num_ranks

    @property
    def board(self) -> BoardLayout:
        """Layout of the board of fields."""
        return BoardLayout(COLLECTIVE_FIELD, self.num_ranks)

    def staging_offset(self, turn: int) -> int:
        """Offset in the staging region of the buffer that the turn-th round uses."""
        return turn % 2 * self.staging_nbytes

    def plan(self, memory: MemoryPlan) -> None:
        """Reserve a rank's regions. Raises OutOfMemoryError if the metadata area cannot take the fields."""
        memory.metadata.alloc(self.region("fields"), self.board.nbytes)
        memory.managed.alloc(self.region("staging"), 2 * self.staging_nbytes)
        memory.app.alloc(self.region("pulled"), self.pulled_nbytes)
        memory.app.alloc(self.region("result"), self.staging_nbytes)

    def region(self, part: str) -> str:
        """Name of a region: fields, staging, pulled or result."""
        return f"{self.name}.{part}"

    def cells(self) -> dict[str, Cells]:
        """Map the regions to their cells: fields, and bytes."""
        byte, staging = np.dtype(np.uint8), self.staging_nbytes
        return {
            self.region("fields"): Cells(COLLECTIVE_FIELD, (("set", 2), ("peer", self.num_ranks))),
            self.region("staging"): Cells(byte, (("set", 2), ("byte", staging))),
            self.region("pulled"): Cells(byte, (("byte", self.pulled_nbytes),)),
            self.region("result"): Cells(byte, (("byte", staging),)),
        }
