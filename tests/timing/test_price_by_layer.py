"""A stage's price depends on its layer: attention in INT8, and projections kept in floating point."""

from collections import Counter
from collections.abc import Collection

import msgspec
import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model

PROMPTS = [[7] * 900, [5] * 9, [6] * 600, [8] * 3]
RUNNERS = {"tasks": {"lockstep": False}, "lockstep": {"lockstep": True}, "time only": {"timing_only": True}}
EVERY = (0, 1, 2, 3)


def model(int8_attention: Collection[int]) -> Checkpoint:
    found = resolve_model("tiny-random")
    found.config = msgspec.structs.replace(found.config, int8_attention=frozenset(int8_attention))
    return found


def stage_ns(deployment: str, runner: str, stage: str, int8_attention: Collection[int]) -> list[int]:
    """Times of a stage in each layer of the model, in ns, over all dies and steps."""
    checkpoint = model(int8_attention)
    spent: Counter[int] = Counter()
    with LLM(checkpoint, deployment, "int8", trace=True, progress=False, **RUNNERS[runner]) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        for span in llm.engine.plan.pod.trace.spans:
            if span.name == stage:
                spent[(span.args or {})["layer"]] += span.end_ns - span.start_ns
    return [spent[layer] for layer in range(checkpoint.config.num_hidden_layers)]


@pytest.mark.parametrize("deployment", ["colocated", "transformerless"])
def test_int8_attention_makes_only_its_layers_faster(deployment: str) -> None:
    found = {
        runner: [stage_ns(deployment, runner, "MLA", layers) for layers in ((), (0,), (2,), EVERY)]
        for runner in RUNNERS
    }
    none, first, third, every = found["tasks"]
    assert len(set(none)) == len(set(every)) == 1, "layers are otherwise alike"
    assert none[0] > every[0]
    assert first == [every[0], *none[1:]]
    assert third == [*none[:2], every[2], none[3]]
    assert found["lockstep"] == found["time only"] == found["tasks"]
