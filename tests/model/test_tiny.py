"""The trained preset as a checkpoint: ordinary, small, and what Hugging Face transformers says of it."""

from pathlib import Path

import numpy as np
import pytest

from xdeepserve.model.checkpoint import open_checkpoint
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.reference import Reference

DIRECTORY = PRESET_DIRECTORY / "tiny"
SAID = np.load(Path(__file__).parent.parent / "fixtures" / "hf" / "tiny.npz")
DOMAINS = sorted({name.split(".")[0] for name in SAID.files})


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(open_checkpoint(DIRECTORY), "fp32")


@pytest.mark.parametrize("domain", DOMAINS)
def test_transformers_agrees(reference: Reference, domain: str) -> None:
    prompt, tokens = SAID[f"{domain}.prompt"].tolist(), SAID[f"{domain}.tokens"].tolist()
    logits = reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    assert np.abs(logits[0] - SAID[f"{domain}.logits"]).max() < 2e-3
    assert logits.argmax(axis=-1).tolist() == tokens


def test_the_files_are_ordinary_and_small() -> None:
    files = {path.name: path.stat().st_size for path in DIRECTORY.iterdir()}
    assert set(files) >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert files["model.safetensors"] <= 10_000_000
    config = open_checkpoint(DIRECTORY).config
    assert (config.n_routed_experts, config.num_nextn_predict_layers, config.eos_token_ids) == (32, 2, (1,))
