"""The latent cache and attention over it give the bits of their NumPy twins."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.model.bits import F32, assert_same_bits, few, normal, seeds
from tests.model.tools import Pages
from xdeepserve.jit.compiling import uses_amx
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import scratch_size
from xdeepserve.model.kernels.mla_prefill import FARTHEST
from xdeepserve.model.packing import pack_bf16


@few
@given(seeds, st.integers(1, 6), st.integers(1, 5), st.integers(1, 12), st.integers(1, 12))
def test_rope_heads(seed: int, rows: int, heads: int, nope: int, half: int) -> None:
    x = normal(seed, rows, heads, nope + 2 * half)
    cos, sin = normal(seed + 1, 50, half), normal(seed + 2, 50, half)
    positions = np.random.default_rng(seed).integers(0, 50, rows).astype(np.int32)
    expected = x.copy()
    expected[..., nope:] = c.rope(x[..., nope:], cos[positions][:, None], sin[positions][:, None])
    k.rope_heads(x.reshape(rows, -1), heads, positions, cos, sin)
    assert_same_bits(x, expected)


# Magnitudes of latents, of RoPE's keys, of queries and of their RoPE parts: weights of values, scores and
# queries at the edge below which factors are zero, and a softmax whose weights reach as far.
EDGES = [
    (1.0, 1.0, 1.0, 1.0),
    (2.0**-42, 1.0, 1.0, 1.0),
    (1.0, 2.0**46, 1.0, 2.0**-46),
    (1.0, 1.0, 40.0, 1.0),
]


@few
@given(
    seeds,
    st.sampled_from([1, 3, 8, 16, 20, 40, 70]),
    st.integers(1, 150),
    st.sampled_from([16, 32]),
    st.sampled_from(["float", "int8", "int8 weights"]),
    st.sampled_from([(24, 8), (40, 10), (80, 16)]),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(EDGES),
)
@example(0, 16, 70, 16, "int8", (24, 8), 3, 1, EDGES[0])  # all of 48 lanes, which are no tile too many
@example(1, 3, 70, 16, "int8", (24, 8), 2, 1, EDGES[1])
@example(2, 3, 70, 16, "int8", (24, 8), 2, 1, EDGES[2])
@example(3, 3, 70, 16, "int8", (24, 8), 2, 1, EDGES[3])
def test_attention_over_pages(
    seed: int,
    heads: int,
    context: int,
    size: int,
    kind: str,
    dims: tuple[int, int],
    chunk: int,
    workers: int,
    magnitudes: tuple[float, float, float, float],
) -> None:
    """Two sequences with the same pages; of each, a few rows at its end, which share lanes."""
    (rank, rope), nope = dims, 12
    of_latents, of_keys, of_queries, of_rope = magnitudes
    pages = Pages(seed, context, size, rank, rope, kind != "float", of_latents, of_keys)
    int8_weights = kind == "int8 weights"
    positions = np.arange(max(0, context - chunk), context, dtype=np.int32)
    rows = len(positions)
    q_lat = normal(seed + 7, 2 * rows, heads * rank, scale=of_queries)
    q = normal(seed + 8, 2 * rows, heads * (nope + rope), scale=of_rope)
    out = np.empty_like(q_lat)
    scratch = np.full(scratch_size(context, rank, rope), np.nan, F32)
    seq_of = np.repeat(np.array([1, 2], np.int32), rows)
    tables = np.stack([np.full_like(pages.table, -1), pages.table, pages.table])
    for worker in range(workers):
        k.attention(
            out, q_lat, q, heads, rope, seq_of, np.tile(positions, 2), *pages.cache, tables, 0.11,
            int8_weights, scratch, worker, workers,
        )  # fmt: skip
    for row in range(2 * rows):
        q_pe = q[row].reshape(heads, -1)[:, nope:]
        expected = pages.attend(
            q_lat[row].reshape(heads, rank), q_pe, int(positions[row % rows]), int8_weights
        )
        assert_same_bits(out[row].reshape(heads, rank), expected)


@few
@given(
    seeds,
    st.integers(8, 70),
    st.integers(0, 70),
    st.integers(1, 5),
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from([(64, 32, 32), (128, 64, 32), (192, 32, 64)]),
    st.sampled_from([7, 16, 40, 70]),
    st.booleans(),
    st.sampled_from([1.0, 2.0**20, 2.0**45]),
)
def test_many_rows_on_a_matrix_unit(
    seed: int,
    rows: int,
    first: int,
    heads: int,
    size: int,
    dims: tuple[int, int, int],
    v_dim: int,
    int8_weights: bool,
    magnitude: float,
) -> None:
    """From queries to what heads make of values; where there is no matrix unit nothing is done."""
    (rank, nope, rope), context = dims, first + rows
    pages = Pages(seed, context, size, rank, rope, True, magnitude)
    q = normal(seed + 7, rows, heads * (nope + rope), scale=1 / magnitude)
    w_uk, w_uv = (
        c.factors(normal(seed + i, heads, *shape)) for i, shape in ((8, (nope, rank)), (9, (rank, v_dim)))
    )
    out, rubbish = np.full((rows, heads * v_dim), F32(7)), scratch_size(context, rank, rope)
    is_done = k.prefill(
        out, q, heads, rope, pack_bf16(w_uk).ravel(), pack_bf16(w_uv).ravel(),
        np.arange(first, context, dtype=np.int32), pages.table, *pages.cache, 0.11, int8_weights,
        np.full(rubbish, np.nan, F32),
    )  # fmt: skip
    assert is_done == uses_amx()
    if not is_done:
        assert np.all(out == 7)
        return
    for row in {0, rows // 2, rows - 1}:
        query = q[row].reshape(heads, -1)
        q_lat = [c.matmul_exact(c.factors(query[h : h + 1, :nope]), w_uk[h])[0] for h in range(heads)]
        o_lat = c.factors(pages.attend(np.stack(q_lat), query[:, nope:], first + row, int8_weights))
        expected = [c.matmul_exact(o_lat[h : h + 1], w_uv[h])[0] for h in range(heads)]
        assert_same_bits(out[row].reshape(heads, v_dim), np.stack(expected))


@pytest.mark.parametrize(
    ("rows", "rank", "nope", "rope", "first", "room"),
    [
        (7, 64, 32, 32, 0, 1), (20, 80, 32, 32, 0, 1), (20, 64, 16, 16, 0, 1), (20, 64, 32, 32, FARTHEST, 1),
        (20, 64, 32, 32, 0, 0),
    ],
)  # fmt: skip
def test_what_is_left_to_others(rows: int, rank: int, nope: int, rope: int, first: int, room: int) -> None:
    """Few rows, widths that are no whole tiles, far positions, and scratch memory that is too small."""
    pages, heads = Pages(1, rows, 16, rank, rope, True), 2
    w_uk, w_uv = np.zeros((heads, nope, rank), F32), np.zeros((heads, rank, 8), F32)
    out = np.full((rows, heads * 8), F32(7))
    assert not k.prefill(
        out, normal(2, rows, heads * (nope + rope)), heads, rope, pack_bf16(w_uk).ravel(),
        pack_bf16(w_uv).ravel(), np.arange(first, first + rows, dtype=np.int32), pages.table, *pages.cache,
        0.11, False, np.empty(room * scratch_size(first + rows, rank, rope), F32),
    )  # fmt: skip
    assert np.all(out == 7)


def test_absorbed_attention_is_the_naive_form() -> None:
    """The textbook MLA, which builds keys and values per head as prefill of CloudMatrix does, agrees within
    rounding."""
    heads, nope, rope, rank, v, context = 3, 8, 4, 16, 6, 20
    q_nope, q_pe = normal(1, heads, nope), normal(2, heads, rope)
    latent, k_pe = normal(3, context, rank), normal(4, context, rope)
    w_uk, w_uv = normal(5, heads, nope, rank), normal(6, heads, rank, v)
    q_lat = np.einsum("hn,hnr->hr", q_nope, w_uk).astype(F32)
    absorbed = np.einsum("hr,hrv->hv", c.attention(q_lat, q_pe, latent, None, k_pe, 0.2), w_uv)
    naive = c.unabsorbed_attention(q_nope, q_pe, latent, k_pe, w_uk, w_uv, 0.2)
    np.testing.assert_allclose(absorbed, naive, rtol=2e-4, atol=2e-4)
