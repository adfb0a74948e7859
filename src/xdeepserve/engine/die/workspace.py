"""Named arrays in a die's HBM: planned by size first, viewed by shape while programs run."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from xdeepserve.hw.memory import Address, Area, Memory, Region
from xdeepserve.model.canonical import Array

MAX_VIEWS = 1 << 14  # views that are kept: steps of the same size need the same ones again and again


class Workspace:
    """Buffers of fixed capacity; `take` views the first bytes of one as a C-contiguous array of any shape.

    Two arrays taken from one buffer share memory: a name is for one use at a time.
    """

    def __init__(self, area: Area) -> None:
        self._area = area
        self._regions: dict[str, tuple[Region, np.dtype]] = {}
        self._flat: dict[str, Array] = {}
        self._views: dict[tuple[object, ...], Array] = {}

    def plan(self, name: str, dtype: npt.DTypeLike, *shape: int) -> None:
        """Reserve a buffer for at most prod(shape) elements."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        self._regions[name] = (self._area.alloc(name, nbytes), dtype)

    def materialise(self, memory: Memory) -> None:
        """Bind all planned buffers to real memory."""
        for name, (region, dtype) in self._regions.items():
            self._flat[name] = memory.view(region, dtype, self.size(name))

    def __contains__(self, name: str) -> bool:
        """Whether a buffer of the given name is planned."""
        return name in self._regions

    def size(self, name: str) -> int:
        """Return the number of elements that a buffer holds."""
        region, dtype = self._regions[name]
        return region.nbytes // dtype.itemsize

    def nbytes(self, name: str) -> int:
        """Return the size of a buffer in bytes."""
        return self._regions[name][0].nbytes

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a buffer's elements."""
        return self._regions[name][1]

    def address(self, name: str) -> Address:
        """Return the address of a buffer, once its memory is materialised."""
        return self._regions[name][0].address

    def part(self, prefix: str) -> Workspace:
        """Return a view of the buffers whose names begin with `prefix`, under names without that prefix."""
        return _Subset(self, prefix)

    def take(self, name: str, *shape: int) -> Array:
        """Return an array of the given shape on buffer `name`; the old contents stay."""
        key = (name, *shape)
        view = self._views.get(key)
        if view is None:
            flat, count = self._flat[name], math.prod(shape)
            if count > flat.size:
                raise ValueError(f"buffer '{name}' holds {flat.size} elements, {list(shape)} needs {count}")
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = flat[:count].reshape(shape)
        return view


class _Subset(Workspace):
    """Subset of a workspace's buffers under shorter names; planning happens in the whole workspace."""

    def __init__(self, whole: Workspace, prefix: str) -> None:
        super().__init__(whole._area)
        self._whole, self._prefix = whole, prefix

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._whole

    def nbytes(self, name: str) -> int:
        return self._whole.nbytes(self._prefix + name)

    def take(self, name: str, *shape: int) -> Array:
        return self._whole.take(self._prefix + name, *shape)
