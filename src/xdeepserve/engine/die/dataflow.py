"""The program of an expert die in dataflow mode (xDeepServe 5.3): it serves tokens in the order they come.

    receive, one for each microbatch of each domain -> experts -> send
    trampoline, one for each attention die that is served, of each microbatch

There is no barrier and no fixed order: arriving tokens are handed on or pulled, and the experts of a layer
run on all of its tokens that have arrived by then. A row's result does not depend on the rows beside it, so
the bits are those of the synchronous mode.
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
    """Program of an expert die in dataflow mode.

    `flows` are the die's ends of A2E' and E2A, one for each microbatch of each DP domain. `trampolines` are
    its ends as a trampoline for attention dies, in the same order.
    """

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
        """Start the die's kernels, each as a process."""
        streams: list[tuple[str, Stream]] = [
            (f"trampoline {i} of attention {attention}", partial(self._forward, i, trampoline, number))
            for i, trampoline in enumerate(self.trampolines)
            for number, attention in enumerate(trampoline.served)
        ]
        streams += [(f"A2E receive {i}", partial(self._take, i, flow)) for i, flow in enumerate(self.flows)]
        streams += [("experts", self._serve), ("E2A send", self._answer)]
        return [self._spawn(stream, name) for name, stream in streams]

    async def _until_stop(self, streams: Sequence[Process]) -> None:
        """Wait until the doorbell says stop; until then the kernels serve all tokens that arrive."""
        await self.mem.doorbell.reaches(self.die, STOP)

    def _reset(self, step: int) -> None:
        """Forget unanswered arrivals after a rollback; the attention dies send their tokens again."""
        for side in (*self.flows, *self.trampolines):
            side.reset()
        self._come, self._gone = self._queues()

    def _queues(self) -> tuple[Queue[Arrived], Queue[tuple[Arrived, Array]]]:
        """Create two empty queues: arrivals waiting for the experts, and answers waiting to be sent."""
        clock, name = self.die.clock, self.die.name
        return Queue(clock, f"tokens at {name}"), Queue(clock, f"answers of {name}")

    async def _forward(self, i: int, trampoline: FlowTrampoline, number: int) -> None:
        """Relay an attention die's tokens to the expert dies, and send the sum of their answers back."""
        attention = trampoline.served[number]
        while True:
            start = self._begin_event([i], await trampoline.next_event(number))
            await trampoline.serve(number)
            self.die.draw(TRAMPOLINE, trampoline.title(number), start, {"attention die": attention})

    async def _take(self, number: int, flow: FlowExpertSide) -> None:
        """Pull tokens posted by attention dies, in the order of the dies' ranks."""
        while True:
            for attention in await flow.arrivals():
                start = self.die.clock.now
                work = Arrived(number, flow, await flow.take(attention))
                self._begin_event([number], work.arrival.event_id)
                self.die.draw(RECEIVE, self._name(number), start, {"attention die": attention})
                self._come.put(work)

    async def _serve(self) -> None:
        """Run a layer's experts on all tokens that have arrived for it, as far as the buffers have room."""
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
        """Run a layer's experts on a batch and return the answers for each arrival."""
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
        """Reserve rows in the ring buffer of answers and return them as an array [N, H].

        An attention die sends again only after its answer has come. So each side has at most one exchange's
        rows on their way. The buffer has room for those rows, and for an end that is too short for the next
        batch.
        """
        width, name = self.mem.config.hidden_size, "flow/answers"
        room = self.mem.workspace.size(name) // width
        first = self.next_answer if self.next_answer + rows <= room else 0
        self.next_answer = first + rows
        return self.mem.workspace.take(name, room, width)[first : first + rows]

    def _layer_of(self, work: Arrived) -> int:
        """Return the layer of an arrival, since event IDs count an attention die's MoE layers from 1."""
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
        """Set the place of this stream for traces: the event of these sides; return the virtual time.

        Microbatch and domain are lists where the sides differ in them.
        """
        if self.die.trace.is_on:
            sides = zip(*(divmod(number, self.num_domains) for number in numbers), strict=True)
            found = (sorted(set(each)) for each in sides)
            microbatch, domain = (each[0] if len(each) == 1 else each for each in found)
            layer = self.layer_index[self._layer(event_id)]
            self.die.trace.at(layer=layer, microbatch=microbatch, domain=domain)
        return self.die.clock.now
