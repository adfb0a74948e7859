"""Conversion of bfloat16 in kernels, as 16 bits: the fast twin of `xdeepserve.bf16`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xdeepserve.jit.compiling import kernel, part
from xdeepserve.jit.pointers import i32_flat, u16_flat


@part
def upper_half(b):
    """Round a float32's bits (uint32) to bfloat16's (uint16), to nearest, ties to even. NaN stays NaN."""
    if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16((b >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@part
def widened(b):
    """Return the bits (uint32) of the float32 with the value of bfloat16 bits (uint16)."""
    return np.uint32(b) << np.uint32(16)


@part
def round_at(target, source, size):
    """Round `size` float32 values at an address, and write the bfloat16 bits to another address."""
    to, bits = u16_flat(target, size), i32_flat(source, size)
    for i in range(size):
        to[i] = upper_half(np.uint32(bits[i]))


@part
def widen_at(values, source):
    """Write the bfloat16 bits at an address to `values`, float32 [N]."""
    bits, words = u16_flat(source, values.size), values.view(np.uint32)
    for i in range(values.size):
        words[i] = widened(bits[i])


@kernel
def _round(out, bits):
    """Round bits uint32 [N] of float32 values to `out`, uint16 [N]."""
    for i in range(bits.size):
        out[i] = upper_half(bits[i])


@kernel
def _widen(bits, x):
    """Widen bfloat16 bits, x uint16 [N], to bits uint32 [N] of float32 values."""
    for i in range(x.size):
        bits[i] = widened(x[i])


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bfloat16 bits of contiguous float32 values, rounded."""
    out = np.empty(x.shape, np.uint16)
    _round(out.reshape(-1), x.reshape(-1).view(np.uint32))
    return out


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return the exact float32 values of contiguous bfloat16 bits."""
    out = np.empty(bits.shape, np.float32)
    _widen(out.reshape(-1).view(np.uint32), bits.reshape(-1))
    return out
