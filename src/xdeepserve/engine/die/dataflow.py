"""The program of an expert die where tokens flow (xDeepServe 5.3): it serves whoever has come.

    receive, one for each microbatch of each domain -> experts -> send
    trampoline, one for each attention die that is served, of each microbatch

No barrier and no order: what arrives is handed on or pulled, and the experts of a layer run on all that has
arrived for it by then. A row's result does not depend on the rows beside it, so the bits are those of the
synchronous mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from xdeepserve.comm.trampoline.token_flow import Arrival, FlowExpertSide, FlowTrampoline
from xdeepserve.engine.die.expert_memory import STOP, ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram, Stream
from xdeepserve.engine.lanes import COMPUTE, RECEIVE, SEND, TRAMPOLINE, stream_item
from xdeepserve.engine.walk.runner import Pace
from xdeepserve.hw.clock import Process
from xdeepserve.hw.die import Die
from xdeepserve.hw.queue import Queue
from xdeepserve.model.canonical import Array
from xdeepserve.step.linear import Threads


class Arrived(NamedTuple):
    """An arrival, and the side that it came by and is answered by: one for each microbatch of each domain."""

    number: int  # of the side
    side: FlowExpertSide
    arrival: Arrival


class DataflowExpertProgram(ExpertProgram):
    """One expert die. `flows` are its ends of A2E' and E2A, one for each microbatch of each domain, and
    `trampolines` what it is for attention dies in these."""

    def __init__(
        self,
        die: Die,
        mem: ExpertMemory,
        flows: Sequence[FlowExpertSide],
        trampolines: Sequence[FlowTrampoline],
        num_domains: int,
        threads: Threads,
        pace: Pace,
        reports: Queue[msgspec.Struct],
    ) -> None:
        super().__init__(die, mem, [], [], threads, pace, reports)
        self.flows, self.trampolines, self.num_domains = flows, trampolines, num_domains
        for number, trampoline in enumerate(trampolines):
            trampoline.lane, trampoline.called = TRAMPOLINE, self._name(number)
        for number, flow in enumerate(flows):
            flow.lanes, flow.called = (RECEIVE, SEND), self._name(number)
        self._come, self._gone = self._queues()
        self.next_answer = 0  # row of the buffer of answers

    def start_streams(self) -> list[Process]:
        """Start the kernels of this die, each as a process."""
        streams: list[tuple[str, Stream]] = [
            (f"trampoline {i} of attention {attention}", partial(self._forward, i, trampoline, number))
            for i, trampoline in enumerate(self.trampolines)
            for number, attention in enumerate(trampoline.served)
        ]
        streams += [(f"A2E receive {i}", partial(self._take, i, flow)) for i, flow in enumerate(self.flows)]
        streams += [("experts", self._serve), ("E2A send", self._answer)]
        return [self._spawn(stream, name) for name, stream in streams]

    async def _until_stop(self, streams: Sequence[Process]) -> None:
        """They serve whoever comes until the doorbell says stop."""
        await self.mem.doorbell.reaches(self.die, STOP)

    def _reset(self, step: int) -> None:
        """What has come and not been answered comes again."""
        for side in (*self.flows, *self.trampolines):
            side.reset()
        self._come, self._gone = self._queues()

    def _queues(self) -> tuple[Queue[Arrived], Queue[tuple[Arrived, Array]]]:
        """What waits for the experts, and what waits to be sent."""
        clock, name = self.die.clock, self.die.name
        return Queue(clock, f"tokens at {name}"), Queue(clock, f"answers of {name}")

    async def _forward(self, i: int, trampoline: FlowTrampoline, number: int) -> None:
        """Carry tokens of one attention die to the experts' dies, and the sum of their answers back."""
        attention = trampoline.served[number]
        while True:
            start = self._begin_event([i], await trampoline.next_event(number))
            await trampoline.serve(number)
            self.die.draw(TRAMPOLINE, trampoline.title(number), start, {"attention die": attention})

    async def _take(self, number: int, flow: FlowExpertSide) -> None:
        """Pull what attention dies post, in the order of their ranks."""
        while True:
            for attention in await flow.arrivals():
                start = self.die.clock.now
                work = Arrived(number, flow, await flow.take(attention))
                self._begin_event([number], work.arrival.event_id)
                self.die.draw(RECEIVE, self._name(number), start, {"attention die": attention})
                self._come.put(work)

    async def _serve(self) -> None:
        """Run the experts of one layer on all that has arrived for it, as far as there is room."""
        waiting: list[Arrived] = []
        while True:
            if not waiting:
                waiting.append(await self._come.get())
            while len(self._come):
                waiting.append(await self._come.get())
            layer, room = self._layer_of(waiting[0]), self.mem.max_rows
            batch: list[Arrived] = []
            rest: list[Arrived] = []
            for work in waiting:
                if self._layer_of(work) == layer and len(work.arrival.received) <= room:
                    room -= len(work.arrival.received)
                    batch.append(work)
                else:
                    rest.append(work)
            waiting = rest
            for work, out in zip(batch, await self._run(layer, batch), strict=True):
                self._gone.put((work, out))

    async def _run(self, layer: int, batch: Sequence[Arrived]) -> list[Array]:
        """The answers to each of the arrivals."""
        received = self.mem.gathered([work.arrival.received for work in batch])
        out = self.room_for(len(received))
        start = self._begin_event([work.number for work in batch], batch[0].arrival.event_id)
        # Nobody knows how many tokens are on their way to others: these bring the average.
        spec = self.die.spec
        await self.run_experts(out, received, lambda count: spec.billed_copies(count, count), layer)
        self.die.draw(COMPUTE, f"{len(batch)} arrivals", start)
        ends = np.cumsum([len(work.arrival.received) for work in batch])
        return np.split(out, ends[:-1])

    def room_for(self, rows: int) -> Array:
        """Find rows of the buffer of answers [N, H], which go round it.

        An attention die sends again when it has had its answer. So of each side as many rows as one exchange
        brings are on their way at most: those, and the end that is too short for the next batch, fit.
        """
        width, name = self.mem.config.hidden_size, "flow/answers"
        room = self.mem.workspace.size(name) // width
        first = self.next_answer if self.next_answer + rows <= room else 0
        self.next_answer = first + rows
        return self.mem.workspace.take(name, room, width)[first : first + rows]

    def _layer_of(self, work: Arrived) -> int:
        """Event IDs count the layers with experts of an attention die's steps, from 1."""
        return self._layer(work.arrival.event_id)

    def _layer(self, event_id: int) -> int:
        return (event_id - 1) % len(self.layers)

    async def _answer(self) -> None:
        while True:
            work, out = await self._gone.get()
            start = self._begin_event([work.number], work.arrival.event_id)
            await work.side.answer(work.arrival, out)
            self.die.draw(SEND, self._name(work.number), start, {"attention die": work.arrival.attention})

    # ---- traces -------------------------------------------------------------------------------------

    def _name(self, number: int) -> str:
        return stream_item(*divmod(number, self.num_domains))

    def _begin_event(self, numbers: Sequence[int], event_id: int) -> int:
        """Say, for traces, at which event of these sides a stream is, by lists where they differ; the virtual
        time."""
        if self.die.trace.is_on:
            sides = zip(*(divmod(number, self.num_domains) for number in numbers), strict=True)
            found = (sorted(set(each)) for each in sides)
            microbatch, domain = (each[0] if len(each) == 1 else each for each in found)
            layer = self.layer_index[self._layer(event_id)]
            self.die.trace.at(layer=layer, microbatch=microbatch, domain=domain)
        return self.die.clock.now
