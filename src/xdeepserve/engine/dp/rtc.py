"""RTC, the relational tensor cache: which KV blocks are kept for later, and where (DeepServe 4.3).

Over the block table of HBM lies an index of prefixes. Content may also be kept in slots of host DRAM. RTC
decides and counts; the die moves the bytes: RTC asks for transfers as lists of `BlockCopy` and learns of
their end by ticket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xdeepserve.engine.dp.block_table import BlockTable, Holding
from xdeepserve.engine.dp.prefix_index import BlockKey, EvictionPolicy, Node, lru
from xdeepserve.engine.plans import BlockCopy
from xdeepserve.errors import XDeepServeError


class Match(NamedTuple):
    """A cached prefix: blocks ready in HBM, then blocks that would have to come from host DRAM."""

    ready: list[Node]
    saved: list[Node]


class RTC(BlockTable):
    """Relational tensor cache of a DP group.

    There are `num_blocks` HBM slots, `num_host_blocks` host slots and up to `max_ids` names.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        max_ids: int = 1024,
        eviction: EvictionPolicy = lru,
    ) -> None:
        super().__init__(num_blocks, block_size, max_ids, eviction)
        self.num_host_blocks = num_host_blocks
        self._host_free = list(range(num_host_blocks - 1, -1, -1))
        self._arrivals: dict[int, list[Node]] = {}  # ticket -> nodes that become ready
        self._departures: dict[int, list[Node]] = {}  # ticket -> nodes that become saved
        self._spoilt: dict[int, set[int]] = {}  # ticket -> HBM slots that were lost during its transfers

    @property
    def num_host_available(self) -> int:
        return len(self._host_free) + sum(1 for node in self.index.nodes() if self._is_host_evictable(node))

    # ---- finding ------------------------------------------------------------------------------------

    def match_by_prefix_token(self, tokens: Sequence[int]) -> Match:
        """Find the longest cached prefix of `tokens` in whole blocks. Changes nothing; `adopt` takes the
        blocks."""
        return self._split(self.index.match(tokens))

    def match_by_id(self, cache_id: str, tokens: Sequence[int]) -> Match:
        """Find the cached prefix with this name (see `name`), as far as `tokens` begin with it.

        A wrong name costs time, but can never bring the latents of other tokens, because tokens are compared.
        """
        return self._split(self.index.match_id(cache_id, tokens))

    def name(self, cache_id: str, holding: Holding) -> None:
        """Name the published prefix of a holding, for `match_by_id`. An older prefix of this name loses
        it."""
        if holding.nodes:
            self.index.name(cache_id, holding.nodes[-1])

    def touch(self, nodes: Sequence[Node]) -> None:
        """Make the prefix ending with the last node the last to be evicted, because it will be used soon."""
        if nodes:
            self._touch(reversed(nodes[-1].path()))

    def adopt(self, holding: Holding, nodes: Sequence[Node]) -> None:
        """Start an empty holding with nodes that are ready in HBM."""
        for node in nodes:
            assert node.slot is not None
            assert not node.is_loading
            self._users[node.slot] += 1
            node.num_found += 1
            holding.slots.append(node.slot)
            holding.nodes.append(node)
        self._touch(nodes)

    def keys(self, tokens: Sequence[int], start: int, stop: int) -> Sequence[BlockKey]:
        """Return the keys in the index of the full blocks from `start` to `stop` of `tokens`."""
        size = self.block_size
        return [tuple(tokens[block * size : (block + 1) * size]) for block in range(start, stop)]

    def publish(self, holding: Holding, tokens: Sequence[int], num_computed: int | None = None) -> None:
        """Put the full blocks of the first `num_computed` of `tokens`, by default of all, into the index,
        where other sequences find them.

        Where the index already has a block of the same tokens, its content is equal to the bit. The holding
        then uses that block, and its own slot becomes free.
        """
        parent, new = holding.nodes[-1] if holding.nodes else self.index.root, []
        first, num_computed = len(holding.nodes), len(tokens) if num_computed is None else num_computed
        for block, key in enumerate(self.keys(tokens, first, num_computed // self.block_size), first):
            node = self.index.child(parent, key)
            slot = holding.slots[block]
            if node.slot is None:
                node.slot = slot
                self._node_of[slot] = node
                new.append(node)
            elif node.slot != slot and node.is_ready and self._users[slot] == 1:
                self._drop_user(slot)
                self._users[node.slot] += 1
                holding.slots[block] = node.slot
            elif node.slot != slot:
                break  # its content is on its way, or this slot has a second user: keep a private copy
            holding.nodes.append(node)
            parent = node
        if new:
            self.tell(new, True)
        self._touch(holding.nodes)

    # ---- what comes from elsewhere, or goes there ----------------------------------------------------

    def missing(self, tokens: Sequence[int], start: int, stop: int) -> list[int]:
        """List the blocks from `start` to `stop` of `tokens` that are neither in HBM nor on their way
        there."""
        node: Node | None = self.index.root
        missing = []
        for block, key in enumerate(self.keys(tokens, 0, stop)):
            node = None if node is None else node.children.get(key)
            if block >= start and (node is None or node.slot is None):
                missing.append(block)
        return missing

    def expect(self, tokens: Sequence[int], blocks: Sequence[int]) -> tuple[int, list[int]]:
        """Take slots for blocks of `tokens`, ascending, that come from elsewhere; return a ticket and the
        slots.

        The blocks are ready after `finish(ticket)`, except those given up by `miss` before. The caller has
        made sure that enough slots are available.
        """
        # All slots first: what is evicted for them may prune nodes, and would those that have no content yet.
        slots = self._take_slots(len(blocks))
        slot_of, ticket, node = dict(zip(blocks, slots, strict=True)), self._new_ticket(), self.index.root
        for block, key in enumerate(self.keys(tokens, 0, blocks[-1] + 1)):
            node = self.index.child(node, key)
            slot = slot_of.get(block)
            if slot is not None:
                node.slot, node.is_loading = slot, True
                self._node_of[slot] = node
                self._busy[ticket].add(slot)
                self._arrivals.setdefault(ticket, []).append(node)
        return ticket, slots

    def miss(self, ticket: int, slots: Iterable[int]) -> None:
        """Give up waiting for the content of these slots: the transfer of this ticket will not bring it."""
        for slot in reversed([*slots]):
            node = self._node_of.pop(slot)
            self._arrivals[ticket].remove(node)
            node.slot, node.is_loading = None, False
            self.index.prune(node)

    def keep(self, slots: Iterable[int]) -> int:
        """Return a ticket for copying these slots: their content stays unchanged until the ticket ends."""
        ticket = self._new_ticket()
        self._busy[ticket].update(slots)
        return ticket

    def is_expected(self, tokens: Sequence[int]) -> bool:
        """Whether the first block of `tokens` that is not ready is on its way."""
        return any(node.is_loading for node in self.index.match(tokens))

    # ---- moving between HBM and host DRAM -----------------------------------------------------------

    def populate(self, nodes: Sequence[Node]) -> tuple[int, list[BlockCopy]] | None:
        """Bring saved nodes into HBM. Returns a ticket and the transfers, or None if too few slots are
        available.

        The nodes are ready after `finish(ticket)`; until then they cannot be evicted.
        """
        if any(node.slot is not None or not node.is_saved for node in nodes):
            raise XDeepServeError("RTC: only blocks in host DRAM alone can be populated: match again")
        if len(nodes) > self.num_available:
            return None
        copies: list[BlockCopy] = []
        ticket = self._new_ticket()
        self.touch(nodes)
        for node in nodes:
            assert node.host_slot is not None
            slot = self._take_slot()
            node.slot, node.is_loading = slot, True
            self._node_of[slot] = node
            self._busy[ticket].add(slot)
            self._arrivals.setdefault(ticket, []).append(node)
            copies.append(BlockCopy("host", node.host_slot, "hbm", slot))
        return ticket, copies

    def query_populate(self, ticket: int) -> bool:
        """Whether a ticket's transfers have ended. Raises XDeepServeError if there was never such a
        ticket."""
        if not 0 < ticket <= self._num_tickets:
            raise XDeepServeError(f"RTC: there is no ticket {ticket}; the newest is {self._num_tickets}")
        return ticket not in self._busy

    def save(self, limit: int) -> tuple[int, list[BlockCopy]] | None:
        """Start to copy up to `limit` cached blocks to host DRAM, the next to be evicted first. Returns a
        ticket and the transfers, or None without work."""
        key = self._eviction
        candidates = sorted((node for node in self._evictable() if node.host_slot is None), key=key)
        # Beyond free host slots, only in place of copies that the policy would evict earlier: otherwise two
        # blocks would push each other out for ever.
        room = len(self._host_free)
        older = sorted(key(node) for node in self.index.nodes() if self._is_host_evictable(node))
        newest = reversed(candidates[room:])
        worthier = [node for node, used in zip(newest, older, strict=False) if used < key(node)]
        candidates = (candidates[:room] + worthier)[:limit]
        if not candidates:
            return None
        ticket = self._new_ticket()
        copies = []
        for node in candidates:
            assert node.slot is not None
            node.host_slot, node.is_saving = self._take_host_slot(), True
            self._busy[ticket].add(node.slot)
            self._departures.setdefault(ticket, []).append(node)
            copies.append(BlockCopy("hbm", node.slot, "host", node.host_slot))
        return ticket, copies

    def swap_out(self, holding: Holding) -> tuple[int, list[int], list[BlockCopy]] | None:
        """Move a whole holding to host DRAM. Returns (ticket, host slots in order, transfers), or None
        without room.

        The holding is empty on return; its slots are free after `finish(ticket)`.
        """
        if self.num_host_available < len(holding.slots):
            return None
        host_slots = [self._take_host_slot() for _ in holding.slots]
        copies = [
            BlockCopy("hbm", slot, "host", host) for slot, host in zip(holding.slots, host_slots, strict=True)
        ]
        ticket = self._new_ticket()
        self._busy[ticket].update(holding.slots)
        self.free(holding)
        return ticket, host_slots, copies

    def swap_in(self, host_slots: Sequence[int]) -> tuple[int, Holding, list[BlockCopy]] | None:
        """Bring a swapped holding back. Returns (ticket, holding, transfers), or None if too few slots are
        available.

        The host slots are given back by `release_host` after `finish(ticket)`.
        """
        if len(host_slots) > self.num_available:
            return None
        holding = Holding()
        self._append_blocks(holding, len(host_slots))
        ticket = self._new_ticket()
        self._busy[ticket].update(holding.slots)
        copies = [
            BlockCopy("host", host, "hbm", slot) for host, slot in zip(host_slots, holding.slots, strict=True)
        ]
        return ticket, holding, copies

    def release_host(self, host_slots: Iterable[int]) -> None:
        """Give back host slots taken by `swap_out`."""
        self._host_free.extend(host_slots)

    def finish(self, ticket: int) -> None:
        """Note the end of a ticket's transfers, or of its step."""
        spoilt = self._spoilt.pop(ticket, set())
        slots = (node.slot for node in self._arrivals.get(ticket, ()))
        self.miss(ticket, [slot for slot in slots if slot is not None and slot in spoilt])
        if arrived := self._arrivals.pop(ticket, []):
            for node in arrived:
                node.is_loading = False
            self.tell(arrived, True)
        for node in self._departures.pop(ticket, ()):
            node.is_saving = False
            if spoilt and node.host_slot is not None:
                self._host_free.append(node.host_slot)
                node.host_slot = None
                self.index.prune(node)
        super().finish(ticket)

    def abandon(self) -> None:
        """End all steps and transfers: the dies are lost, and touch no slot any more."""
        self._steps.clear()
        for ticket in list(self._busy):
            self.finish(ticket)

    # ---- lost content -------------------------------------------------------------------------------

    def spoil(self, slots: set[int]) -> list[int]:
        """Note the loss of content in these slots; return the tickets of transfers that touch them. What such
        a transfer brings there, or saves from there, is not kept."""
        found = {ticket: busy & slots for ticket, busy in self._busy.items() if ticket not in self._steps}
        for ticket, spoilt in found.items():
            if spoilt:
                self._spoilt.setdefault(ticket, set()).update(spoilt)
        return [ticket for ticket, spoilt in found.items() if spoilt]

    def lose(self, slots: set[int], holdings: Iterable[Holding]) -> None:
        """Remove lost slots from the index. No sequence that computes may hold one; the `holdings` of
        transfers forget that their lost blocks were in the index."""
        for holding in holdings:
            lost = (at for at, node in enumerate(holding.nodes) if node.slot in slots)
            del holding.nodes[next(lost, len(holding.nodes)) :]
        for slot in sorted(slots, reverse=True):
            node = self._node_of.get(slot)
            if node is None or node.is_loading:  # that one is missed when its transfer ends
                continue
            del self._node_of[slot]
            node.slot = None
            self.tell([node], False)
            self.index.prune(node)
            if not self._users[slot] and not self._is_busy(slot):
                self._free.append(slot)

    # ---- the engine room ----------------------------------------------------------------------------

    def _split(self, nodes: list[Node]) -> Match:
        ready = 0
        while ready < len(nodes) and nodes[ready].is_ready:
            ready += 1
        stop = ready
        while stop < len(nodes) and nodes[stop].slot is None and nodes[stop].is_saved:
            stop += 1
        return Match(nodes[:ready], nodes[ready:stop])

    def _is_host_evictable(self, node: Node) -> bool:
        return node.is_saved and not (node.is_loading or self._is_being_read(node))

    def _is_being_read(self, node: Node) -> bool:
        return any(node in nodes for nodes in self._arrivals.values())

    def _take_host_slot(self) -> int:
        if self._host_free:
            return self._host_free.pop()
        victims = [node for node in self.index.nodes() if self._is_host_evictable(node)]
        node = min(victims, key=self._eviction)
        assert node.host_slot is not None
        host_slot = node.host_slot
        node.host_slot = None
        self.index.prune(node)
        return host_slot

    def check_integrity(self, holdings: Iterable[Holding], swapped: Iterable[Sequence[int]] = ()) -> None:
        """Check the books against the holdings of live sequences and the host slots of swapped ones."""
        self.check_blocks(holdings)
        self.index.check_integrity()
        host = [node.host_slot for node in self.index.nodes() if node.host_slot is not None]
        host += [slot for slots in swapped for slot in slots] + self._host_free
        if sorted(host) != list(range(self.num_host_blocks)):
            raise XDeepServeError(f"RTC: host blocks {sorted(host)} of {self.num_host_blocks}")
