"""The meeting of all dies of a step: the last to come runs the layers for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from xdeepserve.comm.cost import CommCost
from xdeepserve.comm.layout.trampoline import A2ELayout
from xdeepserve.engine.lockstep import tables
from xdeepserve.engine.lockstep.kernels import attention as a
from xdeepserve.engine.lockstep.kernels import exchange as x
from xdeepserve.engine.lockstep.kernels.fields import FAULTS
from xdeepserve.engine.lockstep.shapes import ExchangeShape, Shape
from xdeepserve.engine.lockstep.timetable import Timetable
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.engine.programs.expert import ExpertProgram
from xdeepserve.engine.programs.layers import Batch
from xdeepserve.engine.programs.memory_plan import KVCache
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.clock import Clock, Waiter, Waiting
from xdeepserve.hw.spec import Arithmetic
from xdeepserve.model.canonical import Array
from xdeepserve.model.reference import LATENT_NORM_EPS
from xdeepserve.model.weights import Layer

TIMEOUT_NS = 1_000_000_000
"""How long, in virtual time, a die waits at the meeting for the others."""

NO_WEIGHTS = np.zeros((0, a.NUM_WEIGHTS), np.int64)


class Share(NamedTuple):
    """What an attention die brings: its rows of the step, and the layers that they go through."""

    h: Array
    layers: Sequence[Layer]
    caches: Sequence[KVCache]
    batch: Batch
    first_event: int


class Gang:
    """All dies of one TE with expert dies. Attention dies `attend`, expert dies `serve`; both once a run.

    A run is one pass through the main model's layers, or through an MTP layer. Every die is a task of its own
    before and after: plans, sampling, KV transfers and the host's part do not change.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        programs: Sequence[ExpertProgram],
        layouts: Sequence[Sequence[A2ELayout]],
        shared_experts: Sequence[int | None],
        num_threads: int,
    ) -> None:
        self.executors, self.programs, self.num_threads = executors, programs, num_threads
        self.num_microbatches, self.num_domains = len(layouts), len(layouts[0])
        self.layouts = layouts
        self._shared_experts = shared_experts
        self._clock: Clock = executors[0].die.clock
        self._came: dict[int, int] = {}  # member -> when it came; attention dies first
        self._shares: dict[int, Share] = {}
        self._waiters: dict[int, Waiter] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._is_ready = False

    # ---- the meeting --------------------------------------------------------------------------------

    async def attend(self, rank: int, share: Share) -> None:
        """Layers in place on an attention die's rows; returns when they are done on this die."""
        self._shares[rank] = share
        await self._meet(rank, f"attention {rank}")

    async def serve(self, index: int) -> None:
        """An expert die's part of a run; returns when its last answers have left."""
        await self._meet(len(self.executors) + index, f"expert {index}")

    async def _meet(self, member: int, name: str) -> None:
        clock, size = self._clock, len(self.executors) + len(self.programs)
        if member in self._came:
            raise ProtocolError(f"{name} came to a run twice")
        self._came[member] = clock.now
        if len(self._came) < size:
            waiter = self._waiters[member] = clock.waiter(lambda: self._describe(name, size))
            await clock.wait(waiter, clock.now + TIMEOUT_NS)
            return
        shares = [self._shares[rank] for rank in range(len(self.executors))]
        came = np.array([self._came[each] for each in range(size)], np.int64)
        waiters = dict(self._waiters)
        self._came.clear()
        self._shares.clear()
        self._waiters.clear()
        try:
            # A plain await: virtual time stands still, and the event loop does not.
            ends = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, shares, came)
        except Exception as error:
            for waiter in waiters.values():
                waiter.fail(error)
            raise
        for each, waiter in waiters.items():
            waiter.wake(delay_ns=max(0, int(ends[each]) - clock.now))
        await clock.sleep_until(int(ends[member]))

    def _describe(self, name: str, size: int) -> Waiting:
        missing = [each for each in range(size) if each not in self._came][:8]
        num = len(self.executors)
        peers = [f"attention {each}" if each < num else f"expert {each - num}" for each in missing]
        return Waiting("lockstep", name, ", ".join(peers), "meeting", size, len(self._came))

    @property
    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.num_threads + 1, thread_name_prefix="lockstep")
        return self._pool

    def close(self) -> None:
        """Let the threads go."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    # ---- the run ------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Find all addresses; once, when the memories are real."""
        executors, first = self.executors, self.executors[0]
        layout = self.layouts[0][0]
        mem = first.mem
        self.shape = Shape.of(mem.config, mem.recipe, mem.sizes, layout, LATENT_NORM_EPS)
        self.exchange = ExchangeShape.of(mem.config, layout)
        self.buffers = tables.buffers(executors)
        models = [executor.weights for executor in executors]
        columns = [[model.layers[i] for model in models] for i in range(len(models[0].layers))]
        for depth in range(mem.sizes.mtp):
            drafters = [executor.drafter for executor in executors]
            columns.append([drafter.layers[depth].layer for drafter in drafters if drafter is not None])
        # By cache: an MTP layer that is used twice has two.
        self._layer_at = {id(cache): i for i, cache in enumerate(first.caches)}
        self.weights = [
            tables.layer_weights(column, [executor.caches[i] for executor in executors])
            for i, column in enumerate(columns)
        ]
        moe_layers = [i for i, column in enumerate(columns) if column[0].moe is not None]
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
        self.timetable = Timetable(
            [executor.die for executor in executors],
            [program.die for program in self.programs],
            cost,
            self.num_microbatches * self.num_domains,
        )
        self._kernel_ns: dict[int, dict[tuple[bool, int], int]] = {}
        self._is_ready = True

    def _run(self, shares: Sequence[Share], came: np.ndarray) -> np.ndarray:
        """All layers for all dies; when each member is done, in ns of virtual time."""
        if not self._is_ready:
            self._prepare()
        num, tt = len(self.executors), self.timetable
        tt.begin(came[:num], came[num:])
        inputs = np.array([self._inputs(share) for share in shares], np.int64)
        rows = np.array([len(share.h) for share in shares], np.int64)
        per_domain = num // self.num_domains
        parts = []
        for m in range(self.num_microbatches):
            lo, hi = rows * m // self.num_microbatches, rows * (m + 1) // self.num_microbatches
            parts.append((np.stack([lo, hi], axis=1), hi - lo, self._contexts(shares, lo, hi)))
        away = [0] * self.num_microbatches  # the event that a microbatch waits to come back from
        leaves = np.zeros((self.num_microbatches, self.num_domains), np.int64)
        event = shares[0].first_event

        def come_back(m: int) -> None:
            for d in range(self.num_domains):
                dies = slice(d * per_domain, (d + 1) * per_domain)
                tt.come_back(dies, int(leaves[m, d]), parts[m][1][dies], self.shape.answer_nbytes)

        for layer, cache in zip(shares[0].layers, shares[0].caches, strict=True):
            at = self._layer_at[id(cache)]
            is_moe = layer.moe is not None
            for m, (cuts, counts, contexts) in enumerate(parts):
                if away[m]:
                    come_back(m)
                self._attention(m, self.weights[at], inputs, cuts, away[m], event if is_moe else 0)
                first = self.executors[0]
                tt.layer(first.layers, layer, cache, counts, contexts)
                away[m] = event if is_moe else 0
                if is_moe:
                    for d in range(self.num_domains):
                        leaves[m, d] = self._item(m, d, at, event, counts)
            event += is_moe
        for m, (cuts, _, _) in enumerate(parts):
            if away[m]:
                come_back(m)
                self._attention(m, NO_WEIGHTS, inputs, cuts, away[m], 0)
        return np.concatenate([tt.attention, np.maximum(tt.experts, tt.experts_end_ns)])

    def _inputs(self, share: Share) -> list[int]:
        batch = share.batch
        arrays = (share.h, batch.positions, batch.slots, batch.seq_of, batch.block_tables)
        return [*map(tables.address, arrays), len(batch.block_tables)]

    def _contexts(self, shares: Sequence[Share], lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
        """Positions that the rows of a microbatch see together, on each die."""
        return np.array(
            [
                int(share.batch.positions[first:last].sum()) + last - first
                for share, first, last in zip(shares, lo.tolist(), hi.tolist(), strict=True)
            ],
            np.int64,
        )

    def _attention(
        self, m: int, weights: np.ndarray, inputs: np.ndarray, cuts: np.ndarray, back: int, event: int
    ) -> None:
        faults = np.zeros(len(self.executors), np.int64)
        self._spread(
            a.attention_stage, self.shape, self.buffers, weights, inputs, cuts, self.ways[m], back, event,
            faults,
        )  # fmt: skip
        self._check(faults, "E2A'", "attention", back)

    def _item(self, m: int, d: int, layer: int, event: int, rows: np.ndarray) -> int:
        """The expert dies' part of one microbatch of one domain; when the answers leave for attention."""
        item, s, tt = self.items[m][d], self.exchange, self.timetable
        dies = slice(item.first, item.first + len(item.attention))
        posted = tt.post(dies, rows[dies], self.shape.token_nbytes)
        faults = np.zeros(s.num_ranks, np.int64)
        self._spread(
            x.a2e_stage, s, item.ways, item.served, item.bounds, item.bases, item.expert_rank, event,
            item.counts, item.orders, item.sents, faults,
        )  # fmt: skip
        self._check(faults, "A2E", "expert", event)
        self._spread(
            x.expert_stage, s, item.ways, self.experts[layer], item.sent, item.received, event, faults
        )  # fmt: skip
        self._check(faults, "A2E'", "expert", event)
        self._spread(
            x.e2a_stage, s, item.ways, item.served, item.bounds, item.answer_fields, event, item.counts,
            item.orders, item.sents, faults,
        )  # fmt: skip
        self._check(faults, "E2A", "expert", event)
        kernels = self._expert_ns(layer, item.ways[:, x.NUM_RECEIVED])
        batch = int(rows[dies].max(initial=0))
        return tt.serve(m * self.num_domains + d, posted, batch, s.copies, kernels)

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

    def _spread(self, kernel: Callable[..., None], *args: Any) -> None:
        """Run a kernel on the threads, each taking its share of the dies."""
        if self.num_threads == 1:
            kernel(*args, 0, 1)
            return
        jobs = [self._threads.submit(kernel, *args, i, self.num_threads) for i in range(1, self.num_threads)]
        try:
            kernel(*args, 0, self.num_threads)
        finally:
            for job in jobs:
                job.result()

    def _check(self, faults: np.ndarray, op: str, side: str, event: int) -> None:
        if faults.any():
            rank = int(np.flatnonzero(faults)[0])
            raise ProtocolError(f"{op}: {side} {rank} {FAULTS[int(faults[rank])]} in event {event}")
