"""When blocks run out: who gives up its own, and who comes back (preemption by recomputation or by swap).

The running sequence that is last in (priority, arrival) is preempted: by recomputation it gives up its blocks
and waits, by swap they move to host DRAM. Canonical arithmetic gives it the same bits.
"""

from __future__ import annotations

from xdeepserve.engine.dp.events import Events, GroupId, Preempted
from xdeepserve.engine.dp.queues import Queues
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.dp.step import Step
from xdeepserve.engine.sizes import Sizes


class Preemption(Queues):
    """Queues whose sequences hold blocks of `rtc`."""

    def __init__(self, sizes: Sizes, rtc: RTC, group: GroupId, tell: Events) -> None:
        super().__init__()
        self.sizes, self.rtc, self.group, self.tell = sizes, rtc, group, tell
        self.num_preemptions = 0

    @property
    def _num_places(self) -> int:
        """Sequences that may still be admitted."""
        return self.sizes.max_seqs - len(self.running) - len(self.in_transit) - len(self.reserved)

    @property
    def _has_company(self) -> bool:
        """Whether somebody runs or is on the way, and may want a block more."""
        return bool(self.running or self.in_transit or self.reserved)

    @property
    def _is_stuck(self) -> bool:
        """Nobody runs and nobody is on the way, so nothing but a fork that waits could give blocks back."""
        return not (self._has_company or self.loading)

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
                self.tell(Preempted(victim.seq_id, self.group, victim.num_computed, is_swapped=True))
                return False  # its blocks are free only when they have arrived
        self.tell(Preempted(victim.seq_id, self.group, victim.num_computed, is_swapped=False))
        self._give_up(victim)
        self._wait(victim)
        return True

    def _give_up(self, seq: Sequence) -> None:
        """Back to nothing computed."""
        self.rtc.free(seq.holding)
        seq.num_computed = 0

    def _swap_in(self, step: Step) -> None:
        """Let swapped sequences return, in order, while there is room for what each computes next and one
        block more.

        With room for its old blocks alone it could be its own next victim, for ever: on a prefill TE the
        others may have gone, with their blocks still to be sent. Alone, every sequence finds its room.
        """
        while self.swapped and self._num_places > 0:
            seq = self.swapped[0]
            stop = min(len(seq.token_ids), seq.num_computed + self.sizes.max_tokens) + self.sizes.mtp
            needed = max(len(seq.host_slots), self.rtc.blocks_for(min(stop, self.sizes.max_model_len)))
            if self.rtc.num_available < needed + self._has_company:
                return
            back = self.rtc.swap_in(seq.host_slots)
            if back is None:
                return
            self.swapped.pop(0)
            ticket, seq.holding, copies = back
            self._depart(seq, "enter", ticket)
            step.transfers.append((ticket, copies))
