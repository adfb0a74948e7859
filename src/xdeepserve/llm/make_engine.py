"""Engines from names: resolves model and deployment, and plans the pod."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xdeepserve.engine.build import PodPlan, with_answers
from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.deploy.resolve import Overrides, resolve
from xdeepserve.engine.lanes import DEFAULT_SHOWN_DIES
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.errors import RequestError
from xdeepserve.hw.faults import Fault, check_faults, schedule
from xdeepserve.hw.pod import Pod
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.weights import RECIPES, Recipe


def build_engine(
    model: str | Path | Checkpoint,
    deployment: str | Deployment,
    precision: Recipe,
    *,
    overrides: Overrides = (),
    trace: bool = False,
    trace_dies: int = DEFAULT_SHOWN_DIES,
    clock_seed: int | None = None,
    timing_only: bool | TimingConfig = False,
    warm_up: bool = False,
    pod: Pod | None = None,
    faults: Sequence[Fault] = (),
) -> Engine:
    """Resolve names, plan the pod or a part of `pod`, and refuse what cannot be built. Nothing is
    allocated."""
    if not isinstance(model, str | Path | Checkpoint):
        raise RequestError(
            f"model must be a preset's name, a directory or a Checkpoint, found {model!r}", param="model"
        )
    if not isinstance(deployment, str | Deployment):
        raise RequestError(
            f"deployment must be a preset's name, a .toml file or a Deployment, found {deployment!r}",
            param="deployment",
        )
    if precision not in RECIPES:
        raise RequestError(
            f"unknown precision '{precision}': known are {', '.join(RECIPES)}", param="precision"
        )
    if trace_dies < 0:
        raise RequestError(f"trace_dies must be 0 (all) or more, found {trace_dies}", param="trace_dies")
    if faults and pod is not None:
        raise RequestError("faults are those of a pod: give them with its first model", param="faults")
    if pod is not None and (clock_seed is not None or (trace and not pod.trace.is_on)):
        raise RequestError(
            "clock_seed and trace belong to a pod: the LLM that this one is beside has them, or has not",
            param="clock_seed" if clock_seed is not None else "trace",
        )
    checkpoint = model if isinstance(model, Checkpoint) else resolve_model(model)
    model_name = checkpoint.name if isinstance(model, Checkpoint) else model
    if isinstance(deployment, str) or overrides:
        deployment = resolve(deployment, overrides)
    timing = TimingConfig() if timing_only is True else timing_only or None
    with_answers(checkpoint.config, deployment, precision)  # refuses alike whether tokens are computed or not
    recipe: Recipe = "int8" if timing else precision
    plan = PodPlan(
        checkpoint, deployment, recipe, clock_seed, trace, trace_dies=trace_dies, timing=timing, pod=pod
    )
    try:
        check_faults(faults, plan.pod)
        schedule(faults, plan.pod)
        return Engine(plan, str(model_name), warm_up)
    except BaseException:
        plan.close()
        raise
