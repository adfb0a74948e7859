"""Steps in dataflow mode: no DP group waits for another, so each has a loop of its own (xDeepServe 5.3).

The loop of a group is the paper's DP master (4.2): it deals out requests that wait at the TE-shell, schedules
and launches steps, and takes the results. It hears the reports of its group's dies. The TE's loop only
watches: heartbeats, matters that all groups share (failures, rollbacks, replicas of experts), and the end of
work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import RolledBack, Shutdown, StepDone, StepFailed, Wake
from xdeepserve.engine.numbers import GroupRank, StepNo
from xdeepserve.engine.te.members import Members
from xdeepserve.engine.te.shell import TEShell
from xdeepserve.engine.te.step_set import Loop, StepParts, StepSet
from xdeepserve.errors import DeadlineError
from xdeepserve.hw.queue import Queue


class Rested(msgspec.Struct, frozen=True):
    """Tells the TE's loop when no DP group can run anything, or when an awaited group cannot."""


class StepsApart:
    """Steps of a TE in dataflow mode: a loop for each DP group, with its inbox in `inboxes`.

    Each group numbers its own steps, of which several may be under way with `plans_ahead`.
    """

    def __init__(
        self,
        parts: StepParts,
        members: Members,
        inboxes: Sequence[Queue[msgspec.Struct]],
        shell: TEShell,
        plans_ahead: bool,
    ) -> None:
        self._parts, self._members, self._inboxes, self._shell = parts, members, inboxes, shell
        self.sets = [
            StepSet(parts, [group], 1 + plans_ahead, partial(_key, group.rank)) for group in parts.groups
        ]
        self._awake = {group.rank for group in parts.groups}  # whose loops can run something, or will look
        self._ending: set[GroupRank] = set()  # whose loops end when nothing is left to do

    # ---- all groups, as the TE's loop sees them -------------------------------------------------------

    def loops(self) -> list[tuple[str, Loop]]:
        """Return the groups' loops with their names, to be spawned."""
        return [(f"master of {group.id}", partial(self.run, group)) for group in self._parts.groups]

    def stop(self) -> None:
        """Make the loops end once nothing is left to do."""
        for inbox in self._inboxes:
            inbox.put(Shutdown())

    @property
    def step_idx(self) -> StepNo:
        """Number of the next step of the DP group with the most steps."""
        return max(steps.next for steps in self.sets)

    @property
    def under_way(self) -> set[tuple[GroupRank, StepNo]]:
        """Steps launched and not ended, as pairs of DP group and step number."""
        return {(GroupRank(rank), step) for rank, steps in enumerate(self.sets) for step in steps}

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
                health.probe(group.rank)
        next_ns = look(sum(steps.next for steps in self.sets))
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
            parts.hearing.check_reports()
        return True

    def wake(self, group: DPGroup) -> None:
        """Wake the loop of a DP group that has been given something."""
        if group.rank not in self._awake and group.rank not in self._ending:
            self._rise(group.rank)
            self._inboxes[group.rank].put(Wake())

    def wake_all(self) -> None:
        """Wake the loops of all groups with work, and the TE's: there is new work, or room for what could
        not run."""
        for group in self._parts.groups:
            if not group.is_empty:
                self.wake(group)
        self._parts.hearing.inbox.put(Wake())

    # ---- after an error code, or the loss of a group --------------------------------------------------

    def oldest(self, group: DPGroup) -> StepNo:
        """Return the number of a group's oldest unfinished step; each group numbers its own."""
        return self.sets[group.rank].oldest

    def roll_back(self) -> StepNo:
        """Treat all steps under way as not run; return 0, the next step for expert dies.

        In dataflow mode expert dies serve whatever tokens come, so no step is the next one for them.
        """
        for steps in self.sets:
            steps.roll_back()
        return StepNo(0)

    async def run_again(self) -> None:
        """Launch the rolled-back steps of all groups again."""
        for group, steps in zip(self._parts.groups, self.sets, strict=True):
            for step in steps.take():
                self._launch(group, step)
        for group in self._parts.groups:
            if not group.is_empty:
                self.wake(group)

    def end(self, rank: GroupRank) -> None:
        """End the loop of a group whose dies are lost; later messages from them no longer count."""
        group, steps = self._parts.groups[rank], self.sets[rank]
        self._ending.add(rank)
        for step in (*steps.take(), steps.next):
            group.forget_plan(step)
        self._awake.discard(rank)
        self._inboxes[rank].put(Shutdown())

    # ---- the loop of a group --------------------------------------------------------------------------

    async def run(self, group: DPGroup) -> None:
        """Take turns for a DP group until told to stop and until nothing is left to do."""
        rank, hearing = group.rank, self._parts.hearing
        while self._turn(group) or rank not in self._ending:
            message = await self._inboxes[rank].get()
            if self._members.is_lost(rank):
                return
            self._rise(rank)
            if isinstance(message, Shutdown):
                self._ending.add(rank)
            elif isinstance(message, StepFailed | RolledBack):
                hearing.inbox.put(message)
            else:
                hearing.take(message)
                if isinstance(message, StepDone):
                    self._note(self.sets[rank], message)
            # Let the front end turn: it streams what came out and takes what came in.
            await asyncio.sleep(0)

    def _note(self, steps: StepSet, done: StepDone) -> None:
        """Note a die's report of an ended step; during a rollback such reports are ignored."""
        if self._parts.hearing.may_collect:
            steps.note(done.step)
            if steps.has_ended(done.step):
                steps.collect(done.step)

    def _turn(self, group: DPGroup) -> bool:
        """Begin steps as far as possible; return whether any is under way.

        With room for two, a step begins while another one runs.
        """
        if self._members.is_lost(group.rank):
            return False
        steps = self.sets[group.rank]
        group.poll_transfers()
        while not steps.is_full:
            self._shell.deal()
            self._shell.on_turn()
            step = steps.schedule()
            if step is None:
                break
            self._launch(group, step)
        if not steps:
            self._rest(group)
        self._parts.after_turn(steps)
        return bool(steps)

    def _launch(self, group: DPGroup, step: StepNo) -> None:
        """Send a planned step to the group's dies; the host's gap delays this group alone."""
        steps, host, delay, bucket = self.sets[group.rank], self._parts.host, 0, 0
        steps.begin(step)
        steps.before_launch(step)
        if host is not None:
            delay = host.gap_ns() + host.launches_ns(step)[group.rank]
            bucket = host.bucket([group.num_rows(step)])
        steps.launch(step, [delay], bucket)

    def _rise(self, rank: GroupRank) -> None:
        """Mark a DP group's loop as awake.

        If all loops were resting, the TE's loop is told that there is something to watch again. While all
        rest, it waits for other events and with another deadline.
        """
        if not self._awake:
            self._parts.hearing.inbox.put(Wake())
        self._awake.add(rank)

    def _rest(self, group: DPGroup) -> None:
        """Rest because nothing can run; tell the TE's loop if something waits for that."""
        self._awake.discard(group.rank)
        if not self._awake or self._parts.life.now == "draining" or self._shell.num_pending:
            self._parts.hearing.inbox.put(Rested())


def _key(rank: GroupRank, step: StepNo) -> tuple[GroupRank, StepNo]:
    """Return the name of a DP group's step among the steps of all groups."""
    return rank, step
