"""Exact products in register tiles: canonical.matmul_exact on MR x NR vectors.

A tile has its sums, and for each chunk a chain of the even k and one of the odd k. That is what a pair of
BF16 weights looks like in a register, too: 32 bits a column, the even k below the odd one. A CPU with fused
multiply-adds uses them, and one without multiplies and adds: the products are exact, so there is nothing that
one of them could round differently. One with dot products of pairs takes them two at a time (pair_dots.py).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from xdeepserve.jit.compiling import TILE_OPTIONS, register_floats, tile_part
from xdeepserve.model import canonical as c
from xdeepserve.model.kernels.codegen import (
    F32,
    I8,
    LANES,
    VF32,
    VI32,
    broadcast,
    call,
    constant,
    pointer,
    prefetch_ir,
    round_bf16_ir,
    unaligned_load,
)
from xdeepserve.model.kernels.pair_dots import (
    BY_DOTS,
    STEP,
    add_even_four,
    add_even_two,
    add_odd_four,
    add_odd_two,
    add_words,
    words_of_row,
)
from xdeepserve.model.kernels.simd import f32x16
from xdeepserve.model.kernels.tiles import INDEX, Tile, add_tiles, indices

LEAST_FACTOR = float(c.LEAST_FACTOR)
EXACT_CHUNK = c.EXACT_CHUNK
# Rows and column groups of a tile, and rows of one that is a group wide: what the registers hold with two
# chains and a sum for each vector. More rows, if nothing but float32 is loaded: no register is needed to take
# weights out of pairs, and sums are not needed within a chunk.
ROWS, WIDE, TALL, MORE_ROWS = {512: (4, 2, 8, 4), 128: (2, 1, 2, 3), 64: (1, 1, 1, 1)}[register_floats()]


@intrinsic
def factor(typingctx: Any, a: Any) -> Any:
    """Round to the nearest BF16, and too small values to zero: the twin of canonical.factors."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        rounded = round_bf16_ir(builder, args[0])
        magnitude = call(builder, "llvm.fabs.v16f32", VF32, rounded)
        is_small = builder.fcmp_ordered("<", magnitude, constant(VF32, LEAST_FACTOR))
        return builder.select(is_small, constant(VF32, 0.0), rounded)

    return f32x16(f32x16), codegen


@intrinsic
def zeros_like(typingctx: Any, acc: Any) -> Any:
    """Make a tile of zeros with the shape of `acc`."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return ir.Constant(acc.ir_type, None)

    return acc(acc), codegen


@intrinsic
def prefetch_columns(typingctx: Any, acc: Any, w: Any, j: Any, ldw: Any) -> Any:
    """Prefetch w[j + c * ldw], for each column group c of the tile."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        for at in indices(builder, args[2], acc.nr, args[3]):
            prefetch_ir(builder, pointer(context, builder, w, args[1], at, I8))
        return context.get_dummy_value()

    return types.void(acc, w, INDEX, INDEX), codegen


@intrinsic
def store_apart(typingctx: Any, out: Any, i: Any, ldo: Any, ldc: Any, acc: Any) -> Any:
    """out[i + r * ldo + c * ldc : ... + 16] = acc[r][c]: the inverse of load_tile."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        out_, i_, ldo_, ldc_, value = args
        tile = Tile(builder, acc, value)
        for r, row in enumerate(indices(builder, i_, acc.mr, ldo_)):
            for n, at in enumerate(indices(builder, row, acc.nr, ldc_)):
                builder.store(tile.at[r, n], pointer(context, builder, out, out_, at, VF32)).align = 1
        return context.get_dummy_value()

    return types.void(out, INDEX, INDEX, INDEX, acc), codegen


def _add_outer(half: int) -> Any:
    """Make the intrinsic for the lower (0) or the upper (1) of two BF16 weights; float32 weights are
    whole."""

    @intrinsic
    def add(typingctx: Any, acc: Any, x: Any, i: Any, ldx: Any, w: Any, j: Any, ldw: Any) -> Any:
        """acc[r][c] += x[i + r * ldx] * w[j + c * ldw : ...], 16 columns: one k, of exact products."""
        if w.dtype not in (types.uint16, types.float32):
            return None

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            value, x_, i_, ldx_, w_, j_, ldw_ = args
            tile, columns = Tile(builder, acc, value), []
            for at in indices(builder, j_, acc.nr, ldw_):
                if w.dtype == types.uint16:
                    pairs = unaligned_load(builder, pointer(context, builder, w, w_, at, VI32))
                    upper = (
                        builder.and_(pairs, constant(VI32, -(1 << 16)))
                        if half
                        else builder.shl(pairs, constant(VI32, 16))
                    )
                    columns.append(builder.bitcast(upper, VF32))
                else:
                    columns.append(unaligned_load(builder, pointer(context, builder, w, w_, at, VF32)))
            for r, at in enumerate(indices(builder, i_, acc.mr, ldx_)):
                number = unaligned_load(builder, pointer(context, builder, x, x_, at, F32))
                row = broadcast(builder, number, VF32)
                for n, column in enumerate(columns):
                    # Fused where the CPU can, else a multiplication and an addition.
                    sums = tile.at[r, n]
                    tile.at[r, n] = call(builder, "llvm.fmuladd.v16f32", VF32, row, column, sums)
            return tile.pack()

        return acc(acc, x, INDEX, INDEX, w, INDEX, INDEX), codegen

    return add


add_even, add_odd = _add_outer(0), _add_outer(1)


def add_chunk(acc, x, i, ldx, step, w, j, ldw, ahead, count):
    """acc + (even + odd), the chains of `count` k, at most EXACT_CHUNK.

    acc[r][c] takes x[i + r * ldx + k * step] * w[j + c * ldw + LANES * k : ...]. BF16 weights lie in pairs:
    the last x of an odd `count` must be followed by a zero; what lies `ahead` of each pair is asked for.
    Their x are as `entering_row` makes them.
    """
    raise NotImplementedError


@overload(add_chunk, jit_options=TILE_OPTIONS)
def _add_chunk_of(acc, x, i, ldx, step, w, j, ldw, ahead, count):
    def in_pairs(acc, x, i, ldx, step, w, j, ldw, ahead, count):
        even, odd = zeros_like(acc), zeros_like(acc)
        for k in range(0, count, 2):
            prefetch_columns(acc, w, j + LANES * k + ahead, ldw)
            even = add_even(even, x, i + k * step, ldx, w, j + LANES * k, ldw)
            odd = add_odd(odd, x, i + (k + 1) * step, ldx, w, j + LANES * k, ldw)
        return add_tiles(acc, add_tiles(even, odd))

    def in_f32(acc, x, i, ldx, step, w, j, ldw, ahead, count):
        even, odd = zeros_like(acc), zeros_like(acc)
        for k in range(0, count - 1, 2):
            even = add_even(even, x, i + k * step, ldx, w, j + LANES * k, ldw)
            odd = add_odd(odd, x, i + (k + 1) * step, ldx, w, j + LANES * (k + 1), ldw)
        if count % 2:
            k = count - 1
            even = add_even(even, x, i + k * step, ldx, w, j + LANES * k, ldw)
        return add_tiles(acc, add_tiles(even, odd))

    def by_dots(acc, x, i, ldx, step, w, j, ldw, ahead, count):
        even, odd = zeros_like(acc), zeros_like(acc)
        for k in range(0, count - 2, STEP):
            prefetch_columns(acc, w, j + LANES * k + ahead, ldw)
            prefetch_columns(acc, w, j + LANES * (k + 2) + ahead, ldw)
            even = add_even_four(even, x, i + k, ldx, w, j + LANES * k, ldw)
            odd = add_odd_four(odd, x, i + k + 1, ldx, w, j + LANES * k, ldw)
        if (count - 1) % STEP < 2:
            k = (count - 1) // STEP * STEP
            even = add_even_two(even, x, i + k, ldx, w, j + LANES * k, ldw)
            odd = add_odd_two(odd, x, i + k + 1, ldx, w, j + LANES * k, ldw)
        return add_tiles(acc, add_tiles(even, odd))

    if w.dtype != types.uint16:
        return in_f32
    return by_dots if BY_DOTS else in_pairs


def entering_row(a, w):
    """Convert 16 factors of a row to the form in which they meet weights of the type of w."""
    raise NotImplementedError


@overload(entering_row, jit_options=TILE_OPTIONS)
def _entering_row_of(a, w):
    by_dots = BY_DOTS and w.dtype == types.uint16
    return (lambda a, w: words_of_row(a)) if by_dots else (lambda a, w: a)


@tile_part
def add_chunk_of_words(acc, x, i, ldx, step, w, j, ldw, count):
    """add_chunk of words on both sides, those of the last numbers filled up with zeros."""
    even, odd = zeros_like(acc), zeros_like(acc)
    for k in range(0, count, STEP):
        even = add_words(even, x, i + k * step, ldx, w, j + LANES * k, ldw)
        odd = add_words(odd, x, i + (k + 1) * step, ldx, w, j + LANES * (k + 1), ldw)
    return add_tiles(acc, add_tiles(even, odd))
