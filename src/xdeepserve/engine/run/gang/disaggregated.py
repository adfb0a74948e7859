"""A run where experts have dies of their own: A2E and E2A, by microbatch and DP domain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdeepserve.comm.exchange.twin import NUM_RECEIVED
from xdeepserve.comm.trampoline import twin
from xdeepserve.comm.trampoline.layout import A2ELayout
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.run.gang import tables
from xdeepserve.engine.run.gang.colocated import TO_THE_END, UP_TO_EXPERTS
from xdeepserve.engine.run.gang.dimensions import ExchangeShape, PushShape
from xdeepserve.engine.run.gang.gang import Call, Gang, Share, Span, addresses
from xdeepserve.engine.run.gang.kernels import attention as a
from xdeepserve.engine.run.gang.kernels import disaggregated_stages as ends
from xdeepserve.engine.run.gang.kernels import experts as e
from xdeepserve.engine.run.gang.timetable import DisaggregatedTimetable, Timed
from xdeepserve.engine.walk.schedule import Visit, cut_at
from xdeepserve.step.frame import Batch
from xdeepserve.step.stage import Counts, Stage

MAX_KEPT = 1 << 12  # prices that are kept


class DisaggregatedGang(Gang):
    """Attention dies `attend`, expert dies `serve`; both once a run."""

    kernels: frozenset[Span] = UP_TO_EXPERTS | frozenset({TO_THE_END, ("a2e",), ("e2a",), ("Residual",)})

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
        executors, sizes = self.executors, self.executors[0].mem.sizes
        self.exchange = self.shape_of_exchange()
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
        self.timetable = DisaggregatedTimetable(
            [executor.die for executor in executors],
            [program.die for program in self.programs],
            self.num_domains,
            self.num_microbatches,
            sizes.carrier,
            "mte" if sizes.exchange == "push" else sizes.carrier,
        )
        self._number = {layer: number for number, layer in enumerate(self.experts)}  # of those with experts
        kinds: dict[tuple[object, ...], int] = {}  # numbered as they are met
        self._kinds = {
            layer: np.array([kinds.setdefault(kind, len(kinds)) for kind in self._find_kinds(number)])
            for layer, number in self._number.items()
        }
        self._kernel_ns: dict[tuple[int, ...], int] = {}  # by kind, rows in all, for a copy, of a domain
        self.attention_faults = np.zeros(len(executors), np.int64)
        self.expert_faults = np.zeros(len(self.programs), np.int64)

    def shape_of_exchange(self) -> ExchangeShape | PushShape:
        """Numbers of the dies with experts."""
        first = self.executors[0]
        return ExchangeShape.of_a2e(first.config, self.layouts[0][0], first.mem.sizes)

    def run(self, shares: Sequence[Share], came: np.ndarray) -> np.ndarray:
        """All layers for all dies, which `came` [members] when; when each is done, in ns."""
        num, tt, visits = len(self.executors), self.timetable, shares[0].visits()
        tt.begin_apart(came[:num], came[num:])
        self.inputs = addresses(shares)
        rows = np.array([len(share.h) for share in shares], np.int64)
        per_domain = num // self.num_domains
        self.cuts = [
            np.stack([rows * m // self.num_microbatches, rows * (m + 1) // self.num_microbatches], axis=1)
            for m in range(self.num_microbatches)
        ]
        counts = [cuts[:, 1] - cuts[:, 0] for cuts in self.cuts]
        parts = [self._parts(shares, cuts) for cuts in self.cuts]
        away = [0] * self.num_microbatches  # the event that a microbatch waits to come back from
        leaves = np.zeros((self.num_microbatches, self.num_domains), np.int64)
        num_layers = sum(visit.layer.moe is not None for visit in visits)
        self._num_items = num_layers * self.num_microbatches * self.num_domains
        timed: dict[tuple[int, int], list[Timed]] = {}  # by Program and microbatch
        last = 0  # the layer before, which a microbatch that is away is in

        def come_back(m: int) -> list[Call]:
            if not away[m]:
                return []
            for d in range(self.num_domains):
                dies = slice(d * per_domain, (d + 1) * per_domain)
                tt.come_back(d, int(leaves[m, d]), counts[m][dies], self.exchange.answer_nbytes)
            args = (self.exchange, self.inputs, self.cuts[m], self.ways[m], away[m], self.attention_faults)
            return [(ends.come_back_stage, args)]

        for visit in visits:
            at, is_moe = self.pass_of(visit.cache), visit.layer.moe is not None
            for m in range(self.num_microbatches):
                tt.drawing.at(layer=last, microbatch=m)
                work = [*come_back(m), self._attention(m, at, is_moe)]
                tt.drawing.at(layer=visit.layer_idx, microbatch=m)
                if is_moe:
                    args = (self.exchange, self.buffers, self.cuts[m], self.ways[m], visit.event)
                    work.append((ends.post_stage, args))
                self.spread(*work)
                self.check(self.attention_faults, "E2A'", "attention", away[m])
                key = id(visit.program), m
                if key not in timed:
                    timed[key] = self._time(visit, parts[m])
                tt.stages(timed[key])
                away[m] = visit.event if is_moe else 0
                if is_moe:
                    for d in range(self.num_domains):
                        leaves[m, d] = self._item(m, d, at, visit.event, counts[m])
            last = visit.layer_idx
        for m in range(self.num_microbatches):
            tt.drawing.at(layer=last, microbatch=m)
            self.spread(*come_back(m))
            self.check(self.attention_faults, "E2A'", "attention", away[m])
        return np.concatenate([tt.attention, np.maximum(tt.experts, tt.experts_end_ns)])

    @staticmethod
    def _parts(shares: Sequence[Share], cuts: np.ndarray) -> list[Batch]:
        """The rows of a microbatch on each die."""
        bounds = cuts.tolist()
        return [share.batch.part(slice(lo, hi)) for share, (lo, hi) in zip(shares, bounds, strict=True)]

    def _time(self, visit: Visit, parts: Sequence[Batch]) -> list[Timed]:
        """What attention dies do of a layer before they send its tokens away."""
        runner, (before, _) = self.executors[0].runner, cut_at(visit.program.feed, "a2e")
        result = []
        for stage in (*visit.program.attention, *before):
            assert isinstance(stage, Stage)
            ns = np.zeros(len(parts), np.int64)
            for rank, part in enumerate(parts):
                if part.num_tokens:
                    counts = Counts(part.num_tokens, part.context, part.kv_tokens)
                    ns[rank] = round(runner.price_of(stage, visit.layer, counts))
            result.append(Timed(stage.name, stage.core, ns))
        return result

    def _attention(self, m: int, at: int, is_moe: bool) -> Call:
        args = (self.shape, self.buffers, self.weights[at], self.inputs, self.cuts[m], is_moe, self.scratch)
        return a.layer_stage, (*args, self.syncs)

    def _item(self, m: int, d: int, layer: int, event: int, rows: np.ndarray) -> int:
        """The expert dies' part of one microbatch of one domain; when the answers leave for attention."""
        item, s, tt = self.items[m][d], self.exchange, self.timetable
        dies = slice(item.first, item.first + len(item.attention))
        posted = tt.post(d, rows[dies], s.token_nbytes)
        for op, call in self.calls(m, d, layer, event):
            self.spread(call)
            self.check(self.expert_faults, op, "expert", event)
        kernels = self._expert_ns(layer, item, rows[dies])
        batch = int(rows[dies].max(initial=0))
        return tt.serve(m, d, posted, batch, s.copies, kernels)

    def calls(self, m: int, d: int, layer: int, event: int) -> Sequence[tuple[str, Call]]:
        """The stages of an item, each after a barrier."""
        item, s, faults = self.items[m][d], self.exchange, self.expert_faults
        kept = (event, item.counts, item.orders, item.sents, faults)
        ends = (s, item.ways, item.served, item.bounds)
        work = (self.experts[layer], item.sent, item.received, event, faults)
        return [
            ("A2E", (twin.a2e_stage, (*ends, item.bases, item.expert_rank, *kept))),
            ("A2E'", (e.expert_stage, (s, item.ways, *work))),
            ("E2A", (twin.e2a_stage, (*ends, item.answer_fields, *kept))),
        ]

    def _expert_ns(self, layer: int, item: tables.Item, rows: np.ndarray) -> np.ndarray:
        """What the experts of a layer cost on each die, for what it has of a domain's tokens, `rows` [A]."""
        counts, num_tokens = item.ways[:, NUM_RECEIVED], int(rows.sum())
        copied = np.zeros(len(counts), np.int64)  # rows for a copy of the shared expert
        if self.exchange.copies > self.exchange.top_k:
            np.add.at(copied, item.expert_rank[item.attention[:, twin.SHARED_EXPERT]], rows)
        busy, base = np.flatnonzero(counts), int(counts.max(initial=0)) + 1
        keys = (self._kinds[layer][busy] * base + counts[busy]) * base + copied[busy]
        few, firsts, cases = np.unique(keys, return_index=True, return_inverse=True)
        known, result = self._kernel_ns, np.zeros(len(counts), np.int64)
        prices = np.zeros(len(few), np.int64)
        for case, index in enumerate(busy[firsts].tolist()):
            count, shared = int(counts[index]), int(copied[index])
            key = (int(self._kinds[layer][index]), count, shared, num_tokens)
            if key not in known:
                if len(known) >= MAX_KEPT:
                    known.clear()
                known[key] = self._price(self.programs[index], layer, count - shared, shared, num_tokens)
            prices[case] = known[key]
        result[busy] = prices[cases]
        return result

    def _find_kinds(self, number: int) -> list[tuple[object, ...]]:
        """By die: what it holds in a layer, and which of these matrices are kept in floating point. Dies that
        are alike in this take equally long for equal rows."""
        result: list[tuple[object, ...]] = []
        for program in self.programs:
            held = program.layers[number]
            mlps = (mlp for mlp in (held.experts, held.shared) if mlp is not None)
            kept = [linear.scale is None for mlp in mlps for linear in (mlp.w13, mlp.w2)]
            result.append((program.mem.is_shared, len(program.mem.slots), *kept))
        return result

    def _price(self, program: ExpertProgram, layer: int, routed: int, shared: int, num_tokens: int) -> int:
        mean = num_tokens * self.shape.top_k / program.mem.sizes.num_primary_dies
        billed = self.timetable.spec.billed_copies(routed, mean)
        return round(program.price(routed, shared, billed, self._number[layer]))
