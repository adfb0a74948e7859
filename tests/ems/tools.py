"""Tools of the tests of the memory pool: a pool, and clients that put and get values."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from xdeepserve.ems.memory_pool import MemoryPool
from xdeepserve.ems.mp_client import MPClient
from xdeepserve.ems.mp_server import Lease, MPServer
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.volume import Key

SIZE = 40_000


def make(
    path: Path, servers: int = 3, dram: int = 1 << 20, volume: int = 8 << 20, quota: int | None = None
) -> MemoryPool:
    pod = Pod()
    pool = MemoryPool(pod, path, servers, dram, volume, {"a": quota, "b": None})
    pool.open()
    pod.materialise()
    pool.start()
    return pool


def key(number: int, namespace: str = "a") -> Key:
    return Key(namespace, number.to_bytes(16, "big"))


def data(number: int, nbytes: int = SIZE) -> bytes:
    return number.to_bytes(4, "big") * (nbytes // 4)


def run(pool: MemoryPool, work: Coroutine[Any, Any, Any]) -> Any:
    async def main() -> Any:
        return await pool.pod.clock.spawn(work)

    return asyncio.run(main())


def write(pool: MemoryPool, lease: Lease, number: int) -> None:
    assert lease.address is not None
    pool.pod.memories.write(lease.address, data(number, lease.nbytes))


async def put(pool: MemoryPool, client: MPClient, numbers: list[int], namespace: str = "a") -> int:
    leases = []
    for number in numbers:
        lease = client.begin(key(number, namespace), SIZE)
        if lease is not None:
            write(pool, lease, number)
            leases.append(lease)
    return await client.commit(leases) if leases else 0


async def get(pool: MemoryPool, client: MPClient, number: int, namespace: str = "a") -> bytes | None:
    lease = client.pin(key(number, namespace))
    if lease is None:
        return None
    await client.bring([lease])
    found = None if lease.address is None else bytes(pool.pod.memories.read(lease.address, lease.nbytes))
    return found if client.release(lease) else None


def server_of(pool: MemoryPool, number: int) -> MPServer:
    return pool.controller.servers[pool.controller.view().owner(key(number))]
