"""config.json in both spellings, its defaults, and everything that is refused."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.hf_fixtures import Fixture, fixtures, written_configs
from xdeepserve.errors import CheckpointError
from xdeepserve.model.config import (
    INT8_ATTENTION,
    ModelConfig,
    load_config,
    read_json_object,
)
from xdeepserve.model.config_reader import LIMITS, MAX_EXPERTS
from xdeepserve.model.families import FAMILIES
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.rope import RopeConfig, YarnConfig, rope_tables

TINY = json.loads((PRESET_DIRECTORY / "tiny-random" / "config.json").read_text())
YARN = {"factor": 4.0, "original_max_position_embeddings": 512, "mscale": 0.5, "mscale_all_dim": 0.25}


@pytest.fixture
def load(tmp_path: Path):
    """Load tiny's config with some keys changed, and others left out."""

    def load_changed(*without: str, generation: Any = None, **changes: Any) -> ModelConfig:
        raw = {key: value for key, value in (TINY | changes).items() if key not in without}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_config(tmp_path)

    return load_changed


@pytest.mark.parametrize(
    "fixture", [f for f in fixtures() if f.name in written_configs()], ids=lambda f: f.name
)
def test_what_transformers_writes_means_what_it_has_read(fixture: Fixture, tmp_path: Path) -> None:
    """With every default spelled out, and in its own words for layers, RoPE and experts."""
    found = []
    for raw in (fixture.config, written_configs()[fixture.name]):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        found.append(load_config(tmp_path))
    assert found[0] == found[1]


def test_every_family_of_transformers_has_a_written_config() -> None:
    written = {config["model_type"] for config in written_configs().values()}
    assert written == FAMILIES.keys() - {"kimi_k2"}


def test_tiny(tiny_config: ModelConfig) -> None:
    assert (tiny_config.hidden_size, tiny_config.num_hidden_layers) == (128, 4)
    assert (tiny_config.num_moe_layers, tiny_config.num_layers_with_mtp) == (3, 5)
    assert (tiny_config.experts_per_group, tiny_config.qk_head_dim) == (4, 48)
    assert [tiny_config.is_moe(layer_idx) for layer_idx in range(5)] == [False, True, True, True, True]
    assert tiny_config.eos_token_ids == (1,)


def test_both_spellings_of_rope_mean_the_same(load) -> None:
    old = load(rope_theta=20000, rope_scaling={"type": "yarn", **YARN})
    new = load(
        "rope_theta", "rope_scaling", rope_parameters={"rope_type": "yarn", "rope_theta": 20000.0, **YARN}
    )
    assert old == new
    assert new.rope == RopeConfig(theta=20000.0, yarn=YarnConfig(**YARN))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": None}, RopeConfig(theta=10000.0)),
        ({"rope_scaling": None, "rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeConfig(theta=10000.0)),
        (
            {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": 7.0}},
            RopeConfig(theta=7.0),
        ),
        ({"rope_scaling": {"type": "default", "rope_theta": 7.0}, "rope_theta": 7}, RopeConfig(theta=7.0)),
    ],
)
def test_plain_rope(load, changes: dict[str, Any], expected: RopeConfig) -> None:
    assert load(**changes).rope == expected


def test_original_context_of_yarn(load) -> None:
    scaling = {"type": "yarn", "factor": 4.0}
    assert load(rope_scaling=scaling).rope.yarn.original_max_position_embeddings == 2048
    outside = load(rope_scaling={"type": "yarn", **YARN}, original_max_position_embeddings=256)
    assert outside.rope.yarn.original_max_position_embeddings == 256


def test_null_numbers_of_yarn_are_absent_numbers(load) -> None:
    nulls = dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"))
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert load(rope_scaling=scaling | nulls) == load(rope_scaling=scaling)


def test_defaults_are_deepseek_v3s(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    config = load_config(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers, config.n_routed_experts) == (7168, 61, 256)
    assert (config.q_lora_rank, config.n_group, config.topk_group) == (1536, 8, 4)
    assert (config.first_k_dense_replace, config.num_nextn_predict_layers) == (3, 1)
    assert (config.max_position_embeddings, config.rope) == (4096, RopeConfig(theta=10000.0))
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1,))


def test_null_means_without(load) -> None:
    config = load(q_lora_rank=None, n_shared_experts=None, num_key_value_heads=None)
    assert config.q_lora_rank is None
    assert config.n_shared_experts == 0


def test_kimi_k2_is_the_same_architecture(load) -> None:
    assert load(model_type="kimi_k2", n_group=1, topk_group=1).n_group == 1


def test_defaults_of_glm_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "glm4_moe_lite"}')
    config = load_config(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers, config.n_routed_experts) == (2048, 47, 64)
    assert (config.qk_nope_head_dim, config.v_head_dim, config.rms_norm_eps) == (192, 256, 1e-5)
    assert [config.is_moe(i) for i in range(3)] == [False, True, True]
    assert config.num_nextn_predict_layers == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["dense", "sparse", "sparse", "sparse"], [False, True, True, True, True]),
        (["sparse", "dense", "sparse", "dense"], [True, False, True, False, True]),
        (["dense", "dense", "sparse", "dense"], [False, False, True, False, True]),
        (["dense"] * 4, [False, False, False, False, True]),
        (None, [False, True, True, True, True]),
    ],
)
def test_glm_lists_its_dense_layers_and_mtp_has_experts(load, words: Any, expected: list[bool]) -> None:
    config = load("first_k_dense_replace", model_type="glm4_moe_lite", mlp_layer_types=words)
    assert [config.is_moe(i) for i in range(5)] == expected
    assert config.num_moe_layers == sum(expected[:4])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dense", "sparse"], 'mlp_layer_types must be "dense" or "sparse" for each of 4 layers'),
        (["dense", "sparse", "moe", 1], "mlp_layer_types must be"),
        ("dense", "mlp_layer_types must be"),
    ],
)
def test_lists_of_layers_that_are_refused(load, words: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(model_type="glm4_moe_lite", mlp_layer_types=words, first_k_dense_replace=1)


@pytest.mark.parametrize("family", ["glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"])
def test_words_for_layers_win_over_a_number_of_dense_ones(load, family: str) -> None:
    """transformers writes both, and the number is its default, whatever the words say."""
    words = ["dense", "sparse", "dense", "sparse"]
    config = load(model_type=family, mlp_layer_types=words, first_k_dense_replace=3)
    assert [config.is_moe(i) for i in range(5)] == [False, True, False, True, True]


QWEN: dict[str, Any] = {"model_type": "qwen3_moe", "scoring_func": "softmax", "n_group": 1, "topk_group": 1}


def test_qwen_has_keys_and_values_of_groups_of_heads(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_experts": 8}
    layers = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"} | sizes | layers))
    config = load_config(tmp_path)
    assert (config.attention, config.scoring, config.rope_interleave) == ("gqa", "softmax", False)
    assert (config.num_key_value_heads, config.qk_head_dim, config.v_head_dim) == (3, 16, 16)
    assert (config.key_columns, config.value_columns, config.kv_columns) == (16, 16, 96)
    assert (config.n_routed_experts, config.n_shared_experts, config.norm_topk_prob) == (8, 0, False)
    assert [config.is_moe(i) for i in range(6)] == [False, True, False, False, False, True]
    assert (config.bos_token_id, config.eos_token_ids, config.num_nextn_predict_layers) == (None, (), 0)


def test_no_list_of_dense_layers_is_an_empty_one(load) -> None:
    assert load(**(QWEN | {"mlp_only_layers": None})).num_moe_layers == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads (3) must divide num_attention_heads (8)"),
        ({"head_dim": 15}, "head_dim must be even, found 15"),
        ({"num_experts": 0}, "num_experts must be an integer >= 1, found 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer >= 1, found 0"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers must be a list of layer numbers"),
        ({"scoring_func": "sigmoid"}, 'scoring_func "sigmoid" is not supported (only "softmax" is)'),
        ({"use_sliding_window": True}, "use_sliding_window true is not supported"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({INT8_ATTENTION: [1]}, f"{INT8_ATTENTION} is for MLA, and this is GQA"),
    ],
)
def test_what_is_refused_of_qwen(load, changes: dict[str, Any], message: str) -> None:
    without = ("n_routed_experts", "first_k_dense_replace") if "num_experts" in changes else ()
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(*without, **(QWEN | {"num_key_value_heads": 4} | changes))


GLM: dict[str, Any] = {"model_type": "glm4_moe", "num_key_value_heads": 2, "head_dim": 24}


@pytest.mark.parametrize(
    ("changes", "rotated"),
    [
        ({}, 12),
        ({"partial_rotary_factor": 0.25}, 6),
        ({"partial_rotary_factor": 1.0}, 24),
        ({"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.75}}, 18),
    ],
)
def test_glm_rotates_a_part_of_each_head(load, changes: dict[str, Any], rotated: int) -> None:
    config = load(**(GLM | {"attention_bias": True} | changes))
    assert (config.qk_rope_head_dim, config.qk_nope_head_dim, config.qk_head_dim) == (
        rotated,
        24 - rotated,
        24,
    )
    assert (config.key_columns, config.value_columns, config.kv_columns) == (24, 24, 96)
    assert (config.attention_bias, config.qk_norm, config.scoring) == (True, "none", "sigmoid")


@pytest.mark.parametrize("factor", [0.3, 0.01])
def test_parts_of_a_head_that_are_no_pairs(load, factor: float) -> None:
    with pytest.raises(CheckpointError, match="head_dim x partial_rotary_factor must be even, found"):
        load(**(GLM | {"partial_rotary_factor": factor}))


MINIMAX: dict[str, Any] = {"model_type": "minimax_m2", "num_key_value_heads": 2, "head_dim": 24}


@pytest.mark.parametrize(
    ("changes", "rotated"),
    [
        ({}, 24),
        ({"rotary_dim": 10}, 10),
        ({"rotary_dim": 12, "partial_rotary_factor": 0.5}, 12),
        ({"rotary_dim": 18, "rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.75}}, 18),
    ],
)
def test_minimax_norms_all_heads_together(load, changes: dict[str, Any], rotated: int) -> None:
    config = load(
        *("n_routed_experts", "first_k_dense_replace", "n_group", "topk_group", "moe_intermediate_size"),
        **(MINIMAX | {"num_local_experts": 6, "intermediate_size": 40} | changes),
    )
    assert (config.qk_rope_head_dim, config.qk_head_dim, config.qk_norm) == (rotated, 24, "all")
    assert (config.q_lora_rank, config.n_routed_experts) == (24 * config.num_attention_heads, 6)
    assert (config.moe_intermediate_size, config.num_moe_layers) == (40, config.num_hidden_layers)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_qk_norm", False),
        ("qk_norm_type", "per_head"),
        ("use_routing_bias", False),
        ("shared_intermediate_size", 64),
    ],
)
def test_what_is_refused_of_minimax(load, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"{key} {json.dumps(value)} is not supported (only")):
        load(**(MINIMAX | {key: value}))


SPARSE: dict[str, Any] = {"model_type": "deepseek_v32"}


def test_sparse_attention_has_an_indexer(load, tmp_path: Path) -> None:
    config = load(**SPARSE, index_topk=9, index_n_heads=3, index_head_dim=24)
    assert (config.index_topk, config.index_n_heads, config.index_head_dim) == (9, 3, 24)
    assert (config.kv_columns, config.cache_columns) == (80, 104)
    (tmp_path / "config.json").write_text(json.dumps(SPARSE))
    config = load_config(tmp_path)
    assert (config.index_topk, config.index_n_heads, config.index_head_dim) == (2048, 64, 128)
    assert (config.first_k_dense_replace, config.num_nextn_predict_layers) == (3, 0)
    assert config.max_position_embeddings == 163840


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 0}, "index_topk must be an integer >= 1, found 0"),
        ({"index_head_dim": 8}, "index_head_dim (8) must not be less than qk_rope_head_dim (16)"),
        ({"q_lora_rank": None}, "q_lora_rank must not be null: the indexer reads the query's latent"),
        ({"rope_interleave": False}, "rope_interleave false is not supported (only true is)"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave true is not supported (only false is)"),
        (
            {"model_type": "glm_moe_dsa", "indexer_rope_interleave": False},
            "indexer_rope_interleave false is not supported (only true is)",
        ),
        ({INT8_ATTENTION: [1]}, f"{INT8_ATTENTION} is for MLA, and this is DSA"),
    ],
)
def test_what_is_refused_of_sparse_attention(load, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(**(SPARSE | changes))


GLM_SPARSE: dict[str, Any] = {"model_type": "glm_moe_dsa", "num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, set()),
        ({"index_topk_freq": 3}, {2, 3, 5}),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, {0, 2, 4}),
        ({"index_topk_pattern": "FSSFFS"}, {1, 2, 5}),
        ({"indexer_types": ["full"] * 5 + ["shared"], "index_topk_pattern": "FSSSSS"}, {5}),
    ],
)
def test_layers_that_share_what_was_chosen(load, changes: dict[str, Any], shared: set[int]) -> None:
    if 0 in shared:
        with pytest.raises(CheckpointError, match="the first one full"):
            load(**(GLM_SPARSE | changes))
        return
    config = load(**(GLM_SPARSE | changes))
    assert config.shared_choices == shared
    kinds = [config.attention_of(layer_idx) for layer_idx in range(config.num_layers_with_mtp)]
    assert {i for i, kind in enumerate(kinds) if kind == "dsa-shared"} == shared


@pytest.mark.parametrize("words", ["SFFFFF", "FSX", "FFFFFX", ["full"] * 5, {"0": "full"}, 7])
def test_what_is_refused_of_shared_choices(load, words: Any) -> None:
    with pytest.raises(CheckpointError, match=r'must be "full" or "shared".* for each of 6 layers') as caught:
        load(**(GLM_SPARSE | {"index_topk_pattern": words}))
    assert str(caught.value).endswith(f"found {json.dumps(words)}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "family", [name for name, row in FAMILIES.items() if row.attention in ("mla", "gqa")]
)
def test_an_indexer_without_keys_in_the_cache_is_refused(load, family: str) -> None:
    """V3.2's config under the name of a family whose cache has no place for an indexer's keys."""
    message = "index_topk needs a cache with keys of an indexer: model_type must be deepseek_v32 or "
    with pytest.raises(CheckpointError, match=f'{message}glm_moe_dsa, found "{family}"'):
        load(model_type=family, index_topk=2048)


def test_mtp_layers_by_their_new_name(load) -> None:
    assert load("num_nextn_predict_layers", num_mtp_layers=2).num_nextn_predict_layers == 2


@pytest.mark.parametrize(("value", "expected"), [(7, (7,)), ([7, 9], (7, 9)), (None, ()), ([], ())])
def test_end_tokens(load, value: Any, expected: tuple[int, ...]) -> None:
    assert load(eos_token_id=value).eos_token_ids == expected


def test_generation_config_wins_where_it_speaks(load) -> None:
    assert load(generation={"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    assert load(generation={"eos_token_id": None, "bos_token_id": 3}).eos_token_ids == (1,)
    assert load(generation={"bos_token_id": 3}).bos_token_id == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "llama"},
            'model_type "llama" is not supported '
            "(supported: deepseek_v3, kimi_k2, deepseek_v32, glm_moe_dsa, glm4_moe_lite, qwen3_moe, "
            "glm4_moe, minimax_m2, deepseek_v2, deepseek_v4)",
        ),
        ({"model_type": ["kimi_k2"]}, 'model_type ["kimi_k2"] is not supported'),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported (only "silu" is)'),
        ({"scoring_func": "softmax"}, 'scoring_func "softmax"'),
        ({"topk_method": "greedy"}, 'topk_method "greedy"'),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported (only 8 is)"),
        ({"quantization_config": {"quant_method": "awq"}}, 'quantization_config ("awq") is not supported'),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "weight_block_size must be two positive integers up to 4096, found null",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            'quantization_config.format "pack-quantized" is not supported (only int-quantized is)',
        ),
        ({"hidden_size": 0}, "hidden_size must be an integer >= 1, found 0"),
        ({"hidden_size": -8}, "hidden_size must be an integer >= 1, found -8"),
        ({"hidden_size": "128"}, 'hidden_size must be an integer >= 1, found "128"'),
        ({"hidden_size": True}, "hidden_size must be an integer >= 1, found true"),
        ({"vocab_size": 3.5}, "vocab_size must be an integer >= 1, found 3.5"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number > 0, found 0"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor must be a number, found null"),
        ({"norm_topk_prob": "yes"}, 'norm_topk_prob must be true or false, found "yes"'),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim must be even, found 15"),
        ({"n_group": 3}, "n_routed_experts (16) must be divisible by n_group (3)"),
        ({"n_group": 16}, "each group needs 2 routed experts or more"),
        ({"topk_group": 5}, "topk_group (5) must not exceed n_group (4)"),
        (
            {"num_experts_per_tok": 9},
            "num_experts_per_tok (9) must not exceed topk_group x experts per group (2 x 4)",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            'rope_scaling.rope_type "linear" is not supported',
        ),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 0}},
            "rope_scaling.factor must be a number > 0, found 0",
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "beta_slow": -0.5}},
            "rope_scaling.beta_slow must be a number > 0, found -0.5",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object or null"),
        ({"rope_theta": 1}, "rope_theta must be a number > 1, found 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_refused(load, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", None])
def test_of_an_unknown_family_only_what_no_family_has_is_wrong(load, model_type: str | None) -> None:
    """Grouped heads, another router, biases and a window are all right in some family or other."""
    others = {
        "num_key_value_heads": 2,
        "scoring_func": "softmax",
        "attention_bias": True,
        "sliding_window": 128,
    }
    with pytest.raises(CheckpointError) as caught:
        load(model_type=model_type, hidden_act="gelu", topk_method="greedy", **others)
    first, *more = str(caught.value).split("; ")
    assert "model_type" in first
    assert more == ['hidden_act "gelu" is not supported (only "silu" is)']


@pytest.mark.parametrize("key", sorted(LIMITS))
def test_every_number_has_a_limit(load, key: str) -> None:
    """A value beyond it is refused by its name, before anything counts up to it; so is one beyond floats."""
    limit = LIMITS[key]
    for value in (limit + 1, 10**18, 10**400, 10**4000, -(10**400)):
        if key in YARN | {"beta_fast": 0, "beta_slow": 0, "attention_factor": 0}:
            changes: dict[str, Any] = {"rope_scaling": {"type": "yarn", **YARN, key: value}}
        else:
            changes = {key: value}
        if key in ("num_key_value_heads", "head_dim", "decoder_sparse_step"):
            changes["model_type"] = "qwen3_moe"
        if key == "partial_rotary_factor":
            changes["model_type"] = "glm4_moe"
        if key == "rotary_dim":
            changes |= MINIMAX
        if key.startswith("index_"):
            changes |= SPARSE
    if key == "rotary_dim":
        changes |= MINIMAX
        without = ("num_nextn_predict_layers",) if key == "num_mtp_layers" else ()
        with pytest.raises(CheckpointError) as caught:
            load(*without, **changes)
        message = str(caught.value)
        assert f"{key} must be a" in message
        assert len(message) < 500
        if value > 0:
            assert f"{limit:g}" in message or f"<= {limit}" in message


def test_every_field_that_is_a_number_has_one_of_the_limits() -> None:
    fields = {
        field.name for field in msgspec.structs.fields(ModelConfig) if field.type in (int, float, int | None)
    }
    fields |= {field.name for field in msgspec.structs.fields(YarnConfig) if field.type in (int, float)}
    assert fields - {"bos_token_id"} <= set(LIMITS)


def test_published_models_are_far_from_the_limits() -> None:
    published = [load_config(PRESET_DIRECTORY / "deepseek-r1")]
    kimi = {"n_routed_experts": 384, "num_attention_heads": 64, "vocab_size": 163840, "n_group": 1}
    published.append(msgspec.structs.replace(published[0], **kimi))
    for config in published:
        for key, limit in LIMITS.items():
            value = getattr(config, key, None)
            assert value is None or 7 * value <= limit
        assert 7 * config.num_layers_with_mtp * config.n_routed_experts <= MAX_EXPERTS


def test_layers_and_experts_are_limited_together(load) -> None:
    many = {"num_hidden_layers": 1024, "n_routed_experts": 2**14}
    with pytest.raises(
        CheckpointError, match=r"layers with experts \(1024, MTP's included\) x n_routed_experts"
    ):
        load(**many)
    assert load(**many, first_k_dense_replace=1024, num_nextn_predict_layers=0).num_moe_layers == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": 10**400}, "eos_token_id must be a token id up to 16777215"),
        ({"eos_token_id": [1] * 1025}, "a list of 1024 at most"),
        ({INT8_ATTENTION: [10**400]}, "names layer 1000"),
        ({"hidden_act": "x" * 10**6}, 'hidden_act "xxx'),
        ({"rms_norm_eps": 1e-5, "rope_theta": 10**400}, "rope_theta must be a number between 1 and 1e+15"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 10**12]}},
            "two positive integers up to 4096, found [128, 1000000000000]",
        ),
    ],
)
def test_what_is_too_much_is_refused_briefly(load, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(**changes)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 800


def test_generation_config_has_limits_too(load) -> None:
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json: bos_token_id must be a token id up to"
    ):
        load(generation={"bos_token_id": 2**40})


def test_a_file_that_never_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(" " * 990 + '{"a": 1}  ')
    assert read_json_object(tmp_path / "config.json", 1000) == {"a": 1}
    with pytest.raises(CheckpointError, match="larger than 999 bytes"):
        read_json_object(tmp_path / "config.json", 999)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="larger than 16777216 bytes"):
        load_config(tmp_path)


def test_everything_wrong_is_in_one_error(load) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(model_type="llama", hidden_act="gelu", hidden_size=-1, rope_theta="x")
    for word in ("model_type", "hidden_act", "hidden_size", "rope_theta"):
        assert word in str(caught.value)


def test_dense_models_may_leave_experts_inconsistent(load) -> None:
    config = load(first_k_dense_replace=9, num_nextn_predict_layers=0, n_group=3)
    assert config.num_moe_layers == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "must be an object, found \\[1\\]"),
        (b"\xff\xfe{", "not a text in UTF-8"),
    ],
)
def test_broken_json(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json in this directory"):
        load_config(tmp_path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(YARN | {"type": 0})), inner)
    ),
    max_leaves=4,
)


@given(
    st.dictionaries(
        st.sampled_from([*TINY, "rope_parameters", "partial_rotary_factor"]), JSON_VALUES, max_size=4
    )
)
def test_any_json_is_a_config_or_one_line(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(TINY | changes))
        try:
            config = load_config(Path(directory))
        except CheckpointError as error:
            message = str(error)
        else:
            message = ""
            assert math.isfinite(config.softmax_scale)
            assert all(
                np.isfinite(table).all() for table in rope_tables(config.rope, config.qk_rope_head_dim, 3)
            )
        assert "\n" not in message


def test_a_checkpoints_digest_is_the_same_in_every_process() -> None:
    """Names of layers that stay in float are a set, whose order differs from process to process."""
    code = (
        "import msgspec\n"
        "from xdeepserve.model.presets import resolve_model\n"
        "model = resolve_model('tiny-random')\n"
        "names = frozenset(f'model.layers.{i}.mlp.gate_proj' for i in range(9))\n"
        "model.config = msgspec.structs.replace(model.config, kept_float=names)\n"
        "model.names = list\n"
        "print(model.digest())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
