"""Quantising a checkpoint on disk: what is written loads everywhere, and nothing half-written loads."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from xdeepserve import LLM, SamplingParams
from xdeepserve.errors import CheckpointError, InputError
from xdeepserve.model.checkpoint import Checkpoint, expected_tensors, open_checkpoint
from xdeepserve.model.config import load_config
from xdeepserve.model.export import write_checkpoint
from xdeepserve.model.presets import TinyCheckpoint
from xdeepserve.model.reference import Reference
from xdeepserve.model.seeded import SeededCheckpoint
from xdeepserve.quant import job, part
from xdeepserve.quant.forward import expert_load
from xdeepserve.quant.job import MIN_ROWS, Report, Sequences, estimated_bytes
from xdeepserve.quant.method import METHODS, Method
from xdeepserve.quant.part import Part
from xdeepserve.quant.sensitivity import sensitive_layers

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 2,
    "max_position_embeddings": 64,
}
IDS = [(7 * i + i * i) % 40 for i in range(30)]


def sequences(i: int) -> list[int]:
    return [(i * i + 5 * j + j * j) % 40 for j in range(20)]


def quantize_checkpoint(
    source: Checkpoint, out: Path, method: Method, texts: Sequences, num_sequences: int = 8
) -> Report:
    return job.quantize_checkpoint(source, out, method, texts, num_sequences=num_sequences)


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    return make(tmp_path / "source")


def make(directory: Path, **changes: object) -> Checkpoint:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    seeded = SeededCheckpoint("source", directory, load_config(directory), seed=3)
    write_checkpoint(seeded, directory)
    return open_checkpoint(directory)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "changes", [{}, {"q_lora_rank": None, "rope_interleave": False, "n_shared_experts": 0}]
)
def test_every_method_writes_a_model_near_the_original(
    name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    source = make(tmp_path / "source", **changes)
    report = quantize_checkpoint(source, tmp_path / "out", METHODS[name], sequences, num_sequences=8)
    found = open_checkpoint(tmp_path / "out")
    assert not (tmp_path / "out.part").exists()
    assert found.config.quantization is not None
    assert report.num_starved == 0
    exact, rounded = Reference(source, "fp32").logits(IDS), Reference(found, "int8").logits(IDS)
    assert 1e-6 < np.square(rounded - exact).mean() / np.square(exact).mean() < 0.02
    dequantised = Reference(found, "fp32").logits(IDS)
    assert np.square(dequantised - exact).mean() / np.square(exact).mean() < 0.02


def test_round_to_nearest_is_what_the_recipe_does_on_the_fly(source: Checkpoint, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], sequences)
    found = open_checkpoint(tmp_path / "out")
    assert np.array_equal(Reference(found, "int8").logits(IDS), Reference(source, "int8").logits(IDS))
    assert np.array_equal(Reference(found, "int8").mtp_logits(IDS), Reference(source, "int8").mtp_logits(IDS))


def test_gptq_brings_its_own_integers(source: Checkpoint, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", METHODS["gptq"], sequences)
    found, module = open_checkpoint(tmp_path / "out"), "model.layers.1.mlp.experts.3.down_proj"
    stored = found.int8(module)
    assert stored is not None
    q, scale = stored
    weights = Reference(found, "int8").weights.layers[1]
    assert weights.moe is not None
    assert weights.moe.experts.w2.scale is not None
    assert np.array_equal(weights.moe.experts.w2.w[3], q)
    assert np.array_equal(weights.moe.experts.w2.scale[3], scale[:, 0])
    assert np.array_equal(found.tensor(f"{module}.weight"), q.astype(np.float32) * scale)


def test_the_layout_is_compressed_tensors(source: Checkpoint, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", METHODS["smoothquant+gptq"], sequences)
    out = tmp_path / "out"
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "int-quantized")
    group = config["config_groups"]["group_0"]
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "token")
    assert group["input_activations"]["dynamic"] is True
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {name: array for file in set(index.values()) for name, array in load_file(out / file).items()}
    assert set(tensors) == set(index)
    weight = tensors["model.layers.0.self_attn.o_proj.weight"]
    scale = tensors["model.layers.0.self_attn.o_proj.weight_scale"]
    assert (weight.dtype, scale.shape) == (np.int8, (32, 1))
    for name in ("lm_head", "model.layers.1.self_attn.kv_b_proj", "model.layers.1.mlp.gate"):
        assert tensors[f"{name}.weight"].dtype != np.int8
        assert f"{name}.weight_scale" not in tensors


def test_shared_tensors_are_not_repeated(source: Checkpoint, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], sequences)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert not any(
        name.endswith(("embed_tokens.weight", "head.weight")) and "layers" in name for name in index
    )


def test_the_config_goes_with_the_weights_wherever_it_lies(tmp_path: Path) -> None:
    """tiny-r1 takes its tokenizer from another preset's directory, but not its config."""
    checkpoint = TinyCheckpoint("tiny-r1")
    report = Report("rtn", 1, 1, None, 0, {})
    raw = job.Quantization(checkpoint, tmp_path / "out", METHODS["rtn"], lambda *step: None).config_json(
        report
    )
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert expected_tensors(load_config(tmp_path)) == expected_tensors(checkpoint.config)


def test_export_takes_the_config_that_the_checkpoint_names(source: Checkpoint, tmp_path: Path) -> None:
    class Borrowing(SeededCheckpoint):
        config_path = tmp_path / "source" / "config.json"

    (tmp_path / "lender").mkdir()
    (tmp_path / "lender" / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 7}))
    write_checkpoint(Borrowing("b", tmp_path / "lender", source.config, seed=3), tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").config == source.config


def test_the_estimate_covers_what_is_written(source: Checkpoint, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", METHODS["smoothquant"], sequences)
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert 0.3 * written < estimated_bytes(source.config) < 1.5 * written


# ---- mixed precision ----------------------------------------------------------------------------


def test_sensitive_layers_stay_float_and_are_named(source: Checkpoint, tmp_path: Path) -> None:
    strict = Method(name="strict", keep_ratio=0.0, keep_share=1.0)
    report = quantize_checkpoint(source, tmp_path / "out", strict, sequences)
    found = open_checkpoint(tmp_path / "out")
    assert "model.layers.0.self_attn.o_proj" in found.config.kept_float
    assert not any(".experts." in name for name in found.config.kept_float)
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.up_proj" in ignore
    assert any(one.is_kept_float for one in report.layers["model.layers.0"])
    weights = Reference(found, "int8").weights.layers
    assert weights[0].wo.scale is None
    assert weights[1].moe is not None
    assert weights[1].moe.experts.w13.scale is not None


def spoil(source: Checkpoint, *modules: str) -> Checkpoint:
    """Inputs 0 and 1 of each module are the same, and weights a thousand times the others cancel them out."""
    directory = source.directory
    tensors = {name: source.tensor(name) for name in source.names()}
    for module in modules:
        weight = tensors[f"{module}.weight"]
        weight[:, 0], weight[:, 1] = 300.0, -300.0
        if module.endswith("down_proj"):
            for part in ("gate_proj", "up_proj"):
                inner = tensors[f"{module.removesuffix('down_proj')}{part}.weight"]
                inner[1] = inner[0]
        else:
            for name, rows in tensors.items():
                if name.endswith(("embed_tokens.weight", "input_layernorm.weight")):
                    rows[..., 1] = rows[..., 0]
    save_file(tensors, directory / "model.safetensors")
    return open_checkpoint(directory)


def test_cloudmatrix_keeps_a_layer_that_nothing_heals(source: Checkpoint, tmp_path: Path) -> None:
    bad = spoil(source, "model.layers.1.mlp.shared_experts.down_proj")
    report = quantize_checkpoint(bad, tmp_path / "out", METHODS["cloudmatrix"], sequences)
    kept = open_checkpoint(tmp_path / "out").config.kept_float
    assert kept == {"model.layers.1.mlp.shared_experts.down_proj"}
    everything = msgspec.structs.replace(METHODS["cloudmatrix"], keep_ratio=None)
    lost = quantize_checkpoint(bad, tmp_path / "all", everything, sequences)
    errors = [
        {one.module: one.both for one in found.layers["model.layers.1"]}["mlp.shared_experts.down_proj"]
        for found in (report, lost)
    ]
    assert errors[1] > 100 * errors[0]
    exact = Reference(bad, "fp32").logits(IDS)
    off = [
        np.square(Reference(open_checkpoint(tmp_path / name), "int8").logits(IDS) - exact).mean()
        for name in ("out", "all")
    ]
    assert off[0] < off[1]


def test_the_latents_projections_share_a_precision(source: Checkpoint, tmp_path: Path) -> None:
    bad = spoil(source, "model.layers.0.self_attn.q_a_proj")
    method = Method(name="mixed", keep_ratio=10)
    report = quantize_checkpoint(bad, tmp_path / "out", method, sequences)
    names = {"model.layers.0.self_attn.q_a_proj", "model.layers.0.self_attn.kv_a_proj_with_mqa"}
    found = open_checkpoint(tmp_path / "out")
    assert {name for name in found.config.kept_float if name.endswith(("_a_proj", "mqa"))} == names
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert names <= set(ignore)
    kept = [one.module for one in report.layers["model.layers.0"] if one.is_kept_float]
    assert kept == ["self_attn.kv_a_proj_with_mqa", "self_attn.q_a_proj"]
    Reference(found, "int8").logits(IDS)


def assert_runs_like_the_reference(checkpoint: Checkpoint, deployment: str, *settings: str) -> None:
    dies = ["dies=2"] if deployment == "colocated" else []
    overrides = ["max_model_len=32", *dies, *settings]
    with LLM(checkpoint, deployment, "int8", overrides=overrides) as llm:
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        (output,) = llm.generate([IDS[:9]], params, keep_logits=True)
    (choice,) = output.outputs
    assert choice.logits is not None
    expected = Reference(checkpoint, "int8").logits([*IDS[:9], *choice.token_ids])[8:-1]
    assert np.array_equal(choice.logits, expected)


@pytest.mark.parametrize(
    ("deployment", "settings"),
    [
        ("monolithic", ()),
        ("monolithic", ("lockstep=true",)),
        ("colocated", ()),
        ("colocated", ("tp=2", "tp_mode=tp")),
        ("colocated", ("lockstep=true",)),
    ],
)
def test_layers_in_floating_point_run_beside_int8_ones(
    source: Checkpoint, tmp_path: Path, deployment: str, settings: tuple[str, ...]
) -> None:
    method = Method(name="strict", keep_ratio=0.0, keep_share=1.0)
    quantize_checkpoint(source, tmp_path / "out", method, sequences)
    found = open_checkpoint(tmp_path / "out")
    kept = {name.split(".", 3)[-1] for name in found.config.kept_float}
    assert {"q_a_proj", "o_proj", "down_proj"} <= {name.rsplit(".", 1)[-1] for name in kept}
    assert_runs_like_the_reference(found, deployment, *settings)


def test_a_shared_expert_in_floating_point_cannot_have_dies_of_its_own(
    source: Checkpoint, tmp_path: Path
) -> None:
    method = Method(name="strict", keep_ratio=0.0, keep_share=1.0)
    quantize_checkpoint(source, tmp_path / "out", method, sequences)
    with pytest.raises(InputError, match="sends INT8 rows to the shared expert's dies"):
        LLM(open_checkpoint(tmp_path / "out"), "moe-attention", "int8")


def test_a_model_without_an_outlier_is_int8_throughout(source: Checkpoint, tmp_path: Path) -> None:
    report = quantize_checkpoint(source, tmp_path / "out", METHODS["cloudmatrix"], sequences)
    assert not any(one.is_kept_float for found in report.layers.values() for one in found)


def test_layers_are_ranked_by_their_error() -> None:
    modules = ["gate_proj", "up_proj", "down_proj", "o_proj", "q_b_proj"]
    sizes = {f"l.{i}.{module}": 10 for i in range(4) for module in modules}
    errors = dict.fromkeys(sizes, 1.0) | {"l.1.up_proj": 50.0, "l.2.o_proj": 40.0, "l.3.o_proj": 9.0}
    both = {"l.1.gate_proj", "l.1.up_proj"}
    assert sensitive_layers(errors, sizes, 10, 1000) == both | {"l.2.o_proj"}
    assert sensitive_layers(errors, sizes, 8, 1000) == both | {"l.2.o_proj", "l.3.o_proj"}
    assert sensitive_layers(errors, sizes, 10, 20) == both
    assert sensitive_layers(errors, sizes, 10, 19) == {"l.2.o_proj"}
    assert sensitive_layers(errors, sizes, 10, 9) == frozenset()
    assert sensitive_layers({}, {}, 10, 9) == frozenset()


# ---- attention ----------------------------------------------------------------------------------


def test_layers_that_bear_it_have_int8_attention(source: Checkpoint, tmp_path: Path) -> None:
    none = quantize_checkpoint(source, tmp_path / "none", METHODS["rtn"], sequences)
    assert none.int8_attention == []
    errors = [none.attention[f"model.layers.{i}"] for i in range(4)]
    assert all(0 < error < 1e-3 for error in errors)
    limit = sorted(errors)[1]
    method = Method(name="some", max_attention_error=limit * (1 + 1e-4))
    found = quantize_checkpoint(source, tmp_path / "some", method, sequences)
    assert 0 < len(found.int8_attention) < 4
    checkpoint = open_checkpoint(tmp_path / "some")
    assert checkpoint.config.int8_attention == frozenset(found.int8_attention)
    assert open_checkpoint(tmp_path / "none").config.int8_attention == frozenset()
    flags = [layer.int8_attention for layer in Reference(checkpoint, "int8").weights.layers]
    assert flags == [i in found.int8_attention for i in range(2)]


def test_int8_attention_is_the_engines_too(source: Checkpoint, tmp_path: Path) -> None:
    method = Method(name="all", max_attention_error=1.0)
    found = quantize_checkpoint(source, tmp_path / "all", method, sequences)
    assert found.int8_attention == [0, 1, 2, 3]
    checkpoint = open_checkpoint(tmp_path / "all")
    logits = Reference(checkpoint, "int8").logits(IDS)
    for deployment, settings in (
        ("monolithic", ["threads=2"]),
        ("colocated", ["dies=2", "scheduler.max_num_batched_tokens=7", "scheduler.max_num_seqs=4"]),
        ("colocated", ["dies=2", "tp=2"]),
    ):
        with LLM(checkpoint, deployment, "int8", overrides=["max_model_len=64", *settings]) as llm:
            assert np.array_equal(llm.logits(IDS), logits)
    plain = json.loads((tmp_path / "all" / "config.json").read_text())
    assert plain.pop("xdeepserve_int8_attention") == [0, 1, 2, 3]
    (tmp_path / "all" / "config.json").write_text(json.dumps(plain))
    without = Reference(open_checkpoint(tmp_path / "all"), "int8").logits(IDS)
    assert not np.array_equal(without, logits)
    assert np.square(without - logits).mean() < 0.01 * np.square(logits).mean()
    assert np.array_equal(
        Reference(checkpoint, "fp32").logits(IDS),
        Reference(open_checkpoint(tmp_path / "all"), "fp32").logits(IDS),
    )


def test_strange_layer_numbers_are_refused(source: Checkpoint, tmp_path: Path) -> None:
    for layers in ([3], [4]):
        text = json.dumps(CONFIG | {"xdeepserve_int8_attention": layers})
        (tmp_path / "source" / "config.json").write_text(text)
        if layers == [4]:
            with pytest.raises(CheckpointError, match="names layer 4, but there are 4 layers with MTP's"):
                open_checkpoint(tmp_path / "source")
        else:
            assert open_checkpoint(tmp_path / "source").config.int8_attention == {3}
    (tmp_path / "source" / "config.json").write_text(
        json.dumps(CONFIG | {"xdeepserve_int8_attention": "all"})
    )
    with pytest.raises(
        CheckpointError, match=r'xdeepserve_int8_attention must be a list of layer numbers, found "all"'
    ):
        open_checkpoint(tmp_path / "source")


# ---- calibration --------------------------------------------------------------------------------


def test_the_calibration_set_grows_until_every_expert_has_seen_enough(
    source: Checkpoint, tmp_path: Path
) -> None:
    few = [sequences(0)]
    assert min(int(load.min()) for load in expert_load(source, few).values()) < MIN_ROWS
    report = quantize_checkpoint(source, tmp_path / "out", METHODS["gptq"], sequences, num_sequences=1)
    assert report.num_sequences > 1
    assert report.rarest_expert is not None
    assert report.rarest_expert >= MIN_ROWS


def test_texts_that_are_too_short_are_passed_over(source: Checkpoint, tmp_path: Path) -> None:
    def some_short(i: int) -> list[int] | None:
        return ([], [1], [1, 2], sequences(i))[i % 4] if i < 40 else None

    report = quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], some_short, num_sequences=8)
    assert (report.num_sequences, report.num_tokens) == (8, 8 * 20)
    with pytest.raises(InputError, match="none of 3 texts is longer than 2 tokens, as the MTP layers need"):
        quantize_checkpoint(
            source, tmp_path / "none", METHODS["rtn"], lambda i: [1, 2] if i < 3 else None, num_sequences=8
        )


def test_progress_goes_through_the_layers_twice(source: Checkpoint, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    job.quantize_checkpoint(
        source,
        tmp_path / "out",
        METHODS["rtn"],
        sequences,
        num_sequences=8,
        progress=lambda *step: seen.append(step),
    )
    calibrating = [("calibrating with 8 texts", i, 4) for i in range(4)]
    assert seen == [*calibrating, *((f"layer {i}", i, 4) for i in range(4)), ("done", 4, 4)]


def test_experts_that_starve_are_counted_and_quantised_all_the_same(
    source: Checkpoint, tmp_path: Path
) -> None:
    report = quantize_checkpoint(
        source, tmp_path / "out", METHODS["gptq"], lambda i: [1, 2, 3, 4] if i == 0 else None, num_sequences=4
    )
    assert report.num_sequences == 1
    assert report.num_starved > 0
    assert np.isfinite(Reference(open_checkpoint(tmp_path / "out"), "int8").logits(IDS)).all()


def test_expert_load_is_the_references_routing(source: Checkpoint) -> None:
    load = expert_load(source, [IDS])
    assert {layer: int(counts.sum()) for layer, counts in load.items()} == {1: 60, 2: 58, 3: 56}


# ---- faults -------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "stop_at"), [("smoothquant+gptq", 4), ("cloudmatrix", 0), ("cloudmatrix", 2)]
)
def test_an_interrupted_job_goes_on_to_the_same_bytes(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, name: str
) -> None:
    quantize_checkpoint(source, tmp_path / "whole", METHODS[name], sequences)
    save = Part.save
    calls = 0

    def save_some(self: Part, number: int, tensors: dict[str, np.ndarray]) -> None:
        nonlocal calls
        if calls == stop_at:
            raise Interrupted
        calls += 1
        save(self, number, tensors)

    monkeypatch.setattr(Part, "save", save_some)
    with pytest.raises(Interrupted):
        quantize_checkpoint(source, tmp_path / "out", METHODS[name], sequences)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "out.part")
    monkeypatch.setattr(Part, "save", save)
    quantize_checkpoint(source, tmp_path / "out", METHODS[name], sequences)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_an_interrupted_end_goes_on_too(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_checkpoint(source, tmp_path / "whole", METHODS["gptq"], sequences)

    def stop(ignore: object, version: object) -> dict[str, object]:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(job, "compressed_tensors_config", stop)
        with pytest.raises(Interrupted):
            quantize_checkpoint(source, tmp_path / "out", METHODS["gptq"], sequences)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "out.part")
    quantize_checkpoint(source, tmp_path / "out", METHODS["gptq"], sequences)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_another_unfinished_job_is_not_mixed_in(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: object, *args: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(Part, "save", stop)
        with pytest.raises(Interrupted):
            quantize_checkpoint(source, tmp_path / "out", METHODS["gptq"], sequences)
    with pytest.raises(InputError, match="another unfinished job"):
        quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], sequences)
    weights = tmp_path / "source" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] += 1
    save_file(tensors, weights)
    with pytest.raises(InputError, match="another unfinished job"):
        quantize_checkpoint(
            open_checkpoint(tmp_path / "source"), tmp_path / "out", METHODS["gptq"], sequences
        )


@pytest.mark.parametrize(
    "changes", [{"rope_theta": 30.0}, {"routed_scaling_factor": 2.0}, {"eos_token_id": 5}]
)
def test_a_config_changed_half_way_is_not_mixed_in(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """The weights' files are the same, so nothing else tells."""
    save = Part.save

    def save_one(self: Part, number: int, tensors: dict[str, np.ndarray]) -> None:
        if number:
            raise Interrupted
        save(self, number, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(Part, "save", save_one)
        with pytest.raises(Interrupted):
            quantize_checkpoint(source, tmp_path / "out", METHODS["gptq"], sequences)
    (tmp_path / "source" / "config.json").write_text(json.dumps(CONFIG | changes))
    changed = open_checkpoint(tmp_path / "source")
    with pytest.raises(InputError, match="another unfinished job"):
        quantize_checkpoint(changed, tmp_path / "out", METHODS["gptq"], sequences)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("has_locks", [True, False])
def test_two_at_once_do_not_meet(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    if not has_locks:
        monkeypatch.setattr(part, "fcntl", None)
    save = Part.save
    refused: list[str] = []

    def save_and_meet(self: Part, number: int, tensors: dict[str, np.ndarray]) -> None:
        with pytest.raises(InputError) as caught:
            quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], sequences)
        refused.append(str(caught.value))
        save(self, number, tensors)

    quantize_checkpoint(source, tmp_path / "alone", METHODS["rtn"], sequences)
    with monkeypatch.context() as patch:
        patch.setattr(Part, "save", save_and_meet)
        quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], sequences)
    assert len(refused) == 5
    assert all("out.part: another process is at work on it" in line for line in refused)
    assert files(tmp_path / "out") == files(tmp_path / "alone")
    assert not (tmp_path / "out.part").exists()


def test_a_full_disk_is_one_line_and_no_checkpoint(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, *args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Part, "save", full)
    with pytest.raises(InputError, match="no space left"):
        quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], sequences)
    assert not (tmp_path / "out").exists()


def test_what_the_library_says_of_a_full_disk_is_understood(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(part, "save_file", full)
        with pytest.raises(InputError, match="no space left; with more of it, the same command goes on"):
            quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], sequences)
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], sequences)
    assert open_checkpoint(tmp_path / "out").config.quantization is not None


@pytest.mark.parametrize("name", ["job.json", "layer-00001.json", "config.json", "quantization.json"])
def test_a_small_file_cut_short_is_written_again(
    name: str, source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_checkpoint(source, tmp_path / "whole", METHODS["gptq"], sequences)
    write, replace = Path.write_bytes, Path.replace

    def replace_or_stop(path: Path, target: Path) -> Path:
        if target.name == name:
            write(path, path.read_bytes()[:5])
            raise Interrupted
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_or_stop)
        with pytest.raises(Interrupted):
            quantize_checkpoint(source, tmp_path / "out", METHODS["gptq"], sequences)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "out.part")
    quantize_checkpoint(source, tmp_path / "out", METHODS["gptq"], sequences)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_too_little_space_is_said_before_work_begins(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(InputError, match=r"no space left: about 0 MB are needed, 0 MB are free"):
        quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], sequences)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=0, free=0))
    with pytest.raises(InputError, match="this file system holds no files"):
        quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], sequences)
    assert not (tmp_path / "out.part").exists()


def test_refusals(source: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="exists already"):
        quantize_checkpoint(source, tmp_path / "there", METHODS["rtn"], sequences)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="dangling: exists already"):
        quantize_checkpoint(source, tmp_path / "dangling", METHODS["rtn"], sequences)
    with pytest.raises(InputError, match="no such directory"):
        quantize_checkpoint(source, tmp_path / "no" / "where", METHODS["rtn"], sequences)
    with pytest.raises(InputError, match="calibration text is empty"):
        quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], lambda i: None)
    quantize_checkpoint(source, tmp_path / "out", METHODS["rtn"], sequences)
    with pytest.raises(CheckpointError, match="already quantised"):
        quantize_checkpoint(open_checkpoint(tmp_path / "out"), tmp_path / "twice", METHODS["rtn"], sequences)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layers.3.enorm.weight",
        "model.layers.3.shared_head.norm.weight",
        "model.layers.3.shared_head.head.weight",
    ],
)
def test_values_that_are_not_finite_are_named(source: Checkpoint, tmp_path: Path, name: str) -> None:
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    tensors[name] = source.tensor(name)
    tensors[name].flat[3] = np.nan
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} holds values that are not finite"):
        quantize_checkpoint(open_checkpoint(tmp_path / "source"), tmp_path / "out", METHODS["rtn"], sequences)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("factor", [1e25, 1e38])
def test_a_model_whose_numbers_overflow_is_refused(source: Checkpoint, tmp_path: Path, factor: float) -> None:
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    name = "model.layers.1.mlp.shared_experts.up_proj.weight"
    tensors[name] = source.tensor(name) * np.float32(factor)
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    with pytest.raises(CheckpointError, match="the hidden states behind layer 1 are not finite in float32"):
        quantize_checkpoint(open_checkpoint(tmp_path / "source"), tmp_path / "out", METHODS["rtn"], sequences)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# ---- other people's files -----------------------------------------------------------------------


@pytest.fixture
def foreign(source: Checkpoint, tmp_path: Path) -> Path:
    """An INT8 checkpoint to spoil, in one file."""
    quantize_checkpoint(source, tmp_path / "int8", METHODS["rtn"], sequences)
    out = tmp_path / "int8"
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(out.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (out / "model.safetensors.index.json").unlink()
    save_file(tensors, out / "model.safetensors")
    return out


MODULE = "model.layers.1.self_attn.kv_a_proj_with_mqa"


def change(directory: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_flat_and_bf16_scales_are_read(foreign: Path) -> None:
    expected = open_checkpoint(foreign).tensor(f"{MODULE}.weight")
    name = f"{MODULE}.weight_scale"
    change(foreign, lambda t: t.update({name: t[name].reshape(-1)}))
    assert np.array_equal(open_checkpoint(foreign).tensor(f"{MODULE}.weight"), expected)
    change(foreign, lambda t: t.update({name: t[name].astype(ml_dtypes.bfloat16)}))
    assert np.allclose(open_checkpoint(foreign).tensor(f"{MODULE}.weight"), expected, rtol=0.01)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{MODULE}.weight_scale"), "is I8 without weight_scale"),
        (lambda t: t.update({f"{MODULE}.weight_scale": t[f"{MODULE}.weight_scale"][:4]}), "expected [20, 1]"),
        (lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}), "model.norm.weight is I8"),
    ],
)
def test_spoiled_files_are_refused(
    foreign: Path, edit: Callable[[dict[str, np.ndarray]], object], message: str
) -> None:
    change(foreign, edit)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(foreign)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transform_config", {"config_groups": {"R1": {"type": "hadamard"}}}),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("output_activations", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    ],
)
def test_settings_that_change_the_arithmetic_are_refused(foreign: Path, key: str, value: object) -> None:
    config = json.loads((foreign / "config.json").read_text())
    found = config["quantization_config"]
    found |= {"transform_config": {}, "sparsity_config": {"format": "dense", "ignore": []}}
    (foreign / "config.json").write_text(json.dumps(config))
    open_checkpoint(foreign)
    (found["config_groups"]["group_0"] if key in found["config_groups"]["group_0"] else found)[key] = value
    (foreign / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"{key} is not supported \(only null is\)"):
        open_checkpoint(foreign)


def test_int8_without_a_word_in_the_config_is_refused(foreign: Path) -> None:
    (foreign / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match="unsupported dtype"):
        open_checkpoint(foreign)


def test_fp8_blocks_are_multiplied_with_their_scales(source: Checkpoint, tmp_path: Path) -> None:
    directory, block = tmp_path / "fp8", 16
    directory.mkdir()
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    (directory / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": scheme}))
    tensors: dict[str, np.ndarray] = {}
    expected: dict[str, np.ndarray] = {}
    for name in source.names():
        array = source.tensor(name)
        if not name.endswith(("_proj.weight", "mqa.weight")) or name.endswith("eh_proj.weight"):
            tensors[name] = array
            continue
        rows, columns = (-(-n // block) for n in array.shape)
        scale = np.random.default_rng(len(tensors)).random((rows, columns), np.float32) + 0.5
        wide = np.kron(scale, np.ones((block, block), np.float32))[: array.shape[0], : array.shape[1]]
        q = array.astype(ml_dtypes.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = q.view(np.uint8), scale
        expected[name] = q.astype(np.float32) * wide
    save_file(tensors, directory / "model.safetensors")
    as_fp8(directory / "model.safetensors", set(expected))
    found = open_checkpoint(directory)
    assert all(np.array_equal(found.tensor(name), array) for name, array in expected.items())
    quantize_checkpoint(found, tmp_path / "out", METHODS["smoothquant"], sequences)
    assert open_checkpoint(tmp_path / "out").config.quantization is not None


def as_fp8(path: Path, names: set[str]) -> None:
    """Rewrite dtypes in a safetensors header: the library cannot write FP8 from NumPy."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = msgspec.json.decode(data[8 : 8 + size])
    for name in names:
        header[name]["dtype"] = "F8_E4M3"
    text = msgspec.json.encode(header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
