"""Checkpoint directories: every layout gives the same bits; every fault gives one clear line."""

import json
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.model.hf_fixtures import Fixture, fixtures
from xdeepserve.errors import CheckpointError
from xdeepserve.model import checkpoint as checkpoint_module
from xdeepserve.model.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    KeptCheckpoint,
    expected_tensors,
    num_parameters,
    open_checkpoint,
)
from xdeepserve.model.config import load_config
from xdeepserve.model.export import write_checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.model.seeded import SeededCheckpoint
from xdeepserve.model.tokenizer import load_tokenizer

SMALL = {
    "model_type": "deepseek_v3",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., SeededCheckpoint]:
    def make_small(**changes: object) -> SeededCheckpoint:
        directory = tmp_path / "source"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(SMALL | changes))
        return SeededCheckpoint("small", directory, load_config(directory), seed=7)

    return make_small


@pytest.fixture
def small(make: Callable[..., SeededCheckpoint]) -> SeededCheckpoint:
    return make()


@pytest.fixture
def written(small: SeededCheckpoint, tmp_path: Path) -> Path:
    """A good single-file checkpoint for tests to spoil."""
    write_checkpoint(small, tmp_path / "written", "f32")
    return tmp_path / "written"


def test_kept_tensors_are_fresh_arrays(small: SeededCheckpoint) -> None:
    kept = KeptCheckpoint(small)
    assert (kept.names(), kept.digest(), kept.config_path) == (
        small.names(),
        small.digest(),
        small.config_path,
    )
    kept.tensor(EXPERT)[...] = 0
    assert np.array_equal(kept.tensor(EXPERT), small.tensor(EXPERT))


def assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    assert found.config == expected.config
    assert found.names() == expected.names()
    for name in expected.names():
        array = found.tensor(name)
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert np.array_equal(array, expected.tensor(name)), name


def spoil(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    change(tensors)
    save_file(tensors, directory / SINGLE_FILE)


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("max_shard_bytes", [None, 1, 3000, 1 << 30])
@pytest.mark.parametrize(
    "changes", [{}, {"q_lora_rank": None, "tie_word_embeddings": True}, {"n_shared_experts": 0}]
)
def test_written_checkpoints_read_back(make, tmp_path: Path, dtype: str, max_shard_bytes, changes) -> None:
    source = make(**changes)
    write_checkpoint(source, tmp_path / "out", dtype, max_shard_bytes)
    found = open_checkpoint(tmp_path / "out")
    assert_same(found, source)


@pytest.mark.parametrize("fixture", fixtures(), ids=lambda fixture: fixture.name)
def test_fixture_layouts_hold_the_seeded_weights(fixture: Fixture, tmp_path: Path) -> None:
    directory = fixture.checkpoint_dir(tmp_path)
    seeded = SeededCheckpoint(fixture.name, directory, load_config(directory), fixture.seed)
    assert_same(open_checkpoint(directory), seeded)


def test_shards_without_an_index(small: SeededCheckpoint, tmp_path: Path) -> None:
    write_checkpoint(small, tmp_path / "out", "bf16", 3000)
    (tmp_path / "out" / INDEX_FILE).unlink()
    assert_same(open_checkpoint(tmp_path / "out"), small)


def test_half_precision(written: Path, small: SeededCheckpoint) -> None:
    spoil(written, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].astype(np.float16)}))
    expected = small.tensor(EXPERT).astype(np.float16).astype(np.float32)
    assert np.array_equal(open_checkpoint(written).tensor(EXPERT), expected)


def test_bf16_specials_keep_their_bits(written: Path) -> None:
    name = "model.norm.weight"
    bits = np.array([0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7F7F, 0x3F80, 0xC2F7] * 2, dtype=np.uint16)
    spoil(written, lambda tensors: tensors.update({name: bits.view(ml_dtypes.bfloat16)}))
    found = open_checkpoint(written).tensor(name)
    assert np.array_equal(found.view(np.uint32), bits.astype(np.uint32) << 16)


def test_extra_tensors_are_ignored(written: Path, small: SeededCheckpoint) -> None:
    spoil(
        written, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)})
    )
    assert_same(open_checkpoint(written), small)


def test_an_mtp_layers_own_embedding_and_head_are_used(written: Path, small: SeededCheckpoint) -> None:
    own = {
        "model.layers.2.embed_tokens.weight": np.full((24, 16), 2.0, np.float32),
        "model.layers.2.shared_head.head.weight": np.full((24, 16), 3.0, np.float32),
    }
    spoil(written, lambda tensors: tensors.update(own))
    found = open_checkpoint(written)
    for name, array in own.items():
        assert np.array_equal(found.tensor(name), array)
    assert np.array_equal(found.tensor("lm_head.weight"), small.tensor("lm_head.weight"))


def test_a_promised_mtp_layer_that_is_not_there_is_dropped(written: Path) -> None:
    def drop(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            del tensors[name]

    spoil(written, drop)
    found = open_checkpoint(written)
    assert found.config.num_nextn_predict_layers == 0
    assert not any(name.startswith("model.layers.2.") for name in found.names())


def test_part_of_an_mtp_layer_is_a_missing_tensor(written: Path) -> None:
    spoil(written, lambda tensors: tensors.pop("model.layers.2.enorm.weight"))
    assert "1 of 73 tensors are missing: model.layers.2.enorm.weight" in refusal(written)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(make, tmp_path: Path) -> None:
    """Other engines differ in which of two they take, so a second one that differs is refused."""
    write_checkpoint(make(tie_word_embeddings=True), tmp_path / "out", "f32")
    spoil(tmp_path / "out", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    found = open_checkpoint(tmp_path / "out")
    assert np.array_equal(found.tensor("lm_head.weight"), found.tensor("model.embed_tokens.weight"))

    def halve_the_last_row(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"][-1] /= 2

    spoil(tmp_path / "out", halve_the_last_row)
    message = refusal(tmp_path / "out")
    assert "tie_word_embeddings is true, and lm_head.weight differs from model.embed_tokens.weight" in message
    assert "set tie_word_embeddings to false in config.json" in message


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.gate_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.post_feedforward_layernorm.weight",
        "lm_head.bias",
    ],
)
def test_extra_tensors_that_change_the_answer_are_refused(written: Path, name: str) -> None:
    spoil(written, lambda tensors: tensors.update({name: np.ones(2, np.float32)}))
    message = refusal(written)
    assert f"the model of config.json has no such: {name}" in message


@pytest.mark.parametrize("path", ["config.json", "renamed.json", ""])
def test_a_config_alone_is_a_model_without_weights(small: SeededCheckpoint, written: Path, path: str) -> None:
    (written / SINGLE_FILE).unlink()
    (written / "config.json").rename(written / (path or "config.json"))
    model = resolve_model(written / path)
    assert (model.has_weights, model.config) == (False, small.config)
    assert model.config_path == written / (path or "config.json")
    assert model.name == ("renamed" if "renamed" in path else written.name)
    with pytest.raises(CheckpointError, match="a configuration without weights"):
        model.tensor("lm_head.weight")


def test_untied_head_must_be_there(written: Path) -> None:
    spoil(written, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in refusal(written)


def test_missing_tensors_are_counted_and_the_first_few_named(written: Path) -> None:
    def drop(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if ".experts.1." in name]:
            del tensors[name]

    spoil(written, drop)
    message = refusal(written)
    assert "6 of 73 tensors are missing: model.layers.1.mlp.experts.1.gate_proj.weight; " in message
    assert message.endswith("; and 3 more")


def test_wrong_shape(written: Path) -> None:
    spoil(written, lambda tensors: tensors.update({EXPERT: np.ascontiguousarray(tensors[EXPERT].T)}))
    assert f"{EXPERT} is [8, 16], expected [16, 8]" in refusal(written)


def test_unsupported_dtype(written: Path) -> None:
    spoil(written, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].astype(np.int8)}))
    assert f"{EXPERT} is I8 (supported: F32, BF16, F16)" in refusal(written)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(written: Path, keep: int) -> None:
    path = written / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:keep])
    assert "truncated or corrupt safetensors file" in refusal(written)


@pytest.mark.parametrize("name", [SINGLE_FILE, "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_says_how_to_get_the_file(written: Path, name: str) -> None:
    (written / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:5e\nsize 7\n")
    read = load_tokenizer if name == "tokenizer.json" else open_checkpoint
    with pytest.raises(CheckpointError) as caught:
        read(written)
    assert str(caught.value).endswith(
        f"{name}: a pointer of Git LFS, not the file itself: `git lfs pull` gets it"
    )


def test_corrupt_header(written: Path) -> None:
    path = written / SINGLE_FILE
    data = bytearray(path.read_bytes())
    data[:8] = struct.pack("<Q", 1 << 60)
    path.write_bytes(data)
    assert "truncated or corrupt safetensors file" in refusal(written)


def test_missing_directory_and_file_instead_of_directory(tmp_path: Path, written: Path) -> None:
    assert refusal(tmp_path / "nowhere").endswith("nowhere: no such directory")
    assert "not a directory" in refusal(written / "config.json")


def test_directory_without_config_or_weights(tmp_path: Path, written: Path) -> None:
    assert "no config.json" in refusal(tmp_path)
    (written / SINGLE_FILE).unlink()
    assert "no safetensors files" in refusal(written)


def test_index_naming_an_absent_file(small: SeededCheckpoint, tmp_path: Path) -> None:
    write_checkpoint(small, tmp_path / "out", "f32", 3000)
    next((tmp_path / "out").glob("model-00002-*")).unlink()
    assert "files named in model.safetensors.index.json are missing: model-00002-of-" in refusal(
        tmp_path / "out"
    )


def test_index_naming_a_tensor_that_its_file_lacks(small: SeededCheckpoint, tmp_path: Path) -> None:
    write_checkpoint(small, tmp_path / "out", "f32", 3000)
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    index["weight_map"][EXPERT] = index["weight_map"]["model.norm.weight"]
    (tmp_path / "out" / INDEX_FILE).write_text(json.dumps(index))
    assert f"names tensors that are not there: {EXPERT} in " in refusal(tmp_path / "out")


@pytest.mark.parametrize(
    "file",
    [
        "/etc/passwd",
        "../other/model.safetensors",
        "a/../../model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "C:\\model.safetensors",
        "..",
        ".",
        "",
        "config.json",
        "model\0.safetensors",
        "\ud800.safetensors",
        "x" * 5000,
        "x" * 5000 + ".safetensors",
        "\u00e9" * 125 + ".safetensors",
    ],
)
def test_index_names_files_of_its_directory_alone(written: Path, tmp_path: Path, file: str) -> None:
    """Even where such a file is there, and would be taken."""
    (written / "sub").mkdir()
    for place in (written / "sub", tmp_path, tmp_path / "other"):
        place.mkdir(exist_ok=True)
        (place / SINGLE_FILE).write_bytes((written / SINGLE_FILE).read_bytes())
    names = sorted(load_file(written / SINGLE_FILE))
    (written / SINGLE_FILE).unlink()
    (written / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    message = refusal(written)
    assert "weight_map must name safetensors files in the same directory" in message
    assert len(message) < 500


def test_index_naming_a_link(written: Path, tmp_path: Path) -> None:
    """As in the cache of Hugging Face's hub."""
    (written / SINGLE_FILE).rename(tmp_path / "blob")
    (written / "model-00001.safetensors").symlink_to(tmp_path / "blob")
    names = load_file(tmp_path / "blob")
    (written / INDEX_FILE).write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model-00001.safetensors")})
    )
    found = open_checkpoint(written).tensor("model.norm.weight")
    assert np.array_equal(found, names["model.norm.weight"])


def test_index_of_too_many_tensors(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "MAX_INDEXED", 10)
    (written / SINGLE_FILE).unlink()
    (written / INDEX_FILE).write_text(
        json.dumps({"weight_map": {str(i): "a.safetensors" for i in range(11)}})
    )
    assert refusal(written).endswith("weight_map may name 10 tensors, found 11")


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "\ud800"])
def test_a_path_that_no_directory_can_have(path: str) -> None:
    assert "no such directory" in refusal(Path(path))
    with pytest.raises(CheckpointError, match="neither a preset") as caught:
        resolve_model(path)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {"a": 1}}', "{", "[]"])
def test_broken_index(small: SeededCheckpoint, tmp_path: Path, index: str) -> None:
    write_checkpoint(small, tmp_path / "out", "f32", 3000)
    (tmp_path / "out" / INDEX_FILE).write_text(index)
    assert INDEX_FILE in refusal(tmp_path / "out")


def test_one_tensor_in_two_files(written: Path) -> None:
    (written / SINGLE_FILE).rename(written / "a.safetensors")
    save_file({"model.norm.weight": np.ones(16, np.float32)}, written / "b.safetensors")
    assert "model.norm.weight is in two files, a.safetensors and b.safetensors" in refusal(written)


def test_unknown_name(written: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor nonsense"):
        open_checkpoint(written).tensor("nonsense")


def test_size_in_memory(small: SeededCheckpoint) -> None:
    assert num_parameters(small.config) == sum(small.tensor(name).size for name in small.names())
    assert len(small.names()) == len(expected_tensors(small.config)) == 73


@given(st.data())
def test_damaged_headers_are_refused_or_harmless(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent)
        (directory / "config.json").write_text(json.dumps(SMALL))
        small = SeededCheckpoint("small", directory, load_config(directory), seed=7)
        write_checkpoint(small, directory, "bf16")
        content = bytearray((directory / SINGLE_FILE).read_bytes())
        header_end = 8 + int.from_bytes(content[:8], "little")
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
        (directory / SINGLE_FILE).write_bytes(content)
        try:
            found = open_checkpoint(directory)
        except CheckpointError as error:
            message = str(error)
        else:
            message = ""
            shapes = expected_tensors(found.config)
            assert all(found.tensor(name).shape == shape for name, shape in shapes.items())
        assert "\n" not in message


def test_a_file_that_is_cut_while_it_is_in_use(written: Path) -> None:
    """Pages of a mapped file that are not there any more would kill the process."""
    checkpoint = open_checkpoint(written)
    size = (written / SINGLE_FILE).stat().st_size
    os.truncate(written / SINGLE_FILE, 1)
    with pytest.raises(CheckpointError, match=f"cut from {size} to 1 bytes while it was in use"):
        checkpoint.tensor(EXPERT)
