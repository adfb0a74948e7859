"""Tiles of a matrix unit (AMX) in kernels: how they are filled, multiplied and emptied.

A tile is 16 rows of 64 bytes. What is multiplied are a left tile, 16 rows of x with 64 bytes of k, and a
right one, 16 columns of w as `packing` stores them: 64 bytes are what belongs to the same 4 bytes of k. Their
product, 16 x 16 sums, is added to a third tile:

    tdpbsud     x int8, w uint8            int32, exact in any order
    tdpbusd     x uint8, w int8            the same; a uint8 is a signed number plus 128 here, see simd.py
    tdpbssd     both int8                  the same
    tdpbf16ps   x and w pairs of BF16      float32, in the order of canonical.matmul_exact

A block is four products: of two left and two right tiles, each of which is used twice (TALL), or, where no
more than 16 rows are, of one left tile and four right ones (FLAT). Where there are fewer tiles than a block
takes, the last one takes the place of those that are missing; the same sums are made twice then, and are
stored to the same place twice.

There are eight tile registers: four for sums, two for the left tiles, and one that each right tile is loaded
into in turn. A thread says what shape its tiles have before it uses them (`begin_tiles`, or `begin_quarters`
for 16 bytes of k), and gives them back (`end_tiles`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from xdeepserve.jit.compiling import part
from xdeepserve.model.kernels.codegen import (
    I8,
    I32,
    LANES,
    VI16,
    VI32,
    call,
    constant,
    pointer,
    unaligned_load,
)
from xdeepserve.model.kernels.simd import f32x16, i32x16, prefetch
from xdeepserve.model.kernels.tiles import INDEX
from xdeepserve.model.packing import DEPTH

TILE_ROWS, TILE_BYTES = 16, 64
TILE_SIZE = TILE_ROWS * TILE_BYTES
QUARTER = TILE_BYTES // 4  # bytes of a row of a quarter of a left tile
QUARTER_SIZE = TILE_SIZE // 4
BLOCK_TILES = 4  # sums of a block
LEFT, RIGHT, TILES = 4, 6, 8  # tile registers: sums are in 0, 1, 2, 3
# Below so much the matrix unit does not pay: it takes 16 cycles for 16 x 16 sums over 64 bytes of k, for one
# row as for sixteen, and rows are copied first. Measured on an Intel Xeon (family 6, model 167): rows and
# multiply-adds of bytes, rows of exact products, and attention's lanes x positions x latent width.
INT8_ROWS, INT8_OPS, EXACT_ROWS, ATTENTION_OPS = 3, 3 << 17, 2, 1 << 16

I64, VOID, BYTES = ir.IntType(64), ir.VoidType(), ir.IntType(8).as_pointer()


def configuration(depth: int) -> bytes:
    """Return the tile configuration: tiles of sums, left tiles with `depth` bytes of k, and right tiles with
    as many.

    Palette 1, then sixteen lengths of rows in bytes from byte 16, and sixteen numbers of rows from byte 48.
    """
    widths = [TILE_BYTES] * LEFT + [depth] * (RIGHT - LEFT) + [TILE_BYTES] * (TILES - RIGHT)
    rows = [TILE_ROWS] * RIGHT + [depth // DEPTH] * (TILES - RIGHT)
    lengths = [byte for width in widths for byte in (width, 0)]
    return bytes([1, *[0] * 15, *lengths, *[0] * 16, *rows, *[0] * 8])


TALL_TILES, TALL_COLUMNS, FLAT_COLUMNS = 2, 2, 4


class Block(NamedTuple):
    """Numbers of left and right tiles in a block of products."""

    rows: int
    columns: int


TALL, FLAT = Block(TALL_TILES, TALL_COLUMNS), Block(1, FLAT_COLUMNS)


def _number(register: int) -> ir.Constant:
    return ir.Constant(I8, register)


def _whole(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _places(
    builder: ir.IRBuilder, start: ir.Value, step: ir.Value, count: int, available: ir.Value
) -> list[Any]:
    """Return `count` addresses, each `step` bytes behind the other, with the last available one repeated."""
    found = []
    for i in range(count):
        exists = builder.icmp_signed("<", _whole(i), available)
        place = builder.select(exists, _whole(i), builder.sub(available, _whole(1)))
        found.append(builder.gep(start, [builder.mul(place, step)]))
    return found


def _beginning(depth: int) -> Any:
    """Make the intrinsic for giving a thread tiles with `depth` bytes of k."""

    @intrinsic
    def begin(typingctx: Any) -> Any:
        """Give eight tiles to the calling thread."""

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            values = cgutils.make_bytearray(bytearray(configuration(depth)))
            place = cgutils.global_constant(builder, "tile_configuration", values)
            call(builder, "llvm.x86.ldtilecfg", VOID, builder.bitcast(place, BYTES))
            return context.get_dummy_value()

        return types.void(), codegen

    return begin


begin_tiles, begin_quarters = _beginning(TILE_BYTES), _beginning(QUARTER)


@intrinsic
def end_tiles(typingctx: Any) -> Any:
    """Give the thread's tiles back: the system need not keep them when another thread has its turn."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tilerelease", VOID)
        return context.get_dummy_value()

    return types.void(), codegen


def _on_sums(block: Block, name: str) -> Any:
    """Make the intrinsic for loading or storing the sums of a block."""

    @intrinsic
    def move(typingctx: Any, c: Any, at: Any, ldc: Any, rows: Any, columns: Any) -> Any:
        """Load or store tiles from or to c[at ...], see `multiply`."""

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            c_, at_, ldc_, rows_, columns_ = args
            start = pointer(context, builder, c, c_, at_, I8)
            for j, column in enumerate(_places(builder, start, ldc_, block.columns, columns_)):
                for i, place in enumerate(_places(builder, column, _whole(TILE_SIZE), block.rows, rows_)):
                    tile = _number(i * block.columns + j)
                    call(builder, f"llvm.x86.{name}", VOID, tile, place, _whole(TILE_BYTES))
            return context.get_dummy_value()

        return types.void(c, *[INDEX] * 4), codegen

    return move


@intrinsic
def _clear_sums(typingctx: Any) -> Any:
    """Set all sums of a block to zero."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        for i in range(BLOCK_TILES):
            call(builder, "llvm.x86.tilezero", VOID, _number(i))
        return context.get_dummy_value()

    return types.void(), codegen


def _add_products(block: Block, name: str) -> Any:
    """Make the intrinsic for adding a block's products over 64 bytes of k, by the named instruction."""

    @intrinsic
    def add(
        typingctx: Any, x: Any, i: Any, ldx: Any, w: Any, j: Any, ldw: Any, rows: Any, columns: Any
    ) -> Any:
        """Add products of the left tiles at x[i ...] and the right ones at w[j ...], see `multiply`."""

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            x_, i_, ldx_, w_, j_, ldw_, rows_, columns_ = args
            left, right = pointer(context, builder, x, x_, i_, I8), pointer(context, builder, w, w_, j_, I8)
            for r, place in enumerate(_places(builder, left, ldx_, block.rows, rows_)):
                call(builder, "llvm.x86.tileloadd64", VOID, _number(LEFT + r), place, _whole(TILE_BYTES))
            for c, place in enumerate(_places(builder, right, ldw_, block.columns, columns_)):
                call(builder, "llvm.x86.tileloadd64", VOID, _number(RIGHT), place, _whole(TILE_BYTES))
                for r in range(block.rows):
                    tiles = (r * block.columns + c, LEFT + r, RIGHT)
                    call(builder, f"llvm.x86.{name}", VOID, *map(_number, tiles))
            return context.get_dummy_value()

        return types.void(x, INDEX, INDEX, w, *[INDEX] * 4), codegen

    return add


def _only_products(name: str) -> Any:
    """Make the intrinsic for adding four products of loaded tiles, without loading any. For the benchmark."""

    @intrinsic
    def add(typingctx: Any) -> Any:
        """Add the product of the first left tile and the right one to sums 0, 1, 2 and 3."""

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            for i in range(BLOCK_TILES):
                call(builder, f"llvm.x86.{name}", VOID, *map(_number, (i, LEFT, RIGHT)))
            return context.get_dummy_value()

        return types.void(), codegen

    return add


add_int8_only, add_exact_only = _only_products("tdpbsud"), _only_products("tdpbf16ps")


def _multiplier(block: Block, name: str) -> Any:
    """Make the kernel of a block of products by a given instruction."""
    load, store = _on_sums(block, "tileloadd64"), _on_sums(block, "tilestored64")
    clear, add = _clear_sums, _add_products(block, name)

    def multiply(c, at, ldc, goes_on, x, i, ldx, w, j, ldw, last, depth, rows, columns):
        """The sums at c[at ...] = (themselves if it goes on, else zero) + products of `depth` tiles of k.

        `rows` left tiles are there and `columns` right ones, at least one of each. In bytes: sums of the
        next 16 rows are TILE_SIZE further, those of the next 16 columns ldc. The next 16 rows of x are ldx
        further, the next 16 columns of w ldw. The next tile of k comes behind a tile, but the last one of w
        begins no more than `last` behind the first.
        """
        if goes_on:
            load(c, at, ldc, rows, columns)
        else:
            clear()
        for k in range(depth):
            from_x, from_w = k * TILE_SIZE // x.itemsize, min(k * TILE_SIZE, last) // w.itemsize
            add(x, i + from_x, ldx, w, j + from_w, ldw, rows, columns)
        store(c, at, ldc, rows, columns)

    multiply.__qualname__ = f"multiply_{name}_{block.rows}x{block.columns}"
    return part(multiply)


int8_tall, int8_flat = (_multiplier(block, "tdpbsud") for block in (TALL, FLAT))
signed_tall = _multiplier(TALL, "tdpbssd")
exact_tall, exact_flat = (_multiplier(block, "tdpbf16ps") for block in (TALL, FLAT))


@intrinsic
def _add_quarters(typingctx: Any, x: Any, starts: Any, w: Any, j: Any) -> Any:
    """Add to sums r a product: the left quarter at x[starts[r] ...], rows one behind the other, by the right
    one at w[j ...]."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        x_, starts_, w_, j_ = args
        right = pointer(context, builder, w, w_, j_, I8)
        call(builder, "llvm.x86.tileloadd64", VOID, _number(RIGHT), right, _whole(TILE_BYTES))
        for i in range(BLOCK_TILES):
            place = pointer(context, builder, x, x_, builder.extract_value(starts_, i), I8)
            left = _number(LEFT + i % 2)
            call(builder, "llvm.x86.tileloadd64", VOID, left, place, _whole(QUARTER))
            call(builder, "llvm.x86.tdpbusd", VOID, _number(i), left, _number(RIGHT))
        return context.get_dummy_value()

    return types.void(x, starts, w, INDEX), codegen


@intrinsic
def _store_apart(typingctx: Any, c: Any, places: Any, ldc: Any) -> Any:
    """Store the sums r to c[places[r] ...], with rows ldc apart; c has 4-byte numbers."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        c_, places_, ldc_ = args
        for i in range(BLOCK_TILES):
            place = pointer(context, builder, c, c_, builder.extract_value(places_, i), I8)
            stride = builder.mul(ldc_, _whole(DEPTH))
            call(builder, "llvm.x86.tilestored64", VOID, _number(i), place, stride)
        return context.get_dummy_value()

    return types.void(c, places, INDEX), codegen


@part
def multiply_quarters(c, places, ldc, x, starts, ahead, w, j, depth):
    """Multiply four times 16 rows of x uint8 by 16 columns of w int8, `depth` quarters of tiles of k, as they
    lie.

    A product of quarters takes as long as one of whole tiles, but nothing has to be copied first. x[starts[r]
    ...] is [depth, 16 rows, 16], w[j ...] [depth, 4, 16 columns, 4]; the sums go to c[places[r] ...] int32,
    rows ldc apart. The memory at x[ahead[r] ...] is prefetched.
    """
    _clear_sums()
    for k in range(0, depth * QUARTER_SIZE, QUARTER_SIZE):
        _add_quarters(x, (starts[0] + k, starts[1] + k, starts[2] + k, starts[3] + k), w, j + k)
        for line in range(k, k + QUARTER_SIZE, TILE_BYTES):
            for each in ahead:
                prefetch(x, each + line)
    _store_apart(c, places, ldc)


@intrinsic
def store_bf16(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Store 16 BF16 numbers, given as float32 values, side by side from array[index] on."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        upper = builder.lshr(builder.bitcast(args[2], VI32), constant(VI32, 16))
        address = pointer(context, builder, array, args[0], args[1], VI16)
        builder.store(builder.trunc(upper, VI16), address).align = 1
        return context.get_dummy_value()

    return types.void(array, INDEX, f32x16), codegen


@intrinsic
def copy_row(typingctx: Any, to: Any, i: Any, x: Any, j: Any) -> Any:
    """Copy 64 bytes from x[j] to to[i]."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        row = unaligned_load(builder, pointer(context, builder, x, args[2], args[3], VI32))
        builder.store(row, pointer(context, builder, to, args[0], args[1], VI32)).align = 1
        return context.get_dummy_value()

    return types.void(to, INDEX, x, INDEX), codegen


@intrinsic
def turn_quarter(typingctx: Any, to: Any, i: Any, x: Any, j: Any) -> Any:
    """Transpose a quarter of a left tile, x[j ...] uint8 (signed numbers plus 128), to one of a right tile,
    to[i ...] int8. The n-th four bytes of row r become the r-th four of row n."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        def place(array: Any, value: Any, start: Any, n: int) -> Any:
            index = builder.add(start, ir.Constant(start.type, TILE_BYTES * n))
            return pointer(context, builder, array, value, index, VI32)

        def joined(one: Any, other: Any, lanes: list[int]) -> Any:
            return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))

        signs = constant(VI32, 0x80808080)
        vectors = [
            builder.xor(unaligned_load(builder, place(x, args[2], args[3], n)), signs) for n in range(DEPTH)
        ]
        for n in range(DEPTH):
            half = [lane + n for lane in range(0, 2 * LANES, DEPTH)]
            lower, upper = joined(vectors[0], vectors[1], half), joined(vectors[2], vectors[3], half)
            builder.store(joined(lower, upper, list(range(LANES))), place(to, args[0], args[1], n)).align = 1
        return context.get_dummy_value()

    return types.void(to, INDEX, x, INDEX), codegen


@intrinsic
def bf16_pairs(typingctx: Any, even: Any, odd: Any) -> Any:
    """Pair two BF16 numbers in each lane, the first one below."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        lower, upper = (builder.bitcast(each, VI32) for each in args)
        return builder.or_(builder.lshr(lower, constant(VI32, 16)), upper)

    return i32x16(f32x16, f32x16), codegen


@intrinsic
def misalignment(typingctx: Any, array: Any) -> Any:
    """Return how many one-byte elements come before the first multiple of 64 bytes; unaligned tiles load more
    slowly."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        address = builder.ptrtoint(context.make_array(array)(context, builder, args[0]).data, I64)
        return builder.and_(builder.neg(address), _whole(TILE_BYTES - 1))

    return INDEX(array), codegen
