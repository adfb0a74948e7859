"""Seeded weights and the presets: the same bits for ever, and alive enough to test with."""

import hashlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.bf16 import round_bf16
from xdeepserve.errors import CheckpointError
from xdeepserve.model.checkpoint import open_checkpoint
from xdeepserve.model.export import write_checkpoint
from xdeepserve.model.presets import TinyCheckpoint, resolve_model
from xdeepserve.model.seeded import hash_words, normal_tensor


def test_tiny_is_the_same_bits_for_ever(tiny: TinyCheckpoint) -> None:
    digest = hashlib.sha256()
    for name in tiny.names():
        digest.update(name.encode())
        digest.update(tiny.tensor(name).tobytes())
    # Golden: every digest of generated text rests on these weights.
    assert digest.hexdigest()[:16] == "f35f4dffde623098"


def test_tiny_survives_bf16_storage(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    write_checkpoint(tiny, tmp_path / "tiny", "bf16", max_shard_bytes=1 << 18)
    found = resolve_model(tmp_path / "tiny")
    assert found.config == tiny.config
    assert all(np.array_equal(found.tensor(name), tiny.tensor(name)) for name in tiny.names())
    assert {"tokenizer.json", "tokenizer_config.json"} <= {
        path.name for path in (tmp_path / "tiny").iterdir()
    }


def test_writing_a_checkpoint_over_itself_keeps_its_config(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    write_checkpoint(tiny, tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    write_checkpoint(open_checkpoint(tmp_path), tmp_path, max_shard_bytes=1 << 20)
    assert (tmp_path / "config.json").read_bytes() == before


def test_biases_norms_and_heads_are_not_trivial(tiny: TinyCheckpoint) -> None:
    bias = tiny.tensor("model.layers.2.mlp.gate.e_score_correction_bias")
    norm = tiny.tensor("model.layers.2.input_layernorm.weight")
    assert (bias != 0).sum() >= 15
    assert 0.9 < norm.mean() < 1.1
    assert norm.std() > 0.05
    assert not np.array_equal(
        tiny.tensor("model.layers.1.mlp.gate.weight"), tiny.tensor("model.layers.2.mlp.gate.weight")
    )


def test_mtp_shares_embedding_and_head(tiny: TinyCheckpoint) -> None:
    for own, main in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert np.array_equal(tiny.tensor(f"model.layers.4.{own}.weight"), tiny.tensor(f"{main}.weight"))


@pytest.mark.parametrize("name", ["tinny", "no/such/directory"])
def test_unknown_models_are_told_the_presets(name: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"neither a preset \(tiny, tiny-random, tiny-r1; .*\) nor a directory that is"
    ):
        resolve_model(name)


def test_hash_words_are_a_pinned_sequence() -> None:
    assert hash_words(384, "model.norm.weight", 4).tolist() == [1533131720, 260214641, 2581253184, 1122473481]
    assert len(np.unique(hash_words(0, "x", 100_000))) == 100_000


def test_longer_tensors_begin_with_shorter_ones() -> None:
    assert np.array_equal(normal_tensor(1, "x", (100,), 1.0)[:10], normal_tensor(1, "x", (10,), 1.0))


def test_normal_values_have_their_deviation_and_fit_bf16() -> None:
    values = normal_tensor(1, "x", (100, 1000), deviation=0.25, mean=1.0)
    assert values.mean() == pytest.approx(1.0, abs=0.005)
    assert values.std() == pytest.approx(0.25, rel=0.02)
    assert np.array_equal(values.astype(ml_dtypes.bfloat16).astype(np.float32), values)


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126),
        min_size=1,
    )
)
def test_rounding_is_ml_dtypes_rounding(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    assert np.array_equal(round_bf16(array), array.astype(ml_dtypes.bfloat16).astype(np.float32))
