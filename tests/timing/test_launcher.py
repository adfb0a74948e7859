"""Launches: of graphs, captured in the first step with their guards and replayed as one, and of operators.

In lockstep a timetable bills the launches of layers; each die's host launches as much as it does for a task.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.plans import StepPlan
from xdeepserve.engine.walk.launcher import Guards, Launcher
from xdeepserve.errors import XDeepServeError
from xdeepserve.llm import LLM

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def test_a_graph_is_captured_once_for_its_guards_and_then_replayed() -> None:
    with LLM("tiny", overrides=["execution.mode=graph"]) as llm:
        [executor], clock = llm.engine.je.tes[0].executors, llm.engine.plan.pod.clock
        assert executor.launcher is not None
        step, times = executor.step, []

        async def timed(plan: StepPlan) -> None:
            start = clock.now
            await step(plan)
            times.append((Guards.of(plan), clock.now - start))

        executor.step = timed  # type: ignore[method-assign]
        llm.generate([[5, 6, 7]], PARAMS)
        graphs, replays = executor.launcher.graphs, executor.launcher.num_replays
    assert set(graphs) == {guards for guards, _ in times}
    assert {guards.bucket for guards in graphs} == {4, 1}  # the prompt's three rows, and one row of each step
    assert replays == len(times) - 2
    stages = graphs[times[-1][0]]
    assert (stages[0], stages[1:4], stages[-1]) == ("Embed", ("MLAProlog", "MLA", "OProj"), "Sample")
    capture, *replayed = [duration for guards, duration in times if guards.bucket == 1]
    assert all(duration < capture for duration in replayed)


def test_operators_are_never_captured() -> None:
    with LLM("tiny", overrides=["execution.mode=op"]) as llm:
        llm.generate([[5, 6, 7]], PARAMS)
        [executor] = llm.engine.je.tes[0].executors
        assert executor.launcher is not None
        assert not executor.launcher.graphs


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (lambda stages: (*stages[:3], "Gate", *stages[3:]), "stage 3 is OProj, captured was Gate"),
        (lambda stages: stages[:-1], "is Sample, captured was the end"),
        (lambda stages: (*stages, "Draft"), "it ended before stage"),
    ],
)
def test_a_replay_that_departs_from_its_graph_is_an_error(tamper, expected: str) -> None:
    with LLM("tiny", overrides=["execution.mode=graph"]) as llm:
        llm.generate([[5, 6, 7]], PARAMS)
        [executor] = llm.engine.je.tes[0].executors
        assert executor.launcher is not None
        graphs = executor.launcher.graphs
        for guards in graphs:
            graphs[guards] = tamper(graphs[guards])
        with pytest.raises(XDeepServeError, match=expected):
            llm.generate([[8, 9, 10]], PARAMS)


@pytest.mark.parametrize("deployment", ["colocated", "pd", "transformerless"])
def test_stages_without_rows_are_part_of_a_graph(deployment: str) -> None:
    """Groups without work, experts that nobody chose, microbatches of nothing: still the same graph."""
    with LLM("tiny", deployment, overrides=["mtp=2", "mtp_reuse=true", "execution.mode=graph"]) as llm:
        for prompts in ([[1]], [[2], list(range(40))], [[i] for i in range(9)]):
            llm.generate(prompts, PARAMS)
        launchers = [executor.launcher for executor in llm.engine.je.tes[-1].executors]
        assert all(launcher is not None and launcher.num_replays > 0 for launcher in launchers)


# ---- in lockstep ---------------------------------------------------------------------------------------

SPREAD = [[i] * (20 + i) for i in range(16)]
FEW = [[1, 2, 3], [4] * 30, [5] * 9]  # some dies have no rows
APART = ("attention.dies=2", "attention.domains=2", "experts.routed_dies=3")


def ends_of(
    deployment: str,
    *settings: str,
    prompts: Sequence[list[int]] = SPREAD,
    params: SamplingParams = PARAMS,
    **kwargs: Any,
) -> tuple[int, list[tuple[int | None, float | None]]]:
    """Return the instant of the end in ns, and each request's TTFT and TPOT."""
    overrides = ["max_model_len=128", *settings]
    with LLM("tiny-random", deployment, "int8", overrides=overrides, progress=False, **kwargs) as llm:
        metrics = [output.metrics for output in llm.generate(prompts, params)]
        times = [(each.ttft_ns, each.tpot_ns) for each in metrics if each is not None]
        return llm.engine.plan.pod.clock.now, times


@pytest.mark.parametrize("mode", ["op", "graph"])
@pytest.mark.parametrize("more", [(), ("mtp=1",), ("mtp=1", "execution.mtp=naive")], ids=str)
def test_a_die_in_lockstep_takes_what_a_task_takes(mode: str, more: tuple[str, ...]) -> None:
    settings = "monolithic", f"execution.mode={mode}", *more
    assert ends_of(*settings, lockstep=True) == ends_of(*settings, lockstep=False)


@pytest.mark.parametrize("mode", ["op", "graph"])
@pytest.mark.parametrize(
    ("deployment", "more"), [("colocated", ("dies=4",)), ("moe-attention", (*APART, "experts.routed_dies=1"))]
)
def test_dies_in_lockstep_take_what_timing_only_runs_take(
    deployment: str, more: tuple[str, ...], mode: str
) -> None:
    """Both bill exchanges as a whole. They route differently, so one expert die has all experts. With expert
    dies only the step that captures a graph is compared: replays differ by 1 us, with or without launches."""
    settings = deployment, f"execution.mode={mode}", *more
    params = PARAMS
    if (deployment, mode) == ("moe-attention", "graph"):
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    as_one = ends_of(*settings, params=params, lockstep=True)
    assert as_one == ends_of(*settings, params=params, timing_only=True)


@pytest.mark.parametrize("mode", ["op", "graph"])
@pytest.mark.parametrize("prompts", [SPREAD, FEW], ids=["spread", "few"])
@pytest.mark.parametrize(
    ("deployment", "more"),
    [("colocated", ("dies=4",)), ("colocated", ("dies=4", "exchange=push")), ("moe-attention", APART)],
)
def test_each_host_launches_as_many_operators_as_for_tasks(
    monkeypatch: pytest.MonkeyPatch,
    deployment: str,
    more: tuple[str, ...],
    prompts: list[list[int]],
    mode: str,
) -> None:
    begun: dict[int, int] = {}
    launched: dict[int, list[int]] = {}  # by die, the operators of each step
    begin, end = Launcher.begin, Launcher.end

    def note_begin(launcher: Launcher, plan: StepPlan) -> None:
        begin(launcher, plan)
        begun[launcher.die.index] = launcher.launched_ns

    def note_end(launcher: Launcher) -> None:
        end(launcher)
        die = launcher.die.index
        operators, rest = divmod(launcher.launched_ns - begun[die], launcher.op_ns)
        assert not rest
        launched.setdefault(die, []).append(operators)

    monkeypatch.setattr(Launcher, "begin", note_begin)
    monkeypatch.setattr(Launcher, "end", note_end)
    settings = deployment, f"execution.mode={mode}", *more
    ends_of(*settings, prompts=prompts, lockstep=False)
    as_tasks = {die: [*counts] for die, counts in launched.items()}
    launched.clear()
    ends_of(*settings, prompts=prompts, lockstep=True)
    assert launched == as_tasks
    assert any(counts[0] > 0 for counts in launched.values())
    assert any(counts[-1] > 0 for counts in launched.values()) == (mode == "op"), "graphs are replayed"
