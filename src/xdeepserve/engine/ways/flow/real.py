"""Way by A2E and E2A without barriers, with real bytes: no die waits for dies that its tokens do not go to
(xDeepServe 5.3).

    receive, one for each microbatch of each domain -> experts -> send
    trampoline, one for each attention die that is served, of each microbatch

There is no fixed order: arriving tokens are handed on or pulled, and the experts of a layer run on all of its
tokens that have arrived by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from xdeepserve.comm.exchange.rows import Received
from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.comm.trampoline.token_flow import Arrival, FlowExpertSide, FlowTrampoline
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.expert_server import ExpertServerProgram
from xdeepserve.engine.die.experts import ExpertProgram, Stream
from xdeepserve.engine.lanes import RECEIVE, SEND, TRAMPOLINE, stream_item
from xdeepserve.engine.walk.runner import Pace
from xdeepserve.engine.ways.trampolines.real import Trampolines
from xdeepserve.hw.die import Die
from xdeepserve.hw.queue import Queue
from xdeepserve.model.canonical import Array
from xdeepserve.step.linear import Threads


class Flows(Trampolines):
    """Way of tokens that flow: an expert die serves each attention die as its tokens come."""

    plan_expert = A2ELayout.plan_flow_expert

    def expert_program(
        self, index: int, mem: ExpertMemory, threads: Threads, pace: Pace, reports: Queue[msgspec.Struct]
    ) -> ExpertProgram:
        """Make the program of an expert die, which serves tokens in the order they come."""
        die, placed = self.team.pod.dies[self.team.expert_dies[index]], self.team.sizes.experts
        flows, trampolines = (
            [side for by_domain in self.expert_sides(index, kind) for side in by_domain]
            for kind in (FlowExpertSide, FlowTrampoline)
        )
        layers = [placed.layers[number] for number in placed.order]
        end = FlowEnd(die, flows, trampolines, self._walk.num_domains, self.team.dies_per_domain, layers)
        return ExpertServerProgram(die, mem, end, threads, pace, reports, end.streams(), end.marks)


class Arrived(NamedTuple):
    """An arrival, and the side that it came by and is answered by."""

    layer: int  # in the order of MoE layers
    clients: tuple[int]  # rank of the attention die
    slots: tuple[int]  # microbatch
    side: FlowExpertSide
    arrival: Arrival

    @property
    def received(self) -> Received:
        """Arrived rows, with expert numbers."""
        return self.arrival.received


class FlowEnd:
    """An expert die's end, which also forwards tokens and answers of the attention dies that it serves.

    `flows` are its sides of A2E' and E2A, one for each microbatch of each DP domain. `trampolines` are its
    sides as a trampoline, in the same order. `layers` are the model's numbers of its MoE layers.
    """

    def __init__(
        self,
        die: Die,
        flows: Sequence[FlowExpertSide],
        trampolines: Sequence[FlowTrampoline],
        num_domains: int,
        dies_per_domain: int,
        layers: Sequence[int],
    ) -> None:
        self.die, self.flows, self.trampolines, self.layers = die, flows, trampolines, layers
        self._num_domains, self._dies_per_domain = num_domains, dies_per_domain
        for number, trampoline in enumerate(trampolines):
            trampoline.lane, trampoline.called = TRAMPOLINE, self._name(number)
        for number, flow in enumerate(flows):
            flow.lanes, flow.called = (RECEIVE, SEND), self._name(number)
        self._new_queues()

    def _new_queues(self) -> None:
        """Create empty queues: arrivals waiting for the experts, and answers waiting to be sent."""
        clock, name = self.die.clock, self.die.name
        self._come: Queue[Arrived] = Queue(clock, f"tokens at {name}")
        self._gone: Queue[tuple[Arrived, Array]] = Queue(clock, f"answers of {name}")
        self._waiting: list[Arrived] = []

    def streams(self) -> list[tuple[str, Stream]]:
        """List the kernels beside the experts': trampolines, receivers, and the sender."""
        forward: list[tuple[str, Stream]] = [
            (f"trampoline {i} of attention {attention}", partial(self._forward, i, trampoline, number))
            for i, trampoline in enumerate(self.trampolines)
            for number, attention in enumerate(trampoline.served)
        ]
        take = [(f"A2E receive {i}", partial(self._take, i, flow)) for i, flow in enumerate(self.flows)]
        return [*forward, *take, ("E2A send", self._send)]

    def register(self) -> None:
        """Forget unanswered arrivals after a rollback; the attention dies send their tokens again."""
        for side in (*self.flows, *self.trampolines):
            side.reset()
        self._new_queues()

    async def _forward(self, i: int, trampoline: FlowTrampoline, number: int) -> None:
        """Relay an attention die's tokens to the expert dies, and send the sum of their answers back."""
        attention = trampoline.served[number]
        while True:
            start = self._begin(i, self._layer(await trampoline.next_event(number)))
            await trampoline.serve(number)
            self.die.draw(TRAMPOLINE, trampoline.title(number), start, {"attention die": attention})

    async def _take(self, i: int, flow: FlowExpertSide) -> None:
        """Pull tokens posted by attention dies, in the order of the dies' ranks."""
        microbatch, domain = divmod(i, self._num_domains)
        while True:
            for attention in await flow.arrivals():
                start, arrival = self.die.clock.now, await flow.take(attention)
                layer = self._layer(arrival.event_id)
                self._begin(i, layer)
                self.die.draw(RECEIVE, self._name(i), start, {"attention die": attention})
                rank = domain * self._dies_per_domain + attention
                self._come.put(Arrived(layer, (rank,), (microbatch,), flow, arrival))

    async def next_batch(self, room: int) -> list[Arrived]:
        """Wait for tokens; return all that have arrived for the layer of the oldest, up to `room` rows."""
        if not self._waiting:
            self._waiting.append(await self._come.get())
        while len(self._come):
            self._waiting.append(await self._come.get())
        layer = self._waiting[0].layer
        batch: list[Arrived] = []
        rest: list[Arrived] = []
        for work in self._waiting:
            if work.layer == layer and len(work.received) <= room:
                room -= len(work.received)
                batch.append(work)
            else:
                rest.append(work)
        self._waiting = rest
        return batch

    async def answer(self, batch: Sequence[Arrived], expert_out: Array) -> None:
        """Have answers float32 [N, H] sent, a row for each of the batch's."""
        ends = np.cumsum([len(work.received) for work in batch])
        for work, out in zip(batch, np.split(expert_out, ends[:-1]), strict=True):
            self._gone.put((work, out))

    async def _send(self) -> None:
        while True:
            work, out = await self._gone.get()
            i = self.flows.index(work.side)
            start = self._begin(i, work.layer)
            await work.side.answer(work.arrival, out)
            self.die.draw(SEND, self._name(i), start, {"attention die": work.arrival.attention})

    def marks(self, batch: Sequence[Arrived]) -> dict[str, Any]:
        """Describe a batch for the trace by microbatch and domain; lists where arrivals differ in them."""
        sides = zip(*(divmod(self.flows.index(work.side), self._num_domains) for work in batch), strict=True)
        microbatch, domain = (
            found[0] if len(found) == 1 else found for found in map(sorted, map(set, sides))
        )
        return {"microbatch": microbatch, "domain": domain}

    def _layer(self, event_id: int) -> int:
        """Return the layer of an event, since event IDs count an attention die's MoE layers from 1."""
        return (event_id - 1) % len(self.layers)

    def _name(self, i: int) -> str:
        return stream_item(*divmod(i, self._num_domains))

    def _begin(self, i: int, layer: int) -> int:
        """Set the place of this stream for traces, by number of its side; return the virtual time."""
        if self.die.trace.is_on:
            microbatch, domain = divmod(i, self._num_domains)
            self.die.trace.at(layer=self.layers[layer], microbatch=microbatch, domain=domain)
        return self.die.clock.now
