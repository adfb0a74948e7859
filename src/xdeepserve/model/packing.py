"""Weights in the kernels' layout: groups of 16 columns, each a contiguous stream along k.

A GEMM tile broadcasts numbers of x and multiplies them with 16 neighbouring columns of w. So a group of 16
columns is stored together, k ascending, and a group whose columns run past N is filled up with zeros:

    float32   [K, N] -> [groups, K, 16]
    BF16      [K, N] -> [groups, K / 2, 16, 2]   as uint16, two k of each column side by side, as matrix units
                                                 take them; an odd K is followed by a zero
    INT8      [N, K] -> [groups, K / 4, 16, 4]   4 bytes of each column side by side, as VNNI takes them

INT8 weights are stored as w + 128 in a uint8, because that instruction multiplies unsigned with signed bytes.
Leading axes (experts, heads) stay in front.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.model.canonical import Array

COLUMNS = 16
DEPTH = 4
PAIR = 2


def _ceil(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def packed_shape_f32(k: int, n: int) -> tuple[int, ...]:
    """Return the shape of a packed float32 [K, N]."""
    return (_ceil(n, COLUMNS) // COLUMNS, k, COLUMNS)


def packed_shape_bf16(k: int, n: int) -> tuple[int, ...]:
    """Return the shape of a packed BF16 [K, N]."""
    return (_ceil(n, COLUMNS) // COLUMNS, _ceil(k, PAIR) // PAIR, COLUMNS, PAIR)


def packed_shape_int8(k: int, n: int) -> tuple[int, ...]:
    """Return the shape of a packed INT8 [N, K]."""
    return (_ceil(n, COLUMNS) // COLUMNS, _ceil(k, DEPTH) // DEPTH, COLUMNS, DEPTH)


def pack_f32(w: Array) -> Array:
    """Pack float32 [..., K, N] -> [..., groups, K, 16]."""
    *lead, k, n = w.shape
    padded = np.zeros((*lead, k, _ceil(n, COLUMNS)), np.float32)
    padded[..., :n] = w
    groups = padded.reshape(*lead, k, -1, COLUMNS)
    return np.ascontiguousarray(np.moveaxis(groups, -2, -3))


def pack_bf16(w: Array) -> Array:
    """Pack float32 [..., K, N] -> uint16 [..., groups, ceil(K / 2), 16, 2], the upper halves of the floats'
    bits.

    Raises ValueError if a number is not a BF16 number.
    """
    *lead, k, n = w.shape
    padded = np.zeros((*lead, _ceil(k, PAIR), n), np.float32)
    padded[..., :k, :] = w
    bits = pack_f32(padded).view(np.uint32)
    if (bits & np.uint32(0xFFFF)).any():
        raise ValueError("BF16 cannot hold these weights without loss")
    *lead, k, columns = bits.shape
    pairs = (bits >> np.uint32(16)).astype(np.uint16).reshape(*lead, k // PAIR, PAIR, columns)
    return np.ascontiguousarray(np.moveaxis(pairs, -2, -1))


def pack_int8(w: Array) -> Array:
    """Pack int8 [..., N, K] -> uint8 [..., groups, ceil(K / 4), 16, 4], each + 128."""
    *lead, n, k = w.shape
    padded = np.zeros((*lead, _ceil(n, COLUMNS), _ceil(k, DEPTH)), np.int8)
    padded[..., :n, :k] = w
    groups = padded.reshape(*lead, padded.shape[-2] // COLUMNS, COLUMNS, -1, DEPTH)
    return np.ascontiguousarray(np.moveaxis(groups, -2, -3)).view(np.uint8) ^ np.uint8(128)


class ArraySpec(NamedTuple):
    """Shape and dtype of a prepared array. With `is_matrix` its last two axes are a GEMM's weights, which a
    die holds in BF16 if `is_bf16`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    is_matrix: bool = False
    is_bf16: bool = False

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the array as a die holds it."""
        if not self.is_matrix:
            return self.shape
        return _packed_shape(self.shape, self.dtype.kind == "i", self.is_bf16)

    @property
    def packed_dtype(self) -> np.dtype:
        if not self.is_matrix:
            return self.dtype
        return np.dtype(np.uint8 if self.dtype == np.int8 else np.uint16 if self.is_bf16 else np.float32)

    @property
    def prepared_nbytes(self) -> int:
        """Size of the array before packing (bytes)."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of the packed array on a die (bytes)."""
        return int(np.prod(self.packed_shape)) * self.packed_dtype.itemsize

    def pack(self, array: Array) -> Array:
        """Pack an array for a die; it has this spec, or is part of its stack."""
        if not self.is_matrix:
            return array
        if self.dtype == np.int8:
            return pack_int8(array)
        return pack_bf16(array) if self.is_bf16 else pack_f32(array)


@functools.lru_cache(maxsize=1024)
def _packed_shape(shape: tuple[int, ...], is_int8: bool, is_bf16: bool) -> tuple[int, ...]:
    """Return the shape of a packed matrix, or a stack of them. Cached, because hundreds of dies ask, and most
    get the same answer."""
    *stack, rows, columns = shape
    if is_int8:
        return (*stack, *packed_shape_int8(k=columns, n=rows))
    packed_shape = packed_shape_bf16 if is_bf16 else packed_shape_f32
    return (*stack, *packed_shape(k=rows, n=columns))


# A model's weights as shapes: arrays of any size that take no memory, for runs that only take time.


@functools.lru_cache(maxsize=1 << 14)
def shape_only(dtype: npt.DTypeLike, *shape: int) -> Array:
    """Make an array of any shape that takes one element of memory. Its values mean nothing, and all share
    them."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, (0,) * len(shape))


def packed_shapes(specs: dict[str, ArraySpec]) -> dict[str, Array]:
    """Return arrays without contents, with the shapes of `specs` as a die holds them."""
    return {name: shape_only(spec.packed_dtype, *spec.packed_shape) for name, spec in specs.items()}
