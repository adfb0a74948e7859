"""The books of a DP group: a scheduler and an RTC, with the counts that its TE-shell asks for, and no die.

`DPGroup` has dies that make what is decided here. A simulated TE has the books alone (`platform/step_te.py`).
"""

from __future__ import annotations

from xdeepserve.engine.balance.dp import LONG_PROMPT, GroupStatus, prefill_cost
from xdeepserve.engine.deploy.sizes import StepSizes
from xdeepserve.engine.dp.events import EventLog, GroupId
from xdeepserve.engine.dp.preemption import VictimPolicy, last
from xdeepserve.engine.dp.prefixes import ShouldLoad
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.scheduler import Scheduler
from xdeepserve.engine.dp.sequence import Sequence


class GroupBooks:
    """Scheduler and RTC of a DP group: the group as its TE-shell and the policies of balance see it."""

    def __init__(
        self,
        name: GroupId,
        steps: StepSizes,
        rtc: RTC,
        tell: EventLog,
        should_load: ShouldLoad | None = None,
        victim: VictimPolicy = last,
    ) -> None:
        self.id, self.rank, self.tell, self.steps, self.rtc = name, name.rank, tell, steps, rtc
        self.scheduler = Scheduler(steps, rtc, should_load, name, tell, victim)
        self.places, self.handover = self.scheduler.places, self.scheduler.handover

    def status(self) -> GroupStatus:
        """Report load and free room of this group to the leader that balances the DP groups."""
        blocks_for, seqs = self.rtc.blocks_for, list(self.places.sequences())
        promised, prefills = 0, []
        for seq in seqs:
            missing = self.missing(seq)
            promised += max(0, blocks_for(len(seq.token_ids)) - len(seq.holding.slots))
            if missing[0] > 1:
                prefills.append(missing)
        return GroupStatus(
            rank=self.rank,
            num_free_places=self.num_free_places + self.num_leaving,
            num_sequences=len(seqs) + len(self.places.reserved),
            num_blocks=self.rtc.num_blocks,
            num_used_blocks=self.num_used_blocks,
            num_reserved_blocks=self.num_reserved_blocks,
            num_promised_blocks=promised,
            queued_cost=sum(prefill_cost(n, cached) for n, cached in prefills),
            queued_tokens=sum(n for n, _ in prefills),
            has_long=any(n >= LONG_PROMPT for n, _ in prefills),
        )

    @property
    def num_used_blocks(self) -> int:
        """Number of KV blocks in use."""
        return self.rtc.num_blocks - self.rtc.num_available

    @property
    def num_reserved_blocks(self) -> int:
        """Number of KV blocks that sequences of this group may still ask for until they end."""
        blocks_for, most, reserved = self.rtc.blocks_for, self.steps.max_model_len, self.places.reserved
        needed = held = 0
        for seq in self.places.sequences():
            needed += blocks_for(min(seq.num_prompt + seq.max_tokens, most))
            held += len(seq.holding.slots)
        needed += sum(blocks_for(min(seq.num_prompt + seq.max_tokens, most)) for seq in reserved)
        held += sum(len(holding.slots) for holding in self.handover.reserved.values())
        return max(0, needed - held)

    @property
    def kv_load(self) -> float:
        """Share of KV blocks in use or reserved; above 1 if reservations exceed the blocks."""
        return (self.num_used_blocks + self.num_reserved_blocks) / self.rtc.num_blocks

    def missing(self, seq: Sequence) -> tuple[int, int]:
        """Return how many tokens of a sequence have not been computed, and how many have."""
        return len(seq.token_ids) - seq.num_computed, seq.num_computed

    @property
    def num_leaving(self) -> int:
        """Number of sequences whose places will be free when the step under way has ended."""
        return 0

    def num_reusable(self, seq: Sequence) -> int:
        """Return how many tokens of a sequence this group need not compute."""
        return self.scheduler.prefixes.num_reusable(seq)

    @property
    def num_sequences(self) -> int:
        return len(self.places.running) + self.places.num_waiting

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is in this group, and none keeps KV blocks in it."""
        return self.places.is_empty and not self.handover.sending

    @property
    def num_free_places(self) -> int:
        """Number of sequences still able to join a step."""
        return self.steps.max_seqs - self.num_sequences - len(self.places.reserved)
