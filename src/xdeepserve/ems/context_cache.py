"""The context caching SDK: blocks of KV, found again by the tokens before them (CloudMatrix 4.4.2).

The latents of a block depend only on the tokens up to its end. So a block's key is a hash of its tokens and
of the previous block's key. The chain begins with the *root*, a digest of everything that determines the
bits: weights, precision, layout of a block. Deployments with the same root read each other's blocks; a
deployment with another root cannot find them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from xdeepserve.ems.mp_client import MPClient
from xdeepserve.ems.mp_server import Lease
from xdeepserve.hw.volume import Key

BITS = 1
"""Version of the arithmetic, raised whenever a change alters a bit of any KV: blocks of older pools are then
misses."""


def root_of(
    weights: str, precision: str, layout: Sequence[tuple[str, int]], block_size: int, drafts: str
) -> bytes:
    """Compute the root, 16 bytes. `layout` is names and sizes of a block's parts; `drafts` describes what MTP
    adds to them."""
    parts = [f"bits {BITS}", weights, precision, f"{block_size}", drafts]
    parts += [f"{name} {nbytes}" for name, nbytes in layout]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).digest()


class ContextCache:
    """KV blocks of a model in a namespace, `block_size` tokens and `nbytes` bytes each."""

    def __init__(
        self,
        client: MPClient,
        namespace: str,
        root: bytes,
        block_size: int,
        nbytes: int,
        by_cards: bool = False,
    ) -> None:
        """Open the cache. `by_cards`: dies reach the pool's DRAM by VPC cards, not by their own DMA over
        UB."""
        self.client, self.namespace, self.root = client, namespace, root
        self.block_size, self.nbytes, self.by_cards = block_size, nbytes, by_cards

    def keys(self, tokens: Sequence[int], num_blocks: int | None = None) -> list[Key]:
        """Compute the keys of the full blocks of `tokens`, or of the first `num_blocks` blocks."""
        count = len(tokens) // self.block_size if num_blocks is None else num_blocks
        ids, digest, keys = np.asarray(tokens[: count * self.block_size], "<i8"), self.root, []
        for block in range(count):
            piece = ids[block * self.block_size : (block + 1) * self.block_size]
            digest = hashlib.blake2b(digest + piece.tobytes(), digest_size=16).digest()
            keys.append(Key(self.namespace, digest))
        return keys

    def pin(self, keys: Sequence[Key]) -> list[Lease]:
        """Pin consecutive blocks, up to the first that is missing."""
        leases = []
        for key in keys:
            lease = self.client.pin(key)
            if lease is None:
                break
            leases.append(lease)
        return leases

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark consecutive blocks as used. A block is useless without those before it, so the last is evicted
        first."""
        for key in reversed(keys):
            self.client.touch(key)

    def begin(self, key: Key) -> Lease | None:
        """Reserve a place for a block; None if the pool has the block already, or has no room."""
        return self.client.begin(key, self.nbytes)
