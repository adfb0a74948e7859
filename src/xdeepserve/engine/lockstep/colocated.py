"""A run where each die has attention and a share of the experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdeepserve.comm.cost import CommCost
from xdeepserve.comm.exchange.layout import Group, Layout
from xdeepserve.engine.lockstep import tables
from xdeepserve.engine.lockstep.gang import Gang, Share, Stage, addresses
from xdeepserve.engine.lockstep.kernels import attention as a
from xdeepserve.engine.lockstep.kernels import colocated_stages as d
from xdeepserve.engine.lockstep.kernels import experts as e
from xdeepserve.engine.lockstep.shapes import ExchangeShape
from xdeepserve.engine.lockstep.timetable import ColocatedTimetable
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.hw.spec import Arithmetic
from xdeepserve.model.tensors import Layer, MoE

ONE = np.ones(1, np.float32)  # the scale of rows that are not quantised


class ColocatedGang(Gang):
    """Dispatch and combine between all dies. `exchange` is None if there are no experts, or one die."""

    def __init__(
        self, executors: Sequence[Executor], exchange: tuple[Group, Layout] | None, num_threads: int
    ) -> None:
        super().__init__(executors, [f"rank {rank}" for rank in range(len(executors))], num_threads)
        self._exchange = exchange

    def prepare(self) -> None:
        first, num = self.executors[0], len(self.executors)
        config, sizes = first.config, first.mem.sizes
        self.experts = {
            at: tables.own_expert_table(self.executors, column)
            for at, column in enumerate(self.columns)
            if column[0].moe is not None
        }
        dies = [executor.die for executor in self.executors]
        cost = CommCost(first.die.spec, first.die.fabric.topology)
        self.timetable = ColocatedTimetable(dies, cost)
        self._expert_ns: dict[tuple[int, int], int] = {}
        if self._exchange is None:
            # No row leaves its die; the numbers of the exchange say what an expert takes.
            experts, top_k = len(first.mem.slots), config.num_experts_per_tok
            layout = Layout(
                1, sizes.max_slice, max(1, top_k), config.hidden_size, experts, first.layers.is_int8
            )
            self.exchange = ExchangeShape.of(config, layout)
            return
        group, layout = self._exchange
        self.exchange = ExchangeShape.of(config, layout)
        self.ways = tables.ways(dies, layout)
        self.expert_rank = np.array(group.expert_rank, np.int64)
        self.orders = np.zeros((num, layout.max_tokens * layout.top_k), np.int64)
        self.sents = np.zeros((num, num), np.int64)
        # By pass through a layer: rows [to, from], and faults of dispatch and of combine [2, rank].
        self.received = np.zeros((len(self.columns), num, num), np.int64)
        self.faults = np.zeros((len(self.columns), 2, num), np.int64)
        self.one = tables.address(ONE)
        self.sent = np.array(
            [tables.address(executor.ws.take("expert_sent", 1)) for executor in self.executors], np.int64
        )

    def run(self, shares: Sequence[Share], came: np.ndarray) -> np.ndarray:
        """See `Gang.run`."""
        first = shares[0]
        rows = np.array([len(share.h) for share in shares], np.int64)
        self.place(shares)
        passes = [self.pass_of(cache) for cache in first.caches]
        self._compute(first, passes)
        if self._exchange is not None:
            self._check(first, passes)
        self._tell_time(first, passes, came, rows, np.array([share.batch.context for share in shares]))
        return self.timetable.attention

    def place(self, shares: Sequence[Share]) -> None:
        """Find what the dies bring, and which rows of it."""
        rows = np.array([len(share.h) for share in shares], np.int64)
        self.inputs = addresses(shares)
        self.cuts = np.stack([np.zeros_like(rows), rows], axis=1)

    def _compute(self, share: Share, passes: Sequence[int]) -> None:
        """All bytes. What `share` says of layers and events holds for all dies.

        The kernels leave nothing in this computer's caches, so Python is slow between them: what can wait, as
        faults and virtual time can, is looked at when all are done.
        """
        event = share.first_event
        after: list[Stage] = []  # what each die does next, with its own bytes only
        for layer, at in zip(share.layers, passes, strict=True):
            after.append(self._attention(at, layer))
            if layer.moe is None:
                continue
            self.spread(*after, self._dispatch(event))
            self.spread(self._run_experts(at, event))
            after = [self._combine(at, event)]
            event += 1
        self.spread(*after)

    def _check(self, share: Share, passes: Sequence[int]) -> None:
        """ProtocolError if a die has found a fault: the first one."""
        if not self.faults.any():
            return
        exchanges = [at for layer, at in zip(share.layers, passes, strict=True) if layer.moe is not None]
        for event, at in enumerate(exchanges, share.first_event):
            for faults, op in zip(self.faults[at], ("dispatch", "combine"), strict=True):
                self.check(faults, op, "rank", event)

    def _tell_time(
        self, share: Share, passes: Sequence[int], came: np.ndarray, rows: np.ndarray, contexts: np.ndarray
    ) -> None:
        """When the stages happen. rows, contexts [R]: of each die, and the positions that they see."""
        tt, layers, top_k = self.timetable, self.executors[0].layers, self.shape.top_k
        tt.begin(came)
        stages = tt.stages_by_kind(layers, share.layers, share.caches, rows, contexts)
        exchange_ns = round(tt.cost.exchange_ns(len(rows), int(rows.max()), top_k))
        shared_ns = next((tt.shared_ns(layers, each.moe, rows) for each in share.layers if each.moe), rows)
        for layer, at in zip(share.layers, passes, strict=True):
            tt.drawing.at(layer=self.executors[0].layer_index[id(layer)])
            tt.layer(stages[layer.moe is not None])
            if layer.moe is None:
                continue
            if self._exchange is None:
                tt.compute("Experts", self._experts_ns(rows * top_k, layer.moe))
            else:
                tt.meet("dispatch", exchange_ns)
                tt.compute("Experts", self._experts_ns(self.received[at].sum(axis=1), layer.moe))
                tt.meet("combine", exchange_ns)
            tt.compute("SharedExpert", shared_ns)

    def _attention(self, at: int, layer: Layer) -> Stage:
        is_moe = layer.moe is not None
        args = (self.shape, self.buffers, self.weights[at], self.inputs, self.cuts, is_moe, self.scratch)
        return a.layer_stage, args

    def _dispatch(self, event: int) -> Stage:
        args = (self.exchange, self.buffers, self.cuts, self.ways, self.expert_rank, event)
        return d.dispatch_stage, (*args, self.orders, self.sents, self.one)

    def _run_experts(self, at: int, event: int) -> Stage:
        args = (self.exchange, self.ways, self.experts[at], self.sent, self.received[at], event)
        return e.expert_stage, (*args, self.faults[at][0])

    def _combine(self, at: int, event: int) -> Stage:
        args = (self.shape, self.exchange, self.buffers, self.weights[at], self.inputs, self.cuts, self.ways)
        return d.combine_stage, (*args, event, self.orders, self.sents, self.scratch, self.faults[at][1])

    def _experts_ns(self, counts: np.ndarray, moe: MoE) -> np.ndarray:
        """What the experts of a layer cost on each die, for the rows that it has."""
        result = np.zeros(len(counts), np.int64)
        for rank, count in enumerate(counts.tolist()):
            layers = self.executors[rank].layers
            key = (len(layers.mem.slots), count)
            if count and key not in self._expert_ns:
                work = layers.expert_work(count, moe)
                arithmetic: Arithmetic = "int8" if layers.is_int8 else "bf16"
                spec = layers.die.spec
                self._expert_ns[key] = spec.kernel_ns(work.flops, work.nbytes, arithmetic=arithmetic)
            result[rank] = self._expert_ns[key] if count else 0
        return result
