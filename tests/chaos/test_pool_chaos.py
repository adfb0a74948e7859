"""Chaos for the memory pool: faults at each of its phases, and what is left of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import msgspec
import pytest

from tests.chaos.tools import tried
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

PARTS = 80  # of all faults at all phases


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(resolve_model("tiny-random")) as judge:
        yield judge


@functools.cache
def phases(deployment: str) -> list[tuple[str, FaultSchedule]]:
    """To find the phases takes longer than one part of them."""
    return every_phase(deployment, resolve_model("tiny-random"))


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


PHASES = [("put", step) for step in (1, 2, 3)] + [("get", step) for step in (1, 2, 3, 4)]
KINDS = [
    {"volume": 0, "kind": "error"},
    {"volume": 1, "kind": "full"},
    {"volume": 0, "kind": "torn"},
    {"mp_server": 1, "kind": "lost"},
    {"mp_server": 0, "kind": "left"},
    {"mp_controller": 0, "kind": "lost"},
]


def test_faults_while_both_tiers_evict(judge: Judge) -> None:
    """A pool without room, in which each phase of a put and of a get comes, and others have to go for it."""
    crowded = msgspec.structs.replace(FILLED, num_requests=8, pool="crowded")
    quiet = endure(crowded, judge.checkpoint, trace=True)
    assert quiet.pool["dram evictions"] > 0
    assert quiet.pool["volume evictions"] > 0
    assert quiet.pool["volume hits"] > 0
    assert {(operation, step) for operation, step, _ in quiet.moments} >= {*PHASES}
    for number, (operation, step) in enumerate(PHASES):
        when = {"operation": operation, "step": step, "event": 1}
        fault = msgspec.convert(KINDS[number % len(KINDS)] | when, Fault)
        finding = judge.judge(msgspec.structs.replace(crowded, faults=(fault,)))
        assert finding.verdict == "equal", (fault, finding)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(30000, 31000, 100))
def test_many_schedules_with_a_pool(judge: Judge, seed: int) -> None:
    assert tried(judge, pooled(judge, 100, seed)).bugs == []


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("deployment", ["colocated", "pd"])
def test_every_fault_at_every_phase(judge: Judge, deployment: str, part: int) -> None:
    trials = [Trial(schedule, operation) for operation, schedule in phases(deployment)[part::PARTS]]
    counts = tried(judge, trials).tally
    assert counts.equal == counts.schedules
