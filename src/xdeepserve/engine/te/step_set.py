"""A book of steps for DP groups that step together: all groups of a TE, or one where tokens flow.

A turn reads schedule, launch, collect; after an error code, roll back and run again. Who waits for what, and
whose clock a launch delays, is left to two drivers: `steps_together` and `steps_apart`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.numbers import StepNo
from xdeepserve.engine.plans import StepPlan
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
    num_parts: Callable[[Sequence[StepPlan]], int]  # that the dies cut a step into, by its plans
    after_turn: Callable[
        [StepSet], None
    ]  # checks invariants of the steps' groups, where a setting asks for it


class StepSet:
    """Steps of DP groups that step together, by number; up to `room` of them are under way at once.

    `key` names a step of these groups among those of the whole TE.
    """

    def __init__(
        self,
        parts: StepParts,
        groups: Sequence[DPGroup],
        room: int,
        key: Callable[[StepNo], Hashable] = lambda step: step,
    ) -> None:
        self._parts, self.groups, self.room, self._key = parts, groups, room, key
        self._num_dies = sum(len(group.dies) for group in groups)
        self._numbers: list[StepNo] = []  # under way, in order
        self._num_done: Counter[StepNo] = Counter()  # dies that have ended a step
        self.next = StepNo(0)  # number of the step that has not been launched

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
        return min([*self._numbers, self.next])

    # ---- a turn -------------------------------------------------------------------------------------

    def schedule(self) -> StepNo | None:
        """Plan the next step; return its number, or None if it has no rows or there is no room for it.

        A TE that moves out schedules no more steps, and none may begin during a recovery.
        """
        if self.is_full or self._parts.life.moves_out or not self._parts.hearing.may_begin:
            return None
        has_rows = [group.plan(self.next) for group in self.groups]  # each of them: exchanges are barriers
        return self.next if any(has_rows) else None

    def begin(self, step: StepNo) -> None:
        """Count a step as under way, before the host's work on its launch takes time."""
        self._numbers.append(step)
        self.next = max(self.next, StepNo(step + 1))

    def launch(self, step: StepNo, delays_ns: Sequence[int], bucket: int) -> None:
        """Send a planned step to the dies of all groups, each after its own delay.

        All of them cut it into equally many parts.
        """
        num_parts = self._parts.num_parts([group.plan_of(step) for group in self.groups])
        for group, delay_ns in zip(self.groups, delays_ns, strict=True):
            group.launch(step, delay_ns, bucket, num_parts)
            self._parts.health.ask(group.rank, len(group.dies), delay_ns)

    def before_launch(self, step: StepNo) -> None:
        """Note that a step is about to be sent: replicas of experts may change before it."""
        if self._parts.reconfiguration is not None:
            self._parts.reconfiguration.before_step(self._key(step))

    def note(self, step: StepNo) -> None:
        """Count a die's report of an ended step; ignore steps that are not under way."""
        if step in self._numbers:
            self._num_done[step] += 1

    def has_ended(self, step: StepNo) -> bool:
        """Whether a step has ended on every die."""
        return self._num_done[step] >= self._num_dies

    def collect(self, step: StepNo) -> None:
        """Take the results of a step that has ended on every die."""
        del self._num_done[step]
        self._numbers.remove(step)
        self._parts.recovery.step_ended()
        self._leave(step)
        for group in self.groups:
            group.finish(step)

    # ---- after an error code ------------------------------------------------------------------------

    def roll_back(self) -> StepNo:
        """Treat all steps under way as not run, and renumber them; return the number of the oldest."""
        later = self._parts.recovery.later
        for group in self.groups:
            group.forget_plan(self.next)
        for step in self._numbers:
            self._leave(step)
            for group in self.groups:
                group.renumber(step, later(step))
        self._num_done.clear()
        self._numbers = [later(step) for step in self._numbers]
        self.next = max([self.next, *(StepNo(step + 1) for step in self._numbers)])
        return self.oldest

    def take(self) -> list[StepNo]:
        """Remove and return all rolled-back steps, to be launched again."""
        numbers, self._numbers = self._numbers, []
        return numbers

    def _leave(self, step: StepNo) -> None:
        if self._parts.reconfiguration is not None:
            self._parts.reconfiguration.after_step(self._key(step))
