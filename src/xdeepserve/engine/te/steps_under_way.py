"""Steps launched and not ended, of a DP group or of all groups together.

`StepParts` has the parts of a TE that handle steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.dp.group import DPGroup
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

    def schedule(self, group: DPGroup, step_idx: int) -> bool:
        """Schedule a group's next step; return whether it has rows.

        A TE that moves out schedules no more steps.
        """
        return not self.life.moves_out and group.plan(step_idx)


class StepsUnderWay:
    """Numbers of launched steps in order; a step ends when each of `num_dies` has reported its end."""

    def __init__(self, num_dies: int) -> None:
        self._num_dies = num_dies
        self._numbers: list[int] = []
        self._num_done: Counter[int] = Counter()  # dies that have ended a step
        self.next = 0  # number of the step that has not been launched

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    @property
    def oldest(self) -> int:
        """Number of the oldest step that has not ended, or else of the next one."""
        return min([*self._numbers, self.next])

    def launch(self, step_idx: int) -> None:
        """Record the launch of a step, a new one or one that was rolled back."""
        self._numbers.append(step_idx)
        self.next = max(self.next, step_idx + 1)

    def note(self, step_idx: int) -> None:
        """Count a die's report of an ended step; ignore steps that are not under way."""
        if step_idx in self._numbers:
            self._num_done[step_idx] += 1

    def has_ended(self, step_idx: int) -> bool:
        """Whether a step has ended on every die."""
        return self._num_done[step_idx] >= self._num_dies

    def end(self, step_idx: int) -> None:
        """Remove a step from the list, once all results are taken."""
        del self._num_done[step_idx]
        self._numbers.remove(step_idx)

    def roll_back(self, later: Callable[[int], int]) -> None:
        """Treat all steps as not run: give each the number under which it will run again."""
        self._num_done.clear()
        self._numbers = [later(step_idx) for step_idx in self._numbers]
        self.next = max([self.next, *(step_idx + 1 for step_idx in self._numbers)])

    def take(self) -> list[int]:
        """Remove and return all rolled-back steps, to be launched again."""
        numbers, self._numbers = self._numbers, []
        return numbers
