"""Quantising layers of every kind of attention: near the original, and the same bits wherever it runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.model.hf_fixtures import fixtures
from xdeepserve import LLM, SamplingParams
from xdeepserve.cli import main
from xdeepserve.errors import CheckpointError, InputError
from xdeepserve.llm import digest
from xdeepserve.model.checkpoint import Checkpoint, open_checkpoint
from xdeepserve.model.reference import Reference
from xdeepserve.model.seeded import hash_words
from xdeepserve.quant.forward import Walk, rms_norm
from xdeepserve.quant.job import quantize_checkpoint
from xdeepserve.quant.method import METHODS, Method
from xdeepserve.quant.outliers import WithOutliers

BY_NAME = {f.name: f for f in fixtures()}
KINDS = {  # with how they may be served
    "qwen-sparse-steps-odd-heads": ["tp=2", "dies=2"],
    "glm-biases-mtp": ["dies=2", "mtp=1"],
    "minimax-rotary-dim": ["dies=4", "o_proj_tp=2"],
    "sparse-yarn-groups-mtp": ["dies=3", "pipeline.microbatches=2"],
    "sparse-listed-layers-plain": ["tp=2", "dies=2"],
    "glm-sparse-shared-mtp": ["dies=2", "mtp=1"],
}


def texts(checkpoint: Checkpoint, i: int) -> list[int]:
    return (hash_words(i, "text", 90) % checkpoint.config.vocab_size).tolist()


def opened(name: str, tmp_path: Path) -> Checkpoint:
    return open_checkpoint(BY_NAME[name].checkpoint_dir(tmp_path))


def quantised(source: Checkpoint, out: Path, method: Method) -> Checkpoint:
    quantize_checkpoint(source, out, method, lambda i: texts(source, i), num_sequences=6)
    return open_checkpoint(out)


def error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.square(found - exact).mean() / np.square(exact).mean())


@pytest.mark.parametrize("name", KINDS)
def test_calibration_walks_through_the_model_itself(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    sequences = [texts(source, 0), texts(source, 1)[:50]]
    walk, reference = Walk(source, sequences), Reference(source, "fp32", 128)
    for layer_idx in range(source.config.num_hidden_layers):
        walk.run(layer_idx)
    h = rms_norm(walk.h, source.tensor("model.norm.weight"), source.config.rms_norm_eps)
    expected = np.concatenate([reference.hidden(sequence) for sequence in sequences])
    # Sums in another order: where an indexer's scores all but tie, it may choose another position.
    assert error(h, expected) < 1e-6


@pytest.mark.thin(5)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", KINDS)
def test_every_method_keeps_every_family(name: str, method: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    found = quantised(source, tmp_path / "out", METHODS[method])
    ids = texts(source, 99)
    exact = Reference(source, "fp32", 128).logits(ids)
    plain = error(Reference(source, "int8", 128).logits(ids), exact)
    assert error(Reference(found, "int8", 128).logits(ids), exact) < max(0.02, 3 * plain)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", KINDS)
def test_round_to_nearest_is_what_the_recipe_does(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    found, ids = quantised(source, tmp_path / "out", METHODS["rtn"]), texts(source, 99)
    assert np.array_equal(
        Reference(found, "int8", 128).logits(ids), Reference(source, "int8", 128).logits(ids)
    )


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_is_served_with_the_same_bits(name: str, tmp_path: Path) -> None:
    found = quantised(opened(name, tmp_path), tmp_path / "out", METHODS["cloudmatrix"])
    params, prompts = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True), [texts(found, 5), [3]]
    digests = set()
    for deployment, overrides in (("monolithic", []), ("colocated", KINDS[name])):
        with LLM(found, deployment, "int8", overrides=overrides) as llm:
            outputs = llm.generate(prompts, params, keep_logits=True)
            digests.add(digest(outputs))
    assert len(digests) == 1
    answer = outputs[0].outputs[0]
    expected = Reference(found, "int8", 128).logits([*prompts[0], *answer.token_ids[:-1]])
    assert answer.logits is not None
    assert np.array_equal(answer.logits, expected[len(prompts[0]) - 1 :])


# ---- outliers -----------------------------------------------------------------------------------


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", KINDS)
def test_outliers_change_no_bit_of_the_float_model(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    spoiled, ids = WithOutliers(source, 64), texts(source, 99)
    exact = Reference(source, "fp32", 128).logits(ids)
    assert np.array_equal(Reference(spoiled, "fp32", 128).logits(ids), exact)
    assert not np.array_equal(
        Reference(spoiled, "int8", 128).logits(ids), Reference(source, "int8", 128).logits(ids)
    )


@pytest.mark.thin(5)
@pytest.mark.parametrize("name", KINDS)
def test_smoothing_wins_back_what_outliers_lose(name: str, tmp_path: Path) -> None:
    source = WithOutliers(opened(name, tmp_path), 1024)
    ids, errors = texts(source, 99), {}
    exact = Reference(source, "fp32", 128).logits(ids)
    for method in ("rtn", "smoothquant", "cloudmatrix"):
        found = quantised(source, tmp_path / method, METHODS[method])
        errors[method] = error(Reference(found, "int8", 128).logits(ids), exact)
    assert errors["smoothquant"] < errors["rtn"] / 3, errors
    assert errors["cloudmatrix"] < errors["rtn"] / 3, errors


def test_bad_outliers(tmp_path: Path) -> None:
    source = opened("glm-biases-mtp", tmp_path)
    for factor in (0, 1, 3, -4, 1 << 17):
        with pytest.raises(InputError, match=f"outliers of {factor}: a power of two from 2 to 65536"):
            WithOutliers(source, factor)
    found = quantised(source, tmp_path / "out", METHODS["rtn"])
    with pytest.raises(CheckpointError, match="it is quantised; put outliers into the original"):
        WithOutliers(found, 4)


@pytest.mark.campaign  # quantises the trained model twice
def test_on_held_out_text_outliers_cost_and_the_best_method_wins_them_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The table of docs/quantisation.md, on fewer samples."""
    command = ["eval", "--model", "tiny", "--outliers", "128", "--methods", "rtn,cloudmatrix"]
    assert main([*command, "--samples", "8", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    found = {one["title"]: one["perplexity"] for one in results}
    assert found["int8 rtn"] > 1.05 * found["fp32"], found
    assert found["int8 cloudmatrix"] < 1.01 * found["fp32"], found
