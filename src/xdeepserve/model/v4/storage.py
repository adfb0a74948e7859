"""How DeepSeek-V4's checkpoints store tensors: their names, FP4, and scales that are powers of two.

FP4 (e2m1): two numbers a byte, the even column's in the lower half; one scale for 32 columns of a row.
FP8: one scale for 128 x 128. Scales are e8m0, 2^(byte - 127), or float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from xdeepserve.model.tensor_file import RenamedTensor, TensorFile, in_float32
from xdeepserve.model.v4.tables import FUSED, experts_of, spelled

FP4_BLOCK = 32
SCALE_DTYPES = ("F8_E8M0", "U8")
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_VALUES = np.concatenate([_FP4, -_FP4])


def by_table_names(
    stored: Mapping[str, TensorFile | RenamedTensor], num_layers: int
) -> dict[str, TensorFile | RenamedTensor]:
    """Return stored tensors under the names of the tables; fused experts become single ones."""
    found: dict[str, TensorFile | RenamedTensor] = {}
    for stored_name, file in stored.items():
        assert isinstance(file, TensorFile)
        name = spelled(stored_name, num_layers)
        if FUSED.fullmatch(name):
            for expert, number, rows in experts_of(name, file.shape(stored_name)):
                found[expert] = RenamedTensor(file, stored_name, (number, rows))
        else:
            found[name] = RenamedTensor(file, stored_name)
    return found


def from_fp4(packed: NDArray[Any], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Unpack packed int8 [out, in / 2] and multiply with scale [out, in / 32] -> float32 [out, in]."""
    codes = packed.view(np.uint8)
    values = np.empty((len(codes), 2 * codes.shape[1]), np.float32)
    values[:, ::2], values[:, 1::2] = _FP4_VALUES[codes & 15], _FP4_VALUES[codes >> 4]
    return values * np.repeat(scale, FP4_BLOCK, axis=1)[:, : values.shape[1]]


def powers_of_two(scale: NDArray[Any]) -> NDArray[np.float32]:
    """Return scales as float32; bytes are exponents."""
    return in_float32(scale.view(ml_dtypes.float8_e8m0fnu) if scale.dtype == np.uint8 else scale)
