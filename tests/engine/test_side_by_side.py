"""Rows of several dies side by side in lockstep: which dies go together, and what is left on each."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.lockstep import PRECISIONS, check_apart, check_colocated, variant
from xdeepserve.engine.run.lockstep.kernels.attention import AT_ONCE
from xdeepserve.engine.run.lockstep.kernels.heads import head_stage
from xdeepserve.engine.run.lockstep.kernels.side_by_side import next_dies
from xdeepserve.jit.compiling import njit
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.kernels.gemm import matmul
from xdeepserve.model.packing import pack_bf16, pack_f32


@njit
def groups_of_dies(cuts: np.ndarray) -> list[tuple[list[int], list[int], list[int]]]:
    found, first = [], 0
    while first < len(cuts):
        dies, first = next_dies(cuts, first, len(cuts))
        found.append((list(dies.which), list(dies.starts), list(dies.from_row)))
    return found


def test_dies_go_together_as_long_as_their_rows_are_few() -> None:
    rows = [0, 5, 0, AT_ONCE - 6, 1, 1, AT_ONCE + 9, 0, AT_ONCE, 0]
    cuts = np.array([[7, 7 + count] for count in rows])
    assert groups_of_dies(cuts) == [
        ([1, 3, 4], [0, 5, AT_ONCE - 1, AT_ONCE], [7, 7, 7]),
        ([5], [0, 1], [7]),
        ([6], [0, AT_ONCE + 9], [7]),
        ([8], [0, AT_ONCE], [7]),
    ]
    assert groups_of_dies(cuts[:1]) == [([], [0], [])]


# Rows of q8 wider than those that are written over them later, in each phase that writes any.
WIDE = {"q_lora_rank": 160, "v_head_dim": 48}


@pytest.mark.thin(2)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_wide_rows_leave(precision: str, threads: int) -> None:
    model = variant(**WIDE)
    assert model.config.hidden_size < min(160, 48 * model.config.num_attention_heads)
    check_colocated(precision, "dies=3", "mtp=1", f"threads={threads}", model=model)
    check_apart(precision, (2, 2, 3, 1, 2), f"threads={threads}", model=model)


@pytest.mark.parametrize("exchange", ["pull", "push"])
def test_a_run_that_ends_with_a_dense_layer(exchange: str) -> None:
    model = variant(other_dense_layers=frozenset({3}))
    check_colocated("int8", "dies=3", f"exchange={exchange}", model=model)
    check_apart("int8", (2, 2, 3, 1, 2), f"exchange={exchange}", model=model)


@pytest.mark.thin(2)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_more_rows_than_go_together(precision: str, threads: int) -> None:
    """Prompts that fill a group of dies, and the rest, which is another."""
    prompts = [[5 + i, *range(10, 10 + 40 + i)] for i in range(7)]
    settings = ("dies=7", "scheduler.max_num_batched_tokens=64", f"threads={threads}")
    assert AT_ONCE < sum(map(len, prompts)) < 3 * AT_ONCE
    check_colocated(precision, *settings, prompts=prompts)


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_of_domains_and_microbatches(threads: int) -> None:
    prompts = [[5 + i, *range(10, 10 + i % 7)] for i in range(24)]
    check_apart("int8", (2, 4, 3, 1, 3), "mtp=1", f"threads={threads}", prompts=prompts)


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize(("rows", "depth", "n"), [(1, 64, 1000), (AT_ONCE + 3, 47, 40), (5, 8192, 150)])
@pytest.mark.parametrize("is_int8", [False, True])
def test_heads_of_many_dies(is_int8: bool, rows: int, depth: int, n: int, num: int) -> None:
    """Logits in any order of rows, and in columns that are not all near."""
    rng = np.random.default_rng(rows)
    x, w = rng.standard_normal((rows, depth)).astype("f4"), rng.standard_normal((depth, n)).astype("f4")
    expected = np.empty((rows, n), np.float32)
    if is_int8:
        packed = pack_bf16(c.factors(w)).ravel()
        k.matmul_exact(expected, x, packed)
    else:
        packed = pack_f32(w).ravel()
        matmul(expected, x, packed)
    out = np.full((rows + 1, n), np.nan, np.float32)
    addresses = out.ctypes.data + out.strides[0] * np.arange(rows)[::-1]
    for worker in range(num):
        head_stage(addresses, x, packed.ctypes.data, packed[:0], n, worker, num)
    assert np.array_equal(out[:rows][::-1], expected)
    assert np.isnan(out[rows]).all()
