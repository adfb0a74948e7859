"""The first tier of heartbeats: hosts whose loops stand still are suspect, and then lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.errors import DeadlineError, InputError
from xdeepserve.history import History, serve
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.faults import Fault
from xdeepserve.hw.queue import HostCPU, HostQueue
from xdeepserve.llm import digest
from xdeepserve.model.presets import TinyCheckpoint

PROMPTS = [[1, 2, 3], list(range(40)), [7] * 20]
PARAMS = SamplingParams(max_tokens=6, temperature=0.5, seed=1, ignore_eos=True)
SIZE = "max_model_len=128"
QUICK = ("health.beat_s=0.001", "health.shell_lost_s=0.004")


@pytest.fixture(scope="module")
def expected() -> str:
    return digest(one_die(PROMPTS, PARAMS, max_model_len=128))


DEPLOYMENTS = [
    ("monolithic", []),
    ("colocated", ["dies=2"]),
    ("pd", ["prefill.dies=1", "decode.dies=1"]),
    ("moe-attention", ["dataflow=true"]),
]


@pytest.mark.parametrize(("deployment", "settings"), DEPLOYMENTS)
def test_a_host_that_stands_still_for_a_while_is_only_late(
    expected: str, deployment: str, settings: Sequence[str]
) -> None:
    quiet = History(deployment, (SIZE, *QUICK, *settings), PROMPTS, PARAMS)
    faults = (Fault(2500.0, host=0, kind="stalled", for_us=2500.0),)
    told = [serve(history) for history in (quiet, replace(quiet, faults=faults))]
    assert [each.digest for each in told] == [expected] * 2
    assert all(te.shell == "healthy" for each in told for te in each.stats.health)
    assert 100_000 < told[1].end_ns - told[0].end_ns < 3_000_000


@pytest.mark.parametrize(("deployment", "settings"), DEPLOYMENTS)
def test_one_that_stands_still_for_too_long_is_lost_and_named(
    tiny: TinyCheckpoint, deployment: str, settings: Sequence[str]
) -> None:
    faults = (Fault(2000.0, host=0, kind="stalled", for_us=50_000.0),)
    with (
        LLM(tiny, deployment, overrides=[SIZE, *QUICK, *settings], faults=faults) as llm,
        pytest.raises(DeadlineError, match=r"heartbeat, tier 1.*control plane.*TE-shell of") as caught,
    ):
        llm.generate(PROMPTS, PARAMS)
    assert "\n" not in str(caught.value)
    assert "silence for 0.00" in str(caught.value)


def test_another_te_takes_the_place_of_one_whose_host_stood_still(expected: str) -> None:
    faults = (Fault(2000.0, host=0, kind="stalled", for_us=9_000.0),)
    settings = (SIZE, *QUICK, "dies=2", "recovery.failover=true")
    told = serve(History("colocated", settings, PROMPTS, PARAMS, faults=faults))
    assert told.digest == expected
    assert "tier 1" in str(told.lost["te"])


def test_a_pod_without_work_is_not_asked(tiny: TinyCheckpoint) -> None:
    with LLM(tiny, overrides=[SIZE, *QUICK]) as llm:
        llm.generate(PROMPTS, PARAMS)
        before = llm.engine.plan.pod.clock.now
        assert llm.engine.plan.pod.clock.rests
        llm.generate([[1]], SamplingParams(max_tokens=1))
        assert llm.engine.plan.pod.clock.now - before < 10_000_000


def test_a_queue_is_heard_when_its_host_goes_on() -> None:
    clock = Clock()
    cpu = HostCPU(clock)
    queue: HostQueue[str] = HostQueue(clock, "inbox", cpu)

    async def main() -> list[object]:
        cpu.stall(100)
        queue.put("first", 10)
        found: list[object] = [await queue.get(), clock.now]
        cpu.stall(100)  # until 200
        queue.put("late", 50)  # at 150
        found += [await queue.get(120), clock.now]
        with pytest.raises(DeadlineError):
            await queue.get(210)
        return [*found, clock.now]

    async def run() -> list[object]:
        return await clock.spawn(main())

    assert asyncio.run(run()) == ["first", 100, "late", 200, 210]


@pytest.mark.parametrize(
    ("settings", "faults", "said"),
    [
        (["health.beat_s=0"], (), r"health\.beat_s must be at least 0\.001, found 0"),
        (["health.shell_lost_s=1"], (), "found beat_s=1.0, shell_lost_s=1.0"),
        ([], (Fault(1.0, host=0, kind="stalled"),), "it needs for_us"),
        ([], (Fault(1.0, host=3, kind="stalled", for_us=1.0),), "the deployment has no host 3"),
    ],
)
def test_refusals(settings: Sequence[str], faults: Sequence[Fault], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        LLM("tiny-random", overrides=settings, faults=faults)
    assert "\n" not in str(caught.value)
