"""Division by a divisor shared by many numbers, exact to the last bit, without a division for each vector.

AVX-512 divides 16 lanes in the time of some thirty multiply-adds. Let y be 1 / b, rounded, q be a * y, r be
a - q * b, rounded once, and the quotient q + r * y, rounded once (P. Markstein, "Computation of elementary
functions on the IBM RISC System/6000 processor", IBM J. Res. Dev. 34, 1990). It is a / b rounded to nearest,
as a division's. For with a and b in [1, 2), y is wrong by 2**-25 at most, and what is rounded last by

    a >= b:  b * (2 + a) * 2**-50, which is less than 8 * 2**-50
    a <  b:  b * (1 + b) * 2**-50, and 2**-47 * y because r may have a bit too many, less than 14 * 2**-50

A rounding can go wrong only if a / b is no further from the middle of two neighbours. It lies k * 2**-47 / b
from there, or k * 2**-48 / b if a < b, for a whole k of 1 and more: so k is 1 in the first case, and below 7
in the second. These are some millions of pairs, and the tests try all of them. Nothing on the way may
overflow, or be too small for all its bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from xdeepserve.jit.compiling import TILE_OPTIONS, part, register_floats
from xdeepserve.model.kernels.codegen import I16, VF32, VI32, call, constant
from xdeepserve.model.kernels.simd import f32x16, negative

LEAST, MOST = np.float32(2.0**-60), np.float32(2.0**60)
LEAST_BITS, SPAN_BITS = int(LEAST.view(np.int32)), int(MOST.view(np.int32)) - int(LEAST.view(np.int32))


@intrinsic
def _fused(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute a * b + c with a single rounding, on CPUs with fused multiply-adds."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return call(builder, "llvm.fma.v16f32", VF32, *args)

    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def _are_tame(typingctx: Any, a: Any) -> Any:
    """Whether all lanes are between LEAST and MOST in magnitude."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        magnitude = builder.and_(builder.bitcast(args[0], VI32), constant(VI32, 0x7FFFFFFF))
        above = builder.sub(magnitude, constant(VI32, LEAST_BITS))
        inside = builder.icmp_unsigned("<=", above, constant(VI32, SPAN_BITS))
        return builder.icmp_unsigned("==", builder.bitcast(inside, I16), ir.Constant(I16, -1))

    return types.boolean(f32x16), codegen


def quotient(a, b, inverse):
    """Divide a / b in each lane; inverse = 1 / b.

    b is at least 2**-47 and at most MOST, and a no larger than MOST * b: the bits are those of a division,
    but where |a| < LEAST, whose quotients come out small, and zeros without their sign.
    """
    raise NotImplementedError


@overload(quotient, jit_options=TILE_OPTIONS)
def _quotient_of(a, b, inverse):
    def at_once(a, b, inverse):
        return a / b

    def by_inverse(a, b, inverse):
        q = a * inverse
        return _fused(_fused(negative(q), b, a), inverse, q)

    return by_inverse if register_floats() == 512 else at_once


@part
def divide(a, b, inverse):
    """Divide a / b in each lane, with b between LEAST and MOST; inverse = 1 / b."""
    return quotient(a, b, inverse) if _are_tame(a) else a / b
