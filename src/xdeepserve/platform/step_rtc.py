"""RTC of a simulated DP group: blocks that may be evicted are kept in order, and what a TE has is told.

A fleet has hundreds of DP groups with thousands of blocks each, whose cached blocks must not be searched for
the least recently used one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from xdeepserve.engine.dp.block_table import Holding
from xdeepserve.engine.dp.prefix_index import Node
from xdeepserve.engine.dp.rtc import RTC, Match
from xdeepserve.errors import XDeepServeError
from xdeepserve.platform.traced_tokens import Name, TracedTokens


class StepRTC(RTC):
    """RTC without host DRAM that evicts by LRU; `tell(nodes, has)` hears of blocks that come and go."""

    def __init__(
        self, num_blocks: int, block_size: int, tell: Callable[[Sequence[Node], bool], None]
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.tell = tell
        self._idle: dict[int, Node] = {}  # by slot: cached, without a user; the first goes first

    @property
    def num_cached(self) -> int:
        return len(self._idle)

    def match_by_prefix_token(self, tokens: Sequence[int]) -> Match:
        assert isinstance(tokens, TracedTokens)
        ready: list[Node] = []
        children = self.index.root.children
        for name in tokens.names(self.block_size, 0, len(tokens) // self.block_size):
            node = children.get(name)
            if node is None or node.slot is None or node.is_loading:
                break
            ready.append(node)
            children = node.children
        return Match(ready, [])

    def adopt(self, holding: Holding, nodes: Sequence[Node]) -> None:
        super().adopt(holding, nodes)
        self._take(nodes)

    def has_new(self, holding: Holding, num_computed: int) -> bool:
        """Whether a sequence has computed whole blocks that are not in the index."""
        return num_computed // self.block_size > len(holding.nodes)

    def keys(self, tokens: Sequence[int], start: int, stop: int) -> Sequence[Name]:
        assert isinstance(tokens, TracedTokens)
        return tokens.names(self.block_size, start, stop)

    def publish(self, holding: Holding, tokens: Sequence[int], num_computed: int | None = None) -> None:
        before, num_computed = len(holding.nodes), len(tokens) if num_computed is None else num_computed
        if self.has_new(holding, num_computed):  # what is in use is touched when it is given up
            super().publish(holding, tokens, num_computed)
            self._take(holding.nodes[before:])

    def _take(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.slot is not None:
                self._idle.pop(node.slot, None)

    def _touch(self, nodes: Iterable[Node]) -> None:
        used, idle = self._users, self._idle
        for node in nodes:
            self._clock += 1
            node.last_used = self._clock
            slot = node.slot
            if slot is not None and not used[slot] and not node.is_loading:
                idle.pop(slot, None)
                idle[slot] = node

    def finish(self, ticket: int) -> None:
        arrived = [*self._arrivals.get(ticket, ())]
        super().finish(ticket)
        self._touch(reversed(arrived))

    def _victim(self) -> Node | None:
        slot = next(iter(self._idle), None)
        if slot is None:
            return None
        return self._idle.pop(slot)

    def check_integrity(self, holdings: Iterable[Holding], swapped: Iterable[Sequence[int]] = ()) -> None:
        super().check_integrity(holdings, swapped)
        found = sorted(self._evictable(), key=lambda node: node.last_used)
        if [*self._idle.values()] != found:
            raise XDeepServeError("RTC: blocks that may be evicted are not in order")
