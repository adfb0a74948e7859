"""Nothing runs on a die at no cost but what stands in FREE, with a reason."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.deploy.resolve import SELF_SIZING
from xdeepserve.engine.die import carried, sampler
from xdeepserve.hw.die import Die
from xdeepserve.model import kernels
from xdeepserve.model.kernels import drafts
from xdeepserve.step import passes
from xdeepserve.step.frame import Frame
from xdeepserve.step.layer import ATTENTION
from xdeepserve.step.stage import FREE, Op, Stage, free, stages

TP, EPLB = ("dies=4", "tp=2"), "experts.redundant_slots=1"
POOLS: list[tuple[str, str, tuple[str, ...]]] = [
    *(("tiny-random", name, ()) for name in SELF_SIZING),
    *(("tiny-random", name, ("mtp=2", EPLB)) for name in ("colocated", "moe-attention")),
    ("tiny-random", "monolithic", ("mtp=2", "execution.overlap=true")),
    ("tiny-random", "colocated", TP),
    ("tiny-random", "colocated", (*TP, "tp_mode=sp-tp-sp", "mtp=1")),
    ("tiny-random", "colocated", ("dies=4", "o_proj_tp=2")),
    ("tiny-random", "colocated", ("prefill_attention=unabsorbed",)),
    ("tiny-random", "colocated", ("exchange=push", "pipeline.microbatches=2")),
    *(("tiny-random", name, ("combine=int8",)) for name in ("monolithic", "colocated")),
]


def ops_of(llm: LLM) -> Iterator[Op]:
    """Operations of all dies' programs, in layers and around them."""
    programs: list[Any] = [passes.EMBED, passes.MTP_INPUT, passes.MTP_HEAD, passes.MTP_STATES]
    for te in llm.engine.je.tes:
        for executor in te.executors:
            programs.append(executor.traversal.head)
            programs += [half for layer in executor.traversal.programs for half in layer]
        programs += [(program.stage,) for program in te.expert_programs]
    for program in programs:
        for stage in program:
            if isinstance(stage, Stage):
                yield from stage.ops


def name_of(kernel: Callable[..., None]) -> str:
    return kernel.__name__.lstrip("_")


def serve(model: str, deployment: str, overrides: tuple[str, ...]) -> LLM:
    return LLM(model, deployment, "int8", overrides=[*overrides, "lockstep=false"], progress=False)


def watch_kernels(
    monkeypatch: pytest.MonkeyPatch, noted: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace all kernels by what `noted` makes of their names and themselves."""
    for name in dir(kernels):
        kernel = getattr(kernels, name)
        if callable(kernel) and not name.startswith("_"):
            monkeypatch.setattr(kernels, name, noted(name, kernel))


def test_what_costs_nothing_stands_in_free_and_all_of_free_is_there() -> None:
    every = [op for program in ATTENTION.values() for stage in stages(program) for op in stage.ops]
    found = {name_of(op.kernel) for op in every if op.work is free}
    for model, deployment, overrides in POOLS:
        for precision in ("int8",) if "combine=int8" in overrides else ("int8", "fp32"):
            with LLM(model, deployment, precision, overrides=overrides, progress=False) as llm:
                found |= {name_of(op.kernel) for op in ops_of(llm) if op.work is free}
    assert found == FREE.keys()


@pytest.mark.parametrize(("model", "deployment", "overrides"), POOLS)
def test_kernels_run_in_launches_that_take_time(
    monkeypatch: pytest.MonkeyPatch, model: str, deployment: str, overrides: tuple[str, ...]
) -> None:
    """And a launch takes no time only if all of its operations stand in FREE, or if it has no rows; none of
    these multiplies matrices."""
    launches: list[bool] = []  # whether the one under way, if any, is paid for
    unpaid: list[Op] = []  # the operation without a cost that runs, if one does
    outside: set[str] = set()

    def noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not (launches and launches[-1]) and np.size(args[0]):
                outside.add(name)
            assert not (unpaid and name.startswith("matmul")), f"{name} in {unpaid[0].kernel}, which is free"
            return kernel(*args)

        return call

    def run_ops(stage: Stage, frame: Frame) -> None:
        for op in stage.ops:
            unpaid[:] = [op] if op.work is free else []
            op.kernel(frame)
        unpaid.clear()

    run = Die.run

    async def watched(die: Die, name: str, fn: Callable[[], Any], duration_ns: int, *rest: Any) -> Any:
        def launch() -> Any:
            launches.append(duration_ns > 0 or is_free)
            try:
                return fn()
            finally:
                launches.pop()

        stage = getattr(getattr(fn, "func", None), "__self__", None)
        is_free = isinstance(stage, Stage) and all(op.work is free for op in stage.ops)
        return await run(die, name, launch, duration_ns, *rest)

    monkeypatch.setattr(Die, "run", watched)
    monkeypatch.setattr(Stage, "run", run_ops)
    with serve(model, deployment, overrides) as llm:
        watch_kernels(monkeypatch, noted)
        for home, name in (
            (sampler, "sample"),
            (sampler, "accept"),
            (drafts, "first_rows"),
            (drafts, "next_rows"),
            (carried, "resolve"),
        ):
            monkeypatch.setattr(home, name, noted(name, getattr(home, name)))
        llm.generate([[7, 8, 9] * 100, [5] * 400], SamplingParams(max_tokens=4, temperature=0))
    # The stage with the head is billed for the sampler, and FusedDispatch for a pipeline that quantises.
    assert outside <= {"sample", "accept"} | ({"quantize_rows"} if "exchange=push" in overrides else set())


SILENT = {"num_groups"}  # which the host asks beforehand
EITHER = {  # of an MLP the activation comes first; a die with both kinds of experts may get rows for one
    "find_maxima": {1, 2},
    "run_either": {3, 6, 9},
}


@pytest.mark.parametrize(("model", "deployment", "overrides"), POOLS)
def test_in_single_op_mode_the_host_launches_the_operators_that_there_are(
    monkeypatch: pytest.MonkeyPatch, model: str, deployment: str, overrides: tuple[str, ...]
) -> None:
    """As many as kernels are called, where an operation calls any, whatever its rows."""
    calls: list[str] = []
    found: set[tuple[str, int, int]] = set()

    def noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            calls.append(name)
            return kernel(*args, **named)

        return call

    def run(stage: Stage, frame: Any) -> None:
        for op in stage.ops:
            calls.clear()
            op.kernel(frame)
            if num := len([name for name in calls if name not in SILENT]):
                found.add((getattr(op.kernel, "__name__", "head").lstrip("_"), op.operators, num))

    monkeypatch.setattr(Stage, "run", run)
    with serve(model, deployment, overrides) as llm:
        watch_kernels(monkeypatch, noted)
        llm.generate([[7, 8, 9] * 100, [5] * 400], SamplingParams(max_tokens=4, temperature=0))
    assert len(found) > 5
    wrong = {row for row in found if row[2] not in EITHER.get(row[0], {row[1]})}
    assert not wrong, "kernel, operators said, kernels called"
