"""A task executor (TE): dies that run one model together, their DP groups, and the loop that drives them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from xdeepserve.engine.build import TEPlan
from xdeepserve.engine.deployment import ExecutionConfig
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.programs.expert import STOP
from xdeepserve.engine.programs.messages import CopyDone, Shutdown, StepDone, StepFailed
from xdeepserve.engine.programs.ops import Threads
from xdeepserve.engine.serving.host import Host
from xdeepserve.engine.serving.te_shell import TEShell
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.queue import Queue

STEP_DEADLINE_NS = 60_000_000_000  # a step that takes a minute of virtual time has gone wrong


class Wake(msgspec.Struct, frozen=True):
    """There is new work, or room for old work."""


class TE:
    """Runs steps on all its dies in lockstep, for as long as any of its DP groups has work.

    Dispatch and combine are barriers of all ranks, so a group without work runs empty steps along.
    `on_failure` is told once if the TE is lost.
    """

    def __init__(
        self,
        plan: TEPlan,
        policy: str,
        threads: Threads,
        on_failure: Callable[[Exception], None],
        execution: ExecutionConfig | None = None,
        decode_policy: str = "kv",
        seed: int = 0,
    ) -> None:
        pod, self.sizes = plan.pod, plan.sizes
        self._clock, self.on_failure = pod.clock, on_failure
        # All that the loop waits for comes here: reports of dies, news from outside, the end.
        self._inbox: Queue[msgspec.Struct] = Queue(pod.clock, f"inbox of {plan.sizes.name}")
        dies, tp, cost = [pod.dies[die] for die in plan.dies], plan.sizes.tp, plan.load_cost()
        self.groups = [
            DPGroup(
                first // tp, dies[first : first + tp], plan.memories[first : first + tp], plan.sizes, cost
            )
            for first in range(0, len(dies), tp)
        ]
        self.executors = plan.executors(threads, self._inbox)
        self.expert_programs = plan.expert_programs(threads, self._inbox)
        self._gang = plan.gang(self.executors, self.expert_programs, threads.count)
        self.te_shell = TEShell(self.groups, policy, decode_policy)
        self.host: Host | None = None
        if execution is not None:  # each TE's delays are its own
            host_seed = seed + 1_000_003 * plan.sizes.first_die
            self.host = Host(execution, pod.spec, self.executors, len(self.groups), host_seed)
        self._processes: list[asyncio.Task[None]] = []
        self._is_ending = False
        self._num_done: Counter[int] = Counter()  # dies that have ended a step
        self.step_idx = 0  # of the next step

    @property
    def num_sequences(self) -> int:
        """All that are not finished."""
        return sum(group.num_sequences for group in self.groups) + self.te_shell.num_pending

    @property
    def kv_load(self) -> float:
        """Share of KV blocks that are used or spoken for, over all groups."""
        return sum(group.status().kv_load for group in self.groups) / len(self.groups)

    # ---- life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Spawn the die programs and the loop."""
        for executor in self.executors:
            self._processes.append(self._clock.spawn(executor.run(), name=f"executor {executor.rank}"))
        for program in self.expert_programs:
            self._processes.append(self._clock.spawn(program.run(), name=f"experts of {program.die.name}"))
        loop = self._run_freely() if self.sizes.is_dataflow else self._run()
        self._processes.append(self._clock.spawn(loop, name=self.sizes.name))

    async def stop(self) -> None:
        """End every task; called when no request is left."""
        if not self._processes:
            return
        self._inbox.put(Shutdown())
        for executor in self.executors:
            executor.die.put(Shutdown())
        self._ring(STOP)
        _, late = await asyncio.wait(self._processes, timeout=10)
        for process in late:
            process.cancel()
        await asyncio.gather(*self._processes, return_exceptions=True)
        self._processes.clear()
        if self._gang is not None:
            self._gang.close()

    def kill(self) -> None:
        """End every task at once, without waiting."""
        for process in self._processes:
            if process is not asyncio.current_task():
                process.cancel()

    @property
    def is_running(self) -> bool:
        return bool(self._processes)

    def wake(self) -> None:
        """Tell the loop that there is new work, or room for what could not run."""
        self._inbox.put(Wake())

    # ---- the loop -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Schedule, run, postprocess; sleep while there is nothing to do.

        With `plans_ahead` a step is scheduled and launched while the one before runs, and only then is that
        one waited for.
        """
        running: int | None = None
        try:
            while True:
                for group in self.groups:
                    group.poll_transfers()
                self.te_shell.assign()
                has_rows = [group.plan(self.step_idx) for group in self.groups]
                launched = await self._launch() if any(has_rows) else None
                if running is not None or launched is not None:
                    if not self.sizes.plans_ahead:
                        running, launched = launched, None
                    if running is not None:
                        await self._end(running)
                    running = launched
                elif self._is_ending and not self.te_shell.has_work:
                    return
                else:
                    await self._rest()
                # Let the front end turn: it streams what came out and takes what came in.
                await asyncio.sleep(0)
        except Exception as error:
            self.on_failure(error)

    async def _run_freely(self) -> None:
        """The loop where tokens flow: every DP group takes its next step when it has ended its last one."""
        running: dict[int, tuple[int, int]] = {}  # group -> its step, and by when that must have ended
        steps = [0] * len(self.groups)
        try:
            while True:
                for group in self.groups:
                    group.poll_transfers()
                self.te_shell.assign()
                for rank, group in enumerate(self.groups):
                    if rank not in running and group.plan(steps[rank]):
                        await self._launch_one(rank, steps[rank])
                        running[rank] = steps[rank], self._clock.now + STEP_DEADLINE_NS
                if running:
                    message = await self._next(min(deadline for _, deadline in running.values()))
                    if isinstance(message, StepDone):
                        steps[message.rank] += 1
                        self.groups[message.rank].finish(running.pop(message.rank)[0])
                elif self._is_ending and not self.te_shell.has_work:
                    return
                else:
                    await self._rest()
                await asyncio.sleep(0)
        except Exception as error:
            self.on_failure(error)

    async def _launch_one(self, rank: int, step_idx: int) -> None:
        """Send a group its planned step. The host's gap concerns this group alone."""
        group, delay, bucket = self.groups[rank], 0, 0
        if self.host is not None:
            delay = self.host.gap_ns() + self.host.launches_ns(step_idx)[rank]
            bucket = self.host.bucket([group.num_planned_rows])
        group.launch(step_idx, delay, bucket)

    async def _launch(self) -> int:
        """Send the planned step to all dies; its number."""
        step_idx, delays, bucket = self.step_idx, [0] * len(self.groups), 0
        if self.host is not None:
            num_rows = [group.num_planned_rows for group in self.groups]
            await self._clock.sleep(self.host.gap_ns())
            delays, bucket = self.host.launches_ns(step_idx), self.host.bucket(num_rows)
        self._ring(step_idx + 1)
        for group, delay in zip(self.groups, delays, strict=True):
            group.launch(step_idx, delay, bucket)
        self.step_idx += 1
        return step_idx

    async def _end(self, step_idx: int) -> None:
        """Wait until all dies have ended a step, and take its results."""
        deadline = self._clock.now + STEP_DEADLINE_NS
        while self._num_done[step_idx] < len(self.executors):
            await self._next(deadline)
        del self._num_done[step_idx]
        for group in self.groups:
            group.finish(step_idx)

    def _ring(self, value: int) -> None:
        """Ring the doorbells of the expert dies: a flag in their memory, which their kernels poll."""
        for program in self.expert_programs:
            program.mem.doorbell.write(program.die.memory, value)

    async def _rest(self) -> None:
        """Nothing can run. Wait for a transfer to end if one is under way, else for news from outside."""
        schedulers = [group.scheduler for group in self.groups]
        if any(scheduler.has_transfers or scheduler.rtc.is_moving for scheduler in schedulers):
            await self._next(self._clock.now + STEP_DEADLINE_NS)
        elif self.te_shell.has_work and not any(scheduler.sending for scheduler in schedulers):
            raise XDeepServeError(f"{self.sizes.name}: there is work, but none of it can run")
        else:
            await self._next(None)

    async def _next(self, deadline_ns: int | None) -> msgspec.Struct:
        """The next message; ends of transfers are passed on to their group."""
        message = await self._inbox.get(deadline_ns)
        match message:
            case StepFailed(error=error):
                raise error
            case CopyDone(rank=rank, ticket=ticket):
                self.groups[rank // self.sizes.tp].finish_copies(ticket)
            case StepDone(step=step_idx):
                self._num_done[step_idx] += 1
            case Shutdown():
                self._is_ending = True
        return message

    def check_integrity(self) -> None:
        """Every KV block of every group is accounted for."""
        for group in self.groups:
            group.check_integrity()
