"""What EPLB brings on the trained model, which computes: how many rows the hottest die has to the mean.

The `tiny` preset, one routed expert and one redundant slot on each of 32 dies, answers held-out prompts of a
single kind, which have their favourite experts (`examples/12_experts.py`). The first half of the prompts is
what the TE-shell learns from; rows are counted, where they arrive, during the second half.
"""

from __future__ import annotations

import numpy as np

from xdeepserve.bench.report import Row
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.errors import XDeepServeError
from xdeepserve.evals.samples import examined
from xdeepserve.llm import LLM

KIND, NUM_DIES, NUM_PROMPTS, MAX_TOKENS = "arithmetic", 32, 24, 24
INTERVALS = {"primaries": 0.0, "eplb": 0.008}  # virtual seconds; about half as long as the first half takes


def rows(num_dies: int = NUM_DIES) -> list[Row]:
    """The hottest die over the mean, on average over the layers, without replicas and with them."""
    found = {name: hottest_over_mean(seconds, num_dies) for name, seconds in INTERVALS.items()}
    made = [
        Row(f"engine/experts/tiny/{name}/hottest_die_over_mean", value, "x", "measured")
        for name, value in found.items()
    ]
    gain = found["primaries"] / found["eplb"]
    return [*made, Row("engine/experts/gain/hottest_die_over_mean", gain, "x", "measured")]


def hottest_over_mean(interval: float, num_dies: int) -> float:
    """Rows of the hottest die over the mean, averaged over layers, in the second half of the prompts.

    Replicas are balanced every `interval` virtual seconds; 0: never.
    """
    prompts = [examined(KIND, i).prompt for i in range(NUM_PROMPTS)]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    settings = [f"dies={num_dies}", "experts.redundant_slots=1", f"experts.balance_interval={interval}"]
    with LLM("tiny", "colocated", overrides=[*settings, "max_model_len=768"]) as llm:
        half = NUM_PROMPTS // 2
        llm.generate(prompts[:half], params)
        before = _rows_by_die(llm)
        llm.generate(prompts[half:], params)
        came = _rows_by_die(llm) - before
        if interval and not llm.engine.stats().num_reconfigurations:
            raise XDeepServeError("no replica of an expert has changed: the interval is too long")
    return float(np.mean(came.max(axis=0) / came.mean(axis=0)))


def _rows_by_die(llm: LLM) -> np.ndarray:
    """[dies, layers]: token copies that have come for the experts of each die."""
    (plan,) = llm.engine.plan.tes
    return np.array([mem.redundant.num_rows for mem in plan.memories if mem.redundant is not None])
