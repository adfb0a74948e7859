"""Every offset and size of the protocols: fields, blocks, rows, rings. One file a protocol, no I/O.

A *field* is 32 bytes of metadata that one rank writes into another's memory. A *block* or *ring* is managed
data that a rank keeps for one peer.
"""

from .blocks import FIELD, FIELD_DTYPE, ROW_ALIGNMENT, Blocks, Field, padded
from .board import BoardLayout
from .collective import COLLECTIVE_FIELD, CollectiveLayout
from .exchange import HEADER_DTYPE, Group, Layout
from .fused import SLOT_DTYPE, FusedLayout

__all__ = [
    "COLLECTIVE_FIELD",
    "FIELD",
    "FIELD_DTYPE",
    "HEADER_DTYPE",
    "ROW_ALIGNMENT",
    "SLOT_DTYPE",
    "Blocks",
    "BoardLayout",
    "CollectiveLayout",
    "Field",
    "FusedLayout",
    "Group",
    "Layout",
    "padded",
]
