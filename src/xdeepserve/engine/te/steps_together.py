"""Steps of DP groups where exchanges are barriers: all groups step at once, in one loop."""

from __future__ import annotations

from collections.abc import Callable

from xdeepserve.engine.die.experts import ring
from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import StepDone, Wake
from xdeepserve.engine.numbers import GroupRank, StepNo
from xdeepserve.engine.te.members import Members
from xdeepserve.engine.te.step_set import Loop, StepParts, StepSet


class StepsTogether:
    """Steps of a TE in which dispatch and combine are barriers of all ranks.

    A group without work runs empty steps along with the others.
    """

    def __init__(self, parts: StepParts, members: Members, plans_ahead: bool) -> None:
        self._parts, self._members = parts, members
        self._steps = StepSet(parts, parts.groups, 1 + plans_ahead)

    @property
    def step_idx(self) -> StepNo:
        """Number of the next step."""
        return self._steps.next

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way."""
        return not self._steps

    @property
    def sets(self) -> list[StepSet]:
        """Return the steps of all DP groups, as the only set."""
        return [self._steps]

    @property
    def under_way(self) -> set[tuple[GroupRank, StepNo]]:
        """Steps launched and not ended, with rank 0 for all groups together."""
        return {(GroupRank(0), step) for step in self._steps}

    def loops(self) -> list[tuple[str, Loop]]:
        """Return no loops: the TE's own loop is the only one."""
        return []

    def stop(self) -> None:
        """Do nothing, since there are no loops to end."""

    def wake_all(self) -> None:
        """Wake the TE's loop: there is new work, or room for what could not run."""
        self._parts.hearing.inbox.put(Wake())

    async def advance(self, look: Callable[[int], int]) -> bool:
        """Run a step of all groups; return False if there is nothing to do.

        With `plans_ahead` the next step is scheduled and launched while the previous one runs. Only then does
        the loop wait for the previous one.
        """
        step = self._steps.schedule()
        if step is not None:
            await self._launch(step)
        is_idle = self.is_idle
        if not is_idle and (step is None or self._steps.is_full):
            await self._collect(self._steps.oldest)
        self._parts.after_turn(self._steps)
        return not is_idle

    async def _launch(self, step: StepNo) -> None:
        """Send a planned step to all dies; the host's gap delays all groups."""
        parts, host = self._parts, self._parts.host
        self._steps.begin(step)
        delays, bucket = [0] * len(parts.groups), 0
        if host is not None:
            num_rows = [group.num_rows(step) for group in parts.groups]
            await parts.clock.sleep(host.gap_ns())
            delays, bucket = host.launches_ns(step), host.bucket(num_rows)
        self._steps.before_launch(step)
        ring(self._members.programs, step + 1)
        self._steps.launch(step, delays, bucket)

    async def _collect(self, step: StepNo) -> None:
        """Wait until all dies have ended a step, and take its results."""
        parts = self._parts
        while not self._steps.has_ended(step):
            message = parts.hearing.hear_now() or await parts.hearing.hear(parts.health.deadline_ns)
            if isinstance(message, StepDone):
                self._steps.note(message.step)
        parts.hearing.check_reports()  # before its results are read
        self._steps.collect(step)

    def oldest(self, group: DPGroup) -> StepNo:
        """Return the number of the oldest unfinished step, which is the same for all groups."""
        return self._steps.oldest

    def roll_back(self) -> StepNo:
        """Treat all steps under way as not run; return the number of the next step."""
        return self._steps.roll_back()

    async def run_again(self) -> None:
        """Launch the rolled-back steps again."""
        for step in self._steps.take():
            await self._launch(step)
