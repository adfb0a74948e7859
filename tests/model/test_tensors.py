"""The table of tensors: its rows have fields, its shapes are the arrays', and both arithmetics follow it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from xdeepserve.model import tensors as t
from xdeepserve.model.attention_tables import ATTENTION
from xdeepserve.model.canonical import factors
from xdeepserve.model.checkpoint import expected_tensors
from xdeepserve.model.config import load_config
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.reference import Reference
from xdeepserve.model.seeded import SeededCheckpoint
from xdeepserve.model.weights import RECIPES, Recipe, iter_weights, weight_specs
from xdeepserve.quant.forward import Walk

VARIANTS = [
    {},
    {"q_lora_rank": None, "rope_interleave": False},
    {"n_shared_experts": 0, "num_nextn_predict_layers": 2},
    {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "tie_word_embeddings": True},
    {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    {"num_nextn_predict_layers": 0, "rope_interleave": False, "n_shared_experts": 0}
    | {"model_type": "qwen3_moe", "scoring_func": "softmax", "num_key_value_heads": 4, "head_dim": 24},
    {"model_type": "glm4_moe", "rope_interleave": False, "num_key_value_heads": 2, "head_dim": 24}
    | {"attention_bias": True},
    {"model_type": "minimax_m2", "num_nextn_predict_layers": 0, "rope_interleave": False}
    | {"intermediate_size": 64}  # of experts, and so is `moe_intermediate_size`
    | {"num_key_value_heads": 2, "head_dim": 24, "n_shared_experts": 0, "first_k_dense_replace": 0},
]
INDEXED = [
    {"model_type": "deepseek_v32", "index_n_heads": 3, "index_head_dim": 24}
]  # reference and kernels only
IDS = [5, 90, 17, 300, 41, 7, 260, 33, 12, 5]

Make = Callable[..., SeededCheckpoint]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def variant(**changes: object) -> SeededCheckpoint:
        config = json.loads((PRESET_DIRECTORY / "tiny-random" / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        return SeededCheckpoint("variant", tmp_path, load_config(tmp_path), seed=11)

    return variant


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("changes", [*VARIANTS, *INDEXED])
def test_each_row_lies_in_a_field(recipe: Recipe, changes: dict[str, object], make: Make) -> None:
    source = make(**changes)
    config, model = source.config, Reference(source, recipe, 16).weights
    found = list(zip(range(config.num_hidden_layers), model.layers, strict=True))
    found += [(config.num_hidden_layers + depth, mtp.layer) for depth, mtp in enumerate(model.mtp)]
    assert len(found) == config.num_layers_with_mtp
    for layer_idx, layer in found:
        rows = t.layer_tensors(config, layer_idx)
        for row in rows:
            array = t.find(layer, row.name)
            assert isinstance(array, t.Linear) == (row.kind == "int8"), row.name
            stack = (config.n_routed_experts,) if row.is_routed else ()
            if isinstance(array, t.Linear):
                assert (array.k, array.n) == row.shape(config), row.name
                assert (array.scale is not None) == (recipe == "int8")
                array = array.w if array.scale is None else array.w.swapaxes(-1, -2)
            assert array.shape == (*stack, *row.shape(config)), row.name
        names = {row.name for row in rows}
        absent = {row.name for row in (*ATTENTION[config.attention], *t.DENSE, *t.MOE)} - names
        found_here = [t.find(layer, name) for name in absent]
        assert all(each is None or not each.size for each in found_here)
    for mtp in model.mtp:
        assert all(t.find(mtp, row.name) is not None for row in t.MTP_LAYER)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("changes", [*VARIANTS, *INDEXED])
def test_what_is_prepared_is_what_specs_say(recipe: Recipe, changes: dict[str, object], make: Make) -> None:
    """Each tensor of the checkpoint is read, and each array comes once, of its spec's shape and dtype."""
    source, read = make(**changes), set()
    tensor = source.tensor

    def watched(name: str) -> np.ndarray:
        read.add(name)
        return tensor(name)

    source.tensor = watched  # type: ignore[method-assign]
    specs = weight_specs(source.config, recipe, 8)
    seen = set()
    for name, expert, array in iter_weights(source, recipe, 8):
        shape = specs[name].shape if expert is None else specs[name].shape[1:]
        assert (array.shape, array.dtype) == (shape, specs[name].dtype), name
        assert (name, expert) not in seen
        seen.add((name, expert))
    assert {name for name, _ in seen} == set(specs)
    assert read == set(expected_tensors(source.config))


@pytest.mark.parametrize("changes", [{}, {"kv_lora_rank": 23, "qk_nope_head_dim": 7}])
def test_the_int8_recipe_holds_other_matrices_in_bf16(changes: dict[str, int], make: Make) -> None:
    """Rounded, whatever the files hold and however deep they are; the router's stays as it is."""
    source = make(**changes)
    tensor = source.tensor
    source.tensor = lambda name: tensor(name) * np.float32(1.001)  # type: ignore[method-assign]
    specs = weight_specs(source.config, "int8", 8)
    plain = {name: array for name, expert, array in iter_weights(source, "fp32", 8) if expert is None}
    bf16 = {"w_uk", "w_uv", "eh_proj", "head"}
    for name, expert, array in iter_weights(source, "int8", 8):
        if specs[name].dtype == np.int8 or not specs[name].is_matrix:
            continue
        assert expert is None
        is_bf16 = name.rpartition(".")[2] in bf16
        assert specs[name].packed_dtype == (np.uint16 if is_bf16 else np.float32), name
        assert np.array_equal(array, factors(plain[name]) if is_bf16 else plain[name]), name
        packed = specs[name].pack(array)
        assert (packed.shape, packed.dtype) == (specs[name].packed_shape, specs[name].packed_dtype)
    assert not np.array_equal(plain["head"], factors(plain["head"]))


@pytest.mark.parametrize("changes", VARIANTS)
def test_the_fast_arithmetic_computes_the_same_model(changes: dict[str, object], make: Make) -> None:
    source = make(**changes)
    reference, walk = Reference(source, "fp32", 16), Walk(source, [IDS, IDS[::-1]])
    for layer_idx in range(source.config.num_hidden_layers):
        walk.run(layer_idx)
    logits = []
    norm, head = source.tensor("model.norm.weight"), source.tensor("lm_head.weight")
    for h in np.split(walk.h, 2):
        scale = np.sqrt(np.mean(np.square(h), axis=-1, keepdims=True) + source.config.rms_norm_eps)
        logits.append(h / scale * norm @ head.T)
    for ids, found in zip((IDS, IDS[::-1]), logits, strict=True):
        assert np.allclose(found, reference.logits(ids), atol=1e-3)


def test_what_the_int8_recipe_leaves_alone(make: Make) -> None:
    """Of the matrices, as xDeepServe 4.7 has it; biases, norms and embeddings are none of them."""
    rows = t.stored_tensors(make().config).items()
    floats = {name.removesuffix(".weight").rpartition(".")[2] for name, row in rows if row.kind != "int8"}
    norms = {name for name in floats if name.endswith("norm")}
    assert floats - norms == {
        "lm_head", "head", "gate", "kv_b_proj", "eh_proj", "embed_tokens", "e_score_correction_bias",
    }  # fmt: skip
