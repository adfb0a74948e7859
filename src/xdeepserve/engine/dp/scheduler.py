"""Continuous batching: which tokens of which sequences a DP group computes in its next step.

The scheduler returns a plan and alone mutates its counters. A sequence is in one of these places:

    waiting    not admitted; in order of (priority, arrival)
    following  a further choice of a request, until its leader has prefilled the prompt both share
    loading    admitted, but part of its cached prefix is still on its way from host DRAM
    running    admitted; takes part in steps
    leaving    preempted by swap: its blocks are on their way to host DRAM
    swapped    there; comes back before anybody is admitted
    entering   on its way back
    arriving   prefilled elsewhere; waits until there are blocks to receive it
    receiving  its blocks are on their way here
    sending    prefilled here, for decode elsewhere: only its blocks are left, until they have been received

With transfers by layer a sequence is in two schedulers while its last rows are prefilled: in one it is
running, with its blocks in `sending` as well (`early`); in the other it has only a reservation (`reserved`).

Running sequences are scheduled first, in order of admission; then swapped ones return and waiting ones are
admitted while rows, blocks and places last. A prompt longer than the rows left is prefilled in chunks. When
blocks run out, the running sequence that is last in (priority, arrival) is preempted: by recomputation it
gives up its blocks and waits, by swap they move to host DRAM. Canonical arithmetic gives it the same bits.

With `sizes.plans_ahead` a step is planned while the one before runs, from counts only. That a sequence has
ended, for any other reason than its length, is seen a step late: what that step computes for it is thrown
away, and its blocks are free when the step has ended. Where counting does not tell enough, which is when
blocks run out, nothing is planned until the results are there.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from xdeepserve.engine.dp.rtc import RTC, Copy, Holding
from xdeepserve.engine.dp.sequence import Sequence, Transit
from xdeepserve.engine.dp.stats import StepStats
from xdeepserve.engine.dp.step import Progress, Scheduled, SeqResult, Step
from xdeepserve.engine.sizes import Sizes


class LoadCost(Protocol):
    """Is it cheaper to load cached blocks from host DRAM, or to compute their tokens again?"""

    def should_load(self, num_blocks: int, num_tokens: int) -> bool: ...


class Reservation(NamedTuple):
    """Blocks for a sequence whose prompt is being prefilled elsewhere, layer by layer."""

    seq: Sequence
    holding: Holding


class Scheduler:
    """The queues of one DP group."""

    def __init__(self, sizes: Sizes, rtc: RTC, load_cost: LoadCost | None = None) -> None:
        self.sizes, self.rtc, self.load_cost = sizes, rtc, load_cost
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.in_transit: dict[int, Sequence] = {}  # loading, leaving, entering, receiving ones, by ticket
        self.arriving: list[Sequence] = []
        self.sending: dict[int, Holding] = {}  # by seq_id
        self.early: set[int] = set()  # seq_ids
        self.reserved: dict[int, Reservation] = {}  # by ticket
        self.on_withdrawn: Callable[[int], None] = lambda seq_id: (
            None
        )  # an early one has ended before its time
        self.on_prefilled: Callable[[Sequence], None] = lambda seq: None
        self.on_released: Callable[[int], None] = lambda seq_id: None
        self.following: dict[int, list[Sequence]] = {}  # by their leader's seq_id
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # in tokens
        self.num_prefix_hits = 0
        self.stats = StepStats()
        self._ahead: Step | None = None  # the latest step that has not ended
        self._shares: dict[int, Scheduled] = {}  # of that step, by seq_id
        self._must_wait = False  # for the end of the step under way, before anything is planned

    # ---- queues -------------------------------------------------------------------------------------

    def add(self, seq: Sequence, leader: Sequence | None = None) -> None:
        """Enqueue a new sequence; with a `leader` it shares that one's prompt blocks when they are there."""
        if leader is not None and not leader.is_finished and leader.num_computed < leader.num_prompt:
            self.following.setdefault(leader.seq_id, []).append(seq)
        else:
            self._wait(seq)

    def _wait(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=lambda s: s.rank)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.swapped or self.in_transit or self.arriving)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not running."""
        followers = sum(len(seqs) for seqs in self.following.values())
        queued = len(self.waiting) + len(self.swapped) + len(self.in_transit) + len(self.arriving)
        return queued + followers

    def sequences(self) -> Iterator[Sequence]:
        """All that are not finished, running ones first."""
        yield from self.running
        yield from self.in_transit.values()
        yield from self.swapped
        yield from self.arriving
        yield from self.waiting
        for seqs in self.following.values():
            yield from seqs

    # ---- planning -----------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Choose the next step and take its blocks."""
        step = Step()
        if self._must_wait and self._ahead is not None:
            return step
        self._must_wait = False
        self._plan(step)
        if not step.shares:
            return step
        # Blocks may be reserved, and then written, at any moment of a step.
        if self.sizes.plans_ahead or self.sizes.transfers_by_layer:
            step.ticket = self.rtc.begin_step()
        self._ahead, self._shares = step, {share.seq.seq_id: share for share in step.shares}
        return step

    def _plan(self, step: Step) -> None:
        rows_left, logits_left = self.sizes.max_tokens, self.sizes.max_logit_rows
        index, num_preemptions = 0, self.num_preemptions
        while index < len(self.running):
            seq = self.running[index]
            progress = self._progress(seq)
            if self._sits_out(seq, progress):
                index += 1
                continue
            share = self._share(seq, progress, rows_left, logits_left)
            if share is None:
                break
            if not self._take_blocks(seq, share, step):
                if self._ahead is not None:
                    self._must_wait = True
                    break
                if not self._make_room(step):
                    break
                continue  # somebody, perhaps seq itself, gave up blocks: look again
            step.shares.append(share)
            rows_left -= share.num_rows
            logits_left -= len(share.logit_rows)
            index += 1
        # Nobody new takes blocks that somebody has just given up, or while one that runs waits for some.
        if index < len(self.running) or num_preemptions != self.num_preemptions:
            return
        self._swap_in(step)
        while self.swapped and self._is_stuck and self._take_from_a_fork():
            self._swap_in(step)
        if self.swapped:
            return  # what was preempted comes back before anybody is admitted, or it never might
        if not self.waiting:  # on a decode TE these have been preempted, too
            self._receive(step)
        while self.waiting and self._num_places > 0:
            seq = self.waiting[0]
            self._find_prefix(seq)
            if self._load_prefix(seq, step):
                continue
            share = self._share(seq, self._progress(seq), rows_left, logits_left)
            if share is None or not self._take_blocks(seq, share, step):
                self._give_up(seq)
                if share is not None and self._is_stuck and self._take_from_a_fork():
                    continue
                break
            self.waiting.pop(0)
            self.running.append(seq)
            step.shares.append(share)
            rows_left -= share.num_rows
            logits_left -= len(share.logit_rows)

    def _progress(self, seq: Sequence) -> Progress:
        return Progress.of(seq, self._shares.get(seq.seq_id), self._ahead, self.sizes.mtp)

    def _sits_out(self, seq: Sequence, progress: Progress) -> bool:
        """Whether the step under way is surely a sequence's last one here, or may leave no room for more."""
        if progress.carried is None:
            return False
        is_over = progress.num_tokens - seq.num_prompt >= seq.max_tokens or self.sizes.role == "prefill"
        return is_over or progress.num_tokens + progress.slack > self.sizes.max_model_len

    @property
    def _num_places(self) -> int:
        """Sequences that may still be admitted."""
        return self.sizes.max_seqs - len(self.running) - len(self.in_transit) - len(self.reserved)

    @property
    def _has_company(self) -> bool:
        """Whether somebody runs or is on the way, and may want a block more."""
        return bool(self.running or self.in_transit or self.reserved)

    def _share(self, seq: Sequence, progress: Progress, rows_left: int, logits_left: int) -> Scheduled | None:
        """As much of `seq` as fits; None if nothing does."""
        missing = progress.num_tokens - progress.num_computed
        num_tokens = min(missing, rows_left)
        scored = max(0, progress.num_scored - progress.num_computed)  # rows whose logits are known already
        wants_prompt_logits = seq.is_scored and progress.num_scored < seq.num_prompt - 1
        if wants_prompt_logits:
            num_tokens = min(num_tokens, scored + logits_left)
        if self.sizes.mtp > 1 and num_tokens == missing - 1:
            num_tokens -= num_tokens > 1  # the second draft layer wants to know two tokens after a chunk
        if num_tokens <= 0:
            return None
        ends = num_tokens == missing
        num_drafts = 0
        if ends:
            room = self.sizes.max_model_len - progress.num_tokens - progress.slack
            num_drafts = max(0, min(progress.num_drafts, rows_left - num_tokens, logits_left - 1, room))
        first = num_tokens - 1 if ends else num_tokens
        if wants_prompt_logits:
            first = min(first, scored)
        logit_rows = range(first, num_tokens + num_drafts)
        if len(logit_rows) > logits_left:
            return None
        start, carried = progress.num_computed, progress.carried
        return Scheduled(seq, num_tokens, num_drafts, logit_rows, start, ends, carried)

    def _take_blocks(self, seq: Sequence, share: Scheduled, step: Step) -> bool:
        """Make the blocks of all positions that a share may have exist and be writable."""
        slack = share.carried.num_drafts if share.carried is not None else 0
        rtc, stop = self.rtc, share.start + slack + share.num_rows
        if not rtc.alloc_blocks(seq.holding, stop):
            return False
        for block in range(share.start // rtc.block_size, rtc.blocks_for(stop)):
            if rtc.is_shared(seq.holding, block):
                if rtc.num_available == 0:
                    return False
                copy = rtc.copy(seq.holding, block)
                if copy is not None:
                    step.copies.append(copy)
        return True

    @property
    def _is_stuck(self) -> bool:
        """Nobody runs and nobody is on the way, so nothing but a fork that waits could give blocks back."""
        return not self._has_company

    def _take_from_a_fork(self) -> bool:
        """Have the last fork that waits with its leader's blocks give them up; False if there is none."""
        for seq in reversed(self.waiting):
            if seq.holding.slots:
                self._give_up(seq)
                return True
        return False

    def _make_room(self, step: Step) -> bool:
        """Take blocks away from the last in line. False if nothing more can be done in this step."""
        for seq in reversed(self.waiting):  # a fork that waits with its leader's blocks
            if seq.holding.slots:
                self._give_up(seq)
                return True
        if any(seq.transit == "leave" for seq in self.in_transit.values()):
            return False  # blocks are about to be free: nobody else need go
        victim = max(self.running, key=lambda s: s.rank)
        if any(share.seq is victim for share in step.shares):
            return False
        self.running.remove(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        victim.drafts = []
        if self.sizes.preempts_by_swap:
            swapped = self.rtc.swap_out(victim.holding)
            if swapped is not None:
                ticket, victim.host_slots, copies = swapped
                self._depart(victim, "leave", ticket)
                step.transfers.append((ticket, copies))
                return False  # its blocks are free only when they have arrived
        self._give_up(victim)
        self._wait(victim)
        return True

    def _give_up(self, seq: Sequence) -> None:
        """Back to nothing computed."""
        self.rtc.free(seq.holding)
        seq.num_computed = 0

    def _swap_in(self, step: Step) -> None:
        """Let swapped sequences return, in order, while there is room for them and one block more."""
        while self.swapped and self._num_places > 0:
            seq = self.swapped[0]
            if self.rtc.num_available < len(seq.host_slots) + self._has_company:
                return
            back = self.rtc.swap_in(seq.host_slots)
            if back is None:
                return
            self.swapped.pop(0)
            ticket, seq.holding, copies = back
            self._depart(seq, "enter", ticket)
            step.transfers.append((ticket, copies))

    def _receive(self, step: Step) -> None:
        """Let prefilled sequences in, in order, while there is room for their blocks and one more."""
        while self.arriving and self._num_places > 0:
            seq = self.arriving[0]
            needed = self.rtc.blocks_for(seq.num_computed) + self._has_company
            if self.rtc.num_available < needed:
                return
            self.arriving.pop(0)
            ticket = self.rtc.receive(seq.holding, seq.num_computed)
            self._depart(seq, "receive", ticket)
            step.receives.append((ticket, seq))

    # ---- transfers by layer -------------------------------------------------------------------------

    def reserve(self, seq: Sequence, num_tokens: int) -> int | None:
        """A ticket for the blocks of `num_tokens` positions, to be written from now on.

        None if there is no room, or if somebody waits for it already: then the sequence comes when it has
        been prefilled, and waits its turn. May be called at any moment: it takes nothing that a step uses.
        """
        if self.waiting or self.swapped or self.arriving or self._must_wait or self._num_places <= 0:
            return None
        if self.rtc.num_available < self.rtc.blocks_for(num_tokens) + self._has_company:
            return None
        holding = Holding()
        ticket = self.rtc.receive(holding, num_tokens)
        self.reserved[ticket] = Reservation(seq, holding)
        return ticket

    def take_over(self, ticket: int) -> None:
        """A sequence with a reservation has been prefilled: it is receiving, as others are."""
        seq, holding = self.reserved.pop(ticket)
        seq.holding = holding
        self._depart(seq, "receive", ticket)

    def send_early(self, seq: Sequence, num_tokens: int) -> None:
        """The blocks of `num_tokens` positions of a running sequence are read from now on.

        They have two users until then, so that the sequence neither takes them along when it ends nor changes
        over to cached ones of the same content.
        """
        self.early.add(seq.seq_id)
        self.sending[seq.seq_id] = self.rtc.fork(seq.holding, self.rtc.blocks_for(num_tokens))

    def abandon(self) -> None:
        """The dies are lost: nothing is read or written any more, so no transfer keeps blocks."""
        for ticket in [*self.in_transit, *self.reserved]:
            self.finish_transfer(ticket)
        for seq_id in list(self.sending):
            self.release(seq_id)
        self.early.clear()
        self.rtc.abandon()

    def _depart(self, seq: Sequence, transit: Transit, ticket: int) -> None:
        seq.transit = transit
        self.in_transit[ticket] = seq

    # ---- cached prefixes ----------------------------------------------------------------------------

    def _find_prefix(self, seq: Sequence) -> None:
        """Adopt what RTC has of a sequence's beginning. Its last token is always computed."""
        num_held = len(seq.holding.nodes)
        if not self._may_match(seq):
            return
        if not seq.has_matched:
            seq.has_matched = True
            self.num_prefix_queries += len(seq.token_ids)
        match = self.rtc.match_by_prefix_token(seq.token_ids[:-1])
        self.rtc.adopt(seq.holding, match.ready[num_held:])
        seq.num_computed = len(seq.holding.nodes) * self.rtc.block_size
        self.num_prefix_hits += max(0, seq.num_computed - seq.num_cached)
        seq.num_cached = max(seq.num_cached, seq.num_computed)

    def _may_match(self, seq: Sequence) -> bool:
        """Whether all that a sequence holds is whole cached blocks, so that more of them may follow."""
        holding = seq.holding
        return (
            self.sizes.caches_prefixes
            and not seq.wants_prompt_logits
            and len(holding.slots) == len(holding.nodes)
            and seq.num_computed == len(holding.nodes) * self.rtc.block_size
        )

    def _load_prefix(self, seq: Sequence, step: Step) -> bool:
        """Start to load the rest of a cached prefix from host DRAM, if there is some and it pays."""
        if self.load_cost is None or not self._may_match(seq):
            return False
        saved = self.rtc.match_by_prefix_token(seq.token_ids[:-1]).saved
        if not saved or not self.load_cost.should_load(len(saved), len(saved) * self.rtc.block_size):
            return False
        started = self.rtc.populate(saved)
        if started is None:
            return False
        ticket, copies = started
        self.waiting.remove(seq)
        self._depart(seq, "load", ticket)
        step.transfers.append((ticket, copies))
        return True

    def save_cached(self, limit: int) -> list[tuple[int, list[Copy]]]:
        """Transfers that keep up to `limit` cached blocks in host DRAM, to be made in the background."""
        started = self.rtc.save(limit) if self.sizes.caches_prefixes else None
        return [] if started is None else [started]

    def finish_transfer(self, ticket: int) -> None:
        """The die has made the transfers of a ticket."""
        self.rtc.finish(ticket)
        if ticket in self.reserved:  # withdrawn by the other side
            self.rtc.free(self.reserved.pop(ticket).holding)
        seq = self.in_transit.pop(ticket, None)
        if seq is None:
            return
        transit, seq.transit = seq.transit, None
        if transit == "enter" or seq.is_finished:
            self.rtc.release_host(seq.host_slots)
            seq.host_slots = []
        if seq.is_finished:  # aborted on the way
            self.rtc.free(seq.holding)
        elif transit == "load":
            self._wait(seq)  # what has been loaded is found again on admission
        elif transit == "leave":
            insort(self.swapped, seq, key=lambda s: s.rank)
        else:
            self.running.append(seq)

    def arrive(self, seq: Sequence) -> None:
        """Take over a sequence that was prefilled elsewhere; its blocks come when there is room."""
        self.arriving.append(seq)

    def release(self, seq_id: int) -> None:
        """The blocks of a sequence that was prefilled here have been received, or are not wanted any more."""
        holding = self.sending.pop(seq_id, None)
        if holding is not None:
            self.rtc.free(holding)
            self.on_released(seq_id)

    # ---- results ------------------------------------------------------------------------------------

    def finish_step(self, step: Step, results: list[SeqResult]) -> None:
        """Advance every sequence by what its die computed, and hand out its new tokens."""
        self.stats.count_step(step.num_rows)
        if step is self._ahead:
            self._ahead, self._shares = None, {}
        for share, result in zip(step.shares, results, strict=True):
            seq = share.seq
            if seq.is_finished:  # aborted while the step ran, or ended by the one before
                continue
            self.stats.count_drafts(share.num_drafts, result.num_accepted)
            seq.count_drafts(share.num_drafts, result.num_accepted)
            seq.num_computed += share.num_tokens + result.num_accepted
            seq.drafts = result.drafts
            seq.num_scored += share.num_prompt_rows
            if share.ends:
                seq.token_ids += [row.token_id for row in result.rows if not row.is_prompt]
            if self.sizes.caches_prefixes:
                self.rtc.publish(seq.holding, seq.token_ids[: seq.num_computed])
            if seq.num_computed >= seq.num_prompt and seq.seq_id in self.following:
                self._fork(seq)
            if result.rows and seq.on_tokens(seq, result.rows):
                self.remove(seq)
            elif share.ends and self.sizes.role == "prefill":
                self.running.remove(seq)
                if seq.seq_id in self.early:
                    self.early.remove(seq.seq_id)
                    self.rtc.free(seq.holding)
                else:
                    self.sending[seq.seq_id] = seq.holding
                    seq.leave_blocks()
                self.on_prefilled(seq)
        if step.ticket is not None:
            self.rtc.end_step(step.ticket)

    def _fork(self, leader: Sequence) -> None:
        """Give the prompt's blocks to the other choices, which compute its last token again to sample."""
        for seq in self.following.pop(leader.seq_id):
            whole = self.rtc.blocks_for(leader.num_prompt)
            seq.holding = self.rtc.fork(leader.holding, whole)
            seq.num_computed = leader.num_prompt - 1
            seq.num_cached = seq.num_computed
            self._wait(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, finished or aborted, and free its blocks at once. Harmless when repeated.

        Blocks that a transfer still touches are free when it ends, and those of a step when steps are planned
        ahead.
        """
        if seq.is_finished:
            return
        seq.is_finished = True
        for follower in self.following.pop(seq.seq_id, []):
            self._wait(follower)
        if seq in self.in_transit.values():
            return
        if seq.seq_id in self.early:
            self.early.remove(seq.seq_id)
            self.on_withdrawn(seq.seq_id)
        for queue in (self.running, self.waiting, self.swapped, self.arriving, *self.following.values()):
            if seq in queue:
                queue.remove(seq)
        self.rtc.free(seq.holding)
        self.rtc.release_host(seq.host_slots)
        seq.host_slots = []

    def check_integrity(self) -> None:
        """Blocks belong to live sequences, and only they hold any."""
        seqs = list(self.sequences())
        holdings: list[Holding] = [*(seq.holding for seq in seqs), *self.sending.values()]
        holdings += [reservation.holding for reservation in self.reserved.values()]
        self.rtc.check_integrity(holdings, [seq.host_slots for seq in seqs])
