"""A memory-mapped safetensors file: names, dtypes and shapes from its header, tensors on demand."""

from __future__ import annotations

import json
import os
import struct
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from xdeepserve.bf16 import from_bf16
from xdeepserve.errors import CheckpointError
from xdeepserve.reading import GET_LFS, LFS_POINTER


def _begin(path: Path) -> bytes:
    """Return a file's first bytes; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER))
    except OSError:
        return b""


WITHOUT_NUMPY = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}


class TensorFile:
    """Safetensors file opened for reading, with its header.

    Raises CheckpointError, now or later, if the header is bad or disagrees with the file's length.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle: Any = safe_open(path, framework="numpy")
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except (SafetensorError, OSError, ValueError) as error:
            is_pointer = _begin(path).startswith(LFS_POINTER.encode())
            reason = GET_LFS if is_pointer else "truncated or corrupt safetensors file"
            raise CheckpointError(f"{path}: {reason}") from error
        weakref.finalize(self, os.close, self._fd)
        self._nbytes = os.fstat(self._fd).st_size
        self.names = frozenset(self._handle.keys())

    def dtype(self, name: str) -> str:
        """Return a tensor's type, by safetensors' name: F32, BF16, I8, F8_E4M3, ..."""
        return str(self._handle.get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle.get_slice(name).get_shape())

    def tensor(self, name: str) -> NDArray[Any]:
        """Read a tensor into a fresh array of the stored dtype."""
        # Whoever reads a mapped file beyond its end is killed (SIGBUS).
        if (nbytes := os.fstat(self._fd).st_size) < self._nbytes:
            raise CheckpointError(
                f"{self.path}: cut from {self._nbytes} to {nbytes} bytes while it was in use"
            )
        if (dtype := self.dtype(name)) not in WITHOUT_NUMPY:
            array: NDArray[Any] = self._handle.get_tensor(name)
            return array
        # The safetensors library has no NumPy type for these, but the file's layout is simple.
        with self.path.open("rb") as file:
            (header_size,) = struct.unpack("<Q", file.read(8))
            begin, end = json.loads(file.read(header_size))[name]["data_offsets"]
            file.seek(8 + header_size + begin)
            data = np.frombuffer(file.read(end - begin), dtype=WITHOUT_NUMPY[dtype])
        return data.reshape(self.shape(name))

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read some rows of a tensor into a fresh array of the stored dtype, which must not be FP8."""
        array: NDArray[Any] = self._handle.get_slice(name)[start:stop]
        return array

    def float32(self, name: str) -> NDArray[np.float32]:
        """Read a floating-point tensor as float32, C-contiguous."""
        return in_float32(self.tensor(name))


def in_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Return floating-point numbers, or whole ones, as float32, C-contiguous."""
    if array.dtype == ml_dtypes.bfloat16:
        return from_bf16(array.view(np.uint16))
    return np.ascontiguousarray(array, dtype=np.float32)


class RenamedTensor:
    """Tensor of a file under another name, or some rows of one of several that are stored as one."""

    def __init__(self, file: TensorFile, name: str, part: tuple[int, slice] | None = None) -> None:
        self.path, self._file, self._name, self._part = file.path, file, name, part

    def dtype(self, name: str) -> str:
        return self._file.dtype(self._name)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._file.shape(self._name)
        return shape if self._part is None else (len(range(shape[1])[self._part[1]]), *shape[2:])

    def tensor(self, name: str) -> NDArray[Any]:
        array = self._file.tensor(self._name)
        return array if self._part is None else np.ascontiguousarray(array[self._part])

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        return self.tensor(name)[start:stop]

    def float32(self, name: str) -> NDArray[np.float32]:
        return in_float32(self.tensor(name))
