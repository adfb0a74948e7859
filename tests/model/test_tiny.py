"""The trained preset as a checkpoint: ordinary, small, and what Hugging Face transformers says of it."""

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xdeepserve.model.checkpoint import open_checkpoint
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.reference import Reference
from xdeepserve.model.tokenizer import load_tokenizer
from xdeepserve.quant.method import METHODS

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


def test_the_loss_curve_lies_beside_the_weights() -> None:
    report = json.loads((DIRECTORY / "training.json").read_text())
    main = [point["main"] for point in report["curve"] if "main" in point]
    assert main[-1] < main[0] / 5
    assert report["curve"][-1]["phase"] == 2
    assert report["curve"][-1]["step"] == report["recipe"]["mtp2_steps"]


def evaluation() -> dict[str, dict[str, Any]]:
    """What `xdeepserve eval --methods all --json` said, by column."""
    results = json.loads((DIRECTORY / "evaluation.json").read_text())["results"]
    return {result["title"]: result for result in results}


@pytest.mark.parametrize("title", ["int8", *(f"int8 {name}" for name in METHODS)])
def test_int8_costs_next_to_nothing(title: str) -> None:
    exact, rounded = evaluation()["fp32"], evaluation()[title]
    assert rounded["perplexity"] <= 1.01 * exact["perplexity"]
    for before, after in zip(exact["domains"], rounded["domains"], strict=True):
        if before["score"] is not None:
            assert after["score"] >= before["score"] - 0.0101
    by_domain = {domain["domain"]: domain for domain in rounded["domains"]}
    assert by_domain["arithmetic"]["score"] >= 0.9
    assert by_domain["tools"]["valid_json"] >= 0.95
    assert by_domain["stories"]["acceptance"] >= 0.7
    assert by_domain["tools"]["acceptance"] >= 0.7


def test_smoothquant_and_gptq_are_no_worse_than_rounding_to_the_nearest() -> None:
    plain, best = (evaluation()[f"int8 {name}"]["errors"] for name in ("rtn", "smoothquant+gptq"))
    assert all(best[cause] <= plain[cause] for cause in ("weights", "activations", "both", "original"))


def test_two_mtp_layers_are_better_than_one_used_twice() -> None:
    for result in evaluation().values():
        everywhere = result["tokens_per_step"]
        assert everywhere["one layer"] < everywhere["one layer, used twice"] < everywhere["two layers"] <= 3


@pytest.mark.parametrize("extra", [{}, {"parameters": None}, {"description": None}])
def test_a_tool_may_leave_out_its_parameters(extra: dict[str, None]) -> None:
    tokenizer = load_tokenizer(DIRECTORY)
    assert tokenizer is not None
    tools = [{"type": "function", "function": {"name": "get_time", **extra}}]
    text = tokenizer.render_chat([{"role": "user", "content": "What time is it?"}], tools=tools)
    assert "### get_time\n\n{}<" in text


def test_the_template_is_the_one_that_training_writes() -> None:
    source = Path(__file__).parents[2] / "tools" / "train" / "tokenizer.py"
    (value,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHAT_TEMPLATE"
    )
    assert (DIRECTORY / "chat_template.jinja").read_text(encoding="utf-8") == value
