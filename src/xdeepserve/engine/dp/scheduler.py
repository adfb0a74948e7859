"""Continuous batching: chooses the tokens that a DP group computes in its next step.

The scheduler knows counts, token ids and numbers of blocks, but no die, memory or pod. It returns a plan, by
which the DP group has its dies move the bytes, and only the scheduler changes its counters. `places.py` names
the places of a sequence. `preemption.py` chooses the sequences that give way when blocks run out.
`handover.py` moves sequences from and to other TEs. `prefixes.py` finds tokens that need not be computed.

Running sequences are scheduled first, in order of admission; then swapped ones return and waiting ones are
admitted while rows, blocks and places last. A prompt longer than the rows left is prefilled in chunks.

With `plans_ahead` a step is planned while the one before runs, from counts only. The end of a sequence,
except by length, is seen a step late: that step's results for it are thrown away, and its blocks are free
when the step has ended. When blocks run out, counts are not enough, and nothing is planned until the results
are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from xdeepserve.engine.deploy.sizes import StepSizes
from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.events import EventLog, GroupId
from xdeepserve.engine.dp.handover import Handover
from xdeepserve.engine.dp.places import IN_TRANSIT, Places
from xdeepserve.engine.dp.preemption import Preemption, VictimPolicy, last
from xdeepserve.engine.dp.prefixes import Prefixes, ShouldLoad
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.dp.stats import StepStats
from xdeepserve.engine.dp.step import PlannedStep, Scheduled, SeqProgress, SeqResult, share_of
from xdeepserve.engine.plans import BlockCopy
from xdeepserve.errors import XDeepServeError

SAVE_PER_STEP = 4  # cached blocks that are sent to host DRAM beside a step, at most


class PrefixTier(Protocol):
    """Cached prefixes of a DP group beyond HBM and host DRAM.

    They are in a memory pool (CloudMatrix 4.4.2) or in the HBM of other TEs (DeepServe 4.3).
    """

    num_queries: int  # tokens of prompts that it was asked for
    num_hits: int  # of these, tokens that came

    @property
    def is_moving(self) -> bool:
        """Whether blocks are moving to or from the group by way of this tier."""

    def is_coming(self, seq: Sequence) -> bool:
        """Whether the blocks needed next by a sequence are already being loaded for another sequence."""

    def load(self, seq: Sequence, num_ready: int, num_spared: int) -> int | None:
        """Start to load the blocks after a sequence's first `num_ready`; return a ticket, or None if none
        come."""

    def store(self, seq: Sequence) -> None:
        """Offer the filled blocks of a sequence to the tier."""

    def num_copiers(self, ticket: int) -> int:
        """Count the dies taking part in the copies of a ticket."""

    def copy(self, ticket: int) -> bool:
        """Have dies make the copies of a ticket; False if there are none to make."""

    def copied(self, ticket: int) -> None:
        """Note the end of a ticket's copies, whether or not this tier issued the ticket."""

    def spoil(self, tickets: Iterable[int]) -> None:
        """Discard all transfers under given tickets, because their HBM slots have lost their content."""

    def abandon(self) -> None:
        """Free all places of the tier, because the dies are lost."""


class Scheduler:
    """Plans the steps of a DP group, and applies their results to its sequences."""

    def __init__(
        self,
        steps: StepSizes,
        rtc: RTC,
        should_load: ShouldLoad | None = None,
        group: GroupId = GroupId(),  # noqa: B008
        tell: EventLog | None = None,
        victim: VictimPolicy = last,
    ) -> None:
        self.steps, self.rtc = steps, rtc
        self.group, self.tell = group, tell or EventLog()
        self.places = Places()
        self.prefixes = Prefixes(steps, rtc, should_load)
        self.preemption = Preemption(steps, rtc, self.places, group, self.tell, victim)
        self.handover = Handover(rtc, self.places, self.preemption, group, self.tell)
        self.pool: PrefixTier | None = None
        self.stats = StepStats()
        self._ahead: PlannedStep | None = None  # the latest step that has not ended
        self._shares: dict[int, Scheduled] = {}  # of that step, by seq_id
        self._must_wait = False  # for the end of the step under way, before anything is planned
        self.fails_lost = (
            False  # sequences whose blocks are lost end with the error; else they are recomputed
        )

    def add(self, seq: Sequence, leader: Sequence | None = None) -> None:
        """Enqueue a new sequence. With a `leader` it shares the leader's prompt blocks once they are
        computed."""
        if leader is not None and not leader.is_finished and leader.num_computed < leader.num_prompt:
            seq.leader = leader
            self.places.move(seq, "follow")
        else:
            self.places.move(seq, "add")

    # ---- planning -----------------------------------------------------------------------------------

    def schedule(self) -> PlannedStep:
        """Choose the next step, take its blocks, and start the transfers between memory tiers beside it."""
        step = PlannedStep()
        if not self._must_wait or self._ahead is None:
            self._must_wait = False
            self._plan(step)
        if step.shares:
            # Blocks may be reserved, and then written, at any moment of a step.
            if self.steps.plans_ahead or self.steps.reserves:
                step.ticket = self.rtc.begin_step()
            self._ahead, self._shares = step, {share.seq.seq_id: share for share in step.shares}
        if self.rtc.num_host_blocks:
            step.transfers += self.prefixes.save(SAVE_PER_STEP)
        return step

    def _plan(self, step: PlannedStep) -> None:
        self._take_loaded()
        places, preemption = self.places, self.preemption
        rows_left, logits_left = self.steps.max_tokens, self.steps.max_logit_rows
        index, num_preemptions = 0, preemption.count
        while index < len(places.running):
            seq = places.running[index]
            progress = self.progress(seq)
            if self._sits_out(seq, progress):
                index += 1
                continue
            share = share_of(seq, progress, self.steps, rows_left, logits_left)
            if share is None:
                break
            if not self._take_blocks(seq, share, step):
                if self._ahead is not None:
                    # Which sequence must give way is known only from the results of the step under way.
                    self._must_wait = True
                    break
                if not preemption.make_room(step):
                    break
                continue  # somebody, perhaps seq itself, gave up blocks: look again
            step.shares.append(share)
            rows_left -= share.num_rows
            logits_left -= len(share.logit_rows)
            index += 1
        # Nobody new takes blocks that somebody has just given up, or while one that runs waits for some.
        if index < len(places.running) or num_preemptions != preemption.count:
            return
        preemption.swap_in(step)
        while places.swapped and preemption.is_stuck and preemption.take_from_a_fork():
            preemption.swap_in(step)
        if places.swapped:
            return  # what was preempted comes back before anybody is admitted, or it never might
        if not places.waiting:  # on a decode TE these have been preempted, too
            self.handover.receive(step)
        self._prefetch(step)
        while places.waiting and preemption.num_free_places > 0:
            seq = places.waiting[0]
            self.prefixes.adopt(seq)
            if self._await_load(seq, self.prefixes.load(seq), step):
                continue
            if self.pool is not None and self.prefixes.may_match(seq):
                if self.pool.is_coming(seq):
                    break  # somebody else has asked for it
                ticket = self.pool.load(seq, len(seq.holding.nodes), len(places.running))
                if ticket is not None:
                    places.move(seq, "load", ticket)
                    continue
            share = share_of(seq, self.progress(seq), self.steps, rows_left, logits_left)
            if share is None or not self._take_blocks(seq, share, step):
                preemption.give_up(seq)
                if share is not None and preemption.is_stuck and preemption.take_from_a_fork():
                    continue
                break
            places.move(seq, "admit")
            self.prefixes.count(seq)
            step.shares.append(share)
            rows_left -= share.num_rows
            logits_left -= len(share.logit_rows)

    def outlook(self) -> Iterator[tuple[int, int]]:
        """Yield the first positions and numbers of rows of the next step's sequences, as far as counts
        tell."""
        left = self.steps.max_tokens
        for seq in [*self.places.running, *self.places.waiting][: self.steps.max_seqs]:
            progress = self.progress(seq)
            num_rows = min(left, progress.num_tokens + progress.num_drafts - progress.num_computed)
            if num_rows > 0 and not self._sits_out(seq, progress):
                yield progress.num_computed, num_rows
                left -= num_rows

    def leaving(self) -> list[Sequence]:
        """List the running sequences for which the step under way is surely the last here."""
        return [seq for seq in self.places.running if self._is_over(seq, self.progress(seq))]

    def _is_over(self, seq: Sequence, progress: SeqProgress) -> bool:
        is_last = progress.num_tokens - seq.num_prompt >= seq.max_tokens or self.steps.role == "prefill"
        return progress.carried is not None and is_last

    def progress(self, seq: Sequence) -> SeqProgress:
        """Return how far a sequence will be when the step under way ends, as far as counts tell."""
        return SeqProgress.of(seq, self._shares.get(seq.seq_id), self._ahead, self.steps.mtp)

    def _sits_out(self, seq: Sequence, progress: SeqProgress) -> bool:
        """Whether a sequence must wait for the end of the step under way before it is planned again. Reasons:
        that step is surely its last here, may fill the context, or samples a token that decides which may
        follow."""
        if progress.carried is None:
            return False
        if seq.steering is not None and seq.steering.looks_back:
            return True
        return self._is_over(seq, progress) or progress.num_tokens + progress.slack > self.steps.max_model_len

    def _take_blocks(self, seq: Sequence, share: Scheduled, step: PlannedStep) -> bool:
        """Make blocks exist and be writable for all positions that a share may have."""
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

    def _prefetch(self, step: PlannedStep) -> None:
        """Start loads from host DRAM for waiting sequences whose prefix has a name.

        Blocks that running sequences may soon ask for are spared.
        """
        for seq in [
            seq for seq in self.places.waiting if seq.cache_id is not None and not seq.has_asked_by_id
        ]:
            self._await_load(seq, self.prefixes.load_by_id(seq, num_spared=len(self.places.running)), step)

    def _await_load(
        self, seq: Sequence, started: tuple[int, list[BlockCopy]] | None, step: PlannedStep
    ) -> bool:
        """Let a waiting sequence wait for a load of its cached prefix; False if none has started."""
        if started is None:
            return False
        self.places.move(seq, "load", started[0])
        step.transfers.append(started)
        return True

    def _take_loaded(self) -> None:
        """Move sequences with a loaded cached prefix back to waiting; admission will find the prefix."""
        for seq in self.places.on_ticket("loading"):
            if self.rtc.query_populate(self.places.ticket_of(seq.seq_id)):
                self.places.move(seq, "find")

    # ---- transfers ----------------------------------------------------------------------------------

    def finish_transfer(self, ticket: int) -> None:
        """Note the end of a ticket's transfers, and move the sequence that waited for it."""
        seq = self.places.tickets.get(ticket)
        place = "elsewhere" if seq is None else self.places.of(seq)
        if seq is not None and place == "reserved":  # withdrawn by the other side
            self.handover.drop(seq)
            return
        self.rtc.finish(ticket)
        if seq is None or place not in IN_TRANSIT:
            return
        if seq.lost_kv is not None and self.fails_lost and not seq.is_finished:
            self.fail(seq, seq.lost_kv)
        is_lost = seq.lost_kv is not None and not seq.is_finished
        if place == "entering" or seq.is_finished or is_lost:
            self._release_host(seq)
        if is_lost:
            self.preemption.recompute(seq)
            return
        if seq.is_finished:  # aborted on the way
            self.rtc.free(seq.holding)
        self.places.move(seq, "end" if seq.is_finished else "be moved")

    def fail(self, seq: Sequence, error: XDeepServeError) -> None:
        """End a sequence, and with it the request, because of an error."""
        seq.on_failed(error)
        self.remove(seq)

    def move_out(self) -> None:
        """Make all sequences give up their blocks and leave for another TE, where their tokens are
        recomputed. Called between steps; sequences on their way between memories stay."""
        self._take_loaded()
        places = self.places
        here = [*places.running, *places.waiting, *places.swapped, *places.following]
        for seq in sorted(here, key=lambda seq: seq.rank):
            if seq.seq_id in self.handover.sending or seq.is_finished:  # or has just ended with its request
                continue
            self.preemption.give_up(seq)
            self._release_host(seq)
            seq.leave_group()
            places.move(seq, "move out")
            self.tell(events.MovedOut(seq.seq_id, self.group.te))

    def abandon(self) -> None:
        """End all transfers and free their blocks, because the dies are lost and nothing reads or writes any
        more."""
        for seq in self.places.on_ticket(*IN_TRANSIT, "reserved"):
            self.finish_transfer(self.places.ticket_of(seq.seq_id))
        for seq_id in [*self.handover.sending]:
            self.handover.release(seq_id)
        if self.pool is not None:
            self.pool.abandon()
        self.rtc.abandon()

    # ---- results ------------------------------------------------------------------------------------

    def keep(self, step: PlannedStep, before: PlannedStep | None) -> None:
        """Keep only the sequences still running here, in a step that will be run again after `before`."""
        had_shares = bool(step.shares)
        step.keep(lambda seq: not seq.is_finished and self.places.of(seq) == "running", before)
        if step is self._ahead:
            self._shares = {share.seq.seq_id: share for share in step.shares}
        if had_shares and not step.shares:  # it has no results then
            if step is self._ahead:
                self._ahead = None
            if step.ticket is not None:
                self.rtc.end_step(step.ticket)

    def finish_step(self, step: PlannedStep, results: list[SeqResult]) -> None:
        """Advance every sequence by the results of its die, and pass on its new tokens."""
        self.stats.count_step(step.num_rows)
        if step is self._ahead:
            self._ahead, self._shares = None, {}
        for share, result in zip(step.shares, results, strict=True):
            seq = share.seq
            if seq.is_finished:  # aborted while the step ran, or ended by the one before
                continue
            if result.error is not None:
                self.fail(seq, result.error)
                continue
            if share.num_drafts:
                self.stats.count_drafts(share.num_drafts, result.num_accepted)
                seq.count_drafts(share.num_drafts, result.num_accepted)
            seq.num_computed += share.num_tokens + result.num_accepted
            seq.drafts = result.drafts
            seq.num_scored += share.num_prompt_rows
            begins = share.ends and len(seq.token_ids) == seq.num_prompt
            if share.ends:
                seq.token_ids += [row.token_id for row in result.rows if not row.is_prompt]
            if self.steps.caches_prefixes:
                self.rtc.publish(seq.holding, seq.token_ids, seq.num_computed)
                self.prefixes.name(seq)
                if self.pool is not None:
                    self.pool.store(seq)
            if self.places.following and seq.num_computed >= seq.num_prompt:
                self._fork(seq)
            if result.rows and seq.on_tokens(seq, result.rows):
                self.remove(seq)
            elif share.ends and self.steps.role == "prefill":
                self.handover.send(seq)
            elif begins:
                self.tell(events.Prefilled(seq.seq_id, self.group))
        if step.ticket is not None:
            self.rtc.end_step(step.ticket)

    def _fork(self, leader: Sequence) -> None:
        """Share the leader's prompt blocks with the other choices; each recomputes the last prompt token to
        sample."""
        for seq in self._followers(leader):
            whole = self.rtc.blocks_for(leader.num_prompt)
            seq.holding = self.rtc.fork(leader.holding, whole)
            seq.num_computed = leader.num_prompt - 1
            self.places.move(seq, "lead on")

    def _followers(self, leader: Sequence) -> list[Sequence]:
        return [seq for seq in self.places.following if seq.leader is leader]

    def _release_host(self, seq: Sequence) -> None:
        self.rtc.release_host(seq.host_slots)
        seq.host_slots = []

    def remove(self, seq: Sequence) -> None:
        """Forget a finished or aborted sequence and free its blocks at once. Harmless when repeated.

        Blocks used by a transfer become free when it ends. With steps planned ahead, blocks used by a step
        become free when the step ends.
        """
        if seq.is_finished:
            return
        seq.is_finished = True
        for follower in self._followers(seq):
            self.places.move(follower, "lead on")
        place = self.places.of(seq)
        if place in IN_TRANSIT:
            return
        if place == "running" and seq.seq_id in self.handover.sending:
            self.handover.withdraw(seq)
        elif place != "elsewhere":
            self.places.move(seq, "end")
        self.rtc.free(seq.holding)
        self._release_host(seq)

    def check_integrity(self) -> None:
        """Check the places of all sequences, and the account of every block."""
        self.places.check_integrity()
        self.handover.check_integrity()
        self.check_blocks()

    def check_blocks(self) -> None:
        """Check that KV blocks belong to live sequences and cached prefixes alone."""
        seqs = list(self.places.sequences())
        holdings = [*(seq.holding for seq in seqs), *self.handover.holdings()]
        self.rtc.check_integrity(holdings, [seq.host_slots for seq in seqs])
