"""Spellings of config.json that are published: what does no harm is taken, what is not computed is named."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from xdeepserve.errors import CheckpointError
from xdeepserve.model.config import ModelConfig, load_config
from xdeepserve.model.quant_config import QuantConfig

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 256,
}
MLA = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
V3: dict[str, Any] = {"model_type": "deepseek_v3", **SIZES, **MLA}
V2: dict[str, Any] = {**V3, "model_type": "deepseek_v2", "n_group": 1, "first_k_dense_replace": 1}
V32: dict[str, Any] = {**V3, "model_type": "deepseek_v32", "q_lora_rank": 16}
GROUPED = {
    key: value for key, value in SIZES.items() if key not in ("n_routed_experts", "n_group", "topk_group")
}
QWEN: dict[str, Any] = {"model_type": "qwen3_moe", **GROUPED, "num_experts": 8, "head_dim": 8}
MINIMAX: dict[str, Any] = {"model_type": "minimax_m2", **GROUPED, "num_local_experts": 8, "head_dim": 8}
del MINIMAX["moe_intermediate_size"]
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [64, 128]}
YARN = {"factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.5}


@pytest.fixture
def load(tmp_path: Path):
    """Load a config that is changed in some keys."""

    def load_changed(raw: dict[str, Any], **changes: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        return load_config(tmp_path)

    return load_changed


def refusal(load, raw: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(raw, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- how linear layers are stored ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [{}]
    + [{"fmt": fmt} for fmt in ("e4m3", "E4M3", "e4m3fn", "float8_e4m3fn", "torch.float8_e4m3fn", None)]
    + [{"quant_method": "FP8"}, {"activation_scheme": "dynamic"}, {"activation_scheme": None}]
    + [{"weight_block_size": [64.0, 128.0]}, {"modules_to_not_convert": None}, {"scale_fmt": "ue8m0"}],
)
def test_spellings_of_fp8(load, spelling: dict[str, Any]) -> None:
    config = load(MINIMAX, quantization_config=FP8 | spelling)
    assert config.quantization == QuantConfig(kind="fp8", block=(64, 128))


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ({"fmt": "e5m2"}, 'quantization_config.fmt "e5m2" is not supported (only e4m3 is)'),
        ({"fmt": "float8_e4m3fnuz"}, 'quantization_config.fmt "float8_e4m3fnuz" is not supported'),
        ({"fmt": ["e4m3"]}, "quantization_config.fmt"),
        (
            {"weight_block_size": None},
            "weight_block_size must be two positive integers up to 4096, found null",
        ),
        ({"activation_scheme": "static"}, 'activation_scheme "static" is not supported (only dynamic is)'),
        ({"quant_method": "fbgemm_fp8"}, 'quantization_config ("fbgemm_fp8") is not supported'),
        ({"quant_method": None}, "quantization_config (null) is not supported"),
    ],
)
def test_other_storage_is_named(load, spelling: dict[str, Any], message: str) -> None:
    assert message in refusal(load, MINIMAX, quantization_config=FP8 | spelling)


@pytest.mark.parametrize(
    "nothing", [None, {}, {"quant_method": None}, {"quant_method": "none", "config_groups": {}}]
)
def test_an_empty_quantization_is_none(load, nothing: Any) -> None:
    assert load(V3, quantization_config=nothing) == load(V3)


# ---- RoPE ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rope",
    [{"rope_scaling": rope} for rope in (None, {}, {"type": "none"}, {"type": "None", "factor": 1.0})]
    + [{"rope_scaling": {"rope_type": "default", "type": None}}]
    + [{"rope_scaling": {"type": "linear", "factor": 1}}, {"rope_scaling": {"factor": 1.0}}]
    + [{"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000}}}]
    + [{"rope_scaling": None, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": None}}],
)
@pytest.mark.parametrize("raw", [V3, QWEN, MINIMAX])
def test_spellings_of_plain_rope(load, raw: dict[str, Any], rope: dict[str, Any]) -> None:
    expected = load(raw, rope_theta=10000.0)
    assert expected.rope.yarn is None
    assert load(raw, **({"rope_theta": 10000.0} | rope)) == expected


@pytest.mark.parametrize(
    "rope",
    [{"rope_scaling": YARN | kind} for kind in ({"rope_type": "yarn"}, {"type": "YaRN"})]
    + [{"rope_scaling": YARN | {"type": "yarn", "rope_type": None, "attn_factor": 1, "finetuned": True}}]
    + [{"rope_scaling": YARN | {"type": "yarn", "rope_type": "deepseek_yarn"}}]
    + [{"rope_parameters": {"full_attention": YARN | {"rope_type": "yarn"}}, "rope_scaling": {}}]
    + [{"rope_scaling": YARN | {"type": "yarn"}, "original_max_position_embeddings": None}],
)
def test_spellings_of_yarn(load, rope: dict[str, Any]) -> None:
    expected = load(V3, rope_scaling={"type": "yarn", **YARN})
    assert expected.rope.yarn is not None
    assert load(V3, **rope) == expected


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_scaling": YARN}, "rope_scaling.rope_type is missing beside a factor (use yarn, or default)"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            'rope_scaling.rope_type "linear" is not supported',
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2}},
            'rope_scaling.rope_type "llama3" is not supported',
        ),
        ({"rope_scaling": YARN | {"type": "yarn", "rope_type": "default"}}, 'type "yarn" contradicts'),
        ({"rope_scaling": YARN | {"type": "yarn", "attn_factor": 2}}, "rope_scaling.attn_factor 2 is not"),
        ({"rope_parameters": {"a": {"rope_theta": 5}, "b": {}}}, 'rope_parameters."a" is not supported'),
        ({"rope_ratio": 4}, "rope_ratio 4 is not supported (only 1 is)"),
    ],
)
def test_other_ropes_are_named(load, rope: dict[str, Any], message: str) -> None:
    assert message in refusal(load, V3, **rope)


# ---- numbers, nulls and names --------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [V3, V2, V32, QWEN, MINIMAX], ids=lambda raw: raw["model_type"])
def test_whole_numbers_may_be_written_with_a_fraction(load, raw: dict[str, Any]) -> None:
    floats = {key: float(value) for key, value in raw.items() if type(value) is int}
    ends = {"eos_token_id": [3.0, 4.0], "bos_token_id": 2.0}
    found = load(raw | floats | ends, quantization_config=None)
    assert found == load(raw, eos_token_id=[3, 4], bos_token_id=2)
    assert type(found.hidden_size) is int


@pytest.mark.parametrize(
    ("raw", "nulls", "expected"),
    [
        (V3, {"num_nextn_predict_layers": None}, {"num_nextn_predict_layers": 0}),
        (V3, {"num_mtp_layers": None, "num_nextn_predict_layers": 2}, {"num_nextn_predict_layers": 2}),
        (V3, {"n_group": None, "topk_group": None}, {"n_group": 1, "topk_group": 1}),
        (QWEN, {"num_key_value_heads": None}, {"num_key_value_heads": 4}),
        (QWEN, {"num_local_experts": None, "mlp_only_layers": None}, {"n_routed_experts": 8}),
        (QWEN, {"scoring_func": None, "topk_method": None}, {"scoring": "softmax"}),
        (MINIMAX, {"rotary_dim": None, "partial_rotary_factor": None}, {"qk_rope_head_dim": 8}),
    ],
)
def test_what_null_means(load, raw: dict[str, Any], nulls: dict[str, Any], expected: dict[str, Any]) -> None:
    found = load(raw, **nulls)
    assert {key: getattr(found, key) for key in expected} == expected


THETA = {"rope_theta": 50000, "rope_type": "default"}


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (V3, {"rope_theta": 10000, "rope_parameters": THETA}, "rope_parameters.rope_theta 50000 contradicts"),
        (QWEN, {"rope_theta": 1e6, "rope_scaling": THETA}, "rope_scaling.rope_theta 50000 contradicts"),
        (
            V3,
            {"rope_scaling": YARN | {"type": "yarn"}, "rope_parameters": {"rope_type": "default"}},
            'rope_scaling.type "yarn" contradicts its rope_type default',
        ),
        (
            V3,
            {"rope_scaling": YARN | {"type": "yarn"}, "rope_parameters": YARN | {"factor": 4.0}},
            "rope_parameters.factor 4.0 contradicts rope_scaling.factor 8.0",
        ),
        (MINIMAX, {"rotary_dim": 4, "partial_rotary_factor": 1.0}, "rotary_dim has 4 of 8 columns rotated"),
        (
            MINIMAX,
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}},
            "partial_rotary_factor has 4 of 8 columns rotated, which contradicts "
            "rope_parameters.partial_rotary_factor (8)",
        ),
        (QWEN, {"rotary_dim": 4}, "rotary_dim 4 is not supported (only 8 is)"),
        (V3, {"qk_head_dim": 99}, "qk_head_dim 99 is not supported (only 12 is)"),
        (V3, {"num_mtp_layers": 1, "num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2 contradicts"),
        (MINIMAX, {"moe_intermediate_size": 24}, "moe_intermediate_size 24 contradicts intermediate_size 48"),
        (V3, {"quantization_config": FP8, "compression_config": {"a": 1}}, "compression_config {"),
        (V3, {"compression_config": {"quant_method": "x"}}, 'compression_config ("x") is not supported'),
        (V3, {"quantization": {"group_size": 64, "bits": 4}}, "quantization {"),
        (
            V3,
            {"rope_scaling": YARN | {"type": "yarn", "factor": 0.5}},
            "rope_scaling.factor must be 1 or more",
        ),
        (
            V3,
            {"rope_scaling": YARN | {"type": "yarn", "beta_fast": 1, "beta_slow": 32}},
            "rope_scaling.beta_slow (32) must not exceed beta_fast (1)",
        ),
    ],
)
def test_what_contradicts_is_named(load, raw: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    assert message in refusal(load, raw, **changes)


@pytest.mark.parametrize(
    ("raw", "names", "expected"),
    [
        (V3, {"rope_theta": 50000.0, "rope_parameters": THETA}, {"rope_theta": 50000}),
        (MINIMAX, {"rope_parameters": THETA}, {"rope_theta": 50000}),
        (MINIMAX, {"rotary_dim": 4, "partial_rotary_factor": 0.5}, {"rotary_dim": 4}),
        (V3, {"qk_head_dim": 12.0, "num_mtp_layers": 1}, {"num_nextn_predict_layers": 1}),
        (
            V3,
            {"compression_config": {}, "quantization": None, "quantization_config": FP8},
            {"quantization_config": FP8},
        ),
        (V3, {"compression_config": FP8}, {"quantization_config": FP8}),
        (
            V3,
            {"rope_scaling": YARN | {"type": "YaRN"}, "rope_parameters": {"type": "yarn", "rope_theta": 5e4}},
            {"rope_scaling": YARN | {"type": "yarn"}, "rope_theta": 50000},
        ),
    ],
)
def test_names_that_agree_are_taken(
    load, raw: dict[str, Any], names: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert load(raw, **names) == load(raw, **expected)


def test_two_names_of_one_number_must_agree(load) -> None:
    assert load(QWEN, num_local_experts=8) == load(QWEN)
    found = refusal(load, QWEN, num_local_experts=16)
    assert "num_local_experts 16 contradicts num_experts 8" in found
    assert load(V3, num_experts=8.0) == load(V3)


HARMLESS: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "dtype": "float32",
    "auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"},
    "architectures": None,
    "transformers_version": "4.33.1",
    "attention_dropout": 0.0,
    "router_aux_loss_coef": 0.001,
    "seq_aux": True,
    "ep_size": 1,
    "pretraining_tp": 1,
    "use_cache": False,
    "hidden_act": "swish",
    "id2label": {"0": "LABEL_0"},
    "pad_token_id": None,
    "mlp_bias": False,
    "qkv_bias": False,
    "text_config": {},
    "dual_chunk_attention_config": None,
    "sparse_attention_config": {},
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "pruned_heads": {},
    "somebodys_own_key": [1, {"a": None}],
}


@pytest.mark.parametrize("raw", [V3, V2, V32, QWEN, MINIMAX], ids=lambda raw: raw["model_type"])
def test_what_does_no_harm_is_taken(load, raw: dict[str, Any]) -> None:
    assert load(raw, **HARMLESS) == load(raw)
    word = "indexed_attention" if raw is V32 else "full_attention"
    assert load(raw, layer_types=[word] * 3, attn_type_list=[1, 1, 1], architectures=[]) == load(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dual_chunk_attention_config", {"chunk_size": 1024}),
        ("sparse_attention_config", {"sparse_block_size": 64}),
        ("attention_chunk_size", 128),
        ("sliding_window", 128),
        ("qkv_bias", True),
        ("mlp_bias", True),
        ("qk_layernorm", True),
        ("attn_logit_softcapping", 30.0),
        ("final_logit_softcapping", 30.0),
        ("swiglu_limit", 7.0),
        ("shared_expert_intermediate_size", 64),
        ("vision_config", {"depth": 2}),
        ("logit_scale", 0.5),
        ("residual_multiplier", 0.22),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("attn_type_list", [1, 0, 1]),
        ("moe_layer_freq", [0, 1, 1]),
        ("architectures", ["DeepseekV3ForSequenceClassification"]),
    ],
)
def test_what_is_not_computed_is_named(load, key: str, value: Any) -> None:
    found = refusal(load, V3, **{key: value})
    assert f"{key} " in found
    assert "is not supported (only" in found


def test_a_window_that_is_switched_off_is_none(load) -> None:
    assert load(QWEN, sliding_window=4096) == load(QWEN)
    assert load(V3, sliding_window=4096, use_sliding_window=False) == load(V3)
    assert "use_sliding_window true" in refusal(load, QWEN, use_sliding_window=True, sliding_window=4096)


def test_a_model_nested_in_one_that_sees_images_is_named(load) -> None:
    nested = {"model_type": "kimi_k25", "text_config": V3 | {"model_type": "kimi_k2"}, "vision_config": {}}
    found = refusal(load, nested)
    assert 'model_type "kimi_k25" is not supported' in found
    assert "its text_config is a kimi_k2 model, which is supported as a checkpoint of its own" in found
    assert "text_config {" not in found
    assert "text_config is a" not in refusal(load, nested | {"text_config": {"model_type": ["a"]}})
    other = {"model_type": "deepseek_vl_v2", "language_config": V2}
    assert "its language_config is a deepseek_v2 model" in refusal(load, other)


# ---- DeepSeek-V2 ---------------------------------------------------------------------------------------


def test_deepseek_v2_has_one_group_of_experts(load) -> None:
    config = load(V2, topk_method="greedy", scoring_func="softmax", rope_scaling={"type": "yarn", **YARN})
    assert (config.scoring, config.n_group, config.topk_group) == ("softmax", 1, 1)
    assert (config.norm_topk_prob, config.num_nextn_predict_layers) == (False, 0)
    assert load(V2, topk_method="greedy", n_group=4, topk_group=2).n_group == 1  # groups are not looked at
    assert load(V2, n_group=4, topk_group=2).n_group == 1  # transformers' default is greedy
    assert msgspec.structs.replace(load(V2, n_group=None), rope=config.rope) == config


def test_groups_of_deepseek_v2_are_as_good_as_their_best_expert(load) -> None:
    config = load(V2, topk_method="group_limited_greedy", n_group=8, topk_group=3)
    assert (config.n_group, config.topk_group, config.best_of_group) == (8, 3, 1)
    alone = load(V2, topk_method="group_limited_greedy", n_routed_experts=8, n_group=8, topk_group=8)
    assert alone.experts_per_group == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "noaux_tc"}, 'topk_method "noaux_tc" is not supported (only "greedy" is)'),
        (
            {"topk_method": "group_limited_greedy", "n_group": None, "topk_group": 3},
            "n_group must be an integer >= 1, found null",
        ),
        (
            {"topk_method": "group_limited_greedy", "topk_group": None},
            "topk_group must be an integer >= 1, found null",
        ),
        ({"scoring_func": "sigmoid"}, 'scoring_func "sigmoid" is not supported (only "softmax" is)'),
        ({"norm_topk_prob": True}, "norm_topk_prob true is not supported (only false is)"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok must be an integer"),
    ],
)
def test_what_is_refused_of_deepseek_v2(load, changes: dict[str, Any], message: str) -> None:
    assert re.search(re.escape(message), refusal(load, V2, **changes))
