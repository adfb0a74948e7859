"""The reference against Hugging Face transformers, which we did not write (float32 on CPU)."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.model.hf_fixtures import V4, Fixture, fixtures
from xdeepserve.model.checkpoint import open_checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.reference import Reference

HF_TOLERANCE = 2e-3
ALL = [*fixtures(), *V4.values()]


@pytest.mark.parametrize("fixture", ALL, ids=lambda f: f.name)
def test_logits_agree_with_transformers(fixture: Fixture, tmp_path: Path) -> None:
    reference = Reference(open_checkpoint(fixture.checkpoint_dir(tmp_path)), "fp32", 256)
    for prompt, logits in zip(fixture.prompts, fixture.logits, strict=True):
        assert np.abs(reference.logits(prompt)[-1] - logits).max() < HF_TOLERANCE


@pytest.mark.parametrize("fixture", [f for f in ALL if f.mtp_logits], ids=lambda f: f.name)
def test_mtp_agrees_with_transformers(fixture: Fixture, tmp_path: Path) -> None:
    reference = Reference(open_checkpoint(fixture.checkpoint_dir(tmp_path)), "fp32", 256)
    for prompt, tokens, logits in zip(fixture.prompts, fixture.tokens, fixture.mtp_logits, strict=True):
        assert np.abs(reference.mtp_logits([*prompt, tokens[0]])[-1] - logits).max() < HF_TOLERANCE


def test_int8_stays_close_to_fp32() -> None:
    checkpoint = resolve_model("tiny-random")
    prompt = list(range(10, 60))
    fp32, int8 = (Reference(checkpoint, recipe).logits(prompt) for recipe in ("fp32", "int8"))
    assert not np.array_equal(fp32, int8)
    assert np.corrcoef(fp32.ravel(), int8.ravel())[0, 1] > 0.99


def test_a_prefix_does_not_depend_on_what_follows() -> None:
    reference = Reference(resolve_model("tiny-random"), "int8")
    ids = [5, 200, 31, 7, 99]
    assert np.array_equal(reference.logits(ids)[:3], reference.logits(ids[:3]))


@pytest.mark.parametrize(
    "fixture", [f for f in ALL if f.config.get("index_topk", 512) < 32], ids=lambda f: f.name
)
def test_fixtures_of_sparse_attention_need_its_choice(fixture: Fixture, tmp_path: Path) -> None:
    """Whoever attended to all positions would be found out by the longest prompt."""
    directory, prompt = fixture.checkpoint_dir(tmp_path), fixture.prompts[-1]
    assert len(prompt) > 4 * fixture.config["index_topk"]
    (directory / "config.json").write_text(json.dumps(fixture.config | {"index_topk": len(prompt)}))
    reference = Reference(open_checkpoint(directory), "fp32", 256)
    assert np.abs(reference.logits(prompt)[-1] - fixture.logits[-1]).max() > 100 * HF_TOLERANCE
