"""The cache of keys and values, and attention over it, give the bits of their NumPy twins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.bits import F32, assert_same_bits, few, normal, seeds
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import cache_shape, scratch_size


@few
@given(
    seeds,
    st.sampled_from([(1, 1), (1, 8), (2, 3), (3, 20), (4, 1)]),
    st.integers(1, 150),
    st.sampled_from([16, 32]),
    st.booleans(),
    st.sampled_from([(16, 16), (20, 20), (10, 40), (64, 24)]),
    st.integers(1, 9),
    st.integers(1, 3),
)
def test_attention_over_pages_of_keys_and_values(
    seed: int,
    heads: tuple[int, int],
    context: int,
    size: int,
    is_int8: bool,
    dims: tuple[int, int],
    chunk: int,
    workers: int,
) -> None:
    """Heads of the cache have blocks of their own, beside rubbish; rows at the end share lanes."""
    (groups, shared), (depth, width) = heads, dims
    kv = normal(seed, context, groups * (depth + width))
    keys, values = np.split(kv, [groups * depth], axis=1)
    num_blocks = -(-context // size) + 2
    table = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)[: -(-context // size)]
    every = np.arange(context, dtype=np.int32)
    cache = (
        np.full(cache_shape(num_blocks * groups, size, width), np.uint8(77) if is_int8 else F32(np.nan)),
        np.full((num_blocks * groups, size) if is_int8 else (0, 0), np.nan, F32),
        np.full(cache_shape(num_blocks * groups, size, depth), np.nan, F32),
    )
    slots = table[every // size] * np.int32(size) + every % np.int32(size)
    k.append_heads(*cache, slots, np.ascontiguousarray(keys), kv, groups)
    positions = every[max(0, context - chunk) :]
    rows, scratch = len(positions), np.full(scratch_size(context, width, depth), np.nan, F32)
    q, seq_of = normal(seed + 1, rows, groups, shared, depth), np.zeros(rows, np.int32)
    for g in range(groups):
        mine, out = np.ascontiguousarray(q[:, g]).reshape(rows, -1), np.empty((rows, shared * width), F32)
        blocks = table[None] * np.int32(groups) + np.int32(g)
        for worker in range(workers):
            k.attention(
                out, np.empty((rows, 0), F32), mine, shared, depth, seq_of, positions, *cache, blocks, 0.17,
                False, scratch, worker, workers,
            )  # fmt: skip
        key, value = keys[:, g * depth : (g + 1) * depth], values[:, g * width : (g + 1) * width]
        v, v_scale = c.quantize_rows(value) if is_int8 else (value, None)
        for row, position in enumerate(positions):
            seen = slice(0, position + 1)
            scale = None if v_scale is None else v_scale[seen]
            expected = c.grouped_attention(q[row, g], key[seen], v[seen], scale, 0.17)
            assert_same_bits(out[row].reshape(shared, width), expected)


@pytest.mark.parametrize("is_int8", [False, True])
def test_it_is_attention_as_textbooks_have_it(is_int8: bool) -> None:
    q, key, value = normal(1, 4, 24), normal(2, 60, 24), normal(3, 60, 16)
    scores = q.astype(np.float64) @ key.T * 0.2
    p = np.exp(scores - scores.max(-1, keepdims=True))
    v, scale = c.quantize_rows(value) if is_int8 else (value, None)
    found = c.grouped_attention(q, key, v, scale, 0.2)
    assert np.abs(found - p @ value / p.sum(-1, keepdims=True)).max() < (0.02 if is_int8 else 1e-6)


@few
@given(seeds, st.integers(2, 70), st.integers(1, 6), st.booleans())
def test_a_router_of_all_experts_together(seed: int, experts: int, top_k: int, norm: bool) -> None:
    top_k = min(top_k, experts)
    logits = normal(seed, 40, experts, scale=3.0)
    logits[::3] = np.round(logits[::3])  # many ties
    idx, weights = np.empty((40, top_k), np.int32), np.empty((40, top_k), F32)
    k.gate(idx, weights, logits, np.empty(0, F32), 1, 1, norm, 1.0, 2, True)
    expected_idx, expected = c.gate(c.softmax(logits), np.empty(0, F32), 1, 1, top_k, norm, 1.0)
    assert_same_bits(idx, expected_idx)
    assert_same_bits(weights, expected)
    exact = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(-1, keepdims=True)
    chosen = np.sort(exact)[:, ::-1][:, :top_k]
    assert np.abs(weights - (chosen / chosen.sum(-1, keepdims=True) if norm else chosen)).max() < 1e-5
    assert all(logits[t, idx[t]].min() >= np.delete(logits[t], idx[t]).max(initial=-99) for t in range(40))
