"""A direction of a pull-based exchange: writers keep blocks for readers, and fields tell of them.

    writer:  managed   blocks [readers]   rows for each reader, in the writer's own memory
    reader:  metadata  fields [writers]   one for each writer, written by that writer
             app       rows               where pulled rows land

A field (32 bytes, little endian):   event ID u64 | pointer u64 | token count u32 | 12 spare bytes
    The pointer is the offset, in its writer's memory, of the writer's block for the reader.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.comm.cells import Cells
from xdeepserve.hw.memory import MemoryPlan

FIELD = struct.Struct("<QQI12x")
FIELD_DTYPE = np.dtype(
    {"names": ["event_id", "pointer", "num_tokens"], "formats": ["<u8", "<u8", "<u4"], "itemsize": 32}
)
ROW_ALIGNMENT = 32
Index = TypeVar("Index", int, npt.NDArray[np.int64])
"""A number of a reader or writer, or many at once."""


class Field(NamedTuple):
    """Message of a rank in a field: the operation's event ID, the pointer to its rows, and their number."""

    event_id: int
    pointer: int
    num_tokens: int


class Blocks(msgspec.Struct, frozen=True):
    """Sizes of a direction. Writers and readers must use equal ones; `name` is unique on a die."""

    name: str
    num_writers: int
    num_readers: int
    rows_per_block: int
    row_nbytes: int
    max_rows: int
    """Most rows that a reader can pull in one operation."""

    @property
    def block_nbytes(self) -> int:
        return self.rows_per_block * self.row_nbytes

    def block_offset(self, reader: Index) -> Index:
        """Return the offset, in a writer's blocks, of the block for a reader."""
        return reader * self.block_nbytes

    def first_row(self, reader: Index) -> Index:
        """Return the number of the first row of a reader's block."""
        return reader * self.rows_per_block

    def field_offset(self, writer: Index) -> Index:
        """Return the offset, in a reader's fields, of a writer's field."""
        return writer * FIELD.size

    def writer_at(self, offset: int) -> int:
        """Return the writer of the field with the byte at an offset in a reader's fields."""
        return offset // FIELD.size

    def region(self, part: str) -> str:
        """Name of a region; part is fields, blocks or rows."""
        return f"{self.name}.{part}"

    def cells(self, row: np.dtype[Any], reader: str = "reader") -> dict[str, Cells]:
        """Map the regions of both ends to cells with rows of this type; `reader` is what its writers call
        their peers."""
        return {
            self.region("fields"): Cells(FIELD_DTYPE, (("peer", self.num_writers),)),
            self.region("blocks"): Cells(row, ((reader, self.num_readers), ("row", self.rows_per_block))),
            self.region("rows"): Cells(row, (("row", self.max_rows),)),
        }

    def plan_writer(self, memory: MemoryPlan) -> None:
        """Reserve the blocks of a writer."""
        memory.managed.alloc(self.region("blocks"), self.block_offset(self.num_readers))

    def plan_reader(self, memory: MemoryPlan) -> None:
        """Reserve a reader's fields and rows. Raises OutOfMemoryError if the metadata area is too small."""
        memory.metadata.alloc(self.region("fields"), self.field_offset(self.num_writers))
        memory.app.alloc(self.region("rows"), self.max_rows * self.row_nbytes)


def padded(nbytes: int, alignment: int = ROW_ALIGNMENT) -> int:
    """Round up to a multiple: by default of a field's 32 bytes."""
    return -(-nbytes // alignment) * alignment
