"""The two ends of M2N, on attention and expert dies, with the operations of A2E and E2A."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np

from xdeepserve.comm.checks import check_array, check_rank
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
from xdeepserve.comm.handle import Handle, Quantize
from xdeepserve.comm.means import ALL_CORES, Means
from xdeepserve.comm.steps import Observer
from xdeepserve.comm.turns import Step, Turns
from xdeepserve.errors import AddressError, ProtocolError
from xdeepserve.hw.die import Die
from xdeepserve.hw.rdma import CompletionQueue, RDMANetwork
from xdeepserve.m2n.layout import M2NLayout
from xdeepserve.m2n.registered_receive import RegisteredReceive
from xdeepserve.m2n.registered_send import RegisteredSend, StreamWord


class M2NMesh:
    """Completion queues of all dies of a layout: on each die, one for sends and one for arrivals."""

    def __init__(self, network: RDMANetwork, layout: M2NLayout) -> None:
        self.network, self.layout = network, layout
        dies = layout.attention + layout.experts.dies
        self.sent = {die: network.queue() for die in dies}
        self.received = {die: network.queue() for die in dies}


class M2NSide(Handle):
    """End of M2N on a die: a sender and a receiver that alternate."""

    role: ClassVar[str]
    sends: ClassVar[tuple[str, str]]  # its own region of what it sends, and the one there
    receives: ClassVar[str]

    def __init__(
        self,
        die: Die,
        rank: int,
        mesh: M2NMesh,
        quantize: Quantize | None = None,
        means: Means = ALL_CORES,
        on_step: Observer | None = None,
    ) -> None:
        layout = mesh.layout
        self.rank, self.mesh, self.layout, self.rows = rank, mesh, layout, layout.rows
        sides = {"attention": layout.attention, "expert": layout.experts.dies}
        other = "expert" if self.role == "attention" else "attention"
        own, self.peers = sides[self.role], sides[other]
        self.label = f"{self.role} {rank}"
        check_rank(die.index, rank, own, f"{self.role} rank")
        super().__init__(die, Turns(self.label, "M2N", "N2M"), quantize, layout.quantize, means, on_step)
        self.names = [f"{other} {number}" for number in range(len(self.peers))]
        network, regions = mesh.network, die.memory.managed.regions
        pairs = [
            network.connect(die.index, peer, mesh.sent[die.index], mesh.received[peer]) for peer in self.peers
        ]
        own_region, there = (layout.region(part) for part in self.sends)
        blocks = [network.fabric.memories[peer].managed.regions[there] for peer in self.peers]
        offsets = [region.offset + rank * (region.nbytes // len(own)) for region in blocks]
        queue: CompletionQueue = mesh.sent[die.index]
        self.sender = RegisteredSend(
            self, regions[own_region], pairs, offsets, queue, StreamWord(die, layout, 0), rank % len(pairs)
        )
        self.receiver = RegisteredReceive(
            self,
            network,
            regions[layout.region(self.receives)],
            self.peers,
            self.names,
            mesh.received[die.index],
            StreamWord(die, layout, 1),
        )

    def reset(self) -> None:
        """Forget a failed exchange. All dies of both sides must reset while none is in an operation."""
        self.turns.reset({})
        self.sender.reset()
        self.receiver.reset(max(self.turns.last_event_id.values()))


class M2NAttention(M2NSide):
    """End of M2N on an attention die. `layout.plan_attention` must have been called on the die's plan."""

    role = "attention"
    sends = "tokens.out", "tokens.in"
    receives = "answers.in"

    async def a2e(self, x: Float32, topk_idx: Int32, topk_weights: Float32, event_id: int) -> None:
        """Write the die's tokens to the dies of their experts; returns when all writes are acknowledged.

        Arguments are those of `comm.trampoline.a2e.AttentionSide.a2e`.
        """

        def check() -> None:
            check_tokens("M2N", self.rows, len(self.layout.experts.expert_rank), x, None, topk_idx)
            check_array("M2N", "topk_weights", topk_weights)
            if topk_weights.dtype != np.float32 or topk_weights.shape != topk_idx.shape:
                found = f"{topk_weights.dtype} {topk_weights.shape}"
                raise AddressError(f"M2N: topk_weights must be float32 {topk_idx.shape}, not {found}")

        await self._run(
            Step.DISPATCH, event_id, lambda: self._a2e(x, topk_idx, topk_weights, event_id), check
        )

    async def e2a(self, event_id: int) -> Float32:
        """Wait for the experts' answers; return their weighted sum in top-k order, float32 [T, H]."""
        return await self._run(Step.COMBINE, event_id, lambda: self._e2a(event_id))

    async def _a2e(self, x: Float32, topk_idx: Int32, topk_weights: Float32, event_id: int) -> None:
        experts = self.layout.experts
        payload: np.ndarray = x
        scale: np.ndarray = np.ones(len(x), np.float32)
        if (quantize := self.quantize) is not None:
            payload, scale = await self.work("M2N quantise", lambda: quantize(x), 4 * x.size)
        expert_rank = np.array(experts.expert_rank, np.int64)
        rows, self.sent = pack_tokens(
            "M2N", self.rows, expert_rank, experts.num_ranks, payload, scale, topk_idx
        )
        self.weights = topk_weights.copy()
        await self.sender.send("M2N", event_id, rows, self.sent.counts)

    async def _e2a(self, event_id: int) -> Float32:
        sent: SentRows = self.sent
        rows, counts = await self.receiver.receive("N2M", event_id, self.rows.combine_row)
        if counts.tolist() != sent.counts.tolist():
            raise ProtocolError(
                f"N2M: {self.label} sent {sent.counts.tolist()} rows in event {event_id}, and is answered "
                f"{counts.tolist()}"
            )
        answers = unpack_answers(self.rows, rows, sent)
        return await self.work(
            "N2M weighted sum", partial(weighted_sum, answers, self.weights), 2 * answers.size
        )


class M2NExpert(M2NSide):
    """End of M2N on an expert die. `layout.plan_expert` must have been called on the die's plan."""

    role = "expert"
    sends = "answers.out", "answers.in"
    receives = "tokens.in"
    tokens: Received | None = None  # of the latest exchange

    async def a2e(self, event_id: int) -> Received:
        """Receive the token copies for the die's experts, grouped by attention die."""
        return await self._run(Step.DISPATCH, event_id, lambda: self._a2e(event_id))

    async def e2a(self, expert_out: Float32, event_id: int) -> None:
        """Send answers back: float32 [N, H], a row for each received token copy, in the same order."""
        check = partial(check_answers, "N2M", self.rows, self.tokens, expert_out)
        await self._run(Step.COMBINE, event_id, lambda: self._e2a(expert_out, event_id), check)

    async def _a2e(self, event_id: int) -> Received:
        rows, counts = await self.receiver.receive("M2N", event_id, self.rows.dispatch_row)
        self.tokens = tokens = unpack_tokens(self.rows, rows, counts)
        mine = np.flatnonzero(np.array(self.layout.experts.expert_rank) == self.rank)
        check_received("M2N", self.label, self.names, mine, tokens)
        return tokens

    async def _e2a(self, expert_out: Float32, event_id: int) -> None:
        assert self.tokens is not None
        rows = self.rows
        what, operations = rows.answers.work
        packed = partial(rows.answers.pack, expert_out, rows.combine_row, self.quantize)
        if operations:
            answers = await self.work(f"N2M {what}", packed, operations * expert_out.size)
        else:
            answers = packed()
        await self.sender.send("N2M", event_id, answers, self.tokens.num_tokens_per_rank)
