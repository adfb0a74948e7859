"""Fields of a pull-based exchange (`wire`), as kernels write and read them.

Where dies run in lockstep, kernels go over the memories of all of them and leave the bytes that the protocols
leave. The twins do that for one step after the other; what the first kernel posts, the second one reads. They
take addresses, and `s`, a named tuple of the sizes in the protocol's layout.
"""

from __future__ import annotations

from xdeepserve.comm.wire import FIELD
from xdeepserve.jit.compiling import part
from xdeepserve.jit.pointers import i64_flat

FIELD_NBYTES = FIELD.size
WRONG_EVENT, WRONG_COUNT, NO_ROOM, EMPTY_SLOT = 1, 2, 3, 4
FAULTS = {
    WRONG_EVENT: "finds another event's field",
    WRONG_COUNT: "is answered another number of rows than it sent",
    NO_ROOM: "has no room for the rows that its peers post",
    EMPTY_SLOT: "has got a row for a redundant slot that holds no expert, or half of one,",
}


@part
def post(address, event, pointer, count):
    """Write a field: event ID u64, pointer u64, token count u32, 12 spare bytes."""
    words = i64_flat(address, 4)
    words[0], words[1], words[2], words[3] = event, pointer, count, 0


@part
def field(address):
    """Event ID, pointer and token count of a field."""
    words = i64_flat(address, 3)
    return words[0], words[1], words[2] & 0xFFFFFFFF
