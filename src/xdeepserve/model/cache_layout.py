"""Layout of the paged latent KV cache in memory: tiles of 16 positions x 16 columns, see kernels/mla.py."""

from __future__ import annotations

from typing import Literal

from xdeepserve.model.config import ModelConfig
from xdeepserve.model.v4.sizes import V4Sizes

TILE = 16  # positions and columns of a cache tile
TILE_SIZE = TILE * TILE
MAX_LANES = 64  # heads x query rows that attention works on at a time
BLOCK = 8 * TILE  # positions whose values it works on at a time


def cache_width(columns: int) -> int:
    """Return the number of columns stored in the cache: whole tiles."""
    return -(-columns // TILE) * TILE


def cache_shape(num_blocks: int, block_size: int, columns: int) -> tuple[int, ...]:
    """Return the shape of the cache: [blocks, tiles of 16 positions, tiles of 16 columns, 16 positions, 16
    columns]."""
    return (num_blocks, block_size // TILE, cache_width(columns) // TILE, TILE, TILE)


def entry_nbytes(c: ModelConfig, recipe: Literal["int8", "fp32"], has_index: bool = False) -> int:
    """Size of a position's entry in a layer's cache on the hardware, in bytes.

    RoPE keys, or whole keys, are BF16 (CM 4.2.2). Latents, or values, are BF16, too, or in the int8 recipe
    INT8 with an FP32 scale for each head (XDS 4.7). With `has_index` the indexer's key comes on top, in BF16.
    """
    values = c.value_columns + 4 if recipe == "int8" else 2 * c.value_columns
    return c.num_key_value_heads * (values + 2 * c.key_columns) + 2 * c.index_head_dim * has_index


def entries_nbytes(c: ModelConfig, recipe: Literal["int8", "fp32"], num_layers: int) -> int:
    """Size of a position's entries in the caches of the first `num_layers` layers on the hardware, in
    bytes."""
    kinds = (c.attention_of(layer) for layer in range(num_layers))
    if c.v4 is not None:
        return sum(_v4_entry_nbytes(c, c.v4, recipe, kind) for kind in kinds)
    return sum(entry_nbytes(c, recipe, kind == "dsa") for kind in kinds)


def _v4_entry_nbytes(c: ModelConfig, v4: V4Sizes, recipe: Literal["int8", "fp32"], kind: str) -> int:
    """Size of a position's share of a layer's cache of DeepSeek-V4 on the hardware, in bytes: its latent, and
    where positions are compressed what it gives to entries, in BF16, and its part of an entry."""
    latent = entry_nbytes(c, recipe)
    if not (rate := v4.rate(kind)):
        return latent
    given = 2 * 2 * c.v_head_dim if kind == "hca" else 2 * 4 * (c.v_head_dim + c.index_head_dim)
    entry = latent + (2 * c.index_head_dim if kind == "csa" else 0)
    return latent + given + -(-entry // rate)


def scratch_size(max_context: int, rank: int, rope_dim: int) -> int:
    """Number of float32 elements of scratch memory for attention over contexts up to `max_context`."""
    positions, width = -(-max_context // TILE) * TILE, cache_width(rank)
    queries, sums = MAX_LANES * (width + rope_dim), TILE * TILE + 3 * MAX_LANES
    values = max(2 * BLOCK, cache_width(rope_dim)) * TILE
    return queries + positions * (MAX_LANES + 1) + sums + MAX_LANES * width + values
