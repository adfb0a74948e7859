"""bfloat16 as its 16 bits, since NumPy has no such type. The fast twin is `jit.bf16`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def to_bf16(x: Float32) -> npt.NDArray[np.uint16]:
    """The bits of float32 values rounded to bfloat16, to nearest, ties to even. NaN stays NaN."""
    return (_rounded(x) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> Float32:
    """The float32 values of bfloat16 bits; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_bf16(x: Float32) -> Float32:
    """The nearest bfloat16 values, ties to even, kept in float32."""
    return (_rounded(x) & np.uint32(0xFFFF0000)).view(np.float32)


def _rounded(x: Float32) -> npt.NDArray[np.uint32]:
    """Bits whose upper half is the nearest bfloat16 value; what the lower half holds does not matter."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    # Half a unit, less one if the kept bit is even: carries into the kept half exactly when rounding up.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    is_nan = np.isnan(bits.view(np.float32))
    if is_nan.any():  # a carry may leave the NaNs
        rounded[is_nan] = bits[is_nan] | np.uint32(0x400000)
    return rounded
