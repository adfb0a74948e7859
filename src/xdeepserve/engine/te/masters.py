"""Masters of a TE's DP groups: a loop for each group, beside the TE's own (xDeepServe 4.2, 5.3).

The master of a group deals out requests that wait at the TE-shell, schedules and launches the steps of its
group, hears the reports of its group's dies, and takes the results as soon as these dies have ended. It runs
on the server of its first die. The TE's loop only watches: heartbeats, matters that all groups share
(failures, rollbacks, replicas of experts), and the end of work.

Masters need to agree on one thing, which steps there are. A group begins a step when it has rows for it.
Where dispatch and combine are barriers, the dies of all groups meet in each step: as soon as one group has
begun a step, every other group runs it too, without rows if it has none. All dies cut it into as many
microbatches as the first master has decided by what it knows of all groups. In dataflow mode no group waits
for another, and each numbers its own steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import msgspec

from xdeepserve.engine.die.experts import ring
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


class Masters:
    """Masters of all DP groups of a TE, with the queue of each in `inboxes`.

    Each group may have `room` steps under way. `meets` says whether every step is a step of all groups.
    """

    def __init__(
        self,
        parts: StepParts,
        members: Members,
        inboxes: Sequence[Queue[msgspec.Struct]],
        shell: TEShell[DPGroup],
        room: int,
        meets: bool,
    ) -> None:
        self._parts, self._members, self._inboxes, self._shell = parts, members, inboxes, shell
        self.sets = [StepSet(parts, group, room) for group in parts.groups]
        self._meets = meets
        self._num_begun = StepNo(0)  # steps that some group has begun, if they are steps of all groups
        self._awake = {group.rank for group in parts.groups}  # whose loops can run something, or will look
        self._ending: set[GroupRank] = set()  # whose loops end when nothing is left to do
        self._gathered_for = StepNo(-1)  # the latest step that began only after an all-gather of statuses
        self._is_held = False  # such a step: none begins until the all-gather has ended
        self._num_parts: dict[StepNo, int] = {}  # of steps that some group has begun and not ended
        # Every group asks for a step's launches, and these are drawn for all groups at once.
        self._launches_ns = None if parts.host is None else lru_cache(maxsize=4)(parts.host.launches_ns)

    # ---- all groups, as the TE's loop sees them -------------------------------------------------------

    def loops(self) -> list[tuple[str, Loop]]:
        """Return the groups' loops with their names, to be spawned."""
        return [(f"master of {steps.group.id}", partial(self.run, steps)) for steps in self.sets]

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
        return {(steps.group.rank, step) for steps in self.sets for step in steps}

    @property
    def is_idle(self) -> bool:
        """Whether no group has anything to do."""
        return not self._awake

    @property
    def may_deal(self) -> bool:
        """Whether the TE's loop may deal requests out now: where all groups step together, only between
        steps, or when a master has asked for it."""
        return not self._meets or self.is_idle or self._shell.is_asked

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

    def let_go_on(self) -> None:
        """Wake the loops of groups with work and room for a step, if they wait for an all-gather that has
        ended."""
        is_held, self._is_held = self._is_held, False
        for steps in self.sets if is_held else ():
            if not steps.is_full and not steps.group.is_empty:
                self._rise(steps.group.rank)
                self._inboxes[steps.group.rank].put(Wake())

    def wake_all(self) -> None:
        """Wake the loops of all groups with work, and the TE's: there is new work, or room for what could
        not run."""
        for group in self._parts.groups:
            if not group.is_empty:
                self.wake(group)
        self._parts.hearing.inbox.put(Wake())

    # ---- after an error code, or the loss of a group --------------------------------------------------

    def oldest(self, group: DPGroup) -> StepNo:
        """Return the number of a group's oldest unfinished step."""
        return self.sets[group.rank].oldest

    def roll_back(self) -> StepNo:
        """Treat all steps under way as not run; return the step that comes next for expert dies.

        Steps get new numbers, higher than any that has been begun, since exchanges are told apart by them.
        Parity stays: a step planned ahead finds the results of the step before it in the same place. In
        dataflow mode expert dies serve whatever tokens come, so no step is the next one for them.
        """
        if not self._meets:
            for steps in self.sets:
                steps.roll_back(steps.oldest, _shift(steps.oldest, steps.next))
            return StepNo(0)
        first = min(steps.oldest for steps in self.sets)
        shift = _shift(first, self.step_idx)
        for steps in self.sets:
            steps.roll_back(first, shift)
        self._num_begun = StepNo(first + shift)
        return self._num_begun

    def run_again(self) -> None:
        """Let all groups turn, which launch the rolled-back steps again."""
        for steps in self.sets:
            if not self._members.is_lost(steps.group.rank):
                self._rise(steps.group.rank)
                self._turn(steps)

    def end(self, rank: GroupRank) -> None:
        """End the loop of a group whose dies are lost; later messages from them no longer count."""
        self._ending.add(rank)
        self.sets[rank].forget()
        self._awake.discard(rank)
        self._inboxes[rank].put(Shutdown())

    # ---- the loop of a group --------------------------------------------------------------------------

    async def run(self, steps: StepSet) -> None:
        """Take turns for a DP group until told to stop and until nothing is left to do."""
        rank, hearing = steps.group.rank, self._parts.hearing
        while self._turn(steps) or rank not in self._ending:
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
                if isinstance(message, StepDone) and hearing.may_collect:  # or else it will be run again
                    steps.note(message.step)
            # Let the front end turn: it streams what came out and takes what came in.
            await asyncio.sleep(0)

    def _turn(self, steps: StepSet) -> bool:
        """Begin steps of a DP group as far as possible; return whether any is under way.

        With room for two, a step begins while another one runs.
        """
        group, shell = steps.group, self._shell
        if self._members.is_lost(group.rank):
            return False
        group.poll_transfers()
        while not steps.is_full:
            must_run = bool(steps.again) or steps.next < self._num_begun
            # Who begins a step of all groups deals out for all: then none has work for a later step already.
            if not (self._meets and must_run) and shell.deal():
                self._ask(steps.next)
            shell.on_turn()
            if self._is_held and not must_run:
                break
            step = steps.schedule(must_run)
            if step is None:
                break
            self._launch(steps, step)
        if not steps:
            self._rest(group)
        self._parts.after_turn(steps)
        return bool(steps)

    def _ask(self, step: StepNo) -> None:
        """Ask for an all-gather of the groups' statuses, since requests wait for one.

        Groups that step together have one before each step, and begin the step when the requests are dealt
        out.
        """
        if not self._meets:
            self._shell.ask()
        elif step > self._gathered_for:
            self._gathered_for, self._is_held = step, True
            self._shell.ask()

    def _launch(self, steps: StepSet, step: StepNo) -> None:
        """Send a step to the group's dies; the host's gap and launch delay this group alone.

        Where all groups run each step, expert dies and the other groups hear of a step that is new.
        """
        rank, delay_ns, bucket = steps.group.rank, 0, 0
        is_new = self._meets and step >= self._num_begun
        if is_new:
            self._num_begun = StepNo(step + 1)
            ring(self._members.programs, self._num_begun)
            # A group is at most two steps behind the first, since dies of all groups meet in each.
            self._num_parts = {n: parts for n, parts in self._num_parts.items() if n > step - 4}
            self._num_parts[step] = self._parts.num_parts(step)
        if self._parts.host is not None and self._launches_ns is not None:
            delay_ns = self._parts.host.gap_ns() + self._launches_ns(step)[rank]
            bucket = self._parts.host.bucket(steps.group.num_rows(step))
        num_parts = self._num_parts[step] if self._meets else self._parts.num_parts(step)
        steps.launch(step, delay_ns, bucket, num_parts)
        if is_new:
            self._call(step)

    def _call(self, step: StepNo) -> None:
        """Wake the loops of groups that have room for a step which another group has begun."""
        for steps, inbox in zip(self.sets, self._inboxes, strict=True):
            if steps.next <= step and not steps.is_full and not len(inbox):
                self._rise(steps.group.rank)
                inbox.put(Wake())

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


def _shift(first: StepNo, stop: StepNo) -> int:
    """Return how much higher the numbers of steps `first` to `stop` - 1 are when they are run again."""
    return (stop - first + 1) // 2 * 2
