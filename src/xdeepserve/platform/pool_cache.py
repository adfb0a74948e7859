"""Prompts' KV in the memory pool, by blocks, and what other numbers of servers would have found (CM 4.4.2).

Blocks lie in the order of their last use, cut into stretches of what one server has room for: n servers keep
the first n stretches. So one pass tells how many blocks each number of servers would have found: what fewer
keep is always a part of what more keep.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PoolCache:
    """`room` blocks on each of `servers`, at most `most` of them; who was used least recently goes first."""

    def __init__(self, room: int, servers: int, most: int) -> None:
        self.room, self.servers, self.most = room, servers, most
        self._stretches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(most)]
        self._where: dict[int, int] = {}  # the stretch of a block
        self._held: set[int] = set()  # what servers have: less than their stretches, after some have come

    def __len__(self) -> int:
        return len(self._held)

    def match(self, blocks: Sequence[int]) -> int:
        """How many blocks, from the first on, are there."""
        return next((i for i, block in enumerate(blocks) if block not in self._held), len(blocks))

    def use(self, blocks: Sequence[int], known: int = 0) -> list[int]:
        """A prompt has been computed, and its blocks are there from now on: how many of them, after the first
        `known`, would have been found that need just 1, 2, ... `most` servers."""
        found, deepest = [0] * self.most, 0
        for i, block in enumerate(blocks):
            stretch = self._where.get(block)
            if stretch is None:
                break
            deepest = max(deepest, stretch)
            found[deepest] += i >= known
        for block in reversed(blocks):  # the deepest is the first to go
            self._touch(block)
        return found

    def resize(self, servers: int) -> None:
        """So many servers from now on. Those that go have given what they had to the others before, where
        what was used least recently gave way to it."""
        for stretch in self._stretches[servers : self.servers]:
            self._held.difference_update(stretch)
        self.servers = servers

    def _touch(self, block: int) -> None:
        at = self._where.pop(block, None)
        if at is not None:
            del self._stretches[at][block]
        self._held.add(block)
        for number, stretch in enumerate(self._stretches):
            stretch[block] = None
            self._where[block] = number
            if number >= self.servers:
                self._held.discard(block)
            if len(stretch) <= self.room:
                return
            block, _ = stretch.popitem(last=False)
        del self._where[block]
        self._held.discard(block)
