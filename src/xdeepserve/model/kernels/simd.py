"""Vectors of 16 floats or 32-bit integers for Numba kernels: `a * b + c` on 16 lanes at once.

Numba vectorises simple loops automatically, but never to the INT8 dot-product instruction, and it keeps no
tile of accumulators in registers. So the hot kernels are explicit: they load, multiply, add and store values
of the types `f32x16` and `i32x16`. LLVM turns a 16-lane operation into the CPU's instructions: one of
AVX-512, two of AVX2, four of SSE2 or NEON. A lane is an IEEE float32 in each case and every operation rounds
once (multiplications and additions are never fused), so the bits do not depend on the CPU.

    load, load_part     16 neighbouring elements of an array; `part`: the first `count`, zeros in the rest
    store, store_part   the other way round; `part` touches nothing behind the first `count`
    splat               one number in all lanes
    tree_sum, max_of    over the lanes; the sum adds the upper half to the lower, like canonical.lane_sum
    first_equal         the first lane with a number
    to_f32              integers to floats

Positions are flat indices into C-contiguous arrays, and are not checked. A uint8 array holds signed numbers
plus 128, which is what the dot product takes on one of its sides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from xdeepserve.model.kernels.codegen import (
    I8,
    I32,
    LANES,
    VF32,
    VI8,
    VI32,
    broadcast,
    call,
    constant,
    dot4_ir,
    first_lanes,
    fold,
    larger,
    pointer,
    prefetch_ir,
    round_bf16_ir,
    unaligned_load,
)


class VectorType(types.Type):
    """Numba type of 16 lanes of `element`."""

    def __init__(self, name: str, element: types.Type, ir_type: ir.Type) -> None:
        super().__init__(name)
        self.element, self.ir_type = element, ir_type


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):
    """Data model of a vector: an LLVM vector."""

    def __init__(self, dmm: Any, fe_type: VectorType) -> None:
        super().__init__(dmm, fe_type, fe_type.ir_type)


f32x16 = VectorType("f32x16", types.float32, VF32)
i32x16 = VectorType("i32x16", types.int32, VI32)


def _operator(op: Callable[..., Any], vector: VectorType, instruction: str) -> None:
    """Teach Numba the operation `vector op vector`."""

    class Template(ConcreteTemplate):
        cases = [signature(vector, vector, vector)]  # noqa: RUF012

    infer_global(op)(Template)

    @lower_builtin(op, vector, vector)
    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return getattr(builder, instruction)(*args)


for _op, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_op, f32x16, _instruction)
_operator(operator.add, i32x16, "add")


def is_vector_array(array: types.Type, *elements: types.Type) -> bool:
    """Whether vectors of 16 can be loaded from an array type: C-contiguous, of one of these elements."""
    return isinstance(array, types.Array) and array.layout == "C" and array.dtype in elements


# ---------------------------------------------------------------- memory


def _load_as(array: types.Type) -> tuple[VectorType, ir.VectorType] | None:
    """Return the type loaded from `array`, and the vector in memory. Bytes arrive as floats."""
    if is_vector_array(array, types.int8, types.uint8):
        return f32x16, VI8
    if is_vector_array(array, types.float32):
        return f32x16, VF32
    if is_vector_array(array, types.int32):
        return i32x16, VI32
    return None


def _widen(builder: ir.IRBuilder, array: types.Array, value: ir.Value) -> ir.Value:
    """Convert bytes to floats; a uint8 stands for its value less 128."""
    if array.dtype == types.uint8:
        value = builder.xor(value, constant(VI8, -128))
    return builder.sitofp(value, VF32) if value.type == VI8 else value


@intrinsic
def load(typingctx: Any, array: Any, index: Any) -> Any:
    """Load elements [index, index + 16): float32 and bytes give f32x16, int32 gives i32x16."""
    loaded = _load_as(array)
    if loaded is None:
        return None
    result, memory = loaded

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _widen(
            builder,
            array,
            unaligned_load(builder, pointer(context, builder, array, args[0], args[1], memory)),
        )

    return result(array, types.intp), codegen


@intrinsic
def load_part(typingctx: Any, array: Any, index: Any, count: Any) -> Any:
    """Load elements [index, index + count), count <= 16, into the first lanes; zeros in the others."""
    loaded = _load_as(array)
    if loaded is None:
        return None
    result, memory = loaded
    suffix = {VI8: "v16i8", VF32: "v16f32", VI32: "v16i32"}[memory]

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        address = pointer(context, builder, array, args[0], args[1], memory)
        mask = first_lanes(builder, args[2])
        zero = ir.Constant(memory, None)
        value = call(
            builder, f"llvm.masked.load.{suffix}.p0", memory, address, ir.Constant(I32, 1), mask, zero
        )
        return _widen(builder, array, value)

    return result(array, types.intp, types.intp), codegen


def _store_as(array: types.Type, value: types.Type) -> ir.VectorType | None:
    """Return the vector in memory for a store of `value` into `array`; None if impossible. Floats become INT8
    in byte arrays."""
    if value == f32x16 and is_vector_array(array, types.int8, types.uint8):
        return VI8
    if value == f32x16 and is_vector_array(array, types.float32):
        return VF32
    if value == i32x16 and is_vector_array(array, types.int32):
        return VI32
    return None


def _narrow(builder: ir.IRBuilder, array: types.Array, value: ir.Value, memory: ir.VectorType) -> ir.Value:
    """Convert floats to bytes for a store, as the inverse of `_widen`."""
    if memory != VI8:
        return value
    value = builder.trunc(builder.fptosi(value, VI32), VI8)
    return builder.xor(value, constant(VI8, -128)) if array.dtype == types.uint8 else value


@intrinsic
def store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Store value as elements [index, index + 16). Bytes take whole numbers from -128 to 127."""
    memory = _store_as(array, value)
    if memory is None:
        return None

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        address = pointer(context, builder, array, args[0], args[1], memory)
        builder.store(_narrow(builder, array, args[2], memory), address).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen


@intrinsic
def store_part(typingctx: Any, array: Any, index: Any, value: Any, count: Any) -> Any:
    """Store the first lanes as elements [index, index + count), count <= 16."""
    memory = _store_as(array, value)
    if memory is None:
        return None
    suffix = {VI8: "v16i8", VF32: "v16f32", VI32: "v16i32"}[memory]

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        address = pointer(context, builder, array, args[0], args[1], memory)
        mask = first_lanes(builder, args[3])
        narrow = _narrow(builder, array, args[2], memory)
        call(
            builder,
            f"llvm.masked.store.{suffix}.p0",
            ir.VoidType(),
            narrow,
            address,
            ir.Constant(I32, 1),
            mask,
        )
        return context.get_dummy_value()

    return types.void(array, types.intp, value, types.intp), codegen


@intrinsic
def transpose(typingctx: Any, out: Any, i: Any, ldo: Any, x: Any, j: Any, ldx: Any) -> Any:
    """Transpose 16 x 16 numbers of 4 bytes: out[i + k * ldo + n] = x[j + n * ldx + k]."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        out_, i_, ldo_, x_, j_, ldx_ = args

        def place(kind: Any, array: ir.Value, start: ir.Value, step: ir.Value, row: int) -> ir.Value:
            index = builder.add(start, builder.mul(step, ir.Constant(step.type, row)))
            return pointer(context, builder, kind, array, index, VI32)

        rows = [unaligned_load(builder, place(x, x_, j_, ldx_, n)) for n in range(LANES)]
        for half in (8, 4, 2, 1):  # of what is transposed already: quarters off the diagonal change places
            for n in (each for each in range(LANES) if not each & half):
                one, other = rows[n], rows[n + half]
                upper = [LANES + lane - half if lane & half else lane for lane in range(LANES)]
                lower = [LANES + lane if lane & half else lane + half for lane in range(LANES)]
                rows[n] = builder.shuffle_vector(one, other, ir.Constant(VI32, upper))
                rows[n + half] = builder.shuffle_vector(one, other, ir.Constant(VI32, lower))
        for k, row in enumerate(rows):
            builder.store(row, place(out, out_, i_, ldo_, k)).align = 1
        return context.get_dummy_value()

    return types.void(out, types.intp, types.intp, x, types.intp, types.intp), codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Prefetch the 64 bytes at `index`; they need not exist."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        address = pointer(context, builder, array, args[0], args[1], I8)
        prefetch_ir(builder, address)
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


# ---------------------------------------------------------------- arithmetic


@intrinsic
def splat(typingctx: Any, x: Any) -> Any:
    """Return a vector with the float32 `x` in all lanes."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return broadcast(builder, args[0], VF32)

    return f32x16(types.float32), codegen


@intrinsic
def maximum(typingctx: Any, a: Any, b: Any) -> Any:
    """Return the larger value in each lane."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return larger(builder, *args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def minimum(typingctx: Any, a: Any, b: Any) -> Any:
    """Return the smaller value in each lane."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def absolute(typingctx: Any, a: Any) -> Any:
    """Return the absolute value in each lane."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return call(builder, "llvm.fabs.v16f32", VF32, args[0])

    return f32x16(f32x16), codegen


@intrinsic
def negative(typingctx: Any, a: Any) -> Any:
    """Return the negated value in each lane."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.fneg(args[0])

    return f32x16(f32x16), codegen


@intrinsic
def rint(typingctx: Any, a: Any) -> Any:
    """Round to the nearest whole number, ties to even."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return call(builder, "llvm.rint.v16f32", VF32, args[0])

    return f32x16(f32x16), codegen


@intrinsic
def power_of_two(typingctx: Any, n: Any) -> Any:
    """Compute 2.0 ** n for whole n from -126 to 127, by its exponent bits."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        biased = builder.add(builder.fptosi(args[0], VI32), constant(VI32, 127))
        return builder.bitcast(builder.shl(biased, constant(VI32, 23)), VF32)

    return f32x16(f32x16), codegen


@intrinsic
def round_bf16(typingctx: Any, a: Any) -> Any:
    """Round to the nearest bfloat16, ties to even; the twin of `bf16.round_bf16` for finite numbers."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return round_bf16_ir(builder, args[0])

    return f32x16(f32x16), codegen


@intrinsic
def to_f32(typingctx: Any, a: Any) -> Any:
    """Convert i32x16 to the nearest floats."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.sitofp(args[0], VF32)

    return f32x16(i32x16), codegen


@intrinsic
def less_zero_points(typingctx: Any, a: Any, words: Any) -> Any:
    """Subtract 128 times the sum of the four int8 in each lane, by which products with uint8 are too
    large."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        excess = dot4_ir(builder, constant(VI32, 0), constant(VI32, 0x80808080), args[1])
        return builder.sub(args[0], excess)

    return i32x16(i32x16, i32x16), codegen


@intrinsic
def only_first(typingctx: Any, a: Any, count: Any, other: Any) -> Any:
    """Keep the first `count` lanes of a (none, or more than there are, is fine); put `other` in the rest."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(first_lanes(builder, args[1]), args[0], broadcast(builder, args[2], VF32))

    return f32x16(f32x16, types.intp, types.float32), codegen


@intrinsic
def first_equal(typingctx: Any, a: Any, x: Any) -> Any:
    """Return the first lane that is equal to the float32 `x`; 16 if none is."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        is_equal = builder.fcmp_ordered("==", args[0], broadcast(builder, args[1], VF32))
        lanes = builder.zext(builder.bitcast(is_equal, ir.IntType(LANES)), ir.IntType(64))
        end = ir.Constant(ir.IntType(64), 1 << LANES)
        return builder.cttz(builder.or_(lanes, end), ir.Constant(ir.IntType(1), 1))

    return types.intp(f32x16, types.float32), codegen


@intrinsic
def tree_sum(typingctx: Any, a: Any) -> Any:
    """Sum the lanes: the upper half is added to the lower until one is left."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return fold(builder, args[0], builder.fadd)

    return types.float32(f32x16), codegen


@intrinsic
def max_of(typingctx: Any, a: Any) -> Any:
    """Return the largest value of all lanes."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return fold(builder, args[0], lambda x, y: larger(builder, x, y))

    return types.float32(f32x16), codegen
