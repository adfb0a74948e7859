"""Prompts' KV in the memory pool, by blocks, and the hits that other numbers of servers would have had (CM
4.4.2).

Blocks lie in the order of their last use, cut into stretches as large as a server's room; n servers keep the
first n stretches. Fewer servers always keep a part of what more servers keep, so a single pass counts the
hits of every number of servers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PoolCache:
    """Cache with `room` blocks on each of `servers` servers, at most `most` of them.

    The least recently used block is evicted first.
    """

    def __init__(self, room: int, servers: int, most: int) -> None:
        self.room, self.servers, self.most = room, servers, most
        self._stretches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(most)]
        self._where: dict[int, int] = {}  # the stretch of a block
        self._held: set[int] = set()  # what servers have: less than their stretches, after some have come

    def __len__(self) -> int:
        return len(self._held)

    def match(self, blocks: Sequence[int]) -> int:
        """Return how many blocks of a prompt, from the first on, are cached."""
        return next((i for i, block in enumerate(blocks) if block not in self._held), len(blocks))

    def use(self, blocks: Sequence[int], known: int = 0) -> list[int]:
        """Cache the blocks of a computed prompt. Returns, for 1, 2, ... `most` servers, how many blocks after
        the first `known` would have been found with exactly so many servers."""
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
        """Change the number of servers. Leaving servers have given their blocks to the others, where the
        least recently used blocks gave way."""
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
