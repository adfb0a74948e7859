"""Where tokens flow (dataflow, xDeepServe 5.3) nobody waits for another: each DP group is a loop of its own.

A `DPMaster` deals out what waits at the TE-shell, schedules, launches, and takes the results (4.2), and hears
what the dies of its group report. The TE's loop only watches: over heartbeats, over what all have in common
(failures, rollbacks, replicas of experts), and over the end of work.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import RolledBack, Shutdown, StepDone, StepFailed, Wake
from xdeepserve.engine.te.steps_under_way import StepsUnderWay
from xdeepserve.errors import DeadlineError
from xdeepserve.hw.queue import Queue

if TYPE_CHECKING:
    from xdeepserve.engine.te.te import TE


class Rested(msgspec.Struct, frozen=True):
    """No DP group has anything that it can do now, or one of those has not for which something waits."""


class DPMaster:
    """The loop of one DP group, which numbers its steps by itself."""

    def __init__(self, te: TE, group: DPGroup, awake: set[int]) -> None:
        self.group, self._te, self._awake = group, te, awake
        self.inbox = te.plan.host_queue(group.dies[0].index, f"inbox of {group.id}")
        self.steps = StepsUnderWay(te.sizes.groups.tp)
        self._is_over = self._is_lost = False

    async def run(self) -> None:
        """Until it is told to stop, and has nothing more to do."""
        te = self._te
        try:
            while self._turn() or not self._is_over:
                message = await self.inbox.get()
                if self._is_lost:
                    return
                self._rise()
                if isinstance(message, Shutdown):
                    self._is_over = True
                elif isinstance(message, StepFailed | RolledBack):
                    te.inbox.put(message)
                else:
                    te.take(message)
                # Let the front end turn: it streams what came out and takes what came in.
                await asyncio.sleep(0)
        except Exception as error:
            te.fail(error)

    def end(self) -> None:
        """Its dies are lost: nothing runs any more, and nothing that they have said counts."""
        self._is_lost = self._is_over = True
        for step_idx in (*self.steps.take(), self.steps.next):
            self.group.forget_plan(step_idx)
        self._awake.discard(self.group.rank)
        self.inbox.put(Shutdown())

    def wake(self) -> None:
        """If it rests, it looks whether there is something to do."""
        if self.group.rank not in self._awake and not self._is_over:
            self._rise()
            self.inbox.put(Wake())

    def _rise(self) -> None:
        """It rests no more. If all did, the TE's loop has to be told that there is something to watch again:
        what it waits for at rest, and until when, is another thing."""
        if not self._awake:
            self._te.inbox.put(Wake())
        self._awake.add(self.group.rank)

    def note(self, done: StepDone) -> None:
        """A die has ended a step. What is rolled back has not happened, whatever dies had to say before."""
        te = self._te
        if not self._may_go_on:
            return
        self.steps.note(done.step)
        if not self.steps.has_ended(done.step):
            return
        self.steps.end(done.step)
        if te.reconfiguration is not None:
            te.reconfiguration.after_step((self.group.rank, done.step))
        te.recovery.step_ended()
        self.group.finish(done.step)

    def roll_back(self) -> None:
        """The steps under way have not happened."""
        te = self._te
        self.group.forget_plan(self.steps.next)
        for step_idx in self.steps:
            if te.reconfiguration is not None:
                te.reconfiguration.after_step((self.group.rank, step_idx))
            self.group.renumber(step_idx, te.recovery.later(step_idx))
        self.steps.roll_back(te.recovery.later)

    def run_again(self) -> None:
        """Launch what has been rolled back."""
        for step_idx in self.steps.take():
            self._launch(step_idx)

    def _launch(self, step_idx: int) -> None:
        """Send its dies a planned step. The host's gap concerns this group alone."""
        te, rank, delay, bucket = self._te, self.group.rank, 0, 0
        self.steps.launch(step_idx)
        if te.reconfiguration is not None:
            te.reconfiguration.before_step((rank, step_idx))
        if te.host is not None:
            delay = te.host.gap_ns() + te.host.launches_ns(step_idx)[rank]
            bucket = te.host.bucket([self.group.num_rows(step_idx)])
        self.group.launch(step_idx, delay, bucket)
        te.health.ask(rank, te.sizes.groups.tp, delay)

    def _turn(self) -> bool:
        """Begin the next step if that is possible, with `plans_ahead` while one runs; whether one does."""
        te, room = self._te, 1 + self._te.sizes.steps.plans_ahead
        if self._is_lost:
            return False
        self.group.poll_transfers()
        while len(self.steps) < room:
            te.dealer.deal()
            te.on_turn()
            if not self._may_go_on or not te.schedule(self.group, self.steps.next):
                break
            self._launch(self.steps.next)
        if not self.steps:
            self._rest()
        return bool(self.steps)

    @property
    def _may_go_on(self) -> bool:
        """The dies are not called back, and are not about to be."""
        return self._te.recovery.phase == "serving" and self._te.is_whole

    def _rest(self) -> None:
        """Nothing can run. Whoever waits for that hears of it."""
        te = self._te
        self._awake.discard(self.group.rank)
        if not self._awake or te.life == "draining" or te.te_shell.num_pending:
            te.inbox.put(Rested())


class StepsApart:
    """All loops of a TE's groups."""

    def __init__(self, te: TE) -> None:
        self._te = te
        self._awake = {group.rank for group in te.groups}  # those who do not rest
        self._masters = [DPMaster(te, group, self._awake) for group in te.groups]

    def start(self) -> list[asyncio.Task[None]]:
        """Spawn the loops."""
        clock = self._te.plan.pod.clock
        return [clock.spawn(master.run(), name=f"master of {master.group.id}") for master in self._masters]

    def inbox_of(self, group: DPGroup) -> Queue[msgspec.Struct]:
        """Where the reports of a group's dies go."""
        return self._masters[group.rank].inbox

    def stop(self) -> None:
        """Have the loops end when they have nothing to do."""
        for master in self._masters:
            master.inbox.put(Shutdown())

    def end(self, rank: int) -> None:
        """The dies of a group are lost, and the others go on."""
        self._masters[rank].end()

    def wake(self, group: DPGroup | None = None) -> None:
        """There is something new for a group, or for all that have something."""
        for master in self._masters if group is None else (self._masters[group.rank],):
            if group is not None or not master.group.is_empty:
                master.wake()

    def note(self, done: StepDone) -> None:
        """A die has ended a step."""
        self._masters[done.rank // self._te.sizes.groups.tp].note(done)

    @property
    def step_idx(self) -> int:
        """Of the next step of the group that has had most."""
        return max(master.steps.next for master in self._masters)

    @property
    def under_way(self) -> set[tuple[int, int]]:
        """Steps that have been launched and have not ended: of which group, and their numbers."""
        return {(master.group.rank, step_idx) for master in self._masters for step_idx in master.steps}

    @property
    def is_idle(self) -> bool:
        """Nobody has anything to do."""
        return not self._awake

    async def advance(self) -> bool:
        """Watch until there is news; False if nobody has anything to do."""
        if self.is_idle:
            return False
        te, health = self._te, self._te.health
        for group in te.groups:
            if health.wants_probe(group.rank):
                te.prober.send(group.rank)
        te.monitor.look(sum(master.steps.next for master in self._masters))
        deadline_ns = min(te.plan.pod.clock.now + health.probe_ns, te.monitor.next_ns)
        if health.deadline_ns is not None:
            deadline_ns = min(deadline_ns, health.deadline_ns)
        try:
            message = await te.inbox.get(deadline_ns)
        except DeadlineError:
            error = health.error()
            if error is not None:
                raise error from None
        else:
            te.take(message)
            te.check_memory()
        return True

    def oldest(self, group: DPGroup) -> int:
        """Of a group's steps, which it numbers by itself, the first that has not happened."""
        return self._masters[group.rank].steps.oldest

    def roll_back(self) -> int:
        """No step under way has happened. Experts serve whoever comes: for them no step is the next one."""
        for master in self._masters:
            master.roll_back()
        return 0

    async def run_again(self) -> None:
        """Launch the steps that have been rolled back."""
        for master in self._masters:
            master.run_again()
        self.wake()
