"""Every Numba kernel gives the bits of its NumPy twin."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k

F32 = np.float32
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 40)
few = settings(max_examples=25)


def normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(F32)


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()


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


def test_round_bf16_is_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF], np.uint32)
    expected = np.array([0x3F800000, 0x3F820000, 0x3F810000, 0xBF800000], np.uint32)
    assert_same_bits(c.round_bf16(bits.view(F32)), expected.view(F32))


@few
@given(seeds, sizes, st.integers(1, 100))
def test_rms_norm_and_lane_sum(seed: int, rows: int, width: int) -> None:
    x, w = normal(seed, rows, width), normal(seed + 1, width)
    out = np.empty_like(x)
    k.rms_norm(out, x, w, 1e-6)
    assert_same_bits(out, c.rms_norm(x, w, 1e-6))
    assert F32(k.lane_sum(x[0])) == c.lane_sum(x[0])


def test_lane_sum_is_sixteen_lanes_then_a_tree() -> None:
    x = normal(3, 37)
    lanes = [F32(0)] * 16
    for i, value in enumerate(x):
        lanes[i % 16] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    assert c.lane_sum(x) == lanes[0]


@few
@given(seeds, st.integers(1, 9), st.integers(1, 130), st.integers(1, 70))
def test_matmul(seed: int, m: int, kk: int, n: int) -> None:
    x, w = normal(seed, m, kk), normal(seed + 1, kk, n)
    out = np.empty((m, n), F32)
    k.matmul(out, x, w)
    assert_same_bits(out, c.matmul(x, w))
    k.matmul_blocked(out, x, w)
    assert_same_bits(out, c.matmul_blocked(x, w))


def test_matmul_ascends_in_k_with_two_roundings() -> None:
    x, w = normal(5, 1, 50), normal(6, 50, 1)
    total = F32(0)
    for i in range(50):
        total = F32(total + F32(x[0, i] * w[i, 0]))
    assert c.matmul(x, w)[0, 0] == total


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_row_parallel_sums_do_not_depend_on_tp(tp: int) -> None:
    x, w = normal(7, 3, 64), normal(8, 64, 5)
    per_rank = c.TP_BLOCKS // tp
    partial = []
    for rank in range(tp):
        parts = []
        for block in range(rank * per_rank, (rank + 1) * per_rank):
            lo, hi = c.tp_block(64, block)
            parts.append(c.matmul(x[:, lo:hi], w[lo:hi]))
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        partial.append(parts[0])
    while len(partial) > 1:
        partial = [a + b for a, b in zip(partial[::2], partial[1::2], strict=True)]
    assert_same_bits(partial[0], c.matmul_blocked(x, w))


@few
@given(
    seeds, st.integers(1, 9), st.integers(1, 130), st.integers(1, 70), st.sampled_from([0.0, 1e-20, 1.0, 1e4])
)
def test_int8(seed: int, m: int, kk: int, n: int, scale: float) -> None:
    x, w = normal(seed, m, kk, scale=scale), normal(seed + 1, n, kk)
    q, s = np.empty((m, kk), np.int8), np.empty(m, F32)
    k.quantize_rows(q, s, x)
    expected_q, expected_s = c.quantize_rows(x)
    assert_same_bits(q, expected_q)
    assert_same_bits(s, expected_s)
    assert np.abs(q.astype(int)).max() <= 127
    wq, ws = c.quantize_rows(w)
    out = np.empty((m, n), F32)
    k.matmul_int8(out, q, s, wq, ws)
    assert_same_bits(out, c.matmul_int8(q, s, wq, ws))
    exact = (q.astype(np.int64) @ wq.astype(np.int64).T).astype(F32) * s[:, None] * ws[None]
    assert_same_bits(out, exact)


def test_rows_do_not_depend_on_their_batch() -> None:
    x, w = normal(9, 17, 96), normal(10, 96, 33)
    whole, single = np.empty((17, 33), F32), np.empty((1, 33), F32)
    k.matmul(whole, x, w)
    for row in range(17):
        k.matmul(single, x[row : row + 1], w)
        assert_same_bits(single[0], whole[row])


@few
@given(seeds, st.integers(0, 30), st.integers(1, 6), st.booleans())
def test_grouped_matmul(seed: int, rows: int, experts: int, is_int8: bool) -> None:
    rng = np.random.default_rng(seed)
    idx = rng.integers(0, experts, rows).astype(np.int32)
    order, offsets = np.empty(rows, np.int32), np.empty(experts + 1, np.int32)
    k.group_rows(order, offsets, idx)
    assert order.tolist() == np.argsort(idx, kind="stable").tolist()
    assert offsets.tolist() == [0, *np.cumsum(np.bincount(idx, minlength=experts)).tolist()]
    x, w = normal(seed, rows, 24), normal(seed + 1, experts, 24, 10)
    grouped = np.empty_like(x)
    k.gather_rows(grouped, x, order)
    out, back = np.empty((rows, 10), F32), np.empty((rows, 10), F32)
    if is_int8:
        wq, ws = c.quantize_rows(np.ascontiguousarray(w.transpose(0, 2, 1)))
        q, s = c.quantize_rows(grouped)
        k.grouped_matmul_int8(out, q, s, offsets, wq, ws)
        expected = [c.matmul_int8(*c.quantize_rows(x[i : i + 1]), wq[e], ws[e])[0] for i, e in enumerate(idx)]
    else:
        k.grouped_matmul(out, grouped, offsets, w)
        expected = [c.matmul(x[i : i + 1], w[e])[0] for i, e in enumerate(idx)]
    k.scatter_rows(back, out, order)
    assert_same_bits(back, np.array(expected, F32).reshape(rows, 10))


@few
@given(seeds, st.integers(1, 6), st.integers(1, 5), st.integers(1, 12), st.integers(1, 12))
def test_rope_heads(seed: int, rows: int, heads: int, nope: int, half: int) -> None:
    x = normal(seed, rows, heads, nope + 2 * half)
    cos, sin = normal(seed + 1, 50, half), normal(seed + 2, 50, half)
    positions = np.random.default_rng(seed).integers(0, 50, rows).astype(np.int32)
    expected = x.copy()
    expected[..., nope:] = c.rope(x[..., nope:], cos[positions][:, None], sin[positions][:, None])
    k.rope_heads(x, positions, cos, sin)
    assert_same_bits(x, expected)


@few
@given(
    seeds,
    st.integers(1, 5),
    st.integers(1, 90),
    st.sampled_from([16, 32]),
    st.booleans(),
    st.sampled_from([24, 40]),
)
def test_attention_over_pages(
    seed: int, heads: int, context: int, size: int, is_int8: bool, rank: int
) -> None:
    rng = np.random.default_rng(seed)
    rope, nope, num_blocks = 8, 12, 9
    latent, k_pe = normal(seed, context, rank), normal(seed + 1, context, rope)
    table = rng.permutation(num_blocks)[: -(-context // size)].astype(np.int32)
    slots = np.array([table[p // size] * size + p % size for p in range(context)], np.int32)
    c_cache = np.full((num_blocks, size, rank), 77, np.int8 if is_int8 else F32)
    pe_cache = np.full((num_blocks, size, rope), 77, F32)
    if is_int8:
        s_cache = np.full((num_blocks, size), 77, F32)
        k.append_kv_int8(c_cache, s_cache, pe_cache, slots, latent, k_pe)
        seen, scale = c.quantize_rows(latent)
    else:
        s_cache = np.empty((0, 0), F32)
        k.append_kv(c_cache, pe_cache, slots, latent, k_pe)
        seen, scale = latent, None
    positions = np.unique(rng.integers(0, context, 4)).astype(np.int32)
    rows = len(positions)
    q_lat, q = normal(seed + 2, rows, heads, rank), normal(seed + 3, rows, heads, nope + rope)
    out = np.empty_like(q_lat)
    tables = np.stack([np.zeros_like(table), table])
    k.attention(out, q_lat, q, np.ones(rows, np.int32), positions, c_cache, s_cache, pe_cache, tables, 0.11)
    for row, position in enumerate(positions):
        n = position + 1
        expected = c.attention(
            q_lat[row], q[row, :, nope:], seen[:n], None if scale is None else scale[:n], k_pe[:n], 0.11
        )
        assert_same_bits(out[row], expected)


@few
@given(seeds, st.integers(1, 4), st.integers(1, 4), st.integers(1, 20), st.integers(1, 20))
def test_absorption(seed: int, rows: int, heads: int, nope: int, rank: int) -> None:
    q, w_uk = normal(seed, rows, heads, nope + 4), normal(seed + 1, heads, nope, rank)
    q_lat = np.empty((rows, heads, rank), F32)
    k.absorb_query(q_lat, q, w_uk)
    expected = c.matmul(np.ascontiguousarray(q[..., :nope].transpose(1, 0, 2)), w_uk).transpose(1, 0, 2)
    assert_same_bits(q_lat, np.ascontiguousarray(expected))
    w_uv = normal(seed + 2, heads, rank, 5)
    out = np.empty((rows, heads, 5), F32)
    k.project_value(out, q_lat, w_uv)
    expected = c.matmul(np.ascontiguousarray(q_lat.transpose(1, 0, 2)), w_uv).transpose(1, 0, 2)
    assert_same_bits(out, np.ascontiguousarray(expected))


def test_absorbed_attention_is_the_naive_form() -> None:
    """The textbook MLA, which builds keys and values per head, agrees within rounding."""
    heads, nope, rope, rank, v, context = 3, 8, 4, 16, 6, 20
    q_nope, q_pe = normal(1, heads, nope), normal(2, heads, rope)
    latent, k_pe = normal(3, context, rank), normal(4, context, rope)
    w_uk, w_uv = normal(5, heads, nope, rank), normal(6, heads, rank, v)
    q_lat = np.einsum("hn,hnr->hr", q_nope, w_uk).astype(F32)
    absorbed = np.einsum("hr,hrv->hv", c.attention(q_lat, q_pe, latent, None, k_pe, 0.2), w_uv)
    keys = np.einsum("tr,hnr->htn", latent, w_uk)
    scores = (np.einsum("hn,htn->ht", q_nope, keys) + q_pe @ k_pe.T) * 0.2
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    naive = np.einsum("ht,htv->hv", p, np.einsum("tr,hrv->htv", latent, w_uv))
    np.testing.assert_allclose(absorbed, naive, rtol=2e-4, atol=2e-4)


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
    k.combine(out, expert_out, weights, np.empty((0, 0), F32) if shared is None else shared)
    assert_same_bits(out, c.combine(expert_out, weights, shared))
