"""Arrays of a layer's KV cache, by the model's kind of attention.

All data of a KV block is in these parts, so a block is moved, swapped, cached and evicted as a whole.
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
    """Array of a layer's KV cache with the rows of all KV blocks; `name` is a field of `KVCache`."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    num_blocks: int

    @property
    def block_nbytes(self) -> int:
        """Size of each KV block in this array, in bytes; blocks lie one after the other."""
        return math.prod(self.shape) * self.dtype.itemsize // self.num_blocks


@functools.lru_cache(maxsize=16)
def cache_parts(
    c: ModelConfig, recipe: Recipe, num_blocks: int, block_size: int, kind: AttentionKind
) -> tuple[CachePart, ...]:
    """List the arrays of a layer's KV cache, by its kind of attention.

    The parts are latents (or values, with scales in INT8), RoPE keys (or whole keys), and the indexer's keys.
    A KV block has the rows of all its heads. The result is cached, because each layer of hundreds of dies
    asks for it.
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
