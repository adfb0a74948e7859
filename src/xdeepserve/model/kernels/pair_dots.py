"""Exact products two at a time, by AVX-512 BF16's dot product of pairs: canonical.matmul_exact once more.

In each lane the instruction has two pairs of BF16. It adds the product of the upper ones to a float32,
rounds, adds that of the lower ones, rounds: two fused multiply-adds, in the time of one. (What is too small
for a normal float32 counts as zero, but nothing is: see canonical.factors.) A chain of the even k takes every
second one, and so does a chain of the odd k. So these are the words that stand for four numbers:

    even chain    number k above, k + 2 below
    odd chain     number k + 1 above, k + 3 below

They lie where the numbers k and k + 1 lay, and nothing lies where k + 2 and k + 3 did.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from xdeepserve.jit.compiling import part, uses_bf16_dots
from xdeepserve.model.kernels.codegen import (
    F32,
    LANES,
    VF32,
    VI32,
    broadcast,
    constant,
    dot2_ir,
    pointer,
    unaligned_load,
)
from xdeepserve.model.kernels.simd import f32x16, load, splat, store
from xdeepserve.model.kernels.tiles import INDEX, Tile, indices

BY_DOTS = uses_bf16_dots()  # exact products are taken two at a time
STEP = 4  # numbers that two words stand for
ZERO = np.float32(0.0)
UPPER = -(1 << 16)


@intrinsic
def words(typingctx: Any, first: Any, second: Any) -> Any:
    """Join two BF16 numbers in each lane as bits, the first one above."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        upper, lower = (builder.bitcast(each, VI32) for each in args)
        return builder.bitcast(builder.or_(upper, builder.lshr(lower, constant(VI32, 16))), VF32)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def words_of_row(typingctx: Any, a: Any) -> Any:
    """Make the words of 16 neighbouring numbers."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        bits = builder.bitcast(args[0], VI32)
        second = ir.Constant(VI32, [min(lane + 2, LANES - 1) for lane in range(LANES)])
        lower = builder.lshr(builder.shuffle_vector(bits, bits, second), constant(VI32, 16))
        return builder.bitcast(builder.or_(bits, lower), VF32)

    return f32x16(f32x16), codegen


@part
def make_words(scratch, start, step, count, width):
    """Replace numbers scratch[start + k * step + column], k < count, by words, in their place.

    `width` columns, a multiple of 16. There is memory for one more, if `count` is odd.
    """
    for k in range(0, count, STEP):
        for i in range(start + k * step, start + k * step + width, LANES):
            first, second, third, fourth = load(scratch, i), splat(ZERO), splat(ZERO), splat(ZERO)
            if k + 1 < count:
                second = load(scratch, i + step)
            if k + 2 < count:
                third = load(scratch, i + 2 * step)
            if k + 3 < count:
                fourth = load(scratch, i + 3 * step)
            store(scratch, i, words(first, third))
            store(scratch, i + step, words(second, fourth))


@intrinsic
def add_words(typingctx: Any, acc: Any, x: Any, i: Any, ldx: Any, w: Any, j: Any, ldw: Any) -> Any:
    """acc[r][c] += the two products of x[i + r * ldx] and w[j + c * ldw : ... + 16], words of one chain."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        value, x_, i_, ldx_, w_, j_, ldw_ = args
        columns = [
            unaligned_load(builder, pointer(context, builder, w, w_, at, VF32))
            for at in indices(builder, j_, acc.nr, ldw_)
        ]
        return _dots(context, builder, Tile(builder, acc, value), (x, x_, i_, ldx_), columns)

    return acc(acc, x, INDEX, INDEX, w, INDEX, INDEX), codegen


def _dots(context: Any, builder: ir.IRBuilder, tile: Tile, rows: Any, columns: list[ir.Value]) -> ir.Value:
    x, x_, i_, ldx_ = rows
    for r, at in enumerate(indices(builder, i_, tile.tile.mr, ldx_)):
        word = unaligned_load(builder, pointer(context, builder, x, x_, at, F32))
        row = broadcast(builder, word, VF32)
        for n, column in enumerate(columns):
            tile.at[r, n] = dot2_ir(builder, tile.at[r, n], row, column)
    return tile.pack()


def _add_packed(half: int, is_whole: bool) -> Any:
    """Make the intrinsic of the chain of the even (0) or of the odd k (1)."""

    @intrinsic
    def add(typingctx: Any, acc: Any, x: Any, i: Any, ldx: Any, w: Any, j: Any, ldw: Any) -> Any:
        """acc[r][c] += products of the word x[i + r * ldx] and weights as `packing` has BF16.

        Their pairs (k, k + 1) begin at w[j + c * ldw], pairs (k + 2, k + 3) behind if four k are whole.
        """

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            value, x_, i_, ldx_, w_, j_, ldw_ = args

            def pairs(at: ir.Value) -> ir.Value:
                return unaligned_load(builder, pointer(context, builder, w, w_, at, VI32))

            columns = []
            for at in indices(builder, j_, acc.nr, ldw_):
                first, second = pairs(at), ir.Constant(VI32, None)
                if is_whole:
                    second = pairs(builder.add(at, ir.Constant(at.type, 2 * LANES)))
                if half:
                    upper = builder.and_(first, constant(VI32, UPPER))
                    lower = builder.lshr(second, constant(VI32, 16))
                else:
                    upper = builder.shl(first, constant(VI32, 16))
                    lower = builder.and_(second, constant(VI32, ~UPPER))
                columns.append(builder.or_(upper, lower))
            return _dots(context, builder, Tile(builder, acc, value), (x, x_, i_, ldx_), columns)

        return acc(acc, x, INDEX, INDEX, w, INDEX, INDEX), codegen

    return add


add_even_four, add_odd_four = _add_packed(0, True), _add_packed(1, True)
add_even_two, add_odd_two = _add_packed(0, False), _add_packed(1, False)
