"""Lockstep of attention dies and expert dies: A2E and E2A, by microbatch and DP domain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from xdeepserve.comm.exchange.twin import NUM_RECEIVED
from xdeepserve.comm.trampoline import twin
from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.engine.deploy.sizes import ExpertSizes
from xdeepserve.engine.die.expert_memory import STOP
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.run.lockstep import tables
from xdeepserve.engine.run.lockstep.colocated import TO_THE_END, UP_TO_EXPERTS
from xdeepserve.engine.run.lockstep.dimensions import ExchangeShape, PushShape
from xdeepserve.engine.run.lockstep.expert_prices import ExpertPrices
from xdeepserve.engine.run.lockstep.kernels import disaggregated_stages as ends
from xdeepserve.engine.run.lockstep.kernels import experts as e
from xdeepserve.engine.run.lockstep.kernels import pushed_stages as p
from xdeepserve.engine.run.lockstep.lockstep import Call, Lockstep, Span
from xdeepserve.engine.run.lockstep.shares import Contribution
from xdeepserve.engine.run.lockstep.timetable import DisaggregatedTimetable, Ns
from xdeepserve.engine.walk.schedule import Visit
from xdeepserve.hw.clock import Process
from xdeepserve.model.config import ModelConfig

EXPERT_OPS = ("A2E", "A2E'", "E2A")  # which expert dies find faults in


class AwayTwin(NamedTuple):
    """Twin of the exchange among expert dies, between A2E and E2A', by pull or by push: kernel calls.

    forward(g, m, at, event)   tokens of a microbatch from trampolines to the dies with their experts
    answer(g, m, at, event)    experts of pass `at` through a layer
    back(g, m, at, event)      answers to the trampolines, and from there to attention dies
    """

    shape: Callable[[ModelConfig, A2ELayout, ExpertSizes], ExchangeShape | PushShape]
    forward: Callable[[DisaggregatedLockstep, int, int, int], Call]
    answer: Callable[[DisaggregatedLockstep, int, int, int], Call]
    back: Callable[[DisaggregatedLockstep, int, int, int], Call]


class DisaggregatedLockstep(Lockstep):
    """Lockstep of attention dies and expert dies, which `attend` and `serve` once a run."""

    kernels: frozenset[Span] = UP_TO_EXPERTS | frozenset({TO_THE_END, ("a2e",), ("e2a",), ("Residual",)})

    def __init__(
        self,
        executors: Sequence[Executor],
        programs: Sequence[ExpertProgram],
        layouts: Sequence[Sequence[A2ELayout]],
        shared_experts: Sequence[int | None],
        num_threads: int,
        twin: AwayTwin,
    ) -> None:
        self.twin = twin
        attention = [f"attention {rank}" for rank in range(len(executors))]
        experts = [f"expert {index}" for index in range(len(programs))]
        super().__init__(executors, attention + experts, num_threads)
        self.dies += [program.die for program in programs]
        self.programs, self.layouts = programs, layouts
        self.num_microbatches, self.num_domains = len(layouts), len(layouts[0])
        self._shared_experts, self._num_items = shared_experts, 0  # of the latest run, on each expert die

    async def serve(self, index: int) -> int:
        """Take an expert die's part in a run; return the number of items once its last answers have left.

        An item is a microbatch of a domain in a layer with experts.
        """
        await self.meet(len(self.executors) + index)
        return self._num_items

    @property
    def num_passes(self) -> int:
        """Number of passes of a step through layers with experts: one, and one more for each draft."""
        return 1 + self.executors[0].mem.steps.mtp

    def prepare(self) -> None:
        executors = self.executors
        self.exchange = self.twin.shape(executors[0].config, self.layouts[0][0], executors[0].mem.placed)
        self.flags = [0] * self.num_microbatches  # rounds of pushed flags use two sets in turn
        moe_layers = [i for i, column in enumerate(self.columns) if column[0].moe is not None]
        self.experts = {layer: tables.expert_table(self.programs, n) for n, layer in enumerate(moe_layers)}
        per_domain, num_experts = len(executors) // self.num_domains, len(self.programs)
        self.items = [
            tables.stacked(
                tables.item(
                    layout,
                    m * self.num_domains + d,
                    executors[d * per_domain : (d + 1) * per_domain],
                    self.programs,
                    self._shared_experts[d * per_domain : (d + 1) * per_domain],
                )
                for d, layout in enumerate(by_domain)
            )
            for m, by_domain in enumerate(self.layouts)
        ]
        self.ways = [each.attention.reshape(-1, twin.NUM_ATTENTION_COLUMNS) for each in self.items]
        dies = [program.die for program in self.programs]
        self.timetable = DisaggregatedTimetable(executors, self.exchange.copies, dies, self.num_domains)
        self._number_of = {at: number for number, at in enumerate(moe_layers)}
        kinds = {
            at: [
                (each.layers[number].kind, each.mem.is_shared, len(each.mem.slots)) for each in self.programs
            ]
            for at, number in self._number_of.items()
        }
        holders = self.programs[0].mem.placed.num_primary_dies
        numbers = self.shape.top_k, holders, self.timetable.spec
        self.prices = ExpertPrices(kinds, self._price_experts, *numbers)
        # By pass through a layer, and microbatch: what is wrong at the end of E2A', and of A2E, A2E' and E2A;
        # rows that expert dies have received.
        places = len(self.columns), self.num_microbatches
        self.attention_faults = np.zeros((*places, len(executors)), np.int64)
        self.expert_faults = np.zeros((*places, len(EXPERT_OPS), self.num_domains, num_experts), np.int64)
        self.received = np.zeros((*places, self.num_domains, num_experts), np.int64)

    # ---- bytes --------------------------------------------------------------------------------------

    def compute(self, shares: Sequence[Contribution], visits: Sequence[Visit], passes: Sequence[int]) -> None:
        """Compute all bytes of a run.

        Kernels that need no other die's bytes of the previous round join that round. Each wait between rounds
        takes as long as the work of some dies, so there are few.
        """
        rounds: list[list[Call]] = []
        after: list[Call] = []  # a microbatch's E2A, which the next one need not wait for
        away: list[list[Call]] = [[] for _ in range(self.num_microbatches)]  # what brings each one back
        self._num_items = 0
        for visit, at in zip(visits, passes, strict=True):
            is_moe = visit.layer.moe is not None
            for m in range(self.num_microbatches):
                if after and self.num_microbatches == 1:
                    rounds.append(after)
                    after = []
                if self.staged.is_used:
                    self.spread(*rounds, [*after, *away[m]])
                    rounds, after, away[m] = [], [], []
                    self.staged.run(at, visit.program, shares, self.columns[at], self.cuts[m], m)
                layer = self.layer(at, self.cuts[m], is_moe)
                rounds.append([*after, *away[m], layer])
                after, away[m] = [], []
                if is_moe:
                    rounds[-1].append(self._post(m, visit.event))
                    where = (self, m, at, visit.event)
                    rounds += [[self.twin.forward(*where)], [self.twin.answer(*where)]]
                    after = [
                        (_keep, (self.received[at, m], self.items[m].ways)),
                        self.twin.back(*where),
                    ]
                    away[m] = [self._come_back(m, at, visit.event)]
                    self._num_items += self.num_domains
        self.spread(*rounds, after, [call for calls in away for call in calls])

    def check_faults(self, visits: Sequence[Visit], passes: Sequence[int]) -> None:
        """Raise ProtocolError for the first fault that a die has found, if there is any."""
        if not self.expert_faults.any() and not self.attention_faults.any():
            return
        for visit, at in zip(visits, passes, strict=True):
            for m in range(self.num_microbatches):
                for faults, op in zip(self.expert_faults[at, m], EXPERT_OPS, strict=True):
                    for of_domain in faults:
                        self.check(of_domain, op, "expert", visit.event)
            for m in range(self.num_microbatches):
                self.check(self.attention_faults[at, m], "E2A'", "attention", visit.event)

    def _post(self, m: int, event: int) -> Call:
        return ends.post_stage, (self.exchange, self.buffers, self.cuts[m], self.ways[m], event)

    def _come_back(self, m: int, at: int, event: int) -> Call:
        args = (self.exchange, self.inputs, self.cuts[m], self.ways[m], event)
        return ends.come_back_stage, (*args, self.attention_faults[at, m])

    # ---- time ---------------------------------------------------------------------------------------

    def experts_ns(self, microbatch: int, layers: Sequence[int]) -> Ns:
        """Price the experts of each die for each domain's tokens, [layers, domains, expert dies] in ns."""
        item, cuts = self.items[microbatch], self.cuts[microbatch]
        rows = (cuts[:, 1] - cuts[:, 0]).reshape(self.num_domains, -1)
        copied = np.zeros(item.sent.shape, np.int64)  # rows for a copy of the shared expert
        if self.exchange.copies > self.exchange.top_k:
            for d in range(self.num_domains):
                dies = item.expert_rank[d, item.attention[d, :, twin.SHARED_EXPERT]]
                np.add.at(copied[d], dies, rows[d])
        return self.prices.of(layers, self.received[layers, microbatch], copied, rows.sum(axis=1))

    def _price_experts(self, at: int, index: int, num_routed: int, num_shared: int, billed: float) -> float:
        """Return the time in ns of a die's experts in a pass, for rows that it has received."""
        return self.programs[index].price(num_routed, num_shared, billed, self._number_of[at])


def _keep(received: np.ndarray, ways: np.ndarray, worker: int, num: int) -> None:
    """Copy the rows received [domains, expert dies] before the next layer overwrites their counts."""
    if worker == 0:
        received[:] = ways[:, :, NUM_RECEIVED]


# ---- twins ----------------------------------------------------------------------------------------------


def _pull_forward(g: DisaggregatedLockstep, m: int, at: int, event: int) -> Call:
    item = g.items[m]
    args = (g.exchange, item.ways, item.served, item.bounds, item.bases, item.expert_rank, event)
    return twin.a2e_stage, (*args, item.counts, item.orders, item.sents, g.expert_faults[at, m, 0])


def _pull_answer(g: DisaggregatedLockstep, m: int, at: int, event: int) -> Call:
    item = g.items[m]
    args = (g.exchange, item.ways, g.experts[at], item.sents, item.sent, item.received, event)
    return e.expert_stage, (*args, g.expert_faults[at, m, 1])


def _pull_back(g: DisaggregatedLockstep, m: int, at: int, event: int) -> Call:
    item = g.items[m]
    args = (g.exchange, item.ways, item.served, item.bounds, item.answer_fields, event)
    kept = (item.counts, item.orders, item.sents, item.received)
    return twin.e2a_stage, (*args, *kept, g.expert_faults[at, m, 2])


def _push_forward(g: DisaggregatedLockstep, m: int, at: int, event: int) -> Call:
    g.flags[m] ^= 1
    item = g.items[m]
    args = (g.exchange, item.ways, item.ends, item.served, item.bounds, item.bases, item.expert_rank)
    faults = g.expert_faults[at, m, 0]
    return p.forward_stage, (*args, item.local_idx, event, g.flags[m], item.counts, faults)


def _push_answer(g: DisaggregatedLockstep, m: int, at: int, event: int) -> Call:
    item = g.items[m]
    args = (g.exchange, item.ways, item.ends, g.experts[at], item.expert_rank, item.local_idx)
    faults = g.expert_faults[at, m, 1]
    return p.expert_stage, (*args, item.sent, item.received, event, g.flags[m], faults)


def _push_back(g: DisaggregatedLockstep, m: int, at: int, event: int) -> Call:
    item = g.items[m]
    args = (g.exchange, item.ways, item.ends, item.served, item.bounds, item.answer_fields, event)
    return p.back_stage, (*args, item.counts, g.expert_faults[at, m, 2])


PULL_APART = AwayTwin(ExchangeShape.of_a2e, _pull_forward, _pull_answer, _pull_back)
PUSH_APART = AwayTwin(PushShape.of_a2e, _push_forward, _push_answer, _push_back)


# The program of an expert die in lockstep, which meets the others for what its kernels do.


class LockstepExpertProgram(ExpertProgram):
    """Program of an expert die in lockstep: it waits at the doorbell, then meets the others for each run.

    Its three persistent kernels are rows of a timetable here, not tasks. Their flags count items all the
    same, as many as a run has had.
    """

    lockstep: DisaggregatedLockstep
    index: int

    def start_streams(self) -> list[Process]:
        """Start a process for the meetings, in place of the three kernels."""
        return [self._spawn(self._meet, "experts")]

    async def _meet(self) -> None:
        """Serve step after step until the doorbell says stop."""
        step, memory, mem = self._first_step, self.die.memory, self.mem
        num_items = step * self._items_per_step
        while await mem.doorbell.reaches(self.die, step + 1) != STOP:
            for _ in range(self.lockstep.num_passes):
                num_items += await self.lockstep.serve(self.index)
                for flag in (mem.received, mem.computed, mem.sent):
                    flag.write(memory, num_items)
            step += 1
        for flag in (mem.received, mem.computed):
            flag.write(memory, STOP)

    @property
    def _items_per_step(self) -> int:
        return len(self.layers) * self.lockstep.num_microbatches * self.lockstep.num_domains
