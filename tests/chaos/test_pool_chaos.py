"""Chaos for the memory pool: faults at each of its phases, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.chaos.test_chaos import tried
from xdeepserve.chaos import campaign
from xdeepserve.chaos.aftermath import endure
from xdeepserve.chaos.campaign import Trial
from xdeepserve.chaos.draw import PODS, POOL, SMALL
from xdeepserve.chaos.fault_schedule import FaultSchedule
from xdeepserve.chaos.judge import Judge
from xdeepserve.chaos.single_faults import every_phase
from xdeepserve.hw.faults import Fault
from xdeepserve.model.presets import resolve_model

FILLED = FaultSchedule("colocated", (*SMALL, "dies=2", *POOL), num_requests=4, pool="filled")


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(resolve_model("tiny-random")) as judge:
        yield judge


def pooled(judge: Judge, num: int, seed: int) -> list[Trial]:
    """The schedules with a pool among so many."""
    trials = campaign.random_trials(judge, list(PODS), num, seed)
    return [trial for trial in trials if trial.schedule.pool != "none"]


def test_faults_of_the_pool_happen(judge: Judge) -> None:
    """They cost hits, and nothing else."""

    def hits(*faults: Fault) -> int:
        counts = endure(msgspec.structs.replace(FILLED, faults=faults), judge.checkpoint).pool
        return counts["volume hits"] + counts["dram hits"]

    whole = hits()
    assert whole > 0
    early = {"at_us": 1.0}
    for place in ("volume", "mp_server"):
        kind = "error" if place == "volume" else "lost"
        both = [msgspec.convert({place: number, "kind": kind, **early}, Fault) for number in range(2)]
        assert hits(*both) == 0
    assert hits(Fault(1.0, mp_controller=0, kind="lost")) == whole


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(30000, 31000, 100))
def test_many_schedules_with_a_pool(judge: Judge, seed: int) -> None:
    assert tried(judge, pooled(judge, 100, seed)).bugs == []


@pytest.mark.campaign
@pytest.mark.parametrize("deployment", ["colocated", "pd"])
def test_every_fault_at_every_phase(judge: Judge, deployment: str) -> None:
    trials = [Trial(schedule, operation) for operation, schedule in every_phase(deployment, judge.checkpoint)]
    counts = tried(judge, trials).tally
    assert counts.equal == counts.schedules
