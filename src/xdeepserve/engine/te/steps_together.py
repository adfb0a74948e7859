"""Steps of DP groups where exchanges are barriers: all groups step at once, in one loop."""

from __future__ import annotations

from collections.abc import Callable

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import StepDone
from xdeepserve.engine.te.expert_programs import ExpertPrograms
from xdeepserve.engine.te.steps_under_way import Loop, StepParts, StepsUnderWay


class StepsTogether:
    """Steps of a TE in which dispatch and combine are barriers of all ranks.

    A group without work runs empty steps along with the others.
    """

    def __init__(self, parts: StepParts, programs: ExpertPrograms, plans_ahead: bool) -> None:
        self._parts, self._programs, self._room = parts, programs, 1 + plans_ahead
        self._tp = len(parts.groups[0].dies)
        self._under_way = StepsUnderWay(self._tp * len(parts.groups))

    @property
    def step_idx(self) -> int:
        """Number of the next step."""
        return self._under_way.next

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way."""
        return not self._under_way

    @property
    def under_way(self) -> set[tuple[int, int]]:
        """Steps launched and not ended, with rank 0 for all groups together."""
        return {(0, step_idx) for step_idx in self._under_way}

    def loops(self) -> list[tuple[str, Loop]]:
        """Return no loops: the TE's own loop is the only one."""
        return []

    def stop(self) -> None:
        """Do nothing, since there are no loops to end."""

    async def advance(self, look: Callable[[int], int]) -> bool:
        """Run a step of all groups; return False if there is nothing to do.

        With `plans_ahead` the next step is scheduled and launched while the previous one runs. Only then does
        the loop wait for the previous one.
        """
        has_launched = False
        if len(self._under_way) < self._room:  # else they have been rolled back, and run again
            has_rows = [self._parts.schedule(group, self.step_idx) for group in self._parts.groups]
            if any(has_rows):
                await self._launch(self.step_idx)
                has_launched = True
        if self.is_idle:
            return False
        if not has_launched or len(self._under_way) == self._room:
            await self._end(self._under_way.oldest)
        return True

    async def _launch(self, step_idx: int) -> None:
        """Send a planned step to all dies."""
        parts, host = self._parts, self._parts.host
        self._under_way.launch(step_idx)
        delays, bucket = [0] * len(parts.groups), 0
        if host is not None:
            num_rows = [group.num_rows(step_idx) for group in parts.groups]
            await parts.clock.sleep(host.gap_ns())
            delays, bucket = host.launches_ns(step_idx), host.bucket(num_rows)
        if parts.reconfiguration is not None:
            parts.reconfiguration.before_step(step_idx)
        self._programs.ring(step_idx + 1)
        for group, delay in zip(parts.groups, delays, strict=True):
            group.launch(step_idx, delay, bucket)
            parts.health.ask(group.rank, self._tp, delay)

    def oldest(self, group: DPGroup) -> int:
        """Return the number of the oldest unfinished step, which is the same for all groups."""
        return self._under_way.oldest

    def roll_back(self) -> int:
        """Treat all steps under way as not run; return the number of the next step."""
        parts = self._parts
        for group in parts.groups:
            group.forget_plan(self.step_idx)
        for step_idx in self._under_way:
            if parts.reconfiguration is not None:
                parts.reconfiguration.after_step(step_idx)
            for group in parts.groups:
                group.renumber(step_idx, parts.recovery.later(step_idx))
        self._under_way.roll_back(parts.recovery.later)
        return self._under_way.oldest

    async def run_again(self) -> None:
        """Launch the rolled-back steps again."""
        for step_idx in self._under_way.take():
            await self._launch(step_idx)

    async def _end(self, step_idx: int) -> None:
        """Wait until all dies have ended a step, and take its results."""
        parts = self._parts
        while not self._under_way.has_ended(step_idx):
            message = await parts.hearing.hear(parts.health.deadline_ns)
            if isinstance(message, StepDone):
                self._under_way.note(message.step)
        parts.hearing.check_memory()  # before its results are read
        self._under_way.end(step_idx)
        parts.recovery.step_ended()
        if parts.reconfiguration is not None:
            parts.reconfiguration.after_step(step_idx)
        for group in parts.groups:
            group.finish(step_idx)
