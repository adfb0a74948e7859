"""Lockstep with exchange by push (CloudMatrix 4.2.1): experts on attention dies or on dies of their own."""

from __future__ import annotations

import numpy as np

from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.engine.run.lockstep import tables
from xdeepserve.engine.run.lockstep.colocated import TO_THE_END, UP_TO_EXPERTS, ColocatedLockstep
from xdeepserve.engine.run.lockstep.dimensions import PushShape
from xdeepserve.engine.run.lockstep.disaggregated import DisaggregatedLockstep
from xdeepserve.engine.run.lockstep.kernels import pushed_stages as p
from xdeepserve.engine.run.lockstep.lockstep import Call, Span

# Rounds of dispatch flags use two sets in turn (`comm.board`), from the second one on.


class PushingLockstep(ColocatedLockstep):
    """Lockstep with FusedDispatch and FusedCombine between all dies."""

    kernels: frozenset[Span] = UP_TO_EXPERTS | frozenset(
        {TO_THE_END, ("fused_dispatch",), ("Experts",), ("fused_combine",), ("SharedExpert",)}
    )
    ops = "fused dispatch", "fused combine"

    def connect(self, group: Group, layout: Layout | FusedLayout) -> None:
        """Find the address tables of the exchange."""
        assert isinstance(layout, FusedLayout)
        first, dies = self.executors[0], [executor.die for executor in self.executors]
        self.exchange = PushShape.of(first.config, layout, first.mem.placed)
        self.ends, self.ways = tables.ends(dies, layout), tables.no_ways(dies)
        self.local_idx = tables.local_numbers(group.expert_rank)
        self.flags = 0  # the set that was used last

    def _with_exchanges(self, layers: tuple[np.ndarray, ...]) -> Call:
        own = (self.shape, self.exchange, self.buffers, self.beside, self.weights, self.experts)
        where = (self.inputs, self.cuts, self.ways, self.ends, self.expert_rank, self.local_idx)
        args = (*own, *layers, *where, self.flags ^ 1, self.one, self.sent, self.received, self.faults)
        self.flags ^= int(layers[1].sum()) % 2
        return p.run_layers, (*args, self.scratch, self.sync)


class PushingExpertsLockstep(DisaggregatedLockstep):
    """Lockstep with FusedDispatch and FusedCombine among the expert dies, between A2E and E2A'."""

    def prepare(self) -> None:
        """Find the address tables, and reset the flag set of each microbatch."""
        super().prepare()
        self._sets = [0] * self.num_microbatches

    def shape_of_exchange(self) -> PushShape:
        """Return the dimensions of the exchange between dies with experts."""
        first = self.executors[0]
        return PushShape.of_a2e(first.config, self.layouts[0][0], first.mem.placed)

    def _a2e(self, m: int, at: int, event: int) -> Call:
        self._sets[m] ^= 1
        item = self.items[m]
        args = (self.exchange, item.ways, item.ends, item.served, item.bounds, item.bases, item.expert_rank)
        faults = self.expert_faults[at, m, 0]
        return p.forward_stage, (*args, item.local_idx, event, self._sets[m], item.counts, faults)

    def _run_experts(self, m: int, at: int, event: int) -> Call:
        item = self.items[m]
        args = (self.exchange, item.ways, item.ends, self.experts[at], item.expert_rank, item.local_idx)
        faults = self.expert_faults[at, m, 1]
        return p.expert_stage, (*args, item.sent, item.received, event, self._sets[m], faults)

    def _e2a(self, m: int, at: int, event: int) -> Call:
        item = self.items[m]
        args = (self.exchange, item.ways, item.ends, item.served, item.bounds, item.answer_fields, event)
        return p.back_stage, (*args, item.counts, self.expert_faults[at, m, 2])
