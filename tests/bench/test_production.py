"""xDeepServe's production pod in small: its load is found by TPOT, and prompts arrive at that load."""

from __future__ import annotations

import numpy as np
import pytest

from xdeepserve.bench.papers import engine, every_value, production
from xdeepserve.engine.deploy.deployment import Deployment
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.llm import LLM
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_words import FleetTE
from xdeepserve.platform.traces import TracedRequest

LAYERS = 4
SMALL = [
    *("prefill.count=2", "prefill.dies=8", "prefill.experts_per_die=34"),
    *("decode.dies=8", "decode.experts_per_die=34", "decode.max_num_seqs=8"),
]


@pytest.fixture(scope="module")
def pod() -> Deployment:
    return resolve("production", SMALL)


@pytest.fixture(scope="module")
def tes(pod: Deployment) -> list[FleetTE]:
    return production.prefill_tes(engine.with_layers(LAYERS), pod)


def test_the_load_is_the_one_whose_tpot_is_nearest(pod: Deployment) -> None:
    model = engine.with_layers(LAYERS)
    least, fastest = production.decode_load(model, pod, 0.0)
    most, slowest = production.decode_load(model, pod, 1e9)
    assert (least, most) == (1, 8)
    assert fastest < slowest
    target = fastest + 0.6 * (slowest - fastest)
    between, tpot = production.decode_load(model, pod, target)
    assert least < between < most
    assert abs(tpot - target) <= (slowest - fastest) / (most - least)
    assert production.decode_load(model, pod, tpot) == (between, tpot)


def test_prompts_have_the_published_lengths_and_the_rate_that_is_asked() -> None:
    found = production.prompts(20.0, 128)
    lengths = [each.input_length for each in found]
    assert np.mean(lengths) == pytest.approx(13_000, rel=0.001)
    assert max(lengths) == 65_536
    assert found[-1].at_ns == pytest.approx(len(found) / 20e-9, rel=0.05)
    assert [each.input_length for each in production.prompts(1.0, 128)] == lengths


def test_prompts_wait_at_a_load_and_less_with_prefixes_cached(tes: list[FleetTE]) -> None:
    assert len(tes) == 2
    quiet = production.mean_ttft_ms(production.serve(tes, production.QUIET))
    loaded = production.mean_ttft_ms(production.serve(tes, 1000.0))
    cached = production.mean_ttft_ms(production.serve(tes, 1000.0, cached=0.8))
    assert quiet < cached < loaded
    alone = [production.mean_ttft_ms(production.serve(tes, production.QUIET, share)) for share in (0.5, 0.98)]
    assert alone[0] < 0.75 * quiet  # what is cached is not computed
    assert alone[1] < 0.2 * quiet
    enough = production.mean_ttft_ms(production.serve(tes, 1000.0, cached=0.97))
    share = production.cached_share(tes, 1000.0, enough)
    assert share <= 0.97
    assert production.mean_ttft_ms(production.serve(tes, 1000.0, share)) <= enough
    assert production.mean_ttft_ms(production.serve(tes, 1000.0, share - 0.01)) > enough


def test_a_prompt_alone_takes_as_long_as_in_the_engine(pod: Deployment, tes: list[FleetTE]) -> None:
    """With launches; steps are planned ahead in both."""
    (served,) = Fleet(tes, "cost").run([TracedRequest(0, 10_000, 1, ())])
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    with LLM(engine.with_layers(LAYERS), pod, timing_only=TimingConfig()) as llm:
        (output,) = llm.generate([[0] * 10_000], params)
    assert output.metrics is not None
    assert served.ttft_ns == pytest.approx(output.metrics.ttft_ns, rel=0.02)


def test_a_prompt_alone_is_taken_apart(pod: Deployment, tes: list[FleetTE]) -> None:
    """The parts are the steps' whole time; a chunk takes more attention the later it is, and the last one
    samples."""
    model = engine.with_layers(LAYERS)
    first, later = (production.parts_ms(model, pod, prompt) for prompt in (4096, 8192))
    (served,) = Fleet(tes, "cost").run([TracedRequest(0, 8192, 1, ())])
    gaps = 2 * tes[0].price.gap
    assert sum(later.values()) == pytest.approx((served.ttft_ns - gaps) / 1e6, rel=0.01)
    assert later["attention"] > 2.5 * first["attention"]
    assert later["sampling"] == pytest.approx(first["sampling"])
    for name in ("projections", "collectives", "experts", "exchanges"):
        assert later[name] == pytest.approx(2 * first[name], rel=0.05), name


def test_rows_say_the_load_and_what_is_calibrated(pod: Deployment) -> None:
    tpot, ttft = production.of_pod(engine.with_layers(LAYERS), pod, 3.0, 1e-3)
    assert every_value.how(tpot) == "calibrated"
    assert every_value.how(ttft) == "predicted, conditions not published"
    assert "requests a die (found)" in tpot.note
    assert "no queue, nothing cached" in ttft.note
    names = [row["name"] for row in every_value.as_json([tpot, ttft], "xds")["rows"]]
    assert names == ["xds.prod.perf/tpot", "xds.prod.perf/ttft"]
    assert every_value.errors([tpot, ttft]).keys() == {every_value.how(tpot), every_value.how(ttft)}
    assert all(every_value.id_of(row) == "xds.prod.perf" for row in (tpot, ttft))
