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
from xdeepserve.engine.lanes import COMPUTE, RECEIVE, SEND, stream_item
from xdeepserve.engine.lockstep.drawing import Drawing
from xdeepserve.engine.programs.layers import FLOAT_KERNELS, Layers
from xdeepserve.engine.programs.memory_plan import KVCache
from xdeepserve.engine.programs.ops import Work, linear_work
from xdeepserve.hw.die import Die
from xdeepserve.hw.spec import Arithmetic, Core
from xdeepserve.model.tensors import Layer, MoE

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
    """Virtual time of one run of layers. `attention` is when each die with attention came to it, in ns.

    `drawing` is what a trace shows of them.
    """

    def __init__(self, dies: Sequence[Die], cost: CommCost, num_domains: int = 0) -> None:
        self.dies, self.cost, self.spec = dies, cost, cost.spec
        self.drawing = Drawing(dies, num_domains)
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
            work["Gate"] = layers.gate_work(rows, layer.moe)
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
        drawing = self.drawing
        for at, die, domain in drawing.shown:
            begin = int(start[at])
            for stage in stages.by_die[at]:
                end = begin + stage.ns
                drawing.trace.span(die, stage.core.upper(), stage.name, begin, end, drawing.place(domain))
                begin = end


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
        self.drawing.meeting(op, "XCCL", start, self.attention)

    def compute(self, name: str, ns: Ns) -> None:
        """A kernel that takes `ns` [R] of each die."""
        start = self.attention
        self.attention = start + ns
        self.drawing.spans("AIC", name, start, self.attention)


class DisaggregatedTimetable(Timetable):
    """Where experts have dies of their own. `experts` is when each of these came to what it does."""

    def __init__(
        self,
        dies: Sequence[Die],
        expert_dies: Sequence[Die],
        cost: CommCost,
        num_domains: int,
        num_microbatches: int,
    ) -> None:
        super().__init__(dies, cost, num_domains)
        self.expert_dies, self._num_domains = expert_dies, num_domains
        self._num_places = num_domains * num_microbatches
        self._per_domain = len(dies) // num_domains
        self.expert_drawing = Drawing(expert_dies)

    def begin(self, attention: Ns, experts: Ns) -> None:
        """All dies have come."""
        self.attention, self.experts = attention.copy(), experts.copy()
        self._received = self._sent = int(experts.max(initial=0))
        self._sent_at = [0] * self._num_places  # when the buffers of a place were last free

    # ---- attention dies -----------------------------------------------------------------------------

    def _dies(self, domain: int) -> slice:
        return slice(domain * self._per_domain, (domain + 1) * self._per_domain)

    def come_back(self, domain: int, ready_ns: int, rows: Ns, row_nbytes: int) -> None:
        """Wait for the answers, which left the trampolines at `ready_ns`, and add them."""
        dies, bulk = self._dies(domain), self._bulk_ns(rows, row_nbytes)
        start = self.attention[dies]
        residual = np.where(
            rows > 0, self.spec.kernel_ns(0.0, 3.0 * float(rows.max(initial=0)) * row_nbytes, "aiv"), 0
        )
        came = np.maximum(start, ready_ns + bulk)
        end = came + residual
        if self.drawing.is_on:
            before, between = self.attention.copy(), self.attention.copy()
            after = self.attention.copy()
            between[dies], after[dies] = came, end
            self.drawing.spans("XCCL", "E2A'", before, between, domain)
            self.drawing.spans("AIV", "Residual", between, after, domain)
            for at, die, _ in self.drawing.of(domain):
                if between[at] > before[at]:
                    key = "E2A'", die, self.drawing.place(domain)["microbatch"]
                    self.drawing.trace.arrive(key, "E2A'", die, "XCCL", int(between[at]) - 1)
        self.attention[dies] = end

    def post(self, domain: int, rows: Ns, row_nbytes: int) -> int:
        """A2E's bulk stage: each die's tokens to its trampoline. When the last has posted."""
        dies, before = self._dies(domain), self.attention.copy()
        self.attention[dies] += self._bulk_ns(rows, row_nbytes)
        self.drawing.spans("XCCL", "A2E", before, self.attention, domain)
        for at, die, _ in self.drawing.of(domain):
            key = "A2E", die, self.drawing.place(domain)["microbatch"]
            self.drawing.trace.depart(key, "A2E", die, "XCCL", int(self.attention[at]) - 1)
        return int(self.attention[dies].max(initial=0))

    def _bulk_ns(self, rows: Ns, row_nbytes: int) -> Ns:
        """Of the stage between an attention die and its trampoline, for each die."""
        counts, of_die = np.unique(rows, return_inverse=True)
        bulk = np.array([self.cost.bulk_ns(count * row_nbytes) for count in counts.tolist()])
        return bulk.round().astype(np.int64)[of_die]

    # ---- expert dies --------------------------------------------------------------------------------

    def serve(
        self, microbatch: int, domain: int, posted_ns: int, batch: int, copies: int, kernels_ns: Ns
    ) -> int:
        """A2E, experts and E2A of one item, pipelined with the items around it; when the answers leave."""
        place = microbatch * self._num_domains + domain
        exchange = round(self.cost.exchange_ns(len(self.expert_dies), batch, copies))
        # The three streams of an expert die each take one item after another.
        start = max(posted_ns, self._received, self._sent_at[place])
        self._received = received = start + exchange
        begin = np.maximum(self.experts, received)
        self.experts = begin + kernels_ns
        computed = max(int(self.experts.max(initial=0)), self._sent)
        self._sent = self._sent_at[place] = sent = computed + exchange
        if self.expert_drawing.is_on:
            self._draw_item(microbatch, domain, (start, received), begin, (computed, sent))
        return sent

    def _draw_item(
        self, microbatch: int, domain: int, receiving: tuple[int, int], begin: Ns, sending: tuple[int, int]
    ) -> None:
        """An item in the three streams of the expert dies, and arrows from and to attention dies, which have
        trampolines as `comm.trampoline.layout` deals them out."""
        drawing, name = self.expert_drawing, stream_item(microbatch, domain)
        trace, place = drawing.trace, self.drawing.place(domain)
        for lane, called in ((COMPUTE, name), ("AIC", "Experts")):
            drawing.spans(lane, called, begin, self.experts, place=place)
        first = domain * self._per_domain
        for at, die, _ in drawing.shown:
            trace.span(die, RECEIVE, name, *receiving, place)
            trace.span(die, SEND, name, *sending, place)
            for rank in range(at, self._per_domain, len(self.expert_dies)):
                attention = self.dies[first + rank].index
                trace.arrive(("A2E", attention, microbatch), "A2E", die, RECEIVE, receiving[0])
                trace.depart(("E2A'", attention, microbatch), "E2A'", die, SEND, sending[1] - 1)

    @property
    def experts_end_ns(self) -> int:
        """When the last answers have left the expert dies."""
        return self._sent
