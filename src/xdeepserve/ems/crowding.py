"""A full memory pool, to try eviction: any new value evicts others from both tiers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from ..hw.volume import Key
from .dram import HIGH
from .memory_pool import MemoryPool
from .mp_server import Lease, MPServer

NBYTES = 8192  # of each value that is in the way; as much as a slot of DRAM, so both tiers fill alike


def crowd(pool: MemoryPool, namespace: str) -> None:
    """Fill every server up to the point of eviction, with values older than the server's own.

    DRAM holds fewer values than the volume. The difference is filled by a writer that begins values and never
    ends them.
    """
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
