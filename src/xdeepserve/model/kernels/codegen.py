"""Vectors of 16 lanes in LLVM's terms: types, and the code for the operations of `simd` and `tiles`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from xdeepserve.jit.compiling import uses_vnni

LANES = 16

I1, I8, I16, I32 = (ir.IntType(bits) for bits in (1, 8, 16, 32))
F32 = ir.FloatType()
VI32, VF32, VI1 = (ir.VectorType(element, LANES) for element in (I32, F32, I1))
VI8, VI16, BYTES = ir.VectorType(I8, LANES), ir.VectorType(I16, LANES), ir.VectorType(I8, 4 * LANES)


def constant(vector: ir.VectorType, value: float | int) -> ir.Constant:
    """Make a constant vector with the same number in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Emit a call of an LLVM intrinsic."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def pointer(
    context: Any, builder: ir.IRBuilder, array_type: types.Array, array: Any, index: ir.Value, to: ir.Type
) -> ir.Value:
    """Emit the address of element `index` of an array, as a pointer to `to`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), to.as_pointer())


def unaligned_load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    value = builder.load(address)
    value.align = 1
    return value


def prefetch_ir(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Emit a prefetch of the 64 bytes at an address."""
    hints = (ir.Constant(I32, hint) for hint in (0, 2, 1))  # to read, into the second-level cache, data
    call(builder, "llvm.prefetch.p0", ir.VoidType(), address, *hints)


def broadcast(builder: ir.IRBuilder, scalar: ir.Value, vector: ir.VectorType) -> ir.Value:
    """Emit a vector with `scalar` in all lanes."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, constant(ir.VectorType(I32, vector.count), 0))


def first_lanes(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Emit a mask of the lanes below `count`."""
    lanes = ir.Constant(VI32, list(range(LANES)))
    return builder.icmp_signed("<", lanes, broadcast(builder, builder.trunc(count, I32), VI32))


def fold(
    builder: ir.IRBuilder, value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Combine the upper half of the lanes into the lower, until a single lane is left."""
    half = LANES // 2
    while half:
        lower, upper = (
            builder.shuffle_vector(
                value, value, ir.Constant(ir.VectorType(I32, half), list(range(start, start + half)))
            )
            for start in (0, half)
        )
        value = combine(lower, upper)
        half //= 2
    return builder.extract_element(value, ir.Constant(I32, 0))


def larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def round_bf16_ir(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Emit the rounding of <16 x float>, finite, to the nearest bfloat16, ties to even."""
    bits = builder.bitcast(value, VI32)
    odd = builder.and_(builder.lshr(bits, constant(VI32, 16)), constant(VI32, 1))
    bits = builder.add(builder.add(bits, constant(VI32, 0x7FFF)), odd)
    return builder.bitcast(builder.and_(bits, constant(VI32, 0xFFFF0000)), VF32)


class BF16Type(ir.Type):
    """LLVM's BF16 type, missing in llvmlite."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BF16Type)

    def __hash__(self) -> int:
        return hash(BF16Type)


def dot2_ir(builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """acc + upper BF16 of a x upper one of b, rounded, + lower x lower, rounded; only with AVX-512 BF16.

    All are <16 x float>, a and b by their bits.
    """
    pairs = ir.VectorType(BF16Type(), 2 * LANES) if llvm.llvm_version_info[0] >= 16 else VI32
    a, b = builder.bitcast(a, pairs), builder.bitcast(b, pairs)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VF32, acc, a, b)


def dot4_ir(builder: ir.IRBuilder, acc: ir.Value, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """acc + dot products of four bytes per lane, unsigned x signed, exact in 32 bits. All are <16 x i32>.

    One instruction with AVX-512 VNNI. Elsewhere even and odd bytes are widened to 16 bits, and a
    multiplication with an addition of neighbours follows, for which SSE2 has an instruction (pmaddwd).
    """
    if uses_vnni():
        name = "llvm.x86.avx512.vpdpbusd.512"
        if llvm.llvm_version_info[0] >= 22:
            unsigned, signed = builder.bitcast(unsigned, BYTES), builder.bitcast(signed, BYTES)
        return call(builder, name, VI32, acc, unsigned, signed)
    halves = ir.VectorType(I16, 2 * LANES)
    eight = constant(halves, 8)
    u, s = builder.bitcast(unsigned, halves), builder.bitcast(signed, halves)
    even = builder.and_(u, constant(halves, 255)), builder.ashr(builder.shl(s, eight), eight)
    odd = builder.lshr(u, eight), builder.ashr(s, eight)
    wide = ir.VectorType(I32, 2 * LANES)
    first, second = (
        ir.Constant(ir.VectorType(I32, LANES), list(range(start, 2 * LANES, 2))) for start in (0, 1)
    )
    for a, b in (even, odd):
        product = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
        pairs = (builder.shuffle_vector(product, product, which) for which in (first, second))
        acc = builder.add(acc, builder.add(*pairs))
    return acc
