"""Memory of a node: a single buffer, so that every byte of a pod has an address (node, offset).

Memory is laid out in two phases. *Plan*: code asks a node's three areas for regions by name and size;
nothing is allocated, so a pod that does not fit can be refused with its sum. *Materialise*: each node gets an
anonymous mapping of exactly the planned size, all zeros. Protocols reserve room for the worst routing and
mostly use little of it, so a mapping, whose pages are resident only once they have been written, holds pods
that a bytearray, resident as a whole at once, could not.

    metadata | managed | app        lowest offset first

Metadata and managed data belong to XCCL and come first. Ranks with equal plans have them at equal offsets. So
a rank can compute a peer's addresses from its own layout, whatever either keeps in its app area.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import AddressError, HardwareError, OutOfMemoryError
from .claims import Claims

METADATA_LIMIT = 4 << 20
"""Bytes of a die's metadata area at most (XDS 3.1). The machine reserves all 4 MB; we reserve what the layout
uses, since 768 dies would otherwise hold 3 GB of real memory for fields that nobody writes."""

ALIGNMENT = 64

PAGE_NBYTES = 4096
"""Of HBM, as far as it can be lost alone: what the driver takes out of use and remaps. Assumed."""

SCRIBBLE = 0xDB  # no plausible float, scale, token, event or address is made of these bytes

Bytes: TypeAlias = bytes | bytearray | memoryview


class Address(NamedTuple):
    """Address of a byte in the pod: `node` is a die's or host's number, `offset` counts from its memory's
    start."""

    node: int
    offset: int

    def plus(self, nbytes: int) -> Address:
        return Address(self.node, self.offset + nbytes)


class Region:
    """Named piece of an area. Its offset is known once the node's plan is sealed."""

    __slots__ = ("area", "name", "nbytes", "start")

    def __init__(self, area: Area, name: str, start: int, nbytes: int) -> None:
        self.area, self.name, self.start, self.nbytes = area, name, start, nbytes

    @property
    def offset(self) -> int:
        """Offset within the node's memory."""
        return self.area.base + self.start

    @property
    def address(self) -> Address:
        return Address(self.area.node, self.offset)

    def __repr__(self) -> str:
        return (
            f"Region({self.area.name}/{self.name} of node {self.area.node}, +{self.start}, {self.nbytes} B)"
        )


class Area:
    """Allocator of a node's area.

    Regions follow each other until memory is materialised; later ones take the first free piece that fits.
    """

    def __init__(self, node: int, name: str, limit: int | None = None) -> None:
        self.node, self.name, self.limit = node, name, limit
        self.regions: dict[str, Region] = {}
        self.nbytes = 0
        self.align = ALIGNMENT  # the largest that a region asks for: the area starts at a multiple of it
        self._base: int | None = None
        self._free: list[tuple[int, int]] = []  # start and end of what was given back; ascending, apart

    @property
    def base(self) -> int:
        """Offset of the area in the node's memory. Raises HardwareError before the plan is sealed."""
        if self._base is None:
            raise HardwareError(
                f"node {self.node}: the {self.name} area has no address before it is materialised"
            )
        return self._base

    @property
    def end(self) -> int:
        return self.base + self.nbytes

    def alloc(self, name: str, nbytes: int, align: int = ALIGNMENT) -> Region:
        """Reserve `nbytes` under a name unique in this area, at an offset that `align` divides.

        Raises OutOfMemoryError if the area's limit is exceeded or, once memory is materialised, if no free
        piece is large enough.
        """
        where = f"node {self.node}: {self.name} area"
        nbytes, align = index(nbytes), index(align)
        if name in self.regions:
            raise AddressError(f"{where}: region '{name}' is already allocated")
        if nbytes < 0 or align < 1 or align & (align - 1):
            raise AddressError(f"{where}: region '{name}' asks for {nbytes} bytes aligned to {align}")
        if self._base is not None:
            region = self.regions[name] = Region(self, name, self._take_free(name, nbytes, align), nbytes)
            return region
        start = -(-self.nbytes // align) * align
        if self.limit is not None and start + nbytes > self.limit:
            raise OutOfMemoryError(
                f"{where}: no room for '{name}' ({nbytes} bytes): {self.nbytes} of {self.limit} are in use"
            )
        region = self.regions[name] = Region(self, name, start, nbytes)
        self.nbytes, self.align = start + nbytes, max(self.align, align)
        return region

    def _take_free(self, name: str, nbytes: int, align: int) -> int:
        """Take room for a region from the free pieces; return its start in the area."""
        for at, (begin, end) in enumerate(self._free):
            start = -(-(self.base + begin) // align) * align - self.base
            if start + nbytes <= end:
                rest = [(begin, start), (start + nbytes, end)]
                self._free[at : at + 1] = [(a, b) for a, b in rest if a < b]
                return start
        raise OutOfMemoryError(
            f"node {self.node}: {self.name} area: no room for '{name}' ({nbytes} bytes): {self.num_free} of "
            f"{self.nbytes} are free"
        )

    def free(self, region: Region) -> None:
        """Give back a region after its last use."""
        if self.regions.get(region.name) is not region:
            raise AddressError(f"{region} is not allocated")
        del self.regions[region.name]
        pieces = sorted([*self._free, (region.start, region.start + region.nbytes)])
        self._free = []
        for begin, end in pieces:
            if self._free and self._free[-1][1] == begin:
                begin = self._free.pop()[0]
            if begin < end:
                self._free.append((begin, end))

    def seal(self, base: int, end: int, spare: int = 0) -> None:
        """Fix the area's place and size (at least its regions'), with `spare` free bytes behind it."""
        self._base, self.nbytes = base, end - base + spare
        if spare:
            self._free = [(end - base, end - base + spare)]

    @property
    def num_free(self) -> int:
        """Number of bytes in free pieces."""
        return sum(end - begin for begin, end in self._free)

    def check_integrity(self) -> None:
        """Check the area: regions lie inside, without overlap, and nothing in use is free."""
        end = 0
        free = [Region(self, "free", begin, end - begin) for begin, end in self._free]
        for region in sorted([*self.regions.values(), *free], key=lambda each: (each.start, each.nbytes)):
            if region.start < end or region.start + region.nbytes > self.nbytes:
                raise AddressError(
                    f"{region} overlaps its neighbour or leaves its area of {self.nbytes} bytes"
                )
            end = region.start + region.nbytes


class MemoryPlan:
    """Planned contents of a node's memory, by area."""

    def __init__(self, node: int, capacity: int | None = None) -> None:
        self.node, self.capacity = node, capacity
        self.metadata = Area(node, "metadata", METADATA_LIMIT)
        self.managed = Area(node, "managed")
        self.app = Area(node, "app")
        self.provide: Callable[[int], memoryview] = zeros  # of so many bytes, all zeros
        self.growth = 1  # how many times what is planned now the app area may come to hold

    @property
    def areas(self) -> tuple[Area, Area, Area]:
        """Areas in the order of their offsets."""
        return self.metadata, self.managed, self.app

    @property
    def ends(self) -> tuple[int, int, int]:
        """Ends of the areas (offsets). Each area is padded, so the next one starts as aligned as its regions
        ask."""
        end, ends = 0, []
        for area, align in zip(self.areas, (self.managed.align, self.app.align, ALIGNMENT), strict=True):
            end = -(-(end + area.nbytes) // align) * align
            ends.append(end)
        return ends[0], ends[1], ends[2]

    def find_page(self, page: int | str) -> int | None:
        """Return the offset of a page, given by number or by the name of a region that begins in it. None if
        nothing of the plan lies there, or no region has that name."""
        start = page
        if isinstance(page, str):
            bases = zip(self.areas, (0, *self.ends), strict=False)
            found = (base + area.regions[page].start for area, base in bases if page in area.regions)
            start = next(found, -PAGE_NBYTES) // PAGE_NBYTES
        assert isinstance(start, int)
        return start * PAGE_NBYTES if 0 <= start * PAGE_NBYTES < self.ends[-1] else None

    @property
    def nbytes(self) -> int:
        """Number of bytes in use, including padding between areas."""
        return self.ends[-1] - self.app.num_free


class Watch:
    """Calls `on_write(offset, nbytes)` for every write touching [start, stop)."""

    __slots__ = ("on_write", "start", "stop")

    def __init__(self, start: int, stop: int, on_write: Callable[[int, int], None]) -> None:
        self.start, self.stop, self.on_write = start, stop, on_write


def zeros(nbytes: int) -> memoryview:
    """Map private memory, writable and all zeros. Pages take real room once written, and are freed with the
    last view.

    Raises OSError or OverflowError if the system has no address space for it.
    """
    if nbytes == 0:
        return memoryview(bytearray())  # a mapping is not empty
    if sys.platform == "win32":
        return memoryview(mmap.mmap(-1, nbytes))
    # Private, as allocated memory is: a page that is only read stays the system's page of zeros.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        # Or one byte might make 2 MB resident. Kernels without huge pages do not know the advice.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(mapping)


class Memory:
    """Memory of a node, with its bytes, its areas, and the watches behind flags.

    `buffer` is a memoryview: a slice of it is the bytes themselves, `bytes(slice)` is a copy.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self.node = plan.node
        end, ends = 0, plan.ends
        spare = (plan.growth - 1) * plan.app.nbytes  # pages that take no room until they are written
        for area, next_end in zip(plan.areas, ends, strict=True):
            area.seal(end, next_end, spare if area is plan.app else 0)
            end = area.end
        self.metadata, self.managed, self.app = plan.areas
        self._managed_base, self._app_base, self._end = self.managed.base, self.app.base, end
        try:
            self.buffer = plan.provide(end)
        except (OSError, OverflowError) as error:
            raise OutOfMemoryError(
                f"node {self.node}: this computer has no {end:,} bytes for its memory: {error}"
            ) from None
        self.watches: list[Watch] = []
        self.claims = Claims(self.node)

    def __len__(self) -> int:
        return len(self.buffer)

    def check(self, offset: int, nbytes: int) -> None:
        """Check bounds: [offset, offset + nbytes) must lie within one area. Raises AddressError if not."""
        end = index(offset) + index(nbytes)  # Python's sum: NumPy's would wrap around
        if offset >= self._app_base:
            is_inside = end <= self._end
        elif offset >= self._managed_base:
            is_inside = end <= self._app_base
        else:
            is_inside = offset >= 0 and end <= self._managed_base
        if not is_inside or nbytes < 0:
            limits = ", ".join(
                f"{a.name} [{a.base}, {a.end})" for a in (self.metadata, self.managed, self.app)
            )
            raise AddressError(
                f"node {self.node}: {nbytes} bytes at offset {offset} do not lie within one area: {limits}"
            )

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a view of the bytes, not a copy."""
        offset, nbytes = index(offset), index(nbytes)
        self.check(offset, nbytes)
        return self.buffer[offset : offset + nbytes]

    def write(self, offset: int, data: Bytes) -> None:
        """Store bytes and call the watches on them."""
        offset = index(offset)
        self.check(offset, len(data))
        self.write_checked(offset, data)

    def write_checked(self, offset: int, data: Bytes) -> None:
        """Write like `write`, but without a check: engines check bounds when an operation is issued."""
        nbytes = len(data)
        self.buffer[offset : offset + nbytes] = data
        if self.watches:
            self.notify(offset, nbytes)

    def notify(self, offset: int, nbytes: int) -> None:
        """Call the watches on bytes that have just been written."""
        for watch in self.watches:
            if watch.start < offset + nbytes and offset < watch.stop:
                watch.on_write(offset, nbytes)

    def view(self, region: Region, dtype: npt.DTypeLike, shape: tuple[int, ...] | int) -> npt.NDArray[Any]:
        """Return a NumPy array on the first bytes of a region. Writes to it go straight to memory, past the
        watches."""
        if region.area.node != self.node:
            raise AddressError(f"{region} is not in the memory of node {self.node}")
        shape = (shape,) if isinstance(shape, int) else shape
        dtype = np.dtype(dtype)
        count = math.prod(shape)
        if count * dtype.itemsize > region.nbytes:
            raise AddressError(
                f"{region} cannot hold {dtype} {list(shape)} of {count * dtype.itemsize} bytes"
            )
        return np.frombuffer(self.buffer, dtype, count, region.offset).reshape(shape)

    def watch(self, start: int, nbytes: int, on_write: Callable[[int, int], None]) -> Watch:
        """Watch every later engine write to [start, start + nbytes)."""
        start, nbytes = index(start), index(nbytes)
        self.check(start, nbytes)
        watch = Watch(start, start + nbytes, on_write)
        # A new list, since a watch may come or go while a write walks the old one.
        self.watches = [*self.watches, watch]
        return watch

    def unwatch(self, watch: Watch) -> None:
        self.watches = [other for other in self.watches if other is not watch]

    def scribble(self, start: int = 0, stop: int | None = None) -> None:
        """Overwrite bytes, by default all, so that stale views find no old content."""
        np.frombuffer(self.buffer, np.uint8)[start:stop] = SCRIBBLE

    def give_back(self) -> None:
        """Give the memory's pages back to the system at once. Remaining views find zeros, or what the pages
        shared with others."""
        if isinstance(mapping := self.buffer.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)

    def regions_at(self, start: int, stop: int) -> list[Region]:
        """List the regions with bytes in [start, stop), by area and then in order of allocation."""
        regions = [each for area in (self.metadata, self.managed, self.app) for each in area.regions.values()]
        return [each for each in regions if each.offset < stop and start < each.offset + each.nbytes]

    def check_integrity(self) -> None:
        """Check the layout: areas tile the memory, and regions tile the areas."""
        end = 0
        for area in (self.metadata, self.managed, self.app):
            area.check_integrity()
            if area.base != end:
                raise AddressError(f"node {self.node}: the {area.name} area starts at {area.base}, not {end}")
            end = area.end
        if end != len(self.buffer):
            raise AddressError(f"node {self.node}: areas end at {end}, memory at {len(self.buffer)}")
