"""KV blocks of a DP group whose content is lost on one of its dies: a page of HBM is gone (xDeepServe 6.2).

A slot is lost on all dies of the group alike. At once, since transfers go on while steps are called back:

    on their way here        whoever is to have them is recomputed when they have come; cached ones are missed
    on their way elsewhere   the same, where they arrive; what goes to a cache is not kept there

Then, when no step runs:

    sequences that hold some   give up all their blocks and leave the steps under way: they are computed again
                               from their tokens, as after a preemption, or end with the error (kv_loss=fail)
    cached ones                are out of the index
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.scheduler import Scheduler
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.dp.step import PlannedStep
from xdeepserve.errors import XDeepServeError


class LostBlocks:
    """Collects KV blocks with lost content since steps last ran, and recovers their sequences."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._slots: set[int] = set()
        self._error: XDeepServeError | None = None

    def note(self, slots: set[int], error: XDeepServeError) -> None:
        """Note the loss of the content of these slots, and mark the sequences whose transfers it spoils."""
        self._slots |= slots
        self._error = error
        scheduler, places, sending = self._scheduler, self._scheduler.places, self._scheduler.handover.sending
        tickets = scheduler.rtc.spoil(slots)
        if scheduler.pool is not None:
            scheduler.pool.spoil(tickets)
        for seq in [places.tickets[ticket] for ticket in tickets if ticket in places.tickets]:
            if places.of(seq) != "loading":  # what is missed then is not yet its own
                seq.lost_kv = error
        for seq in (*places.sending, *places.running):
            if seq.seq_id in sending and not slots.isdisjoint(sending[seq.seq_id].slots):
                seq.lost_kv = error

    @property
    def is_pending(self) -> bool:
        """Whether blocks are lost, and the index of cached prefixes may still name them."""
        return self._error is not None

    def drop(self, steps: Iterable[PlannedStep], used: Mapping[int, set[int]]) -> None:
        """Recover from lost blocks while nothing runs: sequences that held one are recomputed, or end with
        the error. `used` says by seq_id which slots the rolled-back `steps` use."""
        if self._error is None:
            return
        scheduler, places, slots = self._scheduler, self._scheduler.places, self._slots
        for step in steps:
            slots.update(each.dst for each in step.copies if each.src in slots and isinstance(each.dst, int))
        for seq in [*places.running, *places.waiting, *places.on_ticket("loading")]:
            # By layer some may have left already, by a way on which they were lost.
            has_lost = not slots.isdisjoint({*seq.holding.slots, *used.get(seq.seq_id, ())})
            if seq.lost_kv is not None or has_lost:
                self._take_from(seq, self._error)
        holdings = [*(seq.holding for seq in places.sequences()), *scheduler.handover.holdings()]
        scheduler.rtc.lose(slots, holdings)
        self._slots, self._error = set(), None

    def _take_from(self, seq: Sequence, error: XDeepServeError) -> None:
        scheduler, group = self._scheduler, self._scheduler.group
        if scheduler.places.of(seq) != "running":  # it has computed nothing yet
            scheduler.preemption.give_up(seq)
            return
        if seq.seq_id in scheduler.handover.sending:
            scheduler.tell(events.KVLost(seq.seq_id, group))
        if scheduler.fails_lost:
            scheduler.fail(seq, error)
            return
        scheduler.preemption.recompute(seq)
