"""The die program, the same on all ranks: wait for a plan, run it, write the results, tell the host."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import numpy as np

from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.engine.programs.drafts import Drafter
from xdeepserve.engine.programs.launcher import Launcher
from xdeepserve.engine.programs.layers import Batch, Layers
from xdeepserve.engine.programs.memory_plan import DieMemory, KVCache
from xdeepserve.engine.programs.messages import (
    LOGPROB_SLOTS,
    CollectLoad,
    CopyBlocks,
    CopyDone,
    ExpertsLoaded,
    LayerDone,
    LoadCollected,
    LoadExperts,
    Probe,
    ProbeDone,
    SetExpertMap,
    Shutdown,
    StepDone,
    StepFailed,
    StepPlan,
)
from xdeepserve.engine.programs.ops import Threads, Work, linear_work
from xdeepserve.engine.programs.replicas import Routes, load_experts
from xdeepserve.engine.programs.resolve import resolve
from xdeepserve.errors import ProtocolError, XDeepServeError
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.queue import Queue
from xdeepserve.model import kernels as k
from xdeepserve.model import sampling
from xdeepserve.model.canonical import Array
from xdeepserve.model.kernels import sample
from xdeepserve.model.tensors import Layer


class Executor:
    """One die's share of the model. `reports` is the host's queue."""

    def __init__(
        self,
        rank: int,
        die: Die,
        mem: DieMemory,
        xccl: XCCL | None,
        threads: Threads,
        reports: Queue[msgspec.Struct],
    ) -> None:
        self.rank, self.die, self.mem, self.config = rank, die, mem, mem.config
        self.ws, self.reports = mem.workspace, reports
        self.launcher: Launcher | None = None  # None: launches cost nothing
        self.layer_reports: Queue[msgspec.Struct] | None = None  # where a plan's `reports_layers` go
        self._transfers: list[asyncio.Task[None]] = []  # beside the steps
        self._step_idx, self._reports_layers = 0, False
        self._faults: dict[int, XDeepServeError] = {}  # of the step's logit rows
        self.weights = mem.assemble()
        self.caches = mem.kv_caches()
        self.layers = Layers(die, mem, xccl, threads, self.weights.cos, self.weights.sin)
        main, mtp = self.weights.layers, [mtp.layer for mtp in self.weights.mtp]
        self.layer_index = {id(layer): index for index, layer in enumerate([*main, *mtp])}
        self.drafter = Drafter(self) if mem.sizes.mtp else None
        # Event IDs count the MoE layers of all steps, MTP's included, from 1 on.
        used = [mtp.layer for mtp in self.drafter.layers] if self.drafter is not None else []
        self._events_per_step = self._num_exchanges([*self.weights.layers, *used])

    async def run(self) -> None:
        """Serve commands until Shutdown, and end the transfers that have begun."""
        try:
            while True:
                command = await self.die.next_command()
                if isinstance(command, Shutdown):
                    break
                await self._obey(command)
            for transfer in self._transfers:
                await self.die.clock.join(transfer)
        except Exception as error:
            self.reports.put(StepFailed(self.rank, error))
        finally:
            for transfer in self._transfers:
                transfer.cancel()

    async def _obey(self, command: msgspec.Struct) -> None:
        match command:
            case StepPlan():
                await self.step(command)
                self.reports.put(StepDone(self.rank, command.step, self._faults))
            case Probe():
                self.reports.put(ProbeDone(self.rank))
            case CopyBlocks(ticket=None):
                await self._copy_blocks(command)
            case CopyBlocks(ticket=int(ticket)):
                self._run_beside(self._copy_blocks(command), CopyDone(self.rank, ticket), "copy blocks")
            case SetExpertMap(phy2log=phy2log) if self.mem.routes is not None:
                self.mem.routes.set_map(phy2log)
            case CollectLoad() if self.mem.routes is not None:
                await self._report_load(self.mem.routes)
            case LoadExperts(loads=loads) if self.mem.redundant is not None:
                loading = load_experts(self.die, self.mem.redundant, loads)
                self._run_beside(loading, ExpertsLoaded(self.die.index), "load experts")
            case _:
                raise ProtocolError(f"die {self.die.index} does not know the command {command!r}")

    def _run_beside(self, transfer: Coroutine[Any, Any, None], done: msgspec.Struct, name: str) -> None:
        """Start a transfer beside the steps; `done` reports its end."""

        async def run() -> None:
            try:
                await transfer
            except Exception as error:
                self.reports.put(StepFailed(self.rank, error))
            else:
                self.reports.put(done)

        running = [process for process in self._transfers if not process.done()]
        self._transfers = [*running, self.die.spawn(run(), name=name)]

    async def _report_load(self, routes: Routes) -> None:
        """Copy the experts' load to where the host reads it."""
        work = 2.0 * routes.reported.nbytes
        await self.die.compute("Report load", routes.report, nbytes=work, core="aiv")
        self.reports.put(LoadCollected(self.rank))

    async def _copy_blocks(self, command: CopyBlocks) -> None:
        pieces = []
        for src_tier, src, dst_tier, dst in command.copies:
            sources = self.mem.block_pieces(src_tier, src)
            targets = self.mem.block_pieces(dst_tier, dst)
            for (source, nbytes), (target, _) in zip(sources, targets, strict=True):
                pieces.append(Copy(source, target, nbytes))
        await self.die.dma.copy(pieces, name="KV blocks")

    async def step(self, plan: StepPlan) -> None:
        """One forward pass: the main model, sampling, and MTP's proposal for the next step."""
        if self.launcher is not None:
            self.launcher.begin(plan)
        plan = await self._resolve(plan)
        self._step_idx, self._reports_layers, self._faults = plan.step, plan.reports_layers, {}
        w, batch = self.weights, self._upload(plan)
        first_event = plan.step * self._events_per_step + 1
        h = self.ws.take("h", plan.num_tokens, self.config.hidden_size)
        hidden = self.ws.take("hidden", *h.shape)
        moved = Work(0.0, 2.0 * h.nbytes)
        if len(h):
            ids = np.asarray(plan.token_ids, np.int32)
            await self.layers.compute("Embed", lambda: k.gather_rows(h, w.embed, ids), moved, "aiv")
        await self.run_layers(h, w.layers, self.caches[: len(w.layers)], batch, first_event)
        if len(h):
            eps = self.config.rms_norm_eps
            await self.layers.compute("Norm", lambda: k.rms_norm(hidden, h, w.norm, eps), moved, "aiv")
        if plan.logit_rows:
            await self._sample(plan, hidden)
        if self.drafter is not None:
            await self._propose(plan, batch, hidden, first_event + self._num_exchanges(w.layers))
        if self.launcher is not None:
            self.launcher.end()

    async def _resolve(self, plan: StepPlan) -> StepPlan:
        """Complete a plan that was made before the step before had ended."""
        if all(seq < 0 for seq in plan.carried_seq):
            return plan
        sizes, result, before = self.mem.sizes, self.mem.result, plan.step - 1
        work = Work(0.0, 16.0 * plan.num_tokens)
        await self.layers.compute("Resolve", lambda: None, work, "aiv")
        return resolve(
            plan,
            sizes.block_size,
            result("sampled", before, sizes.max_logit_rows).tolist(),
            result("num_accepted", before, sizes.max_seqs).tolist(),
            result("drafts", before, sizes.max_seqs, max(1, sizes.mtp)).tolist(),
        )

    def result(self, name: str, *shape: int) -> Array:
        """What the host reads after this step."""
        return self.mem.result(name, self._step_idx, *shape)

    async def run_layers(
        self, h: Array, layers: Sequence[Layer], caches: Sequence[KVCache], batch: Batch, first_event: int
    ) -> None:
        """Layers in place on h [T, H]. Their exchanges have the events `first_event` and up, one each."""
        event = first_event
        for layer, cache in zip(layers, caches, strict=True):
            index = self.layer_index[id(layer)]
            self.layers.at(layer=index)
            await self.layers.layer(h, layer, cache, batch, event)
            event += layer.moe is not None
            await self.end_layer(index)
        self.layers.at()

    async def end_layer(self, index: int) -> None:
        """Tell the host that a layer is done, if it has asked for that. MTP's end with the step."""
        if self._reports_layers and index < self.config.num_hidden_layers:
            assert self.layer_reports is not None
            self.layer_reports.put(LayerDone(self.rank, self._step_idx, index))

    @staticmethod
    def _num_exchanges(layers: Sequence[Layer]) -> int:
        return sum(layer.moe is not None for layer in layers)

    def _upload(self, plan: StepPlan) -> Batch:
        """Bring the plan's index lists into HBM."""
        rows, take = plan.num_tokens, self.ws.take
        positions, slots, seq_of = (take(name, rows) for name in ("positions", "slots", "seq_of"))
        tables = take("block_tables", len(plan.block_tables), self.mem.sizes.max_blocks_per_seq)
        positions[:], slots[:], seq_of[:] = plan.positions, plan.slots, plan.seq_of
        for row, table in zip(tables, plan.block_tables, strict=True):
            row[: len(table)] = table
        return Batch.of(positions, slots, seq_of, tables)

    async def _sample(self, plan: StepPlan, hidden: Array) -> None:
        """Logits of the wanted rows, their tokens, log probabilities, and which drafts they confirm."""
        rows, take, head = len(plan.logit_rows), self.ws.take, self.weights.head
        logits = self.result("logits", rows, self.config.vocab_size)
        chosen = take("logit_hidden", rows, self.config.hidden_size)

        def run() -> None:
            k.gather_rows(chosen, hidden, np.asarray(plan.logit_rows, np.int32))
            self.layers.ops.matmul(logits, chosen, head.w)
            self.draw(self.result("sampled", rows), logits, plan, list(range(rows)), ahead=1)
            self._report_logprobs(plan, logits)
            self.result("num_accepted", len(plan.num_drafts))[:] = self._accepted(plan)

        await self.layers.compute("Sample", run, linear_work(rows, head))

    def draw(self, out: Array, logits: Array, plan: StepPlan, rows: list[int], ahead: int) -> None:
        """Sample the token `ahead` positions after each logit row of `rows` from logits [len(rows), V].

        A row that has none gets 0, which is a token to go on with, and a fault.
        """
        try:
            self._draw(out, logits, plan, rows, ahead)
        except Exception as error:
            if len(rows) > 1:
                for i, row in enumerate(rows):
                    self.draw(out[i : i + 1], logits[i : i + 1], plan, [row], ahead)
            else:
                out[:] = 0
                self._blame(rows[0], error)

    def _blame(self, row: int, error: Exception) -> None:
        """What a step does for one logit row has failed: the sequence fails, and not the die."""
        if not isinstance(error, XDeepServeError):
            cause, error = error, XDeepServeError(f"rank {self.rank}: {error!r}")
            error.__cause__ = cause
        self._faults.setdefault(row, error)

    def _draw(self, out: Array, logits: Array, plan: StepPlan, rows: list[int], ahead: int) -> None:
        positions = [plan.positions[plan.logit_rows[r]] + ahead for r in rows]
        sample(
            out,
            logits,
            np.array([plan.temperature[r] for r in rows], np.float32),
            np.array([plan.top_k[r] for r in rows], np.int32),
            np.array([plan.top_p[r] for r in rows], np.float64),
            np.array([plan.seed[r] % 2**64 for r in rows], np.uint64),
            np.array([plan.choice[r] for r in rows], np.uint64),
            np.array(positions, np.uint64),
        )
        if (out < 0).any():
            row = int(np.flatnonzero(out < 0)[0])
            raise XDeepServeError(
                f"rank {self.rank}: no token for position {positions[row]} of a sequence: logits are not "
                "all numbers; a weight may not be one, or be too large"
            )

    def _report_logprobs(self, plan: StepPlan, logits: Array) -> None:
        for row, count in enumerate(plan.num_logprobs):
            if count >= 0 and row not in self._faults:
                try:
                    self._report_row(plan, logits, row, count)
                except Exception as error:
                    self._blame(row, error)

    def _report_row(self, plan: StepPlan, logits: Array, row: int, count: int) -> None:
        """Log probabilities of the `count` likeliest tokens of a logit row, and of the one that follows."""
        rows, result = len(logits), self.result
        ids, values = (
            result("logprob_ids", rows, LOGPROB_SLOTS),
            result("logprobs", rows, LOGPROB_SLOTS),
        )
        ranks, sampled = result("ranks", rows), result("sampled", rows)
        target = plan.targets[row] if plan.targets[row] >= 0 else int(sampled[row])
        log_probs = sampling.log_probs(logits[row])
        top = np.argsort(-logits[row], kind="stable")[:count]
        ids[row, 0], values[row, 0] = target, log_probs[target]
        ids[row, 1 : 1 + len(top)], values[row, 1 : 1 + len(top)] = top, log_probs[top]
        ranks[row] = 1 + int(np.count_nonzero(logits[row] > logits[row, target]))

    def _accepted(self, plan: StepPlan) -> list[int]:
        """Per sequence, how many of its drafts, from the first, are what the main model samples there."""
        sampled = self.result("sampled", len(plan.logit_rows))
        row_of = {row: r for r, row in enumerate(plan.logit_rows)}
        accepted = [0] * len(plan.num_drafts)
        for row, seq in enumerate(plan.seq_of):
            is_last = row + 1 == plan.num_tokens or plan.seq_of[row + 1] != seq
            if is_last:
                first = row + 1 - plan.num_drafts[seq]
                for draft in range(first, row + 1):
                    if sampled[row_of[draft - 1]] != plan.token_ids[draft]:
                        break
                    accepted[seq] += 1
        return accepted

    async def _propose(self, plan: StepPlan, batch: Batch, hidden: Array, event_id: int) -> None:
        """MTP's drafts for the next step."""
        assert self.drafter is not None
        await self.drafter.propose(plan, batch, hidden, event_id)
