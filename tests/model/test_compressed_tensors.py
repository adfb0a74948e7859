"""A checkpoint that compressed-tensors wrote (tools/check_compressed_tensors.py) means the same here."""

from pathlib import Path

import numpy as np
import pytest

from xdeepserve import LLM
from xdeepserve.cli import main
from xdeepserve.model.checkpoint import open_checkpoint
from xdeepserve.model.reference import Reference

DIRECTORY = Path(__file__).parent.parent / "fixtures" / "compressed_tensors"
EXPECTED = np.load(DIRECTORY / "expected.npz")
IDS = EXPECTED["ids"].tolist()


def test_dequantised_weights_give_the_same_logits() -> None:
    logits = Reference(open_checkpoint(DIRECTORY), "fp32").logits(IDS)
    assert np.abs(logits - EXPECTED["logits"]).max() < 1e-4
    assert logits.argmax(axis=-1).tolist() == EXPECTED["logits"].argmax(axis=-1).tolist()


def test_its_integers_are_computed_with_as_they_are() -> None:
    checkpoint = open_checkpoint(DIRECTORY)
    stored = checkpoint.int8("model.layers.0.self_attn.o_proj")
    assert stored is not None
    found = Reference(checkpoint, "int8").weights.layers[0].wo
    assert found.w.dtype == np.int8
    assert np.array_equal(found.w, stored[0])
    assert np.array_equal(found.scale, stored[1][:, 0])


def test_what_no_recipe_has_in_int8_is_not_kept_in_float() -> None:
    """kv_b_proj is in the file's list of layers to ignore; the recipe's own products of it are in BF16."""
    assert open_checkpoint(DIRECTORY).config.kept_float == frozenset()


@pytest.mark.parametrize("runner", ["lockstep=false", "lockstep=true"])
def test_the_engine_serves_it(runner: str) -> None:
    checkpoint = open_checkpoint(DIRECTORY)
    with LLM(checkpoint, "colocated", "int8", overrides=["dies=2", "max_model_len=64", runner]) as llm:
        assert np.array_equal(llm.logits(IDS), Reference(checkpoint, "int8").logits(IDS))


def test_it_is_not_quantised_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(DIRECTORY), str(tmp_path / "out"), "--json"]) == 2
    error = capsys.readouterr().err
    assert "already quantised to INT8" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
