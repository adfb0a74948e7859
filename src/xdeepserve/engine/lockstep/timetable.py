"""When the stages of a lockstep happen, in virtual time: one number for each die, moved on stage by stage.

Attention dies run their stages one after another. An A2E starts when the last die of its domain has posted
and the receiving stream of the expert dies is free; experts run when it has ended and their die is free; an
E2A starts when the slowest expert has ended. An exchange costs what `comm.cost` says of it as a whole.
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
from xdeepserve.model.weights import Layer

Ns = npt.NDArray[np.int64]


class Stage(NamedTuple):
    """A kernel of an attention die."""

    name: str
    core: Core
    ns: int


class Timetable:
    """Virtual time of one run of layers. `attention` and `experts` are when each die came to it, in ns."""

    def __init__(
        self, dies: Sequence[Die], expert_dies: Sequence[Die], cost: CommCost, num_places: int
    ) -> None:
        self.dies, self.expert_dies, self.cost = dies, expert_dies, cost
        self.spec, self.trace = cost.spec, dies[0].trace
        self._stages: dict[tuple[bool, int, int], list[Stage]] = {}
        self._num_places = num_places

    def begin(self, attention: Ns, experts: Ns) -> None:
        """All dies have come."""
        self.attention, self.experts = attention.copy(), experts.copy()
        self._received = self._sent = int(experts.max(initial=0))
        self._sent_at = [0] * self._num_places  # when the buffers of a place were last free

    # ---- attention dies -----------------------------------------------------------------------------

    def layer(self, layers: Layers, layer: Layer, cache: KVCache, rows: Ns, contexts: Ns) -> None:
        """The kernels of a layer on each die: so many rows, which see so many positions together."""
        for die, (count, context) in enumerate(zip(rows.tolist(), contexts.tolist(), strict=True)):
            if not count:
                continue
            key = (layer.moe is not None, count, context)
            if key not in self._stages:
                self._stages[key] = self._stages_of(layers, layer, cache, count, context)
            for stage in self._stages[key]:
                start = int(self.attention[die])
                self.attention[die] = start + stage.ns
                if self.trace.is_on:
                    self.trace.span(
                        self.dies[die].index, stage.core.upper(), stage.name, start, start + stage.ns
                    )

    def _stages_of(
        self, layers: Layers, layer: Layer, cache: KVCache, rows: int, context: int
    ) -> list[Stage]:
        work = dict(
            zip(
                ("MLAProlog", "MLA", "OProj"), layers.attention_work(layer, cache, rows, context), strict=True
            )
        )
        if layer.moe is not None:
            work["Gate"] = layers.gate_work(rows)
        elif layer.mlp is not None:
            work["MLP"] = linear_work(rows, layer.mlp.w13) + linear_work(rows, layer.mlp.w2)
        return [self._stage(layers, name, each) for name, each in work.items()]

    def _stage(self, layers: Layers, name: str, work: Work) -> Stage:
        core: Core = "aiv" if name in ("Gate", "Residual") else "aic"
        arithmetic: Arithmetic = "int8" if layers.is_int8 and name not in FLOAT_KERNELS else "bf16"
        return Stage(name, core, self.spec.kernel_ns(work.flops, work.nbytes, core, arithmetic=arithmetic))

    def come_back(self, dies: slice, ready_ns: int, rows: Ns, row_nbytes: int) -> None:
        """Wait for the answers, which left the trampolines at `ready_ns`, and add them."""
        bulk = (
            np.array([self.cost.bulk_ns(count * row_nbytes) for count in rows.tolist()])
            .round()
            .astype(np.int64)
        )
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
        bulk = (
            np.array([self.cost.bulk_ns(count * row_nbytes) for count in rows.tolist()])
            .round()
            .astype(np.int64)
        )
        self._spans(self.dies[dies], "XCCL", "A2E", start, start + bulk)
        self.attention[dies] = start + bulk
        return int(self.attention[dies].max(initial=0))

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

    def _spans(self, dies: Sequence[Die], lane: str, name: str, start: Ns, end: Ns) -> None:
        if self.trace.is_on:
            for die, first, last in zip(dies, start.tolist(), end.tolist(), strict=True):
                self.trace.span(die.index, lane, name, first, last)

    @property
    def experts_end_ns(self) -> int:
        """When the last answers have left the expert dies."""
        return self._sent
