"""Models in the pool: versions, hints, one read from storage for all, blocks that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ems.tools import run
from xdeepserve.ems.memory_pool import MemoryPool
from xdeepserve.ems.model_cache import NAMESPACE, Cached, ModelCache, ModelCatalogue, ModelId
from xdeepserve.ems.mp_server import Lease
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.bucket import Bucket
from xdeepserve.hw.pod import Pod

SIZES = [30_000, 50_000, 8_000, 40_000]
MODEL = ModelId("m", "1")


class Models:
    """A pool, and instances that load models from it."""

    def __init__(self, path: Path, dram: int = 1 << 20) -> None:
        self.pod = Pod()
        self.pool = MemoryPool(self.pod, path, 2, dram, 8 << 20, {NAMESPACE: None})
        self.pool.open()
        self.pod.materialise()
        self.pool.start()
        self.bucket, self.catalogue = Bucket(self.pod.clock, self.pod.spec), ModelCatalogue()
        self.catalogue.register(MODEL, SIZES)
        self.reads: list[int] = []

    def instance(self) -> ModelCache:
        return ModelCache(self.pool.client(), self.catalogue, self.pod.memories, self.bucket)

    def read(self, number: int) -> bytes:
        self.reads.append(number)
        return bytes([number]) * SIZES[number]

    async def load(self, model: ModelId = MODEL) -> tuple[list[bytes], list[int]]:
        """Blocks that came from the pool, and numbers of those that did not."""
        found = []

        async def take(number: int, lease: Lease) -> None:
            assert lease.address is not None
            found.append(bytes(self.pod.memories.read(lease.address, lease.nbytes)))

        return found, await self.instance().load(model, self.read, take)


WHOLE = [bytes([number]) * nbytes for number, nbytes in enumerate(SIZES)]


def test_many_load_and_one_reads(tmp_path: Path) -> None:
    models = Models(tmp_path)

    async def all_at_once() -> list[tuple[list[bytes], list[int]]]:
        return await models.pod.clock.gather(*(models.load() for _ in range(5)))

    assert models.instance().query(MODEL) == Cached(0, 0, 4)
    assert run(models.pool, all_at_once()) == [(WHOLE, [])] * 5
    assert models.reads == [0, 1, 2, 3]
    assert models.bucket.nbytes == sum(SIZES)
    assert models.instance().query(MODEL) == Cached(4, 4, 4)
    models.pool.check_integrity()
    models.pool.close()
    again = Models(tmp_path)
    assert again.instance().query(MODEL) == Cached(0, 4, 4)
    run(again.pool, again.instance().prefetch(MODEL, again.read))
    assert again.instance().query(MODEL) == Cached(4, 4, 4)
    assert run(again.pool, again.load()) == (WHOLE, [])
    assert again.reads == []
    again.pool.close()


def test_another_version_is_another_model(tmp_path: Path) -> None:
    models = Models(tmp_path)
    run(models.pool, models.load())
    newer = ModelId("m", "2")
    with pytest.raises(XDeepServeError, match="knows no model m, version 2"):
        models.instance().query(newer)
    models.catalogue.register(newer, SIZES)
    assert models.instance().query(newer) == Cached(0, 0, 4)
    with pytest.raises(XDeepServeError, match="another content needs another version"):
        models.catalogue.register(MODEL, SIZES[:2])
    models.pool.close()


def test_blocks_without_room_come_from_elsewhere(tmp_path: Path) -> None:
    models = Models(tmp_path, dram=45_000)
    found, without = run(models.pool, models.load())
    assert without == [1]
    assert found == [WHOLE[0], *WHOLE[2:]]
    models.pool.check_integrity()
    models.pool.close()


def test_a_damaged_block_is_read_from_storage_again(tmp_path: Path) -> None:
    models = Models(tmp_path)
    run(models.pool, models.load())
    models.pool.close()
    for path in tmp_path.glob("*.sqlite"):
        data = bytearray(path.read_bytes())
        at = data.find(WHOLE[1][:2000])
        if at >= 0:
            data[at + 5] ^= 1
            path.write_bytes(data)
    again = Models(tmp_path)
    assert run(again.pool, again.load()) == (WHOLE, [])
    assert again.reads == [1]
    again.pool.close()


def test_who_goes_away_while_loading_leaves_nothing_behind(tmp_path: Path) -> None:
    models = Models(tmp_path)
    clock = models.pod.clock

    async def given_up(after_ns: int) -> None:
        async def take(number: int, lease: Lease) -> None:
            await clock.sleep(10**9)

        process = clock.spawn(models.instance().load(MODEL, models.read, take))
        await clock.sleep(after_ns)
        process.cancel()
        await clock.sleep(1)

    half_ns = round(0.5e9 * SIZES[0] / models.pod.spec.storage_bandwidth.value)
    run(models.pool, given_up(models.instance().client.message_ns + half_ns))
    assert models.bucket.nbytes == SIZES[0]
    assert models.reads == []
    run(models.pool, given_up(10**8))  # while it takes the first block
    assert models.reads == [0]
    assert not any(server.num_leases for server in models.pool.servers)
    assert run(models.pool, models.load()) == (WHOLE, [])
    models.pool.check_integrity()
    models.pool.close()
