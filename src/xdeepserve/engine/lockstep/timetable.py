"""When the stages of a lockstep happen, in virtual time: one number for each die, moved on stage by stage.

Dies with attention run their stages one after another. A dispatch starts when the last die has come to it,
and a combine when the slowest expert has ended: both are barriers. Where experts have dies of their own, an
A2E starts when the last die of its domain has posted and the receiving stream of the expert dies is free;
experts run when it has ended and their die is free; an E2A starts when the slowest expert has ended. An
exchange costs what `comm.cost` says of it as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.cost import CommCost
from xdeepserve.engine.programs.layers import FLOAT_KERNELS, Layers
from xdeepserve.engine.programs.memory_plan import KVCache
from xdeepserve.engine.programs.ops import Work, linear_work
from xdeepserve.hw.die import Die
from xdeepserve.hw.spec import Arithmetic, Core
from xdeepserve.model.weights import Layer, MoE

Ns = npt.NDArray[np.int64]


MAX_KEPT = 1 << 14  # durations that are kept: the same numbers of rows come again and again


class Stage(NamedTuple):
    """A kernel of a die with attention."""

    name: str
    core: Core
    ns: int


class Stages(NamedTuple):
    """The kernels of a layer on each die, one after the other, and how long they take there together."""

    by_die: list[tuple[Stage, ...]]
    total: Ns


class Timetable:
    """Virtual time of one run of layers. `attention` is when each die with attention came to it, in ns."""

    def __init__(self, dies: Sequence[Die], cost: CommCost) -> None:
        self.dies, self.cost = dies, cost
        self.spec, self.trace = cost.spec, dies[0].trace
        self.attention: Ns = np.zeros(len(dies), np.int64)
        self._kept: dict[tuple[bool, int, int], tuple[Stage, ...]] = {}

    def stages_by_kind(
        self, layers: Layers, run: Sequence[Layer], caches: Sequence[KVCache], rows: Ns, contexts: Ns
    ) -> dict[bool, Stages]:
        """The kernels of layers with experts, up to the gate, and of others: those that a run has.

        rows: of each die; contexts: positions that they see together.
        """
        kinds = {layer.moe is not None: (layer, cache) for layer, cache in zip(run, caches, strict=True)}
        return {
            is_moe: self._stages(layers, layer, cache, rows, contexts)
            for is_moe, (layer, cache) in kinds.items()
        }

    def _stages(self, layers: Layers, layer: Layer, cache: KVCache, rows: Ns, contexts: Ns) -> Stages:
        by_die: list[tuple[Stage, ...]] = []
        for count, context in zip(rows.tolist(), contexts.tolist(), strict=True):
            key = (layer.moe is not None, count, context)
            if key not in self._kept:
                if len(self._kept) >= MAX_KEPT:
                    self._kept.clear()
                self._kept[key] = self._stages_of(layers, layer, cache, count, context) if count else ()
            by_die.append(self._kept[key])
        return Stages(by_die, np.array([sum(stage.ns for stage in each) for each in by_die], np.int64))

    def _stages_of(
        self, layers: Layers, layer: Layer, cache: KVCache, rows: int, context: int
    ) -> tuple[Stage, ...]:
        work = dict(
            zip(
                ("MLAProlog", "MLA", "OProj"), layers.attention_work(layer, cache, rows, context), strict=True
            )
        )
        if layer.moe is not None:
            work["Gate"] = layers.gate_work(rows)
        elif layer.mlp is not None:
            work["MLP"] = linear_work(rows, layer.mlp.w13) + linear_work(rows, layer.mlp.w2)
        return tuple(self._stage(layers, name, each) for name, each in work.items())

    def _stage(self, layers: Layers, name: str, work: Work) -> Stage:
        core: Core = "aiv" if name == "Gate" else "aic"
        arithmetic: Arithmetic = "int8" if layers.is_int8 and name not in FLOAT_KERNELS else "bf16"
        return Stage(name, core, self.spec.kernel_ns(work.flops, work.nbytes, core, arithmetic=arithmetic))

    def layer(self, stages: Stages) -> None:
        """Each die runs the kernels of a layer."""
        start = self.attention
        self.attention = start + stages.total
        if not self.trace.is_on:
            return
        for die, begin, each in zip(self.dies, start.tolist(), stages.by_die, strict=True):
            for stage in each:
                self.trace.span(die.index, stage.core.upper(), stage.name, begin, begin + stage.ns)
                begin += stage.ns

    def _spans(self, dies: Sequence[Die], lane: str, name: str, start: Ns, end: Ns) -> None:
        if self.trace.is_on:
            for die, first, last in zip(dies, start.tolist(), end.tolist(), strict=True):
                if last > first:
                    self.trace.span(die.index, lane, name, first, last)


class ColocatedTimetable(Timetable):
    """Where every die has attention and a share of the experts."""

    def begin(self, came: Ns) -> None:
        """All dies have come."""
        self.attention = came.copy()

    def shared_ns(self, layers: Layers, moe: MoE, rows: Ns) -> Ns:
        """[R]: what the shared expert and the sum of all outputs take of each die."""
        works = [layers.shared_work(count, moe) for count in rows.tolist()]
        result = [self._stage(layers, "SharedExpert", work).ns for work in works]
        return np.where(rows > 0, np.array(result, np.int64), 0)

    def meet(self, op: str, exchange_ns: int) -> None:
        """A dispatch or a combine of all dies."""
        start = self.attention
        end = int(start.max()) + exchange_ns
        self.attention = np.full_like(start, end)
        self._spans(self.dies, "XCCL", op, start, self.attention)

    def compute(self, name: str, ns: Ns) -> None:
        """A kernel that takes `ns` [R] of each die."""
        start = self.attention
        self.attention = start + ns
        self._spans(self.dies, "AIC", name, start, self.attention)


class DisaggregatedTimetable(Timetable):
    """Where experts have dies of their own. `experts` is when each of these came to what it does."""

    def __init__(
        self, dies: Sequence[Die], expert_dies: Sequence[Die], cost: CommCost, num_places: int
    ) -> None:
        super().__init__(dies, cost)
        self.expert_dies, self._num_places = expert_dies, num_places

    def begin(self, attention: Ns, experts: Ns) -> None:
        """All dies have come."""
        self.attention, self.experts = attention.copy(), experts.copy()
        self._received = self._sent = int(experts.max(initial=0))
        self._sent_at = [0] * self._num_places  # when the buffers of a place were last free

    # ---- attention dies -----------------------------------------------------------------------------

    def come_back(self, dies: slice, ready_ns: int, rows: Ns, row_nbytes: int) -> None:
        """Wait for the answers, which left the trampolines at `ready_ns`, and add them."""
        bulk = self._bulk_ns(rows, row_nbytes)
        start = self.attention[dies]
        residual = np.where(
            rows > 0, self.spec.kernel_ns(0.0, 3.0 * float(rows.max(initial=0)) * row_nbytes, "aiv"), 0
        )
        end = np.maximum(start, ready_ns + bulk) + residual
        self._spans(self.dies[dies], "XCCL", "E2A", start, end)
        self.attention[dies] = end

    def post(self, dies: slice, rows: Ns, row_nbytes: int) -> int:
        """A2E's bulk stage: each die's tokens to its trampoline. When the last has posted."""
        start = self.attention[dies]
        bulk = self._bulk_ns(rows, row_nbytes)
        self._spans(self.dies[dies], "XCCL", "A2E", start, start + bulk)
        self.attention[dies] = start + bulk
        return int(self.attention[dies].max(initial=0))

    def _bulk_ns(self, rows: Ns, row_nbytes: int) -> Ns:
        """Of the stage between an attention die and its trampoline, for each die."""
        counts, of_die = np.unique(rows, return_inverse=True)
        bulk = np.array([self.cost.bulk_ns(count * row_nbytes) for count in counts.tolist()])
        return bulk.round().astype(np.int64)[of_die]

    # ---- expert dies --------------------------------------------------------------------------------

    def serve(self, place: int, posted_ns: int, batch: int, copies: int, kernels_ns: Ns) -> int:
        """A2E, experts and E2A of one item, pipelined with the items around it; when the answers leave."""
        exchange = round(self.cost.exchange_ns(len(self.expert_dies), batch, copies))
        # The three streams of an expert die each take one item after another.
        start = max(posted_ns, self._received, self._sent_at[place])
        self._received = received = start + exchange
        begin = np.maximum(self.experts, received)
        self.experts = begin + kernels_ns
        computed = max(int(self.experts.max(initial=0)), self._sent)
        self._sent = self._sent_at[place] = sent = computed + exchange
        if self.trace.is_on:
            for die, first, last in zip(self.expert_dies, begin.tolist(), self.experts.tolist(), strict=True):
                self.trace.span(die.index, "A2E", "A2E", start, received)
                if last > first:
                    self.trace.span(die.index, "AIC", "Experts", first, last)
                self.trace.span(die.index, "E2A", "E2A", computed, sent)
        return sent

    @property
    def experts_end_ns(self) -> int:
        """When the last answers have left the expert dies."""
        return self._sent
