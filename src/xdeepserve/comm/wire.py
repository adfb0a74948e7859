"""One direction of a pull-based exchange: blocks that writers keep for readers, fields that tell of them.

    writer:  managed   blocks [readers]   rows for each reader, in the writer's own memory
    reader:  metadata  fields [writers]   one for each writer, written by that writer
             app       rows               where pulled rows land

A field (32 bytes, little endian):   event ID u64 | pointer u64 | token count u32 | 12 spare bytes
    The pointer is the offset, in its writer's memory, of the writer's block for the reader.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from xdeepserve.hw.memory import MemoryPlan

FIELD = struct.Struct("<QQI12x")
FIELD_DTYPE = np.dtype(
    {"names": ["event_id", "pointer", "num_tokens"], "formats": ["<u8", "<u8", "<u4"], "itemsize": 32}
)
ROW_ALIGNMENT = 32
Index = TypeVar("Index", int, npt.NDArray[np.int64])
"""A number of a reader or writer, or many at once."""


class Field(NamedTuple):
    """What one rank tells another: the operation's event ID, where its rows lie, and how many."""

    event_id: int
    pointer: int
    num_tokens: int


class Blocks(msgspec.Struct, frozen=True):
    """Sizes of one direction. Writers and readers must use equal ones; `name` is unique on a die."""

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
        """Offset in a writer's blocks of the one for a reader."""
        return reader * self.block_nbytes

    def first_row(self, reader: Index) -> Index:
        """Where a reader's block begins, in rows."""
        return reader * self.rows_per_block

    def field_offset(self, writer: Index) -> Index:
        """Offset in a reader's fields of a writer's."""
        return writer * FIELD.size

    def writer_at(self, offset: int) -> int:
        """Whose field the byte at an offset in a reader's fields belongs to."""
        return offset // FIELD.size

    def region(self, part: str) -> str:
        """Name of a region; part is fields, blocks or rows."""
        return f"{self.name}.{part}"

    def plan_writer(self, memory: MemoryPlan) -> None:
        """Reserve a writer's blocks."""
        memory.managed.alloc(self.region("blocks"), self.block_offset(self.num_readers))

    def plan_reader(self, memory: MemoryPlan) -> None:
        """Reserve a reader's fields and rows. OutOfMemoryError if the metadata area is too small."""
        memory.metadata.alloc(self.region("fields"), self.field_offset(self.num_writers))
        memory.app.alloc(self.region("rows"), self.max_rows * self.row_nbytes)


def padded(nbytes: int, alignment: int = ROW_ALIGNMENT) -> int:
    """Rounded up to a multiple: by default of the 32 bytes of a field."""
    return -(-nbytes // alignment) * alignment
