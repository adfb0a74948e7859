"""Attention's two products on a matrix unit, for INT8 latents and mla_products.py, with the same results.

    scores    left tiles: latents, 16 positions x 64 columns of bytes; right tiles: queries, as `mla` packs
              them. The RoPE part is a second product, of pairs of BF16; both are added up as vectors.
    values    left tiles: softmax weights, 16 lanes x 32 positions in BF16; right tiles: latents, pairs of
              positions in BF16. Sums stay where they are, [16 columns, lanes, 16], which are tiles.

A cache tile is narrower than a tile of the matrix unit: four of them make the rows of one left tile in
scratch memory, where all lanes use it. What is missing in a tile, positions or columns, is zero on one of
both sides at least, and finite on the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from xdeepserve.jit.compiling import ARRAY_OPTIONS, part, uses_amx
from xdeepserve.model.cache_layout import BLOCK, MAX_LANES, TILE, TILE_SIZE
from xdeepserve.model.kernels.codegen import LANES, VI8, pointer, unaligned_load
from xdeepserve.model.kernels.exact_tiles import EXACT_CHUNK
from xdeepserve.model.kernels.matrix_unit import (
    ATTENTION_OPS,
    FLAT_COLUMNS,
    TALL_COLUMNS,
    TALL_TILES,
    TILE_BYTES,
    TILE_ROWS,
    begin_tiles,
    bf16_pairs,
    end_tiles,
    exact_flat,
    exact_tall,
    latents_tall,
    misalignment,
    store_bf16,
)
from xdeepserve.model.kernels.matrix_unit import TILE_SIZE as UNIT_SIZE
from xdeepserve.model.kernels.simd import load, splat, store, to_f32, transpose
from xdeepserve.model.kernels.tiles import INDEX
from xdeepserve.model.packing import DEPTH

# Scratch memory of the matrix unit, in bytes from its beginning on. From AT_QUERIES on see `_places`.
GROUP_SIZE = TALL_TILES * UNIT_SIZE  # of the sums of 16 columns
AT_SUMS, AT_ROPE_SUMS = 0, TALL_COLUMNS * GROUP_SIZE
AT_PAIRS = 2 * AT_ROPE_SUMS
AT_WEIGHTS = AT_PAIRS + UNIT_SIZE
WEIGHTS_ROW = 2 * BLOCK  # bytes of one lane's weights
AT_VALUES = AT_WEIGHTS + MAX_LANES * WEIGHTS_ROW
VALUES_SIZE = BLOCK * TILE * 2  # of 16 columns
AT_QUERIES = AT_VALUES + FLAT_COLUMNS * VALUES_SIZE
NUM_GROUPS = MAX_LANES // LANES
NUM_POSITIONS = TALL_TILES * TILE_ROWS


@part
def tile_start(table, position, size, width):
    """Flat index of the cache tile that begins at `position`, a multiple of 16."""
    return (table[position // size] * (size // TILE) + position % size // TILE) * width * TILE


@part
def _places(width, rope_dim):
    """Tiles of k of latents and of RoPE parts; where queries' RoPE parts, latents and their RoPE parts begin;
    and the end."""
    depth, depth_pe = (width + TILE_BYTES - 1) // TILE_BYTES, (rope_dim + EXACT_CHUNK - 1) // EXACT_CHUNK
    queries_pe = AT_QUERIES + NUM_GROUPS * depth * UNIT_SIZE
    latents = queries_pe + NUM_GROUPS * depth_pe * UNIT_SIZE
    rope = latents + NUM_POSITIONS * depth * TILE_BYTES
    return depth, depth_pe, queries_pe, latents, rope, rope + NUM_POSITIONS * depth_pe * TILE_BYTES


def scratch_for_tiles(c, width, rope_dim, positions, lanes):
    """uint8 scratch memory for a cache of the type of c, and rows at these positions of so many lanes in all;
    none where it has no use."""
    raise NotImplementedError


@overload(scratch_for_tiles, jit_options=ARRAY_OPTIONS)
def _scratch_of(c, width, rope_dim, positions, lanes):
    def nothing(c, width, rope_dim, positions, lanes):
        return np.empty(0, np.uint8)

    def zeros(c, width, rope_dim, positions, lanes):
        if lanes == 0 or min(lanes, MAX_LANES) * (positions.max() + 1) * width < ATTENTION_OPS:
            return np.empty(0, np.uint8)
        memory = np.zeros(_places(width, rope_dim)[5] + TILE_BYTES, np.uint8)
        return memory[misalignment(memory) :]

    return zeros if uses_amx() and c.dtype == types.uint8 else nothing


@intrinsic
def _copy_cache_tile(typingctx: Any, out: Any, i: Any, ldo: Any, c: Any, j: Any) -> Any:
    """Rows out[i + r * ldo ...] of 16 bytes = those of the cache tile c[j ...]."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        out_, i_, ldo_, c_, j_ = args
        for r in range(TILE):
            source = builder.add(j_, ir.Constant(j_.type, r * TILE))
            row = unaligned_load(builder, pointer(context, builder, c, c_, source, VI8))
            to = builder.add(i_, builder.mul(ldo_, ir.Constant(ldo_.type, r)))
            builder.store(row, pointer(context, builder, out, out_, to, VI8)).align = 1
        return context.get_dummy_value()

    return types.void(out, INDEX, INDEX, c, INDEX), codegen


@part
def _pack_queries(unit, queries_pe, depth, depth_pe, scratch, query, query_pe, groups, width, rope_dim):
    """Right tiles of the lanes' queries, which are bytes or BF16 numbers already; the rest is zero."""
    words, packed = unit.view(np.int32), scratch.view(np.int32)
    for g in range(groups):
        to, source = (AT_QUERIES + g * depth * UNIT_SIZE) // 4, query + g * width * DEPTH
        for i in range(width * DEPTH):
            words[to + i] = packed[source + i]
        to, source = (queries_pe + g * depth_pe * UNIT_SIZE) // 4, query_pe + g * rope_dim * LANES
        for k in range(0, rope_dim, 2):
            at = source + k * LANES
            store(words, to + k // 2 * LANES, bf16_pairs(load(scratch, at), load(scratch, at + LANES)))


@part
def _place_positions(unit, latents, c, i, width, rope, pe, i_pe, pe_width):
    """Left tiles of the latents and the RoPE parts of a cache tile's 16 positions."""
    for column in range(0, width, TILE):
        to = latents + column // TILE_BYTES * UNIT_SIZE + column % TILE_BYTES
        _copy_cache_tile(unit, to, TILE_BYTES, c, i + column * TILE)
    for column in range(0, pe_width, TILE):
        to = rope + column // EXACT_CHUNK * UNIT_SIZE + column % EXACT_CHUNK * 2
        for p in range(TILE):
            store_bf16(unit, to + p * TILE_BYTES, load(pe, i_pe + column * TILE + p * TILE))


@part
def scores_by_tiles(
    scratch, scores, lanes, length, table, size, c, width, pe, pe_width, rope_dim,
    query, query_pe, q_scale, start, c_scale, softmax_scale, unit,
):  # fmt: skip
    """Scores of all positions below `length`, see mla_products.score_positions."""
    depth, depth_pe, queries_pe, latents, rope, _ = _places(width, rope_dim)
    groups, query_size, rope_size = lanes // LANES, depth * UNIT_SIZE, depth_pe * UNIT_SIZE
    _pack_queries(unit, queries_pe, depth, depth_pe, scratch, query, query_pe, groups, width, rope_dim)
    dots, starts, rotated = unit.view(np.int32), scratch.view(np.int32), unit.view(np.float32)
    begin_tiles()
    for first in range(0, length, NUM_POSITIONS):
        rows = min(TALL_TILES, (length - first + TILE - 1) // TILE)
        for r in range(rows):
            i = tile_start(table, first + r * TILE, size, width)
            i_pe = tile_start(table, first + r * TILE, size, pe_width)
            _place_positions(
                unit, latents + r * query_size, c, i, width, rope + r * rope_size, pe, i_pe, pe_width
            )
        for g in range(0, groups, TALL_COLUMNS):
            columns = min(TALL_COLUMNS, groups - g)
            latents_tall(
                unit, AT_SUMS, GROUP_SIZE, False, unit, latents, query_size,
                unit, AT_QUERIES + g * query_size, query_size, query_size, depth, rows, columns,
            )  # fmt: skip
            exact_tall(
                unit, AT_ROPE_SUMS, GROUP_SIZE, False, unit, rope, rope_size,
                unit, queries_pe + g * rope_size, rope_size, rope_size, depth_pe, rows, columns,
            )  # fmt: skip
            for column in range(columns):
                lane = (g + column) * LANES
                zero_point, scale = load(starts, start + lane), load(scratch, q_scale + lane)
                for p in range(rows * TILE):
                    at = (column * GROUP_SIZE + p * TILE_BYTES) // 4
                    products = to_f32(load(dots, AT_SUMS // 4 + at) + zero_point)
                    score = products * splat(scratch[c_scale + first + p]) * scale
                    score = (score + load(rotated, AT_ROPE_SUMS // 4 + at)) * splat(softmax_scale)
                    store(scratch, scores + (first + p) * lanes + lane, score)
    end_tiles()


@part
def _place_weights(unit, scratch, weights, lanes, num_positions):
    """Left tiles of weights [positions, lanes], which are BF16 numbers already; zeros behind the last."""
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
    """Half a right tile: the cache tile c[start ...] as pairs of positions in BF16."""
    pairs = unit.view(np.int32)
    for p in range(0, TILE, 2):
        at = start + p * TILE
        store(pairs, (to + p // 2 * TILE_BYTES) // 4, bf16_pairs(load(c, at), load(c, at + TILE)))


@part
def values_by_tiles(scratch, result, weights, lanes, num_positions, c, tiles, width, unit):
    """Values of some positions by weight, see mla_products.add_values."""
    groups, depth = lanes // LANES, (num_positions + EXACT_CHUNK - 1) // EXACT_CHUNK
    _place_weights(unit, scratch, weights, lanes, num_positions)
    begin_tiles()
    for column in range(0, width, FLAT_COLUMNS * TILE):
        columns = min(FLAT_COLUMNS, (width - column) // TILE)
        for j in range(columns):
            for first in range(0, num_positions, TILE):
                start = tiles[first // TILE] + column * TILE + j * TILE_SIZE
                _place_values(unit, AT_VALUES + j * VALUES_SIZE + first * TILE * 2, c, start)
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
