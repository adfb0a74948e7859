"""DeepSeek-V4's arithmetic, configurations and files; test_reference has its logits beside transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.model.bits import normal
from tests.model.hf_fixtures import V4
from xdeepserve.errors import CheckpointError
from xdeepserve.model import canonical as c
from xdeepserve.model.checkpoint import SINGLE_FILE, open_checkpoint
from xdeepserve.model.config import load_config
from xdeepserve.model.reference import Reference
from xdeepserve.model.v4 import canonical as v4

WORDS = V4["v4-words-mtp"]
PROMPT = WORDS.prompts[1]


def logits_of(directory: Path) -> np.ndarray:
    return Reference(open_checkpoint(directory), "fp32", 64).logits(PROMPT)


# ---- arithmetic ----------------------------------------------------------------------------------------


def test_logarithms_and_scores_are_within_their_last_bits() -> None:
    x = np.concatenate([np.linspace(1e-3, 3, 4001), 2.0 ** np.arange(-60, 60)]).astype(np.float32)
    exact = np.log(x.astype(np.float64))
    assert np.abs(v4.log(x) - exact).max() < 2e-7 * np.abs(exact).max()
    assert (np.abs(v4.log(x) - exact) <= 2e-7 * np.maximum(np.abs(exact), 2.0**-23)).all()
    logits = np.linspace(-80, 80, 16001, dtype=np.float32)
    scores = np.sqrt(np.logaddexp(0, logits.astype(np.float64)))
    assert (np.abs(v4.sqrt_softplus(logits) - scores) < 4e-7 * scores).all()


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_a_connection_mixes_streams_by_a_doubly_stochastic_matrix(iterations: int) -> None:
    n = 4
    pre, post, mix = v4.connection(
        normal(1, 9, (2 + n) * n), normal(2, (2 + n) * n), normal(3, 3), n, iterations, 1e-6
    )
    for weights, most in ((pre, 1.001), (post, 2.0)):
        assert 0 < weights.min() <= weights.max() < most
    assert np.abs(mix.sum(axis=1) - 1).max() < 1e-5  # columns are normalised last
    rows = np.abs(mix.sum(axis=2) - 1).max()
    assert rows < 1e-3 if iterations == 20 else rows > 1e-3


def test_streams_are_spread_and_merged_as_equations_say() -> None:
    streams, output, post, mix = normal(1, 5, 3, 8), normal(2, 5, 8), normal(3, 5, 3), normal(4, 5, 3, 3)
    expected = post[..., None] * output[:, None] + np.einsum("tjk,tjh->tkh", mix, streams)
    assert np.abs(v4.spread(streams, output, post, mix) - expected).max() < 1e-5
    assert np.abs(v4.merge(streams, post) - np.einsum("tk,tkh->th", post, streams)).max() < 1e-5


@pytest.mark.parametrize("overlaps", [False, True])
def test_entries_are_softmaxes_over_their_windows(overlaps: bool) -> None:
    m, depth = 3, 4
    width = 2 * depth if overlaps else depth
    values, gates, ape = normal(1, 11, width), normal(2, 11, width), normal(3, m, width)
    found = v4.window_entries(values, gates, ape, overlaps)
    assert found.shape == (3, depth)  # what is behind the last whole window has none
    gates = gates + np.tile(ape, (4, 1))[:11]
    x, g = values[3:6, -depth:], gates[3:6, -depth:]
    if overlaps:
        x, g = np.concatenate([values[:3, :depth], x]), np.concatenate([gates[:3, :depth], g])
    p = np.exp(g.astype(np.float64))
    assert np.abs(found[1] - (p * x).sum(0) / p.sum(0)).max() < 1e-6


@pytest.mark.parametrize("is_int8", [False, True])
def test_a_sink_takes_its_share_and_gives_nothing(is_int8: bool) -> None:
    q, q_pe, latent, k_pe, sinks = (normal(i, *shape) for i, shape in enumerate(SHAPES))
    kept, scale = c.quantize_rows(latent) if is_int8 else (latent, None)
    still, turned = v4.sink_attention(q, q_pe, kept, scale, k_pe, 0.2, sinks)
    scores = (q.astype(np.float64) @ latent.T + q_pe @ k_pe.T) * 0.2
    p = np.exp(np.concatenate([scores, sinks[:, None]], axis=1))
    p = (p / p.sum(axis=1, keepdims=True))[:, :-1]
    for found, values in ((still, latent), (turned, k_pe)):
        assert np.abs(found - p @ values).max() < (0.05 if is_int8 else 1e-6)


SHAPES = ((4, 24), (4, 8), (40, 24), (40, 8), (4,))


def test_gates_are_bounded_above_and_the_rest_on_both_sides() -> None:
    gate_up = np.array([[-9.0, 9.0, 1.0, -9.0, 9.0, 1.0]], np.float32)
    expected = c.silu(np.array([-9.0, 2.0, 1.0], np.float32)) * np.array([-2.0, 2.0, 1.0], np.float32)
    assert np.array_equal(v4.swiglu(gate_up, 2.0)[0], expected)


def test_an_expert_that_a_token_names_twice_counts_twice_and_is_sent_once() -> None:
    scores = np.array([[0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]], np.float32)
    by_token = np.array([[2, 1, 2], [3, 1, 0]], np.float32)
    topk_idx, weights = v4.experts_by_token(by_token, np.array([0, 1]), scores, True, 2.0)
    assert topk_idx.tolist() == [[2, 1, 0], [3, 1, 0]]
    expected = np.array([[0.4, 0.3, 0.0], [0.1, 0.3, 0.4]]) * 2.0 / np.array([[0.7], [0.8]])
    assert np.abs(weights - expected).max() < 1e-6


def test_a_prefix_does_not_depend_on_what_follows(tmp_path: Path) -> None:
    """An entry is seen once its window is whole, by its last token first."""
    for recipe in ("fp32", "int8"):
        reference = Reference(open_checkpoint(WORDS.checkpoint_dir(tmp_path / recipe)), recipe, 64)
        whole = reference.logits(PROMPT)
        for end in (1, 3, 4, 5, 8, 16):
            assert np.array_equal(whole[:end], reference.logits(PROMPT[:end]))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 7},
        {"index_topk": 3},
        {"hc_sinkhorn_iters": 2},
        {"hc_eps": 1e-2},
        {"swiglu_limit": 0.5},
        {"compress_rope_theta": 9999},
        {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]},
    ],
)
def test_each_size_counts(changes: dict[str, Any], tmp_path: Path) -> None:
    """The fixture would find out who read one of them wrong."""
    directory = WORDS.checkpoint_dir(tmp_path)
    expected = logits_of(directory)
    if "mlp_layer_types" in changes:
        add_bias(directory)
    (directory / "config.json").write_text(json.dumps(WORDS.config | changes))
    assert np.abs(logits_of(directory) - expected).max() > 1e-3


def add_bias(directory: Path) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    tensors["layers.2.ffn.gate.bias"] = np.zeros(WORDS.config["n_routed_experts"], np.float32)
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})


# ---- files ---------------------------------------------------------------------------------------------

TRANSFORMERS = [  # published -> transformers' own, in this order
    ("hc_head_", "model.hc_head.hc_"),
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
    ("attn_norm.", "input_layernorm."),
    ("ffn_norm.", "post_attention_layernorm."),
    ("attn.indexer.weights_proj.", "self_attn.compressor.indexer.scorer.weights_proj."),
    ("attn.indexer.wq_b.", "self_attn.compressor.indexer.q_b_proj."),
    ("attn.indexer.compressor.", "self_attn.compressor.indexer."),
    (".attn.", ".self_attn."),
    ("self_attn.kv_norm.", "self_attn.kv_norm."),
    ("self_attn.q_norm.", "self_attn.q_a_norm."),
    ("self_attn.wq_a.", "self_attn.q_a_proj."),
    ("self_attn.wq_b.", "self_attn.q_b_proj."),
    ("self_attn.wkv.", "self_attn.kv_proj."),
    ("self_attn.wo_a.", "self_attn.o_a_proj."),
    ("self_attn.wo_b.", "self_attn.o_b_proj."),
    ("attn_sink", "sinks"),
    (".ape", ".position_bias"),
    (".wkv.", ".kv_proj."),
    (".wgate.", ".gate_proj."),
    ("compressor.norm.", "compressor.kv_norm."),
    ("indexer.norm.", "indexer.kv_norm."),
    (".ffn.", ".mlp."),
    ("gate.bias", "gate.e_score_correction_bias"),
    ("shared_experts.w1", "shared_experts.gate_proj"),
    ("shared_experts.w3", "shared_experts.up_proj"),
    ("shared_experts.w2", "shared_experts.down_proj"),
]
OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
}


def as_transformers_names_them(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of a layer are one tensor there."""
    found: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        if name.startswith("mtp.") or ".experts." in name:
            continue
        theirs = f"model.{name}" if name.startswith("layers.") else OUTSIDE.get(name, name)
        for old, new in TRANSFORMERS:
            theirs = theirs.replace(old, new)
        found[theirs] = array
    for layer in range(WORDS.config["num_hidden_layers"]):
        w1, w2, w3 = (
            [
                tensors[f"layers.{layer}.ffn.experts.{e}.{w}.weight"]
                for e in range(WORDS.config["n_routed_experts"])
            ]
            for w in ("w1", "w2", "w3")
        )
        stem = f"model.layers.{layer}.mlp.experts"
        found[f"{stem}.gate_up_proj"] = np.stack([np.concatenate(both) for both in zip(w1, w3, strict=True)])
        found[f"{stem}.down_proj"] = np.stack(w2)
    return found


def as_transformers_writes_them(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Its own prefix, published names behind it, but for one norm."""
    return {
        (f"model.{name}" if name.startswith("layers.") else OUTSIDE.get(name, name))
        .replace("lm_head", "head")
        .replace("attn.kv_norm", "attn.norm"): array
        for name, array in tensors.items()
        if not name.startswith("mtp.")
    }


@pytest.mark.parametrize("spelling", [as_transformers_names_them, as_transformers_writes_them])
def test_names_of_tensors_have_three_spellings(spelling: Any, tmp_path: Path) -> None:
    directory = WORDS.checkpoint_dir(tmp_path)
    expected = logits_of(directory)
    tensors = spelling(load_file(directory / SINGLE_FILE))
    assert not any(name.startswith("layers.") for name in tensors)
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    assert open_checkpoint(directory).config.num_nextn_predict_layers == 0  # it leaves MTP's out
    assert np.array_equal(logits_of(directory), expected)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.mark.parametrize("scales", [ml_dtypes.float8_e8m0fnu, np.float32])
def test_fp8_and_fp4_are_read_exactly(scales: Any, tmp_path: Path) -> None:
    """As published: experts in FP4, other linear layers in FP8, the rest in BF16 and F32."""
    config = WORDS.config | {
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }
    directory = WORDS.checkpoint_dir(tmp_path)
    tensors, plain = load_file(directory / SINGLE_FILE), {}
    stored: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        rng = np.random.default_rng(len(stored))
        is_linear = ".attn.w" in name or "indexer.wq_b" in name or "shared_experts" in name
        if ".experts." in name:
            codes = rng.integers(0, 16, array.shape, np.uint8)
            scale = 2.0 ** rng.integers(-4, 0, (len(array), -(-array.shape[1] // 32)))
            stored[name] = (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8)
            plain[name] = E2M1[codes] * np.repeat(scale, 32, axis=1)[:, : array.shape[1]].astype(np.float32)
        elif is_linear:
            scale = np.full((1, 1), 0.25)
            stored[name] = array.astype(ml_dtypes.float8_e4m3fn)
            plain[name] = stored[name].astype(np.float32) * np.float32(0.25)
        else:
            plain[name] = stored[name] = array
            continue
        stored[name.replace(".weight", ".scale")] = scale.astype(np.float32).astype(scales)
    save_file(plain, directory / SINGLE_FILE, metadata={"format": "pt"})
    expected = logits_of(directory)
    write_safetensors(directory / SINGLE_FILE, stored)
    (directory / "config.json").write_text(json.dumps(config))
    assert np.array_equal(logits_of(directory), expected)
    stored["layers.1.ffn.experts.0.w2.weight"] = stored["layers.1.ffn.experts.0.w2.weight"][:, :-1]
    write_safetensors(directory / SINGLE_FILE, stored)
    with pytest.raises(CheckpointError, match=r"layers.1.ffn.experts.0.w2.weight is \[64, 15\], expected"):
        open_checkpoint(directory)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write the format by hand: the library has no NumPy types for FP8 and E8M0."""
    names = {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "int8": "I8", "float32": "F32"}
    header, body = {}, b""
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": names.get(array.dtype.name, "I64"),
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


# ---- config.json ---------------------------------------------------------------------------------------


def read(tmp_path: Path, **changes: Any) -> Any:
    tmp_path.mkdir(exist_ok=True)
    config = {key: value for key, value in (WORDS.config | changes).items() if value is not Ellipsis}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return load_config(tmp_path)


def test_layers_by_numbers_by_words_or_by_default(tmp_path: Path) -> None:
    rates = {"compress_rates": ...}
    published = read(tmp_path, layer_types=..., compress_ratios=[0, 4, 128, 4, 0], **rates).v4
    assert published == read(tmp_path, **rates).v4
    assert (published.csa_rate, published.hca_rate) == (4, 128)
    assert read(tmp_path, layer_types=...).v4.layers == ("hca", "hca", "hca", "csa")
    assert read(tmp_path, mlp_layer_types=..., num_hash_layers=2).v4.hash_layers == {0, 1}
    assert read(tmp_path, mlp_layer_types=...).v4.hash_layers == {0, 1, 2}


def test_both_ropes_flat_or_nested(tmp_path: Path) -> None:
    yarn = WORDS.config["rope_scaling"]
    flat = read(tmp_path)
    nested = {
        "main": {"rope_type": "default", "rope_theta": 10000.0},
        "compress": {**yarn, "rope_theta": 160000.0, "attention_factor": 1.0},
    }
    both = read(tmp_path, rope_scaling=..., rope_parameters=nested, compress_rope_theta=7.0)
    assert (flat.rope, flat.compress_rope) == (both.rope, both.compress_rope)
    assert flat.rope.yarn is None
    assert flat.compress_rope.yarn.table_scale == 1.0
    del nested["compress"]["attention_factor"]
    assert read(tmp_path, rope_scaling=..., rope_parameters=nested).compress_rope.yarn.table_scale > 1.2


def test_what_rope_turns_of_a_head(tmp_path: Path) -> None:
    assert read(tmp_path).qk_rope_head_dim == 8
    assert read(tmp_path, partial_rotary_factor=..., qk_rope_head_dim=16).qk_rope_head_dim == 16
    assert read(tmp_path, partial_rotary_factor=...).qk_rope_head_dim == 4  # 64 of 512, whatever the head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types must be one of sliding_attention"),
        (
            {"layer_types": ..., "compress_ratios": [0, 8, 4, 4]},
            "compress_ratios must be 0, 4 or 128 for each",
        ),
        (
            {"layer_types": ..., "compress_ratios": [0, 4]},
            "compress_ratios must be 0, 4 or 128 for each of 4",
        ),
        ({"o_groups": 3}, "o_groups (3) must divide num_attention_heads (4)"),
        ({"index_head_dim": 6}, "index_head_dim (6) must not be less than what RoPE turns of a head (8)"),
        ({"scoring_func": "softmax"}, 'scoring_func "softmax" is not supported (only "sqrtsoftplus" is)'),
        ({"mlp_layer_types": ["dense"] * 4}, 'mlp_layer_types must be "hash_moe" or "moe"'),
        (
            {"compress_rates": {"compressed_sparse_attention": 0}},
            "compress_rates.compressed_sparse_attention",
        ),
        ({"rope_scaling": "yarn"}, 'rope_parameters must be an object or null, found "yarn"'),
        ({"attention_bias": True}, "attention_bias true is not supported"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **changes)
    assert message in str(caught.value)
