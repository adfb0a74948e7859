"""A run where experts have dies of their own: A2E and E2A, by microbatch and DP domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xdeepserve.comm.cost import CommCost
from xdeepserve.comm.exchange.twin import NUM_RECEIVED
from xdeepserve.comm.trampoline import twin
from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.engine.lockstep import tables
from xdeepserve.engine.lockstep.gang import Gang, Share, Stage, addresses, contexts
from xdeepserve.engine.lockstep.kernels import attention as a
from xdeepserve.engine.lockstep.kernels import disaggregated_stages as ends
from xdeepserve.engine.lockstep.kernels import experts as e
from xdeepserve.engine.lockstep.shapes import ExchangeShape
from xdeepserve.engine.lockstep.timetable import DisaggregatedTimetable
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.engine.programs.expert import ExpertProgram
from xdeepserve.hw.spec import Arithmetic


class DisaggregatedGang(Gang):
    """Attention dies `attend`, expert dies `serve`; both once a run."""

    def __init__(
        self,
        executors: Sequence[Executor],
        programs: Sequence[ExpertProgram],
        layouts: Sequence[Sequence[A2ELayout]],
        shared_experts: Sequence[int | None],
        num_threads: int,
    ) -> None:
        attention = [f"attention {rank}" for rank in range(len(executors))]
        experts = [f"expert {index}" for index in range(len(programs))]
        super().__init__(executors, attention + experts, num_threads)
        self.programs, self.layouts = programs, layouts
        self.num_microbatches, self.num_domains = len(layouts), len(layouts[0])
        self._shared_experts, self._num_items = shared_experts, 0  # of the latest run, on each expert die

    async def serve(self, index: int) -> int:
        """An expert die's part of a run; returns when its last answers have left: how many items it has had,
        one for each microbatch of each domain in each layer with experts."""
        await self.meet(len(self.executors) + index)
        return self._num_items

    def prepare(self) -> None:
        executors, first = self.executors, self.executors[0]
        self.exchange = ExchangeShape.of_a2e(first.config, self.layouts[0][0])
        moe_layers = [i for i, column in enumerate(self.columns) if column[0].moe is not None]
        self.experts = {layer: tables.expert_table(self.programs, n) for n, layer in enumerate(moe_layers)}
        per_domain = len(executors) // self.num_domains
        self.items = [
            [
                tables.item(
                    layout,
                    d * per_domain,
                    m * self.num_domains + d,
                    executors[d * per_domain : (d + 1) * per_domain],
                    self.programs,
                    self._shared_experts[d * per_domain : (d + 1) * per_domain],
                )
                for d, layout in enumerate(by_domain)
            ]
            for m, by_domain in enumerate(self.layouts)
        ]
        self.ways = [np.concatenate([item.attention for item in items]) for items in self.items]
        die = first.die
        cost = CommCost(die.spec, die.fabric.topology)
        self.timetable = DisaggregatedTimetable(
            [executor.die for executor in executors],
            [program.die for program in self.programs],
            cost,
            self.num_domains,
            self.num_microbatches,
        )
        self._kernel_ns: dict[int, dict[tuple[bool, int], int]] = {}
        self.attention_faults = np.zeros(len(executors), np.int64)
        self.expert_faults = np.zeros(len(self.programs), np.int64)

    def run(self, shares: Sequence[Share], came: np.ndarray) -> np.ndarray:
        """See `Gang.run`."""
        num, tt, layers = len(self.executors), self.timetable, self.executors[0].layers
        tt.begin(came[:num], came[num:])
        self.inputs = addresses(shares)
        rows = np.array([len(share.h) for share in shares], np.int64)
        per_domain = num // self.num_domains
        self.cuts, stages = [], []
        for m in range(self.num_microbatches):
            lo, hi = rows * m // self.num_microbatches, rows * (m + 1) // self.num_microbatches
            cuts = np.stack([lo, hi], axis=1)
            self.cuts.append(cuts)
            positions = contexts(shares, cuts)
            stages.append(tt.stages_by_kind(layers, shares[0].layers, shares[0].caches, hi - lo, positions))
        counts = [cuts[:, 1] - cuts[:, 0] for cuts in self.cuts]
        away = [0] * self.num_microbatches  # the event that a microbatch waits to come back from
        leaves = np.zeros((self.num_microbatches, self.num_domains), np.int64)
        event = shares[0].first_event
        num_layers = sum(layer.moe is not None for layer in shares[0].layers)
        self._num_items = num_layers * self.num_microbatches * self.num_domains
        last = 0  # the layer before, which a microbatch that is away is in

        def come_back(m: int) -> list[Stage]:
            if not away[m]:
                return []
            for d in range(self.num_domains):
                dies = slice(d * per_domain, (d + 1) * per_domain)
                tt.come_back(d, int(leaves[m, d]), counts[m][dies], self.exchange.answer_nbytes)
            args = (self.exchange, self.inputs, self.cuts[m], self.ways[m], away[m], self.attention_faults)
            return [(ends.come_back_stage, args)]

        for layer, cache in zip(shares[0].layers, shares[0].caches, strict=True):
            at = self.pass_of(cache)
            is_moe = layer.moe is not None
            index = self.executors[0].layer_index[id(layer)]
            for m in range(self.num_microbatches):
                tt.drawing.at(layer=last, microbatch=m)
                work = [*come_back(m), self._attention(m, at, is_moe)]
                tt.drawing.at(layer=index, microbatch=m)
                if is_moe:
                    args = (self.exchange, self.buffers, self.cuts[m], self.ways[m], event)
                    work.append((ends.post_stage, args))
                self.spread(*work)
                self.check(self.attention_faults, "E2A'", "attention", away[m])
                tt.layer(stages[m][is_moe])
                away[m] = event if is_moe else 0
                if is_moe:
                    for d in range(self.num_domains):
                        leaves[m, d] = self._item(m, d, at, event, counts[m])
            event += is_moe
            last = index
        for m in range(self.num_microbatches):
            tt.drawing.at(layer=last, microbatch=m)
            self.spread(*come_back(m))
            self.check(self.attention_faults, "E2A'", "attention", away[m])
        return np.concatenate([tt.attention, np.maximum(tt.experts, tt.experts_end_ns)])

    def _attention(self, m: int, at: int, is_moe: bool) -> Stage:
        args = (self.shape, self.buffers, self.weights[at], self.inputs, self.cuts[m], is_moe, self.scratch)
        return a.layer_stage, args

    def _item(self, m: int, d: int, layer: int, event: int, rows: np.ndarray) -> int:
        """The expert dies' part of one microbatch of one domain; when the answers leave for attention."""
        item, s, tt = self.items[m][d], self.exchange, self.timetable
        dies = slice(item.first, item.first + len(item.attention))
        posted = tt.post(d, rows[dies], s.token_nbytes)
        faults = self.expert_faults
        args: tuple[Any, ...] = (s, item.ways, item.served, item.bounds, item.bases, item.expert_rank, event)
        self.spread((twin.a2e_stage, (*args, item.counts, item.orders, item.sents, faults)))
        self.check(faults, "A2E", "expert", event)
        args = (s, item.ways, self.experts[layer], item.sent, item.received, event, faults)
        self.spread((e.expert_stage, args))
        self.check(faults, "A2E'", "expert", event)
        args = (s, item.ways, item.served, item.bounds, item.answer_fields, event)
        self.spread((twin.e2a_stage, (*args, item.counts, item.orders, item.sents, faults)))
        self.check(faults, "E2A", "expert", event)
        kernels = self._expert_ns(layer, item.ways[:, NUM_RECEIVED])
        batch = int(rows[dies].max(initial=0))
        return tt.serve(m, d, posted, batch, s.copies, kernels)

    def _expert_ns(self, layer: int, counts: np.ndarray) -> np.ndarray:
        """What the experts of a layer cost on each die, for the rows that it has."""
        known = self._kernel_ns.setdefault(layer, {})
        result = np.zeros(len(counts), np.int64)
        for index, count in enumerate(counts.tolist()):
            if not count:
                continue
            program = self.programs[index]
            touched = 1 if program.mem.is_shared else min(count, len(program.mem.experts))
            key = (program.mem.is_shared, count)
            if key not in known:
                mlp = program.layers[list(self.experts).index(layer)]
                work = program.work(count, touched, mlp)
                arithmetic: Arithmetic = "int8" if program.is_int8 else "bf16"
                known[key] = program.die.spec.kernel_ns(work.flops, work.nbytes, arithmetic=arithmetic)
            result[index] = known[key]
        return result
