"""Campaigns: many schedules are run and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from xdeepserve.chaos.draw import PODS, draw
from xdeepserve.chaos.fault_schedule import FaultSchedule
from xdeepserve.chaos.judge import Finding, Judge, Verdict
from xdeepserve.chaos.single_faults import every_phase, every_step
from xdeepserve.engine.recovery.ladder import STAGES
from xdeepserve.errors import InputError, meant

# The least schedule that still fails the same way.


def shrink(schedule: FaultSchedule, still_fails: Callable[[FaultSchedule], bool]) -> FaultSchedule:
    """Leave out faults, requests and settings as long as `still_fails` returns True: deterministic and
    greedy.

    No single part can be left out of the result.
    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(schedule):
            if still_fails(smaller):
                schedule, is_smaller = smaller, True
                break
    return schedule


def _smaller(schedule: FaultSchedule) -> Iterator[FaultSchedule]:
    """Yield schedules with a single part less."""

    def but(**changes: object) -> FaultSchedule:
        return msgspec.structs.replace(schedule, **changes)

    for i in range(len(schedule.faults)):
        yield but(faults=schedule.faults[:i] + schedule.faults[i + 1 :])
    for i in range(len(schedule.servers)):
        yield but(servers=schedule.servers[:i] + schedule.servers[i + 1 :])
    for fewer in sorted({1, schedule.num_requests // 2, schedule.num_requests - 1}):
        if 0 < fewer < schedule.num_requests:
            yield but(num_requests=fewer)
    if schedule.pool in ("crowded", "filled"):
        yield but(pool="filled" if schedule.pool == "crowded" else "empty")
    if schedule.clock_seed is not None:
        yield but(clock_seed=None)
    for i in reversed(range(len(schedule.settings))):
        yield but(settings=schedule.settings[:i] + schedule.settings[i + 1 :])


TWICE_EVERY = 8  # so many schedules, one is run a second time, and must give the same events


COUNTED: dict[Verdict, str] = {  # as which field of ChaosCounts
    "equal": "equal",
    "named error": "named_errors",
    "hang": "hangs",
    "lost request": "lost_requests",
    "leak": "leaks",
    "wrong": "wrong",
}


class ChaosCounts(msgspec.Struct):
    """Counts of schedules by verdict. `wrong` means other bits, or other events in a second run.

    `stages` counts the recovered schedules with equal bits by their last resort
    (`engine/recovery/ladder.py`).
    """

    schedules: int = 0
    equal: int = 0
    named_errors: int = 0
    hangs: int = 0
    lost_requests: int = 0
    leaks: int = 0
    wrong: int = 0
    stages: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(STAGES, 0))

    @property
    def is_clean(self) -> bool:
        return not (self.hangs or self.lost_requests or self.leaks or self.wrong)

    def count(self, finding: Finding) -> None:
        """Count the finding of a schedule."""
        self.schedules += 1
        field = COUNTED[finding.verdict]
        setattr(self, field, getattr(self, field) + 1)
        gone_through = [stage for stage in self.stages if finding.stages[stage]]
        if finding.verdict == "equal" and gone_through:
            self.stages[gone_through[-1]] += 1


class Trial(msgspec.Struct, frozen=True):
    """A schedule of a campaign, with the operation that it is counted under, and whether to run it twice."""

    schedule: FaultSchedule
    operation: str = ""
    is_twice: bool = False


def check_deployments(names: Sequence[str]) -> list[str]:
    """Check names of deployments; none means all that have schedules. Raises InputError for deployments
    without schedules."""
    for name in names:
        if name not in PODS:
            known = ", ".join(PODS)
            raise InputError(f"no chaos for deployment '{name}'{meant(name, PODS)}: known are {known}")
    return list(names or PODS)


def random_trials(judge: Judge, deployments: Sequence[str], num: int, seed: int) -> list[Trial]:
    """Draw `num` random schedules; the first has the seed `seed`."""
    config = judge.checkpoint.config
    seeds = range(seed, seed + num)
    return [Trial(draw(each, deployments, config), is_twice=each % TWICE_EVERY == 0) for each in seeds]


def step_trials(judge: Judge, deployments: Sequence[str]) -> list[Trial]:
    """List the schedules of every single fault."""
    return [
        Trial(schedule, operation)
        for deployment in deployments
        for every in (every_step, every_phase)
        for operation, schedule in every(deployment, judge.checkpoint)
    ]


class Campaign:
    """Campaign of trials, counted and judged.

    `by_operation` counts them by deployment and operation; `bugs` has the smallest failing schedules.
    """

    def __init__(self, judge: Judge) -> None:
        self.judge, self.tally = judge, ChaosCounts()
        self.by_operation: Counter[tuple[str, str]] = Counter()
        self.bugs: list[tuple[FaultSchedule, Finding]] = []

    def run(self, trials: Iterable[Trial], report: Callable[[Trial, Finding], None]) -> None:
        """Run the trials in order, and shrink those that fail."""
        for trial in trials:
            finding = self.judge.judge(trial.schedule, trial.is_twice)
            self.tally.count(finding)
            self.by_operation[trial.schedule.deployment, trial.operation] += 1
            if finding.is_bug:
                self.bugs.append((self._shrunk(trial.schedule, finding), finding))
            report(trial, finding)

    def _shrunk(self, schedule: FaultSchedule, finding: Finding) -> FaultSchedule:
        def still_fails(smaller: FaultSchedule) -> bool:
            try:
                return self.judge.judge(smaller, twice=True).verdict == finding.verdict
            except InputError:
                return False  # there is no such pod, or it has no such die

        return shrink(schedule, still_fails)
