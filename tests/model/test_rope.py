"""Rotary tables: against the C library's cosine, against transformers, and the same bits everywhere."""

import hashlib
import math

import numpy as np
import pytest

from tests.model.hf_fixtures import ROPE_POSITIONS, Fixture, fixtures
from xdeepserve.model.config import load_config
from xdeepserve.model.rope import RopeConfig, YarnConfig, cos_sin, inverse_frequencies, rope_tables

YARN = YarnConfig(factor=4.0, original_max_position_embeddings=512, mscale=1.0, mscale_all_dim=1.0)


def test_cosine_is_the_c_librarys_to_a_last_place() -> None:
    x = np.concatenate([np.arange(200_000.0), np.arange(20_000) * math.pi / 16, np.linspace(0, 10, 9999)])
    cos, sin = cos_sin(x)
    assert np.abs(cos - np.cos(x)).max() < 2.5e-16
    assert np.abs(sin - np.sin(x)).max() < 2.5e-16


@pytest.mark.parametrize("fixture", fixtures(), ids=lambda fixture: fixture.name)
def test_tables_and_softmax_scale_are_those_of_transformers(fixture: Fixture, tmp_path) -> None:
    config = load_config(fixture.checkpoint_dir(tmp_path))
    cos, sin = rope_tables(config.rope, config.qk_rope_head_dim, ROPE_POSITIONS[-1] + 1)
    # transformers multiplies position and frequency in float32
    tolerance = 1e-6 + 6e-8 * np.array(ROPE_POSITIONS)[:, None]
    assert (np.abs(cos[list(ROPE_POSITIONS)] - fixture.expected["cos"]) <= tolerance).all()
    assert (np.abs(sin[list(ROPE_POSITIONS)] - fixture.expected["sin"]) <= tolerance).all()
    assert config.softmax_scale == pytest.approx(float(fixture.expected["softmax_scale"]), rel=1e-12)


def test_tables_are_prefixes_of_longer_tables(tiny_config) -> None:
    for short, long in zip(
        rope_tables(tiny_config.rope, tiny_config.qk_rope_head_dim, 100),
        rope_tables(tiny_config.rope, tiny_config.qk_rope_head_dim, 2048),
        strict=True,
    ):
        assert short.shape == (100, 8)
        assert short.dtype == np.float32
        assert np.array_equal(short, long[:100])


def test_tables_are_the_same_bits_on_every_machine(tiny_config) -> None:
    digest = hashlib.sha256(
        b"".join(
            table.tobytes() for table in rope_tables(tiny_config.rope, tiny_config.qk_rope_head_dim, 2048)
        )
    ).hexdigest()
    assert digest[:16] == "8996a8a015ae09d9"


def test_plain_frequencies_are_powers_of_theta() -> None:
    frequencies = inverse_frequencies(RopeConfig(theta=10000.0), 8)
    assert frequencies.tolist() == [1.0, 0.1, 0.01, 0.001]


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain = inverse_frequencies(RopeConfig(theta=10000.0), 64)
    yarn = inverse_frequencies(RopeConfig(theta=10000.0, yarn=YARN), 64)
    assert yarn[0] == plain[0]
    assert yarn[-1] == plain[-1] / 4
    assert (np.diff(plain / yarn) >= 0).all()


def test_table_scale_follows_transformers_rules() -> None:
    def scale(**changes: float) -> float:
        return YarnConfig(factor=40.0, original_max_position_embeddings=64, **changes).table_scale

    m = 0.1 * math.log(40) + 1
    assert scale(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert scale() == pytest.approx(m)
    assert scale(mscale=1.0) == pytest.approx(m)
    assert scale(mscale_all_dim=1.0) == pytest.approx(m)
    assert scale(mscale=0.707, mscale_all_dim=1.0) == pytest.approx((0.0707 * math.log(40) + 1) / m)
    assert scale(attention_factor=1.25, mscale=3.0) == 1.25
