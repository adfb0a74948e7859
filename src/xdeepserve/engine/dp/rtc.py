"""RTC, the relational tensor cache: which KV blocks of a DP group belong to whom (DeepServe 4.3).

A block holds the latents of `block_size` consecutive positions, in every layer at the same index. It lies in
a *slot* of the die's HBM; content may also be kept in slots of host DRAM. RTC decides and counts; the die
moves the bytes: RTC asks for transfers as lists of `Copy` and learns of their end by ticket.

State of an HBM slot, by the number of sequences that use it and by whether a node of the prefix index has it:

    users  node   meaning
    0      no     free
    0      yes    cached: content that a later prefix may match; taken back least recently used first
    1      no     private to one sequence
    n >= 1 any    in use; a slot with n > 1 users is never written: whoever must write copies it first

Slots that a transfer still reads or writes are *busy* and count as in use. So are those that were given up
while a step ran that was planned with them (`begin_step`), if the next one is planned before its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xdeepserve.engine.dp.prefix_index import Node, PrefixIndex
from xdeepserve.errors import XDeepServeError


class Copy(NamedTuple):
    """Move one block. A tier is "hbm" or "host"."""

    src_tier: str
    src: int
    dst_tier: str
    dst: int


class Match(NamedTuple):
    """A cached prefix: blocks ready in HBM, then blocks that would have to come from host DRAM."""

    ready: list[Node]
    saved: list[Node]


class Holding:
    """The blocks of one sequence: slots in order of position; the first `nodes` of them are in the index."""

    __slots__ = ("nodes", "slots")

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.nodes: list[Node] = []


class RTC:
    """`num_blocks` HBM slots and `num_host_blocks` host slots of one DP group."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.num_blocks, self.block_size, self.num_host_blocks = num_blocks, block_size, num_host_blocks
        self.index = PrefixIndex(block_size)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._host_free = list(range(num_host_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self._node_of: dict[int, Node] = {}
        self._busy: dict[int, set[int]] = {}  # ticket -> HBM slots that its transfer touches
        self._arrivals: dict[int, list[Node]] = {}  # ticket -> nodes that become ready
        self._departures: dict[int, list[Node]] = {}  # ticket -> nodes that become saved
        self._steps: list[int] = []  # tickets of steps that have not ended
        self._num_tickets = 0
        self._clock = 0  # of use, for LRU

    # ---- counting -----------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        """HBM slots that nobody uses but a prefix may match."""
        return sum(1 for slot in self._node_of if self._is_evictable(slot))

    @property
    def num_available(self) -> int:
        """HBM slots that `alloc_blocks` could hand out now."""
        return len(self._free) + self.num_cached

    @property
    def num_host_available(self) -> int:
        return len(self._host_free) + sum(1 for node in self.index.nodes() if self._is_host_evictable(node))

    @property
    def usage(self) -> float:
        """Share of HBM slots in use, 0 to 1. Cached ones are not in use."""
        return 1.0 - self.num_available / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    # ---- allocation ---------------------------------------------------------------------------------

    def alloc_blocks(self, holding: Holding, num_tokens: int) -> bool:
        """Append private slots until `holding` has room for `num_tokens`.

        False, and nothing changed, if too few are available.
        """
        missing = self.blocks_for(num_tokens) - len(holding.slots)
        if missing > len(self._free) and missing > self.num_available:
            return False
        for _ in range(missing):
            self.append_block(holding)
        return True

    def append_block(self, holding: Holding) -> int:
        """One more private slot. XDeepServeError if none is available."""
        if not self._free and not self.num_available:
            raise XDeepServeError(f"RTC: all {self.num_blocks} blocks are in use")
        slot = self._take_slot()
        self._users[slot] = 1
        holding.slots.append(slot)
        return slot

    def free(self, holding: Holding) -> None:
        """Give up every slot. Those in the index stay cached, the deepest the first to go."""
        for slot in holding.slots:
            if self._users[slot] < 1:
                raise XDeepServeError(f"RTC: block {slot} is freed, but nobody uses it")
            self._drop_user(slot)
        self._touch(reversed(holding.nodes))
        holding.slots.clear()
        holding.nodes.clear()

    def _drop_user(self, slot: int) -> None:
        """One user less; without any the slot is free, unless something still needs its content."""
        self._users[slot] -= 1
        if self._users[slot]:
            return
        if self._steps:
            self._busy[self._steps[-1]].add(slot)
        elif slot not in self._node_of and not self._is_busy(slot):
            self._free.append(slot)

    def begin_step(self) -> int:
        """A step has been planned: until `end_step` of this ticket no slot that it uses changes hands."""
        ticket = self._new_ticket()
        self._steps.append(ticket)
        return ticket

    def end_step(self, ticket: int) -> None:
        """The die has ended the step."""
        self._steps.remove(ticket)
        self.finish(ticket)

    def fork(self, parent: Holding, num_blocks: int | None = None) -> Holding:
        """A second user of a holding's first blocks (all by default); the last may be partly filled."""
        child = Holding()
        child.slots, child.nodes = parent.slots[:num_blocks], parent.nodes[:num_blocks]
        for slot in child.slots:
            self._users[slot] += 1
        return child

    def is_shared(self, holding: Holding, block_idx: int) -> bool:
        """Whether a block must be copied before it is written."""
        slot = holding.slots[block_idx]
        return self._users[slot] > 1 or slot in self._node_of

    def copy(self, holding: Holding, block_idx: int) -> Copy | None:
        """Make a block writable: None if it is private already, else the copy that the die must make first.

        Needs one available slot. Raises XDeepServeError if there is none.
        """
        old = holding.slots[block_idx]
        if not self.is_shared(holding, block_idx):
            return None
        if self.num_available < 1:
            raise XDeepServeError("RTC: no block is available for a copy on write")
        new = self._take_slot()
        self._users[new] = 1
        self._drop_user(old)
        holding.slots[block_idx] = new
        del holding.nodes[block_idx:]
        return Copy("hbm", old, "hbm", new)

    # ---- finding ------------------------------------------------------------------------------------

    def match_by_prefix_token(self, tokens: Sequence[int]) -> Match:
        """The longest cached prefix of `tokens` in whole blocks. Nothing is taken; see `adopt`."""
        return self._split(self.index.match(tokens))

    def match_by_id(self, cache_id: str) -> Match:
        """The cached prefix that was given this name with `name`."""
        return self._split(self.index.match_id(cache_id))

    def name(self, cache_id: str, holding: Holding) -> None:
        """Name the published prefix of a holding, for `match_by_id`."""
        if holding.nodes:
            self.index.name(cache_id, holding.nodes[-1])

    def adopt(self, holding: Holding, nodes: Sequence[Node]) -> None:
        """Start an empty holding with nodes that are ready in HBM."""
        for node in nodes:
            assert node.slot is not None
            assert node.is_ready
            self._users[node.slot] += 1
            holding.slots.append(node.slot)
            holding.nodes.append(node)
        self._touch(nodes)

    def publish(self, holding: Holding, tokens: Sequence[int]) -> None:
        """Put the full blocks of computed `tokens` into the index, so that others find them.

        Where the index has a block of the same tokens, its content is the same bits: the holding changes over
        to it and its own slot becomes free.
        """
        parent = holding.nodes[-1] if holding.nodes else self.index.root
        for block in range(len(holding.nodes), len(tokens) // self.block_size):
            node = self.index.child(parent, tokens[block * self.block_size : (block + 1) * self.block_size])
            slot = holding.slots[block]
            if node.slot is None:
                node.slot = slot
                self._node_of[slot] = node
            elif node.slot != slot and node.is_ready and self._users[slot] == 1:
                self._drop_user(slot)
                self._users[node.slot] += 1
                holding.slots[block] = node.slot
            elif node.slot != slot:
                break  # its content is on its way, or this slot has a second user: keep a private copy
            holding.nodes.append(node)
            parent = node
        self._touch(holding.nodes)

    # ---- moving between HBM and host DRAM -----------------------------------------------------------

    def populate(self, nodes: Sequence[Node]) -> tuple[int, list[Copy]] | None:
        """Bring saved nodes into HBM: a ticket and the transfers; None if too few slots are available.

        The nodes are ready after `finish(ticket)`; until then nobody can evict them.
        """
        if any(node.slot is not None or not node.is_saved for node in nodes):
            raise XDeepServeError("RTC: only blocks in host DRAM alone can be populated: match again")
        if len(nodes) > self.num_available:
            return None
        copies: list[Copy] = []
        ticket = self._new_ticket()
        for node in nodes:
            assert node.host_slot is not None
            slot = self._take_slot()
            node.slot, node.is_loading = slot, True
            self._node_of[slot] = node
            self._busy[ticket].add(slot)
            self._arrivals[ticket].append(node)
            copies.append(Copy("host", node.host_slot, "hbm", slot))
        return ticket, copies

    def query_populate(self, ticket: int) -> bool:
        """Whether a ticket's transfers have ended. XDeepServeError if there was never such a ticket."""
        if not 0 < ticket <= self._num_tickets:
            raise XDeepServeError(f"RTC: there is no ticket {ticket}; the newest is {self._num_tickets}")
        return ticket not in self._busy

    def save(self, limit: int) -> tuple[int, list[Copy]] | None:
        """Keep up to `limit` cached blocks in host DRAM too, the oldest first; None: nothing to do."""
        candidates = sorted(
            (
                node
                for slot, node in self._node_of.items()
                if self._is_evictable(slot) and node.host_slot is None
            ),
            key=lambda node: node.last_used,
        )
        # Beyond free host slots, only in place of copies that have not been used for longer: otherwise two
        # blocks would push each other out for ever.
        room = len(self._host_free)
        older = sorted(node.last_used for node in self.index.nodes() if self._is_host_evictable(node))
        newest = reversed(candidates[room:])
        worthier = [node for node, used in zip(newest, older, strict=False) if used < node.last_used]
        candidates = (candidates[:room] + worthier)[:limit]
        if not candidates:
            return None
        ticket = self._new_ticket()
        copies = []
        for node in candidates:
            assert node.slot is not None
            node.host_slot, node.is_saving = self._take_host_slot(), True
            self._busy[ticket].add(node.slot)
            self._departures[ticket].append(node)
            copies.append(Copy("hbm", node.slot, "host", node.host_slot))
        return ticket, copies

    def swap_out(self, holding: Holding) -> tuple[int, list[int], list[Copy]] | None:
        """Move a whole holding to host DRAM: (ticket, host slots in order, transfers); None without room.

        The holding is empty on return; its slots are free after `finish(ticket)`.
        """
        if self.num_host_available < len(holding.slots):
            return None
        host_slots = [self._take_host_slot() for _ in holding.slots]
        copies = [
            Copy("hbm", slot, "host", host) for slot, host in zip(holding.slots, host_slots, strict=True)
        ]
        ticket = self._new_ticket()
        self._busy[ticket].update(holding.slots)
        self.free(holding)
        return ticket, host_slots, copies

    def swap_in(self, host_slots: Sequence[int]) -> tuple[int, Holding, list[Copy]] | None:
        """Bring a swapped holding back: (ticket, holding, transfers); None if too few slots are available.

        The host slots are given back by `release_host` after `finish(ticket)`.
        """
        if len(host_slots) > self.num_available:
            return None
        holding = Holding()
        for _ in host_slots:
            self.append_block(holding)
        ticket = self._new_ticket()
        self._busy[ticket].update(holding.slots)
        copies = [
            Copy("host", host, "hbm", slot) for host, slot in zip(host_slots, holding.slots, strict=True)
        ]
        return ticket, holding, copies

    def receive(self, holding: Holding, num_tokens: int) -> int:
        """Blocks of an empty holding for content that comes from another TE: a ticket.

        The caller has made sure that enough are available.
        """
        for _ in range(self.blocks_for(num_tokens)):
            self.append_block(holding)
        ticket = self._new_ticket()
        self._busy[ticket].update(holding.slots)
        return ticket

    def release_host(self, host_slots: Iterable[int]) -> None:
        """Give back host slots of `swap_out`."""
        self._host_free.extend(host_slots)

    def finish(self, ticket: int) -> None:
        """The die has made the transfers of a ticket."""
        slots = self._busy.pop(ticket)
        for node in self._arrivals.pop(ticket):
            node.is_loading = False
        for node in self._departures.pop(ticket):
            node.is_saving = False
        for slot in sorted(slots, reverse=True):
            if self._users[slot] == 0 and slot not in self._node_of and not self._is_busy(slot):
                self._free.append(slot)

    def abandon(self) -> None:
        """The dies are lost: no step and no transfer touches a slot any more."""
        self._steps.clear()
        for ticket in list(self._busy):
            self.finish(ticket)

    # ---- the engine room ----------------------------------------------------------------------------

    def _split(self, nodes: list[Node]) -> Match:
        ready = 0
        while ready < len(nodes) and nodes[ready].is_ready:
            ready += 1
        stop = ready
        while stop < len(nodes) and nodes[stop].slot is None and nodes[stop].is_saved:
            stop += 1
        return Match(nodes[:ready], nodes[ready:stop])

    def _touch(self, nodes: Iterable[Node]) -> None:
        """The last one touched is the last one to be evicted."""
        for node in nodes:
            self._clock += 1
            node.last_used = self._clock

    def _is_busy(self, slot: int) -> bool:
        return any(slot in slots for slots in self._busy.values())

    def _is_evictable(self, slot: int) -> bool:
        return self._users[slot] == 0 and not self._is_busy(slot)

    def _is_host_evictable(self, node: Node) -> bool:
        return node.is_saved and not (node.is_loading or self._is_being_read(node))

    def _is_being_read(self, node: Node) -> bool:
        return any(node in nodes for nodes in self._arrivals.values())

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        victims = [node for slot, node in self._node_of.items() if self._is_evictable(slot)]
        node = min(victims, key=lambda node: node.last_used)
        assert node.slot is not None
        slot = node.slot
        del self._node_of[slot]
        node.slot = None
        self.index.prune(node)
        return slot

    def _take_host_slot(self) -> int:
        if self._host_free:
            return self._host_free.pop()
        victims = [node for node in self.index.nodes() if self._is_host_evictable(node)]
        node = min(victims, key=lambda node: node.last_used)
        assert node.host_slot is not None
        host_slot = node.host_slot
        node.host_slot = None
        self.index.prune(node)
        return host_slot

    def _new_ticket(self) -> int:
        self._num_tickets += 1
        ticket = self._num_tickets
        self._busy[ticket] = set()
        self._arrivals[ticket], self._departures[ticket] = [], []
        return ticket

    def check_integrity(self, holdings: Iterable[Holding], swapped: Iterable[Sequence[int]] = ()) -> None:
        """The books agree with the holdings of all live sequences and the host slots of swapped ones."""
        users = [0] * self.num_blocks
        for holding in holdings:
            if len(set(holding.slots)) != len(holding.slots):
                raise XDeepServeError("RTC: a sequence has a block twice")
            for slot in holding.slots:
                users[slot] += 1
            for node, slot in zip(holding.nodes, holding.slots, strict=False):
                if node.slot != slot:
                    raise XDeepServeError(f"RTC: a published block moved from {slot} to {node.slot}")
        if users != self._users:
            raise XDeepServeError(f"RTC: users on the books {self._users}, in fact {users}")
        nodes = {node.slot: node for node in self.index.nodes() if node.slot is not None}
        if nodes != self._node_of:
            raise XDeepServeError("RTC: the index and the books name different nodes")
        free = set(self._free)
        expected = {
            slot
            for slot in range(self.num_blocks)
            if users[slot] == 0 and slot not in nodes and not self._is_busy(slot)
        }
        if len(free) != len(self._free) or free != expected:
            raise XDeepServeError(f"RTC: free blocks {sorted(free)}, expected {sorted(expected)}")
        host = [node.host_slot for node in self.index.nodes() if node.host_slot is not None]
        host += [slot for slots in swapped for slot in slots] + self._host_free
        if sorted(host) != list(range(self.num_host_blocks)):
            raise XDeepServeError(f"RTC: host blocks {sorted(host)} of {self.num_host_blocks}")
