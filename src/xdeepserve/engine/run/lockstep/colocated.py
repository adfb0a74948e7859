"""Lockstep of dies with attention and a share of the experts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from xdeepserve.comm.cost import Op
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.comm.fused.layout import FusedLayout
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.run.lockstep import tables
from xdeepserve.engine.run.lockstep.dimensions import ExchangeShape, PushShape
from xdeepserve.engine.run.lockstep.kernels import attention as a
from xdeepserve.engine.run.lockstep.kernels import colocated_stages as d
from xdeepserve.engine.run.lockstep.kernels import one_die
from xdeepserve.engine.run.lockstep.lockstep import Call, Contribution, Lockstep, Span, addresses
from xdeepserve.engine.run.lockstep.timetable import Timed, Timetable
from xdeepserve.engine.walk.schedule import Visit
from xdeepserve.step.stage import Counts, Meet, Stage

ONE = np.ones(1, np.float32)  # the scale of rows that are not quantised


ATTENTION = ("MLAProlog", "MLA", "OProj")
UP_TO_GATE, TO_THE_END = (*ATTENTION, "Gate"), (*ATTENTION, "MLP")
UP_TO_EXPERTS = frozenset({UP_TO_GATE, (*UP_TO_GATE, "Route"), (*UP_TO_GATE, "Collect", "Route")})
ALONE = (*UP_TO_GATE, "Experts", "SharedExpert")  # all of a layer, where one die holds everything


class ColocatedLockstep(Lockstep):
    """Lockstep of dies with attention and experts, with dispatch and combine between all of them.

    `exchange` is None if there are no experts, or one die.
    """

    kernels: frozenset[Span] = UP_TO_EXPERTS | frozenset(
        {TO_THE_END, ("dispatch",), ("Experts",), ("combine",), ("SharedExpert",)}
    )
    ops: tuple[str, str] = "dispatch", "combine"
    exchange: ExchangeShape | PushShape

    def __init__(
        self,
        executors: Sequence[Executor],
        exchange: tuple[Group, Layout | FusedLayout] | None,
        num_threads: int,
    ) -> None:
        super().__init__(executors, [f"rank {rank}" for rank in range(len(executors))], num_threads)
        self._exchange = exchange

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
        self.connect(group, layout)
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

    def connect(self, group: Group, layout: Layout | FusedLayout) -> None:
        """Find the address tables of the exchange."""
        assert isinstance(layout, Layout)
        first, num = self.executors[0], len(self.executors)
        self.exchange = ExchangeShape.of(first.config, layout, first.mem.placed)
        self.ways = tables.ways([executor.die for executor in self.executors], layout)
        self.orders = np.zeros((num, layout.max_tokens * layout.top_k), np.int64)
        self.sents = np.zeros((num, num), np.int64)

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
        if self._exchange is None:
            return [self.layer(at, self.cuts, False, at == passes[-1]) for at in passes.tolist()]
        return [self._with_exchanges((passes, is_moe, events))]

    def _with_exchanges(self, layers: tuple[np.ndarray, ...]) -> Call:
        own = (self.shape, self.exchange, self.buffers, self.beside, self.weights, self.experts)
        where = (self.inputs, self.cuts, self.ways, self.expert_rank, self.orders, self.sents, self.one)
        args = (*own, *layers, *where, self.sent, self.received, self.faults, self.scratch, self.sync)
        return d.run_layers, args

    def _check(self, visits: Sequence[Visit], passes: Sequence[int]) -> None:
        """Raise ProtocolError for the first fault that a die has found, if there is any."""
        if not self.faults.any():
            return
        for visit, at in zip(visits, passes, strict=True):
            for faults, op in zip(self.faults[at], self.ops, strict=True):
                self.check(faults, op, "rank", visit.event)

    # ---- time ---------------------------------------------------------------------------------------

    def tell_time(
        self, shares: Sequence[Contribution], visits: Sequence[Visit], passes: Sequence[int]
    ) -> None:
        """Compute when the stages happen in virtual time, by a walk through the same Programs."""
        tt = self.timetable
        known: dict[int, list[Timed]] = {}  # by Program, the stages on a die's own rows
        batch = max(len(share.h) for share in shares)
        exchange_ns = functools.cache(lambda op: self.exchange_ns(op, batch))
        for visit, at in zip(visits, passes, strict=True):
            tt.drawing.at(layer=visit.layer_idx)
            items = (*visit.program.attention, *visit.program.feed)
            own = known.get(id(visit.program))
            if own is None:
                stages = [item for item in items if isinstance(item, Stage) and item.rows != "received"]
                own = known[id(visit.program)] = [self._time(stage, visit, shares) for stage in stages]
            if len(own) == len(items):
                tt.stages(own)
                continue
            rest = iter(own)
            for item in items:
                if isinstance(item, Meet):
                    op: Op = "dispatch" if "dispatch" in item.op else "combine"
                    tt.meet(item.op.replace("_", " "), exchange_ns(op))
                elif item.rows == "received":
                    tt.stages([self._time_experts(item, visit, shares, self.received[at].sum(axis=1))])
                else:
                    tt.stages([next(rest)])

    def _time(self, stage: Stage, visit: Visit, shares: Sequence[Contribution]) -> Timed:
        """Price a stage on each die's own rows."""
        runner, ns = self.executors[0].runner, np.zeros(len(shares), np.int64)
        copies_of = self.shape.top_k if stage.name == "Experts" else 0
        for rank, (h, _, batch) in enumerate(shares):
            if len(h):
                copies = len(h) * copies_of
                touched = min(copies, len(self.executors[rank].mem.slots)) if copies else 0
                counts = Counts(len(h), batch.context, batch.kv_tokens, copies, touched)
                ns[rank] = round(runner.price_of(stage, visit.layer, counts))
        return Timed(stage.name, stage.core, ns)

    def _time_experts(
        self, stage: Stage, visit: Visit, shares: Sequence[Contribution], received: np.ndarray
    ) -> Timed:
        """Price the routed experts of each die, for the copies that it has received [R]."""
        first, rows = self.executors[0], np.array([len(share.h) for share in shares])
        index, ns = first.layer_index[id(visit.layer)], np.zeros(len(shares), np.int64)
        for rank, count in enumerate(received.tolist()):
            if count:
                executor, counts = self.executors[rank], self.billed(rank, count, rows)
                if executor.mem.is_shared:  # its Program is another one
                    layer = self.columns[self.pass_of(visit.cache)][rank]
                    own = next(
                        each
                        for each in executor.traversal.programs[index].feed
                        if isinstance(each, Stage) and each.rows == "received"
                    )
                    ns[rank] = round(executor.runner.price_of(own, layer, counts))
                else:
                    ns[rank] = round(first.runner.price_of(stage, visit.layer, counts))
        return Timed(stage.name, stage.core, ns)

    def billed(self, rank: int, received: int, rows: np.ndarray) -> Counts:
        """Return the work to bill to a die that has received `received` token copies.

        `rows` [R] are the rows of all dies. Copies for the die's shared expert are counted by themselves.
        """
        copied = 0 if self.copy_rank is None else int(rows[self.copy_rank == rank].sum())
        executor, routed = self.executors[rank], received - copied
        mean = int(rows.sum()) * self.shape.top_k / executor.mem.placed.num_primary_dies
        copies = self.timetable.spec.billed_copies(routed, mean)
        return Counts(received, copies=copies, touched=min(routed, len(executor.mem.slots)), shared=copied)

    def exchange_ns(self, op: Op, batch: int) -> int:
        """Return the time in ns of a dispatch or combine of all dies; the fullest die has `batch` rows."""
        tt = self.timetable
        stretch = tt.spec.barrier_stretch.value
        return round(tt.cost.exchange_ns(op, len(self.dies), batch, self.shape.copies, stretch))


# A run on one die that holds everything: one call for all layers, whose stages threads share.


class MonolithicLockstep(ColocatedLockstep):
    """Lockstep of a single die that holds everything; the computer's threads share its stages."""

    kernels: frozenset[Span] = frozenset({ALONE, TO_THE_END})

    def _layers(self, passes: np.ndarray, is_moe: np.ndarray, events: np.ndarray) -> list[Call]:
        args = (self.shape, self.exchange.inter, self.buffers, self.weights, self.experts, passes, is_moe)
        return [(one_die.run_together, (*args, self.inputs, self.cuts[0, 1], self.scratch, self.sync))]
