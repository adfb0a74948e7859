"""A TE's weights by way of the memory pool: the dies' arrays, as blocks shared by all TEs of the same shape.

A block is a stretch of an array that some dies hold alike. It is read from storage once and stored once, and
each of these dies copies it from DRAM by its own DMA. The version of the model is a digest of the checkpoint
and of the dies' arrays, so another shape, precision or checkpoint is another model.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from xdeepserve.ems.model_cache import ModelCache, ModelId
from xdeepserve.ems.mp_server import Lease
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.loading import Holder, Piece, own_arrays, read_weights
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.hw.engines import Copy
from xdeepserve.model.sharding import WHOLE
from xdeepserve.model.weights import is_routed

BLOCK_NBYTES = 1 << 20


class WeightBlock(NamedTuple):
    """A stretch of an array, and the dies that hold it."""

    name: str
    offset: int
    nbytes: int
    holders: list[tuple[int, Holder]]


class PoolWeights:
    """Weights of a task executor (TE), in the pool or on their way through it.

    `done` counts blocks that have come.
    """

    def __init__(self, te: TEPlan, cache: ModelCache, digest: str) -> None:
        self.te, self.cache, self.done, self._is_read = te, cache, 0, False
        sha = hashlib.blake2b(f"{digest} {te.recipe}".encode(), digest_size=16)
        holders: dict[tuple[Piece, int], list[tuple[int, Holder]]] = {}
        for die, mem in te.all_memories:
            shard = mem.shard if isinstance(mem, DieMemory) else WHOLE
            for name, nbytes in own_arrays(mem):
                experts = tuple(mem.held) if is_routed(name) else ()
                piece = Piece(name, experts, shard.of(name) if shard is not WHOLE else WHOLE)
                holders.setdefault((piece, nbytes), []).append((die, mem))
        self.blocks = []
        for (piece, nbytes), dies in holders.items():
            sha.update(f"{piece} {nbytes} {dies[0][1].specs[piece.name]}".encode())
            for offset in range(0, nbytes, BLOCK_NBYTES):
                size = min(BLOCK_NBYTES, nbytes - offset)
                self.blocks.append(WeightBlock(piece.name, offset, size, dies))
        self.model = ModelId(te.checkpoint.name, sha.hexdigest())
        cache.catalogue.register(self.model, [block.nbytes for block in self.blocks])

    @property
    def is_complete(self) -> bool:
        """Whether the pool has all blocks on its volumes."""
        cached = self.cache.query(self.model)
        return cached.on_volumes == cached.total

    @property
    def share(self) -> float:
        """Share of loaded blocks, 0 to 1."""
        return self.done / max(1, len(self.blocks))

    async def load(self) -> None:
        """Bring every block to the dies: from the pool, or from storage by way of the pool."""
        without = await self.cache.load(self.model, self._read, self._take)
        if without:
            self._is_read = False  # where a block was lost while dies copied it, they may have anything
            self._fill()
        for number in without:
            await self.cache.bucket.read(self.blocks[number].nbytes)

    async def _take(self, number: int, lease: Lease) -> None:
        """Copy a block to each die that holds it."""
        block, pod = self.blocks[number], self.te.pod
        assert lease.address is not None
        pieces = [
            (
                die,
                Copy(
                    lease.address,
                    mem.workspace.address(f"weights/{block.name}").plus(block.offset),
                    lease.nbytes,
                ),
            )
            for die, mem in block.holders
        ]
        await pod.clock.gather(*(pod.dies[die].dma.copy([piece], name="weights") for die, piece in pieces))
        self.done += 1

    def _read(self, number: int) -> bytes:
        """Read a block's bytes from storage."""
        self._fill()
        block = self.blocks[number]
        _, mem = block.holders[0]
        address = mem.workspace.address(f"weights/{block.name}").plus(block.offset)
        return bytes(self.te.pod.memories.read(address, block.nbytes))

    def _fill(self) -> None:
        """Read the checkpoint, once, straight into the dies' memories. That moves real bytes only; virtual
        time passes in `load`."""
        if not self._is_read:
            self._is_read = True
            for _ in read_weights([self.te]):
                pass
