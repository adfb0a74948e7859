"""bfloat16 as its 16 bits, since NumPy has no such type. The fast twin is `jit.bf16`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of float32 values rounded to bfloat16, to nearest, ties to even. NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    # Half a unit, less one if the kept bit is even: carries into the kept half exactly when rounding up.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet_nan, rounded).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The float32 values of bfloat16 bits; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The nearest bfloat16 values, ties to even, kept in float32."""
    return from_bf16(to_bf16(x))
