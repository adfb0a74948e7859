"""Two microbatches that overlap on dies with attention and experts (CloudMatrix 4.2.3 and 4.3.2).

Decode, by cores: each half of a layer is a stream with its share of the AIC and AIV cores, and the streams
swap microbatches when both are done.

    stream 0   MLAProlog, MLA, output projection    mb 0 | mb 1 | mb 0, next layer | mb 1 ...
    stream 1   gate, dispatch, experts, combine            mb 0 | mb 1             | mb 0 ...

Prefill, by engines: a kernel has all cores of its kind. AIC cores have attention and MLPs, AIV cores what
dispatch and combine compute, and the all-to-all is the DMA engine's, which AIV cores ask directly.

Either way each microbatch is a process of its own, with buffers and an exchange of its own, and streams are
what they take turns at. Turns go by layer, then by microbatch, on every die: so the ranks' exchanges meet in
the same order, and rows of a sequence that is cut apart find their predecessors in the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from itertools import pairwise
from typing import NamedTuple

from xdeepserve.comm.means import Carrier
from xdeepserve.engine.lanes import STREAMS
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.engine.programs.launcher import Launches
from xdeepserve.engine.programs.layers import NO_ROWS, Batch, Layers
from xdeepserve.engine.programs.memory_plan import KVCache
from xdeepserve.engine.programs.ops import Rows, Work
from xdeepserve.engine.sizes import Sizes
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.die import Die
from xdeepserve.hw.spec import Core
from xdeepserve.hw.waiting import Waiter, Waiting
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import Layer, MoE

# In a DP group of several dies attention has some more.
ATTENTION_STAGES = frozenset(
    {"MLAProlog", "DownProj", "UpProj", "MLA", "HeadOutputs", "OProj inputs", "OProj"}
)


class Stream:
    """One thing after another, in the order of their numbers, from 0. Who comes too early waits."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name
        self._next = 0
        self._waiters: dict[int, Waiter] = {}
        self._error: BaseException | None = None

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """The stream is the caller's within. If that fails, it fails for all that come after."""
        if self._error is not None:
            raise self._error
        if number != self._next:
            waiter = self._waiters[number] = self.clock.waiter(lambda: self._describe(number))
            await self.clock.wait(waiter)
        yield
        self._next += 1
        if self._next in self._waiters:
            self._waiters.pop(self._next).wake()

    def fail(self, error: BaseException) -> None:
        """There will be no more turns."""
        self._error = error
        for waiter in self._waiters.values():
            waiter.fail(error)
        self._waiters.clear()

    def _describe(self, number: int) -> Waiting:
        return Waiting("turn", self.name, "another microbatch", "turn", number, self._next)


class MicrobatchLaunches:
    """Stages of one microbatch. How those of two mix is a matter of time: a graph has them in turn."""

    def __init__(self, launcher: Launches) -> None:
        self._launcher = launcher
        self._names: list[str] = []

    @property
    def is_eager(self) -> bool:
        return self._launcher.is_eager

    def stage(self, name: str) -> None:
        self._names.append(name)

    async def kernel(self) -> None:
        await self._launcher.kernel()

    def report(self) -> None:
        """The microbatch has come to the end of its layers."""
        for name in self._names:
            self._launcher.stage(name)


def microbatch_cores(die: Die, attention_cores: int, is_attention: bool, core: Core) -> int:
    """A stream's share of the cores of a kind: AIV cores are cut as the AIC cores are."""
    total, aic = die.spec.num_cores(core), die.spec.num_cores("aic")
    attention = max(1, min(total - 1, total * attention_cores // aic))
    return attention if is_attention else total - attention


def exchange_means(die: Die, sizes: Sizes) -> tuple[int | None, Carrier]:
    """AIV cores and carrier of a microbatch's dispatch and combine."""
    if sizes.overlap == "engines":
        return None, "urma"
    return microbatch_cores(die, sizes.attention_cores, False, "aiv"), "mte"


class MicrobatchLayers(Layers):
    """Layers of one of the microbatches that overlap.

    AIC cores have the shared expert. The sum of all experts' outputs is for AIV cores (CombineCompute in CM
    4.3.2; DispatchCompute is what dispatch does before it posts).
    """

    OUTPUT_STAGES = ("SharedExpert", "CombineCompute")

    async def add_outputs(
        self, h: Array, source: Rows, slot_out: Array, topk_weights: Array, moe: MoE
    ) -> None:
        shared = NO_ROWS

        def run() -> None:
            nonlocal shared
            shared = self.shared_output(h, source, moe)

        await self.compute("SharedExpert", run, self.shared_work(len(h), moe))
        work = Work(2.0 * slot_out.size, float(slot_out.nbytes + 3 * h.nbytes))
        await self.compute(
            "CombineCompute", lambda: self.add_sum(h, slot_out, topk_weights, shared), work, "aiv"
        )

    def num_cores(self, name: str, core: Core) -> int | None:
        if self.mem.sizes.overlap == "engines":
            return None
        return microbatch_cores(self.die, self.mem.sizes.attention_cores, name in ATTENTION_STAGES, core)


class Microbatch(NamedTuple):
    """Some rows of a step: the microbatch's number, h [T, H] or this die's slice of it, all rows' batch."""

    number: int
    h: Array
    batch: Batch


class PipelineExecutor(Executor):
    """An executor of two microbatches; `parts[m]` runs the layers of one, on buffers of its own."""

    parts: Sequence[Layers]
    _num_ended: Counter[int]  # microbatches that have ended a layer, by its place among those that are run

    async def run_layers(
        self, h: Array, layers: Sequence[Layer], caches: Sequence[KVCache], batch: Batch, first_event: int
    ) -> None:
        """Layers in place on h [T, H], both microbatches at a time; see `Executor.run_layers`."""
        launches = []
        if self.launcher is not None:
            launches = [MicrobatchLaunches(self.launcher) for _ in self.parts]
            for part, launch in zip(self.parts, launches, strict=True):
                part.launcher = launch
        streams = [Stream(self.die.clock, f"stream {i} of die {self.die.index}") for i in range(2)]
        self._num_ended = Counter()
        cuts = [len(h) * m // len(self.parts) for m in range(len(self.parts) + 1)]
        runs = []
        for m, (lo, hi) in enumerate(pairwise(cuts)):
            rows = slice(lo, hi)
            own = Batch.of(batch.positions[rows], batch.slots[rows], batch.seq_of[rows], batch.block_tables)
            runs.append(self._run(Microbatch(m, h[rows], own), layers, caches, first_event, streams))
        await self.die.clock.gather(*runs)
        for launch in launches:
            launch.report()

    async def _run(
        self,
        mb: Microbatch,
        layers: Sequence[Layer],
        caches: Sequence[KVCache],
        event: int,
        streams: Sequence[Stream],
    ) -> None:
        part, attention, feed_forward = self.parts[mb.number], *streams
        is_turn_taken = self.mem.sizes.overlap == "cores"
        try:
            for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
                turn = index * len(self.parts) + mb.number
                part.at(layer=self.layer_index[id(layer)], microbatch=mb.number)
                async with attention.turn(turn):
                    await self._attention(part, mb, layer, cache)
                async with feed_forward.turn(turn) if is_turn_taken else nullcontext():
                    await self._feed_forward(part, mb, layer, event)
                event += layer.moe is not None
                self._num_ended[index] += 1
                if self._num_ended[index] == len(self.parts):
                    await self.end_layer(self.layer_index[id(layer)])
        except Exception as error:
            for stream in streams:  # the other microbatch must not wait for this one
                stream.fail(error)
            raise

    async def _attention(self, part: Layers, mb: Microbatch, layer: Layer, cache: KVCache) -> None:
        start = self.die.clock.now
        if mb.batch.num_tokens:
            await part.mla(mb.h, layer, cache, mb.batch)
        else:
            part.skip_mla(layer)
        await part.settle()
        self._note(part, mb, 0, "attention", start)

    async def _feed_forward(self, part: Layers, mb: Microbatch, layer: Layer, event: int) -> None:
        start = self.die.clock.now
        if layer.moe is not None:
            await part.moe(mb.h, layer, layer.moe, event)
        elif layer.mlp is not None and mb.batch.num_tokens:
            await part.dense(mb.h, layer, layer.mlp)
        elif layer.mlp is not None:
            part.skip_dense(layer.mlp)
        await part.settle()
        self._note(part, mb, 1, "experts" if layer.moe is not None else "MLP", start)

    def _note(self, part: Layers, mb: Microbatch, stream: int, name: str, start: int) -> None:
        """A turn, for traces: of a stream, or of a microbatch where engines are the streams."""
        is_turn_taken = self.mem.sizes.overlap == "cores"
        lane = STREAMS[stream] if is_turn_taken else f"microbatch {mb.number}"
        if is_turn_taken:
            name += f" of microbatch {mb.number}"
        self.die.trace.span(self.die.index, lane, name, start, self.die.clock.now, part.place)
