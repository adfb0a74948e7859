"""Prefixes in the memory pool: RTC's third tier, after HBM and the host's DRAM (CloudMatrix 4.4.2).

Reading. Before a waiting sequence is admitted, the pool is asked for the blocks behind RTC's. Blocks that the
pool has are pinned there and get slots here. Those that are only on volumes are brought to the DRAM of the
pool's servers. Then the group's dies copy them. From then on they are like any cached block, and the sequence
finds them on admission. A block that does not come, or may have been overwritten during the copy, counts as
never asked for: the sequence computes it.

Writing. When the last position of a block has been computed, its slots are kept from change. Each of the
group's dies, which have the same latents, copies a share to the place that the pool gives. Then the pool
commits the blocks; no step waits for that.

A sequence asks once. Other sequences do not compute blocks that are on their way, but wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdeepserve.ems.context_cache import ContextCache
from xdeepserve.ems.mp_server import Lease
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import Sequence as Seq
from xdeepserve.engine.messages import CopyBlocks, CopyDone, PoolReady, StepFailed
from xdeepserve.engine.numbers import DieNumber, GroupRank, first_die_of
from xdeepserve.engine.plans import BlockCopy, PoolPlace
from xdeepserve.errors import IntegrityError, LinkError
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.nic import Cards
from xdeepserve.hw.volume import Key


async def copy_by_cards(cards: Cards, mem: DieMemory, copies: Sequence[BlockCopy]) -> None:
    """Copy blocks between a die and the pool by the servers' VPC cards, a transfer for each pair of cards;
    the alternative to a die's DMA over UB."""
    batches: dict[tuple[int, int], list[Copy]] = {}
    for src_tier, src, dst_tier, dst in copies:
        pieces = zip(mem.kv.block_pieces(src_tier, src), mem.kv.block_pieces(dst_tier, dst), strict=True)
        for (source, nbytes), (target, _) in pieces:
            route = cards.card_of(source.node), cards.card_of(target.node)
            batches.setdefault(route, []).append(Copy(source, target, nbytes))
    weight = mem.kv.piece_weight
    await cards.fabric.clock.gather(*(cards.move(some, "memory pool", weight) for some in batches.values()))


@dataclass
class PoolTransfer:
    """Values on the way to or from the pool, each with the slots of its blocks by their number in the
    value."""

    is_read: bool
    slots: list[dict[int, int]]
    used: list[Key]  # of these values, and of those before them
    keys: list[Key] = field(default_factory=list)  # of a write that has no places yet
    leases: list[Lease | None] = field(default_factory=list)
    num_copiers: int = 0  # dies that copy
    is_broken: bool = False  # some of it has not been copied
    is_counted: bool = True  # among hits: the sequence has computed nothing before


class PoolPrefixes:
    """Reads and writes of a DP group in the pool. `report` is called when a transfer can go on."""

    def __init__(
        self,
        rank: GroupRank,
        dies: Sequence[Die],
        mems: Sequence[DieMemory],
        rtc: RTC,
        cache: ContextCache,
        report: Callable[[PoolReady | CopyDone | StepFailed], None],
    ) -> None:
        self.rank, self.dies, self.mems, self.kv = rank, dies, mems, mems[0].kv.sizes
        self.rtc, self.cache, self.clock = rtc, cache, dies[0].clock
        self.report = report
        self.count = cache.block_size // rtc.block_size  # KV blocks in a value
        self.num_queries = self.num_hits = 0  # in tokens
        self._transfers: dict[int, PoolTransfer] = {}  # by ticket
        self._by_cards: list[asyncio.Task[None]] = []  # copies that no die makes

    # ---- reading ------------------------------------------------------------------------------------

    def is_coming(self, seq: Seq) -> bool:
        """Whether a sequence's next blocks are on their way for another sequence."""
        return self.rtc.is_expected(seq.token_ids[:-1])

    def load(self, seq: Seq, num_ready: int, num_spared: int) -> int | None:
        """Start to load the blocks behind a sequence's first `num_ready`. Returns a ticket, or None if
        nothing is loaded.

        The sequence's last token is always computed. `num_spared` blocks are left free for other sequences;
        if too few remain, the sequence may ask again.
        """
        room = self.rtc.num_available - num_spared
        if seq.has_asked_pool or room < self.count:
            return None
        seq.has_asked_pool = True
        tokens, first = seq.token_ids[:-1], num_ready // self.count
        every = self.cache.keys(tokens)
        keys = every[first:]
        is_counted = not seq.is_counted  # what a preempted sequence finds may be its own
        self.num_queries += is_counted * len(keys) * self.cache.block_size
        leases = self.cache.pin(keys)
        expected = self._expect(tokens, first, leases, room)
        if expected is None:
            for lease in leases:
                self.cache.client.release(lease)
            return None
        ticket, slots = expected
        for lease in leases[len(slots) :]:
            self.cache.client.release(lease)
        used, leases = every[: first + len(slots)], leases[: len(slots)]
        transfer = self._transfers[ticket] = PoolTransfer(
            True, slots, used, leases=[*leases], is_counted=is_counted
        )
        self._detach(self._bring(ticket, transfer), f"pool to group {self.rank}")
        return ticket

    def _expect(
        self, tokens: list[int], first: int, leases: list[Lease], room: int
    ) -> tuple[int, list[dict[int, int]]] | None:
        """Reserve slots for the blocks of as many values as there is room for. Returns a ticket, and the
        slots by value."""
        count, num_values = self.count, 0
        missing = self.rtc.missing(tokens, first * count, (first + len(leases)) * count)
        while num_values < len(leases):
            needed = sum(block < (first + num_values + 1) * count for block in missing)
            if needed > room:
                break
            num_values += 1
        wanted = [block for block in missing if block < (first + num_values) * count]
        if not wanted:
            return None
        ticket, slots = self.rtc.expect(tokens, wanted)
        by_value: list[dict[int, int]] = [{} for _ in range(num_values)]
        for block, slot in zip(wanted, slots, strict=True):
            by_value[block // count - first][block % count] = slot
        return ticket, by_value

    async def _bring(self, ticket: int, transfer: PoolTransfer) -> None:
        client = self.cache.client
        await client.ask()
        leases = [lease for lease in transfer.leases if lease is not None]
        await client.bring(leases, self.mems[0].kv.piece_weight)
        self.report(PoolReady(self.rank, ticket))

    # ---- writing ------------------------------------------------------------------------------------

    def store(self, seq: Seq) -> None:
        """Give the pool the blocks of a sequence that have become full in a step."""
        if self.kv.pools == "nothing":
            return
        stop = seq.num_computed if self.kv.pools == "all" else min(seq.num_computed, seq.num_prompt)
        nodes, size = seq.holding.nodes, self.cache.block_size
        stop = min(stop, len(nodes) * self.rtc.block_size) // size
        if stop <= seq.num_pooled:
            return
        keys, slots, client, used = [], [], self.cache.client, self.cache.keys(seq.token_ids, stop)
        for block, key in enumerate(used):
            if block < seq.num_pooled or client.contains(key):
                continue
            keys.append(key)
            slots.append(dict(enumerate(seq.holding.slots[block * self.count : (block + 1) * self.count])))
        seq.num_pooled = stop
        if keys:
            ticket = self.rtc.keep([slot for each in slots for slot in each.values()])
            transfer = self._transfers[ticket] = PoolTransfer(False, slots, used, keys)
            self._detach(self._find_places(ticket, transfer), f"group {self.rank} to pool")

    async def _find_places(self, ticket: int, transfer: PoolTransfer) -> None:
        await self.cache.client.ask()
        if self._transfers.get(ticket) is not transfer:  # the dies have been lost meanwhile
            return
        transfer.leases = [self.cache.begin(key) for key in transfer.keys]
        self.report(PoolReady(self.rank, ticket))

    # ---- both ---------------------------------------------------------------------------------------

    def _detach(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a process that the group's loop does not await; its error ends that loop as a die's would."""
        return self.clock.detach(
            work, name, lambda error: self.report(StepFailed(DieNumber(self.dies[0].index), error))
        )

    def _copies(self, ticket: int) -> list[BlockCopy]:
        """List the copies for dies to make under a ticket. A ticket without copies has ended."""
        transfer, copies = self._transfers[ticket], []
        for lease, slots in zip(transfer.leases, transfer.slots, strict=True):
            if lease is None or lease.address is None:
                if transfer.is_read:
                    self.rtc.miss(ticket, slots.values())
                continue
            for index, slot in slots.items():
                place = PoolPlace(lease.address, index, self.count)
                ends = ("pool", place, "hbm", slot) if transfer.is_read else ("hbm", slot, "pool", place)
                copies.append(BlockCopy(*ends))
        if not copies:
            self.copied(ticket)
        return copies

    def num_copiers(self, ticket: int) -> int:
        """Return how many dies of the group copy under a ticket; all of them for a ticket of others."""
        transfer = self._transfers.get(ticket)
        return len(self.dies) if transfer is None else transfer.num_copiers

    def copy(self, ticket: int) -> bool:
        """Have the copies of a ticket made, as the pool is ready. Returns False if there are none."""
        transfer, copies, num_dies = self._transfers[ticket], self._copies(ticket), len(self.dies)
        shares = [copies if transfer.is_read else copies[i::num_dies] for i in range(num_dies)]
        transfer.num_copiers = sum(map(bool, shares))
        for die, mem, share in zip(self.dies, self.mems, shares, strict=True):
            if not share:
                continue
            if self.cache.by_cards:
                moving = self._copy_by_cards(mem, ticket, share)
                process = self._detach(moving, f"{die.name} memory pool over VPC")
                self._by_cards = [*(each for each in self._by_cards if not each.done()), process]
            else:
                die.put(CopyBlocks(ticket=ticket, copies=share))
        return bool(copies)

    async def _copy_by_cards(self, mem: DieMemory, ticket: int, copies: Sequence[BlockCopy]) -> None:
        """Make a die's copies by the servers' VPC cards instead of its own DMA over UB."""
        try:
            await copy_by_cards(self.cache.client.cards, mem, copies)
        except (LinkError, IntegrityError):
            if ticket in self._transfers:
                self._transfers[ticket].is_broken = True
        self.report(CopyDone(first_die_of(self.rank, len(self.dies)), ticket))

    @property
    def is_moving(self) -> bool:
        """Whether a transfer to or from the pool is under way."""
        return bool(self._transfers)

    def copied(self, ticket: int) -> None:
        """End a ticket after the dies have made their copies. Harmless for tickets of others."""
        transfer = self._transfers.pop(ticket, None)
        if transfer is None:
            return
        client, leases = self.cache.client, [lease for lease in transfer.leases if lease is not None]
        if not transfer.is_read:
            if transfer.is_broken:
                client.revoke(leases)
            elif leases:
                self._detach(self._keep(transfer, leases), f"pool keeps blocks of group {self.rank}")
            return
        for lease, slots in zip(transfer.leases, transfer.slots, strict=True):
            assert lease is not None
            is_sound = client.release(lease) and not transfer.is_broken
            if is_sound and lease.address is not None:
                self.num_hits += transfer.is_counted * len(slots) * self.rtc.block_size
            elif lease.address is not None:
                self.rtc.miss(ticket, slots.values())
        self.cache.touch(transfer.used)

    async def _keep(self, transfer: PoolTransfer, leases: list[Lease]) -> None:
        await self.cache.client.commit(leases, self.mems[0].kv.piece_weight)
        self.cache.touch(transfer.used)

    def spoil(self, tickets: Iterable[int]) -> None:
        """Mark transfers as void, because their HBM slots have lost their content: neither slots nor pool
        keep anything of them."""
        for ticket in tickets:
            if ticket in self._transfers:
                self._transfers[ticket].is_broken = True

    def abandon(self) -> None:
        """Give all transfers up because the dies are lost; places in the pool are free for others."""
        for process in self._by_cards:
            process.cancel()
        for transfer in self._transfers.values():
            leases = [lease for lease in transfer.leases if lease is not None]
            if transfer.is_read:
                for lease in leases:
                    self.cache.client.release(lease)
            else:
                self.cache.client.revoke(leases)
        self._transfers.clear()
