"""A task executor (TE): dies that run one model together, their DP groups, and the loop that drives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from xdeepserve.engine.balance.reconfigure import Prefetched
from xdeepserve.engine.deploy.deployment import ExecutionConfig, HealthConfig, RecoveryConfig
from xdeepserve.engine.die.expert_memory import STOP
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.dp.events import Events, TEChanged, TERolledBack
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import (
    Beat,
    CopyDone,
    ExpertsLoaded,
    LoadCollected,
    PoolReady,
    ProbeDone,
    RolledBack,
    Shutdown,
    StepDone,
    StepFailed,
    Wake,
)
from xdeepserve.engine.te.dealer import Dealer
from xdeepserve.engine.te.heartbeat import Heartbeats
from xdeepserve.engine.te.host import Host
from xdeepserve.engine.te.kv_statuses import KVStatuses
from xdeepserve.engine.te.layer_reports import LayerReports
from xdeepserve.engine.te.life import LIVES, Life
from xdeepserve.engine.te.lost_clients import LostClients
from xdeepserve.engine.te.lost_pages import LostPages, Mend
from xdeepserve.engine.te.probe import Prober
from xdeepserve.engine.te.reports import ExpertLoad, expert_loads
from xdeepserve.engine.te.server_monitor import server_monitor
from xdeepserve.engine.te.server_seats import ServerSeats
from xdeepserve.engine.te.shell import TEShell
from xdeepserve.engine.te.steps_apart import StepsApart
from xdeepserve.engine.te.steps_together import StepsTogether
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import DeadlineError, GlitchError, XDeepServeError
from xdeepserve.machine import follow
from xdeepserve.step.linear import Threads


class TE:
    """Runs steps on all its dies, for as long as any of its DP groups has work.

    `on_failure` is told once if the TE is lost.
    """

    def __init__(
        self,
        plan: TEPlan,
        policy: str,
        threads: Threads,
        on_failure: Callable[[TE, Exception], None],
        tell: Events,
        execution: ExecutionConfig | None = None,
        decode_policy: str = "kv",
        seed: int = 0,
        health: HealthConfig | None = None,
        status_period_ns: int = 0,
        recovery: RecoveryConfig | None = None,
        *,
        mend: Mend,
    ) -> None:
        pod, self.plan, self.sizes, self.tell = plan.pod, plan, plan.sizes, tell
        self._clock, self.on_failure = pod.clock, on_failure
        # All that the loop waits for comes here: reports, news from outside, the end.
        self.inbox = plan.host_queue(plan.sizes.place.first_die, f"inbox of {plan.sizes.place.name}")
        self.groups = plan.groups(tell)
        self._turns = StepsApart(self) if plan.sizes.walk.flows else StepsTogether(self)
        if plan.make_tier is not None:
            for group in self.groups:
                group.scheduler.pool = plan.make_tier(group, self._turns.inbox_of(group).put)
        reports = [self._turns.inbox_of(group) for group in self.groups for _ in group.dies]
        self.executors = plan.executors(threads, reports)
        self.expert_programs = plan.expert_programs(threads, self.inbox)
        self._gangs = plan.gangs(self.executors, self.expert_programs, threads.count)
        health, recovery = health or HealthConfig(), recovery or RecoveryConfig()
        self.health = Heartbeats(plan.sizes.place.name, len(self.groups), health, lambda: pod.clock.now)
        self.recovery = plan.rollback(recovery)
        self.prober = Prober(self.groups, self.health, self.wake)
        eplb, wake = plan.eplb_trigger(), self._turns.wake
        statuses = KVStatuses(self.groups, status_period_ns, lambda: pod.clock.now)
        self.te_shell = TEShell(
            self.groups, self.health, tell, policy, decode_policy, eplb, statuses=statuses, wake=wake
        )
        self.dealer = Dealer(self)
        self.reconfiguration = None if eplb is None else plan.reconfiguration(eplb, self.inbox)
        self.seats = ServerSeats(self, threads)
        self.clients = LostClients(self, self._turns)
        self.monitor = server_monitor(plan, tell, self.seats, self.clients)
        self.lost_pages = LostPages(plan, self.groups, self.reconfiguration, mend)
        for group in self.groups:
            group.scheduler.fails_lost = recovery.kv_loss == "fail"
        self.host: Host | None = None
        if execution is not None:  # each TE's delays are its own
            host_seed = seed + 1_000_003 * plan.sizes.place.first_die
            self.host = Host(execution, plan.spec, self.executors, len(self.groups), host_seed)
        self._layers = LayerReports(self)
        self.processes: list[asyncio.Task[None]] = []
        self.life: Life = "planned"
        self._stops = False  # ends when it has no work, whoever still wants its blocks
        self.on_turn: Callable[[], None] = lambda: None  # told at each turn of the loop: there may be room
        self.moves_out = False  # what is here goes on elsewhere

    @property
    def step_idx(self) -> int:
        """Number of the next step."""
        return self._turns.step_idx

    @property
    def under_way(self) -> set[tuple[int, int]]:
        """The steps that have been launched and have not ended: of which DP group, and their numbers."""
        return self._turns.under_way

    @property
    def num_sequences(self) -> int:
        """All that are not finished."""
        return sum(group.num_sequences for group in self.groups) + self.te_shell.num_pending

    @property
    def kv_load(self) -> float:
        """Share of KV blocks that are used or spoken for, over all groups."""
        return sum(group.status().kv_load for group in self.groups) / len(self.groups)

    @property
    def expert_load(self) -> list[ExpertLoad]:
        """How uneven the load of each layer's experts was in the latest time slice."""
        balance = self.reconfiguration
        return [] if balance is None else expert_loads(self.sizes.place.name, balance.layers, balance.skews)

    @property
    def num_reconfigurations(self) -> int:
        """Times that replicas of experts have changed."""
        return 0 if self.reconfiguration is None else self.reconfiguration.num_done

    # ---- life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Spawn the die programs and the loop."""
        self._live("start")
        for executor in self.executors:
            self.processes.append(executor.die.spawn(executor.run(), f"executor {executor.rank}"))
        programs, self.expert_programs = self.expert_programs, []
        for program in programs:
            self.begin(program)
        self.monitor.start()
        self._loop = self._clock.spawn(self._run(), name=self.sizes.place.name)
        self.processes += [self._loop, *self._turns.start(), *self._layers.start()]

    def begin(self, program: ExpertProgram) -> None:
        """An expert die begins to serve."""
        self.expert_programs.append(program)
        self.processes.append(program.die.spawn(program.run(), "experts"))

    def load(self) -> None:
        """Its weights are on their way."""
        self._live("load")

    def drain(self, moves_out: bool) -> None:
        """Take no new work, and end what is here or, if it `moves_out`, have it go on elsewhere."""
        self._live("drain")
        self.moves_out = moves_out
        self.wake()

    async def leave(self) -> None:
        """From within a process, when it drains: end every task, and give dies and memory back.

        On return it is gone, or lost.
        """
        await self._end_of(self._loop)
        if self.life == "draining":
            self._shut_down()
            for process in self.processes:
                await self._end_of(process)
        if self.life == "draining":
            self._end_life()
            self.plan.release()

    async def _end_of(self, process: asyncio.Task[None]) -> None:
        """Until it has ended by itself, with a die that has failed, or with all of a TE that is lost."""
        try:
            await self._clock.join(process)
        except asyncio.CancelledError:
            if not process.cancelled():
                raise

    def give_up(self) -> None:
        """Its weights do not come."""
        self._end_life()

    async def stop(self) -> None:
        """End every task; called when no request is left."""
        if self.life in ("planned", "loading", "gone"):
            return
        self._shut_down()
        _, late = await asyncio.wait(self.processes, timeout=10)
        for process in late:
            process.cancel()
        await asyncio.gather(*self.processes, return_exceptions=True)
        self._end_life()

    def _shut_down(self) -> None:
        """Have every process end when it has nothing to do."""
        self.prober.end()
        if self.reconfiguration is not None:
            self.reconfiguration.stop()
        self.inbox.put(Shutdown())
        self._turns.stop()
        self._layers.stop()
        for executor in self.executors:
            executor.die.put(Shutdown())
        self.ring(STOP)

    def _end_life(self) -> None:
        self._live("stop")
        self.close()

    def close(self) -> None:
        """Let this computer's threads go."""
        for gang in self._gangs:
            gang.close()

    def kill(self) -> None:
        """It is lost: end every task at once, without waiting."""
        if self.life == "gone":
            return  # without a task, and its dies may be another's
        if self.is_running:
            self._live("lose")
        self.prober.end()
        if self.reconfiguration is not None:
            self.reconfiguration.stop()
        dies = (self.plan.pod.dies[die] for die in self.plan.every_die)
        for process in dict.fromkeys([*self.processes, *(each for die in dies for each in die.running)]):
            if process is not asyncio.current_task():
                process.cancel()

    @property
    def is_running(self) -> bool:
        return self.life in ("ready", "draining")

    def fail(self, error: Exception) -> None:
        self.on_failure(self, error)

    def _live(self, cause: str) -> None:
        refusal = f"TE {self.sizes.place.name} cannot {cause}: it is {self.life}"
        self.life = follow(LIVES, self.life, cause, lambda: refusal)
        self.tell.show(TEChanged(self.sizes.place.name, self.life))

    @property
    def is_suspect(self) -> bool:
        """None of its groups is healthy, or its shell is silent."""
        return self.health.shell != "healthy" or not self.health.ranks("healthy")

    def wake(self) -> None:
        """Tell the loops that there is new work, or room for what could not run."""
        self._turns.wake()
        self.inbox.put(Wake())

    # ---- the loop -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Schedule, run, postprocess; sleep while there is nothing to do."""
        try:
            is_over = False
            while not is_over:
                try:
                    is_over = await self._turn()
                except GlitchError as error:
                    await self._roll_back(error)
                except DeadlineError:
                    if not self.clients.go_on_without(self.health.ranks("lost") or self._copying):
                        raise
        except Exception as error:
            self.fail(error)

    async def _turn(self) -> bool:
        """One turn of the loop; whether it was the last."""
        self.check_memory()
        for group in self.groups:
            group.poll_transfers()
        await self.dealer.assign()
        self.check_memory()
        if self.moves_out and self._turns.is_idle:
            self.te_shell.move_out()
        self.on_turn()
        if not await self._turns.advance():
            if self._is_done:
                return True
            await self._rest()
        # Let the front end turn: it streams what came out and takes what came in.
        await asyncio.sleep(0)
        return False

    async def _roll_back(self, error: GlitchError) -> None:
        """Run the steps under way once more. The error, if that is not to be, or another one, if it fails."""
        begun_ns, turns = self._clock.now, self._turns
        self.monitor.find_lost()
        first_steps = [turns.oldest(group) for group in self.groups for _ in group.dies]
        await self.recovery.roll_back(error, first_steps, self.hear)
        self.health.forgive()
        first_step = turns.roll_back()
        await self.lost_pages.mend()
        self.recovery.resume(first_step)
        self.tell.show(TERolledBack(self.sizes.place.name, self.recovery.epoch, str(error), begun_ns))
        await turns.run_again()

    @property
    def _is_done(self) -> bool:
        """The loop may end: there is nothing to do, and nobody who leaves still wants something of it."""
        if self.life != "draining":
            return False
        is_wanted = self.plan.num_readers or not self.te_shell.is_empty or self._is_pooling
        return not self.te_shell.has_work if self._stops else not is_wanted

    @property
    def _is_pooling(self) -> bool:
        pools = [group.scheduler.pool for group in self.groups]
        return any(pool is not None and pool.is_moving for pool in pools)

    def schedule(self, group: DPGroup, step_idx: int) -> bool:
        """Schedule a group's next step; whether it has rows. A TE that moves out has no more steps."""
        return not self.moves_out and group.plan(step_idx)

    def ring(self, value: int) -> None:
        """Ring the doorbells of the expert dies: a flag in their memory, which their kernels poll."""
        for program in self.expert_programs:
            program.mem.doorbell.write(program.die.memory, value)

    @property
    def _copying(self) -> list[int]:
        """Groups that wait for a transfer or a copy of theirs, and owe no other answer meanwhile."""
        there = (g for g in self.groups if not self.health.is_given_up(g.rank))
        moves = (g for g in there if g.places.has_transfers or (g.rtc.is_moving and not g.places.reserved))
        return [group.rank for group in moves]

    async def _rest(self) -> None:
        """Nothing can run. Wait for a transfer to end if one is under way, else for news from outside."""
        groups = self.groups
        if self._copying:
            await self.hear(self._clock.now + self.health.lost_ns)
        elif self.te_shell.has_work and not any(g.handover.sending or g.places.reserved for g in groups):
            raise XDeepServeError(f"{self.sizes.place.name}: there is work, but none of it can run")
        else:
            await self.hear(self.health.deadline_ns)  # of probes, if any are out

    @property
    def is_whole(self) -> bool:
        """No page of memory is lost that has not been put right."""
        return not self.lost_pages.pending

    def check_memory(self) -> None:
        """The error of a page that is lost; while dies are called back, it is put right with the rest."""
        if not self.is_whole and self.recovery.phase == "serving":
            raise self.lost_pages.pending[0]

    async def hear(self, deadline_ns: int | None) -> msgspec.Struct:
        """The next message; ends of transfers are passed on. DeadlineError names the groups that are lost."""
        try:  # what the control plane asks says nothing of dies, and moves no deadline
            while isinstance(message := await self.inbox.get(deadline_ns), Beat):
                self.take(message)
        except DeadlineError as passed:
            raise self.health.error() or passed from None
        self.take(message)
        self.check_memory()
        return message

    def take(self, message: msgspec.Struct) -> None:
        """What a message says is done, or noted. The error of a die that has failed is raised."""
        match message:
            case StepFailed(error=error):
                raise error
            case RolledBack():
                self.recovery.hear(message)
            case CopyDone(rank=rank, ticket=ticket):
                self.health.notice(rank // self.sizes.groups.tp)
                self.groups[rank // self.sizes.groups.tp].finish_copies(ticket)
            case PoolReady(rank=rank, ticket=ticket):
                self.groups[rank].copy_pool(ticket)
            case StepDone(rank=rank, step=step_idx, faults=faults):
                self.health.hear(rank // self.sizes.groups.tp)
                self.groups[rank // self.sizes.groups.tp].note_faults(step_idx, faults)
                self._turns.note(message)
            case ProbeDone(rank=rank):
                self.prober.hear(rank // self.sizes.groups.tp)
            case Beat(name=name, answers=answers, travel_ns=travel_ns):
                answers.put(name, travel_ns)
            case LoadCollected() | ExpertsLoaded() | Prefetched() if self.reconfiguration is not None:
                self.reconfiguration.take(message)
            case Shutdown():
                self._stops = True
                if self.life == "ready":
                    self._live("drain")

    def check_integrity(self) -> None:
        """Every KV block of every group is accounted for, and dies that share weights hold the same."""
        for group in self.groups:
            group.check_integrity()
        for gang in self._gangs:
            gang.check_integrity()
