"""`xdeepserve bench superpod --steps`: wall time and memory of a decode step, from 48 to 768 dies.

The model is the 61-layer, 256-expert `tiny-r1` in INT8, on 3 domains of attention dies with two requests on
each, one in each microbatch. Every token goes through the HBM of the dies. The largest pod is measured once
more with replicas of experts (EPLB). Requests that have the same prompt must have the same logits as on one
die alone, and two of them must equal the NumPy reference.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from xdeepserve.bench.report import Row
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.errors import XDeepServeError
from xdeepserve.llm import LLM, RequestOutput
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.reference import Reference

MODEL = "tiny-r1"
# Attention dies in each of 3 domains, dies of routed experts, dies of the shared expert.
PODS = ((10, 16, 2), (20, 32, 4), (40, 64, 8), (80, 128, 16), (160, 256, 32))
NUM_DOMAINS, NUM_PER_DIE, NUM_PROMPTS, CHECKED_BY_REFERENCE = 3, 2, 24, 2
SHORT, LONG = 2, 10  # tokens of the two runs whose difference is decode steps alone
THREADS = 2
INTERVAL_S = 1000  # of EPLB, in virtual time: none ends in a run unless the run is late by so much

Quantities: TypeAlias = list[tuple[str, float, str]]  # name, value, unit


def all_rows(pods: Sequence[tuple[int, int, int]] = PODS) -> Iterator[Row]:
    """Yield rows of each pod, and of the last one with EPLB. Raises XDeepServeError if a bit is wrong."""
    expected = expected_logits()
    for pod in pods:
        plain = measure(pod, expected)
        yield from _rows(pod, "", plain)
    balanced = measure(pod, expected, is_balanced=True)
    over = _step_of(balanced) / _step_of(plain)
    yield from _rows(pod, "eplb/", [*balanced, ("over_without", over, "x")])


def _rows(pod: tuple[int, int, int], prefix: str, values: Quantities) -> list[Row]:
    num_dies = NUM_DOMAINS * pod[0] + pod[1] + pod[2]
    return [
        Row(f"steps/dies={num_dies}/{prefix}{name}", value, unit, "measured") for name, value, unit in values
    ]


def _step_of(values: Quantities) -> float:
    return next(value for name, value, _ in values if name == "step")


def prompts(count: int) -> list[list[int]]:
    """Make `count` prompts: NUM_PROMPTS different ones, repeated."""
    return [[5 + i % NUM_PROMPTS, 9] for i in range(count)]


def expected_logits() -> list[np.ndarray]:
    """Compute the logits [LONG, vocab] of each prompt on one die; the first ones are checked against the
    NumPy reference."""
    with LLM(MODEL, "monolithic", "int8", overrides=["max_model_len=32"]) as llm:
        outputs = llm.generate(prompts(NUM_PROMPTS), _params(LONG), keep_logits=True)
    reference = Reference(resolve_model(MODEL), "int8")
    for output in outputs[:CHECKED_BY_REFERENCE]:
        ids, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        logits = reference.logits([*ids, *tokens[:-1]])[len(ids) - 1 :]
        if not np.array_equal(logits, _logits(output)):
            raise XDeepServeError(f"{MODEL}: one die and the NumPy reference differ for prompt {ids}")
    return [_logits(output) for output in outputs]


def measure(
    pod: tuple[int, int, int], expected: Sequence[np.ndarray], is_balanced: bool = False
) -> Quantities:
    """Measure the wall time and memory of a pod on this computer.

    A pod that `is_balanced` has a redundant slot on each die with experts, and counts its load. It has
    replicas of the hottest experts before the measured steps; `reconfiguration` is the time of bringing them.
    """
    dies, routed, shared = pod
    overrides = [
        f"attention.domains={NUM_DOMAINS}",
        f"attention.dies={dies}",
        f"experts.routed_dies={routed}",
        f"experts.shared_dies={shared}",
        "lockstep=true",
        f"threads={THREADS}",
        "max_model_len=32",
        "cache.num_blocks=4",
        f"scheduler.max_num_seqs={NUM_PER_DIE}",
        "scheduler.max_num_batched_tokens=8",
    ]
    if is_balanced:
        overrides += [
            "experts.redundant_slots=1",
            f"experts.balance_interval={INTERVAL_S}",
            "experts.balance_slices=1",
        ]
    start = _now()
    with LLM(MODEL, "moe-attention", "int8", overrides=overrides) as llm:
        loaded = time.perf_counter() - start
        batch = prompts(NUM_DOMAINS * dies * NUM_PER_DIE)
        llm.generate(batch, _params(1))  # addresses are looked up, pages touched
        late = _reconfigure(llm, batch, expected) if is_balanced else 0.0
        seconds = []
        for count in (SHORT, LONG):
            start = _now()
            outputs = llm.generate(batch, _params(count), keep_logits=count == SHORT)
            seconds.append(time.perf_counter() - start)
            if count == SHORT:
                _check(outputs, expected)
            else:
                _check_tokens(outputs, expected)
        virtual = [output.metrics.tpot_ns for output in outputs if output.metrics is not None]
    step = (seconds[1] - seconds[0]) / (LONG - SHORT)
    return [
        ("load", loaded, "s"),
        ("step", step, "s"),
        *([("reconfiguration", late - seconds[1], "s")] if is_balanced else []),
        ("peak_memory", peak_nbytes() / 1e9, "GB"),
        ("virtual_step", max(ns for ns in virtual if ns is not None) / 1e6, "ms"),
    ]


def _now() -> float:
    """Collect garbage and return the wall time. Otherwise Python would look for cycles among hundreds of
    dies, which takes as long as a step."""
    gc.collect()
    return time.perf_counter()


def _reconfigure(llm: LLM, batch: Sequence[list[int]], expected: Sequence[np.ndarray]) -> float:
    """Measure the wall time of a run of LONG tokens during which EPLB makes its first replicas."""
    start = _now()
    arrivals = [round(1e9 * INTERVAL_S)] * len(batch)
    _check_tokens(llm.generate(batch, _params(LONG), arrivals_ns=arrivals), expected)
    seconds = time.perf_counter() - start
    if llm.engine.stats().num_reconfigurations != 1:
        raise XDeepServeError(f"no expert has moved in {LONG} steps")
    return seconds


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _logits(output: RequestOutput) -> np.ndarray:
    logits = output.outputs[0].logits
    assert logits is not None
    return logits


def _check(outputs: Sequence[RequestOutput], expected: Sequence[np.ndarray]) -> None:
    for i, output in enumerate(outputs):
        found = _logits(output)
        if not np.array_equal(found, expected[i % NUM_PROMPTS][: len(found)]):
            raise XDeepServeError(f"request {i}: the pod's logits are not those of one die")


def _check_tokens(outputs: Sequence[RequestOutput], expected: Sequence[np.ndarray]) -> None:
    for i, output in enumerate(outputs):
        if output.outputs[0].token_ids != expected[i % NUM_PROMPTS].argmax(1).tolist():
            raise XDeepServeError(f"request {i}: the pod's tokens are not those of one die")


def peak_nbytes() -> int:
    """Return the peak memory of this process in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
