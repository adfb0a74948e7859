"""Schedules: how the rows of a step, or its microbatches, take turns on their way through layers.

    serial          one after another
    away_and_back   experts have dies of their own: while a microbatch is there, the next one computes
                    attention (xDeepServe 5.2)
    overlap         two microbatches on one die, in the two halves of a layer (CloudMatrix 4.2.3, 4.3.2)

Rows of a sequence may be cut apart: the microbatches of a layer run in order, so each finds its predecessors
in the cache.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from xdeepserve.engine.lanes import STREAMS
from xdeepserve.engine.walk.launcher import MicrobatchLaunches
from xdeepserve.engine.walk.runner import Runner, all_cores
from xdeepserve.hw.clock import Clock, Waiter, Waiting
from xdeepserve.hw.die import Die
from xdeepserve.hw.spec import Core
from xdeepserve.model.tensors import Layer
from xdeepserve.step.frame import Frame, KVCache
from xdeepserve.step.shard import GATHER
from xdeepserve.step.stage import LayerProgram, Meet, Program

# How two streams of a die share its AIC cores (CloudMatrix 4.2.3).


class CoreSplit:
    """Division of AIC cores between two streams: stream 0 has `attention` of them.

    If cores may move, one does after each layer in which one stream was at work for more than SLACK times as
    long as the other. So both streams come to take equally long, whatever the batch and the lengths of KV.
    The die's own times decide, so no other die is asked.
    """

    SLACK = 1.05

    def __init__(self, attention: int, moves: bool = False) -> None:
        self.attention, self.moves = attention, moves
        self._spent_ns: Counter[int] = Counter()

    def spend(self, stream: int, duration_ns: int) -> None:
        """Add the time of a microbatch's half of a layer to its stream."""
        self._spent_ns[stream] += duration_ns

    def end_layer(self, num_cores: int) -> None:
        """Move a core if the streams' times differ, after all microbatches of a layer have ended.

        `num_cores` is the number of AIC cores of the die.
        """
        first, second = self._spent_ns[0], self._spent_ns[1]
        self._spent_ns.clear()
        if not self.moves:
            return
        if first > self.SLACK * second:
            self.attention = min(num_cores - 1, self.attention + 1)
        elif second > self.SLACK * first:
            self.attention = max(1, self.attention - 1)


class Visit(NamedTuple):
    """Layer as a pass comes to it: its number in the model, cache, program and the exchange's event."""

    layer_idx: int
    layer: Layer
    cache: KVCache
    program: LayerProgram
    event: int


# The layers of a pass, in order, found when they are asked for: in lockstep one die of hundreds asks.
Visits = Callable[[], list[Visit]]
EndLayer = Callable[[int], Awaitable[None]]
Schedule = Callable[[Sequence[Runner], Visits, EndLayer], Awaitable[None]]


def begin(runners: Sequence[Runner], whole: Frame) -> None:
    """Cut the rows of a pass into as many neighbouring parts as there are runners."""
    if len(runners) == 1:
        runners[0].frame.begin_part(whole, slice(0, len(whole.whole)))
        return
    num_rows = len(whole.whole)
    cuts = [num_rows * m // len(runners) for m in range(len(runners) + 1)]
    for runner, (lo, hi) in zip(runners, pairwise(cuts), strict=True):
        runner.frame.begin_part(whole, slice(lo, hi))


async def serial(runners: Sequence[Runner], visits: Visits, end_layer: EndLayer) -> None:
    """Run a single microbatch through all layers, one after another."""
    (runner,) = runners
    for index, layer, cache, program, event in visits():
        runner.at(layer=index)
        runner.enter(layer, cache, event)
        await runner.run(program.attention)
        await runner.run(program.feed)
        await end_layer(index)


async def in_slices(schedule: Schedule, runners: Sequence[Runner], visits: Visits, end: EndLayer) -> None:
    """Run a schedule on slices of a DP group's rows, and gather all rows at its end."""
    await schedule(runners, visits, end)
    last = visits()[-1].layer_idx
    for runner in runners:
        runner.at(layer=last)
        await runner.run(GATHER)


# ---- experts elsewhere ------------------------------------------------------------------------------


def cut_at(program: Program, op: str) -> tuple[Program, Program]:
    """Split a Program before an exchange; all of it and nothing if there is no such exchange."""
    for place, item in enumerate(program):
        if isinstance(item, Meet) and item.op == op:
            return program[:place], program[place:]
    return program, ()


async def away_and_back(runners: Sequence[Runner], visits: Visits, end_layer: EndLayer) -> None:
    """Run microbatches in turn; each returns from the experts of a layer at its turn in the next layer.

    Ends of layers are not reported: only prefill waits for them, and its dies have their experts.
    """
    left: list[Program] = [()] * len(runners)  # what a microbatch that is away has to do when it comes back
    last = 0  # the layer that it then is in

    async def come_back(m: int) -> None:
        runners[m].at(layer=last, microbatch=m)
        await runners[m].run(left[m])

    for index, layer, cache, program, event in visits():
        leave, back = cut_at(program.feed, "e2a")
        for m, runner in enumerate(runners):
            await come_back(m)
            runner.at(layer=index, microbatch=m)
            runner.enter(layer, cache, event)
            await runner.run(program.attention)
            await runner.run(leave)
            left[m] = back
        last = index
    for m in range(len(runners)):
        await come_back(m)


# ---- two microbatches on one die --------------------------------------------------------------------


class InOrder:
    """Stream for users in the order of their numbers, from 0; an early user waits."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name
        self._next = 0
        self._waiters: dict[int, Waiter] = {}

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Hold the stream within the context, at the turn of `number`.

        If the context fails, no later turn comes.
        """
        if number != self._next:
            waiter = self._waiters[number] = self.clock.waiter(lambda: self._describe(number))
            await self.clock.wait(waiter)
        yield
        self._next += 1
        if self._next in self._waiters:
            self._waiters.pop(self._next).wake()

    def _describe(self, number: int) -> Waiting:
        return Waiting("turn", self.name, "another microbatch", "turn", number, self._next)


async def side_by_side(clock: Clock, starts: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run parts of a die program as processes, and raise the first error when all have ended.

    The first part that fails ends the others at once, wherever they wait.
    """
    failures: list[Exception] = []

    async def part(start: Callable[[], Awaitable[None]]) -> None:
        try:
            await start()
        except Exception as error:
            failures.append(error)
            for other in processes:
                if other is not asyncio.current_task():
                    other.cancel()

    processes = [clock.spawn(part(start)) for start in starts]
    try:
        for process in processes:
            try:
                await clock.join(process)
            except asyncio.CancelledError:
                if not failures:
                    raise
    finally:
        for process in processes:
            process.cancel()
    if failures:
        raise failures[0]


def microbatch_cores(die: Die, attention_cores: int, is_attention: bool, core: Core) -> int:
    """Return a stream's number of cores of a kind; AIV cores are divided in the same ratio as AIC cores."""
    total, aic = die.spec.num_cores(core), die.spec.num_cores("aic")
    attention = max(1, min(total - 1, total * attention_cores // aic))
    return attention if is_attention else total - attention


async def overlap(
    runners: Sequence[Runner], visits: Visits, end_layer: EndLayer, split: CoreSplit | None
) -> None:
    """Run each microbatch as a process that takes turns with the other at the die's streams.

    Each has buffers and exchanges of its own. Turns go by layer, then by microbatch, on every die, so all
    dies come to exchanges in the same order.

    By cores, with a `split` of the AIC cores, and AIV cores alike:

        stream 0   MLAProlog, MLA, output projection    mb 0 | mb 1 | mb 0, next layer | mb 1 ...
        stream 1   gate, dispatch, experts, combine            mb 0 | mb 1             | mb 0 ...

    Else by engines: a kernel has all cores of its kind. AIC cores run attention and MLPs, AIV cores run the
    computing parts of dispatch and combine. The DMA engine makes the all-to-all; AIV cores ask it directly.
    """
    die, launcher = runners[0].die, runners[0].launcher
    streams = [InOrder(die.clock, f"stream {i} of die {die.index}") for i in range(2)]
    num_ended: Counter[int] = Counter()
    by_cores, num_cores = split is not None, die.spec.num_cores("aic")

    async def half(m: int, stream: int, name: str, program: Program) -> None:
        runner, start = runners[m], die.clock.now
        if split is not None:
            runner.cores = partial(microbatch_cores, die, split.attention, stream == 0)
            name = f"{name} of microbatch {m}"
        await runner.run(program)
        await runner.pace.settle()
        if split is not None:
            split.spend(stream, die.clock.now - start)
        lane = STREAMS[stream] if by_cores else f"microbatch {m}"
        die.draw(lane, name, start)

    passed = visits()

    async def microbatch(m: int) -> None:
        runner, (attention, feed) = runners[m], streams
        for number, (index, layer, cache, program, event) in enumerate(passed):
            turn = number * len(runners) + m
            runner.at(layer=index, microbatch=m)
            async with attention.turn(turn):
                runner.enter(layer, cache, event)
                await half(m, 0, "attention", program.attention)
            async with feed.turn(turn) if by_cores else nullcontext():
                await half(m, 1, "MLP" if layer.moe is None else "experts", program.feed)
            num_ended[number] += 1
            if num_ended[number] == len(runners):
                if split is not None:
                    split.end_layer(num_cores)
                await end_layer(index)

    launches = [] if launcher is None else [MicrobatchLaunches(launcher) for _ in runners]
    try:
        for runner, launch in zip(runners, launches, strict=False):
            runner.launcher = launch
        await side_by_side(die.clock, [partial(microbatch, m) for m in range(len(runners))])
    finally:
        for runner in runners:
            runner.launcher, runner.cores = launcher, all_cores
    for launch in launches:
        launch.report()
