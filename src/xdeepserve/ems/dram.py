"""A server's DRAM tier: copies of values in one segment, the least recently used of which give way."""

from __future__ import annotations

from collections.abc import Callable

from ..hw.volume import Key
from .allocator import Allocator

HIGH, LOW = 0.95, 0.85  # of a tier's capacity: eviction begins, and ends


class Dram:
    """Where in the segment of `nbytes` copies lie. Those that `is_pinned` are not evicted."""

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
        """Copies that nobody reads, the least recently used first."""
        return [key for key in self._offsets if not self._is_pinned(key)]

    def find(self, key: Key) -> int | None:
        """The offset of a copy, which is now the last to go; None if there is none."""
        offset = self._offsets.pop(key, None)
        if offset is not None:
            self._offsets[key] = offset
        return offset

    def place(self, nbytes: int) -> int | None:
        """An offset with so much room, made by eviction if need be; None if that cannot be."""
        offset = self.allocator.alloc(nbytes)
        while offset is None:
            key = next((key for key in self._offsets if not self._is_pinned(key)), None)
            if key is None:
                return None
            self.evict(key)
            offset = self.allocator.alloc(nbytes)
        return offset

    def add(self, key: Key, offset: int) -> None:
        """What has been written to a place is a copy of a value; others may have to go for it."""
        self._offsets[key] = offset
        capacity = self.allocator.capacity
        if self.allocator.num_used > HIGH * capacity:
            for other in self.idle:
                if self.allocator.num_used <= LOW * capacity:
                    break
                if other != key:
                    self.evict(other)

    def evict(self, key: Key) -> None:
        """Give up a copy."""
        self.allocator.free(self._offsets.pop(key))
        self.num_evictions += 1

    def clear(self) -> None:
        """All copies are lost."""
        for offset in self._offsets.values():
            self.allocator.free(offset)
        self._offsets.clear()

    def offsets(self) -> list[int]:
        """Where copies lie."""
        return [*self._offsets.values()]
