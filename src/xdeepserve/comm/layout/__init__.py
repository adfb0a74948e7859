"""Where every byte of every protocol lies: one file for each protocol, and no offset computed elsewhere.

exchange     pull-based dispatch and combine (XDS 3.2)
fused        FusedDispatch and FusedCombine, which push (CM 4.2.1)
collective   all-gather, all-to-all, reduce-scatter, all-reduce, barrier
"""

from .collective import COLLECTIVE_FIELD, CollectiveLayout
from .exchange import (
    FIELD,
    FIELD_DTYPE,
    HEADER_DTYPE,
    ROW_ALIGNMENT,
    Field,
    Group,
    Layout,
)
from .fused import SLOT_DTYPE, FusedLayout

__all__ = [
    "COLLECTIVE_FIELD",
    "FIELD",
    "FIELD_DTYPE",
    "HEADER_DTYPE",
    "ROW_ALIGNMENT",
    "SLOT_DTYPE",
    "CollectiveLayout",
    "Field",
    "FusedLayout",
    "Group",
    "Layout",
]
