"""Steps in dataflow mode: no DP group waits for another, so each is a loop of its own (xDeepServe 5.3).

A `DPMaster` deals out requests that wait at the TE-shell, schedules and launches steps, and takes the results
(4.2). It hears the reports of its group's dies. The TE's loop only watches: heartbeats, matters that all
groups share (failures, rollbacks, replicas of experts), and the end of work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import RolledBack, Shutdown, StepDone, StepFailed
from xdeepserve.engine.numbers import GroupRank, StepNo
from xdeepserve.engine.te.awake import Awake
from xdeepserve.engine.te.dealer import Dealer
from xdeepserve.engine.te.probe import Prober
from xdeepserve.engine.te.shell import TEShell
from xdeepserve.engine.te.step_set import Loop, StepParts, StepSet
from xdeepserve.errors import DeadlineError
from xdeepserve.hw.queue import Queue


class Rested(msgspec.Struct, frozen=True):
    """Tells the TE's loop when no DP group can run anything, or when an awaited group cannot."""


class DPMaster:
    """Loop of a DP group that numbers its own steps; `room` steps may be under way at once."""

    def __init__(
        self,
        parts: StepParts,
        group: DPGroup,
        inbox: Queue[msgspec.Struct],
        awake: Awake,
        dealer: Dealer,
        shell: TEShell,
        room: int,
    ) -> None:
        self.group, self.inbox, self._parts, self._awake = group, inbox, parts, awake
        self._dealer, self._shell = dealer, shell
        self._te_inbox = parts.hearing.inbox
        self.steps = StepSet(parts, [group], room, lambda step: (group.rank, step))
        self._is_over = self._is_lost = False

    async def run(self) -> None:
        """Take turns until told to stop and until nothing is left to do."""
        while self._turn() or not self._is_over:
            message = await self.inbox.get()
            if self._is_lost:
                return
            self._awake.rise(self.group.rank)
            if isinstance(message, Shutdown):
                self._is_over = True
                self._awake.end(self.group.rank)
            elif isinstance(message, StepFailed | RolledBack):
                self._te_inbox.put(message)
            else:
                self._parts.hearing.take(message)
                if isinstance(message, StepDone):
                    self._note(message)
            # Let the front end turn: it streams what came out and takes what came in.
            await asyncio.sleep(0)

    def end(self) -> None:
        """End the loop of lost dies; later messages from them no longer count."""
        self._is_lost = self._is_over = True
        for step in (*self.steps.take(), self.steps.next):
            self.group.forget_plan(step)
        self._awake.end(self.group.rank)
        self._awake.rest(self.group.rank)
        self.inbox.put(Shutdown())

    def _note(self, done: StepDone) -> None:
        """Note a die's report of an ended step; during a rollback such reports are ignored."""
        if self._parts.hearing.may_go_on:
            self.steps.note(done.step)
            if self.steps.has_ended(done.step):
                self.steps.collect(done.step)

    def run_again(self) -> None:
        """Launch the group's rolled-back steps again."""
        for step in self.steps.take():
            self._launch(step)

    def _launch(self, step: StepNo) -> None:
        """Send a planned step to the group's dies; the host's gap delays this group alone."""
        host, delay, bucket = self._parts.host, 0, 0
        self.steps.begin(step)
        self.steps.before_launch(step)
        if host is not None:
            delay = host.gap_ns() + host.launches_ns(step)[self.group.rank]
            bucket = host.bucket([self.group.num_rows(step)])
        self.steps.launch(step, [delay], bucket)

    def _turn(self) -> bool:
        """Begin steps as far as possible; return whether any is under way.

        With room for two, a step begins while another one runs.
        """
        if self._is_lost:
            return False
        self.group.poll_transfers()
        while not self.steps.is_full:
            self._dealer.deal()
            self._dealer.on_turn()
            step = self.steps.schedule() if self._parts.hearing.may_go_on else None
            if step is None:
                break
            self._launch(step)
        if not self.steps:
            self._rest()
        self._parts.after_turn(self.steps)
        return bool(self.steps)

    def _rest(self) -> None:
        """Rest because nothing can run; tell the TE's loop if something waits for that."""
        self._awake.rest(self.group.rank)
        if not self._awake or self._parts.life.now == "draining" or self._shell.num_pending:
            self._te_inbox.put(Rested())


class StepsApart:
    """Steps of a TE in dataflow mode: a loop for each DP group, with its inbox in `inboxes`."""

    def __init__(
        self,
        parts: StepParts,
        inboxes: Sequence[Queue[msgspec.Struct]],
        awake: Awake,
        dealer: Dealer,
        shell: TEShell,
        prober: Prober,
        plans_ahead: bool,
    ) -> None:
        self._parts, self._awake, self._prober = parts, awake, prober
        self._masters = [
            DPMaster(parts, group, inbox, awake, dealer, shell, 1 + plans_ahead)
            for group, inbox in zip(parts.groups, inboxes, strict=True)
        ]

    def loops(self) -> list[tuple[str, Loop]]:
        """Return the groups' loops with their names, to be spawned."""
        return [(f"master of {master.group.id}", master.run) for master in self._masters]

    def stop(self) -> None:
        """Make the loops end once nothing is left to do."""
        for master in self._masters:
            master.inbox.put(Shutdown())

    def end(self, group: GroupRank) -> None:
        """End the loop of a group whose dies are lost; the others go on."""
        self._masters[group].end()

    @property
    def step_idx(self) -> StepNo:
        """Number of the next step of the DP group with the most steps."""
        return max(master.steps.next for master in self._masters)

    @property
    def sets(self) -> list[StepSet]:
        """Return the steps of every DP group."""
        return [master.steps for master in self._masters]

    @property
    def under_way(self) -> set[tuple[GroupRank, StepNo]]:
        """Steps launched and not ended, as pairs of DP group and step number."""
        return {(master.group.rank, step_idx) for master in self._masters for step_idx in master.steps}

    @property
    def is_idle(self) -> bool:
        """Whether no group has anything to do."""
        return not self._awake

    async def advance(self, look: Callable[[int], int]) -> bool:
        """Watch the groups until there is news; return False if no group has anything to do.

        `look` makes the monitor look at servers and clients, given the number of steps launched. It returns
        the virtual time (ns) of its next look.
        """
        if self.is_idle:
            return False
        parts, health = self._parts, self._parts.health
        for group in parts.groups:
            if health.wants_probe(group.rank):
                self._prober.send(group.rank)
        next_ns = look(sum(master.steps.next for master in self._masters))
        deadline_ns = min(parts.clock.now + health.probe_ns, next_ns)
        if health.deadline_ns is not None:
            deadline_ns = min(deadline_ns, health.deadline_ns)
        try:
            message = await parts.hearing.inbox.get(deadline_ns)
        except DeadlineError:
            error = health.error()
            if error is not None:
                raise error from None
        else:
            parts.hearing.take(message)
            parts.hearing.check_memory()
        return True

    def oldest(self, group: DPGroup) -> StepNo:
        """Return the number of a group's oldest unfinished step; each group numbers its own."""
        return self._masters[group.rank].steps.oldest

    def roll_back(self) -> StepNo:
        """Treat all steps under way as not run; return 0, the next step for expert dies.

        In dataflow mode expert dies serve whatever tokens come, so no step is the next one for them.
        """
        for master in self._masters:
            master.steps.roll_back()
        return StepNo(0)

    async def run_again(self) -> None:
        """Launch the rolled-back steps of all groups again."""
        for master in self._masters:
            master.run_again()
        self._awake.wake()
