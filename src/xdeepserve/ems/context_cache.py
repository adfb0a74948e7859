"""The context caching SDK: blocks of KV, found again by the tokens before them (CloudMatrix 4.4.2).

The latents of a block follow from the tokens up to its end and from nothing else. So its key is a hash of its
tokens and of the key of the block before it; the first of the chain is hashed with the *root*, a digest of
everything that decides about the bits: weights, precision, what a block is made of. Who has the same root may
read what any deployment has written; who has another cannot find it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ..hw.volume import Key
from .mp_client import MPClient
from .mp_server import Lease

BITS = 1
"""Raised whenever a change of the arithmetic changes a bit of any KV: pools of before are then misses."""


def root_of(
    weights: str, precision: str, layout: Sequence[tuple[str, int]], block_size: int, drafts: str
) -> bytes:
    """16 bytes. `layout` is names and sizes of a block's parts; `drafts` what MTP adds to them."""
    parts = [f"bits {BITS}", weights, precision, f"{block_size}", drafts]
    parts += [f"{name} {nbytes}" for name, nbytes in layout]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).digest()


class ContextCache:
    """KV blocks of one model in one namespace, `block_size` tokens and `nbytes` bytes each."""

    def __init__(
        self,
        client: MPClient,
        namespace: str,
        root: bytes,
        block_size: int,
        nbytes: int,
        by_cards: bool = False,
    ) -> None:
        """`by_cards`: dies reach the pool's DRAM by VPC cards, not by their own DMA over UB."""
        self.client, self.namespace, self.root = client, namespace, root
        self.block_size, self.nbytes, self.by_cards = block_size, nbytes, by_cards

    def keys(self, tokens: Sequence[int], num_blocks: int | None = None) -> list[Key]:
        """Keys of the full blocks of `tokens`, or of the first of them."""
        count = len(tokens) // self.block_size if num_blocks is None else num_blocks
        ids, digest, keys = np.asarray(tokens[: count * self.block_size], "<i8"), self.root, []
        for block in range(count):
            piece = ids[block * self.block_size : (block + 1) * self.block_size]
            digest = hashlib.blake2b(digest + piece.tobytes(), digest_size=16).digest()
            keys.append(Key(self.namespace, digest))
        return keys

    def pin(self, keys: Sequence[Key]) -> list[Lease]:
        """Pin blocks that follow each other, as many as there are."""
        leases = []
        for key in keys:
            lease = self.client.pin(key)
            if lease is None:
                break
            leases.append(lease)
        return leases

    def touch(self, keys: Sequence[Key]) -> None:
        """Blocks that follow each other have been used. Each needs those before it: the last goes first."""
        for key in reversed(keys):
            self.client.touch(key)

    def begin(self, key: Key) -> Lease | None:
        """A place for a block; None if it is in the pool, or cannot be."""
        return self.client.begin(key, self.nbytes)
