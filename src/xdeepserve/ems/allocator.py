"""A server's DRAM: pieces of any size out of one segment, in several granularities (CloudMatrix 4.4.1).

The segment is cut into huge pages. A page in use is either cut into slots of one granularity, for values of
up to half a page, or part of a run of pages for a single larger value. A page whose last slot is freed
belongs to no granularity any more, so memory moves between granularities as demand changes.

There are four granularities to a doubling, so less than a fifth of a slot is lost.
"""

from __future__ import annotations

from bisect import bisect_left

from xdeepserve.errors import HardwareError

HUGE_PAGE = 2 << 20
SMALLEST = 1024


class Allocator:
    """Allocator of offsets in a segment of `nbytes`. The part behind the last whole page is not used."""

    def __init__(self, nbytes: int, page: int = HUGE_PAGE) -> None:
        while page > SMALLEST and page > nbytes // 8:  # a small segment has small pages
            page //= 2
        self.page, self.num_pages = page, nbytes // page
        sizes = [(SMALLEST << shift) // 4 * quarters for shift in range(32) for quarters in (4, 5, 6, 7)]
        self.granularities = [size for size in sizes if size <= page // 2]
        self._size_of: dict[int, int] = {}  # granularity by page, of those that are cut into slots
        self._free_slots: dict[int, list[int]] = {}  # by such a page; offsets, the last one goes first
        self._partial: dict[int, dict[int, None]] = {
            size: {} for size in self.granularities
        }  # pages with some
        self._runs: dict[int, int] = {}  # first page -> pages
        self._used = [False] * self.num_pages
        self.sizes: dict[int, int] = {}  # bytes asked for, by offset

    @property
    def capacity(self) -> int:
        return self.num_pages * self.page

    @property
    def num_used(self) -> int:
        """Bytes of slots and runs in use."""
        slots = sum(
            size * (self.page // size - len(self._free_slots[page])) for page, size in self._size_of.items()
        )
        return slots + sum(self._runs.values()) * self.page

    def alloc(self, nbytes: int) -> int | None:
        """Allocate a piece and return its offset, or None if there is no room."""
        at = bisect_left(self.granularities, nbytes)
        offset = self._slot(self.granularities[at]) if at < len(self.granularities) else self._run(nbytes)
        if offset is not None:
            self.sizes[offset] = nbytes
        return offset

    def free(self, offset: int) -> None:
        """Free the piece at an offset. Raises HardwareError if there is none."""
        if self.sizes.pop(offset, None) is None:
            raise HardwareError(f"the pool's segment has no piece at {offset}")
        page = offset // self.page
        if page in self._runs:
            count = self._runs.pop(page)
            self._used[page : page + count] = [False] * count
            return
        size, free = self._size_of[page], self._free_slots[page]
        free.append(offset)
        self._partial[size][page] = None
        if len(free) == self.page // size:  # nobody uses the page: it may become anything
            del self._size_of[page], self._free_slots[page], self._partial[size][page]
            self._used[page] = False

    def _slot(self, size: int) -> int | None:
        page = next(iter(self._partial[size]), None)
        if page is None:
            page = self._find(1)
            if page is None:
                return None
            self._used[page], self._size_of[page] = True, size
            first = page * self.page
            self._free_slots[page] = [first + i * size for i in reversed(range(self.page // size))]
            self._partial[size][page] = None
        offset = self._free_slots[page].pop()
        if not self._free_slots[page]:
            del self._partial[size][page]
        return offset

    def _run(self, nbytes: int) -> int | None:
        count = -(-nbytes // self.page)
        page = self._find(count)
        if page is None:
            return None
        self._used[page : page + count] = [True] * count
        self._runs[page] = count
        return page * self.page

    def _find(self, count: int) -> int | None:
        """Return the first page of `count` adjacent free pages, or None."""
        first = 0
        for page, is_used in enumerate(self._used):
            if is_used:
                first = page + 1
            elif page + 1 - first == count:
                return first
        return None

    def check_integrity(self) -> None:
        """Check the pieces: each lies in its slot or run, without overlap. Raises HardwareError otherwise."""
        end = 0
        for offset, nbytes in sorted(self.sizes.items()):
            page = offset // self.page
            room = self._size_of[page] if page in self._size_of else self._runs[page] * self.page
            if offset < end or nbytes > room or offset + room > self.capacity:
                raise HardwareError(f"the pool's segment: {nbytes} bytes at {offset} overlap or leave it")
            end = offset + room
        pages = {*self._size_of, *(page + i for page, count in self._runs.items() for i in range(count))}
        if pages != {page for page, is_used in enumerate(self._used) if is_used}:
            raise HardwareError(
                "the pool's segment: pages are in use that hold nothing, or the other way round"
            )
        taken = sum(self.page // size - len(self._free_slots[page]) for page, size in self._size_of.items())
        if taken + len(self._runs) != len(self.sizes):
            raise HardwareError(f"the pool's segment: {taken} slots are taken, pieces are {len(self.sizes)}")
