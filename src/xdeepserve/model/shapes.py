"""A model's weights as shapes: arrays of any size that take no memory, for runs that only take time."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from xdeepserve.model.canonical import Array
from xdeepserve.model.packing import ArraySpec


@functools.lru_cache(maxsize=1 << 14)
def shape_only(dtype: npt.DTypeLike, *shape: int) -> Array:
    """An array of any shape that takes one element of memory. Its values mean nothing, and all share them."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, (0,) * len(shape))


def packed_shapes(specs: dict[str, ArraySpec]) -> dict[str, Array]:
    """The arrays of `specs` as a die holds them."""
    return {name: shape_only(spec.packed_dtype, *spec.packed_shape) for name, spec in specs.items()}
