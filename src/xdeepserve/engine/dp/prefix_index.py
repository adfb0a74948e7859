"""What RTC finds again: a radix index by tokens, and an index by ID (DeepServe 4.3).

A node is one full block of tokens after its parent's; the path from the root spells a prefix. Its content,
the latents of those positions, lies in an HBM slot, in a host DRAM slot, in both, or (if evicted) in neither;
then the node goes as soon as it has no children.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Node:
    """One full block of a prefix."""

    __slots__ = ("children", "host_slot", "is_loading", "is_saving", "last_used", "parent", "slot", "tokens")

    def __init__(self, tokens: tuple[int, ...], parent: Node | None) -> None:
        self.tokens, self.parent = tokens, parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.slot: int | None = None
        self.host_slot: int | None = None
        self.is_loading = False  # the slot is taken, the content is still on its way from the host
        self.is_saving = False  # the host slot is taken, the content is still on its way there
        self.last_used = 0

    @property
    def is_ready(self) -> bool:
        """In HBM, and may be read."""
        return self.slot is not None and not self.is_loading

    @property
    def is_saved(self) -> bool:
        """In host DRAM, and may be read."""
        return self.host_slot is not None and not self.is_saving

    def path(self) -> list[Node]:
        """From the first block of the prefix to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixIndex:
    """The tree of full blocks of `block_size` tokens, and names for some of its nodes."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = Node((), None)
        self._by_id: dict[str, Node] = {}

    def match(self, tokens: Sequence[int]) -> list[Node]:
        """The longest path of nodes whose content is somewhere, for a prefix of `tokens`."""
        nodes: list[Node] = []
        node = self.root
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            child = node.children.get(tuple(tokens[start : start + self.block_size]))
            if child is None or (child.slot is None and child.host_slot is None):
                break
            nodes.append(child)
            node = child
        return nodes

    def child(self, parent: Node, tokens: Sequence[int]) -> Node:
        """The node of one more block after `parent`, made if there is none."""
        key = tuple(tokens)
        if key not in parent.children:
            parent.children[key] = Node(key, parent)
        return parent.children[key]

    def prune(self, node: Node) -> None:
        """Forget `node` and its ancestors as far as they hold nothing and lead nowhere."""
        while node.parent is not None and not node.children and node.slot is None and node.host_slot is None:
            parent = node.parent
            del parent.children[node.tokens]
            node.parent = None
            node = parent

    def name(self, cache_id: str, node: Node) -> None:
        """Let `match_id` find the prefix that ends with `node`."""
        self._by_id[cache_id] = node

    def match_id(self, cache_id: str) -> list[Node]:
        """The longest part of a named prefix whose content is still somewhere; [] for an unknown name."""
        node = self._by_id.get(cache_id)
        if node is None:
            return []
        nodes = node.path()
        for depth, step in enumerate(nodes):
            if step.slot is None and step.host_slot is None:
                return nodes[:depth]
        if not nodes or nodes[-1] is not node or nodes[0].parent is not self.root:
            del self._by_id[cache_id]  # it has been evicted
            return []
        return nodes

    def forget_id(self, cache_id: str) -> None:
        """Drop a name; its blocks stay findable by their tokens."""
        self._by_id.pop(cache_id, None)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(list(node.children.values())[::-1])
