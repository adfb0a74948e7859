"""Masters of DP groups whose dies meet in every step: each launches, collects and is missed by itself."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from xdeepserve.engine.dp.events import Mended, StepEnded
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.te.host import Host
from xdeepserve.engine.te.status_gather import StatusGather
from xdeepserve.engine.te.step_set import StepSet
from xdeepserve.engine.walk.launcher import Launcher
from xdeepserve.engine.walk.runner import Runner
from xdeepserve.errors import DeadlineError
from xdeepserve.history import History, Told, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.step.stage import Meet

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
PROMPTS = [[1, 2, 3], [7] * 20, [9, 8]]
SIZE = "max_model_len=64"
DIES_OF_A_SERVER = 16


def served(
    *settings: str, prompts: list[list[int]] = PROMPTS, is_timing_only: bool = False, **more: Any
) -> Told:
    history = History("colocated", (SIZE, *settings), prompts, PARAMS, is_timing_only=is_timing_only, **more)
    return serve(history, hears=(StepEnded, Mended))


def ends_of(told: Told, rank: int) -> dict[int, int]:
    """When a group's steps that had rows ended, by number [ns]."""
    return {step.step: step.end_ns for step in told.of(StepEnded) if step.group.rank == rank}


def test_each_group_launches_when_its_own_host_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[int, list[int]] = {}
    draws = Host.launches_ns

    def launches_ns(host: Host, step: Any) -> list[int]:
        drawn[step] = draws(host, step)
        return drawn[step]

    monkeypatch.setattr(Host, "launches_ns", launches_ns)
    told = served("dies=3", "execution.mode=graph", "execution.cache_graphs=false", is_timing_only=True)
    starts = {(int(step.step), int(step.group.rank)): step.start_ns for step in told.of(StepEnded)}
    for step, late in drawn.items():
        assert len(set(late)) == 3, "each group's launch takes a time of its own"
        there = [rank for rank in range(3) if (step, rank) in starts]
        assert there
        ends = [end for rank in there if (end := ends_of(told, rank).get(step - 1)) is not None]
        if len(ends) == len(there):  # planned as soon as its own dies had ended the step before
            begun = {rank: starts[step, rank] - late[rank] - ends_of(told, rank)[step - 1] for rank in there}
            assert len(set(begun.values())) == 1, "the gap of the scheduler, and no group's but its own"


def test_a_group_whose_dies_have_ended_waits_for_no_other() -> None:
    few, many = [5, 6], [8] * 30
    told = served("dies=2", "scheduler.max_num_batched_tokens=64", prompts=[few, many])
    (sooner, later) = sorted(ends_of(told, rank)[0] for rank in (0, 1))
    assert sooner < later


@pytest.mark.parametrize("ahead", [False, True])
def test_a_server_that_stands_still_delays_its_own_groups_alone(ahead: bool) -> None:
    """Of 17 groups the last one is on a server of its own: the others have their tokens of the step."""
    settings = ("dies=17", f"execution.overlap={'true' if ahead else 'false'}")
    prompts = [[number, 2, 3] for number in range(17)]
    quiet = served(*settings, prompts=prompts, is_timing_only=True)
    at_ns = ends_of(quiet, DIES_OF_A_SERVER)[2] - 1000
    fault = Fault(at_ns / 1000, host=1, kind="stalled", for_us=5000.0)
    told = served(*settings, prompts=prompts, is_timing_only=True, faults=(fault,))
    late = ends_of(told, DIES_OF_A_SERVER)
    assert late[2] >= at_ns + 5_000_000
    for rank in range(DIES_OF_A_SERVER):
        ends = ends_of(told, rank)
        assert ends[2] == ends_of(quiet, rank)[2]
        assert ends[4] > late[2], "the dies wait in a step that the last group has not launched"


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (2, r"dispatch: .* waits for peer \[16\]"),  # by dies that wait for the next step there
        (5, r"heartbeat: .* waits for peer DP group 16, .*1 of 17 DP groups lost"),  # the last one
    ],
)
def test_a_master_that_has_stopped_is_named(step: int, named: str) -> None:
    prompts = [[number, 2, 3] for number in range(17)]
    settings = ("dies=17", "health.suspect_s=0.01", "health.lost_s=0.05")
    quiet = served(*settings, prompts=prompts, is_timing_only=True)
    at_us = ends_of(quiet, DIES_OF_A_SERVER)[step] / 1000 - 1
    fault = Fault(at_us, host=1, kind="stalled", for_us=1e9)
    with pytest.raises(DeadlineError, match=named):
        served(*settings, prompts=prompts, is_timing_only=True, faults=(fault,))


@pytest.mark.parametrize("settings", [(), ("execution.overlap=true", "mtp=1"), ("lockstep=true",)])
def test_a_group_runs_along_what_others_run_again(
    settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error code comes between the ends of two groups' steps: one has posted its tokens already."""
    prompts = [[5, 6], [8] * 30, [9] * 8]
    size = ("dies=2", "scheduler.max_num_batched_tokens=64", *settings)
    quiet = served(*size, prompts=prompts)
    both = sorted(ends_of(quiet, 0).keys() & ends_of(quiet, 1).keys())
    first, second = ends_of(quiet, 0), ends_of(quiet, 1)
    step = next(number for number in both if first[number] != second[number])
    late = int(second[step] > first[step])  # the group that has not ended
    sooner, later = sorted((first[step], second[step]))
    empty: Counter[int] = Counter()
    rolls_back = StepSet.roll_back

    def roll_back(steps: StepSet, first: Any, shift: int) -> None:
        empty[steps.group.rank] += steps.oldest - first
        rolls_back(steps, first, shift)

    monkeypatch.setattr(StepSet, "roll_back", roll_back)
    fault = Fault((sooner + later) / 2000, late, "glitch", code="aicore-exception")
    again = served(*size, prompts=prompts, faults=(fault,))
    assert again.digest == quiet.digest
    assert [each.epoch for each in again.of(Mended)] == [1]
    assert empty == {1 - late: 1, late: 0}
    assert ends_of(again, 1 - late)[step] == sooner, "taken before the error code, and not taken again"
    assert step not in ends_of(again, late)
    assert min(end for number, end in ends_of(again, late).items() if number > step) > later


def test_no_step_begins_before_waiting_requests_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an all-gather of statuses, groups that step together have one before a step, and one alone."""
    gathers: list[int] = []
    run = StatusGather.run

    async def note(gather: StatusGather, *args: Any) -> Any:
        known = await run(gather, *args)
        (group,) = gather.groups[:1]
        gathers.append(group.dies[0].clock.now)
        return known

    monkeypatch.setattr(StatusGather, "run", note)
    arrivals = [0, 0, 0, 100_000, 150_000, 2_500_000]
    prompts = [[number, 2, 3, 4] for number in range(len(arrivals))]
    settings = (
        "dies=3",
        "scheduler.statuses=all-gather",
        "scheduler.max_num_seqs=8",
        "scheduler.max_num_batched_tokens=8",
    )
    told = served(*settings, prompts=prompts, arrivals_ns=arrivals)
    assert told.digest == served("dies=1", prompts=prompts).digest
    begun = sorted({step.start_ns for step in told.of(StepEnded)})
    assert len(gathers) > 1
    for one, other in pairwise(gathers):
        assert any(one <= start_ns < other for start_ns in begun)


def test_the_host_launches_no_collective_of_a_group_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, by_meets = Counter[int](), Counter[tuple[int, str]]()
    kernel, meet = Launcher.kernel, Runner.meet

    async def note_kernel(launcher: Launcher, operators: int) -> None:
        launched[launcher.die.index] += operators
        await kernel(launcher, operators)

    async def note_meet(runner: Runner, at: Meet) -> None:
        die = runner.die.index
        before = launched[die]
        await meet(runner, at)
        by_meets[die, at.op] += launched[die] - before

    monkeypatch.setattr(Launcher, "kernel", note_kernel)
    monkeypatch.setattr(Runner, "meet", note_meet)
    told = served("dies=4", "tp=2", "execution.mode=op", prompts=[[1, 2, 3]])
    assert {step.group.rank for step in told.of(StepEnded)} == {0}
    for die in range(4):
        assert (by_meets[die, "all_reduce"] > 0) == (die < 2)
        assert by_meets[die, "dispatch"] == by_meets[die, "combine"] > 0
    assert (2, "all_reduce") in by_meets, "it came there, and there was none"
