"""M2N of a timing-only run: dies meet, and the formula of `m2n.cost` tells the time."""

from __future__ import annotations

from typing import Any

import numpy as np

from xdeepserve.comm.exchange.layout import Layout
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.ways.among.clock import ExchangeLoad
from xdeepserve.engine.ways.trampolines.clock import AttentionPlace, TrampolinesClock
from xdeepserve.hw.die import Die
from xdeepserve.m2n.cost import M2NCost
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.packing import shape_only


def m2n_row_nbytes(model: ModelConfig) -> tuple[int, int]:
    """Return the bytes of a token copy, and of an expert's answer to it."""
    rows = Layout(1, 1, 1, model.hidden_size, 1, int8_answers=model.int8_answers)
    return rows.dispatch_row, rows.combine_row


class M2NClock(TrampolinesClock):
    """Meetings of attention and expert dies over network cards, of two specs: M2N and N2M.

    An attention die is busy until its tokens are acknowledged, an expert die until its answers are.
    """

    def __init__(self, team: Team, *args: Any) -> None:
        super().__init__(team, *args)
        attention, expert = (team.pod.spec_of(dies[0]) for dies in (team.dies, team.expert_dies))
        self.to_experts, self.back = M2NCost(attention, expert), M2NCost(expert, attention)
        self.token_nbytes, self.answer_nbytes = m2n_row_nbytes(self.model)
        self._most: dict[tuple[int, int], float] = {}  # by lane and event, copies of the die that has most

    def sent_ns(self, tokens: float) -> float:
        """Compute the time [ns] until all of an attention die's tokens have arrived, if no receiver has more
        tokens of others."""
        sent = tokens * self.copies * self.token_nbytes
        return self.to_experts.until_there(self.num_experts, sent, 0.0)

    def dispatch_ns(self, lane: int, event: int, load: ExchangeLoad) -> float:
        """Compute the time [ns] of M2N beyond what the attention dies have waited for themselves."""
        most = self._most[lane, event] = max(float(np.max(load.routed)), load.shared)
        sent, received = self.batch[lane] * self.copies * self.token_nbytes, most * self.token_nbytes
        both = self.to_experts.until_there(self.num_experts, sent, received)
        return both - self.sent_ns(self.batch[lane]) + self.to_experts.until_received()

    def combine_ns(self, lane: int, event: int) -> float:
        """Compute the time [ns] of N2M until the answers have arrived."""
        sent = self._most.pop((lane, event)) * self.answer_nbytes
        received = self.batch[lane] * self.copies * self.answer_nbytes
        return self.back.until_there(self.num_attention, sent, received)

    async def a2e(
        self, lane: int, place: AttentionPlace, x: Array, topk_idx: Array, topk_weights: Array, event: int
    ) -> None:
        """Send tokens, and wait until all are acknowledged."""
        place.num_tokens = len(x)
        place.timeline.add("XCCL", "A2E", self.sent_ns(len(x)))
        await place.timeline.catch_up()
        self.tallies[lane].come(event, len(x))
        self.meeting_a2e(lane, event).come(place.index, len(x))
        place.timeline.add("XCCL", "A2E", self.to_experts.until_acknowledged())

    async def e2a(self, lane: int, place: AttentionPlace, event: int) -> Array:
        """Wait for all answers; return a placeholder without values, [T, H]."""
        start, meeting = await place.timeline.catch_up(), self.meeting_e2a(lane, event)
        await meeting.wait(f"attention {place.index}", round(self.back.until_received()))
        place.timeline.waited("XCCL", "E2A", start, "N2M")
        return shape_only(np.float32, place.num_tokens, self.model.hidden_size)

    async def give(self, lane: int, die: Die, index: int, expert_out: Array, event: int) -> None:
        """Send answers, and wait until all are acknowledged."""
        meeting = self.meeting_e2a(lane, event)
        meeting.come(index, len(expert_out))
        await meeting.wait(f"expert {index}", round(self.back.until_acknowledged()))

    def draw(self, *args: Any) -> None:
        """Draw no arrow: each die writes to each, so no single arrow would be true."""
