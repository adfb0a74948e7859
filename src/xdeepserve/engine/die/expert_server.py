"""The program of an expert die that waits for nobody by name: an expert server (EaaS 3.3), or an expert die
where tokens flow (xDeepServe 5.3).

    next batch -> experts -> answer

It is one loop that knows no step, no group and no order. The experts of a layer run on the tokens that have
come for it by then. A row's result does not depend on the rows beside it, so the bits are those of every
other deployment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from xdeepserve.comm.exchange.rows import TokenCopies
from xdeepserve.engine.die.expert_memory import STOP, ExpertMemory, FlowRows
from xdeepserve.engine.die.experts import ExpertProgram, Stream
from xdeepserve.engine.lanes import COMPUTE
from xdeepserve.engine.walk.runner import Pace
from xdeepserve.hw.clock import Process
from xdeepserve.hw.die import Die
from xdeepserve.hw.queue import Queue
from xdeepserve.model.canonical import Array
from xdeepserve.step.linear import Threads


class AskedOfExperts(Protocol):
    """Request to an expert die for one layer, from one slot of a client or several slots merged.

    Where tokens flow, a client is an attention die, and each of its microbatches is a slot.
    """

    @property
    def layer(self) -> int: ...

    @property
    def received(self) -> TokenCopies: ...

    @property
    def clients(self) -> Sequence[int]: ...

    @property
    def slots(self) -> Sequence[int]: ...


class ServerEnd(Protocol):
    """An expert die's end of a protocol without barriers: `comm.services`, token flow, or the clock alone."""

    def register(self) -> None:
        """Forget requests that have not been answered; clients send them again."""

    async def next_batch(self, room: int) -> Sequence[Any]:
        """Wait for the next requests (`AskedOfExperts`), all for one layer, with at most `room` rows."""

    async def answer(self, batch: Sequence[Any], expert_out: Array) -> None:
        """Answer a batch, or have a stream do it; `expert_out` stays as it is until then."""


def clients_and_slots(batch: Sequence[AskedOfExperts]) -> dict[str, Any]:
    """Describe a batch for the trace by its clients and slots."""
    clients = sorted({client for each in batch for client in each.clients})
    slots = sorted({slot for each in batch for slot in each.slots})
    return {"clients": clients, "slots": slots}


class ExpertServerProgram(ExpertProgram):
    """Program of an expert die without barriers; `server` is its end of the protocol.

    `streams` are kernels beside the experts', with their names, where such receive and send. `marks` says in
    traces what a batch is.
    """

    def __init__(
        self,
        die: Die,
        mem: ExpertMemory,
        server: ServerEnd,
        threads: Threads,
        pace: Pace,
        reports: Queue[msgspec.Struct],
        streams: Sequence[tuple[str, Stream]] = (),
        marks: Callable[[Sequence[Any]], dict[str, Any]] = clients_and_slots,
    ) -> None:
        super().__init__(die, mem, [], [], threads, pace, reports)
        self.server, self._streams, self._marks = server, (*streams, ("expert service", self._serve)), marks

    def start_streams(self) -> list[Process]:
        """Start the die's kernels, each as a process."""
        return [self._spawn(stream, name) for name, stream in self._streams]

    async def _until_stop(self, streams: Sequence[Process]) -> None:
        """Wait until the doorbell says stop; until then the kernels serve all clients."""
        await self.mem.doorbell.reaches(self.die, STOP)

    def _reset(self, step: int) -> None:
        """Begin a new generation after a rollback; clients send their unanswered requests again."""
        self.server.register()

    async def warm_up(self) -> None:
        """Compute a row for each expert in each layer, so all kernels are compiled before the first
        request."""
        mem, experts = self.mem, self.mem.slots.start + np.arange(len(self.mem.held), dtype=np.int32)
        if mem.is_shared:
            experts = np.append(experts, np.int32(mem.placed.num_slots))
        rows, width = len(experts), mem.config.hidden_size
        dtype = np.int8 if mem.recipe == "int8" else np.float32
        payload, scale = np.zeros((rows, width), dtype), np.ones(rows, np.float32)
        out = mem.answers(rows)
        for layer in range(len(self.layers)):
            await self.run_experts(out, FlowRows(payload, scale, experts), float, layer)

    async def _serve(self) -> None:
        spec = self.die.spec
        while True:
            self.die.trace.at()  # the wait is for any layer
            batch: Sequence[AskedOfExperts] = await self.server.next_batch(self.mem.max_rows)
            layer, start = batch[0].layer, self.die.clock.now
            self.die.trace.at(**self.place_of(batch))
            received = self.mem.gathered([each.received for each in batch])
            out = self.mem.answers(len(received))
            # Nobody knows how many tokens are on their way to others: these bring the average.
            await self.run_experts(out, received, lambda count: spec.billed_copies(count, count), layer)
            name = f"{len({client for each in batch for client in each.clients})} clients"
            self.die.draw(COMPUTE, name, start)
            await self.server.answer(batch, out)

    def place_of(self, batch: Sequence[AskedOfExperts]) -> dict[str, Any]:
        """Describe a batch for the trace: its layer and marks; empty without a trace."""
        if not self.die.trace.is_on:
            return {}
        return {"layer": self.layer_index[batch[0].layer], **self._marks(batch)}
