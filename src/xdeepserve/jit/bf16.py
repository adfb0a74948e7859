"""bfloat16 as its 16 bits, in kernels: the fast twin of `xdeepserve.bf16`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xdeepserve.jit.compiling import kernel, part
from xdeepserve.jit.pointers import i32_flat, u16_flat


@part
def upper_half(b):
    """Bits uint16 of a float32's bits uint32, rounded to nearest, ties to even. NaN stays NaN."""
    if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16((b >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@part
def widened(b):
    """The bits uint32 of the float32 with the value of bfloat16 bits uint16."""
    return np.uint32(b) << np.uint32(16)


@part
def round_at(target, source, size):
    """`size` float32 values at an address, rounded, to another one."""
    to, bits = u16_flat(target, size), i32_flat(source, size)
    for i in range(size):
        to[i] = upper_half(np.uint32(bits[i]))


@part
def widen_at(values, source):
    """values float32 [N] = the bfloat16 bits at an address."""
    bits, words = u16_flat(source, values.size), values.view(np.uint32)
    for i in range(values.size):
        words[i] = widened(bits[i])


@kernel
def _round(out, bits):
    """out uint16 [N] of the bits uint32 [N] of float32 values."""
    for i in range(bits.size):
        out[i] = upper_half(bits[i])


@kernel
def _widen(bits, x):
    """bits uint32 [N] of float32 values, of bfloat16 bits x uint16 [N]."""
    for i in range(x.size):
        bits[i] = widened(x[i])


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of float32 values, contiguous, rounded to bfloat16."""
    out = np.empty(x.shape, np.uint16)
    _round(out.reshape(-1), x.reshape(-1).view(np.uint32))
    return out


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The float32 values of bfloat16 bits, contiguous; exact."""
    out = np.empty(bits.shape, np.float32)
    _widen(out.reshape(-1).view(np.uint32), bits.reshape(-1))
    return out
