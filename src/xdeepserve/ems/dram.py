"""A server's DRAM tier: copies of values in one segment; the least recently used are evicted."""

from __future__ import annotations

from collections.abc import Callable

from xdeepserve.ems.allocator import Allocator
from xdeepserve.hw.volume import Key

HIGH, LOW = 0.95, 0.85  # of a tier's capacity: eviction begins, and ends


class Dram:
    """Copies in the segment of `nbytes`, and their offsets. Pinned copies (`is_pinned`) are not evicted."""

    def __init__(self, nbytes: int, is_pinned: Callable[[Key], bool]) -> None:
        self.allocator, self._is_pinned = Allocator(nbytes), is_pinned
        self._offsets: dict[Key, int] = {}  # the least recently used first
        self.num_evictions = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def idle(self) -> list[Key]:
        """Copies without readers, the least recently used first."""
        return [key for key in self._offsets if not self._is_pinned(key)]

    def find(self, key: Key) -> int | None:
        """Return the offset of a copy and make it the most recently used; None if there is no copy."""
        offset = self._offsets.pop(key, None)
        if offset is not None:
            self._offsets[key] = offset
        return offset

    def place(self, nbytes: int) -> int | None:
        """Find room for `nbytes` bytes, by eviction if necessary, and return its offset; None if there is
        none."""
        offset = self.allocator.alloc(nbytes)
        while offset is None:
            key = next((key for key in self._offsets if not self._is_pinned(key)), None)
            if key is None:
                return None
            self.evict(key)
            offset = self.allocator.alloc(nbytes)
        return offset

    def add(self, key: Key, offset: int) -> None:
        """Record the bytes at an offset as a copy of a value. Other copies are evicted if DRAM is then too
        full."""
        self._offsets[key] = offset
        capacity = self.allocator.capacity
        if self.allocator.num_used > HIGH * capacity:
            for other in self.idle:
                if self.allocator.num_used <= LOW * capacity:
                    break
                if other != key:
                    self.evict(other)

    def evict(self, key: Key) -> None:
        """Evict a copy and free its piece."""
        self.allocator.free(self._offsets.pop(key))
        self.num_evictions += 1

    def clear(self) -> None:
        """Drop all copies after a loss of the content."""
        for offset in self._offsets.values():
            self.allocator.free(offset)
        self._offsets.clear()

    def offsets(self) -> list[int]:
        """Return the offsets of all copies."""
        return [*self._offsets.values()]
