"""How the DP groups of a TE take their steps: all at once, or each as soon as it has ended its last one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from xdeepserve.engine.messages import StepDone

if TYPE_CHECKING:
    from xdeepserve.engine.te.te import TE


def later(step_idx: int) -> int:
    """The number under which a step that is rolled back is launched again: none has had it, and results lie
    where those of the old number would, so that a step planned ahead finds those of the one before it."""
    return step_idx + 2


class StepsTogether:
    """Dispatch and combine are barriers of all ranks: a group without work runs empty steps along."""

    def __init__(self, te: TE) -> None:
        self._te = te
        self.step_idx = 0  # of the next step
        self._under_way: list[int] = []  # steps that have been launched and have not ended
        self._num_done: Counter[int] = Counter()  # dies that have ended a step

    @property
    def is_idle(self) -> bool:
        """No step is under way."""
        return not self._under_way

    def note(self, done: StepDone) -> None:
        """A die has ended a step."""
        self._num_done[done.step] += 1

    async def advance(self) -> bool:
        """One step of all groups; False if there is nothing to do.

        With `plans_ahead` a step is scheduled and launched while the one before runs, and only then is that
        one waited for.
        """
        te = self._te
        has_launched, room = False, 1 + te.sizes.plans_ahead
        if len(self._under_way) < room:  # else they have been rolled back, and run again
            has_rows = [te.schedule(group, self.step_idx) for group in te.groups]
            if any(has_rows):
                step_idx, self.step_idx = self.step_idx, self.step_idx + 1
                await self._launch(step_idx)
                has_launched = True
        if not self._under_way:
            return False
        if not has_launched or len(self._under_way) == room:
            await self._end(self._under_way[0])
        return True

    async def _launch(self, step_idx: int) -> None:
        """Send a planned step to all dies."""
        te = self._te
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
            te.health.ask(group.rank, te.sizes.tp, delay)
        self._under_way.append(step_idx)

    @property
    def oldest(self) -> int:
        """Of the steps under way; without any the next one."""
        return min([*self._under_way, self.step_idx])

    def roll_back(self) -> int:
        """No step under way has happened. The number of the step that comes next."""
        te = self._te
        self._num_done.clear()
        for group in te.groups:
            group.forget_plan(self.step_idx)
        for step_idx in self._under_way:
            if te.reconfiguration is not None:
                te.reconfiguration.after_step(step_idx)
            for group in te.groups:
                group.renumber(step_idx, later(step_idx))
        self._under_way = [later(step_idx) for step_idx in self._under_way]
        self.step_idx = max([self.step_idx, *(step_idx + 1 for step_idx in self._under_way)])
        return self.oldest

    async def run_again(self) -> None:
        """Launch the steps that have been rolled back."""
        again, self._under_way = self._under_way, []
        for step_idx in again:
            await self._launch(step_idx)

    async def _end(self, step_idx: int) -> None:
        """Wait until all dies have ended a step, and take its results."""
        te = self._te
        while self._num_done[step_idx] < len(te.executors):
            await te.hear(te.health.deadline_ns)
        del self._num_done[step_idx]
        self._under_way.remove(step_idx)
        te.recovery.step_ended()
        if te.reconfiguration is not None:
            te.reconfiguration.after_step(step_idx)
        for group in te.groups:
            group.finish(step_idx)


class StepsApart:
    """Where tokens flow (dataflow, xDeepServe 5.3) nobody waits for another group."""

    def __init__(self, te: TE) -> None:
        self._te = te
        self._step_of: dict[int, int] = {}  # each group's step under way
        self._num_steps = Counter[int]()  # that each has ended

    @property
    def step_idx(self) -> int:
        """Of the next step of the group that has had most."""
        return max(self._num_steps.values(), default=0)

    @property
    def is_idle(self) -> bool:
        """No step is under way."""
        return not self._step_of

    def note(self, done: StepDone) -> None:
        """A die has ended a step: `advance` hears of it."""

    @property
    def oldest(self) -> int:
        """Of the steps under way, which each group numbers by itself; without any 0."""
        return min(self._step_of.values(), default=0)

    def roll_back(self) -> int:
        """No step under way has happened. Experts serve whoever comes: for them no step is the next one."""
        te = self._te
        for rank, step_idx in self._step_of.items():
            if te.reconfiguration is not None:
                te.reconfiguration.after_step((rank, step_idx))
            te.groups[rank].renumber(step_idx, later(step_idx))
            self._num_steps[rank] = self._step_of[rank] = later(step_idx)
        return 0

    async def run_again(self) -> None:
        """Launch the steps that have been rolled back."""
        for rank in sorted(self._step_of):
            self._launch(rank, self._step_of[rank])

    async def advance(self) -> bool:
        """Each DP group takes its next step if it has ended its last one; False if there is nothing to do."""
        te = self._te
        for rank, group in enumerate(te.groups):
            if rank not in self._step_of and te.schedule(group, self._num_steps[rank]):
                self._launch(rank, self._num_steps[rank])
        if not self._step_of:
            return False
        for rank in range(len(te.groups)):
            if te.health.wants_probe(rank):
                te.prober.send(rank)
        message = await te.hear(te.health.deadline_ns)
        if isinstance(message, StepDone):
            if te.reconfiguration is not None:
                te.reconfiguration.after_step((message.rank, message.step))
            te.recovery.step_ended()
            self._num_steps[message.rank] += 1
            te.groups[message.rank].finish(self._step_of.pop(message.rank))
        return True

    def _launch(self, rank: int, step_idx: int) -> None:
        """Send a group its planned step. The host's gap concerns this group alone."""
        te, delay, bucket = self._te, 0, 0
        group = te.groups[rank]
        self._step_of[rank] = step_idx
        if te.reconfiguration is not None:
            te.reconfiguration.before_step((rank, step_idx))
        if te.host is not None:
            delay = te.host.gap_ns() + te.host.launches_ns(step_idx)[rank]
            bucket = te.host.bucket([group.num_rows(step_idx)])
        group.launch(step_idx, delay, bucket)
        te.health.ask(rank, te.sizes.tp, delay)


def turns_of(te: TE) -> StepsTogether | StepsApart:
    """How a TE's groups take their steps."""
    return StepsApart(te) if te.sizes.turns == "dataflow" else StepsTogether(te)
