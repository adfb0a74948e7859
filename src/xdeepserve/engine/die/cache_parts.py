"""What the KV cache of a layer is made of, by the model's attention.

Everything that a block has lies in these parts, so it moves, is swapped, cached and evicted as one.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from xdeepserve.model.cache_layout import TILE, cache_shape
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.families import AttentionKind
from xdeepserve.model.weights import Recipe


class CachePart(NamedTuple):
    """One array of a layer, all blocks of it; `name` is KVCache's."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    num_blocks: int

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block; blocks lie one after the other."""
        return math.prod(self.shape) * self.dtype.itemsize // self.num_blocks


@functools.lru_cache(maxsize=16)
def cache_parts(
    c: ModelConfig, recipe: Recipe, num_blocks: int, block_size: int, kind: AttentionKind
) -> tuple[CachePart, ...]:
    """Of a layer with such attention: latents, or values, with their scales in INT8; RoPE keys, or whole
    keys; the keys of its indexer, if it has one.

    A block has those of all its heads. Each layer of hundreds of dies asks, and most get the same answer.
    """
    is_int8, by_head, f32 = recipe == "int8", num_blocks * c.num_key_value_heads, np.dtype(np.float32)
    shapes = {
        "latent": cache_shape(by_head, block_size, c.value_columns),
        "scale": (by_head, block_size) if is_int8 else (0, 0),
        "k_pe": cache_shape(by_head, block_size, c.key_columns),
    }
    if kind == "dsa":
        shapes["index_k"] = (num_blocks, block_size // TILE, c.index_head_dim, TILE)
    dtypes = {"latent": np.dtype(np.uint8)} if is_int8 else {}
    return tuple(CachePart(name, dtypes.get(name, f32), shape, num_blocks) for name, shape in shapes.items())
