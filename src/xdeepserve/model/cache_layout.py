"""Layout of the paged latent KV cache in memory: tiles of 16 positions x 16 columns, see kernels/mla.py."""

from __future__ import annotations

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


def scratch_size(max_context: int, rank: int, rope_dim: int) -> int:
    """Number of float32 elements of scratch memory for attention over contexts up to `max_context`."""
    positions, width = -(-max_context // TILE) * TILE, cache_width(rank)
    queries, sums = MAX_LANES * (width + rope_dim), TILE * TILE + 3 * MAX_LANES
    values = max(2 * BLOCK, cache_width(rope_dim)) * TILE
    return queries + positions * (MAX_LANES + 1) + sums + MAX_LANES * width + values
