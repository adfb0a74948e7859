"""Fields of a pull-based exchange (`wire`), as kernels write and read them.

Where dies run in lockstep, kernels go over the memories of all of them and leave the bytes that the protocols
leave. The twins do that for one step after the other; what the first kernel posts, the second one reads. They
take addresses, and `s`, a named tuple of the sizes in the protocol's layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xdeepserve.comm.wire import FIELD
from xdeepserve.jit.compiling import array_part, part
from xdeepserve.jit.pointers import i64_flat, u8_flat

FIELD_NBYTES = FIELD.size
NEIGHBOURS = 8  # dies, whose fields fill four cache lines
WRONG_EVENT, WRONG_COUNT, NO_ROOM, EMPTY_SLOT, WRONG_TOKENS, LOST_ANSWER = range(1, 7)
FAULTS = {
    WRONG_EVENT: "finds another event's field",
    WRONG_COUNT: "is answered another number of rows than it sent",
    NO_ROOM: "has no room for the rows that its peers post",
    EMPTY_SLOT: "has got a row for a redundant slot that holds no expert, or half of one,",
    WRONG_TOKENS: "has got messages for other experts than its peers' flags say",
    LOST_ANSWER: "finds a token that not all of its experts have answered",
}


class Tokens(NamedTuple):
    """Addresses of tokens on a die: for experts (int32), scales (float32) and payloads the first one's
    address and the step to the next (bytes)."""

    experts: Any
    experts_step: Any
    scales: Any
    scales_step: Any
    payloads: Any
    payloads_step: Any


@part
def _block_size(num, total):
    """Return a block size of at most NEIGHBOURS dies, so that each of `num` threads has as many blocks, or
    one less."""
    rounds = -(-total // (num * NEIGHBOURS))
    return -(-total // (num * rounds))


@array_part
def blocks_of(worker, num, total):
    """Return begin and end, int64 [N, 2], of each block of neighbouring dies of a thread, among `total` >= 1
    dies.

    Fields of neighbours share cache lines at every peer. A thread that posts them together fetches each line
    once, and no two threads want the same one.
    """
    size = _block_size(num, total)
    begins = np.arange(worker * size, total, num * size)
    return np.stack((begins, np.minimum(begins + size, total)), axis=1)


@array_part
def dies_of(worker, num, total):
    """List the dies in a thread's blocks, in order."""
    dies = np.arange(total)
    return dies[dies // _block_size(num, total) % num == worker]


@part
def copy_payload(target, source, nbytes):
    """Copy bytes, any number, between addresses that do not overlap."""
    to, of = u8_flat(target, nbytes), u8_flat(source, nbytes)
    for i in range(nbytes):
        to[i] = of[i]


@part
def post(address, event, pointer, count):
    """Write a field: event ID u64, pointer u64, token count u32, 12 spare bytes."""
    words = i64_flat(address, 4)
    words[0], words[1], words[2], words[3] = event, pointer, count, 0


@part
def field(address):
    """Read a field: return event ID, pointer and token count."""
    words = i64_flat(address, 3)
    return words[0], words[1], words[2] & 0xFFFFFFFF
