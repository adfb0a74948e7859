"""Products of attention on cache tiles, for each type of cache. Layouts and their reasons: see `mla`.

    scores    positions of one tile x one vector of lanes
    values    some positions' latents, by weight, added to the outputs of all lanes

In FP32 both ascend, in k and in position. INT8 latents take products of bytes for the first part of a score;
the RoPE part and the values are exact products, in chunks of 32 k or absolute positions: two tiles, however
pages lie. For values the bytes become float32 in the thread's scratch memory, once for all lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from xdeepserve.jit.compiling import PART_OPTIONS, TILE_OPTIONS, part, tile_part, uses_amx
from xdeepserve.model.cache_layout import BLOCK, TILE, TILE_SIZE
from xdeepserve.model.kernels.codegen import LANES
from xdeepserve.model.kernels.exact_tiles import (
    EXACT_CHUNK,
    MORE_ROWS,
    ROWS,
    TALL,
    WIDE,
    add_chunk,
    add_chunk_of_words,
    add_even,
    add_odd,
    store_apart,
)
from xdeepserve.model.kernels.mla_matrix import scores_by_tiles, tile_start, values_by_tiles
from xdeepserve.model.kernels.pair_dots import BY_DOTS, STEP, add_words, make_words, words, words_of_row
from xdeepserve.model.kernels.simd import load, load_part, prefetch, store
from xdeepserve.model.kernels.tiles import (
    TALLEST,
    add_dot,
    add_outer,
    add_tiles,
    dot_start_columns,
    load_tile,
    scale_dots,
    scale_tile,
    store_tile,
    zeros,
)
from xdeepserve.model.packing import DEPTH

# ---------------------------------------------------------------- scores


@tile_part
def _rope_f32(pe, i_pe, rope_dim, scratch, query_pe):
    """Compute the RoPE part of a score tile's first TALLEST positions."""
    acc = zeros(TALLEST, 1)
    for column in range(0, rope_dim, TILE):
        for k in range(min(TILE, rope_dim - column)):
            acc = add_outer(
                acc, pe, i_pe + column * TILE + k, TILE, scratch, query_pe + (column + k) * LANES, 0
            )
    return acc


@tile_part
def _rope_exact(pe, i_pe, rope_dim, scratch, query_pe):
    """Compute the RoPE part of a score tile's first TALL positions, in exact products; rope_dim is even."""
    acc = zeros(TALL, 1)
    for start in range(0, rope_dim, EXACT_CHUNK):
        even, odd = zeros(TALL, 1), zeros(TALL, 1)
        for column in range(start, min(start + EXACT_CHUNK, rope_dim), TILE):
            for k in range(column, min(column + TILE, rope_dim), 2):
                at, query = i_pe + column * TILE + k - column, query_pe + k * LANES
                even = add_even(even, pe, at, TILE, scratch, query, 0)
                odd = add_odd(odd, pe, at + 1, TILE, scratch, query + LANES, 0)
        acc = add_tiles(acc, add_tiles(even, odd))
    return acc


@tile_part
def _rope_of_words(scratch, rope, rope_dim, query_pe):
    """Compute `_rope_exact` with words on both sides, see `_begin_scores` and `_begin_tile`."""
    acc = zeros(TALL, 1)
    for start in range(0, rope_dim, EXACT_CHUNK):
        even, odd = zeros(TALL, 1), zeros(TALL, 1)
        for column in range(start, min(start + EXACT_CHUNK, rope_dim), TILE):
            for k in range(column, min(column + TILE, rope_dim), STEP):
                at, query = rope + column * TILE + k - column, query_pe + k * LANES
                even = add_words(even, scratch, at, TILE, scratch, query, 0)
                odd = add_words(odd, scratch, at + 1, TILE, scratch, query + LANES, 0)
        acc = add_tiles(acc, add_tiles(even, odd))
    return acc


def _begin_scores(scratch, lanes, query_pe, rope_dim, c):
    """Make words of the RoPE parts of all queries, where products are taken in pairs."""
    raise NotImplementedError


@overload(_begin_scores, jit_options=TILE_OPTIONS)
def _begin_scores_of(scratch, lanes, query_pe, rope_dim, c):
    def nothing(scratch, lanes, query_pe, rope_dim, c):
        pass

    def by_dots(scratch, lanes, query_pe, rope_dim, c):
        for group in range(lanes // LANES):
            make_words(scratch, query_pe + group * rope_dim * LANES, LANES, rope_dim, LANES)

    return by_dots if BY_DOTS and c.dtype != types.float32 else nothing


def _begin_tile(scratch, rope, pe, i_pe, rope_dim, c):
    """Make words of the RoPE parts of a cache tile's positions at `rope`, where products are taken in
    pairs."""
    raise NotImplementedError


@overload(_begin_tile, jit_options=TILE_OPTIONS)
def _begin_tile_of(scratch, rope, pe, i_pe, rope_dim, c):
    def nothing(scratch, rope, pe, i_pe, rope_dim, c):
        pass

    def by_dots(scratch, rope, pe, i_pe, rope_dim, c):
        for column in range(0, rope_dim, TILE):
            count = min(TILE, rope_dim - column)
            for p in range(column * TILE, (column + TILE) * TILE, TILE):
                store(scratch, rope + p, words_of_row(load_part(pe, i_pe + p, count)))

    return by_dots if BY_DOTS and c.dtype != types.float32 else nothing


@tile_part
def _latents_f32(c, i, ahead, rank, scratch, query):
    """Multiply TALLEST latents with a vector of lanes, and prefetch the memory `ahead` of them."""
    acc = zeros(TALLEST, 1)
    for column in range(0, rank, TILE):
        for row in range(TALLEST):
            prefetch(c, i + ahead + (column + row) * TILE)
        for k in range(min(TILE, rank - column)):
            acc = add_outer(acc, c, i + column * TILE + k, TILE, scratch, query + (column + k) * LANES, 0)
    return acc


@tile_part
def _latents_int8(c, i, ahead, rank, scratch, query, q_scale, start, c_scale):
    """Multiply TALLEST INT8 latents with a vector of lanes of INT8 queries, scaled; see `_latents_f32`."""
    packed, at_packed = scratch.view(np.int8), query * 4
    acc = dot_start_columns(TALLEST, 1, scratch.view(np.int32), start)
    for column in range(0, (rank + TILE - 1) // TILE * TILE, TILE):
        for row in range(0, TALLEST, DEPTH):
            prefetch(c, i + ahead + (column + row) * TILE)
        for k in range(0, TILE, DEPTH):
            acc = add_dot(acc, c, i + column * TILE + k, TILE, packed, at_packed + (column + k) * LANES, 0)
    return scale_dots(acc, scratch, c_scale, scratch, q_scale)


def score_tile(
    scratch, o, lanes, c, i, ahead, rank, pe, i_pe, rope_dim,
    query, query_pe, q_scale, start, c_scale, softmax_scale, rope,
):  # fmt: skip
    """Scores of the positions of a cache tile x one vector of lanes, to scratch[o + position * lanes ...].

    c[i ...] and pe[i_pe ...] hold the latents, scratch[query ...] and [query_pe ...] the queries as
    `mla._load_queries` puts them there; c[i + ahead ...] is what will be needed next; rope: of `_begin_tile`.
    """
    raise NotImplementedError


@overload(score_tile, jit_options=TILE_OPTIONS)
def _score_tile_of(
    scratch, o, lanes, c, i, ahead, rank, pe, i_pe, rope_dim,
    query, query_pe, q_scale, start, c_scale, softmax_scale, rope,
):  # fmt: skip
    def in_f32(
        scratch, o, lanes, c, i, ahead, rank, pe, i_pe, rope_dim,
        query, query_pe, q_scale, start, c_scale, softmax_scale, rope,
    ):  # fmt: skip
        for row in range(0, TILE, TALLEST):
            acc = _latents_f32(c, i + row * TILE, ahead, rank, scratch, query)
            acc = add_tiles(acc, _rope_f32(pe, i_pe + row * TILE, rope_dim, scratch, query_pe))
            store_tile(scratch, o + row * lanes, lanes, scale_tile(acc, softmax_scale), LANES)

    def in_int8(
        scratch, o, lanes, c, i, ahead, rank, pe, i_pe, rope_dim,
        query, query_pe, q_scale, start, c_scale, softmax_scale, rope,
    ):  # fmt: skip
        for row in range(0, TILE, TALL):
            if BY_DOTS:
                rotated = _rope_of_words(scratch, rope + row * TILE, rope_dim, query_pe)
            else:
                rotated = _rope_exact(pe, i_pe + row * TILE, rope_dim, scratch, query_pe)
            store_tile(scratch, o + row * lanes, lanes, rotated, LANES)
        for row in range(0, TILE, TALLEST):
            to, at = o + row * lanes, i + row * TILE
            acc = _latents_int8(c, at, ahead, rank, scratch, query, q_scale, start, c_scale + row)
            acc = add_tiles(acc, load_tile(TALLEST, 1, scratch, to, lanes, 0))
            store_tile(scratch, to, lanes, scale_tile(acc, softmax_scale), LANES)

    return in_f32 if c.dtype == types.float32 else in_int8


@part
def _scores_by_vectors(
    scratch, scores, lanes, length, table, size, c, width, rank, pe, pe_width, rope_dim,
    query, query_pe, query_size, q_scale, start, c_scale, softmax_scale, rope,
):  # fmt: skip
    _begin_scores(scratch, lanes, query_pe, rope_dim, c)
    for first in range(0, length, TILE):
        i, i_pe = tile_start(table, first, size, width), tile_start(table, first, size, pe_width)
        following = min(first + TILE, (length - 1) // TILE * TILE)
        ahead = tile_start(table, following, size, width) - i
        _begin_tile(scratch, rope, pe, i_pe, rope_dim, c)
        for lane in range(0, lanes, LANES):
            group = lane // LANES
            to, to_pe = query + group * query_size, query_pe + group * rope_dim * LANES
            o = scores + first * lanes + lane
            score_tile(
                scratch, o, lanes, c, i, ahead, rank, pe, i_pe, rope_dim,
                to, to_pe, q_scale + lane, start + lane, c_scale + first, softmax_scale, rope,
            )  # fmt: skip


def score_positions(
    scratch, scores, lanes, num_lanes, length, table, size, c, width, rank, pe, pe_width, rope_dim,
    query, query_pe, q_scale, start, c_scale, softmax_scale, rope, unit,
):  # fmt: skip
    """scratch[scores ...] = scores [positions, lanes] of all positions below `length`, by cache tiles.

    Pages have `size` positions and are in `table`; scratch memory: `rope`, for the RoPE parts of a tile, and
    unit, that of a matrix unit; see `score_tile`.
    """
    raise NotImplementedError


@overload(score_positions, jit_options=PART_OPTIONS)
def _score_positions_of(
    scratch, scores, lanes, num_lanes, length, table, size, c, width, rank, pe, pe_width, rope_dim,
    query, query_pe, q_scale, start, c_scale, softmax_scale, rope, unit,
):  # fmt: skip
    is_int8 = c.dtype != types.float32

    def by_vectors(
        scratch, scores, lanes, num_lanes, length, table, size, c, width, rank, pe, pe_width, rope_dim,
        query, query_pe, q_scale, start, c_scale, softmax_scale, rope, unit,
    ):  # fmt: skip
        _scores_by_vectors(
            scratch, scores, lanes, length, table, size, c, width, rank, pe, pe_width, rope_dim,
            query, query_pe, width * DEPTH if is_int8 else rank * LANES, q_scale, start, c_scale,
            softmax_scale, rope,
        )  # fmt: skip

    def by_tiles(
        scratch, scores, lanes, num_lanes, length, table, size, c, width, rank, pe, pe_width, rope_dim,
        query, query_pe, q_scale, start, c_scale, softmax_scale, rope, unit,
    ):  # fmt: skip
        if unit.size == 0:
            _scores_by_vectors(
                scratch, scores, lanes, length, table, size, c, width, rank, pe, pe_width, rope_dim,
                query, query_pe, width * DEPTH, q_scale, start, c_scale, softmax_scale, rope,
            )  # fmt: skip
        else:
            scores_by_tiles(
                scratch, scores, lanes, length, table, size, c, width, pe, pe_width, rope_dim,
                query, query_pe, q_scale, start, c_scale, softmax_scale, unit,
            )  # fmt: skip

    return by_tiles if is_int8 and uses_amx() else by_vectors


# ---------------------------------------------------------------- values


@tile_part
def _values_f32(scratch, o, weight, lanes, c, tiles, column, num_positions, is_first):
    """Add outputs of TALLEST lanes x 16 columns over some tiles of positions, in FP32."""
    acc = load_tile(TALLEST, 1, scratch, o, LANES, LANES)
    for first in range(0, num_positions, TILE):
        start = tiles[first // TILE] + column * TILE
        for p in range(min(TILE, num_positions - first)):
            if is_first:
                prefetch(c, start + p * TILE + TILE_SIZE)  # the next 16 columns
            acc = add_outer(acc, scratch, weight + (first + p) * lanes, 1, c, start + p * TILE, 0)
    store_tile(scratch, o, LANES, acc, LANES)


def _exact_values(mr: int) -> Any:
    """Make the kernel of exact outputs of mr lanes x WIDE tiles of columns."""

    @tile_part
    def tile(scratch, o, ldo, weight, lanes, values, ldw, num_positions):
        """Tiles of columns are ldo apart in the outputs, ldw in the values."""
        acc = load_tile(mr, WIDE, scratch, o, LANES, ldo)
        for first in range(0, num_positions, EXACT_CHUNK):
            at, w, count = (
                weight + first * lanes,
                values + first * TILE,
                min(EXACT_CHUNK, num_positions - first),
            )
            if BY_DOTS:
                acc = add_chunk_of_words(acc, scratch, at, 1, lanes, scratch, w, ldw, count)
            else:
                acc = add_chunk(acc, scratch, at, 1, lanes, scratch, w, ldw, 0, count)
        store_apart(scratch, o, LANES, ldo, acc)

    return tile


_values_of_more, _values_of_rows = _exact_values(MORE_ROWS), _exact_values(ROWS)


@part
def _widen(scratch, to, c, start):
    """Convert the cache tile c[start ...] to float32, or words, and prefetch the next tile for its place."""
    if BY_DOTS:
        for i in range(0, TILE_SIZE, STEP * LANES):
            for p in range(i, i + 2 * LANES, LANES):
                store(scratch, to + p, words(load(c, start + p), load(c, start + p + 2 * LANES)))
    else:
        for i in range(0, TILE_SIZE, LANES):
            store(scratch, to + i, load(c, start + i))
    for i in range(0, TILE_SIZE, 4 * LANES):
        prefetch(c, start + WIDE * TILE_SIZE + i)


@part
def _exact_by_vectors(scratch, result, values, weight, lanes, num_lanes, num_positions, c, tiles, width):
    if BY_DOTS:
        make_words(scratch, weight, lanes, num_positions, lanes)
    for column in range(0, width, WIDE * TILE):
        # An odd last tile is computed twice, from the same sums to the same place.
        is_pair = WIDE > 1 and column + TILE < width
        ldw, ldo = (BLOCK * TILE, lanes * LANES) if is_pair else (0, 0)
        for first in range(0, num_positions, TILE):
            start = tiles[first // TILE] + column * TILE
            _widen(scratch, values + first * TILE, c, start)
            if is_pair:
                _widen(scratch, values + ldw + first * TILE, c, start + TILE_SIZE)
        lane = 0
        while lane < num_lanes:
            o, left = result + (column // TILE * lanes + lane) * LANES, lanes - lane
            # By threes, but for four or two lanes at the end.
            if MORE_ROWS > ROWS and (left == MORE_ROWS or left > 2 * ROWS):
                _values_of_more(scratch, o, ldo, weight + lane, lanes, values, ldw, num_positions)
                lane += MORE_ROWS
            else:
                _values_of_rows(scratch, o, ldo, weight + lane, lanes, values, ldw, num_positions)
                lane += ROWS


def add_values(
    scratch, result, values, weight, lanes, num_lanes, num_positions, c, tiles, width, unit, ahead
):
    """result [column tiles, lanes, 16] += weights [positions, lanes] x latents, at most BLOCK positions.

    Their cache tiles begin at c[tiles ...]; values: where scratch memory for those of 32 columns is; unit:
    that of a matrix unit. The first position is a multiple of EXACT_CHUNK. What lies at c[ahead ...] will be
    needed next.
    """
    raise NotImplementedError


@overload(add_values, jit_options=PART_OPTIONS)
def _add_values_of(
    scratch, result, values, weight, lanes, num_lanes, num_positions, c, tiles, width, unit, ahead
):
    def in_f32(
        scratch, result, values, weight, lanes, num_lanes, num_positions, c, tiles, width, unit, ahead
    ):
        for column in range(0, width, TILE):
            for lane in range(0, lanes, TALLEST):
                o = result + (column // TILE * lanes + lane) * LANES
                _values_f32(scratch, o, weight + lane, lanes, c, tiles, column, num_positions, lane == 0)

    def in_int8(
        scratch, result, values, weight, lanes, num_lanes, num_positions, c, tiles, width, unit, ahead
    ):
        _exact_by_vectors(scratch, result, values, weight, lanes, num_lanes, num_positions, c, tiles, width)

    def by_tiles(
        scratch, result, values, weight, lanes, num_lanes, num_positions, c, tiles, width, unit, ahead
    ):
        if unit.size == 0:
            _exact_by_vectors(
                scratch, result, values, weight, lanes, num_lanes, num_positions, c, tiles, width
            )
        else:
            values_by_tiles(scratch, result, weight, lanes, num_positions, c, tiles, width, unit, ahead)

    if c.dtype == types.float32:
        return in_f32
    return by_tiles if uses_amx() else in_int8
