"""Preemption when KV blocks run out: which sequence gives up its blocks, and which comes back.

The running sequence that is last in (priority, arrival) is preempted: by recomputation it gives up its blocks
and waits, by swap they move to host DRAM. Canonical arithmetic gives it the same bits.
"""

from __future__ import annotations

from xdeepserve.engine.deploy.sizes import StepSizes
from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.events import Events, GroupId
from xdeepserve.engine.dp.places import Places
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.dp.step import PlannedStep


class Preemption:
    """Chooses the sequences of a DP group that are preempted, and those that return."""

    def __init__(self, steps: StepSizes, rtc: RTC, places: Places, group: GroupId, tell: Events) -> None:
        self.steps, self.rtc, self.places, self.group, self.tell = steps, rtc, places, group, tell
        self.count = 0

    @property
    def num_free_places(self) -> int:
        """Number of sequences still to be admitted before `max_seqs` is reached."""
        places = self.places
        return self.steps.max_seqs - len(places.running) - places.num_in_transit - len(places.reserved)

    @property
    def has_company(self) -> bool:
        """Whether some sequence runs or is in a transfer, and may want one more block."""
        return bool(self.places.running or self.places.num_in_transit or self.places.reserved)

    @property
    def is_stuck(self) -> bool:
        """Whether no sequence runs or waits for a transfer, so that only a waiting fork could give back
        blocks."""
        return not (self.places.running or self.places.tickets)

    def take_from_a_fork(self) -> bool:
        """Take the blocks shared with a leader from the last waiting fork. Returns False if there is none."""
        for seq in reversed(self.places.waiting):
            if seq.holding.slots:
                self.give_up(seq)
                return True
        return False

    def make_room(self, step: PlannedStep) -> bool:
        """Take blocks away from the last sequence in line. Returns False if nothing more can be freed in this
        step."""
        if self.take_from_a_fork():
            return True
        if self.places.leaving:
            return False  # blocks are about to be free: nobody else need go
        victim = max(self.places.running, key=lambda s: s.rank)
        if any(share.seq is victim for share in step.shares):
            return False
        self.count += 1
        swapped = self.rtc.swap_out(victim.holding) if self.steps.preempts_by_swap else None
        if swapped is not None:
            self.tell(events.Preempted(victim.seq_id, self.group, victim.num_computed, True))
            victim.num_preemptions += 1
            victim.drafts = []
            ticket, victim.host_slots, copies = swapped
            self.places.move(victim, "swap out", ticket)
            step.transfers.append((ticket, copies))
            return False  # its blocks are free only when they have arrived
        self.recompute(victim)
        return True

    def recompute(self, seq: Sequence) -> None:
        """Preempt a sequence by recomputation: without blocks, it waits to be computed again from its
        tokens."""
        seq.num_preemptions += 1
        self.tell(events.Preempted(seq.seq_id, self.group, seq.num_computed, False))
        seq.drafts, seq.lost_kv = [], None
        self.give_up(seq)
        self.places.move(seq, "recompute")

    def give_up(self, seq: Sequence) -> None:
        """Free all blocks of a sequence and reset its progress to no computed position."""
        self.rtc.free(seq.holding)
        seq.num_computed = 0

    def swap_in(self, step: PlannedStep) -> None:
        """Let swapped sequences return, in order, while there is room for their next step plus one block.

        With room for its old blocks alone it could be its own next victim, for ever: on a prefill TE the
        others may have gone, with their blocks still to be sent. Alone, every sequence finds its room.
        """
        while self.places.swapped and self.num_free_places > 0:
            seq = self.places.swapped[0]
            stop = min(len(seq.token_ids), seq.num_computed + self.steps.max_tokens) + self.steps.mtp
            needed = max(len(seq.host_slots), self.rtc.blocks_for(min(stop, self.steps.max_model_len)))
            if self.rtc.num_available < needed + self.has_company:
                return
            back = self.rtc.swap_in(seq.host_slots)
            if back is None:
                return
            ticket, seq.holding, copies = back
            self.places.move(seq, "swap in", ticket)
            step.transfers.append((ticket, copies))
