"""A2E and E2A without trampolines, for comparison (XDS 3.3): every attention die posts at all expert dies.

Dispatch and combine with the two sides on different dies: attention dies do steps 1 to 4 of A2E, expert dies
steps 5 to 7, and the other way round in E2A. The answers are the same bits as with trampolines; what differs
is that an attention die posts and awaits X fields, one after the other in the scalar units of the AIV cores
it spares, where it would post and await one.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from xdeepserve.comm.channel import Inbox, Outbox
from xdeepserve.comm.exchange.combine import check_counts, load_answers
from xdeepserve.comm.exchange.dispatch import load_tokens
from xdeepserve.comm.exchange.rows import (
    Float32,
    Int32,
    Received,
    SentRows,
    check_answers,
    check_received,
    check_tokens,
    pack_tokens,
    unpack_answers,
    unpack_tokens,
    weighted_sum,
)
from xdeepserve.comm.trampoline.side import Side
from xdeepserve.comm.turns import Step


class NaiveAttentionSide(Side):
    """A2E and E2A of an attention die, straight to the expert dies, without trampolines.

    `layout.plan_naive_attention` must have been called on the die's plan.
    """

    role = "attention"

    def _connect(self) -> None:
        peers = self.sides.experts.dies
        names = [f"expert {expert}" for expert in range(len(peers))]
        self.outbox = Outbox(self.die, self.layout.naive_tokens, self.rank, peers)
        self.inbox = Inbox(self.die, self.layout.naive_answers, peers, self.label, names)
        self.expert_rank = np.asarray(self.sides.experts.expert_rank, np.int64)
        top_k = self.layout.top_k
        self.sent = SentRows(np.zeros(0, np.int64), np.zeros(len(peers), np.int64), (0, top_k))
        self._weights: Float32 = np.zeros((0, top_k), np.float32)

    async def a2e(self, x: Float32, topk_idx: Int32, topk_weights: Float32, event_id: int) -> None:
        """Send token rows x [T, H] to their experts' dies, topk_idx [T, K]; topk_weights [T, K] stay here."""

        def check() -> None:
            check_tokens("A2E", self.layout.naive, len(self.expert_rank), x, None, topk_idx)
            self._check_weights(topk_idx, topk_weights)

        await self._run(
            Step.DISPATCH, event_id, lambda: self._a2e(x, topk_idx, topk_weights, event_id), check
        )

    async def e2a(self, event_id: int) -> Float32:
        """Return the experts' answers, weighted and summed on this die: [T, H]."""
        return await self._run(Step.COMBINE, event_id, lambda: self._e2a(event_id))

    async def _a2e(self, x: Float32, topk_idx: Int32, topk_weights: Float32, event_id: int) -> None:
        layout, means, steps = self.layout.naive, self.means, self.steps
        payload, scale = await load_tokens(self, "A2E", x, None)
        num_experts = self.sides.experts.num_ranks
        rows, self.sent = pack_tokens("A2E", layout, self.expert_rank, num_experts, payload, scale, topk_idx)
        self._weights = topk_weights.copy()
        await self.outbox.write(rows, self.sent.counts, means, "A2E 3 write rows")
        await steps.passed("A2E", 3)
        await self.outbox.post(event_id, self.sent.counts, means, "A2E 4 post fields")
        await steps.passed("A2E", 4)

    async def _e2a(self, event_id: int) -> Float32:
        layout, means, steps = self.layout.naive, self.means, self.steps
        counts = await self.inbox.wait("E2A", event_id, self.turns.event_before, means, steps.lane)
        check_counts("E2A", self.label, event_id, self.sent.counts, counts)
        await steps.passed("E2A", 5)
        rows = await self.inbox.pull("E2A", counts, means)
        await steps.passed("E2A", 7)
        answers = unpack_answers(layout, rows, self.sent)
        if not self.layout.reduce:
            return answers
        total = partial(weighted_sum, answers, self._weights)
        return await self.work("E2A weighted sum", total, 2 * answers.size)


class NaiveExpertSide(Side):
    """A2E and E2A of an expert die, straight from the attention dies, without trampolines.

    `layout.plan_naive_expert` must have been called on the die's plan.
    """

    role = "expert"
    received: Received | None = None

    def _connect(self) -> None:
        peers = self.sides.attention
        names = [f"attention {attention}" for attention in range(len(peers))]
        self.inbox = Inbox(self.die, self.layout.naive_tokens, peers, self.label, names)
        self.outbox = Outbox(self.die, self.layout.naive_answers, self.rank, peers)

    async def a2e(self, event_id: int) -> Received:
        """Receive token rows for the die's experts, grouped by attention rank."""
        return await self._run(Step.DISPATCH, event_id, lambda: self._a2e(event_id))

    async def e2a(self, expert_out: Float32, event_id: int) -> None:
        """Send answers [N, H], in the order of the rows received, back to the attention dies."""
        check = partial(check_answers, "E2A", self.layout.naive, self.received, expert_out)
        await self._run(Step.COMBINE, event_id, lambda: self._e2a(expert_out, event_id), check)

    async def _a2e(self, event_id: int) -> Received:
        means, steps = self.means, self.steps
        counts = await self.inbox.wait("A2E", event_id, self.turns.event_before, means, steps.lane)
        await steps.passed("A2E", 5)
        if counts.any():
            await self.die.clock.sleep(self.die.spec.meeting_ns())  # as in dispatch
        rows = await self.inbox.pull("A2E", counts, means)
        await steps.passed("A2E", 7)
        received = unpack_tokens(self.layout.naive, rows, counts)
        mine = np.flatnonzero(np.asarray(self.sides.experts.expert_rank) == self.rank)
        check_received("A2E", self.label, self.inbox.names, mine, received)
        self.received = received
        return received

    async def _e2a(self, expert_out: Float32, event_id: int) -> None:
        layout, means, steps, received = self.layout.naive, self.means, self.steps, self.received
        assert received is not None
        rows = await load_answers(self, "E2A", layout, expert_out)
        counts = received.num_tokens_per_rank
        await self.outbox.write(rows, counts, means, "E2A 3 write rows")
        await steps.passed("E2A", 3)
        await self.outbox.post(event_id, counts, means, "E2A 4 post fields")
        await steps.passed("E2A", 4)
