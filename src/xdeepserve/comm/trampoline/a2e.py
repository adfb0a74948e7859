"""A2E and E2A with trampolines (XDS 3.3): tokens from attention dies to expert dies, and answers back.

In a naive pull (`naive`) each attention die posts a field at all X expert dies, and stores a row for each
expert of a token. The bottleneck is the scalar units of the few AIV cores that it spares beside its own
kernels (`Spec.attention_cores`). With trampolines it posts one field, at its trampoline: an expert die, which
has all its cores for this, and forwards tokens. The second stage costs another launch, rows and fields. So
trampolines pay off where X fields take an attention die longer than that. They do at the paper's 160 and 288
dies with four cores; with all 48 cores on an attention die they would not (`xdeepserve bench comm` shows
both). Both stages use dispatch's steps; A2E and E2A are the first stages, A2E' and E2A' the second ones.
Where the layout `pushes`, expert dies exchange by FusedDispatch and FusedCombine, which add up on arrival.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from xdeepserve.comm.channel import Inbox, Outbox
from xdeepserve.comm.exchange.dispatch import load_tokens
from xdeepserve.comm.exchange.handle import XCCL, Titles
from xdeepserve.comm.exchange.rows import (
    Float32,
    Int32,
    Int64,
    Received,
    check_answers,
    check_tokens,
    weighted_sum,
)
from xdeepserve.comm.fused.dispatch import FusedReceived
from xdeepserve.comm.fused.handle import FusedXCCL
from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.comm.trampoline.side import Side
from xdeepserve.comm.turns import Step
from xdeepserve.errors import ProtocolError
from xdeepserve.jit.bf16 import from_bf16, to_bf16


class AttentionSide(Side):
    """A2E and E2A of an attention die. `layout.plan_attention` must have been called on its plan."""

    role = "attention"

    def _connect(self) -> None:
        trampoline = self.sides.trampoline(self.rank)
        index = self.sides.served(trampoline).index(self.rank)
        peer = self.sides.experts.dies[trampoline]
        self.outbox = Outbox(self.die, self.layout.tokens, index, [peer])
        self.inbox = Inbox(self.die, self.layout.answers, [peer], self.label, [f"expert {trampoline}"])
        self.num_sent = 0

    async def a2e(self, x: Float32, topk_idx: Int32, topk_weights: Float32, event_id: int) -> None:
        """Hand the die's tokens to its trampoline; return when they are posted, without waiting for anyone.

        x: float32 [T, H], T may be 0. topk_idx: int32 [T, K], physical experts, all of a token different.
        topk_weights: float32 [T, K]. event_id: from 1, greater than that of any earlier A2E, and the same on
        all dies. Raises AddressError for arguments that the layout does not hold.
        """

        def check() -> None:
            layout, num_experts = self.layout, len(self.sides.experts.expert_rank)
            check_tokens("A2E", layout.experts, num_experts, x, None, topk_idx, layout.max_tokens)
            self._check_weights(topk_idx, topk_weights)

        await self._run(
            Step.DISPATCH, event_id, lambda: self._a2e(x, topk_idx, topk_weights, event_id), check
        )

    async def e2a(self, event_id: int) -> Float32:
        """Return the experts' answers for the tokens of the last A2E.

        Returns float32 [T, H], the weighted sum in top-k slot order; without the layout's `reduce`
        [T, K, H], neither weighted nor summed. Raises DeadlineError if the trampoline does not post in time.
        """
        return await self._run(Step.COMBINE, event_id, lambda: self._e2a(event_id))

    async def _a2e(self, x: Float32, topk_idx: Int32, topk_weights: Float32, event_id: int) -> None:
        layout, means, steps = self.layout, self.means, self.steps
        payload, scale = await load_tokens(self, "A2E", x, None)

        # Step 3: one row per token in the local managed area, whatever the number of its experts.
        rows = np.zeros((len(x), layout.tokens.row_nbytes), np.uint8)
        token = rows[:, : layout.token_dtype.itemsize].view(layout.token_dtype)[:, 0]
        token["topk_idx"], token["topk_weights"] = topk_idx, topk_weights
        token["scale"], token["payload"] = scale, payload
        counts = np.array([len(x)])
        await self.outbox.write(rows, counts, means, "A2E 3 write rows")
        self.num_sent = len(x)
        await steps.passed("A2E", 3)

        # Step 4: one field, at the trampoline, instead of one at every expert die.
        await self.outbox.post(event_id, counts, means, "A2E 4 post field")
        await steps.passed("A2E", 4)
        if (trace := self.die.trace).is_on:
            key, now = arrow("A2E", layout, self.die.index, event_id), self.die.clock.now
            trace.depart(key, "A2E", self.die.index, steps.lane, now - 1)

    async def _e2a(self, event_id: int) -> Float32:
        layout, means, steps = self.layout, self.means, self.steps
        # Steps 5 to 7 of the second stage: poll for the trampoline's field and pull the answers.
        counts = await self.inbox.wait("E2A'", event_id, self.turns.event_before, means, steps.lane)
        check_counts(self, event_id, counts)
        await steps.passed("E2A'", 5)
        rows = await self.inbox.pull("E2A'", counts, means, is_bulk=True)
        await steps.passed("E2A'", 7)
        if (trace := self.die.trace).is_on:
            key, now = arrow("E2A'", layout, self.die.index, event_id), self.die.clock.now
            trace.arrive(key, "E2A'", self.die.index, steps.lane, now - 1)
        dtype = layout.answer_dtype
        payload: Any = rows[:, : dtype.itemsize].view(dtype)[:, 0]["payload"].copy()
        if layout.reduce or not layout.quantize:
            return payload
        return from_bf16(payload)


class ExpertSide(Side):
    """A2E and E2A of an expert die, trampoline or not. `layout.plan_expert` must have been called first.

    `xccl` is the exchange among the expert dies. The A2E and the E2A of one handle alternate; streams that
    are to overlap take handles on layouts of their own.
    """

    role = "expert"

    def _connect(self) -> None:
        die, sides, layout = self.die, self.sides, self.layout
        titles = Titles("A2E'", "E2A", "expert")
        observe = self.steps.observe
        end = die, self.rank, sides.experts
        self.xccl: XCCL | FusedXCCL
        if layout.pushes:
            self.xccl = FusedXCCL(*end, layout.fused, self.quantize, self.means, observe, titles)
        else:
            self.xccl = XCCL(*end, layout.experts, self.quantize, self.means, observe, titles)
        self.served = sides.served(self.rank)
        self._peers = peers = [sides.attention[attention] for attention in self.served]
        names = [f"attention {attention}" for attention in self.served]
        self.inbox = Inbox(die, layout.tokens, peers, self.label, names)
        self.outbox = Outbox(die, layout.answers, 0, peers)
        self._served_counts: Int64 = np.zeros(0, np.int64)
        self._weights: Float32 = np.zeros((0, layout.top_k), np.float32)

    def _on_lane(self, lane: str) -> None:
        """Draw the following steps on this lane of a trace."""
        self.steps.lane = self.xccl.steps.lane = lane

    @property
    def is_trampoline(self) -> bool:
        return bool(self.served)

    async def a2e(self, event_id: int) -> Received | FusedReceived:
        """Receive the token copies for the die's experts, by the expert rank of their trampoline; if pushed,
        by expert.

        Views of the die's memory, valid until the next A2E. Raises DeadlineError if an attention die that
        this one serves, or a trampoline, does not post in time.
        """
        return await self._run(Step.DISPATCH, event_id, lambda: self._a2e(event_id))

    async def e2a(self, expert_out: Float32, event_id: int) -> None:
        """Send the experts' answers back: float32 [N, H], one row for each received row, in that order."""
        check = partial(check_answers, "E2A", self.layout.experts, self.xccl.received, expert_out)
        await self._run(Step.COMBINE, event_id, lambda: self._e2a(expert_out, event_id), check)

    def reset(self) -> None:
        super().reset()
        self.xccl.reset()

    async def _a2e(self, event_id: int) -> Received | FusedReceived:
        layout, means, steps, die = self.layout, self.means, self.steps, self.die
        self._on_lane("A2E receive: steps")
        rows = np.zeros((0, layout.tokens.row_nbytes), np.uint8)
        if self.is_trampoline:
            # Steps 5 to 7 of the first stage: poll for the attention dies' fields and pull their tokens.
            counts = await self.inbox.wait("A2E", event_id, self.turns.event_before, means, steps.lane)
            await steps.passed("A2E", 5)
            rows = await self.inbox.pull("A2E", counts, means, is_bulk=True)
            self._served_counts = counts
            await steps.passed("A2E", 7)
            if die.trace.is_on:
                for peer in self._peers:
                    key = arrow("A2E", layout, peer, event_id)
                    die.trace.arrive(key, "A2E", die.index, steps.lane, die.clock.now - 1)
        token = rows[:, : layout.token_dtype.itemsize].view(layout.token_dtype)[:, 0]
        self._weights = token["topk_weights"].copy()
        # Second stage: an ordinary dispatch, of tokens that are quantised already.
        payload = np.ascontiguousarray(token["payload"])
        scale = np.ascontiguousarray(token["scale"]) if layout.quantize else None
        return await self.xccl.dispatch(
            payload, np.ascontiguousarray(token["topk_idx"]), event_id, scale=scale
        )

    async def _e2a(self, expert_out: Float32, event_id: int) -> None:
        layout, means, steps = self.layout, self.means, self.steps
        self._on_lane("E2A send: steps")
        # First stage: an ordinary combine, or a fused one, whose answers are added up.
        answers = await self.xccl.combine(expert_out, topk_weights=self._weights, event_id=event_id)
        if not self.is_trampoline:
            return
        steps.begin()
        # Second stage: steps 1 and 2 are fused into this kernel, which has the answers in hand.
        payload: Any = answers
        if layout.reduce and not layout.pushes:
            total = partial(weighted_sum, answers, self._weights)
            nbytes = answers.size // layout.hidden * layout.experts.combine_row
            payload = await self.work("E2A' 2 weighted sum", total, 2 * answers.size, nbytes)
        elif layout.quantize and not layout.reduce:
            payload = to_bf16(answers)  # exact: they came as bfloat16
        await steps.passed("E2A'", 2)
        rows = np.zeros((len(answers), layout.answers.row_nbytes), np.uint8)
        rows[:, : layout.answer_dtype.itemsize].view(layout.answer_dtype)[:, 0]["payload"] = payload
        await self.outbox.write(rows, self._served_counts, means, "E2A' 3 write rows")
        await steps.passed("E2A'", 3)
        await self.outbox.post(event_id, self._served_counts, means, "E2A' 4 post fields")
        await steps.passed("E2A'", 4)
        if self.die.trace.is_on:
            for peer in self._peers:
                key, now = arrow("E2A'", layout, peer, event_id), self.die.clock.now
                self.die.trace.depart(key, "E2A'", self.die.index, steps.lane, now - 1)


def arrow(op: str, layout: A2ELayout, attention: int, event_id: int) -> tuple[str, str, int, int]:
    """Return the key of an arrow in traces, by which the two ends of a stage between attention and expert die
    match."""
    return op, layout.name, attention, event_id


def check_counts(side: AttentionSide, event_id: int, counts: Int64) -> None:
    """Check the number of answers: the trampoline must answer as many tokens as it was handed. Raises
    ProtocolError if not."""
    if int(counts[0]) != side.num_sent:
        raise ProtocolError(
            f"E2A': {side.label} handed {side.num_sent} tokens to {side.inbox.names[0]} in event {event_id}, "
            f"which answers with {counts[0]}"
        )
