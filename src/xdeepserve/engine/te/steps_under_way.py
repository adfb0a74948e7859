"""Steps that have been launched and have not ended, of a DP group or of all together; what steps take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.recovery.rollback import Rollback
from xdeepserve.engine.te.hearing import Hearing
from xdeepserve.engine.te.heartbeat import Heartbeats
from xdeepserve.engine.te.host import Host
from xdeepserve.engine.te.life import Lifetime
from xdeepserve.hw.clock import Clock

Loop = Callable[[], Awaitable[None]]
"""What a process of a TE runs until its end."""


class StepParts(NamedTuple):
    """Parts of a TE that scheduling, launching and ending its steps takes."""

    clock: Clock
    groups: Sequence[DPGroup]
    life: Lifetime
    hearing: Hearing
    health: Heartbeats
    recovery: Rollback
    reconfiguration: Reconfiguration | None
    host: Host | None

    def schedule(self, group: DPGroup, step_idx: int) -> bool:
        """Schedule a group's next step; whether it has rows. A TE that moves out has no more steps."""
        return not self.life.moves_out and group.plan(step_idx)


class StepsUnderWay:
    """Numbers of steps in the order of launches. A step has ended when each of `num_dies` has said so."""

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
        """The first step that has not happened."""
        return min([*self._numbers, self.next])

    def launch(self, step_idx: int) -> None:
        """A step begins, the next one or one that has been rolled back."""
        self._numbers.append(step_idx)
        self.next = max(self.next, step_idx + 1)

    def note(self, step_idx: int) -> None:
        """A die has ended a step. That it reports one that is not under way changes nothing."""
        if step_idx in self._numbers:
            self._num_done[step_idx] += 1

    def has_ended(self, step_idx: int) -> bool:
        """On every die."""
        return self._num_done[step_idx] >= self._num_dies

    def end(self, step_idx: int) -> None:
        """Its results are taken."""
        del self._num_done[step_idx]
        self._numbers.remove(step_idx)

    def roll_back(self, later: Callable[[int], int]) -> None:
        """None has happened: each gets the number under which it will run again."""
        self._num_done.clear()
        self._numbers = [later(step_idx) for step_idx in self._numbers]
        self.next = max([self.next, *(step_idx + 1 for step_idx in self._numbers)])

    def take(self) -> list[int]:
        """All that were rolled back, to be launched again."""
        numbers, self._numbers = self._numbers, []
        return numbers
