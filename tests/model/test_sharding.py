"""Cut weights: every part is somewhere once, and row-parallel products of parts add up to the same bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.bits import F32, assert_same_bits, few, normal, seeds
from xdeepserve.comm.collectives.reduction import tree_reduce
from xdeepserve.model import canonical as c
from xdeepserve.model import kernels as k
from xdeepserve.model.config import TP_SIZES, ModelConfig, TPMode
from xdeepserve.model.packing import pack_f32, pack_int8
from xdeepserve.model.presets import TinyCheckpoint
from xdeepserve.model.sharding import WHOLE, Shard
from xdeepserve.model.weights import RECIPES, Recipe, Store, fill, iter_weights, weight_specs

MODES: tuple[TPMode, ...] = ("tp", "sp-tp-sp")
HEADS = {"wq_b", "wq_b.scale", "w_uk", "w_uv"}
DENSE = {"wo", "mlp.w13", "mlp.w13.scale", "mlp.w2"}
tp_sizes = st.sampled_from(TP_SIZES)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_cut(mode: TPMode, recipe: Recipe, tiny_config: ModelConfig) -> None:
    specs = weight_specs(tiny_config, recipe, 8)
    cut = {name for name in specs if Shard(1, 2, mode).of(name) is not WHOLE}
    bare = {name.split(".", 2)[2].removeprefix("layer.") if name[0] in "lm" else name for name in cut}
    expected = HEADS | DENSE if mode == "tp" else HEADS
    assert bare == {name for name in expected if recipe == "int8" or not name.endswith(".scale")}
    assert not any(Shard(0, 1, mode).of(name) is not WHOLE for name in specs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", MODES)
def test_stores_of_all_ranks_hold_the_whole(mode: TPMode, recipe: Recipe, tiny: TinyCheckpoint) -> None:
    """What is cut has every element once over the ranks, in the shapes that memories are planned with."""
    specs, shards = weight_specs(tiny.config, recipe, 8), [Shard(rank, 4, mode) for rank in range(4)]
    experts = range(tiny.config.n_routed_experts)
    stores = [
        Store(
            {name: np.empty(spec.shape, spec.dtype) for name, spec in shard.specs(specs).items()},
            experts,
            shard,
        )
        for shard in [WHOLE, *shards]
    ]
    told = sum(fill(stores, iter_weights(tiny, recipe, 8)))
    assert told == sum(spec.prepared_nbytes for spec in specs.values())
    whole, *parts = (store.arrays for store in stores)
    for name, array in whole.items():
        if Shard(1, 4, mode).of(name) is WHOLE:
            assert all(np.array_equal(part[name], array) for part in parts), name
        else:
            pieces = [part[name].ravel() for part in parts]
            assert len({piece.size for piece in pieces}) == 1
            assert np.array_equal(np.sort(np.concatenate(pieces)), np.sort(array.ravel())), name


def columns(rank: int, tp: int, array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.split(array, tp, axis=1)[rank])


@few
@given(seeds, tp_sizes, st.integers(1, 9), st.integers(1, 17), st.integers(1, 40))
def test_row_parallel_float32(seed: int, tp: int, rows: int, per_rank: int, n: int) -> None:
    x, w = normal(seed, rows, tp * per_rank), normal(seed + 1, tp * per_rank, n)
    sums = []
    for rank in range(tp):
        part, weights = columns(rank, tp, x), Shard(rank, tp).cut("layers.0.wo", w)
        out = np.empty((rows, n), F32)
        k.matmul_blocked(out, part, pack_f32(weights).ravel(), num_blocks=c.TP_BLOCKS // tp)
        assert_same_bits(out, c.matmul_blocked(part, weights, c.TP_BLOCKS // tp))
        sums.append(out)
    assert_same_bits(tree_reduce(sums), c.matmul_blocked(x, w))


@few
@given(
    seeds,
    tp_sizes,
    st.integers(1, 9),
    st.integers(1, 17),
    st.integers(1, 70),
    st.sampled_from([0.0, 1.0, 1e4]),
)
def test_row_parallel_int8(seed: int, tp: int, rows: int, per_rank: int, n: int, scale: float) -> None:
    x, (w, w_scale) = (
        normal(seed, rows, tp * per_rank, scale=scale),
        c.quantize_rows(normal(seed + 1, n, tp * per_rank)),
    )
    parts, maxima = [columns(rank, tp, x) for rank in range(tp)], []
    for part in parts:
        out = np.empty(rows, F32)
        k.row_maxima(out, part)
        assert_same_bits(out, c.row_maxima(part))
        maxima.append(out)
    largest, sums = tree_reduce(maxima, "max"), []
    q_scale = np.empty(rows, F32)
    for rank, part in enumerate(parts):
        q, out = np.empty(part.shape, np.int8), np.empty((rows, n), np.int32)
        k.quantize_by_maxima(q, q_scale, part, largest)
        for actual, expected in zip((q, q_scale), c.quantize_by_maxima(part, largest), strict=True):
            assert_same_bits(actual, expected)
        k.matmul_int8_sums(out, q, pack_int8(Shard(rank, tp).cut("layers.0.wo", w)).ravel())
        sums.append(out)
    result = np.empty((rows, n), F32)
    k.scale_sums(result, tree_reduce(sums), q_scale, w_scale)
    assert_same_bits(result, c.matmul_int8(*c.quantize_rows(x), w, w_scale))


def test_int8_sums_are_exact_beyond_what_float32_counts() -> None:
    q, w = np.full((1, 2049), 127, np.int8), np.full((17, 2049), 127, np.int8)
    q[0, 0] = w[:, 0] = 1  # an odd sum above 2^24
    out = np.empty((1, 17), np.int32)
    k.matmul_int8_sums(out, q, pack_int8(w).ravel())
    assert np.all(out == 2048 * 127 * 127 + 1)
