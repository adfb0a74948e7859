"""Arrays at an address, so that one kernel can work in the memories of many dies.

The caller vouches for the addresses: they come from regions of memories that stay allocated. An array made
here is like any other for the kernels that it is handed to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from xdeepserve.jit.compiling import array_part, part


@intrinsic
def _pointer(typingctx: Any, address: Any, dtype: Any) -> Any:
    """Convert an integer `address` to a pointer to elements of the NumPy type `dtype`."""
    pointer = types.CPointer(dtype.dtype)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, dtype), codegen


@intrinsic
def add_at(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add an amount to the u32 at `address` atomically, because other threads may add there, too."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        word = ir.IntType(32)
        at = builder.inttoptr(args[0], word.as_pointer())
        builder.atomic_rmw("add", at, builder.trunc(args[1], word), "seq_cst")
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


@intrinsic
def prefetch_at(typingctx: Any, address: Any) -> Any:
    """Prefetch the 64 bytes at `address`; they need not exist."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        at = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [at.type, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        hints = [ir.Constant(word, hint) for hint in (0, 3, 1)]  # to read, into the nearest cache, data
        builder.call(function, [at, *hints])
        return context.get_dummy_value()

    return types.none(types.int64), codegen


@array_part
def f32(address, rows, columns):
    """View memory at an address as a float32 array [rows, columns]."""
    return carray(_pointer(address, np.float32), (rows, columns))


@array_part
def f32_flat(address, size):
    """View memory at an address as a float32 array [size]."""
    return carray(_pointer(address, np.float32), (size,))


@array_part
def flat_like(address, size, example):
    """View memory at an address as an array [size] of the dtype of `example`."""
    return carray(_pointer(address, example.dtype), (size,))


@array_part
def i32(address, rows, columns):
    """View memory at an address as an int32 array [rows, columns]."""
    return carray(_pointer(address, np.int32), (rows, columns))


@array_part
def i32_flat(address, size):
    """View memory at an address as an int32 array [size]."""
    return carray(_pointer(address, np.int32), (size,))


@array_part
def i64_flat(address, size):
    """View memory at an address as an int64 array [size]."""
    return carray(_pointer(address, np.int64), (size,))


@array_part
def i8(address, rows, columns):
    """View memory at an address as an int8 array [rows, columns]."""
    return carray(_pointer(address, np.int8), (rows, columns))


@array_part
def u8_flat(address, size):
    """View memory at an address as a uint8 array [size]."""
    return carray(_pointer(address, np.uint8), (size,))


@array_part
def u16_flat(address, size):
    """View memory at an address as a uint16 array [size]."""
    return carray(_pointer(address, np.uint16), (size,))


@array_part
def f32_tiles(address, a, b, c, d, e):
    """View memory at an address as a float32 array of five axes."""
    return carray(_pointer(address, np.float32), (a, b, c, d, e))


@array_part
def u8_tiles(address, a, b, c, d, e):
    """View memory at an address as a uint8 array of five axes."""
    return carray(_pointer(address, np.uint8), (a, b, c, d, e))


@part
def copy_bytes(target, source, size):
    """Copy `size` bytes, a multiple of 8, between 8-byte aligned addresses that do not overlap."""
    to, of = i64_flat(target, size // 8), i64_flat(source, size // 8)
    for i in range(size // 8):
        to[i] = of[i]
