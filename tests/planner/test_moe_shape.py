"""Table 2's products, and what models weigh."""

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
