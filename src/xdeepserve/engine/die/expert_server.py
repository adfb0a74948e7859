"""The program of a die whose experts are a service (EaaS 3.3): poll, form a batch, run experts, answer.

One loop, which knows no step and no group. What it serves next is what clients have written to its slots; a
row's result does not depend on the rows beside it, so the bits are those of every other deployment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from xdeepserve.comm.exchange.rows import TokenCopies
from xdeepserve.engine.die.expert_memory import STOP, ExpertMemory, FlowRows
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.lanes import COMPUTE
from xdeepserve.engine.walk.runner import Pace
from xdeepserve.hw.clock import Process
from xdeepserve.hw.die import Die
from xdeepserve.hw.queue import Queue
from xdeepserve.model.canonical import Array
from xdeepserve.step.linear import Threads


class AskedOfExperts(Protocol):
    """What an expert die is asked for one layer, by one slot of one client or by several as one."""

    @property
    def layer(self) -> int: ...

    @property
    def received(self) -> TokenCopies: ...

    @property
    def clients(self) -> Sequence[int]: ...

    @property
    def slots(self) -> Sequence[int]: ...


class ServerEnd(Protocol):
    """An expert die's end of a way on which it is asked, and answers: of `comm.services`, or in time only."""

    def register(self) -> None: ...

    async def next_batch(self, room: int) -> Sequence[Any]:
        """What is `AskedOfExperts` next, all for one layer."""

    async def answer(self, batch: Sequence[Any], expert_out: Array) -> None: ...


class ExpertServerProgram(ExpertProgram):
    """One expert server, whose end of the protocol is `server`."""

    def __init__(
        self,
        die: Die,
        mem: ExpertMemory,
        server: ServerEnd,
        threads: Threads,
        pace: Pace,
        reports: Queue[msgspec.Struct],
    ) -> None:
        super().__init__(die, mem, [], [], threads, pace, reports)
        self.server = server

    def start_streams(self) -> list[Process]:
        """Start the kernels of this die, each as a process."""
        return [self._spawn(self._serve, "expert service")]

    async def _until_stop(self, streams: Sequence[Process]) -> None:
        """It serves whoever comes until the doorbell says stop."""
        await self.mem.doorbell.reaches(self.die, STOP)

    def _reset(self, step: int) -> None:
        """What has been asked and not been answered is asked again, of the next generation."""
        self.server.register()

    async def warm_up(self) -> None:
        """Compute a row for each expert in each layer, so that all kernels are there before a request is."""
        mem, experts = self.mem, self.mem.slots.start + np.arange(len(self.mem.held), dtype=np.int32)
        if mem.is_shared:
            experts = np.append(experts, np.int32(mem.placed.num_slots))
        rows, width = len(experts), mem.config.hidden_size
        dtype = np.int8 if mem.recipe == "int8" else np.float32
        payload, scale = np.zeros((rows, width), dtype), np.ones(rows, np.float32)
        out = mem.workspace.take("flow/answers", rows, width)
        for layer in range(len(self.layers)):
            await self.run_experts(out, FlowRows(payload, scale, experts), float, layer)

    async def _serve(self) -> None:
        spec, hidden = self.die.spec, self.mem.config.hidden_size
        while True:
            batch: Sequence[AskedOfExperts] = await self.server.next_batch(self.mem.max_rows)
            layer, start = batch[0].layer, self.die.clock.now
            self.die.trace.at(**self.place_of(batch))
            received = self.mem.gathered([each.received for each in batch])
            out = self.mem.workspace.take("flow/answers", len(received), hidden)
            # Nobody knows how many tokens are on their way to others: these bring the average.
            await self.run_experts(out, received, lambda count: spec.billed_copies(count, count), layer)
            name = f"{len({client for each in batch for client in each.clients})} clients"
            self.die.draw(COMPUTE, name, start)
            await self.server.answer(batch, out)

    def place_of(self, batch: Sequence[AskedOfExperts]) -> dict[str, Any]:
        """Return what a trace tells of a batch; nothing without a trace."""
        if not self.die.trace.is_on:
            return {}
        layer = self.layer_index[batch[0].layer]
        clients = sorted({client for each in batch for client in each.clients})
        slots = sorted({slot for each in batch for slot in each.slots})
        return {"layer": layer, "clients": clients, "slots": slots}
