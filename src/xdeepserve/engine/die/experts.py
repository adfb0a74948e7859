"""The program of an expert die: three persistent kernels that never return to the host (xDeepServe 5.2).

    A2E receive -> experts -> E2A send

Each kernel is a stream of its own that busy-polls flags in the die's memory. Work comes in a fixed order: by
layer, then by microbatch, then by DP domain. So only one domain is served at a time, while the next ones are
on their way. A step begins when the host rings the doorbell, which is one more flag.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from xdeepserve.comm.exchange.rows import TokenCopies
from xdeepserve.engine.die.expert_memory import STOP, ExpertMemory
from xdeepserve.engine.die.replicas import RedundantSlots, load_experts
from xdeepserve.engine.lanes import COMPUTE, RECEIVE, SEND, stream_item
from xdeepserve.engine.messages import ExpertsLoaded, LoadExperts, RolledBack, StepFailed
from xdeepserve.engine.numbers import DieNumber
from xdeepserve.engine.recovery.retry import again_after_glitches
from xdeepserve.engine.recovery.rollback_watch import RollbackCalled, RollbackWatch
from xdeepserve.engine.walk.ends import ExpertEnd
from xdeepserve.engine.walk.runner import Pace, Runner
from xdeepserve.engine.walk.tally import Tally
from xdeepserve.errors import GlitchError
from xdeepserve.hw.clock import Process
from xdeepserve.hw.die import Die
from xdeepserve.hw.queue import Queue
from xdeepserve.model.canonical import Array
from xdeepserve.step.frame import Frame, Model
from xdeepserve.step.layer import expert_stage
from xdeepserve.step.linear import Threads
from xdeepserve.step.stage import Counts

Stream = Callable[[], Coroutine[Any, Any, None]]
"""Kernel of an expert die; it begins only when its process has its first turn, if it ever has one."""


class ExpertProgram:
    """Program of an expert die that serves exchanges in a fixed order, step by step.

    `sides[m][d]` is the die's end of A2E and E2A for microbatch m of DP domain d. `tallies[m][d]` knows how
    many tokens all attention dies bring there.
    """

    def __init__(
        self,
        die: Die,
        mem: ExpertMemory,
        sides: Sequence[Sequence[ExpertEnd]],
        tallies: Sequence[Sequence[Tally]],
        threads: Threads,
        pace: Pace,
        reports: Queue[msgspec.Struct],
    ) -> None:
        self.die, self.mem, self.reports = die, mem, reports
        model = Model(mem.config, mem.recipe, 0)
        frame = Frame(model, mem.workspace, threads, slots=mem.slots, arrivals=mem.redundant)
        frame.first_copy = mem.placed.num_slots
        self.runner = Runner(die, frame, pace)
        self.layers = mem.assemble()
        self.stage = expert_stage(mem.holds)
        self._tallies = [tally for microbatch in tallies for tally in microbatch]
        # One layer's work, in the order in which all expert dies take it.
        self.round = [side for microbatch in sides for side in microbatch]
        self.num_domains = len(sides[0]) if sides else 1
        # In the model, of each of `layers`.
        self.layer_index = [mem.placed.layers[number] for number in mem.placed.order]
        self._arrived: dict[int, TokenCopies] = {}  # views of the die's memory, by place in the round
        self._first_step = 0  # of this epoch
        self._rollback = RollbackWatch(die)

    async def run(self) -> None:
        """Run the three kernels until the doorbell says stop; report a kernel that fails to the host.

        When the host calls a rollback, the kernels end wherever they are and begin again with the step that
        the host names.
        """
        streams, loads = self.start_streams(), self.loads()
        try:
            while not await self._ends(streams):
                await self._roll_back(streams)
                streams = self.start_streams()
        finally:
            for stream in (*streams, *loads):
                stream.cancel()

    def start_streams(self) -> list[Process]:
        """Start the die's kernels, each as a process."""
        return [
            self._spawn(stream, name)
            for name, stream in (
                ("A2E receive", self._receive),
                ("experts", self._compute),
                ("E2A send", self._send),
            )
        ]

    def _spawn(self, stream: Stream, name: str) -> Process:
        process = self.die.spawn(self._guarded(stream), name=name)
        assert isinstance(process, Process)
        return process

    async def _ends(self, streams: Sequence[Process]) -> bool:
        """Wait until the kernels have ended; return False if the host has called a rollback."""
        me = asyncio.current_task()
        assert isinstance(me, Process)
        try:
            with self._rollback.ending([me, *streams]):
                await self._until_stop(streams)
                if self._rollback.has_failed and self.mem.doorbell.read(self.die.memory) != STOP:
                    await self._rollback.is_called_back()
        except RollbackCalled:
            return False
        return True

    async def _until_stop(self, streams: Sequence[Process]) -> None:
        """Wait until all kernels have ended."""
        for stream in streams:
            await self.die.clock.join(stream, idle=True)

    async def _roll_back(self, streams: Sequence[Process]) -> None:
        """End the running kernels, tell the host, and wait until all other dies have rolled back."""
        rollback = self._rollback
        for stream in streams:
            stream.cancel()
            await self.die.clock.until_ended(stream)
        seen = rollback.field.read()
        while rollback.epoch < seen.epoch:
            rollback.enter(seen.epoch)
            self.reports.put(RolledBack(DieNumber(self.die.index), seen.epoch))
            seen = await rollback.field.resumes(seen.epoch)
        self._reset(seen.step)
        rollback.resume()

    def _reset(self, step: int) -> None:
        """Forget all exchanges under way and set the flags for step number `step`, which comes next."""
        for side in self.round:
            side.reset()
        self._arrived.clear()
        self._first_step = step
        for flag in (self.mem.received, self.mem.computed, self.mem.sent):
            flag.write(self.die.memory, step * self._items_per_step)

    def loads(self) -> list[asyncio.Task[None]]:
        """Start the task for filling redundant slots beside the kernels, if the die has such slots."""
        if self.mem.redundant is None:
            return []
        return [self.die.spawn(self._guarded(partial(self._load, self.mem.redundant)), name="load experts")]

    async def _load(self, redundant: RedundantSlots) -> None:
        """Fill redundant slots on the host's commands, beside the kernels; no token goes to these slots
        yet."""
        while True:
            command = await self.die.next_command()
            assert isinstance(command, LoadExperts)
            await again_after_glitches(partial(load_experts, self.die, redundant, command.loads))
            self.reports.put(ExpertsLoaded(DieNumber(self.die.index)))

    async def _guarded(self, stream: Stream) -> None:
        try:
            await stream()
        except RollbackCalled:
            pass
        except GlitchError as error:
            self._rollback.fail()
            self.reports.put(StepFailed(DieNumber(self.die.index), error))
            if self.mem.doorbell.read(self.die.memory) == STOP:  # nobody will call it back
                for flag in (self.mem.received, self.mem.computed):
                    flag.write(self.die.memory, STOP)
        except Exception as error:
            self.reports.put(StepFailed(DieNumber(self.die.index), error))

    @property
    def _items_per_step(self) -> int:
        return len(self.layers) * len(self.round)

    def _event(self, item: int) -> int:
        """Return the event ID of an item's A2E and E2A: one for each layer of each step, from 1."""
        return item // len(self.round) + 1

    def _begin(self, item: int) -> int:
        """Set the place of this stream for traces: the layer, microbatch and domain of an item; return the
        virtual time."""
        if self.die.trace.is_on:
            microbatch, domain = divmod(item % len(self.round), self.num_domains)
            layer = self.layer_index[item // len(self.round) % len(self.layers)]
            self.die.trace.at(layer=layer, microbatch=microbatch, domain=domain)
        return self.die.clock.now

    def _note(self, lane: str, item: int, start: int) -> None:
        """Draw a trace span, in the stream's own lane, for an item that the stream has finished."""
        name = stream_item(*divmod(item % len(self.round), self.num_domains))
        self.die.draw(lane, name, start)

    async def _receive(self) -> None:
        """Stream 1: receive the tokens of each item into the die's memory."""
        die, mem, item = self.die, self.mem, self._first_step * self._items_per_step
        while True:
            if item % self._items_per_step == 0:
                step = item // self._items_per_step + 1
                if await mem.doorbell.reaches(die, step) == STOP:
                    for flag in (mem.received, mem.computed):
                        flag.write(die.memory, STOP)
                    return
            place = item % len(self.round)
            # The side's buffers are free again when its item before has been sent.
            await mem.sent.reaches(die, item - len(self.round) + 1)
            start = self._begin(item)
            self._arrived[place] = await self.round[place].a2e(self._event(item))
            self._note(RECEIVE, item, start)
            item += 1
            mem.received.write(die.memory, item)

    async def _compute(self) -> None:
        """Stream 2: run the experts on the tokens that stream 1 has received."""
        die, mem, item = self.die, self.mem, self._first_step * self._items_per_step
        while await mem.received.reaches(die, item + 1) != STOP:
            place = item % len(self.round)
            layer = item // len(self.round) % len(self.layers)
            received = self._arrived[place]
            out = mem.workspace.take(f"sent/{place}", len(received), self.mem.config.hidden_size)
            if len(received):
                start = self._begin(item)
                billed = partial(self._tallies[place].billed, self._event(item))
                await self.run_experts(out, received, billed, layer)
                self._note(COMPUTE, item, start)
            item += 1
            mem.computed.write(die.memory, item)

    async def _send(self) -> None:
        """Stream 3: send the experts' answers back to the trampolines."""
        die, mem, item = self.die, self.mem, self._first_step * self._items_per_step
        while await mem.computed.reaches(die, item + 1) != STOP:
            place = item % len(self.round)
            rows = len(self._arrived[place])
            out = mem.workspace.take(f"sent/{place}", rows, self.mem.config.hidden_size)
            start = self._begin(item)
            await self.round[place].e2a(out, self._event(item))
            self._note(SEND, item, start)
            item += 1
            mem.sent.write(die.memory, item)

    async def run_experts(
        self, out: Array, received: TokenCopies, billed: Callable[[int], float], layer: int
    ) -> None:
        """Compute the experts' output float32 [N, H] of the received rows into `out`.

        `billed` maps the number of routed rows to the number that is billed.
        """
        runner, frame, stage, held = self.runner, self.runner.frame, self.stage, self.layers[layer]
        if held.experts is not None:
            frame.experts = held.experts
        if held.shared is not None:
            frame.copy = held.shared
        num_shared = self.mem.num_copied(received)
        frame.receive(received.payload, received.scale, received.expert_idx, out)
        num_routed = len(received) - num_shared
        price = self.price(num_routed, num_shared, billed(num_routed), layer)
        await runner.launch_stage(stage, price)
        await runner.pace.settle()

    def price(self, num_routed: int, num_shared: int, billed: float, layer: int) -> float:
        """Return the time in ns that one MoE layer's experts take on this die.

        `num_routed` rows go to routed experts and are billed as `billed`; `num_shared` rows go to the shared
        expert.
        """
        touched, rows = min(num_routed, len(self.mem.slots)), num_routed + num_shared
        counts = Counts(rows, copies=billed, touched=touched, shared=num_shared)
        return self.runner.price_of(self.stage, self.layers[layer], counts)


def ring(programs: Iterable[ExpertProgram], value: int) -> None:
    """Ring the doorbells of expert dies: a flag in the memory of each, which its kernels poll."""
    for program in programs:
        program.mem.doorbell.write(program.die.memory, value)
