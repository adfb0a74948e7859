"""The lightning indexer gives the bits of its NumPy twins; of equal scores the lowest positions win."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.bits import F32, assert_same_bits, few, normal, seeds
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.config import load_config
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.reference import Reference
from xdeepserve.model.seeded import SeededCheckpoint
from xdeepserve.model.weights import RECIPES, Recipe


@few
@given(seeds, st.integers(1, 5), st.integers(1, 70))
def test_layer_norm(seed: int, rows: int, size: int) -> None:
    x, w, b = normal(seed, rows, size), normal(seed + 1, size), normal(seed + 2, size)
    out = np.empty_like(x)
    k.layer_norm(out, x, w, b, 1e-6)
    assert_same_bits(out, c.layer_norm(x, w, b, 1e-6))
    exact = x.astype(np.float64) - x.mean(-1, dtype=np.float64)[:, None]
    exact = exact / np.sqrt((exact**2).mean(-1) + 1e-6)[:, None] * w + b
    assert np.abs(out - exact).max() < 1e-4
    k.layer_norm(x, x, w, b, 1e-6)
    assert_same_bits(x, out)


def chosen_by_kernel(
    q: np.ndarray, key: np.ndarray, weights: np.ndarray, size: int, top_k: int, seed: int, workers: int = 1
) -> np.ndarray:
    """For queries at the last positions, over shuffled pages whose other places hold rubbish."""
    context, depth = key.shape
    num_blocks = -(-context // size) + 2
    table = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)[: -(-context // size)]
    every = np.arange(context, dtype=np.int32)
    cache = np.full((num_blocks, size // 16, depth, 16), np.nan, F32)
    blocks, places = table[every // size], every % size
    cache[blocks, places // 16, :, places % 16] = key
    is_exact = bool((c.factors(key) == key).all())
    chosen = np.full((len(q), top_k), -1, np.int32)
    scratch = np.full(context, np.nan, F32)
    for worker in range(workers):
        k.choose_positions(
            chosen, q.reshape(len(q), -1), weights, np.zeros(len(q), np.int32), every[-len(q) :], cache,
            table[None], is_exact, scratch, worker, workers,
        )  # fmt: skip
    return chosen


@few
@given(
    seeds,
    st.integers(1, 150),
    st.sampled_from([16, 32, 48]),
    st.sampled_from([(1, 4), (3, 20), (4, 33), (2, 64)]),
    st.integers(1, 40),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
def test_chosen_positions(
    seed: int,
    context: int,
    size: int,
    dims: tuple[int, int],
    top_k: int,
    rows: int,
    is_exact: bool,
    has_ties: bool,
    workers: int,
) -> None:
    heads, depth = dims
    rows = min(rows, context)
    q, key, weights = (
        normal(seed, rows, heads, depth),
        normal(seed + 1, context, depth),
        normal(seed + 2, rows, heads),
    )
    if has_ties:  # few different keys, each of them many times
        key = key[np.random.default_rng(seed).integers(0, min(3, context), context)]
    if is_exact:
        q, key = c.factors(q), c.factors(key)
    found = chosen_by_kernel(q, key, weights, size, top_k, seed, workers)
    for row in range(rows):
        seen = context - rows + row + 1
        if seen <= top_k:
            assert (found[row] == -1).all()
            continue
        scores = c.index_scores(q[row], key[:seen], weights[row], is_exact)
        assert found[row].tolist() == c.top_positions(scores, top_k).tolist()
        assert np.sort(scores[found[row]])[0] >= np.delete(scores, found[row]).max()


def test_scores_are_those_of_the_paper() -> None:
    q, key, weights = normal(1, 4, 24), normal(2, 60, 24), normal(3, 4)
    products = np.maximum(q.astype(np.float64) @ key.T, 0)
    expected = weights.astype(np.float64) @ products / np.sqrt(24 * 4)
    assert np.abs(c.index_scores(q, key, weights, False) - expected).max() < 1e-5


@pytest.mark.parametrize("top_k", [1, 2, 5, 31, 32, 33])
def test_ties_go_to_the_lowest_position(top_k: int) -> None:
    """Scores of zero everywhere, some zeros negative; and one position that stands out."""
    key = np.ones((50, 4), F32)
    q = np.full((1, 2, 4), -1, F32)
    for sign in (1.0, -1.0):
        found = chosen_by_kernel(q, key, np.full((1, 2), sign, F32), 16, top_k, 7)
        assert found[0].tolist() == list(range(top_k))
    key[40] = -1.0
    found = chosen_by_kernel(q, key, np.ones((1, 2), F32), 16, top_k, 7)
    assert found[0].tolist() == [*range(top_k - 1), 40]


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("weights", [(np.inf, 1.0), (np.inf, -np.inf), (-np.inf, -1.0), (3e38, 3e38)])
@pytest.mark.parametrize("large", [1.0, 1e38])
def test_what_is_not_a_number_is_the_least(
    large: float, weights: tuple[float, float], is_exact: bool
) -> None:
    """Sums beyond float32, as no model has them: as many positions are chosen as of any other scores."""
    q, key, w = normal(1, 1, 2, 6) * F32(large), normal(2, 50, 6), np.array([weights], F32)
    if is_exact:
        q, key = c.factors(q), c.factors(key)
    with np.errstate(all="ignore"):
        found = chosen_by_kernel(q, key, w, 16, 9, 7)
        scores = c.index_scores(q[0], key, w[0], is_exact)
    assert found[0].tolist() == c.top_positions(scores, 9).tolist()
    assert not np.isnan(scores).any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_whoever_may_see_all_positions_computes_as_v3(recipe: Recipe, tmp_path: Path) -> None:
    """The same bits, for as long as there are no more positions than are chosen."""
    raw = json.loads((PRESET_DIRECTORY / "tiny-random" / "config.json").read_text())
    sizes = {"index_topk": 9, "index_n_heads": 3, "index_head_dim": 24}
    logits = []
    for changes in ({}, {"model_type": "deepseek_v32"} | sizes):
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        checkpoint = SeededCheckpoint("seeded", tmp_path, load_config(tmp_path), seed=3)
        logits.append(Reference(checkpoint, recipe, 16).logits(list(range(40, 54))))
    assert np.array_equal(logits[0][:9], logits[1][:9])
    assert not (logits[0][9:] == logits[1][9:]).all(axis=1).any()
