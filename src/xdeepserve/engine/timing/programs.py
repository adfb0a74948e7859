"""The die programs of a timing-only run: the engine's own, with costs in place of kernels.

Every stage is still launched by name and takes its time on the die; what its kernel would have computed is
left out, and what the host reads (sampled tokens, accepted drafts) is made up, by seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xdeepserve.comm.exchange.rows import Received
from xdeepserve.engine.programs.attention import AttentionExecutor
from xdeepserve.engine.programs.drafts import Drafter, DraftRows
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.engine.programs.expert import ExpertProgram
from xdeepserve.engine.programs.layers import Batch, Layers
from xdeepserve.engine.programs.memory_plan import KVCache
from xdeepserve.engine.programs.messages import StepPlan
from xdeepserve.engine.programs.ops import Work
from xdeepserve.engine.programs.pipeline import MicrobatchLayers, PipelineExecutor
from xdeepserve.engine.timing.cost import LayerCost
from xdeepserve.engine.timing.exchange import TimingXCCL
from xdeepserve.engine.timing.routing import TimingConfig, generator
from xdeepserve.engine.timing.timeline import Timeline
from xdeepserve.engine.timing.trampoline import TimingExpertSide
from xdeepserve.hw.spec import Core
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import MLP, MTP, Layer

DUMMY_TOKEN = 7  # what every sampled token is
# Part of a layer's fitted small kernels.
IN_SMALL_KERNELS = ("Embed", "Norm", "Residual", "DraftState", "Resolve", "CombineCompute")
IN_PASS = ("MTPInput",)  # part of what a pass takes besides its layers


class TimingLayers(Layers):
    """Layers whose stages only take time."""

    cost: LayerCost
    timeline: Timeline
    _rows = 0  # of the stage
    _batch_rows = 0
    _row_context = 0
    _kv_tokens = 0
    _seen: Batch | None = None
    takes_turns = False  # at the cores, with another microbatch

    def at(self, **place: int) -> None:
        if self.die.trace.is_on:
            self.place = self.timeline.place = {**self._home, **place}

    async def settle(self) -> None:
        await self.timeline.catch_up()

    async def mla(self, h: Array, layer: Layer, cache: KVCache, batch: Batch) -> None:
        if batch is not self._seen:
            self._seen, self._batch_rows, self._row_context = batch, batch.num_tokens, batch.context
            ends = np.append(batch.seq_of[1:] != batch.seq_of[:-1], True)
            self._kv_tokens = int(batch.positions[ends].sum()) + int(ends.sum())
        self._rows = len(h)
        await super().mla(h, layer, cache, batch)

    async def gate(self, h: Array, layer: Layer, moe: Any) -> Any:
        self._rows = len(h)
        return await super().gate(h, layer, moe)

    async def dense(self, h: Array, layer: Layer, mlp: MLP) -> None:
        self._rows = len(h)
        await super().dense(h, layer, mlp)

    async def compute(self, name: str, fn: object, work: Work, core: Core = "aic") -> None:
        """Spend a stage's time; `fn` is not called."""
        if self.launcher is not None:
            self.launcher.stage(name)
            if self.launcher.is_eager:
                await self.timeline.catch_up()
                await self.launcher.kernel()
        if self.takes_turns:
            await self.timeline.spend_in_turn(core, name, self._stage_ns(name, work))
        else:
            self.timeline.spend(core.upper(), name, self._stage_ns(name, work))

    def aic_cores(self, name: str) -> int:
        """That a stage has."""
        return self.num_cores(name, "aic") or self.die.spec.num_cores("aic")

    def _stage_ns(self, name: str, work: Work) -> float:
        cost, c, rows = self.cost, self.config, self._rows
        cores = self.aic_cores(name)
        match name:
            case "MLAProlog" | "OProj":  # one roofline over both, and the layer's small kernels
                return (cost.projection_ns(rows, cores) + cost.small_kernels_ns()) / 2
            case "MLA":
                return cost.attention_ns(self._row_context, self._kv_tokens, cores)
            case "MLP":
                return cost.mlp_ns(rows, 3 * c.hidden_size * c.intermediate_size, cores=cores)
            case "Gate":
                return cost.gate_ns()
            case "Experts":
                return self._experts_ns(cores)
            case "SharedExpert":
                is_elsewhere = isinstance(self.xccl, TimingXCCL) and self.xccl.hub.num_shared
                return (
                    0.0 if is_elsewhere else cost.mlp_ns(rows, c.n_shared_experts * cost.expert, cores=cores)
                )
            case "Sample" | "Draft":
                return cost.pass_ns()
        assert name in IN_SMALL_KERNELS or name in IN_PASS, name
        return 0.0

    def _experts_ns(self, cores: int) -> float:
        """Routed experts of this die, on what the last dispatch brought, or a copy of the shared expert."""
        cost, c = self.cost, self.config
        if not isinstance(self.xccl, TimingXCCL) or self.xccl.load is None:
            rows = self._rows * c.num_experts_per_tok
            return cost.mlp_ns(rows, cost.expert, min(rows, c.n_routed_experts), cores)
        hub, load, rank = self.xccl.hub, self.xccl.load, self.xccl.rank
        if rank >= hub.num_routed:
            return cost.mlp_ns(load.shared, cost.expert, cores=cores)
        rows = cost.expert_rows(float(load.routed[rank]), load.mean)
        if rank >= hub.num_dies - hub.num_shared:
            rows = max(rows, load.shared)
        return cost.mlp_ns(rows, cost.expert, max(1.0, c.n_routed_experts / hub.num_dies), cores)


class TimingDrafter(Drafter):
    """MTP's passes, whose drafts are made up."""

    async def _draw(
        self,
        plan: StepPlan,
        mtp: MTP,
        depth: int,
        made: DraftRows,
        h: Array,
        drafts: Array,
        accepted: list[int],
    ) -> None:
        await super()._draw(plan, mtp, depth, made, h, drafts, accepted)
        drafts[list(made.ends), depth] = DUMMY_TOKEN


class TimingExecutor(Executor):
    """An executor that makes up what it would have sampled."""

    timing: TimingConfig
    timeline: Timeline

    def use(self, timeline: Timeline, cost: LayerCost, timing: TimingConfig) -> None:
        """Replace the layers; called once, before the program runs."""
        self.timeline, self.timing = timeline, timing
        layers = self._make_layers()
        layers.cost, layers.timeline = cost, timeline
        self.layers = layers
        if self.drafter is not None:
            self.drafter = TimingDrafter(self)

    @property
    def draws_as(self) -> int:
        """The die whose random numbers it takes."""
        return self.die.index

    def _make_layers(self) -> TimingLayers:
        old = self.layers
        return TimingLayers(self.die, self.mem, old.xccl, old.ops.threads, old.cos, old.sin)

    async def end_layer(self, index: int) -> None:
        if self._reports_layers:
            await self.timeline.catch_up()
        await super().end_layer(index)

    @property
    def timelines(self) -> list[Timeline]:
        """Of all that runs side by side."""
        return [self.timeline]

    async def step(self, plan: StepPlan) -> None:
        await super().step(plan)
        await self.timeline.catch_up()

    async def _sample(self, plan: StepPlan, hidden: Array) -> None:
        await super()._sample(plan, hidden)
        await self.timeline.catch_up()  # the host may have to launch what follows
        drafts, most = np.asarray(plan.num_drafts), max(1, self.mem.sizes.mtp)
        self.result("sampled", len(plan.logit_rows))[:] = DUMMY_TOKEN
        rng = generator(self.timing.seed, 1 << 32 | self.draws_as, plan.step)
        is_right = rng.random((len(drafts), most)) < self.timing.acceptance
        is_offered = np.arange(most) < drafts[:, None]
        # A draft counts only if all before it do.
        accepted = np.logical_and.accumulate(is_right & is_offered, axis=1).sum(axis=1)
        self.result("num_accepted", len(drafts))[:] = accepted


class TimingMicrobatchLayers(TimingLayers, MicrobatchLayers):
    """Layers of one of the microbatches that overlap; `timeline` is its own."""


class TimingPipelineExecutor(TimingExecutor, PipelineExecutor):
    """Two microbatches, each with a timeline, an exchange and the cost of its cores."""

    _part_timelines: list[Timeline]

    def use_microbatches(self, exchanges: Sequence[TimingXCCL | None], cost: LayerCost) -> None:
        """Make the layers of the microbatches, each on its exchange's timeline; called after `use`."""
        parts = []
        self._part_timelines = []
        for m, xccl in enumerate(exchanges):
            timeline = Timeline(self.die) if xccl is None else xccl.timeline
            layers = self._make_part(m, xccl, timeline)
            layers.cost, layers.timeline = cost, timeline
            self._part_timelines.append(timeline)
            layers.takes_turns = self.mem.sizes.overlap == "engines"
            parts.append(layers)
        self.parts = parts

    def _make_part(self, number: int, xccl: TimingXCCL | None, timeline: Timeline) -> TimingLayers:
        """Layers of one microbatch."""
        return TimingMicrobatchLayers(*self.part_arguments(number, xccl))

    def part_arguments(self, number: int, xccl: TimingXCCL | None) -> tuple[Any, ...]:
        """What layers of a microbatch are made of."""
        main = self.layers
        workspace = self.mem.layer_workspace(number)
        return self.die, self.mem, xccl, main.ops.threads, main.cos, main.sin, workspace

    @property
    def timelines(self) -> list[Timeline]:
        return [self.timeline, *self._part_timelines]

    async def run_layers(
        self, h: Array, layers: Sequence[Layer], caches: Sequence[KVCache], batch: Batch, first_event: int
    ) -> None:
        await self.timeline.catch_up()
        await super().run_layers(h, layers, caches, batch, first_event)


class TimingAttentionExecutor(TimingExecutor, AttentionExecutor):
    """The same where experts have dies of their own."""


class TimingExpertProgram(ExpertProgram):
    """The three persistent kernels of an expert die, of which the middle one only takes time."""

    cost: LayerCost

    async def _experts(self, out: Array, received: Received, mlp: MLP, place: dict[str, Any]) -> None:
        side = self._side_of(received)
        assert side.load is not None
        rows = float(len(received))
        if not self.mem.is_shared:
            rows = self.cost.expert_rows(rows, side.load.mean)
        duration = round(self.cost.mlp_ns(rows, self.cost.expert, max(1, len(self.mem.experts))))
        now = self.die.clock.now
        self.die.trace.span(self.die.index, "AIC", "Experts", now, now + duration, place)
        await self.die.clock.sleep(duration)

    def _side_of(self, received: Received) -> TimingExpertSide:
        number = next(number for number, rows in self._arrived.items() if rows is received)
        side: Any = self.round[number]
        return side
