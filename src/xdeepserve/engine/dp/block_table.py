"""Block table of a DP group: which sequences use which KV blocks in HBM.

A block holds the latents of `block_size` consecutive positions, in every layer at the same index. It lies in
a *slot* of the die's HBM. State of a slot, by the number of sequences that use it and by whether a node of
the prefix index has it:

    users  node   meaning
    0      no     free
    0      yes    cached: a later prefix may match its content; taken back when none is free
    1      no     private to one sequence
    n >= 1 any    in use; never written while n > 1: a writer copies it first

Slots that a transfer still reads or writes are *busy* and count as in use. So are those that were given up
while a step ran that was planned with them (`begin_step`), if the next one is planned before its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from xdeepserve.engine.dp.prefix_index import EvictionPolicy, Node, PrefixIndex, lru
from xdeepserve.engine.plans import BlockCopy
from xdeepserve.errors import XDeepServeError


class Holding:
    """KV blocks of a sequence: slots in order of position. The first `len(nodes)` are in the prefix index."""

    __slots__ = ("nodes", "slots")

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.nodes: list[Node] = []


def _tell_nobody(nodes: Sequence[Node], has: bool) -> None:
    """Hear of a change of the cache where nobody asks."""


class BlockTable:
    """HBM slots of a DP group, `num_blocks` in all: handed out, shared, copied on write, given back."""

    def __init__(
        self, num_blocks: int, block_size: int, max_ids: int, eviction: EvictionPolicy = lru
    ) -> None:
        self._eviction = eviction
        self.num_blocks, self.block_size = num_blocks, block_size
        self.index = PrefixIndex(block_size, max_ids)
        self._free: list[int] = []  # given back; the last is taken next, and slots never used after all these
        self._users: list[int] = []  # of each slot that has ever been used
        self._node_of: dict[int, Node] = {}
        self._busy: dict[int, set[int]] = {}  # ticket -> HBM slots that its transfer touches
        self._steps: list[int] = []  # tickets of steps that have not ended
        self._num_tickets = 0
        self._clock = 0  # of use, for eviction
        # Told of blocks that come into the cache, or leave it.
        self.tell: Callable[[Sequence[Node], bool], None] = _tell_nobody

    # ---- counting -----------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        """Number of HBM slots without a user whose content a later prefix may still match."""
        return sum(1 for _ in self._evictable())

    @property
    def num_free(self) -> int:
        """Number of HBM slots without content."""
        return len(self._free) + self.num_blocks - len(self._users)

    @property
    def num_available(self) -> int:
        """Number of HBM slots, free or cached, that `alloc_blocks` could hand out now."""
        return self.num_free + self.num_cached

    @property
    def usage(self) -> float:
        """Share of HBM slots in use, 0 to 1; cached slots do not count as in use."""
        return 1.0 - self.num_available / self.num_blocks

    @property
    def is_moving(self) -> bool:
        """Whether transfers still touch slots; such slots are given back when the transfers end."""
        return len(self._busy) > len(self._steps)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of KV blocks needed to hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    # ---- allocation ---------------------------------------------------------------------------------

    def alloc_blocks(self, holding: Holding, num_tokens: int) -> bool:
        """Append private slots until `holding` has room for `num_tokens`.

        False, and nothing changed, if too few are available.
        """
        missing = self.blocks_for(num_tokens) - len(holding.slots)
        if missing <= 0:
            return True
        if missing > self.num_free and missing > self.num_available:
            return False
        self._append_blocks(holding, missing)
        return True

    def append_block(self, holding: Holding) -> int:
        """Append a private slot to a holding. Raises XDeepServeError if no slot is available."""
        self._append_blocks(holding, 1)
        return holding.slots[-1]

    def _append_blocks(self, holding: Holding, count: int) -> None:
        slots = self._take_slots(count)
        for slot in slots:
            self._users[slot] = 1
        holding.slots += slots

    def free(self, holding: Holding) -> None:
        """Give up every slot of a holding. Slots in the index stay cached; the deepest block is evicted
        first."""
        for slot in holding.slots:
            if slot >= len(self._users) or self._users[slot] < 1:
                raise XDeepServeError(f"RTC: block {slot} is freed, but nobody uses it")
            self._drop_user(slot)
        self._touch(reversed(holding.nodes))
        holding.slots.clear()
        holding.nodes.clear()

    def _drop_user(self, slot: int) -> None:
        """Take a user from a slot; without users the slot is free, unless its content is still needed."""
        self._users[slot] -= 1
        if self._users[slot]:
            return
        if self._steps:
            self._busy[self._steps[-1]].add(slot)
        elif slot not in self._node_of and not self._is_busy(slot):
            self._free.append(slot)

    def begin_step(self) -> int:
        """Return a ticket for a planned step: until `end_step` no slot in use by it changes hands."""
        ticket = self._new_ticket()
        self._steps.append(ticket)
        return ticket

    def end_step(self, ticket: int) -> None:
        """Note the end of the step that has this ticket."""
        self._steps.remove(ticket)
        self.finish(ticket)

    def fork(self, parent: Holding, num_blocks: int | None = None) -> Holding:
        """Add a second user to a holding's first blocks (all by default). The last block may be partly
        filled."""
        child = Holding()
        child.slots, child.nodes = parent.slots[:num_blocks], parent.nodes[:num_blocks]
        for slot in child.slots:
            self._users[slot] += 1
        return child

    def is_shared(self, holding: Holding, block_idx: int) -> bool:
        """Whether a block must be copied before it is written."""
        slot = holding.slots[block_idx]
        return self._users[slot] > 1 or slot in self._node_of

    def copy(self, holding: Holding, block_idx: int) -> BlockCopy | None:
        """Make a block writable: None if it is private already, else the copy that the die must make first.

        Needs one available slot. Raises XDeepServeError if there is none.
        """
        old = holding.slots[block_idx]
        if not self.is_shared(holding, block_idx):
            return None
        new = self._take_slot()
        self._users[new] = 1
        self._drop_user(old)
        holding.slots[block_idx] = new
        del holding.nodes[block_idx:]
        return BlockCopy("hbm", old, "hbm", new)

    def receive(self, holding: Holding, num_tokens: int) -> int:
        """Fill an empty holding with slots for content from another TE, and return the transfer's ticket.

        The caller has made sure that enough are available.
        """
        self._append_blocks(holding, self.blocks_for(num_tokens))
        ticket = self._new_ticket()
        self._busy[ticket].update(holding.slots)
        return ticket

    def finish(self, ticket: int) -> None:
        """Note the end of a ticket's transfers, or of its step."""
        slots = self._busy.pop(ticket)
        # A set has no order, but the slots handed out next must be the same in every run.
        for slot in sorted(slots, reverse=True):
            if self._users[slot] == 0 and slot not in self._node_of and not self._is_busy(slot):
                self._free.append(slot)

    # ---- the engine room ----------------------------------------------------------------------------

    def _touch(self, nodes: Iterable[Node]) -> None:
        """Mark nodes as just used, in this order: the last node will be the last to be evicted."""
        for node in nodes:
            self._clock += 1
            node.last_used = self._clock

    def _is_busy(self, slot: int) -> bool:
        return any(slot in slots for slots in self._busy.values())

    def _evictable(self) -> Iterator[Node]:
        """Find the nodes of cached slots. Busy slots are collected once per call, because every step and
        every eviction calls this."""
        users, busy = self._users, set[int]().union(*self._busy.values())
        return (node for slot, node in self._node_of.items() if not users[slot] and slot not in busy)

    def _take_slot(self) -> int:
        """Take a free slot, or evict the cached block that the policy names. Raises XDeepServeError if there
        is neither."""
        return self._take_slots(1)[0]

    def _take_slots(self, count: int) -> list[int]:
        """Take `count` slots, free ones first; then evict the cached blocks that the policy names. Raises
        XDeepServeError if too few are available."""
        slots = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = min(count - len(slots), self.num_blocks - len(self._users))
        slots += range(len(self._users), len(self._users) + fresh)
        self._users += [0] * fresh
        victims = []
        while len(slots) < count:
            node = self._victim()
            if node is None or node.slot is None:
                raise XDeepServeError(f"RTC: all {self.num_blocks} blocks are in use")
            slots.append(node.slot)
            del self._node_of[node.slot]
            node.slot = None
            victims.append(node)
            self.index.prune(node)
        if victims:
            self.tell(victims, False)
        return slots

    def _victim(self) -> Node | None:
        """Choose the cached block to evict; None if none is cached."""
        return min(self._evictable(), key=self._eviction, default=None)

    def _new_ticket(self) -> int:
        self._num_tickets += 1
        self._busy[self._num_tickets] = set()
        return self._num_tickets

    def check_blocks(self, holdings: Iterable[Holding]) -> None:
        """Check the books against the holdings of all live sequences. Raises XDeepServeError if they
        differ."""
        users = [0] * len(self._users)
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
            for slot in range(len(users))
            if users[slot] == 0 and slot not in nodes and not self._is_busy(slot)
        }
        if len(free) != len(self._free) or free != expected:
            raise XDeepServeError(f"RTC: free blocks {sorted(free)}, expected {sorted(expected)}")
