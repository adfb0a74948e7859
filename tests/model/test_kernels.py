"""Every Numba kernel gives the bits of its NumPy twin."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.bits import F32, assert_same_bits, few, normal, seeds
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k

sizes = st.integers(1, 40)


def test_exp_is_accurate_and_clamped() -> None:
    x = np.linspace(-87, 88, 100_001).astype(F32)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(c.exp(x) - exact) / exact) < 2e-7
    assert c.exp(np.array([0.0], F32)) == 1.0
    assert_same_bits(c.exp(np.array([-1e9, 1e9], F32)), c.exp(np.array([-87, 88], F32)))


@few
@given(seeds, sizes, sizes, st.sampled_from([0.1, 1.0, 30.0]))
def test_elementwise(seed: int, rows: int, half: int, scale: float) -> None:
    x = normal(seed, rows, 2 * half, scale=scale)
    out = np.empty_like(x)
    k.sigmoid(out, x)
    assert_same_bits(out, c.sigmoid(x))
    activated = np.empty((rows, half), F32)
    k.swiglu(activated, x)
    assert_same_bits(activated, c.swiglu(x))
    rounded = x.copy()
    k.round_bf16(rounded)
    assert_same_bits(rounded, c.round_bf16(x))
    k.add(out, x, rounded)
    assert_same_bits(out, x + rounded)
    q, q_scale = np.empty((rows, half), np.int8), np.empty(rows, F32)
    k.swiglu_quantize(q, q_scale, x)
    expected_q, expected_scale = c.quantize_rows(activated)
    assert_same_bits(q, expected_q)
    assert_same_bits(q_scale, expected_scale)


@few
@given(seeds, sizes, st.integers(1, 100))
def test_rms_norm(seed: int, rows: int, width: int) -> None:
    x, w = normal(seed, rows, width), normal(seed + 1, width)
    out = np.empty_like(x)
    k.rms_norm(out, x, w, 1e-6)
    assert_same_bits(out, c.rms_norm(x, w, 1e-6))


def test_round_bf16_is_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF], np.uint32)
    expected = np.array([0x3F800000, 0x3F820000, 0x3F810000, 0xBF800000], np.uint32)
    assert_same_bits(c.round_bf16(bits.view(F32)), expected.view(F32))


def test_lane_sum_is_sixteen_lanes_then_a_tree() -> None:
    x = normal(3, 37)
    lanes = [F32(0)] * 16
    for i, value in enumerate(x):
        lanes[i % 16] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    assert c.lane_sum(x) == lanes[0]


GATES = [(16, 4, 2, 4), (16, 1, 1, 3), (8, 8, 4, 4), (12, 3, 2, 8), (32, 8, 4, 8)]


@pytest.mark.parametrize(("experts", "n_group", "topk_group", "top_k"), GATES)
@pytest.mark.parametrize("norm", [True, False])
def test_gate(experts: int, n_group: int, topk_group: int, top_k: int, norm: bool) -> None:
    scores = c.sigmoid(normal(1, 60, experts))
    scores[::3] = np.round(scores[::3] * 4) / 4  # many ties
    bias = normal(2, experts, scale=2.0)
    bias[: experts // 2] = 0
    idx, weights = np.empty((60, top_k), np.int32), np.empty((60, top_k), F32)
    k.gate(idx, weights, scores, bias, n_group, topk_group, norm, 2.5)
    expected_idx, expected_weights = c.gate(scores, bias, n_group, topk_group, top_k, norm, 2.5)
    assert_same_bits(idx, expected_idx)
    assert_same_bits(weights, expected_weights)
    assert all(len(set(row)) == top_k for row in idx.tolist())


def test_gate_bias_selects_but_does_not_weigh() -> None:
    scores = np.array([[0.9, 0.8, 0.1, 0.2]], F32)
    bias = np.array([0, 0, 5, 0], F32)
    idx, weights = c.gate(scores, bias, 1, 1, 2, False, 1.0)
    assert idx.tolist() == [[2, 0]]
    assert_same_bits(weights, np.array([[0.1, 0.9]], F32))


def test_gate_masks_losing_groups_with_minus_infinity() -> None:
    """With a bias below -1 every choice is negative; a mask of 0 would let closed groups win."""
    scores = np.array([[0.9, 0.8, 0.7, 0.6, 0.2, 0.1, 0.3, 0.1]], F32)
    idx, _ = c.gate(scores, np.full(8, -3, F32), 4, 2, 4, True, 1.0)
    assert sorted(idx[0].tolist()) == [0, 1, 2, 3]


def test_gate_group_score_is_the_sum_of_the_top_two() -> None:
    scores = np.array([[0.9, 0.0, 0.0, 0.6, 0.5, 0.0]], F32)  # best single expert is in the losing group
    idx, _ = c.gate(scores, np.zeros(6, F32), 2, 1, 2, True, 1.0)
    assert idx.tolist() == [[3, 4]]


@few
@given(seeds, st.integers(0, 5), st.integers(1, 8), st.booleans())
def test_combine(seed: int, rows: int, top_k: int, has_shared: bool) -> None:
    expert_out, weights = normal(seed, rows, top_k, 20), normal(seed + 1, rows, top_k)
    shared = normal(seed + 2, rows, 20) if has_shared else None
    out = np.empty((rows, 20), F32)
    k.combine(out, expert_out.reshape(-1, 20), weights, np.empty((0, 0), F32) if shared is None else shared)
    assert_same_bits(out, c.combine(expert_out, weights, shared))
