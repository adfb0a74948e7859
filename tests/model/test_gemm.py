"""Matrix products give the bits of their NumPy twins, in any shape and shared by any workers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.bits import F32, assert_same_bits, few, normal, seeds
from tests.model.tools import shares, unpack_f32
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.kernels.gemm import CHUNK
from xdeepserve.model.kernels.gemm_int8 import rows_near
from xdeepserve.model.kernels.grid import shrink_groups
from xdeepserve.model.packing import (
    pack_f32,
    pack_int8,
    packed_shape_f32,
    packed_shape_int8,
)


def unpack_int8(packed: np.ndarray, n: int, k: int) -> np.ndarray:
    """The inverse of pack_int8: uint8 [..., groups, K / 4, 16, 4] -> int8 [..., n, k]."""
    groups = np.moveaxis(packed ^ np.uint8(128), -3, -2)
    *lead, num_groups, columns, steps, depth = groups.shape
    flat = np.ascontiguousarray(groups).view(np.int8).reshape(*lead, num_groups * columns, steps * depth)
    return np.ascontiguousarray(flat[..., :n, :k])


@few
@given(seeds, st.integers(1, 9), st.integers(1, 130), st.integers(1, 70))
def test_matmul(seed: int, m: int, kk: int, n: int) -> None:
    x, w = normal(seed, m, kk), normal(seed + 1, kk, n)
    out, packed = np.empty((m, n), F32), pack_f32(w).ravel()
    k.matmul(out, x, packed)
    assert_same_bits(out, c.matmul(x, w))
    k.matmul_blocked(out, x, packed)
    assert_same_bits(out, c.matmul_blocked(x, w))


@pytest.mark.parametrize("rows", [7, 8, 15, 37])
@pytest.mark.parametrize("depth", [CHUNK - 2, CHUNK, CHUNK + 1, 2 * CHUNK + 4])
def test_chunks_of_many_rows(rows: int, depth: int) -> None:
    x, w = normal(1, rows, depth), normal(2, depth, 21)
    out = np.full((rows, 21), np.nan, F32)
    k.matmul(out, x, pack_f32(w).ravel())
    assert_same_bits(out, c.matmul(x, w))


@few
@given(seeds, st.integers(1, 7), st.integers(1, 30), st.integers(1, 200), st.integers(1, 5))
def test_workers_share_a_gemm_by_columns(seed: int, m: int, kk: int, n: int, workers: int) -> None:
    x, w = normal(seed, m, kk), normal(seed + 1, kk, n)
    (q, s), (wq, ws) = c.quantize_rows(x), c.quantize_rows(np.ascontiguousarray(w.T))
    out, out_int8 = np.full((m, n), np.nan, F32), np.full((m, n), np.nan, F32)
    for first, last in shares(n, workers):
        k.matmul(out, x, pack_f32(w).ravel(), first, last)
        k.matmul_int8(out_int8, q, s, pack_int8(wq).ravel(), ws, first, last)
    assert_same_bits(out, c.matmul(x, w))
    assert_same_bits(out_int8, c.matmul_int8(q, s, wq, ws))


@few
@given(seeds, st.integers(1, 3), st.integers(1, 40), st.integers(1, 40))
def test_packing_loses_nothing(seed: int, stack: int, kk: int, n: int) -> None:
    w = normal(seed, stack, kk, n)
    assert pack_f32(w).shape == (stack, *packed_shape_f32(kk, n))
    assert_same_bits(unpack_f32(pack_f32(w), n), w)
    q = np.random.default_rng(seed).integers(-128, 128, (stack, n, kk)).astype(np.int8)
    assert pack_int8(q).shape == (stack, *packed_shape_int8(kk, n))
    assert_same_bits(unpack_int8(pack_int8(q), n, kk), q)


def test_extreme_bytes_do_not_overflow() -> None:
    """The largest sums that int8 allows, which an instruction that saturates would cut off."""
    q, w = np.full((2, 1024), -128, np.int8), np.full((20, 1024), -128, np.int8)
    q[1], w[::2] = 127, 127
    ones, out = np.ones(20, F32), np.empty((2, 20), F32)
    k.matmul_int8(out, q, ones[:2], pack_int8(w).ravel(), ones)
    assert_same_bits(out, c.matmul_int8(q, ones[:2], w, ones))
    assert out[0, 1] == 128 * 128 * 1024


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
    k.matmul_int8(out, q, s, pack_int8(wq).ravel(), ws)
    assert_same_bits(out, c.matmul_int8(q, s, wq, ws))
    exact = (q.astype(np.int64) @ wq.astype(np.int64).T).astype(F32) * s[:, None] * ws[None]
    assert_same_bits(out, exact)


def test_rows_do_not_depend_on_their_batch() -> None:
    x, w = normal(9, 17, 96), normal(10, 96, 33)
    whole, single = np.empty((17, 33), F32), np.empty((1, 33), F32)
    packed = pack_f32(w).ravel()
    k.matmul(whole, x, packed)
    for row in range(17):
        k.matmul(single, x[row : row + 1], packed)
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
        k.grouped_matmul_int8(out, q, s, offsets, pack_int8(wq).ravel(), ws.ravel())
        expected = [c.matmul_int8(*c.quantize_rows(x[i : i + 1]), wq[e], ws[e])[0] for i, e in enumerate(idx)]
    else:
        k.grouped_matmul(out, grouped, offsets, pack_f32(w).ravel())
        expected = [c.matmul(x[i : i + 1], w[e])[0] for i, e in enumerate(idx)]
    k.scatter_rows(back, out, order)
    assert_same_bits(back, np.array(expected, F32).reshape(rows, 10))


@few
@given(
    seeds, st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 200), st.integers(1, 5),
    st.booleans(),
)  # fmt: skip
def test_a_static_grid_makes_the_same_bits(
    seed: int, sizes: list[int], n: int, workers: int, is_int8: bool
) -> None:
    """Whatever groups are empty, however many workers there are; each output is written by one of them."""
    rows, depth = sum(sizes), 9
    bounds = np.cumsum([0, *sizes], dtype=np.int32)
    x, w = normal(seed, rows, depth), normal(seed + 1, len(sizes), depth, n)
    whole, out, owners = (np.empty((rows, n), F32) for _ in range(3))
    owners[:] = 0
    if is_int8:
        wq, ws = c.quantize_rows(np.ascontiguousarray(w.transpose(0, 2, 1)))
        args = (*c.quantize_rows(x), bounds, pack_int8(wq).ravel(), ws.ravel())
        grouped, grid = k.grouped_matmul_int8, k.grid_matmul_int8
    else:
        args = (x, bounds, pack_f32(w).ravel())
        grouped, grid = k.grouped_matmul, k.grid_matmul
    grouped(whole, *args)
    scratch = np.empty(k.grid_scratch(len(sizes), rows), F32)
    for worker in range(workers):
        out[:] = np.nan
        grid(out, *args, scratch, worker, workers)
        mine = ~np.isnan(out)
        assert_same_bits(out[mine], whole[mine])
        owners += mine
    assert (owners == 1).all()


def test_many_rows_are_computed_some_at_a_time() -> None:
    """INT8 rows of a group that do not fit into the second-level cache are tiles of their own."""
    rows, depth, n = 200, 4096, 33
    assert rows > rows_near.py_func(depth)
    q, s = c.quantize_rows(normal(3, rows, depth))
    wq, ws = c.quantize_rows(normal(4, 2, n, depth))
    bounds = np.array([0, rows - 1, rows], np.int32)
    args = (q, s, bounds, pack_int8(wq).ravel(), ws.ravel())
    whole, out = np.empty((rows, n), F32), np.empty((rows, n), F32)
    k.grouped_matmul_int8(whole, *args)
    for worker in range(3):
        k.grid_matmul_int8(out, *args, np.empty(k.grid_scratch(2, rows), F32), worker, 3)
    assert_same_bits(out, whole)


def test_a_grid_looks_at_groups_with_rows_alone() -> None:
    bounds, active = np.array([0, 0, 2, 2, 2, 3, 3], np.int32), np.empty(6, np.int32)
    assert shrink_groups.py_func(active, bounds) == 2
    assert active[:2].tolist() == [1, 4]


@few
@given(seeds, st.integers(1, 9), st.integers(1, 4), st.integers(1, 20), st.integers(1, 40))
def test_a_matrix_per_head(seed: int, rows: int, heads: int, nope: int, rank: int) -> None:
    q, w_uk = normal(seed, rows, heads, nope + 4), normal(seed + 1, heads, nope, rank)
    q_lat = np.empty((rows, heads * rank), F32)
    k.matmul_heads(q_lat, q.reshape(rows, -1), pack_f32(w_uk).ravel(), heads, nope)
    expected = c.matmul(np.ascontiguousarray(q[..., :nope].transpose(1, 0, 2)), w_uk).transpose(1, 0, 2)
    assert_same_bits(q_lat, np.ascontiguousarray(expected).reshape(rows, -1))
