"""The model caching SDK: weights as blocks in the pool, read once from storage for all readers (CloudMatrix
4.4.3).

A model is a list of blocks under its name and version; the metadata service knows all models. A block's key
is a hash of name, version and number. Another version is therefore another model, and the blocks of an old
version age and are evicted. Blocks of a model are used together, so they are evicted together, too.

`query` counts the blocks of a model in DRAM and on volumes. `prefetch` brings missing blocks from storage,
and blocks from volumes to DRAM. `load` passes block after block to a function that puts it where it belongs.
If several readers ask for a block that is not in the pool, one reads it and the others wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from xdeepserve.ems.mp_client import MPClient
from xdeepserve.ems.mp_server import Lease
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.address_space import AddressSpace
from xdeepserve.hw.bucket import Bucket
from xdeepserve.hw.clock import Waiter, Waiting
from xdeepserve.hw.volume import Key

NAMESPACE = "models"

Read = Callable[[int], bytes]  # a block's bytes, from where the model is at home
Take = Callable[[int, Lease], Awaitable[None]]  # what is to be done with a block that is in DRAM


class ModelId(NamedTuple):
    """A model in a particular version."""

    name: str
    version: str


class Cached(NamedTuple):
    """Number of a model's blocks in DRAM, on volumes, and in all."""

    in_dram: int
    on_volumes: int
    total: int


class ModelCatalogue:
    """The metadata service: maps models to blocks, and knows which blocks are being read from storage."""

    def __init__(self) -> None:
        self._sizes: dict[ModelId, tuple[int, ...]] = {}
        self.coming: dict[Key, list[Waiter]] = {}  # with those who wait for it

    def register(self, model: ModelId, sizes: Sequence[int]) -> None:
        """Register a model's blocks by their sizes in bytes. Raises XDeepServeError if the version is known
        with others."""
        known = self._sizes.setdefault(model, tuple(sizes))
        if known != tuple(sizes):
            raise XDeepServeError(
                f"model {model.name}, version {model.version}, has {len(known)} blocks of {sum(known)} bytes "
                f"and not {len(sizes)} of {sum(sizes)}: another content needs another version"
            )

    def blocks(self, model: ModelId) -> list[tuple[Key, int]]:
        """Return keys and bytes of a model's blocks. Raises XDeepServeError if the model is not
        registered."""
        if model not in self._sizes:
            raise XDeepServeError(f"the memory pool knows no model {model.name}, version {model.version}")
        return [(self._key(model, number), nbytes) for number, nbytes in enumerate(self._sizes[model])]

    @staticmethod
    def _key(model: ModelId, number: int) -> Key:
        text = f"{len(model.name)} {model.name} {model.version} {number}"
        return Key(NAMESPACE, hashlib.blake2b(text.encode(), digest_size=16).digest())


class ModelCache:
    """An instance's access to the models in the pool. A byte takes the time of `weight` bytes."""

    def __init__(
        self,
        client: MPClient,
        catalogue: ModelCatalogue,
        memories: AddressSpace,
        bucket: Bucket,
        weight: float = 1.0,
    ) -> None:
        self.client, self.catalogue, self.memories, self.bucket = client, catalogue, memories, bucket
        self.weight = weight

    def query(self, model: ModelId) -> Cached:
        """Count a model's blocks in DRAM and on volumes, now."""
        keys = [key for key, _ in self.catalogue.blocks(model)]
        in_dram = sum(self.client.is_in_dram(key) for key in keys)
        return Cached(in_dram, sum(self.client.contains(key) for key in keys), len(keys))

    async def prefetch(self, model: ModelId, read: Read) -> None:
        """Bring a whole model to DRAM: a hint that it is about to be loaded. The caller need not wait for the
        result."""
        await self.client.ask()
        for number, (key, nbytes) in enumerate(self.catalogue.blocks(model)):
            lease = await self._find(key, nbytes, number, read)
            if lease is not None:
                self.client.release(lease)

    async def load(self, model: ModelId, read: Read, take: Take) -> list[int]:
        """Pass every block to `take`, in order, which fetches it from DRAM. Returns the blocks that must be
        fetched elsewhere: there was no room, or they were lost meanwhile."""
        await self.client.ask()
        without = []
        for number, (key, nbytes) in enumerate(self.catalogue.blocks(model)):
            lease = await self._find(key, nbytes, number, read)
            if lease is None:
                without.append(number)
                continue
            try:
                await take(number, lease)
            finally:
                is_sound = self.client.release(lease)
            if not is_sound:
                without.append(number)
        return without

    async def _find(self, key: Key, nbytes: int, number: int, read: Read) -> Lease | None:
        """Pin a block in DRAM; None if it cannot be had there."""
        for attempt in range(2):
            lease = self.client.pin(key)
            if lease is not None:
                await self.client.bring([lease], self.weight)
                if lease.address is not None:
                    return lease
                self.client.release(lease)
            if attempt:
                break
            await self._come(key, nbytes, number, read)
        return None

    async def _come(self, key: Key, nbytes: int, number: int, read: Read) -> None:
        """Bring a block from storage, or wait until another reader has."""
        coming, clock = self.catalogue.coming, self.client.clock
        if key in coming:
            waiter = clock.waiter(
                lambda: Waiting("load", number, "storage", "block", "in the pool", "coming")
            )
            coming[key].append(waiter)
            await clock.wait(waiter)
            return
        coming[key], lease = [], None
        try:
            lease = self.client.begin(key, nbytes)
            await self.bucket.read(nbytes, self.weight)
            if lease is not None:
                assert lease.address is not None
                self.memories.write(lease.address, read(number))
                self.client.end([lease], self.weight)
        finally:
            self.client.revoke([] if lease is None else [lease])  # unless it is there: who read may be gone
            for waiter in coming.pop(key):
                waiter.wake()
