"""A memory pool without room, to try eviction: whatever comes next, others go for it from both tiers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from ..hw.volume import Key
from .dram import HIGH
from .memory_pool import MemoryPool
from .mp_server import Lease, MPServer

NBYTES = 8192  # of each value that is in the way; as much as a slot of DRAM, so both tiers fill alike


def crowd(pool: MemoryPool, namespace: str) -> None:
    """Fill every server up to where eviction begins, with values that are older than those that it has. DRAM
    lags behind by what was on the volume alone: somebody writes so much there, and comes to no end."""
    for server in pool.servers:
        allocator, volume, before = server.dram.allocator, server.volume, [*server.volume.rows]
        mine = (key for key in _keys(namespace) if server.ring.owner(key) == server.name)
        while volume.nbytes.total() + NBYTES <= HIGH * server.volume_nbytes:
            server.end([_begun(server, next(mine))])
        while allocator.num_used + NBYTES <= HIGH * allocator.capacity:
            _begun(server, next(mine))
        for key in before:
            server.touch(key)


def _begun(server: MPServer, key: Key) -> Lease:
    lease = server.begin(key, NBYTES)
    assert lease is not None
    return lease


def _keys(namespace: str) -> Iterator[Key]:
    return (Key(namespace, number.to_bytes(16, "big")) for number in count())
