"""A task executor (TE): dies that run one model together, their DP groups, and the loop that drives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from xdeepserve.engine.die.expert_memory import STOP
from xdeepserve.engine.die.experts import ExpertProgram, ring
from xdeepserve.engine.dp.events import EventLog, Mended
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import Shutdown, Wake
from xdeepserve.engine.numbers import GroupRank, StepNo
from xdeepserve.engine.recovery.ladder import Loss, LossKind, Remedies, Remedy, at_once, climb
from xdeepserve.engine.te.hearing import Hearing, hear_layers
from xdeepserve.engine.te.heartbeat import Heartbeats
from xdeepserve.engine.te.invariants import check, is_breach
from xdeepserve.engine.te.life import Life, Lifetime
from xdeepserve.engine.te.listeners import listeners
from xdeepserve.engine.te.masters import Masters
from xdeepserve.engine.te.repairs import Mend, Repairs
from xdeepserve.engine.te.reports import ExpertLoad, expert_loads
from xdeepserve.engine.te.server_keeping import ServerKeeping
from xdeepserve.engine.te.server_monitor import ServerMonitor
from xdeepserve.engine.te.server_seats import Bring, ServerSeats
from xdeepserve.engine.te.shell import TEShell
from xdeepserve.engine.te.step_set import Loop, StepParts
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import DeadlineError, DriverReport, GlitchError, XDeepServeError
from xdeepserve.hw.queue import Queue
from xdeepserve.step.linear import Threads


class TE:
    """Task executor: runs steps on all its dies for as long as any of its DP groups has work.

    `on_loss` gets a loss that the TE cannot mend by itself; then the TE is lost.
    """

    def __init__(
        self,
        plan: TEPlan,
        threads: Threads,
        on_loss: Callable[[TE, Loss], None],
        tell: EventLog,
        mend: Mend,
    ) -> None:
        pod, name, settings = plan.pod, plan.name, plan.sizes.settings
        self.plan, self.sizes, self.tell, self.on_loss = plan, plan.sizes, tell, on_loss
        self._clock, self.lifetime, self.members = pod.clock, Lifetime(name, tell), plan.members
        self.processes: list[asyncio.Task[None]] = []

        # DP groups and their dies. All that the TE's loop waits for comes to its inbox: news from outside and
        # from the groups' masters, the end. What a group's dies report comes to its master's inbox.
        self.inbox = plan.host_queue(plan.dies[0], f"inbox of {name}")
        self.groups = plan.groups(tell)
        inboxes = plan.inboxes(self.groups)
        for group in self.groups:
            group.scheduler.fails_lost = settings.recovery.kv_loss == "fail"
            if plan.make_tier is not None:
                group.scheduler.pool = plan.make_tier(group, inboxes[group.rank].put)
        reports = [inboxes[group.rank] for group in self.groups for _ in group.dies]
        self.executors = plan.executors(threads, reports)
        self._layers: Queue[msgspec.Struct] = Queue(pod.clock, f"layers of {name}")
        for executor in self.executors:
            executor.layer_reports = self._layers
        for server in self.members.servers if plan.team.brings_servers else ():
            plan.make_program(server, threads, self.inbox)
        self._lockstep_runs = plan.lockstep_runs(self.executors, self.members.programs, threads.count)

        # What watches them, and what mends them.
        self.health = Heartbeats(
            name,
            [group.probe for group in self.groups],
            settings.health,
            lambda: pod.clock.now,
            self.members.is_lost,
        )
        self.monitor = ServerMonitor(plan)
        self.recovery = plan.rollback()
        eplb = plan.eplb_trigger()
        self.reconfiguration = None if eplb is None else plan.reconfiguration(eplb, self.inbox, tell)
        self.repairs = Repairs(plan, self.groups, self.reconfiguration, mend)
        self._hearing = Hearing(
            *(self.inbox, self.groups, self.lifetime, self.health),
            *(self.recovery, self.reconfiguration, self.repairs),
        )

        # What they work at, and in which steps.
        self.te_shell: TEShell[DPGroup] = TEShell(
            *(self.groups, self.health, self.lifetime, tell, settings, lambda: pod.clock.now),
            *(partial(self.inbox.put, Wake()), plan.status_gather(self.groups), eplb),
        )
        is_checked = settings.invariants
        parts = StepParts(
            *(pod.clock, self.groups, self.lifetime, self._hearing),
            *(self.health, self.recovery, self.reconfiguration, plan.host(self.executors)),
            num_parts=plan.num_parts(self.executors, self.groups, tell),
            after_turn=partial(check, self.health, self.te_shell) if is_checked else lambda steps: None,
        )
        self._masters = Masters(
            *(parts, self.members, inboxes, self.te_shell),
            room=plan.num_at_once,
            meets=plan.groups_meet,
        )
        self.te_shell.wake = self._masters.wake
        self.health.wake = self._masters.wake_all
        self.seats = ServerSeats(plan, self.monitor)
        self.keeping = ServerKeeping(
            *(plan, self.lifetime, self._hearing, self._masters, self.monitor),
            *(self.inbox, self.processes, self._fail),
        )

        # What the TE itself can do about a loss, and who hears of the moves of members.
        self.remedies: Remedies = {
            "run again": Remedy(self.recovery.why_not, self._roll_back),
            "mask": Remedy(self.seats.why_not, self.members.miss),
            "go on without": Remedy(self._why_not_without, self._go_on_without),
            "wait": Remedy(lambda _: None, lambda _: None),
        }
        self.members.listen(
            listeners(
                *(plan, tell, self.groups, self.health, self.recovery),
                *(self.reconfiguration, self.monitor, self._masters),
                program=partial(plan.make_program, threads=threads, reports=self.inbox),
                process=self.keeping.start_program,
            )
        )

    # ---- the loop ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Watch the groups' masters; sleep while there is nothing to do."""
        is_over = False
        while not is_over:
            try:
                is_over = await self._turn()
            except Exception as error:
                left = await climb(self._loss_of(error), self.remedies)
                if left is not None:
                    self.on_loss(self, left)
                    return
        self._masters.stop()
        self._layers.put(Shutdown())
        for executor in self.executors:
            executor.die.put(Shutdown())
        if not self.keeping.leave():
            ring(self.members.programs, STOP)

    async def _turn(self) -> bool:
        """Take a turn of the loop; return whether it was the last."""
        self._hearing.check_reports()
        for group in self.groups:
            group.poll_transfers()
        if self._masters.may_deal:
            try:
                await self.te_shell.gather_and_deal(self._hearing.check_reports)
            finally:
                self._masters.let_go_on()
        self._hearing.check_reports()
        if self.moves_out and self._masters.is_idle:
            self.te_shell.move_out()
        self.te_shell.on_turn()
        if not await self._masters.advance(self._look):
            if self._is_done:
                return True
            await self._rest()
        # Let the front end turn: it streams what came out and takes what came in.
        await asyncio.sleep(0)
        return False

    def _look(self, num_steps: int) -> int:
        """Let the monitor look at servers and clients; return the virtual time (ns) of its next look.

        `num_steps` have been launched so far.
        """
        for loss in self.monitor.look(num_steps):
            self.lose(loss)
        return self.monitor.next_ns

    async def _rest(self) -> None:
        """Wait while nothing can run: for the end of a transfer if one is under way, else for any news."""
        groups = self.groups
        if self._copying:
            await self._hearing.hear(self._clock.now + self.health.lost_ns)
        elif self.te_shell.has_work and not any(g.handover.sending or g.places.reserved for g in groups):
            raise XDeepServeError(f"{self.plan.name}: there is work, but none of it can run")
        else:
            await self._hearing.hear(self.health.deadline_ns)  # of probes, if any are out

    @property
    def _is_done(self) -> bool:
        """Whether the loop may end: there is no work, and no sequence or TE still needs this TE's memory."""
        if self.life != "draining":
            return False
        is_wanted = self.plan.num_readers or not self.te_shell.is_empty or self._is_pooling
        return not self.te_shell.has_work if self.lifetime.ends_idle else not is_wanted

    @property
    def _is_pooling(self) -> bool:
        pools = [group.scheduler.pool for group in self.groups]
        return any(pool is not None and pool.is_moving for pool in pools)

    @property
    def _copying(self) -> list[GroupRank]:
        """Groups waiting for a transfer or a copy, and owing no other answer meanwhile."""
        there = (g for g in self.groups if not self.health.is_given_up(g.rank))
        moves = (g for g in there if g.places.has_transfers or (g.rtc.is_moving and not g.places.reserved))
        return [group.rank for group in moves]

    def wake(self) -> None:
        """Wake the loops: there is new work, or room for work that could not run."""
        self._masters.wake_all()

    # ---- losses, and what mends them -----------------------------------------------------------------

    def lose(self, loss: Loss) -> None:
        """Climb the ladder with a loss at once, from wherever it was noticed.

        Losses that the loop mends are raised in the loop instead (`_run`).
        """
        left = at_once(climb(loss, self.remedies))
        if left is not None:
            self.on_loss(self, left)

    def _fail(self, error: Exception) -> None:
        """Climb the ladder with an error that has ended one of the TE's processes."""
        self.lose(Loss("breach" if is_breach(error) else "error", self.plan.name, (), error))

    def _loss_of(self, error: Exception) -> Loss:
        """Return the loss that an error in the loop tells of, with the dies that are suspected."""
        if isinstance(error, GlitchError):
            kind: LossKind = "report" if isinstance(error, DriverReport) else "glitch"
            return Loss(kind, self.plan.name, (error.die,), error)
        if not isinstance(error, DeadlineError):
            return Loss("breach" if is_breach(error) else "error", self.plan.name, (), error)
        silent = self.health.ranks("lost") or self._copying
        dies = tuple(die.index for rank in silent for die in self.groups[rank].dies)
        return Loss("silence", self.plan.name, dies, error)

    def foreseen(self, die: int) -> Loss:
        """Return the loss that would come if one of the TE's dies was lost."""
        is_server = self.plan.services is not None and self.members.server_on(die) is not None
        return Loss("server" if is_server else "die", self.plan.name, (die,), None)

    async def _roll_back(self, loss: Loss) -> None:
        """Run the steps under way again after an error code. Raises an error of the rollback itself."""
        begun_ns, masters, error = self._clock.now, self._masters, loss.error
        assert isinstance(error, GlitchError)
        self._find_lost_servers()
        first_steps = [masters.oldest(group) for group in self.groups for _ in group.dies]
        await self.recovery.roll_back(error, first_steps, self._hearing.hear)
        self.health.forgive()
        first_step = masters.roll_back()
        await self.repairs.mend()
        self.recovery.resume(first_step)
        self.tell(Mended(self.plan.name, "run again", self.recovery.epoch, str(error), begun_ns))
        masters.run_again()

    def hear_report(self, report: DriverReport) -> None:
        """Note a report by a die's driver, at its moment.

        No step is planned and no result is taken until it is put right; steps that it may have spoiled are
        rolled back. What nothing can put right ends the TE.
        """
        self.plan.num_reports += 1
        if self.life == "loading":  # no step runs that would have to be called back
            self.repairs.note_unused(report)
        elif self.repairs.is_beyond(report):
            self.lose(Loss("irreparable", self.plan.name, (report.die,), report))
        else:
            self.repairs.note(report)
            for executor in self.executors:
                if executor.die.index == report.die:
                    executor.refuse()
            self.wake()

    def _why_not_without(self, loss: Loss) -> str | None:
        """Explain why the TE cannot go on without the clients on the dies of a loss; None if it can."""
        name, num_lost = self.plan.name, len(self.members.those_of(loss))
        if not self.plan.can_miss_clients:
            return f"the dies of {name} are no clients of expert servers, each on its own"
        if not num_lost:
            return "the loss is of no client that was still there"
        if not self.lifetime.is_open or self.life != "ready":
            return f"{name} is {self.life}, and gives no requests to other clients"
        if len(self.groups) - len(self.members.lost_clients) <= num_lost:
            return f"{name} would have no client left"
        return None

    def _go_on_without(self, loss: Loss) -> None:
        """Go on without the clients of a loss, and let the loops look for work."""
        if self.recovery.phase != "serving":
            return  # the rollback waits for all dies, and names those that do not answer
        self.members.lose(loss)
        self.wake()

    def _find_lost_servers(self) -> None:
        """Mask expert servers whose memory is silent, before anything would wait for them."""
        for loss in self.monitor.find_lost():
            self.lose(loss)

    # ---- expert servers that come and go -------------------------------------------------------------

    async def join_server(self, wanted: int | None, bring: Bring) -> int:
        """Bring an expert server, from within a process, as `ServerSeats.join` does."""
        if self.life == "ready":
            self._find_lost_servers()
        return await self.seats.join(wanted, bring)

    async def leave_server(self, number: int) -> None:
        """Remove an expert server, from within a process, as `ServerSeats.leave` does."""
        if self.life == "ready":
            self._find_lost_servers()
        await self.seats.leave(number)

    # ---- life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Spawn the die programs and the loops."""
        self.lifetime.follow("start")
        for executor in self.executors:
            run = executor.die.detach(executor.run(), f"executor {executor.rank}", self._fail)
            self.processes.append(run)
        self.keeping.start()
        self.monitor.start()
        name = self.plan.name
        loops: list[tuple[str, Loop]] = [(name, self._run), *self._masters.loops()]
        if self.sizes.kv.sends_layers:
            loops.append((f"layers of {name}", partial(hear_layers, self._layers, self.groups)))
        spawned = [self._clock.detach(loop(), each, self._fail) for each, loop in loops]
        self._loop = spawned[0]
        self.processes += spawned

    def load(self) -> None:
        """Note the start of loading: the TE's weights are on their way."""
        self.keeping.enter()
        self.lifetime.follow("load")

    def drain(self, moves_out: bool) -> None:
        """Take no new work; finish the current work or, if `moves_out`, let it go on elsewhere."""
        self.lifetime.follow("drain")
        self.lifetime.moves_out = moves_out
        self.wake()

    @property
    def can_resume(self) -> bool:
        """Whether the TE drains and its loop still runs, so that it can take new work again."""
        return self.life == "draining" and not self._loop.done()

    def resume(self) -> None:
        """Take new work again instead of leaving. The caller ends the process that runs `leave`."""
        self.lifetime.follow("resume")
        self.wake()

    async def leave(self) -> None:
        """End every task of a draining TE, from within a process, and give dies and memory back.

        On return the TE is gone, or lost.
        """
        await self._clock.until_ended(self._loop)
        if self.life == "draining":
            self._shut_down()
            for process in self.processes:
                await self._clock.until_ended(process)
        if self.life == "draining":
            self._end_life()
            self.plan.release()

    def give_up(self) -> None:
        """End a task executor after its weights could not be loaded."""
        self._end_life()

    async def stop(self) -> None:
        """End every process of the TE, when no request is left."""
        if self.life in ("planned", "loading", "gone"):
            return
        self._shut_down()
        await asyncio.wait([self._loop], timeout=10)  # then it is clear who keeps expert servers
        _, late = await asyncio.wait(self.processes, timeout=10)
        for process in late:
            process.cancel()
        await asyncio.gather(*self.processes, return_exceptions=True)
        self._end_life()

    def _shut_down(self) -> None:
        """Tell every process to end when it has nothing to do."""
        self.health.end_probes()
        if self.reconfiguration is not None:
            self.reconfiguration.stop()
        self.inbox.put(Shutdown())

    def _end_life(self) -> None:
        self.lifetime.follow("stop")
        self.close()

    def close(self) -> None:
        """End the computer's threads that ran steps in lockstep."""
        for run in self._lockstep_runs:
            run.close()

    def kill(self) -> None:
        """End every process of a TE that is lost, at once and without waiting."""
        if self.life == "gone":
            return  # without a task, and its dies may be another's
        self.keeping.leave()
        if self.is_running:
            self.lifetime.follow("lose")
        self.health.end_probes()
        if self.reconfiguration is not None:
            self.reconfiguration.stop()
        dies = (self.plan.pod.dies[die] for die in self.plan.every_die)
        for process in dict.fromkeys([*self.processes, *(each for die in dies for each in die.running)]):
            if process is not asyncio.current_task():
                process.cancel()

    def check_integrity(self) -> None:
        """Check the invariants of all DP groups, and that dies sharing weights hold the same ones."""
        for steps in self._masters.sets:
            check(self.health, self.te_shell, steps)
        for run in self._lockstep_runs:
            run.check_integrity()

    # ---- questions -----------------------------------------------------------------------------------

    @property
    def life(self) -> Life:
        """Current state of the TE between plan and end."""
        return self.lifetime.now

    @property
    def moves_out(self) -> bool:
        """Whether the TE's sequences go on elsewhere."""
        return self.lifetime.moves_out

    @property
    def is_running(self) -> bool:
        """Whether the die programs and the loop run."""
        return self.lifetime.is_running

    @property
    def is_suspect(self) -> bool:
        """Whether no group is healthy, or the shell is silent."""
        return self.health.shell != "healthy" or not self.health.has_healthy

    @property
    def step_idx(self) -> int:
        """Number of the next step."""
        return self._masters.step_idx

    @property
    def under_way(self) -> set[tuple[GroupRank, StepNo]]:
        """Steps launched and not ended, as pairs of DP group and step number."""
        return self._masters.under_way

    @property
    def num_sequences(self) -> int:
        """Number of unfinished sequences in this TE."""
        return sum(group.num_sequences for group in self.groups) + self.te_shell.num_pending

    @property
    def needed_dies(self) -> tuple[int, ...]:
        """Dies necessary for the TE to go on.

        Expert servers are not among them: clients find out whether they can do without one. Neither are
        clients that the TE has given up.
        """
        if self.plan.services is None:
            return self.plan.every_die
        return tuple(client.die for client in self.members.clients if client.at != "lost")

    @property
    def kv_load(self) -> float:
        """Share of KV blocks in use or reserved, averaged over the DP groups; reservations may push it above
        1."""
        return sum(group.kv_load for group in self.groups) / len(self.groups)

    @property
    def expert_load(self) -> list[ExpertLoad]:
        """Report how uneven the load of each layer's experts was in the latest time slice."""
        balance = self.reconfiguration
        return [] if balance is None else expert_loads(self.plan.name, balance.layers, balance.skews)

    @property
    def expert_programs(self) -> list[ExpertProgram]:
        """Programs of the dies that have experts alone."""
        return self.members.programs
