"""Register tiles: MR x NR vectors of accumulators that a GEMM keeps in registers while it walks along k.

A tile covers MR rows and NR groups of 16 columns of the result. One step along k broadcasts MR numbers of x,
loads NR vectors of w and adds MR * NR products, so that every number loaded is used several times and
arithmetic is the limit, not loads. All tiles used fit into the 32 vector registers of AVX-512.

MR and NR are literals where a kernel is written, so LLVM sees straight code: this module writes that code
with two Python loops, in place of 24 lines that differ by their indices. Each output still sums in the
order of k, one rounding per multiplication and one per addition.

Weights are packed in column groups, see packing.py: `ldw` is the distance between groups.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from xdeepserve.jit.compiling import register_floats
from xdeepserve.model.kernels.codegen import (
    F32,
    I8,
    I32,
    LANES,
    VF32,
    VI32,
    broadcast,
    call,
    dot4_ir,
    first_lanes,
    pointer,
    unaligned_load,
)


class TileType(types.Type):
    """Numba type of MR x NR vectors of 16 float32 sums, or int32 sums."""

    def __init__(self, mr: int, nr: int, is_int: bool) -> None:
        super().__init__(f"{'i32' if is_int else 'f32'}tile{mr}x{nr}")
        self.mr, self.nr, self.is_int = mr, nr, is_int
        self.ir_type = ir.ArrayType(VI32 if is_int else VF32, mr * nr)


@register_model(TileType)
class TileModel(models.PrimitiveModel):
    """Data model of a tile: an LLVM array of vectors, which LLVM takes apart into registers."""

    def __init__(self, dmm: Any, fe_type: TileType) -> None:
        super().__init__(dmm, fe_type, fe_type.ir_type)


class Tile:
    """Vectors of a tile while code is generated."""

    def __init__(self, builder: ir.IRBuilder, tile: TileType, value: ir.Value | None = None) -> None:
        self.builder, self.tile = builder, tile
        self.at = {
            (r, c): None if value is None else builder.extract_value(value, r * tile.nr + c)
            for r in range(tile.mr)
            for c in range(tile.nr)
        }

    def pack(self) -> ir.Value:
        value: ir.Value = ir.Constant(self.tile.ir_type, ir.Undefined)
        for i, vector in enumerate(self.at.values()):
            value = self.builder.insert_value(value, vector, i)
        return value


def indices(builder: ir.IRBuilder, base: ir.Value, count: int, stride: ir.Value | int) -> list[ir.Value]:
    """Emit the indices base, base + stride, base + 2 stride, ..."""
    step = ir.Constant(base.type, stride) if isinstance(stride, int) else stride
    return [builder.add(base, builder.mul(step, ir.Constant(base.type, i))) for i in range(count)]


INDEX = types.intp
# Rows of a tile one vector wide whose sums stay in registers, beside what they are made of.
TALLEST = {512: 16, 128: 4, 64: 2}[register_floats()]


def _zeros(is_int: bool) -> Any:
    """Make the intrinsic for an mr x nr tile of zeros."""

    @intrinsic(prefer_literal=True)
    def make(typingctx: Any, mr: Any, nr: Any) -> Any:
        tile = TileType(mr.literal_value, nr.literal_value, is_int=is_int)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            return ir.Constant(tile.ir_type, None)

        return tile(mr, nr), codegen

    return make


zeros, no_dots = _zeros(is_int=False), _zeros(is_int=True)  # float32, and int32


@intrinsic
def add_outer(typingctx: Any, acc: Any, x: Any, i: Any, ldx: Any, w: Any, j: Any, ldw: Any) -> Any:
    """acc[r][c] += x[i + r * ldx] * w[j + c * ldw : ... + 16]: one k of a float32 GEMM."""
    if w.dtype != types.float32:
        return None

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        value, x_, i_, ldx_, w_, j_, ldw_ = args
        tile = Tile(builder, acc, value)
        columns = [
            unaligned_load(builder, pointer(context, builder, w, w_, at, VF32))
            for at in indices(builder, j_, acc.nr, ldw_)
        ]
        for r, at in enumerate(indices(builder, i_, acc.mr, ldx_)):
            row = broadcast(builder, unaligned_load(builder, pointer(context, builder, x, x_, at, F32)), VF32)
            for c, column in enumerate(columns):
                tile.at[r, c] = builder.fadd(tile.at[r, c], builder.fmul(row, column))
        return tile.pack()

    return acc(acc, x, INDEX, INDEX, w, INDEX, INDEX), codegen


@intrinsic(prefer_literal=True)
def load_tile(typingctx: Any, mr: Any, nr: Any, x: Any, i: Any, ldx: Any, ldc: Any) -> Any:
    """Load a float32 tile with vector [r][c] from x[i + r * ldx + c * ldc : ... + 16]."""
    tile = TileType(mr.literal_value, nr.literal_value, is_int=False)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        _, _, x_, i_, ldx_, ldc_ = args
        out = Tile(builder, tile)
        for r, row in enumerate(indices(builder, i_, tile.mr, ldx_)):
            for c, at in enumerate(indices(builder, row, tile.nr, ldc_)):
                out.at[r, c] = unaligned_load(builder, pointer(context, builder, x, x_, at, VF32))
        return out.pack()

    return tile(mr, nr, x, INDEX, INDEX, INDEX), codegen


@intrinsic
def add_tiles(typingctx: Any, a: Any, b: Any) -> Any:
    """Add two tiles, a + b, vector by vector."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        left, right = Tile(builder, a, args[0]), Tile(builder, b, args[1])
        add = builder.add if a.is_int else builder.fadd
        for key, vector in left.at.items():
            left.at[key] = add(vector, right.at[key])
        return left.pack()

    return a(a, b), codegen


@intrinsic
def scale_tile(typingctx: Any, a: Any, factor: Any) -> Any:
    """Multiply a tile by a factor, a float32."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        tile, row = Tile(builder, a, args[0]), broadcast(builder, args[1], VF32)
        for key, vector in tile.at.items():
            tile.at[key] = builder.fmul(vector, row)
        return tile.pack()

    return a(a, types.float32), codegen


def _store(
    context: Any,
    builder: ir.IRBuilder,
    out: Any,
    out_: Any,
    rows: list[ir.Value],
    tile: Tile,
    count: ir.Value,
) -> None:
    """Store row r of the tile at rows[r]: the columns below `count`, which are all of them nearly always."""
    address = {
        (r, c): pointer(context, builder, out, out_, builder.add(row, ir.Constant(row.type, LANES * c)), VF32)
        for r, row in enumerate(rows)
        for c in range(tile.tile.nr)
    }
    is_whole = builder.icmp_signed(">=", count, ir.Constant(count.type, LANES * tile.tile.nr))
    with builder.if_else(is_whole, likely=True) as (whole, part):
        with whole:
            for key, vector in tile.at.items():
                builder.store(vector, address[key]).align = 1
        with part:
            for c in range(tile.tile.nr):
                left = builder.sub(count, ir.Constant(count.type, LANES * c))
                mask = first_lanes(builder, left)
                for r in range(tile.tile.mr):
                    where, one = address[r, c], ir.Constant(I32, 1)
                    name = "llvm.masked.store.v16f32.p0"
                    call(builder, name, ir.VoidType(), tile.at[r, c], where, one, mask)


@intrinsic
def store_tile(typingctx: Any, out: Any, i: Any, ldo: Any, acc: Any, count: Any) -> Any:
    """out[i + r * ldo + n] = acc[r][n] for the columns n < count (count may exceed the tile's)."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        out_, i_, ldo_, value, count_ = args
        rows = indices(builder, i_, acc.mr, ldo_)
        _store(context, builder, out, out_, rows, Tile(builder, acc, value), count_)
        return context.get_dummy_value()

    return types.void(out, INDEX, INDEX, acc, INDEX), codegen


# ---------------------------------------------------------------- INT8


@intrinsic(prefer_literal=True)
def dot_start_columns(typingctx: Any, mr: Any, nr: Any, start: Any, j: Any) -> Any:
    """Make an int32 tile with start[j : j + 16 * nr] in all rows (start is int32)."""
    tile = TileType(mr.literal_value, nr.literal_value, is_int=True)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        out = Tile(builder, tile)
        for c, at in enumerate(indices(builder, args[3], tile.nr, LANES)):
            column = unaligned_load(builder, pointer(context, builder, start, args[2], at, VI32))
            for r in range(tile.mr):
                out.at[r, c] = column
        return out.pack()

    return tile(mr, nr, start, INDEX), codegen


@intrinsic(prefer_literal=True)
def dot_start(typingctx: Any, mr: Any, nr: Any, start: Any, m: Any) -> Any:
    """Make an int32 tile with start[m + r] in all columns of row r (start is int32)."""
    tile = TileType(mr.literal_value, nr.literal_value, is_int=True)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        out = Tile(builder, tile)
        for r, at in enumerate(indices(builder, args[3], tile.mr, 1)):
            row = broadcast(builder, builder.load(pointer(context, builder, start, args[2], at, I32)), VI32)
            for c in range(tile.nr):
                out.at[r, c] = row
        return out.pack()

    return tile(mr, nr, start, INDEX), codegen


@intrinsic
def add_sums(typingctx: Any, acc: Any, sums: Any, i: Any, ldx: Any, ldc: Any) -> Any:
    """Add acc[r][c] + sums[i + r * ldx + c * ldc : ... + 16], both int32."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        value, sums_, i_, ldx_, ldc_ = args
        tile = Tile(builder, acc, value)
        for r, row in enumerate(indices(builder, i_, acc.mr, ldx_)):
            for c, at in enumerate(indices(builder, row, acc.nr, ldc_)):
                more = unaligned_load(builder, pointer(context, builder, sums, sums_, at, VI32))
                tile.at[r, c] = builder.add(tile.at[r, c], more)
        return tile.pack()

    return acc(acc, sums, INDEX, INDEX, INDEX), codegen


def _four_bytes(
    context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, at: ir.Value, count: ir.Value | None
) -> ir.Value:
    """Load four int8 into all lanes, reading only the first `count`; zeros stand for the others."""
    if count is None:
        return broadcast(
            builder, unaligned_load(builder, pointer(context, builder, array_type, array, at, I32)), VI32
        )
    word: ir.Value = ir.Constant(I32, 0)
    last = builder.sub(count, ir.Constant(count.type, 1))
    for b in range(4):
        index = ir.Constant(count.type, b)
        is_inside = builder.icmp_signed("<", index, count)
        source = builder.add(at, builder.select(is_inside, index, last))
        byte = builder.zext(builder.load(pointer(context, builder, array_type, array, source, I8)), I32)
        byte = builder.select(is_inside, byte, ir.Constant(I32, 0))
        word = builder.or_(word, builder.shl(byte, ir.Constant(I32, 8 * b)))
    return broadcast(builder, word, VI32)


def _add_dot(context: Any, builder: ir.IRBuilder, sig: Any, args: Any, count: ir.Value | None) -> ir.Value:
    acc, x, _, _, w, _, _ = sig.args[:7]
    value, x_, i_, ldx_, w_, j_, ldw_ = args[:7]
    tile = Tile(builder, acc, value)
    columns = [
        unaligned_load(builder, pointer(context, builder, w, w_, at, VI32))
        for at in indices(builder, j_, acc.nr, ldw_)
    ]
    for r, at in enumerate(indices(builder, i_, acc.mr, ldx_)):
        row = _four_bytes(context, builder, x, x_, at, count)
        for c, column in enumerate(columns):
            unsigned, signed = (row, column) if x.dtype == types.uint8 else (column, row)
            tile.at[r, c] = dot4_ir(builder, tile.at[r, c], unsigned, signed)
    return tile.pack()


@intrinsic
def add_dot(typingctx: Any, acc: Any, x: Any, i: Any, ldx: Any, w: Any, j: Any, ldw: Any) -> Any:
    """Add four k of an INT8 GEMM: acc[r][c] += sum over b of x[i + r * ldx + b] * w[j + c * ldw][:, b].

    One of x and w is int8, the other uint8. The 64 bytes of w at an index are 16 columns of 4.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _add_dot(context, builder, sig, args, None)

    return acc(acc, x, INDEX, INDEX, w, INDEX, INDEX), codegen


@intrinsic
def add_dot_part(
    typingctx: Any, acc: Any, x: Any, i: Any, ldx: Any, w: Any, j: Any, ldw: Any, count: Any
) -> Any:
    """Run `add_dot` on the last 1 <= count < 4 elements of a row, without reading beyond them."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _add_dot(context, builder, sig, args, args[7])

    return acc(acc, x, INDEX, INDEX, w, INDEX, INDEX, INDEX), codegen


@intrinsic
def scale_dots(typingctx: Any, acc: Any, row_scale: Any, i: Any, column_scale: Any, j: Any) -> Any:
    """A float32 tile: float(acc[r][c]) * row_scale[i + r] * column_scale[j + 16 c : ... + 16]."""
    tile = TileType(acc.mr, acc.nr, is_int=False)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        value, row_scale_, i_, column_scale_, j_ = args
        dots, out = Tile(builder, acc, value), Tile(builder, tile)
        columns = [
            unaligned_load(builder, pointer(context, builder, column_scale, column_scale_, at, VF32))
            for at in indices(builder, j_, acc.nr, LANES)
        ]
        for r, at in enumerate(indices(builder, i_, acc.mr, 1)):
            row = builder.load(pointer(context, builder, row_scale, row_scale_, at, F32))
            row = broadcast(builder, row, VF32)
            for c, column in enumerate(columns):
                result = builder.fmul(builder.sitofp(dots.at[r, c], VF32), row)
                out.at[r, c] = builder.fmul(result, column)
        return out.pack()

    return tile(acc, row_scale, INDEX, column_scale, INDEX), codegen


@intrinsic
def store_scaled(
    typingctx: Any, out: Any, i: Any, ldo: Any, acc: Any, scale: Any, m: Any, w_scale: Any, n: Any, count: Any
) -> Any:
    """out[i + r * ldo + c] = float(acc[r][c]) * scale[m + r] * w_scale[n + c] for the columns c < count.

    An int32 `out` takes acc as it is; the scales are not read then.
    """

    def sums(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        out_, i_, ldo_, value, _, _, _, _, count_ = args
        tile, bits = Tile(builder, acc, value), Tile(builder, TileType(acc.mr, acc.nr, is_int=False))
        for key, vector in tile.at.items():
            bits.at[key] = builder.bitcast(vector, VF32)  # since a masked store of floats is at hand
        _store(context, builder, out, out_, indices(builder, i_, acc.mr, ldo_), bits, count_)
        return context.get_dummy_value()

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        if out.dtype == types.int32:
            return sums(context, builder, sig, args)
        out_, i_, ldo_, value, scale_, m_, w_scale_, n_, count_ = args
        dots, result = Tile(builder, acc, value), Tile(builder, TileType(acc.mr, acc.nr, is_int=False))
        channels = []
        for c, at in enumerate(indices(builder, n_, acc.nr, LANES)):
            address = pointer(context, builder, w_scale, w_scale_, at, VF32)
            mask = first_lanes(builder, builder.sub(count_, ir.Constant(count_.type, LANES * c)))
            one, zero = ir.Constant(I32, 1), ir.Constant(VF32, None)
            channels.append(call(builder, "llvm.masked.load.v16f32.p0", VF32, address, one, mask, zero))
        for r, at in enumerate(indices(builder, m_, acc.mr, 1)):
            token = builder.load(pointer(context, builder, scale, scale_, at, F32))
            token = broadcast(builder, token, VF32)
            for c, channel in enumerate(channels):
                scaled = builder.fmul(builder.sitofp(dots.at[r, c], VF32), token)
                result.at[r, c] = builder.fmul(scaled, channel)
        _store(context, builder, out, out_, indices(builder, i_, acc.mr, ldo_), result, count_)
        return context.get_dummy_value()

    return types.void(out, INDEX, INDEX, acc, scale, INDEX, w_scale, INDEX, INDEX), codegen
