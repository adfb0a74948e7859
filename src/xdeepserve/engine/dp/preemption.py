"""Preemption when KV blocks run out: which sequence gives up its blocks, and which comes back.

A policy of the table `VICTIM` (`engine/deploy/policies.py`) chooses the sequence, by default the one that is
last in order. By recomputation it gives up its blocks and waits; by swap its blocks move to host DRAM. Its
tokens stay the same to the bit, because arithmetic is canonical.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeAlias

from xdeepserve.engine.deploy.sizes import StepSizes
from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.events import EventLog, GroupId
from xdeepserve.engine.dp.places import Places
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import Rank, Sequence
from xdeepserve.engine.dp.step import PlannedStep


class Running(NamedTuple):
    """Facts about a running sequence, for policies that choose the one to preempt."""

    rank: Rank  # in order: the least goes first
    num_computed: int  # positions, which are computed again or swapped
    num_blocks: int


# A policy of the table VICTIM: the index of the sequence that gives up its blocks.
VictimPolicy: TypeAlias = Callable[[Seq[Running]], int]


def last(running: Seq[Running]) -> int:
    """Choose the sequence that is last in order."""
    return max(range(len(running)), key=lambda index: running[index].rank)


def least_computed(running: Seq[Running]) -> int:
    """Choose the sequence with the fewest computed positions; of equals the last in order."""
    return max(range(len(running)), key=lambda index: (-running[index].num_computed, running[index].rank))


class Preemption:
    """Moves the sequences of a DP group that are preempted, by the policy `victim`, and those that return."""

    def __init__(
        self,
        steps: StepSizes,
        rtc: RTC,
        places: Places,
        group: GroupId,
        tell: EventLog,
        victim: VictimPolicy = last,
    ) -> None:
        self._victim = victim
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
        running = self.places.running
        facts = [Running(each.rank, each.num_computed, len(each.holding.slots)) for each in running]
        victim = running[self._victim(facts)]
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

        With room only for its old blocks, a sequence could be preempted again at once, for ever: on a prefill
        TE the others may have ended, with their blocks still to be sent. A sequence alone always finds room.
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
