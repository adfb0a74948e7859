"""Each technique of post-training quantisation: what it promises, on arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.model.canonical import quantize_rows
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import resolve_model
from xdeepserve.quant.clipping import clip_factors
from xdeepserve.quant.compensation import compensate
from xdeepserve.quant.forward import attend, rms_norm
from xdeepserve.quant.gptq import gptq, hessian
from xdeepserve.quant.rotation import rotate_latent, rotate_values, rotation
from xdeepserve.quant.rotation_search import AttentionWeights, rotate_where_it_helps
from xdeepserve.quant.rounding import (
    channel_scale,
    dequantize,
    quantized_rows,
    relative_error,
    round_weight,
)
from xdeepserve.quant.smoothquant import ALPHAS, search_scale, smoothing_scale, w8a8_error

SEEDS = st.integers(0, 2**32 - 1)


def correlated(rng: np.random.Generator, rows: int, size: int, outliers: int = 0) -> np.ndarray:
    """Activations whose channels depend on each other; `outliers` of them are 40 times as large."""
    x = rng.normal(size=(rows, size // 2)) @ rng.normal(size=(size // 2, size)) / np.sqrt(size / 2)
    x += 0.3 * rng.normal(size=x.shape)
    x[:, :outliers] *= 40
    return x.astype(np.float32)


def output_error(w: np.ndarray, q: np.ndarray, scale: np.ndarray, x: np.ndarray) -> float:
    return relative_error(x @ dequantize(q, scale).T, x @ w.T)


@given(SEEDS)
def test_rounding_is_the_engines_own(seed: int) -> None:
    w = np.random.default_rng(seed).normal(size=(5, 24)).astype(np.float32)
    w[1] = 0
    scale = channel_scale(w)
    q, expected_scale = quantize_rows(w)
    assert np.array_equal(scale, expected_scale)
    assert np.array_equal(round_weight(w, scale), q)


def test_integers_stay_symmetric() -> None:
    w = np.array([[1.0, -1.0, 0.2]], np.float32)
    assert round_weight(w, np.float32([0.001])).tolist() == [[127, -127, 127]]


@given(SEEDS, st.sampled_from(ALPHAS))
def test_smoothing_changes_no_output(seed: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    x, w = correlated(rng, 20, 16, outliers=2), rng.normal(size=(8, 16)).astype(np.float32)
    s = smoothing_scale(np.abs(x).max(axis=0), [w], alpha)
    assert np.allclose((x / s) @ (w * s).T, x @ w.T, rtol=1e-3, atol=1e-4)


def test_smoothing_evens_the_channels_out() -> None:
    rng = np.random.default_rng(0)
    x, w = correlated(rng, 200, 32, outliers=2), rng.normal(size=(16, 32)).astype(np.float32)
    s = smoothing_scale(np.abs(x).max(axis=0), [w], 0.5)
    before, after = np.abs(x).max(axis=0), np.abs(x / s).max(axis=0)
    assert before.max() / np.median(before) > 15
    assert after.max() / np.median(after) < 8


def test_dead_channels_keep_their_scale() -> None:
    x_max, w = np.float32([0, 1, 2]), np.float32([[1, 0, 3]])
    s = smoothing_scale(x_max, [w], 0.5)
    assert s[0] == 1
    assert s[1] == 1
    assert np.isfinite(s).all()


@given(SEEDS, st.integers(0, 3))
def test_scale_search_never_loses_against_not_smoothing(seed: int, outliers: int) -> None:
    rng = np.random.default_rng(seed)
    x = correlated(rng, 64, 16, outliers)
    weights = [rng.normal(size=(n, 16)).astype(np.float32) for n in (8, 12)]
    plain = w8a8_error(x, weights, np.ones(16, np.float32))
    one = w8a8_error(x, weights, search_scale(x, weights, (0.5,))[0])
    many = w8a8_error(x, weights, search_scale(x, weights, ALPHAS)[0])
    assert many <= one <= plain


def test_smoothing_pays_with_outliers() -> None:
    rng = np.random.default_rng(1)
    x, w = correlated(rng, 200, 32, outliers=2), rng.normal(size=(16, 32)).astype(np.float32)
    plain = w8a8_error(x, [w], np.ones(32, np.float32))
    assert w8a8_error(x, [w], search_scale(x, [w], (0.5,))[0]) < plain / 4


@given(SEEDS)
def test_gptq_beats_rounding_on_correlated_inputs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = correlated(rng, 300, 24), rng.normal(size=(10, 24)).astype(np.float32)
    scale = channel_scale(w)
    assert output_error(w, gptq(w, hessian(x), scale), scale, x) < 0.9 * output_error(
        w, round_weight(w, scale), scale, x
    )


def test_gptq_in_blocks_is_gptq_column_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    x, w = correlated(rng, 300, 40), rng.normal(size=(10, 40)).astype(np.float32)
    scale, h = channel_scale(w), hessian(x)
    whole = gptq(w, h, scale)
    monkeypatch.setattr("xdeepserve.quant.gptq.BLOCK", 7)
    assert np.array_equal(gptq(w, h, scale), whole)


def test_gptq_of_independent_inputs_is_rounding() -> None:
    w = np.random.default_rng(3).normal(size=(6, 12)).astype(np.float32)
    scale = channel_scale(w)
    assert np.array_equal(gptq(w, np.diag(np.arange(1.0, 13)), scale), round_weight(w, scale))


def test_gptq_rounds_dead_inputs_and_survives_no_inputs() -> None:
    rng = np.random.default_rng(4)
    x, w = correlated(rng, 50, 12), rng.normal(size=(6, 12)).astype(np.float32)
    x[:, 3] = 0
    scale = channel_scale(w)
    assert np.array_equal(gptq(w, hessian(x), scale)[:, 3], round_weight(w, scale)[:, 3])
    assert np.array_equal(gptq(w, hessian(x[:0]), scale), round_weight(w, scale))


@given(SEEDS)
def test_clipping_is_at_least_as_good_as_not_clipping(seed: int) -> None:
    rng = np.random.default_rng(seed)
    w, energy = rng.standard_t(3, size=(8, 64)).astype(np.float32), rng.random(64)

    def error(factor: np.ndarray | float) -> np.ndarray:
        scale = channel_scale(w, factor)
        return np.square(w - dequantize(round_weight(w, scale), scale)) @ energy

    factors = clip_factors(w, energy)
    assert (error(factors) <= error(1.0)).all()
    assert (factors >= 0.6).all()
    assert (factors <= 1).all()


def test_clipping_gives_up_a_lone_outlier_that_hardly_matters() -> None:
    w = np.random.default_rng(5).normal(size=(1, 256)).astype(np.float32)
    w[0, 7] = 8
    energy = np.ones(256)
    energy[7] = 1e-6
    assert clip_factors(w, energy)[0] < 0.7


@pytest.mark.parametrize("size", [1, 6, 12, 16, 96])
def test_rotations_are_orthogonal_and_mix(size: int) -> None:
    r = rotation(size, seed=1)
    assert np.allclose(r @ r.T, np.eye(size))
    assert np.count_nonzero(r[0]) == size & -size
    if size > 1:
        assert not np.array_equal(r, rotation(size, seed=2))


@given(SEEDS)
def test_rotating_a_latent_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, norm, second = rng.normal(size=(8, 6)), rng.random(8) + 0.5, rng.normal(size=(5, 8))
    x = rng.normal(size=(7, 6))

    def run(a: np.ndarray, g: np.ndarray, b: np.ndarray) -> np.ndarray:
        y = x @ a.T
        return (y / np.sqrt(np.square(y).mean(-1, keepdims=True) + 1e-6) * g) @ b.T

    turned = run(*rotate_latent(first, norm, second, rotation(8, 3)))
    assert np.allclose(turned, run(first, norm, second), atol=1e-4)


@given(SEEDS)
def test_rotating_values_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, o_proj, latent = rng.normal(size=(3, 4, 6)), rng.normal(size=(5, 12)), rng.normal(size=(7, 6))
    turned, o_turned = rotate_values(values, o_proj, rotation(4, 3))
    expected = np.einsum("tc,hvc->thv", latent, values).reshape(7, 12) @ o_proj.T
    found = np.einsum("tc,hvc->thv", latent, turned).reshape(7, 12) @ o_turned.T
    assert np.allclose(found, expected, atol=1e-4)


def test_rotation_spreads_an_outlier() -> None:
    x = np.random.default_rng(6).normal(size=(100, 64)).astype(np.float32)
    x[:, 5] *= 50
    turned = (x @ rotation(64, 0)).astype(np.float32)
    assert relative_error(quantized_rows(turned), turned) < relative_error(quantized_rows(x), x)
    plain, spread = np.delete(x, 5, axis=1), np.delete(quantized_rows(x), 5, axis=1)
    assert relative_error(spread, plain) > 20 * relative_error(quantized_rows(turned), turned)


def test_compensation_undoes_a_systematic_error() -> None:
    rng = np.random.default_rng(7)
    x, w = correlated(rng, 400, 12), rng.normal(size=(6, 12)).astype(np.float32)
    seen = (x * np.linspace(0.9, 1.1, 12)).astype(np.float32)
    corrected = compensate(w, x, seen)
    assert relative_error(seen @ corrected.T, x @ w.T) < 0.1 * relative_error(seen @ w.T, x @ w.T)


def test_compensation_without_error_is_the_identity() -> None:
    rng = np.random.default_rng(8)
    x, w = correlated(rng, 40, 12), rng.normal(size=(6, 12)).astype(np.float32)
    assert np.array_equal(compensate(w, x, x), w)


def attention_weights(rng: np.random.Generator, config: ModelConfig) -> AttentionWeights:
    """Random matrices; what writes the query latent's first rows is far larger than the rest."""

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    c = config
    heads, hidden, rank = c.num_attention_heads, c.hidden_size, c.kv_lora_rank
    assert c.q_lora_rank is not None
    return AttentionWeights(
        q_a=draw(c.q_lora_rank, hidden),
        q_norm=np.ones(c.q_lora_rank, np.float32),
        q_b=draw(heads * c.qk_head_dim, c.q_lora_rank),
        kv_a=draw(rank + c.qk_rope_head_dim, hidden),
        kv_norm=np.ones(rank, np.float32),
        kv_b=draw(heads * (c.qk_nope_head_dim + c.v_head_dim), rank),
        o_proj=draw(hidden, heads * c.v_head_dim),
    )


def test_rotation_is_used_where_it_helps_and_changes_nothing_else() -> None:
    config, rng = resolve_model("tiny-random").config, np.random.default_rng(9)
    a, x = attention_weights(rng, config), rng.normal(size=(60, config.hidden_size)).astype(np.float32)
    assert a.q_a is not None
    assert a.q_norm is not None
    a.q_a[3] *= 60
    # Signs as inputs, and some of them as the latent: INT8 holds them exactly, but not what mixes them.
    x = np.sign(x)
    a.kv_a[: config.kv_lora_rank] = np.eye(config.kv_lora_rank, config.hidden_size)
    found = rotate_where_it_helps(a, x, config, [60], (), seed=1)
    assert found.q_a is not None
    assert found.q_norm is not None
    assert not np.array_equal(found.q_a, a.q_a)
    assert np.array_equal(found.kv_a, a.kv_a)

    def run(a: AttentionWeights) -> np.ndarray:
        assert a.q_a is not None
        assert a.q_norm is not None
        q = rms_norm(x @ a.q_a.T, a.q_norm, 1e-6) @ a.q_b.T
        return attend(config, q, x @ a.kv_a.T, a.kv_norm, a.kv_b, [60]) @ a.o_proj.T

    assert np.allclose(run(found), run(a), atol=1e-3 * np.abs(run(a)).max())
