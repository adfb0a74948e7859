"""Lockstep of dies with attention and a share of the experts.

Dispatch and combine of all dies at once are a twin of `comm`'s protocols, by pull or by push (CM 4.2.1).
PULL and PUSH have the same verbs: tables, layers, send, answer, collect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from xdeepserve.comm.cost import Op
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.run.lockstep import tables
from xdeepserve.engine.run.lockstep.dimensions import ExchangeShape, PushShape
from xdeepserve.engine.run.lockstep.expert_prices import ExpertPrices
from xdeepserve.engine.run.lockstep.kernels import attention as a
from xdeepserve.engine.run.lockstep.kernels import colocated_stages as d
from xdeepserve.engine.run.lockstep.kernels import experts as e
from xdeepserve.engine.run.lockstep.kernels import one_die
from xdeepserve.engine.run.lockstep.kernels import pushed_stages as p
from xdeepserve.engine.run.lockstep.lockstep import Call, Lockstep
from xdeepserve.engine.run.lockstep.shares import Contribution
from xdeepserve.engine.run.lockstep.timetable import Ns, Timetable
from xdeepserve.engine.walk.schedule import Visit
from xdeepserve.engine.ways.among.clock import RankLoad
from xdeepserve.engine.ways.among.real import ExchangeLayout
from xdeepserve.step.stage import Counts, LayerProgram, stages

ONE = np.ones(1, np.float32)  # the scale of rows that are not quantised


ATTENTION = ("MLAProlog", "MLA", "OProj")
UP_TO_GATE, TO_THE_END = (*ATTENTION, "Gate"), (*ATTENTION, "MLP")
UP_TO_EXPERTS = frozenset({UP_TO_GATE, (*UP_TO_GATE, "Route"), (*UP_TO_GATE, "Collect", "Route")})
ALONE = (*UP_TO_GATE, "Experts", "SharedExpert")  # all of a layer, where one die holds everything


class AmongTwin(NamedTuple):
    """Twin of dispatch and combine among all dies of a lockstep: its tables, and kernel calls.

    layers(g, layers)        a whole run of layers: passes, whether each has experts, event IDs
    send(g, event)           rows to the dies with their experts
    answer(g, at, event)     experts of pass `at` through a layer
    collect(g, at, event)    answers added to the dies' own rows
    """

    ops: tuple[str, str]  # names in errors
    meets: tuple[str, str]  # in Programs
    tables: Callable[[ColocatedLockstep, Group, Any], None]
    layers: Callable[[ColocatedLockstep, tuple[np.ndarray, ...]], Call]
    send: Callable[[ColocatedLockstep, int], Call]
    answer: Callable[[ColocatedLockstep, int, int], Call]
    collect: Callable[[ColocatedLockstep, int, int], Call]


class ColocatedLockstep(Lockstep):
    """Lockstep of dies with attention and experts, with dispatch and combine between all of them.

    `exchange` is None if there are no experts, or one die: then the computer's threads share its stages, in
    one call for all layers.
    """

    exchange: ExchangeShape | PushShape
    ways: np.ndarray  # tables of the exchange; by pull:
    orders: np.ndarray
    sents: np.ndarray
    ends: np.ndarray  # by push:
    local_idx: np.ndarray

    def __init__(
        self,
        executors: Sequence[Executor],
        exchange: tuple[Group, ExchangeLayout] | None,
        num_threads: int,
        twin: AmongTwin,
    ) -> None:
        super().__init__(executors, [f"rank {rank}" for rank in range(len(executors))], num_threads)
        self._exchange, self.twin = exchange, twin
        self.flags = 0  # rounds of pushed flags use two sets in turn (`comm.board`): the one used last
        met = {(meet,) for meet in twin.meets}
        self.kernels = UP_TO_EXPERTS | met | {TO_THE_END, ("Experts",), ("SharedExpert",)}
        if len(executors) == 1:
            self.kernels = frozenset({ALONE, TO_THE_END})

    def prepare(self) -> None:
        """Find the address tables of the exchange and of the experts."""
        first, num = self.executors[0], len(self.executors)
        config, mem = first.config, first.mem
        self.experts = np.stack(
            [tables.own_expert_table(self.executors, self.spaces, column) for column in self.columns]
        )
        self.timetable = Timetable(self.executors, self.shape.copies)
        if self._exchange is None:
            # No row leaves its die; the numbers of the exchange say what an expert takes.
            experts, top_k = len(mem.slots), config.num_experts_per_tok
            is_int8 = mem.recipe == "int8"
            own = Layout(1, mem.groups.max_slice, max(1, top_k), config.hidden_size, experts, is_int8)
            self.exchange = ExchangeShape.of(config, own, mem.placed)
            return
        group, layout = self._exchange
        self.twin.tables(self, group, layout)
        self.expert_rank = np.array(group.expert_rank, np.int64)
        self.copy_rank = None  # by rank, the die whose copy of the shared expert its tokens take
        if mem.placed.num_shared_dies:
            self.copy_rank = self.expert_rank[self.buffers[:, a.SHARED_EXPERT]]
        # By pass through a layer: rows [to, from], and faults of dispatch and of combine [2, rank].
        self.received = np.zeros((len(self.columns), num, num), np.int64)
        self.faults = np.zeros((len(self.columns), 2, num), np.int64)
        self.one = tables.address(ONE)
        self.sent = np.array(
            [tables.address(space.take("expert_sent", 1)) for space in self.spaces], np.int64
        )
        mems = [executor.mem for executor in self.executors]
        kinds = {
            at: [
                (layer.kind, each.is_shared, len(each.slots))
                for layer, each in zip(column, mems, strict=True)
            ]
            for at, column in enumerate(self.columns)
            if column[0].moe is not None
        }
        numbers = self.shape.top_k, mem.placed.num_primary_dies, first.die.spec
        self.prices = ExpertPrices(kinds, self._price_experts, *numbers)

    # ---- bytes --------------------------------------------------------------------------------------

    def compute(self, shares: Sequence[Contribution], visits: Sequence[Visit], passes: Sequence[int]) -> None:
        """Compute all bytes of a run.

        All layers are one call: threads that return to Python after each stage would wait for each other
        there, too.
        """
        if not self.staged.is_used:
            self._run_layers(visits, passes)
            return
        for visit, at in zip(visits, passes, strict=True):
            self.staged.run(at, visit.program, shares, self.columns[at], self.cuts[0])
            self._run_layers([visit], [at])

    def _run_layers(self, visits: Sequence[Visit], passes: Sequence[int]) -> None:
        is_moe = np.array([visit.layer.moe is not None for visit in visits])
        events = np.array([visit.event for visit in visits], np.int64)
        self.spread(self._layers(np.array(passes, np.int64), is_moe, events))

    def _layers(self, passes: np.ndarray, is_moe: np.ndarray, events: np.ndarray) -> list[Call]:
        """List the kernel calls for layers in order: passes, whether each has experts, and event IDs."""
        if len(self.executors) == 1:
            args = (self.shape, self.exchange.inter, self.buffers, self.weights, self.experts, passes, is_moe)
            return [(one_die.run_together, (*args, self.inputs, self.cuts[0][0, 1], self.scratch, self.sync))]
        if self._exchange is None:
            return [self.layer(at, self.cuts[0], False) for at in passes.tolist()]
        return [self.twin.layers(self, (passes, is_moe, events))]

    def exchange_rows(self, op: Op, at: int, event: int) -> None:
        """Make a dispatch with its experts, or a combine, in a pass of dies whose other stages are tasks."""
        if op == "dispatch":
            self.spread([self.twin.send(self, event)], [self.twin.answer(self, at, event)])
        else:
            self.spread([self.twin.collect(self, at, event)])
        which = int(op == "combine")
        self.check(self.faults[at, which], self.twin.ops[which], "rank", event)

    def check_faults(self, visits: Sequence[Visit], passes: Sequence[int]) -> None:
        """Raise ProtocolError for the first fault that a die has found, if there is any."""
        if self._exchange is None or not self.faults.any():
            return
        for visit, at in zip(visits, passes, strict=True):
            for faults, op in zip(self.faults[at], self.twin.ops, strict=True):
                self.check(faults, op, "rank", visit.event)

    # ---- time ---------------------------------------------------------------------------------------

    def experts_ns(self, microbatch: int, layers: Sequence[int]) -> Ns:
        """Price the experts of each die in passes through layers with experts [layers, 1, dies], in ns."""
        if self._exchange is None:
            return np.zeros((0, 1, len(self.executors)), np.int64)
        received = self.received[layers].sum(axis=2)[:, None]
        return self.prices.of(layers, received, self.copied()[None], self.rows.sum(keepdims=True))

    def loads(self, at: int) -> list[RankLoad]:
        """List the loads of all dies in a pass: rows received, and the work to bill for them.

        Rows for a copy of the shared expert are counted by themselves.
        """
        num_rows, loads = int(self.rows.sum()), []
        received, copied = self.received[at].sum(axis=1).tolist(), self.copied().tolist()
        for executor, num, shared in zip(self.executors, received, copied, strict=True):
            copies = self.prices.billed(num - shared, num_rows)
            loads.append(RankLoad(num, (copies, min(num - shared, len(executor.mem.slots)), shared)))
        return loads

    def _price_experts(self, at: int, rank: int, num_routed: int, num_shared: int, billed: float) -> float:
        """Return the time in ns of a die's experts in a pass, for rows that it has received."""
        executor, program = self.executors[rank], self._program(at, rank)
        stage = next(each for each in stages(program.feed) if each.rows == "received")
        touched = min(num_routed, len(executor.mem.slots))
        counts = Counts(num_routed + num_shared, copies=billed, touched=touched, shared=num_shared)
        return executor.runner.price_of(stage, self.columns[at][rank], counts)

    def _program(self, at: int, rank: int) -> LayerProgram:
        """Return the Program of a die in a pass."""
        executor = self.executors[rank]
        return executor.traversal.programs[executor.layer_index[id(self.columns[at][rank])]]

    @property
    def rows(self) -> np.ndarray:
        """Number of rows of each die in the run [R]."""
        return self.cuts[0][:, 1]

    def copied(self) -> np.ndarray:
        """Return how many rows of all dies each die's copy of the shared expert gets [R]."""
        copied = np.zeros_like(self.rows)
        if self.copy_rank is not None:
            np.add.at(copied, self.copy_rank, self.rows)
        return copied


# ---- twins ----------------------------------------------------------------------------------------------


def _pull_tables(g: ColocatedLockstep, group: Group, layout: Layout) -> None:
    first, num = g.executors[0], len(g.executors)
    g.exchange = ExchangeShape.of(first.config, layout, first.mem.placed)
    g.ways = tables.ways([executor.die for executor in g.executors], layout)
    g.orders = np.zeros((num, layout.max_tokens * layout.top_k), np.int64)
    g.sents = np.zeros((num, num), np.int64)


def _pull_layers(g: ColocatedLockstep, layers: tuple[np.ndarray, ...]) -> Call:
    own = (g.shape, g.exchange, g.buffers, g.beside, g.weights, g.experts)
    where = (g.inputs, g.cuts[0], g.ways, g.expert_rank, g.orders, g.sents, g.one)
    return d.run_layers, (*own, *layers, *where, g.sent, g.received, g.faults, g.scratch, g.sync)


def _pull_send(g: ColocatedLockstep, event: int) -> Call:
    args = (g.exchange, g.buffers, g.cuts[0], g.ways, g.expert_rank, event)
    return d.dispatch_stage, (*args, g.orders, g.sents, g.one)


def _pull_answer(g: ColocatedLockstep, at: int, event: int) -> Call:
    args = (g.exchange, g.ways[None], g.experts[at], g.sents[None], g.sent[None], g.received[at][None])
    return e.expert_stage, (*args, event, g.faults[at, :1])


def _pull_collect(g: ColocatedLockstep, at: int, event: int) -> Call:
    kept = (g.orders, g.sents, g.received[at], g.scratch, g.faults[at, 1], g.sync)
    return d.combine_stage, (*_rows(g, at), g.ways, event, *kept)


def _push_tables(g: ColocatedLockstep, group: Group, layout: FusedLayout) -> None:
    first, dies = g.executors[0], [executor.die for executor in g.executors]
    g.exchange = PushShape.of(first.config, layout, first.mem.placed)
    g.ends, g.ways = tables.ends(dies, layout), tables.no_ways(dies)
    g.local_idx = tables.local_numbers(group.expert_rank)
    g.flags = 0


def _push_layers(g: ColocatedLockstep, layers: tuple[np.ndarray, ...]) -> Call:
    own = (g.shape, g.exchange, g.buffers, g.beside, g.weights, g.experts)
    where = (g.inputs, g.cuts[0], g.ways, g.ends, g.expert_rank, g.local_idx)
    args = (*own, *layers, *where, g.flags ^ 1, g.one, g.sent, g.received, g.faults)
    g.flags ^= int(layers[1].sum()) % 2
    return p.run_layers, (*args, g.scratch, g.sync)


def _push_send(g: ColocatedLockstep, event: int) -> Call:
    g.flags ^= 1
    args = (g.exchange, g.buffers, g.cuts[0], g.ends, g.expert_rank, g.local_idx)
    return p.dispatch_stage, (*args, event, g.flags, g.one)


def _push_answer(g: ColocatedLockstep, at: int, event: int) -> Call:
    where = (g.expert_rank[None], g.local_idx[None])
    args = (g.exchange, g.ways[None], g.ends[None], g.experts[at], *where, g.sent[None])
    return p.expert_stage, (*args, g.received[at][None], event, g.flags, g.faults[at, :1])


def _push_collect(g: ColocatedLockstep, at: int, event: int) -> Call:
    return p.combine_stage, (*_rows(g, at), g.ends, g.faults[at, 1], g.sync)


def _rows(g: ColocatedLockstep, at: int) -> tuple[Any, ...]:
    """Return the arguments of a collection: the rows that it adds to, and the shared expert of the layer."""
    return g.shape, g.exchange, g.buffers, g.beside, g.weights[at], g.inputs, g.cuts[0]


PULL = AmongTwin(
    ("dispatch", "combine"),
    ("dispatch", "combine"),
    *(_pull_tables, _pull_layers, _pull_send, _pull_answer, _pull_collect),
)
PUSH = AmongTwin(
    ("fused dispatch", "fused combine"),
    ("fused_dispatch", "fused_combine"),
    *(_push_tables, _push_layers, _push_send, _push_answer, _push_collect),
)
