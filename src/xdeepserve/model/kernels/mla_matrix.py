"""Products of attention on a matrix unit, for INT8 latents and mla_products.py, with the same results.

    scores    left tiles: latents, 16 positions x 16 columns of bytes; right tiles: queries; both as they lie.
              The RoPE part is a second product, of pairs of BF16; both are added up as vectors.
    values    left tiles: softmax weights, 16 lanes x 32 positions in BF16; right tiles: latents, pairs of
              positions in BF16. Sums stay where they are, [16 columns, lanes, 16], which are tiles.

A cache tile is a quarter of a left tile. To copy four of them to one takes longer than to multiply one after
the other, up to the 64 lanes that there may be. What is missing in a tile, positions or columns, is zero on
one of both sides at least, and finite on the other.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from xdeepserve.jit.compiling import ARRAY_OPTIONS, part, uses_amx
from xdeepserve.model.cache_layout import BLOCK, MAX_LANES, TILE, TILE_SIZE
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.exact_tiles import EXACT_CHUNK
from xdeepserve.model.kernels.matrix_unit import (
    ATTENTION_OPS,
    BLOCK_TILES,
    FLAT_COLUMNS,
    TALL_COLUMNS,
    TALL_TILES,
    TILE_BYTES,
    TILE_ROWS,
    begin_quarters,
    begin_tiles,
    bf16_pairs,
    end_tiles,
    exact_flat,
    exact_tall,
    misalignment,
    multiply_quarters,
    store_bf16,
)
from xdeepserve.model.kernels.matrix_unit import TILE_SIZE as UNIT_SIZE
from xdeepserve.model.kernels.simd import load, prefetch, splat, store, to_f32, transpose
from xdeepserve.model.packing import DEPTH

# Scratch memory of the matrix unit, in bytes from its beginning on. From AT_QUERIES on see `_places`.
GROUP_SIZE = TALL_TILES * UNIT_SIZE  # of the sums of 16 columns
AT_ROPE_SUMS = 0
AT_PAIRS = AT_ROPE_SUMS + TALL_COLUMNS * GROUP_SIZE
AT_WEIGHTS = AT_PAIRS + UNIT_SIZE
WEIGHTS_ROW = 2 * BLOCK  # bytes of one lane's weights
AT_VALUES = AT_WEIGHTS + MAX_LANES * WEIGHTS_ROW
VALUES_SIZE = BLOCK * TILE * 2  # of 16 columns
AT_QUERIES = AT_VALUES + FLAT_COLUMNS * VALUES_SIZE
NUM_GROUPS = MAX_LANES // LANES
NUM_POSITIONS = TALL_TILES * TILE_ROWS


@part
def tile_start(table, position, size, width):
    """Return the flat index of the cache tile beginning at `position`, a multiple of 16."""
    return (table[position // size] * (size // TILE) + position % size // TILE) * width * TILE


@part
def _places(rope_dim):
    """Return the number of RoPE tiles along k, the start of the positions' tiles, and the end."""
    depth = (rope_dim + EXACT_CHUNK - 1) // EXACT_CHUNK
    rope = AT_QUERIES + NUM_GROUPS * depth * UNIT_SIZE
    return depth, rope, rope + NUM_POSITIONS * depth * TILE_BYTES


def scratch_for_tiles(c, width, rope_dim, positions, lanes):
    """Make uint8 scratch memory for a cache of the type of c, and rows at these positions of `lanes` lanes in
    all; empty where it has no use."""
    raise NotImplementedError


@overload(scratch_for_tiles, jit_options=ARRAY_OPTIONS)
def _scratch_of(c, width, rope_dim, positions, lanes):
    def nothing(c, width, rope_dim, positions, lanes):
        return np.empty(0, np.uint8)

    def zeros(c, width, rope_dim, positions, lanes):
        if lanes == 0 or min(lanes, MAX_LANES) * (positions.max() + 1) * width < ATTENTION_OPS:
            return np.empty(0, np.uint8)
        memory = np.zeros(_places(rope_dim)[2] + TILE_BYTES, np.uint8)
        return memory[misalignment(memory) :]

    return zeros if uses_amx() and c.dtype == types.uint8 else nothing


@part
def _pack_queries(unit, depth_pe, scratch, query_pe, groups, rope_dim):
    """Pack the RoPE parts of queries, BF16 numbers already, as right tiles; the rest is zero."""
    words = unit.view(np.int32)
    for g in range(groups):
        to, source = (AT_QUERIES + g * depth_pe * UNIT_SIZE) // 4, query_pe + g * rope_dim * LANES
        for k in range(0, rope_dim, 2):
            at = source + k * LANES
            store(words, to + k // 2 * LANES, bf16_pairs(load(scratch, at), load(scratch, at + LANES)))


@part
def _place_rope(unit, rope, pe, i, ahead, pe_width):
    """Place the RoPE parts of a cache tile's 16 positions as left tiles, and prefetch those at `ahead`."""
    for column in range(0, pe_width, TILE):
        to = rope + column // EXACT_CHUNK * UNIT_SIZE + column % EXACT_CHUNK * 2
        for p in range(TILE):
            prefetch(pe, ahead + (column + p) * TILE)
            store_bf16(unit, to + p * TILE_BYTES, load(pe, i + (column + p) * TILE))


@part
def four_tiles(first, last):
    """Return the positions of four cache tiles: the one at `first` and the next three, none behind the one at
    `last`."""
    return (
        min(first, last),
        min(first + TILE, last),
        min(first + 2 * TILE, last),
        min(first + 3 * TILE, last),
    )


@part
def four_starts(table, at, size, width):
    """Return the flat indices of the cache tiles at four positions."""
    return (
        tile_start(table, at[0], size, width),
        tile_start(table, at[1], size, width),
        tile_start(table, at[2], size, width),
        tile_start(table, at[3], size, width),
    )


@part
def _latent_dots(scratch, scores, lanes, length, table, size, c, width, query):
    """Multiply bytes of latents and queries: scratch[scores ...] int32 [positions, lanes]."""
    dots, queries, last = scratch.view(np.int32), scratch.view(np.int8), (length - 1) // TILE * TILE
    begin_quarters()
    for first in range(0, length, BLOCK_TILES * TILE):
        p = four_tiles(first, last)
        starts = four_starts(table, p, size, width)
        ahead = four_starts(table, four_tiles(first + BLOCK_TILES * TILE, last), size, width)
        for lane in range(0, lanes, LANES):
            o, w = scores + lane, (query + lane * width // DEPTH) * DEPTH
            places = (o + p[0] * lanes, o + p[1] * lanes, o + p[2] * lanes, o + p[3] * lanes)
            multiply_quarters(dots, places, lanes, c, starts, ahead, queries, w, width // TILE)


@part
def scores_by_tiles(
    scratch, scores, lanes, length, table, size, c, width, pe, pe_width, rope_dim,
    query, query_pe, q_scale, start, c_scale, softmax_scale, unit,
):  # fmt: skip
    """Compute the scores of all positions below `length`, see mla_products.score_positions."""
    depth_pe, rope, _ = _places(rope_dim)
    groups, rope_size = lanes // LANES, depth_pe * UNIT_SIZE
    _pack_queries(unit, depth_pe, scratch, query_pe, groups, rope_dim)
    dots, starts, rotated = scratch.view(np.int32), scratch.view(np.int32), unit.view(np.float32)
    _latent_dots(scratch, scores, lanes, length, table, size, c, width, query)
    begin_tiles()
    for first in range(0, length, NUM_POSITIONS):
        rows = min(TALL_TILES, (length - first + TILE - 1) // TILE)
        for r in range(rows):
            i = tile_start(table, first + r * TILE, size, pe_width)
            following = min(first + (r + 2 * TALL_TILES) * TILE, (length - 1) // TILE * TILE)
            ahead = tile_start(table, following, size, pe_width)
            _place_rope(unit, rope + r * rope_size, pe, i, ahead, pe_width)
        for g in range(0, groups, TALL_COLUMNS):
            columns = min(TALL_COLUMNS, groups - g)
            exact_tall(
                unit, AT_ROPE_SUMS, GROUP_SIZE, False, unit, rope, rope_size,
                unit, AT_QUERIES + g * rope_size, rope_size, rope_size, depth_pe, rows, columns,
            )  # fmt: skip
            for column in range(columns):
                lane = (g + column) * LANES
                zero_point, scale = load(starts, start + lane), load(scratch, q_scale + lane)
                for p in range(rows * TILE):
                    at = scores + (first + p) * lanes + lane
                    products = to_f32(load(dots, at) + zero_point)
                    score = products * splat(scratch[c_scale + first + p]) * scale
                    turned = load(rotated, (AT_ROPE_SUMS + column * GROUP_SIZE + p * TILE_BYTES) // 4)
                    store(scratch, at, (score + turned) * splat(softmax_scale))
    end_tiles()


@part
def _place_weights(unit, scratch, weights, lanes, num_positions):
    """Place weights [positions, lanes], BF16 numbers already, as left tiles; zeros behind the last."""
    pairs = unit.view(np.int32)
    for first in range(0, num_positions, EXACT_CHUNK):
        for g in range(lanes // LANES):
            for p in range(first, first + EXACT_CHUNK, 2):
                at, even, odd = (
                    weights + p * lanes + g * LANES,
                    splat(np.float32(0.0)),
                    splat(np.float32(0.0)),
                )
                if p < num_positions:
                    even = load(scratch, at)
                if p + 1 < num_positions:
                    odd = load(scratch, at + lanes)
                store(pairs, (AT_PAIRS + (p - first) // 2 * TILE_BYTES) // 4, bf16_pairs(even, odd))
            to = AT_WEIGHTS + g * LANES * WEIGHTS_ROW + first // EXACT_CHUNK * UNIT_SIZE
            transpose(pairs, to // 4, LANES, pairs, AT_PAIRS // 4, LANES)


@part
def _place_values(unit, to, c, start):
    """Fill half a right tile with the cache tile c[start ...], as pairs of positions in BF16."""
    pairs = unit.view(np.int32)
    for p in range(0, TILE, 2):
        at = start + p * TILE
        store(pairs, (to + p // 2 * TILE_BYTES) // 4, bf16_pairs(load(c, at), load(c, at + TILE)))


@part
def values_by_tiles(scratch, result, weights, lanes, num_positions, c, tiles, width, unit, ahead):
    """Add the values of some positions by weight, see mla_products.add_values."""
    groups, depth = lanes // LANES, (num_positions + EXACT_CHUNK - 1) // EXACT_CHUNK
    _place_weights(unit, scratch, weights, lanes, num_positions)
    begin_tiles()
    for column in range(0, width, FLAT_COLUMNS * TILE):
        columns = min(FLAT_COLUMNS, (width - column) // TILE)
        for j in range(columns):
            for first in range(0, num_positions, TILE):
                start = tiles[first // TILE] + column * TILE + j * TILE_SIZE
                _place_values(unit, AT_VALUES + j * VALUES_SIZE + first * TILE * 2, c, start)
            for each in ahead:
                for line in range(
                    column * TILE + j * TILE_SIZE, column * TILE + (j + 1) * TILE_SIZE, TILE_BYTES
                ):
                    prefetch(c, each + line)
        o, ldc = result + column * lanes, lanes * TILE_BYTES
        if groups == 1:
            exact_flat(
                scratch, o, ldc, True, unit, AT_WEIGHTS, LANES * WEIGHTS_ROW,
                unit, AT_VALUES, VALUES_SIZE, VALUES_SIZE, depth, 1, columns,
            )  # fmt: skip
            continue
        for g in range(0, groups, TALL_TILES):
            for j in range(0, columns, TALL_COLUMNS):
                exact_tall(
                    scratch, o + (j * lanes + g * LANES) * TILE, ldc, True,
                    unit, AT_WEIGHTS + g * LANES * WEIGHTS_ROW, LANES * WEIGHTS_ROW,
                    unit, AT_VALUES + j * VALUES_SIZE, VALUES_SIZE, VALUES_SIZE, depth,
                    min(TALL_TILES, groups - g), min(TALL_COLUMNS, columns - j),
                )  # fmt: skip
    end_tiles()
