"""A run where each die has attention and a share of the experts, or one die has all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdeepserve.comm.cost import CommCost
from xdeepserve.comm.layout import Group, Layout
from xdeepserve.engine.lockstep import tables
from xdeepserve.engine.lockstep.gang import Gang, Share, Stage, contexts
from xdeepserve.engine.lockstep.kernels import attention as a
from xdeepserve.engine.lockstep.kernels import dispatch as d
from xdeepserve.engine.lockstep.kernels import exchange as x
from xdeepserve.engine.lockstep.shapes import ExchangeShape
from xdeepserve.engine.lockstep.timetable import ColocatedTimetable
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.hw.spec import Arithmetic
from xdeepserve.model.weights import Layer, MoE

ONE = np.ones(1, np.float32)  # the scale of rows that are not quantised


class ColocatedGang(Gang):
    """Dispatch and combine between all dies. `exchange` is None if there is one die, or are no experts."""

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
        self.faults = np.zeros(num, np.int64)
        if self._exchange is None:
            # No row leaves its die; the numbers of the exchange say what an expert takes.
            experts, top_k = len(first.mem.experts), config.num_experts_per_tok
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
        self.sents, self.received = np.zeros((num, num), np.int64), np.zeros((num, num), np.int64)
        self.sent = np.array(
            [tables.address(executor.ws.take("expert_sent", 1)) for executor in self.executors], np.int64
        )

    def run(self, shares: Sequence[Share], came: np.ndarray) -> np.ndarray:
        """See `Gang.run`."""
        tt, layers = self.timetable, self.executors[0].layers
        tt.begin(came)
        self.inputs = np.array([share.addresses for share in shares], np.int64)
        rows = np.array([len(share.h) for share in shares], np.int64)
        self.cuts = np.stack([np.zeros_like(rows), rows], axis=1)
        positions = contexts(shares, self.cuts)
        times = {
            layer.moe is not None: tt.stages(layers, layer, cache, rows, positions)
            for layer, cache in zip(shares[0].layers, shares[0].caches, strict=True)
        }
        moe = next((layer.moe for layer in shares[0].layers if layer.moe is not None), None)
        if moe is not None:
            shared_ns = tt.shared_ns(layers, moe, rows)
            top_k = self.shape.top_k
            exchange_ns = round(tt.cost.exchange_ns(len(shares), int(rows.max()), top_k))
        event = shares[0].first_event
        after: list[Stage] = []  # what each die does next, with its own bytes only
        for layer, cache in zip(shares[0].layers, shares[0].caches, strict=True):
            at = self.pass_of(cache)
            after.append(self._attention(at, layer))
            tt.layer(times[layer.moe is not None])
            if layer.moe is None:
                continue
            if self._exchange is None:
                after.append(self._own(at))
                tt.compute("Experts", self._experts_ns(rows * self.shape.top_k, layer.moe))
            else:
                self.spread(*after, self._dispatch(event))
                if event > shares[0].first_event:
                    self.check(self.faults, "combine", "rank", event - 1)
                tt.meet("dispatch", exchange_ns)
                self._run_experts(at, event)
                tt.compute("Experts", self._experts_ns(self.ways[:, x.NUM_RECEIVED], layer.moe))
                tt.meet("combine", exchange_ns)
                after = [self._combine(at, event)]
            tt.compute("SharedExpert", shared_ns)
            event += 1
        self.spread(*after)
        self.check(self.faults, "combine", "rank", event - 1)
        return tt.attention

    def _attention(self, at: int, layer: Layer) -> Stage:
        is_moe = layer.moe is not None
        args = (self.shape, self.buffers, self.weights[at], self.inputs, self.cuts, is_moe, self.scratch)
        return a.layer_stage, args

    def _own(self, at: int) -> Stage:
        args = (self.shape, self.exchange, self.buffers, self.weights[at], self.inputs, self.cuts)
        return d.own_stage, (*args, self.experts[at])

    def _dispatch(self, event: int) -> Stage:
        one = tables.address(ONE)
        args = (self.exchange, self.buffers, self.cuts, self.ways, self.expert_rank, event)
        return d.dispatch_stage, (*args, self.orders, self.sents, one)

    def _run_experts(self, at: int, event: int) -> None:
        args = (self.exchange, self.ways, self.experts[at], self.sent, self.received, event, self.faults)
        self.spread((x.expert_stage, args))
        self.check(self.faults, "dispatch", "rank", event)

    def _combine(self, at: int, event: int) -> Stage:
        args = (self.shape, self.exchange, self.buffers, self.weights[at], self.inputs, self.cuts, self.ways)
        return d.combine_stage, (*args, event, self.orders, self.sents, self.scratch, self.faults)

    def _experts_ns(self, counts: np.ndarray, moe: MoE) -> np.ndarray:
        """What the experts of a layer cost on each die, for the rows that it has."""
        result = np.zeros(len(counts), np.int64)
        for rank, count in enumerate(counts.tolist()):
            layers = self.executors[rank].layers
            key = (len(layers.mem.experts), count)
            if count and key not in self._expert_ns:
                work = layers.expert_work(count, moe)
                arithmetic: Arithmetic = "int8" if layers.is_int8 else "bf16"
                spec = layers.die.spec
                self._expert_ns[key] = spec.kernel_ns(work.flops, work.nbytes, arithmetic=arithmetic)
            result[rank] = self._expert_ns[key] if count else 0
        return result
