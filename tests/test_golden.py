"""Digests that must not change silently: a change names its reason in its commit."""

import json
from pathlib import Path

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.llm import digest
from xdeepserve.model.presets import TinyCheckpoint

GOLDEN = json.loads((Path(__file__).parent / "golden" / "digests.json").read_text())
PROMPTS = [[1], [5, 17, 230, 44], list(range(100, 170))]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_digest(precision: str, temperature: float, tiny: TinyCheckpoint) -> None:
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=1, ignore_eos=True)
    with LLM(tiny, "colocated", precision, overrides=["dies=4"]) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(PROMPTS, params, keep_logits=True)
    assert digest(outputs) == GOLDEN[f"{precision}, temperature {temperature}"]
