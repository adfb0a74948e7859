"""Model families besides DeepSeek's own: each runs as that does, to the bit, wherever it runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.model.hf_fixtures import Fixture, fixtures
from xdeepserve import LLM, SamplingParams
from xdeepserve.cli import main
from xdeepserve.llm import digest
from xdeepserve.model.checkpoint import open_checkpoint
from xdeepserve.model.export import write_checkpoint
from xdeepserve.model.reference import Reference
from xdeepserve.model.weights import RECIPES, Recipe

BY_NAME: dict[str, Fixture] = {f.name: f for f in fixtures()}
PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
PROMPTS = [[7], list(range(3, 60)), [5, 6, 7] * 30, list(range(3, 50))]
WAYS: dict[str, list[tuple[str, list[str]]]] = {
    "glm-lite-listed-layers-mtp": [
        ("monolithic", ["mtp=1"]),
        ("colocated", ["dies=3", "mtp=2", "lockstep=true"]),
        ("colocated", ["dies=2", "tp=2", "pipeline.microbatches=2"]),
        ("pd", ["prefill.tp=2", "prefill.tp_mode=sp-tp-sp", "mtp=1"]),
        ("moe-attention", ["mtp=1"]),
        ("transformerless", []),
    ],
    "glm-biases-mtp": [
        ("monolithic", ["mtp=1"]),
        ("colocated", ["tp=4", "dies=4", "mtp=2"]),
        ("pd", ["prefill.tp=2", "prefill.tp_mode=sp-tp-sp", "mtp=1", "transfer=layer"]),
        ("moe-attention", ["mtp=1"]),
        ("transformerless", []),
    ],
    "minimax-rotary-dim": [
        ("monolithic", []),
        ("colocated", ["tp=4", "dies=4", "pipeline.microbatches=2"]),
        ("colocated", ["dies=4", "o_proj_tp=2"]),
        ("pd", ["prefill.tp=4", "prefill.tp_mode=sp-tp-sp", "transfer=layer"]),
        ("moe-attention", []),
        ("transformerless", []),
    ],
    "minimax-odd-heads": [
        ("colocated", ["tp=2", "dies=2", "exchange=push"]),
        ("moe-attention", ["dataflow=true"]),
    ],
    "glm-norms-groups": [("colocated", ["dies=2"]), ("moe-attention", ["dataflow=true"])],
    "qwen-every-layer-of-experts": [
        ("monolithic", []),
        ("colocated", ["dies=3", "experts.redundant_slots=1"]),
        ("colocated", ["tp=4", "dies=4", "pipeline.microbatches=2"]),  # more ranks than heads of the cache
        ("colocated", ["dies=4", "o_proj_tp=2"]),
        ("pd", ["prefill.tp=2", "prefill.tp_mode=sp-tp-sp", "transfer=layer"]),
        (
            "pd",
            ["cache.num_blocks=12", "max_model_len=128", "cache.preemption=swap", "cache.num_host_blocks=8"],
        ),
        ("moe-attention", []),
        ("transformerless", ["transfer_over=send-receive", "prefill.hardware=cm384"]),
    ],
    "qwen-sparse-steps-odd-heads": [("colocated", ["tp=2", "dies=2"]), ("moe-attention", ["dataflow=true"])],
    "qwen-one-key-head": [("pd", []), ("colocated", ["dies=4", "exchange=push", "execution.overlap=true"])],
    "glm-lite-defaults": [("colocated", ["dies=4", "exchange=push"]), ("moe-attention", ["dataflow=true"])],
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", WAYS)
def test_every_way_gives_the_bits_of_the_reference(name: str, recipe: Recipe, tmp_path: Path) -> None:
    """In chunks, among others, and a second time, when prefixes are cached."""
    checkpoint = open_checkpoint(BY_NAME[name].checkpoint_dir(tmp_path))
    digests: dict[str, str] = {}
    for deployment, overrides in WAYS[name]:
        overrides = [*overrides, "scheduler.max_num_batched_tokens=64"]
        with LLM(checkpoint, deployment, recipe, overrides=overrides) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, keep_logits=True)
            digests[f"{deployment} {overrides}"] = digest(outputs)
            assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == digest(outputs)
            llm.engine.check_integrity()
    assert len(set(digests.values())) == 1, digests
    reference = Reference(checkpoint, recipe, 256)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        choice = output.outputs[0]
        expected = reference.logits([*prompt, *choice.token_ids[:-1]])[len(prompt) - 1 :]
        assert choice.logits is not None
        assert np.array_equal(choice.logits, expected)
        assert choice.token_ids == expected.argmax(axis=-1).tolist()


def qwen(tmp_path: Path) -> Path:
    return BY_NAME["qwen-every-layer-of-experts"].checkpoint_dir(tmp_path)


def test_a_block_has_the_keys_and_values_of_all_heads(tmp_path: Path) -> None:
    """Per position and layer: 2 heads of 20 columns, each of which lies in tiles of 16."""
    checkpoint = open_checkpoint(qwen(tmp_path))
    for recipe, nbytes in (("fp32", 2 * 2 * 32 * 4), ("int8", 2 * (32 + 4 + 32 * 4))):
        with LLM(checkpoint, "monolithic", recipe) as llm:
            memory = llm.engine.je.tes[0].executors[0].mem
            assert memory.block_nbytes == 3 * llm.engine.plan.deployment.cache.block_size * nbytes


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["generate", "--prompt-ids", "1", "--set", "lockstep=true"],
            "lockstep has kernels for MLA, not for the model's GQA",
        ),
        (
            ["generate", "--prompt-ids", "1", "--set", "mtp=1"],
            "mtp=1 needs an MTP layer, and the checkpoint has none",
        ),
        (["plan", "--slo-ms", "50"], "plan has times of MLA's stages, not of the model's GQA"),
        (["quantize"], "quantize knows layers of MLA, not of GQA; --precision int8 rounds as it loads"),
    ],
)
def test_what_is_not_for_it_is_refused_in_a_line(
    command: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(qwen(tmp_path))
    given = [directory, str(tmp_path / "out")] if command == ["quantize"] else ["--model", directory]
    assert main([*command, *given]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()


def test_a_run_that_only_takes_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--deployment", "colocated", "--set", "dies=2,4", "--context", "100"]
    assert main(["sweep", "--model", str(qwen(tmp_path)), *sizes, "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert {"QKVProlog", "GQA", "OProj"} <= row["shares"].keys()


@pytest.mark.parametrize("method", ["rtn", "cloudmatrix"])
def test_glm_is_quantised_and_exported(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = BY_NAME["glm-lite-listed-layers-mtp"].checkpoint_dir(tmp_path)
    out, again = tmp_path / "int8", tmp_path / "again"
    assert main(["quantize", str(directory), str(out), "--method", method, "--samples", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == method
    write_checkpoint(open_checkpoint(directory), again, "f32")
    command = ["generate", "--prompt-ids", "5,6,7", "--max-tokens", "5", "--ignore-eos", "--json"]
    digests: dict[Path, set[str]] = {}
    for model in (directory, out, again):
        for deployment in ("monolithic", "moe-attention"):
            assert main([*command, "--model", str(model), "--deployment", deployment]) == 0
            found = json.loads(capsys.readouterr().out)["digest"]
            digests.setdefault(model, set()).add(found)
    assert all(len(each) == 1 for each in digests.values())
    assert digests[again] == digests[directory]
    assert (digests[out] == digests[directory]) == (method == "rtn")
