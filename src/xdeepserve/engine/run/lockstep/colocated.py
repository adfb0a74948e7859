"""Lockstep of dies with attention and a share of the experts.

Dispatch and combine of all dies at once are a twin of `comm`'s protocols, by pull or by push (CM 4.2.1).
PULL and PUSH have the same verbs: tables, layers, send, answer, collect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from xdeepserve.comm.cost import Op
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.run.lockstep import tables
from xdeepserve.engine.run.lockstep.dimensions import ExchangeShape, PushShape
from xdeepserve.engine.run.lockstep.kernels import attention as a
from xdeepserve.engine.run.lockstep.kernels import colocated_stages as d
from xdeepserve.engine.run.lockstep.kernels import experts as e
from xdeepserve.engine.run.lockstep.kernels import one_die
from xdeepserve.engine.run.lockstep.kernels import pushed_stages as p
from xdeepserve.engine.run.lockstep.lockstep import Call, Contribution, Lockstep, RowCounts, addresses
from xdeepserve.engine.run.lockstep.timetable import Timed, Timetable
from xdeepserve.engine.walk.schedule import Visit
from xdeepserve.step.stage import Counts, Meet, Stage

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
        exchange: tuple[Group, Layout | FusedLayout] | None,
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
        dies = [executor.die for executor in self.executors]
        self.timetable = Timetable(dies, config.hidden_size, mem.walk.exchange)
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
        kinds = np.array([(each.is_shared, len(each.slots)) for each in mems])
        _, self.examples, self.kinds = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
        self.kinds = self.kinds.reshape(-1)  # of dies, by their experts; `examples` has a rank of each

    def run(self, shares: Sequence[Contribution], came: np.ndarray) -> np.ndarray:
        """Run all layers for all dies, which arrived at `came` [members] in ns; return when each is done, in
        ns."""
        rows = np.array([len(share.h) for share in shares], np.int64)
        self.inputs = addresses(shares)
        self.cuts = np.stack([np.zeros_like(rows), rows], axis=1)
        visits = shares[0].visits()
        passes = [self.pass_of(visit.cache) for visit in visits]
        self._compute(shares, visits, passes)
        if self._exchange is not None:
            self._check(visits, passes)
        self.timetable.begin(came)
        self.tell_time(shares, visits, passes)
        return self.timetable.attention

    # ---- bytes --------------------------------------------------------------------------------------

    def _compute(
        self, shares: Sequence[Contribution], visits: Sequence[Visit], passes: Sequence[int]
    ) -> None:
        """Compute all bytes of a run. The first die's layers and event IDs hold for all.

        All layers are one call: threads that return to Python after each stage would wait for each other
        there, too. Faults and virtual time are looked at when all layers are done.
        """
        if not self.staged.is_used:
            self._run_layers(visits, passes)
            return
        for visit, at in zip(visits, passes, strict=True):
            self.staged.run(at, visit.program, shares, self.columns[at], self.cuts)
            self._run_layers([visit], [at])

    def _run_layers(self, visits: Sequence[Visit], passes: Sequence[int]) -> None:
        is_moe = np.array([visit.layer.moe is not None for visit in visits])
        events = np.array([visit.event for visit in visits], np.int64)
        self.spread(self._layers(np.array(passes, np.int64), is_moe, events))

    def _layers(self, passes: np.ndarray, is_moe: np.ndarray, events: np.ndarray) -> list[Call]:
        """List the kernel calls for layers in order: passes, whether each has experts, and event IDs."""
        if len(self.executors) == 1:
            args = (self.shape, self.exchange.inter, self.buffers, self.weights, self.experts, passes, is_moe)
            return [(one_die.run_together, (*args, self.inputs, self.cuts[0, 1], self.scratch, self.sync))]
        if self._exchange is None:
            return [self.layer(at, self.cuts, False) for at in passes.tolist()]
        return [self.twin.layers(self, (passes, is_moe, events))]

    def _check(self, visits: Sequence[Visit], passes: Sequence[int]) -> None:
        """Raise ProtocolError for the first fault that a die has found, if there is any."""
        if not self.faults.any():
            return
        for visit, at in zip(visits, passes, strict=True):
            for faults, op in zip(self.faults[at], self.twin.ops, strict=True):
                self.check(faults, op, "rank", visit.event)

    # ---- time ---------------------------------------------------------------------------------------

    def tell_time(
        self, shares: Sequence[Contribution], visits: Sequence[Visit], passes: Sequence[int]
    ) -> None:
        """Compute when the stages happen in virtual time, by a walk through the same Programs."""
        tt = self.timetable
        known: dict[int, list[Timed]] = {}  # by Program, the stages on a die's own rows
        rows = self.cuts[:, 1]
        counts, batch = RowCounts.of(shares, self.cuts), int(rows.max())
        exchange_ns = functools.cache(lambda op: self.exchange_ns(op, batch))
        for visit, at in zip(visits, passes, strict=True):
            tt.drawing.at(layer=visit.layer_idx)
            items = (*visit.program.attention, *visit.program.feed)
            own = known.get(id(visit.program))
            if own is None:
                stages = [item for item in items if isinstance(item, Stage) and item.rows != "received"]
                own = known[id(visit.program)] = [self.price(stage, visit.layer, counts) for stage in stages]
            if len(own) == len(items):
                tt.stages(own)
                continue
            rest = iter(own)
            for item in items:
                if isinstance(item, Meet):
                    op: Op = "dispatch" if "dispatch" in item.op else "combine"
                    tt.meet(item.op.replace("_", " "), exchange_ns(op))
                elif item.rows == "received":
                    tt.stages([self._time_experts(item, visit, rows, self.received[at].sum(axis=1))])
                else:
                    tt.stages([next(rest)])

    def _time_experts(self, stage: Stage, visit: Visit, rows: np.ndarray, received: np.ndarray) -> Timed:
        """Price the routed experts of each die, for the copies that it has received [R].

        `rows` [R] are the rows of all dies. Dies of one kind take equally long for equal copies.
        """
        copied = self.copied(rows)
        cases = np.stack([self.kinds, received, copied], axis=1)
        few, of_die = np.unique(cases, axis=0, return_inverse=True)
        prices = [
            self._price_experts(self.examples[kind], stage, visit, count, shared, rows) if count else 0
            for kind, count, shared in few.tolist()
        ]
        return Timed(stage.name, stage.core, np.array(prices, np.int64)[of_die.reshape(-1)])

    def _price_experts(
        self, rank: int, stage: Stage, visit: Visit, received: int, copied: int, rows: np.ndarray
    ) -> int:
        """Return the time in ns of a die's routed experts, and of its copy of the shared one."""
        executor, layer = self.executors[rank], visit.layer
        if executor.mem.is_shared:  # its Program is another one
            program = executor.traversal.programs[self.executors[0].layer_index[id(layer)]]
            layer = self.columns[self.pass_of(visit.cache)][rank]
            stage = next(each for each in program.feed if isinstance(each, Stage) and each.rows == "received")
        counts = self.billed(rank, received, copied, rows)
        return round(executor.runner.price_of(stage, layer, counts))

    def copied(self, rows: np.ndarray) -> np.ndarray:
        """Return how many of all dies' `rows` [R] each die's copy of the shared expert gets [R]."""
        copied = np.zeros_like(rows)
        if self.copy_rank is not None:
            np.add.at(copied, self.copy_rank, rows)
        return copied

    def billed(self, rank: int, received: int, copied: int, rows: np.ndarray) -> Counts:
        """Return the work to bill to a die that has received `received` token copies.

        `rows` [R] are the rows of all dies. Of the copies, `copied` are for the die's copy of the shared
        expert; they are counted by themselves.
        """
        executor, routed = self.executors[rank], received - copied
        mean = int(rows.sum()) * self.shape.top_k / executor.mem.placed.num_primary_dies
        copies = self.timetable.spec.billed_copies(routed, mean)
        return Counts(received, copies=copies, touched=min(routed, len(executor.mem.slots)), shared=copied)

    def exchange_ns(self, op: Op, batch: int) -> int:
        """Return the time in ns of a dispatch or combine of all dies; the fullest die has `batch` rows."""
        tt = self.timetable
        stretch = tt.spec.barrier_stretch.value
        return round(tt.cost.exchange_ns(op, len(self.dies), batch, self.shape.copies, stretch))


# ---- twins ----------------------------------------------------------------------------------------------


def _pull_tables(g: ColocatedLockstep, group: Group, layout: Layout) -> None:
    first, num = g.executors[0], len(g.executors)
    g.exchange = ExchangeShape.of(first.config, layout, first.mem.placed)
    g.ways = tables.ways([executor.die for executor in g.executors], layout)
    g.orders = np.zeros((num, layout.max_tokens * layout.top_k), np.int64)
    g.sents = np.zeros((num, num), np.int64)


def _pull_layers(g: ColocatedLockstep, layers: tuple[np.ndarray, ...]) -> Call:
    own = (g.shape, g.exchange, g.buffers, g.beside, g.weights, g.experts)
    where = (g.inputs, g.cuts, g.ways, g.expert_rank, g.orders, g.sents, g.one)
    return d.run_layers, (*own, *layers, *where, g.sent, g.received, g.faults, g.scratch, g.sync)


def _pull_send(g: ColocatedLockstep, event: int) -> Call:
    args = (g.exchange, g.buffers, g.cuts, g.ways, g.expert_rank, event)
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
    where = (g.inputs, g.cuts, g.ways, g.ends, g.expert_rank, g.local_idx)
    args = (*own, *layers, *where, g.flags ^ 1, g.one, g.sent, g.received, g.faults)
    g.flags ^= int(layers[1].sum()) % 2
    return p.run_layers, (*args, g.scratch, g.sync)


def _push_send(g: ColocatedLockstep, event: int) -> Call:
    g.flags ^= 1
    args = (g.exchange, g.buffers, g.cuts, g.ends, g.expert_rank, g.local_idx)
    return p.dispatch_stage, (*args, event, g.flags, g.one)


def _push_answer(g: ColocatedLockstep, at: int, event: int) -> Call:
    where = (g.expert_rank[None], g.local_idx[None])
    args = (g.exchange, g.ways[None], g.ends[None], g.experts[at], *where, g.sent[None])
    return p.expert_stage, (*args, g.received[at][None], event, g.flags, g.faults[at, :1])


def _push_collect(g: ColocatedLockstep, at: int, event: int) -> Call:
    return p.combine_stage, (*_rows(g, at), g.ends, g.faults[at, 1], g.sync)


def _rows(g: ColocatedLockstep, at: int) -> tuple[Any, ...]:
    """Return the arguments of a collection: the rows that it adds to, and the shared expert of the layer."""
    return g.shape, g.exchange, g.buffers, g.beside, g.weights[at], g.inputs, g.cuts


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
