"""Program of every die with a DP group: wait for a plan, run it, write the results, tell the host."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from xdeepserve.engine.die.carried import CarriedRows
from xdeepserve.engine.die.die_memory import DieMemory
from xdeepserve.engine.die.drafts import Drafter
from xdeepserve.engine.die.replicas import ReplicaMap, load_experts
from xdeepserve.engine.die.sampler import Chooser
from xdeepserve.engine.messages import (
    CollectLoad,
    CopyBlocks,
    CopyDone,
    ExpertsLoaded,
    LayerDone,
    LoadCollected,
    LoadExperts,
    Probe,
    ProbeDone,
    Resume,
    RollBack,
    RolledBack,
    SetExpertMap,
    Shutdown,
    StepDone,
    StepFailed,
)
from xdeepserve.engine.numbers import DieNumber, DieRank, StepNo
from xdeepserve.engine.plans import StepPlan
from xdeepserve.engine.recovery.retry import again_after_glitches
from xdeepserve.engine.recovery.rollback_watch import RollbackCalled, RollbackWatch
from xdeepserve.engine.walk.launcher import Launcher
from xdeepserve.engine.walk.runner import Runner
from xdeepserve.engine.walk.schedule import Schedule, Visit, begin
from xdeepserve.errors import GlitchError, ProtocolError
from xdeepserve.hw.clock import Process
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.queue import Queue
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import Layer, ModelWeights
from xdeepserve.step.frame import Batch, KVCache
from xdeepserve.step.passes import EMBED, HEAD
from xdeepserve.step.stage import LayerProgram, Program


class Traversal(NamedTuple):
    """Way of a step's rows through the layers on a die: runners, one for each microbatch, and their schedule.

    `main` runs the stages outside layers. `programs` has the program of each layer, by its number. `head`
    follows the last layer. `whole` is the way of a step that is not cut, where that is decided for each step.
    """

    main: Runner
    runners: Sequence[Runner]
    schedule: Schedule
    programs: Sequence[LayerProgram]
    head: Program = HEAD
    whole: Traversal | None = None

    @property
    def ways(self) -> list[Traversal]:
        """List the way of a step that is cut, and that of a whole one if there is any."""
        return [self] if self.whole is None else [self, self.whole]

    @property
    def all_runners(self) -> list[Runner]:
        """List the runners of all ways, each once."""
        return list(dict.fromkeys(runner for way in self.ways for runner in (way.main, *way.runners)))


class Executor:
    """Runs a die's share of the model on the host's commands; `reports` is the host's queue.

    If a DP group spans several dies, all ranks get the same plan. They keep the same latents in their caches,
    since every head reads all latents. The host reads the results of rank 0.
    """

    def __init__(
        self,
        rank: DieRank,
        die: Die,
        mem: DieMemory,
        weights: ModelWeights,
        traversal: Traversal,
        chooser: Chooser,
        reports: Queue[msgspec.Struct],
    ) -> None:
        self.rank, self.die, self.mem, self.config = rank, die, mem, mem.config
        self.ws, self.reports = mem.workspace, reports
        self.traversal, self.runner, self.chooser = traversal, traversal.main, chooser
        self.launcher: Launcher | None = None
        self.layer_reports: Queue[msgspec.Struct] | None = None  # where a plan's `reports_layers` go
        self._transfers: list[asyncio.Task[None]] = []  # beside the steps
        self.plan = StepPlan(step=StepNo(0))  # of the current step, completed
        self._rollback = RollbackWatch(die)
        self.weights, self.caches = weights, mem.kv.caches()
        main, mtp = self.weights.layers, [mtp.layer for mtp in self.weights.mtp]
        self.layer_index = {id(layer): index for index, layer in enumerate([*main, *mtp])}
        self.drafter: Drafter | None = None
        if mem.steps.mtp:
            caches = self.caches[self.config.num_hidden_layers :]
            self.drafter = Drafter(mem, weights, caches, self.runner, chooser)
        # What goes on from the sampled tokens, MTP or a step that was planned ahead, does so on all ranks of
        # a DP group, which draw the same; else rank 0 is enough.
        goes_on = self.drafter is not None or mem.steps.plans_ahead
        self._has_logits = goes_on or not self.runner.frame.group_rank
        # Event IDs count the MoE layers of all steps, MTP's included, from 1 on.
        used = [mtp.layer for mtp in self.drafter.layers] if self.drafter is not None else []
        self._events_per_step = self._num_exchanges([*self.weights.layers, *used])

    def use_launcher(self, launcher: Launcher) -> None:
        """Make each launch take the host's time from now on."""
        self.launcher = launcher
        for runner in self.traversal.all_runners:
            runner.launcher = launcher

    def refuse(self) -> None:
        """Run no step until the host has called all dies back."""
        self._rollback.fail()

    async def run(self) -> None:
        """Carry out commands until Shutdown, then wait for the transfers that have begun."""
        self.runner.at()
        try:
            while True:
                command = await self._next_command()
                if isinstance(command, Shutdown):
                    break
                await self.obey(command)
            for transfer in self._transfers:
                await self.die.clock.join(transfer)
        except Exception as error:
            self.reports.put(StepFailed(DieNumber(self.die.index), error))
        finally:
            for transfer in self._transfers:
                transfer.cancel()

    async def _next_command(self) -> msgspec.Struct:
        while True:
            with contextlib.suppress(GlitchError):  # in a look at the queue, which is still as it was
                return await self.die.next_command()

    async def obey(self, command: msgspec.Struct) -> None:
        """Carry out a command of the host; transfers with a ticket go on beside later commands."""
        match command:
            case StepPlan():
                await self._attempt(command)
            case RollBack(epoch=epoch, step=step):
                if self.drafter is not None:
                    self.drafter.undo(step)
                self._rollback.enter(epoch)
                self.reports.put(RolledBack(DieNumber(self.die.index), epoch))
            case Resume(epoch=epoch):
                for runner in self.traversal.all_runners:
                    runner.reset(epoch)
                self._rollback.resume()
            case Probe():
                self.reports.put(ProbeDone(self.rank))
            case CopyBlocks(ticket=None):
                await again_after_glitches(partial(self._copy_blocks, command))
            case CopyBlocks(ticket=int(ticket)):
                copy = partial(self._copy_blocks, command)
                self._run_beside(copy, CopyDone(self.rank, ticket), "copy blocks")
            case SetExpertMap(log2phy=log2phy, logcnt=logcnt) if self.mem.replicas is not None:
                self.mem.replicas.set_tables(log2phy, logcnt)
            case CollectLoad() if self.mem.replicas is not None:
                await self._report_load(self.mem.replicas)
            case LoadExperts(loads=loads) if self.mem.redundant is not None:
                loading = partial(load_experts, self.die, self.mem.redundant, loads)
                self._run_beside(loading, ExpertsLoaded(DieNumber(self.die.index)), "load experts")
            case _:
                raise ProtocolError(f"die {self.die.index} does not know the command {command!r}")

    async def _attempt(self, plan: StepPlan) -> None:
        """Run a step to the end, or until an error code or a rollback ends it early.

        A step that was called back before it began does not run at all. The host launches it again.
        """
        process = asyncio.current_task()
        assert isinstance(process, Process)
        try:
            with self._rollback.ending([process]):
                await self.step(plan)
        except RollbackCalled:
            pass
        except GlitchError as error:
            self._rollback.fail()
            self.reports.put(StepFailed(DieNumber(self.die.index), error))
        else:
            self.reports.put(StepDone(self.rank, plan.step, self.chooser.faults))

    def _run_beside(
        self, transfer: Callable[[], Coroutine[Any, Any, None]], done: msgspec.Struct, name: str
    ) -> None:
        """Start a transfer to run beside the steps; report `done` to the host at its end."""

        async def run() -> None:
            try:
                await again_after_glitches(transfer)
            except Exception as error:
                self.reports.put(StepFailed(DieNumber(self.die.index), error))
            else:
                self.reports.put(done)

        running = [process for process in self._transfers if not process.done()]
        self._transfers = [*running, self.die.spawn(run(), name=name)]

    async def _report_load(self, replicas: ReplicaMap) -> None:
        """Copy the experts' load counts to the buffer that the host reads, and tell the host."""
        work = 2.0 * replicas.reported.nbytes
        with contextlib.suppress(GlitchError):  # what it has written stays, and is counted once
            await self.die.compute("Report load", replicas.report, nbytes=work, core="aiv")
        self.reports.put(LoadCollected(self.rank))

    async def _copy_blocks(self, command: CopyBlocks) -> None:
        pieces = []
        for src_tier, src, dst_tier, dst in command.copies:
            sources = self.mem.kv.block_pieces(src_tier, src)
            targets = self.mem.kv.block_pieces(dst_tier, dst)
            for (source, nbytes), (target, _) in zip(sources, targets, strict=True):
                pieces.append(Copy(source, target, nbytes))
        await self.die.dma.copy(pieces, name="KV blocks", weight=self.mem.kv.piece_weight)

    async def step(self, plan: StepPlan) -> None:
        """Run a forward pass: the main model, sampling, and MTP's drafts for the next step."""
        if self.launcher is not None:
            self.launcher.begin(plan)
        lists = self._write_lists(plan)
        self.runner.at()  # a step that was ended early has left this process in a layer
        plan = await self._resolve(plan)
        self.plan, self.chooser.faults = plan, {}
        w, frame, batch = self.weights, self.runner.frame, Batch.of(*lists)
        first_event = plan.step * self._events_per_step + 1
        h = self.ws.take("h", plan.num_tokens, self.config.hidden_size)
        frame.begin_pass(w, w.layers[0], h, batch, plan.token_ids)
        frame.hidden = self.ws.take("hidden", *h.shape)
        frame.logit_rows = plan.logit_rows if self._has_logits else ()
        frame.logits = self.result("logits", len(frame.logit_rows), self.config.vocab_size)
        await self.runner.run(EMBED)
        await self.run_layers(w.layers, self.caches[: len(w.layers)], first_event)
        await self.runner.run(self.traversal.head)
        if frame.logit_rows:
            if looks := plan.num_looks:
                nbytes = 4.0 * looks * self.config.vocab_size
                await self.runner.launch(
                    "Logits", "aiv", self.die.spec.kernel_ns(0, nbytes, "aiv"), rows=looks
                )
            await self.runner.pace.settle()  # the host may have to launch what follows
            self.chooser.choose(plan, frame.logits)
        if self.drafter is not None:
            first_event += self._num_exchanges(w.layers)
            await self.drafter.propose(plan, batch, first_event, self.run_layers, self.launcher)
        await self.runner.pace.settle()
        if self.launcher is not None:
            self.launcher.end()

    async def _resolve(self, plan: StepPlan) -> StepPlan:
        """Complete a plan made by the host before the previous step had ended."""
        if all(seq < 0 for seq in plan.carried_seq):
            return plan
        rows = CarriedRows.of(self.mem, plan)
        kernel = partial(rows.resolve, self.mem.kv.sizes.block_size)
        duration_ns = self.die.spec.kernel_ns(0, rows.nbytes, "aiv")
        await self.runner.launch("Resolve", "aiv", duration_ns, kernel, plan.num_tokens)
        return msgspec.structs.replace(plan, **rows.completed)

    def result(self, name: str, *shape: int) -> Array:
        """Return a result buffer of the current step, which the host reads after the step."""
        return self.mem.result(name, self.plan.step, *shape)

    async def run_layers(self, layers: Sequence[Layer], caches: Sequence[KVCache], first_event: int) -> None:
        """Run layers in place on the rows of the pass.

        Each MoE layer has one exchange; their event IDs count up from `first_event`.
        """
        way = next(way for way in self.traversal.ways[::-1] if len(way.runners) >= self.plan.num_parts)

        def visits() -> list[Visit]:
            event, found = first_event, []
            for layer, cache in zip(layers, caches, strict=True):
                index = self.layer_index[id(layer)]
                found.append(Visit(index, layer, cache, way.programs[index], event))
                event += layer.moe is not None
            return found

        if way.runners[0] is not self.runner:
            await self.runner.pace.settle()
        begin(way.runners, self.runner.frame)
        await way.schedule(way.runners, visits, self.end_layer)
        for runner in way.runners:
            runner.at()
            if runner.pace is not self.runner.pace:
                await runner.pace.settle()

    async def end_layer(self, index: int) -> None:
        """Tell the host when a layer of the main model is done, if the plan asks for such reports.

        MTP layers are not reported: they end with the step.
        """
        if self.plan.reports_layers and index < self.config.num_hidden_layers:
            await self.runner.pace.settle()
            assert self.layer_reports is not None
            self.layer_reports.put(LayerDone(self.rank, self.plan.step, index))

    @staticmethod
    def _num_exchanges(layers: Sequence[Layer]) -> int:
        return sum(layer.moe is not None for layer in layers)

    def _write_lists(self, plan: StepPlan) -> tuple[Array, Array, Array, Array]:
        """Write the plan's index lists into HBM; return where they are, for the step's batch."""
        rows, take = plan.num_tokens, self.ws.take
        positions, slots, seq_of = (take(name, rows) for name in ("positions", "slots", "seq_of"))
        tables = take("block_tables", len(plan.block_tables), self.mem.kv.sizes.max_blocks_per_seq)
        positions[:], slots[:], seq_of[:] = plan.positions, plan.slots, plan.seq_of
        if "token_ids" in self.ws:
            take("token_ids", rows)[:] = plan.token_ids
        if self.drafter is not None:
            self.drafter.begin(plan)
        for row, table in zip(tables, plan.block_tables, strict=True):
            row[: len(table)] = table
        return positions, slots, seq_of, tables
