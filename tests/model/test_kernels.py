"""Every Numba kernel gives the bits of its NumPy twin."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.runtime import rtsys
from numba.core.runtime._nrt_python import memsys_disable_stats, memsys_enable_stats

from tests.model.bits import F32, assert_same_bits, few, normal, seeds
from tests.model.tools import Pages
from xdeepserve.bf16 import from_bf16, round_bf16, to_bf16
from xdeepserve.jit import bf16 as fast_bf16
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import scratch_size

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
    activated = np.empty((rows, half), F32)
    k.swiglu(activated, x)
    assert_same_bits(activated, c.swiglu(x))
    out, y = np.empty_like(x), normal(seed + 1, rows, 2 * half)
    k.add(out, x, y)
    assert_same_bits(out, x + y)
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
    expected = c.rms_norm(x, w, 1e-6)
    assert_same_bits(out, expected)
    q, scale = np.empty(x.shape, np.int8), np.empty(rows, F32)
    k.rms_norm_quantize(out, q, scale, x, w, 1e-6)
    assert_same_bits(out, expected)
    expected_q, expected_scale = c.quantize_rows(expected)
    assert_same_bits(q, expected_q)
    assert_same_bits(scale, expected_scale)


def test_round_bf16_is_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF], np.uint32)
    expected = np.array([0x3F800000, 0x3F820000, 0x3F810000, 0xBF800000], np.uint32)
    assert_same_bits(round_bf16(bits.view(F32)), expected.view(F32))


def test_bf16_in_kernels_is_the_same() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 4096, np.uint32)
    special = [0, -0.0, np.inf, -np.inf, np.nan, 1.00390625, 1.01171875, 3.4e38, 1e-45]
    x = np.concatenate([bits.view(np.float32), np.array(special, np.float32)])
    packed = fast_bf16.to_bf16(x)
    assert np.array_equal(packed, to_bf16(x))
    assert_same_bits(fast_bf16.from_bf16(packed), from_bf16(packed))


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
    logits = normal(1, 60, experts)
    logits[::3] = np.round(logits[::3] * 2) / 2  # many ties
    scores = c.sigmoid(logits)
    bias = normal(2, experts, scale=2.0)
    bias[: experts // 2] = 0
    idx, weights = np.empty((60, top_k), np.int32), np.empty((60, top_k), F32)
    for best_of_group in (2, 1):
        k.gate(idx, weights, logits, bias, n_group, topk_group, norm, 2.5, best_of_group, False)
        expected_idx, expected_weights = c.gate(
            scores, bias, n_group, topk_group, top_k, norm, 2.5, best_of_group
        )
        assert_same_bits(idx, expected_idx)
        assert_same_bits(weights, expected_weights)
        assert all(len(set(row)) == top_k for row in idx.tolist())


def test_a_group_is_as_good_as_its_two_best_or_its_best() -> None:
    scores, none = np.array([[0.9, 0.1, 0.6, 0.5, 0.2, 0.3]], F32), np.empty(0, F32)
    assert c.gate(scores, none, 3, 1, 1, False, 1.0)[0].tolist() == [[2]]
    assert c.gate(scores, none, 3, 1, 1, False, 1.0, best_of_group=1)[0].tolist() == [[0]]


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
@given(seeds, st.integers(0, 5), st.integers(1, 8), st.booleans(), st.booleans())
def test_combine(seed: int, rows: int, top_k: int, has_shared: bool, is_bf16: bool) -> None:
    expert_out, weights = normal(seed, rows, top_k, 20), normal(seed + 1, rows, top_k)
    shared = normal(seed + 2, rows, 20) if has_shared else None
    h = normal(seed + 3, rows, 20)
    answers, shared_answer = expert_out, shared
    if is_bf16:
        answers = round_bf16(expert_out)
        shared_answer = None if shared is None else round_bf16(shared)
    expected = h + c.combine(answers, weights, shared_answer)
    given, elsewhere = np.empty((0, 0), F32) if shared is None else shared, h.copy()
    k.combine(h, expert_out.reshape(-1, 20), k.IN_ORDER, weights, given, is_bf16)
    assert_same_bits(h, expected)
    place = np.random.default_rng(seed).permutation(rows * top_k).astype(np.int32)
    shuffled = np.empty((rows * top_k, 20), F32)
    shuffled[place] = expert_out.reshape(-1, 20)
    k.combine(elsewhere, shuffled, place, weights, given, is_bf16)
    assert_same_bits(elsewhere, expected)


@few
@given(seeds, st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_gather_tokens(seed: int, rows: int, copies: int, has_scale: bool) -> None:
    x, scale = normal(seed, rows, 7), normal(seed + 1, rows if has_scale else 0)
    order = np.random.default_rng(seed).permutation(rows * copies).astype(np.int32)
    out, out_scale = np.empty((rows * copies, 7), F32), np.full(rows * copies, 9, F32)
    k.gather_tokens(out, out_scale, x, scale, order, copies)
    assert_same_bits(out, x[order // copies])
    assert_same_bits(out_scale, scale[order // copies] if has_scale else np.full(rows * copies, 9, F32))


def test_kernels_give_all_memory_back() -> None:
    """Parts of kernels count no references to arrays: what they must not do is to lose or to free one."""
    q, scale = np.ones((3, 8), np.int8), np.ones(3, F32)
    w, out = np.full(16 * 8, 129, np.uint8), np.empty((3, 16), F32)
    pages, scratch = Pages(1, 20, 16, 24, 8, is_int8=True), np.empty(scratch_size(20, 24, 8), F32)
    q_lat, query, latent = normal(2, 1, 2 * 24), normal(3, 1, 2 * 12), np.empty((1, 2 * 24), F32)
    zero, last, token = np.zeros(1, np.int32), np.full(1, 19, np.int32), np.empty(1, np.int32)
    keys = np.zeros(1, np.uint64)
    args = (pages.table[None], 0.1, True, scratch, 0, 1)

    def run() -> None:
        k.matmul_int8(out, q, scale, w, np.ones(16, F32))
        k.attention(latent, q_lat, query, 2, 8, zero, last, *pages.cache, *args)
        k.sample(token, q_lat, np.ones(1, F32), zero, np.ones(1), np.zeros(1), keys, keys, keys)

    run()
    memsys_enable_stats()
    try:
        before = rtsys.get_allocation_stats()
        run()
        after = rtsys.get_allocation_stats()
    finally:
        memsys_disable_stats()
    assert after.mi_alloc - before.mi_alloc == after.mi_free - before.mi_free > 0
    assert after.alloc - before.alloc == after.free - before.free > 0
    assert (out == 8.0).all()
