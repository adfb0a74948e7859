"""Index of cached prefixes: a radix tree by tokens, and names by ID (DeepServe 4.3).

A node is one full block of tokens after its parent's; the path from the root spells a prefix. Its content,
the latents of those positions, lies in an HBM slot, in a host DRAM slot, in both, or (if evicted) in neither;
then the node goes as soon as it has no children.

An ID names the last block of a prefix. When that block goes, the name moves to the block before it; with the
first block the name is forgotten. Beyond the limit, the least recently used IDs are forgotten, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from xdeepserve.errors import XDeepServeError

BlockKey: TypeAlias = tuple[int, ...]  # what names a full block among those after the same prefix: its tokens


class Node:
    """Full KV block of a cached prefix, as a node of the radix tree."""

    __slots__ = (
        "children",
        "host_slot",
        "ids",
        "is_loading",
        "is_saving",
        "key",
        "last_used",
        "num_found",
        "parent",
        "slot",
        "tokens",
    )

    def __init__(self, tokens: BlockKey, parent: Node | None) -> None:
        self.tokens, self.parent = tokens, parent
        self.key: int = 0 if parent is None else _chained(parent.key, tokens)
        self.children: dict[BlockKey, Node] = {}
        self.slot: int | None = None
        self.host_slot: int | None = None
        self.is_loading = False  # the slot is taken, the content is still on its way from the host
        self.is_saving = False  # the host slot is taken, the content is still on its way there
        self.last_used = 0  # the larger, the later
        self.num_found = 0  # requests that have found it cached
        self.ids: dict[str, None] = {}  # that name this node, in order

    @property
    def has_content(self) -> bool:
        """Whether the block's content is in HBM or host DRAM, or on its way there."""
        return self.slot is not None or self.host_slot is not None

    @property
    def is_ready(self) -> bool:
        """Whether the block's content is in HBM and may be read."""
        return self.slot is not None and not self.is_loading

    @property
    def is_saved(self) -> bool:
        """Whether the block's content is in host DRAM and may be read."""
        return self.host_slot is not None and not self.is_saving

    def path(self) -> list[Node]:
        """List the nodes from the first block of the prefix to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def _chained(key: int, tokens: tuple[int, ...]) -> int:
    """Return the key of a block of `tokens` after the block that has `key`; the first comes after 0."""
    return hash((key, tokens))  # of integers, which Python hashes alike in every run


def block_keys(tokens: Sequence[int], block_size: int) -> list[int]:
    """Return the keys of the full blocks of a prompt, as the nodes of its prefixes have them."""
    keys, key = [], 0
    for start in range(0, len(tokens) - block_size + 1, block_size):
        key = _chained(key, tuple(tokens[start : start + block_size]))
        keys.append(key)
    return keys


# A policy of the table EVICTION: a key of cached blocks, of which the one with the least key goes first.
EvictionPolicy: TypeAlias = Callable[[Node], Any]


def lru(block: Node) -> int:
    """Evict the least recently used block."""
    return block.last_used


def lfu(block: Node) -> tuple[int, int]:
    """Evict the block that the fewest requests have found; of equals the least recently used."""
    return block.num_found, block.last_used


class PrefixIndex:
    """Radix tree of full blocks of `block_size` tokens; at most `max_ids` names lead to nodes."""

    def __init__(self, block_size: int, max_ids: int) -> None:
        self.block_size, self.max_ids = block_size, max_ids
        self.root = Node((), None)
        self.by_id: dict[str, Node] = {}  # the least recently used first

    @property
    def num_ids(self) -> int:
        return len(self.by_id)

    def match(self, tokens: Sequence[int]) -> list[Node]:
        """Find the longest path of nodes for a prefix of `tokens` whose content is in HBM or host DRAM."""
        nodes: list[Node] = []
        node = self.root
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            child = node.children.get(tuple(tokens[start : start + self.block_size]))
            if child is None or not child.has_content:
                break
            nodes.append(child)
            node = child
        return nodes

    def child(self, parent: Node, key: BlockKey) -> Node:
        """Return the node for the block with this key after `parent`; make it if there is none."""
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(key, parent)
        return node

    def prune(self, node: Node) -> None:
        """Remove a node and then its ancestors, as long as each has neither content nor children."""
        while node.parent is not None and not node.children and not node.has_content:
            parent = node.parent
            del parent.children[node.tokens]
            for cache_id in node.ids:
                if parent is self.root:
                    del self.by_id[cache_id]
                else:
                    self.by_id[cache_id] = parent
                    parent.ids[cache_id] = None
            node.ids.clear()
            node.parent = None
            node = parent

    def name(self, cache_id: str, node: Node) -> None:
        """Name the prefix ending with `node`, for `match_id`. Another prefix of this name loses it."""
        self.forget_id(cache_id)
        self.by_id[cache_id] = node
        node.ids[cache_id] = None
        if len(self.by_id) > self.max_ids:
            self.forget_id(next(iter(self.by_id)))

    def match_id(self, cache_id: str, tokens: Sequence[int]) -> list[Node]:
        """Find the blocks of a named prefix that `tokens` begin with and that have content; [] for an unknown
        name."""
        node = self.by_id.pop(cache_id, None)
        if node is None:
            return []
        self.by_id[cache_id] = node  # now the most recently used
        nodes: list[Node] = []
        for start, step in zip(range(0, len(tokens), self.block_size), node.path(), strict=False):
            if not step.has_content or step.tokens != tuple(tokens[start : start + self.block_size]):
                break
            nodes.append(step)
        return nodes

    def forget_id(self, cache_id: str) -> None:
        """Drop a name if known; its blocks can still be found by their tokens."""
        node = self.by_id.pop(cache_id, None)
        if node is not None:
            del node.ids[cache_id]

    def nodes(self) -> Iterator[Node]:
        """Iterate over every node but the root, parents first."""
        stack = list(self.root.children.values())[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(list(node.children.values())[::-1])

    def check_integrity(self) -> None:
        """Check names against nodes, the limit on names, and leaves for content. Raises XDeepServeError if a
        check fails."""
        found = {cache_id: node for node in self.nodes() for cache_id in node.ids}
        if found != self.by_id or self.root.ids:
            raise XDeepServeError(
                f"RTC: IDs on the books {sorted(self.by_id)}, of nodes in the index {sorted(found)}"
            )
        if len(found) > self.max_ids:
            raise XDeepServeError(f"RTC: {len(found)} IDs, at most {self.max_ids} may be kept")
        for node in self.nodes():
            if not node.children and not node.has_content:
                raise XDeepServeError("RTC: a block without content leads nowhere, but is in the index")
