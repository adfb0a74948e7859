"""How the DP groups of a TE take their steps where exchanges are barriers: all at once, in one loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import StepDone
from xdeepserve.engine.te.steps_under_way import StepsUnderWay
from xdeepserve.hw.queue import Queue

if TYPE_CHECKING:
    from xdeepserve.engine.te.te import TE


class StepsTogether:
    """Dispatch and combine are barriers of all ranks: a group without work runs empty steps along."""

    def __init__(self, te: TE) -> None:
        self._te = te
        self._under_way = StepsUnderWay(te.sizes.place.num_dies)

    @property
    def step_idx(self) -> int:
        """Of the next step."""
        return self._under_way.next

    @property
    def is_idle(self) -> bool:
        """No step is under way."""
        return not self._under_way

    @property
    def under_way(self) -> set[tuple[int, int]]:
        """Steps that have been launched and have not ended, of all groups."""
        return {(0, step_idx) for step_idx in self._under_way}

    def inbox_of(self, group: DPGroup) -> Queue[msgspec.Struct]:
        """Where the reports of a group's dies go."""
        return self._te.inbox

    def start(self) -> list[asyncio.Task[None]]:
        """The loop is the TE's."""
        return []

    def wake(self, group: DPGroup | None = None) -> None:
        """The loop hears of work, and of room, by itself."""

    def stop(self) -> None:
        """It ends by itself."""

    def note(self, done: StepDone) -> None:
        """A die has ended a step."""
        self._under_way.note(done.step)

    async def advance(self) -> bool:
        """One step of all groups; False if there is nothing to do.

        With `plans_ahead` a step is scheduled and launched while the one before runs, and only then is that
        one waited for.
        """
        te = self._te
        has_launched, room = False, 1 + te.sizes.steps.plans_ahead
        if len(self._under_way) < room:  # else they have been rolled back, and run again
            has_rows = [te.schedule(group, self.step_idx) for group in te.groups]
            if any(has_rows):
                await self._launch(self.step_idx)
                has_launched = True
        if self.is_idle:
            return False
        if not has_launched or len(self._under_way) == room:
            await self._end(self._under_way.oldest)
        return True

    async def _launch(self, step_idx: int) -> None:
        """Send a planned step to all dies."""
        te = self._te
        self._under_way.launch(step_idx)
        delays, bucket = [0] * len(te.groups), 0
        if te.host is not None:
            num_rows = [group.num_rows(step_idx) for group in te.groups]
            await te.plan.pod.clock.sleep(te.host.gap_ns())
            delays, bucket = te.host.launches_ns(step_idx), te.host.bucket(num_rows)
        if te.reconfiguration is not None:
            te.reconfiguration.before_step(step_idx)
        te.ring(step_idx + 1)
        for group, delay in zip(te.groups, delays, strict=True):
            group.launch(step_idx, delay, bucket)
            te.health.ask(group.rank, te.sizes.groups.tp, delay)

    def oldest(self, group: DPGroup) -> int:
        """Of a group's steps, which are all groups', the first that has not happened."""
        return self._under_way.oldest

    def roll_back(self) -> int:
        """No step under way has happened. The number of the step that comes next."""
        te = self._te
        for group in te.groups:
            group.forget_plan(self.step_idx)
        for step_idx in self._under_way:
            if te.reconfiguration is not None:
                te.reconfiguration.after_step(step_idx)
            for group in te.groups:
                group.renumber(step_idx, te.recovery.later(step_idx))
        self._under_way.roll_back(te.recovery.later)
        return self._under_way.oldest

    async def run_again(self) -> None:
        """Launch the steps that have been rolled back."""
        for step_idx in self._under_way.take():
            await self._launch(step_idx)

    async def _end(self, step_idx: int) -> None:
        """Wait until all dies have ended a step, and take its results."""
        te = self._te
        while not self._under_way.has_ended(step_idx):
            await te.hear(te.health.deadline_ns)
        te.check_memory()  # before its results are read
        self._under_way.end(step_idx)
        te.recovery.step_ended()
        if te.reconfiguration is not None:
            te.reconfiguration.after_step(step_idx)
        for group in te.groups:
            group.finish(step_idx)
