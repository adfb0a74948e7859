"""A memory pool without room: whatever is put there next has others evicted, from DRAM and from volumes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from xdeepserve.ems.dram import HIGH
from xdeepserve.ems.memory_pool import MemoryPool
from xdeepserve.ems.mp_server import Lease, MPServer
from xdeepserve.hw.volume import Key

NBYTES = 8192  # of each value that is in the way; as much as a slot of DRAM, so both tiers fill alike


def crowd(pool: MemoryPool, namespace: str) -> None:
    """Fill every server up to where eviction begins. DRAM lags behind by what the volume had before: so
    much is given to somebody who writes there, and does not come to an end."""
    for server in pool.servers:
        mine = (key for key in _keys(namespace) if server.ring.owner(key) == server.name)
        allocator, volume = server.dram.allocator, server.volume
        while volume.nbytes.total() + NBYTES <= HIGH * server.volume_nbytes:
            server.end([_begun(server, next(mine))])
        while allocator.num_used + NBYTES <= HIGH * allocator.capacity:
            _begun(server, next(mine))


def _begun(server: MPServer, key: Key) -> Lease:
    lease = server.begin(key, NBYTES)
    assert lease is not None
    return lease


def _keys(namespace: str) -> Iterator[Key]:
    return (Key(namespace, number.to_bytes(16, "big")) for number in count())
