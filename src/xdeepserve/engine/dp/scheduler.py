"""Continuous batching: which tokens of which sequences a DP group computes in its next step.

The scheduler returns a plan and alone mutates its counters. `queues.py` names the places of a sequence,
`preemption.py` says who gives way when blocks run out, `prefixes.py` what need not be computed.

Running sequences are scheduled first, in order of admission; then swapped ones return and waiting ones are
admitted while rows, blocks and places last. A prompt longer than the rows left is prefilled in chunks.

With `sizes.plans_ahead` a step is planned while the one before runs, from counts only. That a sequence has
ended, for any other reason than its length, is seen a step late: what that step computes for it is thrown
away, and its blocks are free when the step has ended. Where counting does not tell enough, which is when
blocks run out, nothing is planned until the results are there.
"""

from __future__ import annotations

from bisect import insort

from xdeepserve.engine.dp.block_table import Copy, Holding
from xdeepserve.engine.dp.events import Events, GroupId, Prefilled, Released, Withdrawn
from xdeepserve.engine.dp.preemption import Preemption
from xdeepserve.engine.dp.prefixes import LoadCost, Prefixes
from xdeepserve.engine.dp.queues import Reservation
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.dp.stats import StepStats
from xdeepserve.engine.dp.step import Progress, Scheduled, SeqResult, Step, share_of
from xdeepserve.engine.sizes import Sizes


class Scheduler(Preemption):
    """Plans the steps of one DP group, and takes their results."""

    def __init__(
        self,
        sizes: Sizes,
        rtc: RTC,
        load_cost: LoadCost | None = None,
        group: GroupId = GroupId(),  # noqa: B008
        tell: Events | None = None,
    ) -> None:
        super().__init__(sizes, rtc, group, tell or Events())
        self.prefixes = Prefixes(sizes, rtc, load_cost)
        self.stats = StepStats()
        self._ahead: Step | None = None  # the latest step that has not ended
        self._shares: dict[int, Scheduled] = {}  # of that step, by seq_id
        self._must_wait = False  # for the end of the step under way, before anything is planned

    def add(self, seq: Sequence, leader: Sequence | None = None) -> None:
        """Enqueue a new sequence; with a `leader` it shares that one's prompt blocks when they are there."""
        if leader is not None and not leader.is_finished and leader.num_computed < leader.num_prompt:
            self.following.setdefault(leader.seq_id, []).append(seq)
        else:
            self._wait(seq)

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
        self._take_loaded()
        rows_left, logits_left = self.sizes.max_tokens, self.sizes.max_logit_rows
        index, num_preemptions = 0, self.num_preemptions
        while index < len(self.running):
            seq = self.running[index]
            progress = self._progress(seq)
            if self._sits_out(seq, progress):
                index += 1
                continue
            share = share_of(seq, progress, self.sizes, rows_left, logits_left)
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
        self._prefetch(step)
        while self.waiting and self._num_places > 0:
            seq = self.waiting[0]
            self.prefixes.adopt(seq)
            if self._load_prefix(seq, step):
                continue
            share = share_of(seq, self._progress(seq), self.sizes, rows_left, logits_left)
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

    def _load_prefix(self, seq: Sequence, step: Step) -> bool:
        """Let a waiting sequence load the rest of a cached prefix, if there is some and it pays."""
        return self._await_load(seq, self.prefixes.load(seq), step)

    def _prefetch(self, step: Step) -> None:
        """While they wait, let sequences whose prefix has a name load what of it is in host DRAM.

        Blocks that those which run may soon ask for are left to them.
        """
        for seq in [seq for seq in self.waiting if seq.cache_id is not None and not seq.has_asked_by_id]:
            self._await_load(seq, self.prefixes.load_by_id(seq, num_spared=len(self.running)), step)

    def _await_load(self, seq: Sequence, started: tuple[int, list[Copy]] | None, step: Step) -> bool:
        if started is None:
            return False
        self.waiting.remove(seq)
        self.loading[started[0]] = seq
        step.transfers.append(started)
        return True

    def _take_loaded(self) -> None:
        """Sequences whose cached prefix has been loaded are ready: they wait, and find it on admission."""
        for ticket, seq in list(self.loading.items()):
            if self.rtc.query_populate(ticket):
                del self.loading[ticket]
                self._wait(seq)

    # ---- transfers ----------------------------------------------------------------------------------

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
        elif transit == "leave":
            insort(self.swapped, seq, key=lambda s: s.rank)
        else:
            self.running.append(seq)

    def arrive(self, seq: Sequence) -> None:
        """Take over a sequence that was prefilled elsewhere; its blocks come when there is room."""
        self.arriving.append(seq)

    def drop(self, seq: Sequence, ticket: int | None) -> None:
        """A sequence that is expected from elsewhere will not come, not by this way: free the blocks of its
        ticket, if it has one. Nothing writes them any more.
        """
        if seq in self.arriving:
            self.arriving.remove(seq)
        if ticket is None:
            return
        self.rtc.finish(ticket)
        if ticket in self.reserved:
            self.rtc.free(self.reserved.pop(ticket).holding)
        else:
            del self.in_transit[ticket]
            seq.transit = None
            self.rtc.free(seq.holding)
            seq.leave_blocks()

    def stop_early(self, seq_id: int) -> None:
        """The layers of a running sequence do not leave before its prompt has ended, after all."""
        self.early.remove(seq_id)
        self.rtc.free(self.sending.pop(seq_id))

    def release(self, seq_id: int) -> None:
        """The blocks of a sequence that was prefilled here have been received, or are not wanted any more."""
        holding = self.sending.pop(seq_id, None)
        if holding is not None:
            self.rtc.free(holding)
            self.tell(Released(seq_id, self.group))

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
                self.prefixes.name(seq)
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
                self.tell(Prefilled(seq.seq_id, self.group))
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
            self.tell(Withdrawn(seq.seq_id, self.group))
        self._take_out(seq)
        self.rtc.free(seq.holding)
        self.rtc.release_host(seq.host_slots)
        seq.host_slots = []

    def check_integrity(self) -> None:
        """Blocks belong to live sequences, and only they hold any."""
        seqs = list(self.sequences())
        holdings: list[Holding] = [*(seq.holding for seq in seqs), *self.sending.values()]
        holdings += [reservation.holding for reservation in self.reserved.values()]
        self.rtc.check_integrity(holdings, [seq.host_slots for seq in seqs])
