"""Graphs: captured in the first step with their guards, replayed as one launch, and nothing else replayed."""

import pytest

from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.plans import StepPlan
from xdeepserve.engine.walk.launcher import Guards
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
