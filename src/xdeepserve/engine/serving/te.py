"""A task executor (TE): dies that run one model together, their DP groups, and the loop that drives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.engine.programs.messages import CopyDone, Shutdown, StepDone, StepFailed
from xdeepserve.engine.programs.ops import Threads
from xdeepserve.engine.serving.te_shell import TEShell
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.queue import Queue

STEP_DEADLINE_NS = 60_000_000_000  # a step that takes a minute of virtual time has gone wrong


class TE:
    """Runs steps on all its dies in lockstep, for as long as any of its DP groups has work.

    Dispatch and combine are barriers of all ranks, so a group without work runs empty steps along.
    `on_failure` is told once if the pod is lost.
    """

    def __init__(self, plan: PodPlan, threads: Threads, on_failure: Callable[[Exception], None]) -> None:
        pod, sizes = plan.pod, plan.sizes
        self._clock, self._on_failure = pod.clock, on_failure
        self._wake: Queue[Shutdown | None] = Queue(pod.clock, "work of the TE")
        self._reports: Queue[msgspec.Struct] = Queue(pod.clock, "reports of dies")
        self.groups = [
            DPGroup(rank, pod.dies[rank], mem, sizes, plan.load_cost())
            for rank, mem in enumerate(plan.memories)
        ]
        self.executors = [
            Executor(rank, pod.dies[rank], mem, xccl, threads, self._reports)
            for rank, (mem, xccl) in enumerate(zip(plan.memories, plan.exchanges(), strict=True))
        ]
        self.te_shell = TEShell(self.groups, plan.deployment.scheduler.dispatch)
        self._processes: list[asyncio.Task[None]] = []
        self.step_idx = 0

    # ---- life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Spawn the die programs and the loop."""
        for executor in self.executors:
            self._processes.append(self._clock.spawn(executor.run(), name=f"executor {executor.rank}"))
        self._processes.append(self._clock.spawn(self._run(), name="TE"))

    async def stop(self) -> None:
        """End every task; called when no request is left."""
        if not self._processes:
            return
        self._wake.put(Shutdown())
        for executor in self.executors:
            executor.die.put(Shutdown())
        _, late = await asyncio.wait(self._processes, timeout=10)
        for process in late:
            process.cancel()
        await asyncio.gather(*self._processes, return_exceptions=True)
        self._processes.clear()

    @property
    def is_running(self) -> bool:
        return bool(self._processes)

    def wake(self) -> None:
        """Tell the loop that there is new work."""
        if not len(self._wake):
            self._wake.put(None)

    # ---- the loop -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Schedule, run, postprocess; sleep while there is nothing to do."""
        try:
            while True:
                if not self.te_shell.has_work:
                    if isinstance(await self._wake.get(), Shutdown):
                        return
                    continue
                self.te_shell.assign()
                has_rows = [group.plan() for group in self.groups]
                if any(has_rows):
                    await self._step()
                else:
                    await self._wait_for_transfer()
                # Let the front end turn: it streams what came out and takes what came in.
                await asyncio.sleep(0)
        except Exception as error:
            for process in self._processes:
                if process is not asyncio.current_task():
                    process.cancel()
            self._on_failure(error)

    async def _step(self) -> None:
        """One step on all dies."""
        for group in self.groups:
            group.launch(self.step_idx)
        deadline, num_open = self._clock.now + STEP_DEADLINE_NS, len(self.groups)
        while num_open:
            num_open -= isinstance(await self._report(deadline), StepDone)
        for group in self.groups:
            group.finish()
        self.step_idx += 1

    async def _wait_for_transfer(self) -> None:
        """All that could run waits for blocks that are on their way between HBM and host DRAM."""
        if not any(group.scheduler.in_transit for group in self.groups):
            raise XDeepServeError("scheduler: there is work, but none of it can run")
        await self._report(self._clock.now + STEP_DEADLINE_NS)

    async def _report(self, deadline_ns: int) -> msgspec.Struct:
        """The next message of a die; ends of transfers are passed on to their group."""
        report = await self._reports.get(deadline_ns)
        if isinstance(report, StepFailed):
            raise report.error
        if isinstance(report, CopyDone):
            self.groups[report.rank].scheduler.finish_transfer(report.ticket)
        return report

    def check_integrity(self) -> None:
        """Every KV block of every group is accounted for."""
        for group in self.groups:
            group.check_integrity()
