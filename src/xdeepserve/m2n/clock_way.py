"""M2N of a timing-only run: dies meet, and the formula of `m2n.cost` tells the time."""

from __future__ import annotations

from typing import Any

import numpy as np

from xdeepserve.comm.exchange.layout import Layout
from xdeepserve.engine.run.clock.away import ClockTrampolines
from xdeepserve.engine.run.clock.exchange_hub import ExchangeLoad
from xdeepserve.engine.run.clock.meeting import Meeting
from xdeepserve.engine.run.clock.trampoline_hub import ClockAttentionSide, ClockExpertSide, TrampolineHub
from xdeepserve.hw.spec import Spec
from xdeepserve.m2n.cost import M2NCost
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.packing import shape_only


def m2n_row_nbytes(model: ModelConfig) -> tuple[int, int]:
    """Return the bytes of a token copy, and of an expert's answer to it."""
    rows = Layout(1, 1, 1, model.hidden_size, 1, int8_answers=model.int8_answers)
    return rows.dispatch_row, rows.combine_row


class M2NHub(TrampolineHub):
    """M2N and N2M of a microbatch of a DP domain, between dies of two specs.

    An attention die is busy until its tokens are acknowledged, an expert die until its answers are.
    """

    def __init__(self, attention: Spec, expert: Spec, *args: Any) -> None:
        super().__init__(*args)
        self.to_experts, self.back = M2NCost(attention, expert), M2NCost(expert, attention)
        self.token_nbytes, self.answer_nbytes = m2n_row_nbytes(self.model)
        self._most: dict[int, float] = {}  # by event, copies of the die that has most

    def sent_ns(self, tokens: float) -> float:
        """Compute the time [ns] until all of an attention die's tokens have arrived, if no receiver has more
        tokens of others."""
        sent = tokens * self.copies * self.token_nbytes
        return self.to_experts.until_there(self.num_experts, sent, 0.0)

    def _settle_a2e(self, meeting: Meeting[ExchangeLoad]) -> tuple[float, ExchangeLoad]:
        _, brought = super()._settle_a2e(meeting)
        most = self._most[meeting.event] = max(float(np.max(brought.routed)), brought.shared)
        sent, received = self._batch * self.copies * self.token_nbytes, most * self.token_nbytes
        both = self.to_experts.until_there(self.num_experts, sent, received)
        return both - self.sent_ns(self._batch) + self.to_experts.until_received(), brought

    def _settle_e2a(self, meeting: Meeting[None]) -> tuple[float, None]:
        super()._settle_e2a(meeting)
        sent = self._most.pop(meeting.event) * self.answer_nbytes
        received = self._batch * self.copies * self.answer_nbytes
        return self.back.until_there(self.num_attention, sent, received), None


class ClockM2NAttention(ClockAttentionSide):
    """An attention die's end, with the operations of `m2n.sides.M2NAttention`."""

    hub: M2NHub

    async def a2e(self, x: Array, topk_idx: Array, topk_weights: Array, event_id: int) -> None:
        """Send tokens, and wait until all are acknowledged."""
        self._num_tokens = len(x)
        self.timeline.add("XCCL", "A2E", self.hub.sent_ns(len(x)))
        await self.timeline.catch_up()
        self.hub.tally.come(event_id, len(x))
        self.hub.a2e(event_id).come(self.rank, len(x))
        self.timeline.add("XCCL", "A2E", self.hub.to_experts.until_acknowledged())

    async def e2a(self, event_id: int) -> Array:
        """Wait for all answers; return a placeholder without values, [T, H]."""
        start, meeting = await self.timeline.catch_up(), self.hub.e2a(event_id)
        await meeting.wait(f"attention {self.rank}", round(self.hub.back.until_received()))
        self.timeline.waited("XCCL", "E2A", start, "N2M")
        return shape_only(np.float32, self._num_tokens, self._hidden)


class ClockM2NExpert(ClockExpertSide):
    """An expert die's end, with the operations of `m2n.sides.M2NExpert`."""

    hub: M2NHub

    async def e2a(self, expert_out: Array, event_id: int) -> None:
        """Send answers, and wait until all are acknowledged."""
        meeting = self.hub.e2a(event_id)
        meeting.come(self.index, len(expert_out))
        await meeting.wait(f"expert {self.index}", round(self.hub.back.until_acknowledged()))

    def _draw(self, *args: Any) -> None:
        """Draw no arrow: each die writes to each, so no single arrow would be true."""


class ClockCards(ClockTrampolines):
    """Meetings of attention and expert dies over network cards: M2N and N2M, by the cost formula."""

    attention_side, expert_side = ClockM2NAttention, ClockM2NExpert

    def _hub(self, *args: Any) -> TrampolineHub:
        spec_of, team = self.team.pod.spec_of, self.team
        return M2NHub(spec_of(team.dies[0]), spec_of(team.expert_dies[0]), *args)
