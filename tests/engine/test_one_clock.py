"""One clock: the same stage takes the same nanoseconds, whoever runs it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.lockstep import with_float
from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.run.clock.wiring import ClockWiring
from xdeepserve.engine.run.lockstep.colocated import ColocatedLockstep

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [2] * 20, [7, 1]]
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
STAGES = {"MLAProlog", "MLA", "OProj", "MLP", "Gate", "Experts", "SharedExpert", "Sample", "Draft"}

Durations = Counter[tuple[int, str, int]]  # die, stage, ns -> how often


def stages_of(llm: LLM) -> Durations:
    """What the lanes of the cores show of stages; an exchange's own kernels are priced with the exchange.
    And what moves experts: reports of load, the ways of weights to slots, and EPLB's phases."""
    spans = [
        s
        for s in llm.engine.plan.pod.trace.spans
        if (s.lane in ("AIC", "AIV") and s.name in {*STAGES, "Report load"})
        or s.lane in ("EPLB", "VPC")
        or s.name == "replicas"
    ]
    return Counter((s.node, s.name, s.end_ns - s.start_ns) for s in spans if s.end_ns > s.start_ns)


def run(deployment: str, *settings: str, timing_only: bool = False, **kwargs: Any) -> Durations:
    overrides = ["max_model_len=64", "cache.prefix=false", *settings]
    prepare, model = kwargs.pop("prepare", None), kwargs.pop("model", "tiny-random")
    with LLM(
        model, deployment, overrides=overrides, trace=True, trace_dies=0, timing_only=timing_only
    ) as llm:
        if callable(prepare):
            prepare(llm)
        llm.generate(PROMPTS, PARAMS)
        return stages_of(llm)


@pytest.mark.parametrize("settings", [("dies=1",), ("dies=4",), ("dies=3", "mtp=1")], ids=str)
def test_tasks_and_lockstep(settings: tuple[str, ...]) -> None:
    tasks = run("colocated", *settings)
    assert {name for _, name, _ in tasks} >= STAGES - {"Draft"}
    assert run("colocated", *settings, "lockstep=true") == tasks


@pytest.mark.parametrize("settings", [("dies=4",), ("dies=5", "experts.redundant_slots=1", "mtp=1")], ids=str)
def test_exchanges_by_push_cost_stages_nothing(settings: tuple[str, ...]) -> None:
    """As tasks and in lockstep, beside exchanges by pull as well."""
    tasks = run("colocated", *settings)
    assert run("colocated", *settings, "exchange=push") == tasks
    assert run("colocated", *settings, "exchange=push", "lockstep=true") == tasks


@pytest.mark.parametrize("settings", [("dies=4",), ("dies=5", "experts.redundant_slots=1")], ids=str)
def test_tasks_and_lockstep_with_dies_of_the_shared_expert(settings: tuple[str, ...]) -> None:
    """Its rows are billed where they have come, beside those of routed experts; own rows cost nothing."""
    tasks = run("colocated", *settings, "experts.shared_dies=2")
    assert {name for _, name, _ in tasks} >= STAGES - {"Draft", "SharedExpert"}
    assert run("colocated", *settings, "experts.shared_dies=2", "lockstep=true") == tasks


@pytest.mark.thin(2)
@pytest.mark.parametrize("routed", [3, 4])
@pytest.mark.parametrize("mtp", [0, 1])
def test_tasks_and_lockstep_where_experts_have_dies_of_their_own(mtp: int, routed: int) -> None:
    """Of three dies some hold one expert more than others."""
    settings = ("attention.domains=2", "attention.dies=2", f"mtp={mtp}", f"experts.routed_dies={routed}")
    tasks = run("moe-attention", *settings)
    assert run("moe-attention", *settings, "lockstep=true") == tasks


APART = ("attention.domains=2", "attention.dies=2", "experts.routed_dies=3")


@pytest.mark.parametrize(
    ("deployment", "settings", "group"),
    [("moe-attention", APART, "shared down"), ("colocated", ("dies=2",), "shared up")],
)
def test_layers_of_several_kinds(deployment: str, settings: tuple[str, ...], group: str) -> None:
    """They differ in what of the shared expert their INT8 recipe keeps in floating point."""
    tasks = run(deployment, *settings, model=with_float(group))
    assert run(deployment, *settings, "lockstep=true", model=with_float(group)) == tasks


def test_one_die_in_one_call() -> None:
    assert run("monolithic", "lockstep=true") == run("monolithic", "lockstep=false")


MOVES = ("experts.redundant_slots=1", "experts.balance_interval=0.001", "experts.balance_slices=1")


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "settings",
    [*((f"dies={dies}",) for dies in (1, 2, 3, 4, 7, 8)), ("dies=4", *MOVES), ("dies=18", *MOVES)],
    ids=str,
)
def test_tasks_and_time_only(monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]) -> None:
    """With the routing of the run that computes, of which lockstep keeps a record; and with its load, which
    makes replicas that take the same time to come. (As tasks exchanges take other instants, and so do the
    replicas.)"""
    received: list[np.ndarray] = []
    loads: list[np.ndarray] = []
    collected: Callable[..., np.ndarray] = Reconfiguration.collected

    def collect(reconfiguration: Reconfiguration) -> np.ndarray:
        loads.append(collected(reconfiguration))
        return loads[-1]

    monkeypatch.setattr(Reconfiguration, "collected", collect)
    tell: Callable[..., None] = ColocatedLockstep.tell_time

    def record(lockstep: ColocatedLockstep, shares, visits, passes) -> None:
        if settings[0] != "dies=1":
            received.extend(
                lockstep.received[at].sum(axis=1)
                for at, visit in zip(passes, visits, strict=True)
                if visit.layer.moe
            )
        tell(lockstep, shares, visits, passes)

    monkeypatch.setattr(ColocatedLockstep, "tell_time", record)
    settings = (*settings, "mtp=0")
    lockstep = run("colocated", *settings, "lockstep=true")
    monkeypatch.setattr(ColocatedLockstep, "tell_time", tell)
    if MOVES[0] in settings:
        assert {"replicas", "3 load", "Report load"} <= {name for _, name, _ in lockstep}
    given = iter(list(loads))

    def route(llm: LLM) -> None:
        wiring = llm.engine.plan.tes[0].wiring
        assert isinstance(wiring, ClockWiring)
        monkeypatch.setattr(Reconfiguration, "collected", lambda _: next(given))
        drawn = iter(received)
        wiring.loads[0].routing.counts = (  # type: ignore[method-assign]
            lambda event, stream, copies, kept=[]: kept.pop() if kept else _both(kept, next(drawn))
        )

    def _both(kept: list[np.ndarray], counts: np.ndarray) -> np.ndarray:
        kept.append(counts)  # dispatch and combine of an event both ask
        return counts

    time_only = run("colocated", *settings, timing_only=True, prepare=route)
    assert without_order(time_only) == without_order(lockstep)
    if MOVES[0] not in settings:
        assert run("colocated", *settings) == lockstep


def without_order(spans: Counter[tuple[int, str, int]]) -> Counter[tuple[int, str, int]]:
    """Forget which die's replicas come first, of dies that ask for theirs at the same instant: one link has
    them in the order in which the dies' programs turn."""
    found = Counter[tuple[int, str, int]]()
    for (die, name, length), count in spans.items():
        found[-1 if name == "replicas" else die, name, length] += count
    return found
