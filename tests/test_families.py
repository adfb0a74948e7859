"""Model families besides DeepSeek's own: each runs as that does, to the bit, wherever it runs."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.model.hf_fixtures import BY_NAME, V4
from xdeepserve import LLM, SamplingParams
from xdeepserve.cli import main
from xdeepserve.llm import digest
from xdeepserve.model import canonical
from xdeepserve.model.checkpoint import SINGLE_FILE, open_checkpoint
from xdeepserve.model.export import write_checkpoint
from xdeepserve.model.reference import Reference
from xdeepserve.model.weights import RECIPES, Recipe
from xdeepserve.prices.profile import Demand, PodProfile
from xdeepserve.step import sparse
from xdeepserve.step.frame import Model
from xdeepserve.step.stage import Counts

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
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
    "v2-yarn-mscales": [
        ("monolithic", []),
        ("colocated", ["dies=4", "tp=2"]),
        ("pd", ["prefill.tp=4", "transfer=layer"]),
        ("moe-attention", []),
        ("transformerless", []),
    ],
    "v2-best-groups": [
        ("monolithic", ["lockstep=true"]),
        ("colocated", ["dies=3", "lockstep=true"]),
        ("colocated", ["dies=2", "tp=2"]),
        ("transformerless", []),
    ],
    "v4-words-mtp": [
        ("monolithic", []),
        ("colocated", ["dies=3"]),
        ("colocated", ["dies=2", "pipeline.microbatches=2"]),
        ("colocated", ["dies=4", "exchange=push", "execution.overlap=true"]),
        ("pd", ["transfer=layer", "cache.block_size=32"]),
        (
            "pd",
            ["cache.num_blocks=12", "max_model_len=128", "cache.preemption=swap", "cache.num_host_blocks=8"],
        ),
        ("moe-attention", []),
        ("moe-attention", ["dataflow=true"]),
        ("transformerless", []),
        ("eaas", []),
    ],
    "v4-odd-sizes": [("colocated", ["dies=2"]), ("pd", ["transfer=layer"]), ("moe-attention", [])],
    "v4-published-ratios": [("monolithic", []), ("pd", [])],
    "minimax-odd-heads": [
        ("colocated", ["tp=2", "dies=2", "exchange=push"]),
        ("moe-attention", ["dataflow=true"]),
    ],
    "sparse-yarn-groups-mtp": [
        ("monolithic", ["mtp=1"]),
        ("monolithic", ["cache.block_size=32", "mtp=2"]),
        ("colocated", ["tp=4", "dies=4", "mtp=2"]),
        ("colocated", ["dies=3", "pipeline.microbatches=2"]),
        ("colocated", ["dies=4", "o_proj_tp=2"]),
        ("pd", ["prefill.tp=2", "prefill.tp_mode=sp-tp-sp", "mtp=1", "transfer=layer"]),
        (
            "pd",
            ["cache.num_blocks=12", "max_model_len=128", "cache.preemption=swap", "cache.num_host_blocks=8"],
        ),
        ("moe-attention", ["mtp=1"]),
        ("transformerless", []),
    ],
    "sparse-listed-layers-plain": [
        ("monolithic", []),
        ("colocated", ["tp=2", "dies=2", "exchange=push"]),
        ("moe-attention", ["dataflow=true"]),
    ],
    "glm-sparse-shared-mtp": [
        ("monolithic", ["mtp=1"]),
        ("monolithic", ["mtp=2", "lockstep=true", "threads=2"]),
        ("colocated", ["dies=3", "mtp=1", "lockstep=true"]),
        ("moe-attention", ["mtp=2", "lockstep=true"]),
        ("colocated", ["tp=2", "dies=4", "mtp=2"]),
        ("colocated", ["dies=3", "pipeline.microbatches=2"]),
        ("pd", ["prefill.tp=2", "prefill.tp_mode=sp-tp-sp", "mtp=1", "transfer=layer"]),
        ("moe-attention", ["mtp=1"]),
        ("transformerless", []),
    ],
    "glm-sparse-every-third": [
        ("colocated", ["dies=2", "o_proj_tp=2"]),
        ("moe-attention", ["dataflow=true"]),
    ],
    "glm-norms-groups": [("colocated", ["dies=2"]), ("moe-attention", ["dataflow=true"])],
    "qwen-every-layer-of-experts": [
        ("monolithic", []),
        ("colocated", ["dies=3", "lockstep=true", "exchange=push"]),  # not in fp32: a minute to compile
        ("monolithic", ["lockstep=true"]),
        ("transformerless", ["lockstep=true"]),
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


# A family for each kind of attention, latent, sparse and grouped; the others in fp32 are of the campaign.
# Of all of them tests/test_llm.py has one die in fp32.
IN_FP32 = {
    "glm-lite-listed-layers-mtp",
    "minimax-rotary-dim",
    "sparse-yarn-groups-mtp",
    "qwen-every-layer-of-experts",
}


def in_recipe(name: str, recipe: Recipe) -> object:
    """Return a case of a family and a recipe. In fp32 kernels of whole steps are compiled anew."""
    when = pytest.mark.long if name in IN_FP32 else pytest.mark.campaign
    return pytest.param(name, recipe, marks=when if recipe == "fp32" else ())


@pytest.mark.always
@pytest.mark.thin(9)
@pytest.mark.parametrize(
    ("name", "recipe"), [in_recipe(name, recipe) for name in WAYS for recipe in ("int8", "fp32")]
)
def test_every_way_gives_the_bits_of_the_reference(name: str, recipe: Recipe, tmp_path: Path) -> None:
    """In chunks, among others, and a second time, when prefixes are cached. `fp32` takes every second way."""
    checkpoint = open_checkpoint((BY_NAME | V4)[name].checkpoint_dir(tmp_path))
    digests: dict[str, str] = {}
    for deployment, overrides in WAYS[name][:: 2 if recipe == "fp32" else 1]:
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


def without_scores(tensors: dict[str, np.ndarray], indexer: str) -> None:
    """All positions tie, and the lowest win everywhere."""
    tensors[f"{indexer}.weights_proj.weight"][:] = 0


def without_positions(tensors: dict[str, np.ndarray], indexer: str) -> None:
    """What RoPE would turn of keys is 0: in the first layer equal tokens tie, wherever they stand."""
    tensors[f"{indexer}.k_norm.weight"][:12] = tensors[f"{indexer}.k_norm.bias"][:12] = 0


def highest_positions(scores: np.ndarray, top_k: int) -> np.ndarray:
    """As who breaks ties the other way would choose."""
    return np.sort(len(scores) - 1 - np.argsort(-scores[::-1], kind="stable")[:top_k])


TIES = [
    ("monolithic", ["scheduler.max_num_batched_tokens=16"]),
    ("colocated", ["tp=2", "dies=2", "cache.block_size=32"]),
    ("pd", ["prefill.tp=2", "prefill.tp_mode=sp-tp-sp"]),
    ("moe-attention", ["lockstep=true", "scheduler.max_num_batched_tokens=48"]),
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("construct", "layers", "sizes"),
    [(without_scores, (2, 3), {}), (without_positions, (0,), {"index_head_dim": 24})],
)
def test_ties_at_the_boundary_of_the_choice(
    construct: Callable[[dict[str, np.ndarray], str], None],
    layers: tuple[int, ...],
    sizes: dict[str, int],
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever chose the highest of equal ones would be found out. Later, prefixes are cached."""
    fixture = BY_NAME["sparse-listed-layers-plain"]
    directory = dataclasses.replace(fixture, config=fixture.config | sizes).checkpoint_dir(tmp_path)
    tensors = load_file(directory / SINGLE_FILE)
    for layer_idx in layers:
        construct(tensors, f"model.layers.{layer_idx}.self_attn.indexer")
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    checkpoint = open_checkpoint(directory)
    reference = Reference(checkpoint, recipe, 256)
    expected = [reference.logits(prompt) for prompt in PROMPTS]
    digests = set()
    for deployment, overrides in TIES:
        with LLM(checkpoint, deployment, recipe, overrides=overrides) as llm:
            for prompt, logits in zip(PROMPTS, expected, strict=True):
                assert np.array_equal(llm.logits(prompt), logits)
            digests |= {digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) for _ in range(2)}
    assert len(digests) == 1
    monkeypatch.setattr(canonical, "top_positions", highest_positions)
    assert not np.array_equal(reference.logits(PROMPTS[2]), expected[2])


def qwen(tmp_path: Path) -> Path:
    return BY_NAME["qwen-every-layer-of-experts"].checkpoint_dir(tmp_path)


def test_a_block_has_the_keys_and_values_of_all_heads(tmp_path: Path) -> None:
    """Per position and layer: 2 heads of 20 columns, each of which lies in tiles of 16."""
    checkpoint = open_checkpoint(qwen(tmp_path))
    for recipe, nbytes in (("fp32", 2 * 2 * 32 * 4), ("int8", 2 * (32 + 4 + 32 * 4))):
        with LLM(checkpoint, "monolithic", recipe) as llm:
            memory = llm.engine.je.tes[0].executors[0].mem
            assert memory.kv.block_nbytes == 3 * llm.engine.plan.deployment.cache.block_size * nbytes


NO_KEYS = "needs a cache with keys of an indexer: model_type must be deepseek_v32 or glm_moe_dsa"


@pytest.mark.parametrize(
    ("name", "changes", "settings", "message"),
    [
        (
            "qwen-every-layer-of-experts",
            {},
            ["--set", "mtp=1"],
            "mtp=1 needs an MTP layer, and the checkpoint has none",
        ),
        (
            "qwen-every-layer-of-experts",
            {"model_type": "qwen2_moe"},
            [],
            'model_type "qwen2_moe" is not supported (supported: deepseek_v3, kimi_k2, deepseek_v32, '
            "glm_moe_dsa, glm4_moe_lite, qwen3_moe, glm4_moe, minimax_m2, deepseek_v2, deepseek_v4)",
        ),
        (
            "sparse-yarn-groups-mtp",
            {"model_type": "deepseek_v3"},
            [],
            f'index_topk {NO_KEYS}, found "deepseek_v3"',
        ),
        (
            "sparse-yarn-groups-mtp",
            {"model_type": "deepseek_v3", "index_topk": None},
            [],
            f"model.layers.0.self_attn.indexer.k_norm.bias {NO_KEYS}",
        ),
        (
            "groups-yarn-mtp",
            {"model_type": "deepseek_v32"},
            [],
            "20 of 227 tensors are missing: model.layers.0.self_attn.indexer.wq_b.weight",
        ),
        ("sparse-yarn-groups-mtp", {"index_topk": 0}, [], "index_topk must be an integer >= 1, found 0"),
        (
            "glm-sparse-shared-mtp",
            {"indexer_types": None, "index_topk_pattern": "FSXFS"},
            [],
            'index_topk_pattern must be "full" or "shared" (F or S) for each of 5 layers, the first one '
            'full, found "FSXFS"',
        ),
    ],
)
def test_what_is_not_for_it_is_refused_in_a_line(
    name: str,
    changes: dict[str, object],
    settings: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = BY_NAME[name].checkpoint_dir(tmp_path)
    (directory / "config.json").write_text(json.dumps(BY_NAME[name].config | changes))
    assert main(["generate", "--prompt-ids", "1", *settings, "--model", str(directory)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.strip().count("\n") == 0


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("qwen-every-layer-of-experts", ("QKVProlog", "GQA", "OProj")),
        ("glm-sparse-shared-mtp", ("MLAProlog", "DSA", "OProj")),
    ],
)
def test_a_plan_is_fitted_to_the_kind_of_attention(
    name: str, stages: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = BY_NAME[name].checkpoint_dir(tmp_path)
    profile = PodProfile(open_checkpoint(directory), Demand(60, 20))
    assert profile.names == stages
    own = [profile.stages(1)[stage](8) for stage in stages]
    assert min(own) > 0
    assert profile.attention(1, 8) == sum(own)
    model = ["plan", "--model", str(directory), "--slo-ms", "50", "--prompt", "60", "--output", "20"]
    assert main([*model, "--dies", "8"]) == 0
    assert main([*model, "--hardware", "h20,l40s", "--extrapolate"]) == 0
    assert "T_iter" in capsys.readouterr().out


def test_layers_without_an_indexer_are_averaged_in(tmp_path: Path) -> None:
    """Of 5 layers 3 share a choice: what is fitted lies between all layers with an indexer and none."""
    checkpoint = open_checkpoint(BY_NAME["glm-sparse-shared-mtp"].checkpoint_dir(tmp_path))
    profile = PodProfile(checkpoint, Demand(60, 20))
    all_full = copy.copy(checkpoint)
    all_full.config = msgspec.structs.replace(checkpoint.config, shared_choices=frozenset())
    assert profile.stages(1)["DSA"](8) < PodProfile(all_full, Demand(60, 20)).stages(1)["DSA"](8)
    assert profile.kv_nbytes() < PodProfile(all_full, Demand(60, 20)).kv_nbytes()


def test_the_keys_of_the_indexer_are_in_each_block(tmp_path: Path) -> None:
    """Per position and layer: a latent of 40 columns, a RoPE key of 12, an indexer's key of 12."""
    checkpoint = open_checkpoint(BY_NAME["sparse-listed-layers-plain"].checkpoint_dir(tmp_path))
    for recipe, nbytes in (("fp32", (48 + 16 + 12) * 4), ("int8", 48 + 4 + (16 + 12) * 4)):
        with LLM(checkpoint, "monolithic", recipe) as llm:
            memory = llm.engine.je.tes[0].executors[0].mem
            assert memory.kv.block_nbytes == 4 * llm.engine.plan.deployment.cache.block_size * nbytes


def test_layers_that_share_a_choice_have_no_keys_of_an_indexer(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(BY_NAME["glm-sparse-shared-mtp"].checkpoint_dir(tmp_path))
    with LLM(checkpoint, "colocated", "fp32", overrides=["dies=2", "mtp=1"]) as llm:
        parts = llm.engine.je.tes[0].executors[0].mem.kv.block_parts
        assert [name for name, _ in parts if "index_k" in name] == [f"kv/{i}/index_k" for i in (0, 3, 5)]


def test_a_run_that_only_takes_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--deployment", "colocated", "--set", "dies=2,4", "--context", "100"]
    assert main(["sweep", "--model", str(qwen(tmp_path)), *sizes, "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert {"QKVProlog", "GQA", "OProj"} <= row["shares"].keys()


def test_attention_costs_no_more_than_what_is_chosen(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(BY_NAME["sparse-yarn-groups-mtp"].checkpoint_dir(tmp_path))
    config, layer = checkpoint.config, Reference(checkpoint, "int8").weights.layers[0]
    model, top_k = Model(config, "int8", config.num_attention_heads), config.index_topk
    few, many = Counts(1, top_k, top_k), Counts(1, 8 * top_k, 8 * top_k)
    assert sparse.attend.work(model, layer, few) == sparse.attend.work(model, layer, many)
    of_few, of_many = (sparse.choose.work(model, layer, each).attention for each in (few, many))
    assert of_many == 8 * of_few


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
