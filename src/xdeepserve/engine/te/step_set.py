"""Book of a DP group's steps: planned, under way, ended, or to be run again.

A turn reads schedule, launch, note; after an error code, roll back. Which step the group has to run, and when
its master looks at the book, is left to `te.masters`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.numbers import StepNo
from xdeepserve.engine.recovery.rollback import Rollback
from xdeepserve.engine.te.hearing import Hearing
from xdeepserve.engine.te.heartbeat import Heartbeats
from xdeepserve.engine.te.host import Host
from xdeepserve.engine.te.life import Lifetime
from xdeepserve.hw.clock import Clock

Loop = Callable[[], Coroutine[Any, Any, None]]
"""Coroutine function that a process of a TE runs until its end."""


class StepParts(NamedTuple):
    """Parts of a TE needed for scheduling, launching and ending steps."""

    clock: Clock
    groups: Sequence[DPGroup]
    life: Lifetime
    hearing: Hearing
    health: Heartbeats
    recovery: Rollback
    reconfiguration: Reconfiguration | None
    host: Host | None
    num_parts: Callable[[StepNo], int]  # that the dies cut a step into
    after_turn: Callable[[StepSet], None]  # checks invariants of a group, where a setting asks for it


class StepSet:
    """Steps of a DP group by number, as its master keeps them; up to `room` of them are under way at once."""

    def __init__(self, parts: StepParts, group: DPGroup, room: int) -> None:
        self._parts, self.group, self.room = parts, group, room
        self._numbers: list[StepNo] = []  # under way, in order
        self._num_done: Counter[StepNo] = Counter()  # dies that have ended a step
        self.again: list[StepNo] = []  # rolled back: to be launched before any other, in order
        self.next = StepNo(0)  # number of the step that has not been planned for good

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[StepNo]:
        return iter(self._numbers)

    @property
    def is_full(self) -> bool:
        """Whether no other step may be launched before one has ended."""
        return len(self._numbers) >= self.room

    @property
    def oldest(self) -> StepNo:
        """Number of the oldest step that has not ended, or else of the next one."""
        return min([*self._numbers, *self.again, self.next])

    # ---- a turn -------------------------------------------------------------------------------------

    def schedule(self, must_run: bool) -> StepNo | None:
        """Choose the next step to launch; return its number, or None if there is none, or no room for it.

        Rolled-back steps come first. A new step without rows is launched only if it `must_run`, because
        other groups run it. A TE that moves out begins no new steps, and no step begins during a recovery.
        """
        if self.is_full or not self._parts.hearing.may_begin:
            return None
        if self.again:
            return self.again.pop(0)
        if self._parts.life.moves_out and not must_run:
            return None
        has_rows = self.group.plan(self.next)
        return self.next if has_rows or must_run else None

    def launch(self, step: StepNo, delay_ns: int, bucket: int, num_parts: int) -> None:
        """Send a step to the group's dies, to arrive after the host's delay; it is under way from now on.

        They cut it into `num_parts` overlapping microbatches, as the dies of all groups do. Replicas of
        experts may change before the step.
        """
        self._numbers.append(step)
        self.next = max(self.next, StepNo(step + 1))
        if self._parts.reconfiguration is not None:
            self._parts.reconfiguration.before_step(self._key(step))
        self.group.launch(step, delay_ns, bucket, num_parts)
        self._parts.health.ask(self.group.rank, len(self.group.dies), delay_ns)

    def note(self, step: StepNo) -> None:
        """Count a die's report of an ended step, and take the results after the last die's.

        Ignore steps that are not under way.
        """
        if step not in self._numbers:
            return
        self._num_done[step] += 1
        if self._num_done[step] < len(self.group.dies):
            return
        del self._num_done[step]
        self._numbers.remove(step)
        self._parts.recovery.step_ended()
        self._leave(step)
        self.group.finish(step)

    # ---- after an error code ------------------------------------------------------------------------

    def roll_back(self, first: StepNo, shift: int) -> None:
        """Treat all steps under way as not run. Steps from `first` on are run again, with numbers `shift`
        higher.

        This group may have ended some of them already: these it runs again without rows, because other
        groups' dies meet its own there. No bit depends on the rows of others.
        """
        self.group.forget_plan(self.next)
        for step in self._numbers:
            self._leave(step)
        for number in reversed(range(self.oldest, self.next)):
            self.group.renumber(StepNo(number), StepNo(number + shift))
        for number in range(first, self.oldest):
            self.group.plan_empty(StepNo(number + shift))
        self._num_done.clear()
        self._numbers, self.again = [], [StepNo(n + shift) for n in range(first, self.next)]
        self.next = StepNo(self.next + shift)

    def forget(self) -> None:
        """Drop all steps of a group that is lost."""
        for step in (*self._numbers, *self.again, self.next):
            self.group.forget_plan(step)
        self._numbers, self.again = [], []

    def _leave(self, step: StepNo) -> None:
        if self._parts.reconfiguration is not None:
            self._parts.reconfiguration.after_step(self._key(step))

    def _key(self, step: StepNo) -> Hashable:
        """Return the name of a step among the steps of all groups."""
        return self.group.rank, step
