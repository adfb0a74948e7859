"""Table 2's products, and what models weigh."""

import msgspec
import pytest

from xdeepserve.hw.spec import Spec
from xdeepserve.model.presets import resolve_model
from xdeepserve.planner.moe_shape import PUBLISHED, Gemm, shape_of

BILLIONS = {"mixtral-8x22b": 141, "dbrx": 132, "scaled-moe": 317}  # MS 7.1


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_gemms_are_those_of_table_2(tp: int) -> None:
    h, inner, g = 6144, 10752, 6
    shape = PUBLISHED["dbrx"]
    qkv, out = shape.attention_gemms(tp)
    assert qkv == Gemm("QKV Project", h, h * (1 + 2 / g) / tp)
    assert out == Gemm("Attn Output", h / tp, h)
    first, second = shape.expert_gemms(tp)
    assert (first.k, first.n) == (h, 2 * inner / tp)  # the gate's product with it
    assert second == Gemm("FFN Output", inner / tp, h)


@pytest.mark.parametrize("name", BILLIONS)
def test_models_weigh_what_is_published(name: str) -> None:
    """Three matrices an expert, without embeddings: within 2 %."""
    shape = PUBLISHED[name]
    nbytes = shape.attention_nbytes() + shape.experts * shape.expert_nbytes()
    assert nbytes / 2e9 == pytest.approx(BILLIONS[name], rel=0.02)


def test_the_cache_is_equation_8s_or_mlas() -> None:
    assert PUBLISHED["dbrx"].kv_nbytes() == pytest.approx(4 * 6144 / 6)
    r1 = shape_of("r1", resolve_model("deepseek-r1").config)
    assert r1.kv_nbytes() == 2 * (512 + 64)
    assert (r1.kv_cut(8), PUBLISHED["dbrx"].kv_cut(8)) == (1, 8)
    assert (r1.layers, r1.experts, r1.top_k) == (58, 256, 8)


def test_latent_attention_has_all_projections() -> None:
    r1 = shape_of("r1", resolve_model("deepseek-r1").config)
    heads, down = 128, 7168 * (1536 + 512 + 64)
    whole = 1536 * heads * 192 + heads * 128 * 512 * 2 + heads * 128 * 7168
    assert sum(gemm.k * gemm.n for gemm in r1.attention_gemms(1)) == down + whole
    assert sum(gemm.k * gemm.n for gemm in r1.attention_gemms(4)) == down + whole / 4


def test_many_rows_cost_operations_and_few_cost_weights() -> None:
    spec, shape = Spec(), PUBLISHED["dbrx"]
    times = [sum(map(spec.stage_ns, shape.expert_works(b, 1))) for b in (1, 2, 2048, 4096)]
    assert times[0] == times[1]
    assert times[3] == pytest.approx(2 * times[2])


def test_groups_of_heads_may_be_wider_than_the_model() -> None:
    """Qwen3-30B-A3B: 32 heads of 128 beside 2048 hidden columns, 4 heads of keys and values."""
    shape = PUBLISHED["dbrx"]
    wide = msgspec.structs.replace(shape, hidden=2048, queries=4096, group=8)
    qkv, out = wide.attention_gemms(1)
    assert (qkv.k, qkv.n, out.k, out.n) == (2048, 4096 + 2 * 512, 4096, 2048)
    assert wide.kv_nbytes() == 2 * 2 * 4 * 128
    assert wide.attention_flops() == 4 * 4096


def test_sparse_attention_reads_what_was_chosen_and_scores_all() -> None:
    """Of DeepSeek-V3.2's sizes: 64 heads of 128 choose 2048 positions."""
    r1 = shape_of("r1", resolve_model("deepseek-r1").config)
    assert r1.mla is not None
    index = {"top_k": 2048, "index_heads": 64, "index": 128, "indexers": 1.0}
    sparse = msgspec.structs.replace(r1, mla=msgspec.structs.replace(r1.mla, **index))
    few, many = (sparse.attention_works(1, context, 1)[0] for context in (2048, 8192))
    assert many.attention - few.attention == 6144 * 2 * 64 * 128
    assert many.cache - few.cache == 6144 * 2 * 128
    assert few.attention - r1.attention_works(1, 2048, 1)[0].attention == 2048 * 2 * 64 * 128
    assert sparse.kv_nbytes() - r1.kv_nbytes() == 2 * 128
    assert sparse.attention_nbytes() > r1.attention_nbytes()
