"""Continuous batching: which tokens of which sequences a DP group computes in its next step.

The scheduler returns a plan and alone mutates its counters. `places.py` names the places of a sequence,
`preemption.py` says who gives way when blocks run out, `handover.py` who comes from and goes to other TEs,
`prefixes.py` what need not be computed.

Running sequences are scheduled first, in order of admission; then swapped ones return and waiting ones are
admitted while rows, blocks and places last. A prompt longer than the rows left is prefilled in chunks.

With `plans_ahead` a step is planned while the one before runs, from counts only. That a sequence has
ended, for any other reason than its length, is seen a step late: what that step computes for it is thrown
away, and its blocks are free when the step has ended. Where counting does not tell enough, which is when
blocks run out, nothing is planned until the results are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from xdeepserve.engine.deploy.sizes import StepSizes
from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.block_table import BlockCopy
from xdeepserve.engine.dp.events import Events, GroupId
from xdeepserve.engine.dp.handover import Handover
from xdeepserve.engine.dp.places import IN_TRANSIT, Places
from xdeepserve.engine.dp.preemption import Preemption
from xdeepserve.engine.dp.prefixes import BlockLoadCost, Prefixes
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.dp.stats import StepStats
from xdeepserve.engine.dp.step import PlannedStep, Scheduled, SeqProgress, SeqResult, share_of
from xdeepserve.errors import XDeepServeError


class PrefixTier(Protocol):
    """Prefixes of one DP group beyond HBM and the host's DRAM, in a memory pool (CloudMatrix 4.4.2)."""

    num_queries: int  # tokens of prompts that it was asked for
    num_hits: int  # of these, tokens that came

    @property
    def is_moving(self) -> bool:
        """Whether blocks are on their way to or from it."""

    def is_coming(self, seq: Sequence) -> bool:
        """Whether the blocks that a sequence needs next are on their way for another sequence."""

    def load(self, seq: Sequence, num_ready: int, num_spared: int) -> int | None:
        """Start to load blocks that follow a sequence's first `num_ready`: a ticket; None: nothing comes."""

    def store(self, seq: Sequence) -> None:
        """Take the blocks of a sequence that a step has filled."""

    def num_copiers(self, ticket: int) -> int:
        """Count the dies that copy under a ticket."""

    def copy(self, ticket: int) -> bool:
        """Have dies make the copies of a ticket; False if there are none to make."""

    def copied(self, ticket: int) -> None:
        """Note that the dies have made the copies of a ticket, be it this tier's or not."""

    def spoil(self, tickets: Iterable[int]) -> None:
        """Keep nothing of what moves under these tickets: its HBM slots have lost their content."""

    def abandon(self) -> None:
        """Give all places free: the dies are lost."""


class Scheduler:
    """Plans the steps of one DP group, and takes their results."""

    def __init__(
        self,
        steps: StepSizes,
        rtc: RTC,
        load_cost: BlockLoadCost | None = None,
        group: GroupId = GroupId(),  # noqa: B008
        tell: Events | None = None,
    ) -> None:
        self.steps, self.rtc = steps, rtc
        self.group, self.tell = group, tell or Events()
        self.places = Places()
        self.prefixes = Prefixes(steps, rtc, load_cost)
        self.preemption = Preemption(steps, rtc, self.places, group, self.tell)
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
        """Enqueue a new sequence; with a `leader` it shares that one's prompt blocks when they are there."""
        if leader is not None and not leader.is_finished and leader.num_computed < leader.num_prompt:
            seq.leader = leader
            self.places.move(seq, "follow")
        else:
            self.places.move(seq, "add")

    # ---- planning -----------------------------------------------------------------------------------

    def schedule(self) -> PlannedStep:
        """Choose the next step and take its blocks."""
        step = PlannedStep()
        if self._must_wait and self._ahead is not None:
            return step
        self._must_wait = False
        self._plan(step)
        if not step.shares:
            return step
        # Blocks may be reserved, and then written, at any moment of a step.
        if self.steps.plans_ahead or self.steps.reserves:
            step.ticket = self.rtc.begin_step()
        self._ahead, self._shares = step, {share.seq.seq_id: share for share in step.shares}
        return step

    def _plan(self, step: PlannedStep) -> None:
        self._take_loaded()
        places, preemption = self.places, self.preemption
        rows_left, logits_left = self.steps.max_tokens, self.steps.max_logit_rows
        index, num_preemptions = 0, preemption.count
        while index < len(places.running):
            seq = places.running[index]
            progress = self._progress(seq)
            if self._sits_out(seq, progress):
                index += 1
                continue
            share = share_of(seq, progress, self.steps, rows_left, logits_left)
            if share is None:
                break
            if not self._take_blocks(seq, share, step):
                if self._ahead is not None:
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
            share = share_of(seq, self._progress(seq), self.steps, rows_left, logits_left)
            if share is None or not self._take_blocks(seq, share, step):
                preemption.give_up(seq)
                if share is not None and preemption.is_stuck and preemption.take_from_a_fork():
                    continue
                break
            places.move(seq, "admit")
            step.shares.append(share)
            rows_left -= share.num_rows
            logits_left -= len(share.logit_rows)

    def _progress(self, seq: Sequence) -> SeqProgress:
        return SeqProgress.of(seq, self._shares.get(seq.seq_id), self._ahead, self.steps.mtp)

    def _sits_out(self, seq: Sequence, progress: SeqProgress) -> bool:
        """Whether a sequence has to wait for the end of the step under way: that is surely its last one here,
        may leave no room for more, or samples a token that decides what the next one may be.
        """
        if progress.carried is None:
            return False
        if seq.steering is not None and seq.steering.looks_back:
            return True
        is_over = progress.num_tokens - seq.num_prompt >= seq.max_tokens or self.steps.role == "prefill"
        return is_over or progress.num_tokens + progress.slack > self.steps.max_model_len

    def _take_blocks(self, seq: Sequence, share: Scheduled, step: PlannedStep) -> bool:
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

    def _prefetch(self, step: PlannedStep) -> None:
        """While they wait, let sequences whose prefix has a name load what of it is in host DRAM.

        Blocks that those which run may soon ask for are left to them.
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
        """Sequences whose cached prefix has been loaded are ready: they wait, and find it on admission."""
        for seq in self.places.on_ticket("loading"):
            if self.rtc.query_populate(self.places.ticket_of(seq.seq_id)):
                self.places.move(seq, "find")

    # ---- transfers ----------------------------------------------------------------------------------

    def finish_transfer(self, ticket: int) -> None:
        """The die has made the transfers of a ticket."""
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
        """A sequence ends, and with it its request: it cannot go on."""
        seq.on_failed(error)
        self.remove(seq)

    def move_out(self) -> None:
        """Between steps: all that are not on their way between memories give up what they have here, and go
        on elsewhere, where their tokens are computed again."""
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
        """The dies are lost: nothing is read or written any more, so no transfer keeps blocks."""
        for seq in self.places.on_ticket(*IN_TRANSIT, "reserved"):
            self.finish_transfer(self.places.ticket_of(seq.seq_id))
        for seq_id in [*self.handover.sending]:
            self.handover.release(seq_id)
        if self.pool is not None:
            self.pool.abandon()
        self.rtc.abandon()

    # ---- results ------------------------------------------------------------------------------------

    def keep(self, step: PlannedStep, before: PlannedStep | None) -> None:
        """A step under way is run again, after `before`, for those alone who run here still."""
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
        """Advance every sequence by what its die computed, and hand out its new tokens."""
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
            self.stats.count_drafts(share.num_drafts, result.num_accepted)
            seq.count_drafts(share.num_drafts, result.num_accepted)
            seq.num_computed += share.num_tokens + result.num_accepted
            seq.drafts = result.drafts
            seq.num_scored += share.num_prompt_rows
            if share.ends:
                seq.token_ids += [row.token_id for row in result.rows if not row.is_prompt]
            if self.steps.caches_prefixes:
                self.rtc.publish(seq.holding, seq.token_ids[: seq.num_computed])
                self.prefixes.name(seq)
                if self.pool is not None:
                    self.pool.store(seq)
            if seq.num_computed >= seq.num_prompt:
                self._fork(seq)
            if result.rows and seq.on_tokens(seq, result.rows):
                self.remove(seq)
            elif share.ends and self.steps.role == "prefill":
                self.handover.send(seq)
        if step.ticket is not None:
            self.rtc.end_step(step.ticket)

    def _fork(self, leader: Sequence) -> None:
        """Give the prompt's blocks to the other choices, which compute its last token again to sample."""
        for seq in self._followers(leader):
            whole = self.rtc.blocks_for(leader.num_prompt)
            seq.holding = self.rtc.fork(leader.holding, whole)
            seq.num_computed = leader.num_prompt - 1
            seq.num_cached = seq.num_computed
            self.places.move(seq, "lead on")

    def _followers(self, leader: Sequence) -> list[Sequence]:
        return [seq for seq in self.places.following if seq.leader is leader]

    def _release_host(self, seq: Sequence) -> None:
        self.rtc.release_host(seq.host_slots)
        seq.host_slots = []

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, finished or aborted, and free its blocks at once. Harmless when repeated.

        Blocks that a transfer still touches are free when it ends, and those of a step when steps are planned
        ahead.
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
        """Sequences are where they should be; blocks belong to live ones, and only they hold any."""
        self.places.check_integrity()
        self.handover.check_integrity()
        seqs = list(self.places.sequences())
        holdings = [*(seq.holding for seq in seqs), *self.handover.holdings()]
        self.rtc.check_integrity(holdings, [seq.host_slots for seq in seqs])
