"""Prefixes in the caches of other TEs: RTC brings them by DistFlow (DeepServe 4.3, 4.4).

Before a waiting sequence is admitted, its DP group looks up in the job executors' prompt tree which group of
another TE has the blocks behind its own. If to read them is sooner than to compute them:

    reader   takes slots for the blocks, and asks the source; the question takes a message's time
    source   keeps the blocks that it still has, offers their bytes, and answers; so does the answer
    reader   pulls the bytes, die by die; from then on they are like any cached block
    both     hear of the end by their completion queues, and end their own tickets of RTC

The tree is late, so a block that it promises may be gone. A block that is not offered, or does not come,
counts as never asked for, and the sequence computes it. A sequence asks once. Other sequences wait for blocks
that are on their way. Every wait has a deadline of DistFlow, earlier than the one after which a TE counts as
lost. A link on which a read has failed is left alone for a while.

A source that is recovering from lost pages offers nothing. What it loses while it sends is void, and so is a
read whose source or reader is given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from xdeepserve.comm.distflow import DistFlow, Endpoint, backend_between
from xdeepserve.engine.deploy.deployment import Load
from xdeepserve.engine.dp.events import GroupId, PrefixRead
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.job.router import CachedPrompts
from xdeepserve.engine.messages import CopyDone, PoolReady, StepFailed
from xdeepserve.engine.numbers import DieNumber
from xdeepserve.engine.te.te import TE
from xdeepserve.errors import HardwareError, XDeepServeError
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod

TIMEOUT_NS = 1_000_000_000  # of each side of a read for the other's word, and for bytes; to compute is sooner


class PeerLink:
    """DistFlow instance between two TEs that read each other's caches.

    Raises HardwareError if nothing connects their dies.
    """

    def __init__(self, pod: Pod, tes: tuple[TE, TE]) -> None:
        self.tes = tes
        nodes, others = ([die.index for group in te.groups for die in group.dies] for te in tes)
        self.backend = backend_between(pod, nodes, others, "auto", tes[0].plan.kv_weight)
        timeout_ns = min(TIMEOUT_NS, min(te.sizes.groups.lost_ns for te in tes) // 3)
        self.flow = DistFlow(pod, self.backend, timeout_ns, offer_timeout_ns=timeout_ns)
        groups = {str(group.id): group for te in tes for group in te.groups}
        endpoints = self.flow.link_cluster(
            {name: [die.index for die in group.dies] for name, group in groups.items()}
        )
        self.ends: dict[DPGroup, Endpoint] = dict(zip(groups.values(), endpoints, strict=True))
        self.avoided_until_ns = 0  # after a read that has failed


@dataclass(eq=False)
class PeerRead:
    """Blocks of a prompt on their way from a group's cache to that of another one, with a ticket of each."""

    tag: int
    link: PeerLink
    reader: PeerPrefixes
    source: PeerPrefixes
    tokens: list[int]
    blocks: list[int]  # by number in the prompt, ascending
    ticket: int  # of the reader's RTC
    slots: list[int]  # of the blocks there
    is_counted: bool  # among hits: the sequence has computed nothing before
    kept: int = 0  # ticket of the source's RTC, once it has offered blocks
    num_offered: int = 0  # the first of the blocks
    is_void: bool = False  # what comes is not to be kept
    error: XDeepServeError | None = None  # of the reader's side


class PeerPrefixes:
    """Reads of a DP group from the caches of other TEs, and of their groups from its own.

    `report` is called when a ticket of the group's RTC may end.
    """

    def __init__(
        self,
        peers: Peers,
        group: DPGroup,
        report: Callable[[PoolReady | CopyDone | StepFailed], None],
    ) -> None:
        self._peers, self.group, self._rtc, self._report = peers, group, group.rtc, report
        self.num_queries = self.num_hits = 0  # in tokens
        self.is_open = True  # until its dies are lost
        self._under_way: dict[int, PeerRead] = {}  # by this group's ticket
        self._ended: dict[int, PeerRead] = {}  # reported, and not yet heard of by the group's loop

    # ---- as the reader --------------------------------------------------------------------------------

    def is_coming(self, seq: Sequence) -> bool:
        """Whether a sequence's next blocks are on their way for another sequence."""
        return self._rtc.is_expected(seq.token_ids[:-1])

    def load(self, seq: Sequence, num_ready: int, num_spared: int) -> int | None:
        """Start to read the blocks behind a sequence's first `num_ready`. Returns a ticket, or None if no
        other TE has them, or to compute them is sooner.

        The sequence's last token is always computed. `num_spared` blocks are left free for other sequences.
        """
        room, rtc = self._rtc.num_available - num_spared, self._rtc
        if seq.has_asked_pool or room < 1:
            return None
        seq.has_asked_pool = True
        tokens, is_counted = seq.token_ids[:-1], not seq.is_counted  # what is found later may be its own
        self.num_queries += is_counted * (len(tokens) // rtc.block_size - num_ready) * rtc.block_size
        found = self._peers.find(self, tokens, num_ready)
        if found is None:
            return None
        source, link, num_blocks = found
        blocks = rtc.missing(tokens, num_ready, num_blocks)[:room]
        if not blocks or not self._peers.pays(self.group, source.group, link, len(blocks)):
            return None
        ticket, slots = rtc.expect(tokens, blocks)
        tag = self._peers.next_tag()
        read = PeerRead(tag, link, self, source, tokens, blocks, ticket, slots, is_counted)
        self._under_way[ticket] = read
        self._peers.clock.detach(self._ask(read), f"prefix for {self.group.id}", self._fail)
        return ticket

    async def _ask(self, read: PeerRead) -> None:
        """Ask the source for a read's blocks, and receive those that it offers."""
        clock, travel_ns = self._peers.clock, self._peers.travel_ns
        await clock.sleep(travel_ns)
        if self._under_way.get(read.ticket) is not read:  # given up meanwhile, as it may be below
            return
        read.source.offer(read)
        await clock.sleep(travel_ns)
        if self._under_way.get(read.ticket) is not read:
            return
        if read.is_void or not read.num_offered:
            self._end(read)
            return
        slots = read.slots[: read.num_offered]
        ranks = range(len(self.group.dies))
        pieces = [piece for rank in ranks for piece in self.group.block_pieces(slots, rank)]
        read.link.ends[self.group].receive(read.tag, str(read.source.group.id), pieces)

    def _fail(self, error: Exception) -> None:
        """End the group's loop by an error, as an error of its dies would."""
        self._report(StepFailed(DieNumber(self.group.dies[0].index), error))

    # ---- as the source --------------------------------------------------------------------------------

    def offer(self, read: PeerRead) -> None:
        """Keep blocks that a reader asks for, as far as HBM has them without a gap, and offer their bytes."""
        group, rtc = self.group, self._rtc
        if not self._peers.may_send(self):
            return
        ready = rtc.match_by_prefix_token(read.tokens).ready
        nodes = [ready[block] for block in read.blocks if block < len(ready)]
        if not nodes:
            return
        rtc.touch(nodes)
        slots = [node.slot for node in nodes if node.slot is not None]
        read.num_offered, read.kept = len(slots), rtc.keep(slots)
        self._under_way[read.kept] = read
        pieces: list[tuple[Address, int]] = []
        for rank in range(len(read.reader.group.dies)):  # all dies of a group have the same blocks
            pieces += group.block_pieces(slots, rank % len(group.dies))
        read.link.ends[group].send(read.tag, str(read.reader.group.id), pieces)

    # ---- as either ------------------------------------------------------------------------------------

    def hear(self, end: Endpoint) -> None:
        """Read an endpoint's completion queue, and report the tickets of reads that have ended."""
        for done in end.poll():
            read = next((each for each in self._under_way.values() if each.tag == done.tag), None)
            if read is None:
                continue
            if done.error is not None and read.reader is self:
                read.error, read.is_void = done.error, True
                self._peers.avoid(read.link)
            self._end(read)

    def _end(self, read: PeerRead) -> None:
        ticket = read.ticket if read.reader is self else read.kept
        self._ended[ticket] = self._under_way.pop(ticket)
        self._report(PoolReady(self.group.rank, ticket))

    def copy(self, ticket: int) -> bool:
        """End a ticket that has been reported: blocks that have not come are missed. Returns False, since
        dies copy nothing on their own."""
        read = self._ended.pop(ticket)
        if read.reader is not self:
            return False
        num_blocks = 0 if read.is_void else read.num_offered
        self._rtc.miss(ticket, read.slots[num_blocks:])
        self.num_hits += read.is_counted * num_blocks * self._rtc.block_size
        kv = self.group.mem.kv
        nbytes = round(num_blocks * kv.block_nbytes * kv.piece_weight * len(self.group.dies))
        reason = "" if read.error is None else str(read.error)
        self.group.tell(PrefixRead(self.group.id, read.source.group.id, num_blocks, nbytes, reason))
        return False

    def spoil(self, tickets: Iterable[int]) -> None:
        """Mark reads as void, because HBM slots at either side have lost their content."""
        for ticket in tickets:
            if ticket in self._under_way or ticket in self._ended:
                (self._under_way.get(ticket) or self._ended[ticket]).is_void = True

    def abandon(self) -> None:
        """Give up all reads from and to this group, because its dies are lost, or its TE has left."""
        self.is_open = False
        reads = [*self._under_way.values()]
        for read in reads:
            read.is_void = True
            read.reader.give_up(read)
            read.source.give_up(read)
        self._under_way.clear()
        self._ended.clear()

    def give_up(self, read: PeerRead) -> None:
        """End this side of a read at once if it moves; a reader that waits for the answer ends with that."""
        end = read.link.ends[self.group]
        if read.reader is self:
            is_ended = end.abort_receive(read.tag, str(read.source.group.id))
        else:
            is_ended = end.abort_send(read.tag, str(read.reader.group.id))
        if is_ended:
            self._end(read)

    @property
    def is_moving(self) -> bool:
        """Whether blocks are on their way from or to this group."""
        return bool(self._under_way or self._ended)

    def num_copiers(self, ticket: int) -> int:
        """Return how many dies copy under a ticket: all of them, as it is none of a read."""
        return len(self.group.dies)

    def copied(self, ticket: int) -> None:
        """Note copies that dies have made, which are none of a read."""

    def store(self, seq: Sequence) -> None:
        """Offer nothing: other groups ask for what they read in the prompt tree."""


class Peers:
    """TEs of one engine that read prefixes from each other's caches, and the links between them.

    `load` is the setting `cache.load`. A link is avoided for `retry_ns` after a read that has failed.
    """

    def __init__(self, pod: Pod, cached: CachedPrompts, load: Load, retry_ns: int) -> None:
        self._pod, self._cached, self._load, self._retry_ns = pod, cached, load, retry_ns
        self.clock, self.travel_ns = pod.clock, math.ceil(1e9 * pod.spec.vpc_startup.value)
        self._tiers: dict[GroupId, tuple[TE, PeerPrefixes]] = {}
        self._links: list[PeerLink] = []
        self._num_reads = 0

    def tier(
        self, group: DPGroup, report: Callable[[PoolReady | CopyDone | StepFailed], None]
    ) -> PeerPrefixes:
        """Make the tier of a DP group; it reads nothing before its TE has joined."""
        return PeerPrefixes(self, group, report)

    def join(self, te: TE) -> None:
        """Link a running TE with all others that have blocks of the same form, and that a fabric reaches."""
        parts = [nbytes for _, nbytes in te.plan.memories[0].kv.block_parts]
        others = {id(other): other for other, _ in self._tiers.values()}
        for other in others.values():
            if parts != [nbytes for _, nbytes in other.plan.memories[0].kv.block_parts]:
                continue
            try:
                self._links.append(PeerLink(self._pod, (other, te)))
            except HardwareError:
                continue
        for group in te.groups:
            assert isinstance(group.scheduler.pool, PeerPrefixes)
            self._tiers[group.id] = te, group.scheduler.pool
        for link in self._of(te):
            for group, end in link.ends.items():
                end.on_completion = partial(self._tiers[group.id][1].hear, end)

    def leave(self, te: TE) -> None:
        """Void all reads from and to a TE, and close its links."""
        for group in te.groups:
            _, tier = self._tiers.pop(group.id)
            tier.abandon()
        for link in self._of(te):
            link.flow.close()
            self._links.remove(link)

    def close(self) -> None:
        """Close the links of all TEs."""
        for link in self._links:
            link.flow.close()

    def _of(self, te: TE) -> list[PeerLink]:
        return [link for link in self._links if te in link.tes]

    def next_tag(self) -> int:
        """Return a number for another read."""
        self._num_reads += 1
        return self._num_reads

    def avoid(self, link: PeerLink) -> None:
        """Leave a link alone for a while."""
        link.avoided_until_ns = self.clock.now + self._retry_ns

    def may_send(self, tier: PeerPrefixes) -> bool:
        """Whether a group's cache can be read: its TE takes new work, and none of its blocks is lost."""
        te, _ = self._tiers.get(tier.group.id, (None, None))
        is_ready = te is not None and te.life == "ready"
        return is_ready and tier.is_open and not tier.group.lost_blocks.is_pending

    def find(
        self, reader: PeerPrefixes, tokens: list[int], num_ready: int
    ) -> tuple[PeerPrefixes, PeerLink, int] | None:
        """Find the group of another TE that should have the most blocks of a prompt, and more than
        `num_ready`; return its tier, the link, and the number of blocks from the first on."""
        found: tuple[PeerPrefixes, PeerLink, int] | None = None
        if reader.group.id not in self._tiers or len(tokens) < (num_ready + 1) * reader.group.rtc.block_size:
            return None
        here, _ = self._tiers[reader.group.id]
        links = {id(te): link for link in self._of(here) for te in link.tes}
        for group, num_blocks in self._cached.groups(tokens, reader.group.rtc.block_size).items():
            te, tier = self._tiers.get(group, (here, reader))
            if te is here or num_blocks <= (num_ready if found is None else found[2]):
                continue
            link = links.get(id(te))
            if link is not None and self.clock.now >= link.avoided_until_ns and self.may_send(tier):
                found = tier, link, num_blocks
        return found

    def pays(self, reader: DPGroup, source: DPGroup, link: PeerLink, num_blocks: int) -> bool:
        """Whether to read so many blocks is sooner than to compute their tokens, or the setting says so.

        A read takes a question and its answer, two words of DistFlow, and the move of the pieces.
        """
        if self._load != "auto":
            return self._load == "always"
        te, _ = self._tiers[reader.id]
        spec, parts = te.plan.spec, [nbytes for _, nbytes in reader.mem.kv.block_parts]
        ends = source.dies[0].index, reader.dies[0].index
        asking_ns = 2 * self.travel_ns + 2 * spec.command_ns()
        moving_ns = link.backend.idle_ns(*ends, num_blocks * sum(parts))
        issuing_ns = spec.pieces_ns(num_blocks * len(parts), 1)
        num_tokens = num_blocks * reader.rtc.block_size
        return asking_ns + moving_ns + issuing_ns < te.plan.computing_ns(num_tokens)
