"""Plans for this project's pods: predictions beside runs, files that run, the bits of one die."""

from pathlib import Path

import numpy as np
import pytest

from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.ways.routing import Routing, TimingConfig, busiest
from xdeepserve.errors import DeploymentError
from xdeepserve.llm import LLM, digest
from xdeepserve.model.presets import resolve_model
from xdeepserve.planner import explain
from xdeepserve.planner.layouts import (
    PodLayout,
    is_known,
    layout_of,
    least_known,
    max_requests,
    predict,
    sized,
)
from xdeepserve.planner.pod_search import PodSpace, exhaustive, plans
from xdeepserve.prices.profile import Demand, PodProfile
from xdeepserve.prices.step_run import decode_iteration

LAYOUTS = (
    PodLayout(kind="monolithic", dies=1),
    PodLayout(kind="colocated", dies=4),
    PodLayout(kind="colocated", dies=2, count=2),
    PodLayout(kind="pd", dies=2, count=1, prefill=(1, 2)),
    PodLayout(kind="moe-attention", dies=2, domains=2, microbatches=2, routed=4, shared=1),
)
IDS = [layout.title() for layout in LAYOUTS]
HBM = 64 * 2**30  # of a die


@pytest.fixture(scope="module")
def tiny() -> PodProfile:
    return PodProfile(resolve_model("tiny"), Demand(40, 24))


@pytest.fixture(scope="module")
def r1() -> PodProfile:
    return PodProfile(resolve_model("deepseek-r1"), Demand())


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
@pytest.mark.parametrize("requests", [4, 48])
def test_an_iteration_takes_what_is_predicted(tiny: PodProfile, layout: PodLayout, requests: int) -> None:
    deployment, batch = layout.deployment(tiny.demand, requests), requests * layout.microbatches
    run = decode_iteration(tiny.checkpoint, deployment, tiny.demand.context, batch, TimingConfig())
    assert predict(tiny, layout, requests) == pytest.approx(run.iteration_ns, rel=0.05)
    assert run.num_requests == batch * layout.groups


def test_an_iteration_of_full_size_takes_what_is_predicted(r1: PodProfile) -> None:
    for domains, m in ((1, 3), (2, 2)):
        layout = PodLayout(
            kind="moe-attention", dies=14, domains=domains, microbatches=m, routed=32, shared=4
        )
        deployment = layout.deployment(r1.demand, 32)
        run = decode_iteration(r1.checkpoint, deployment, r1.demand.context, 32 * m, TimingConfig())
        assert predict(r1, layout, 32) == pytest.approx(run.iteration_ns, rel=0.05)


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_a_written_plan_is_read_as_what_it_was(tiny: PodProfile, layout: PodLayout, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(explain.toml(layout.settings(tiny.demand, 6), ["a plan"]))
    found, requests = layout_of(resolve(str(file)), tiny.config)
    assert requests == 6
    assert found.title() == layout.title() or (found.kind, found.count) == ("mixed", layout.count)
    assert (found.total, found.groups) == (layout.total, layout.groups)


@pytest.mark.parametrize("layout", LAYOUTS[2:], ids=IDS[2:])
def test_a_plan_has_the_bits_of_one_die(tiny: PodProfile, layout: PodLayout) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    digests = set()
    for where in (layout.deployment(tiny.demand, 4), "monolithic"):
        with LLM(tiny.checkpoint, where) as llm:
            digests.add(digest(llm.generate(["Once upon", "a fox"], params, keep_logits=True)))
    assert len(digests) == 1


def test_a_superpod_at_50_ms_is_nearly_what_the_paper_runs(r1: PodProfile) -> None:
    """Other bounds have other answers. xDeepServe 7.1: three domains of 160 attention dies, 256 and 32 expert
    dies, two microbatches. Ours needs 23 of the shared expert, which are idle most of the time."""
    found = plans(r1, PodSpace(768, 50e6))
    best = found[0]
    (paper,) = [plan for plan in found if plan.layout.title() == "moe-attention 3 x 160 + 256 + 32, m = 2"]
    assert best.layout.title() == "moe-attention 3 x 161 + 256 + 23, m = 2"
    assert 1 <= best.throughput / paper.throughput < 1.01
    assert paper.times is not None
    assert r1.other(32, "SharedExpert", paper.requests * 160 / 32) < 0.21 * paper.times.f
    assert best.iteration_ns <= 50e6
    assert predict(r1, best.layout, best.requests + 1) > 50e6 or best.bound != "SLO"


@pytest.mark.parametrize("dies", [2, 7, 13])
@pytest.mark.parametrize("slo_ms", [0.5, 1.2, 3.5])
def test_no_layout_of_a_small_pod_is_better_than_the_plan(tiny: PodProfile, dies: int, slo_ms: float) -> None:
    space = PodSpace(dies, 1e6 * slo_ms)
    if best := exhaustive(tiny, space):
        assert plans(tiny, space)[0].throughput == best[0].throughput
    else:
        with pytest.raises(DeploymentError, match="no plan keeps"):
            plans(tiny, space)


@pytest.mark.parametrize(("dies", "slo_ms"), [(49, 104.7), (53, 70.8)])
def test_dies_that_ratios_leave_over_are_given_to_attention_or_experts(
    r1: PodProfile, dies: int, slo_ms: float
) -> None:
    space = PodSpace(dies, 1e6 * slo_ms)
    assert plans(r1, space)[0].throughput == exhaustive(r1, space)[0].throughput


def test_small_tes_are_planned_where_large_ones_would_fit(tiny: PodProfile) -> None:
    """One die has no exchange, and is soonest."""
    limit = 1.001 * predict(tiny, PodLayout(kind="monolithic", dies=1), 8)
    assert plans(tiny, PodSpace(32, limit))[0].layout.kind == "monolithic"


def test_a_table_shows_the_best_of_each_kind(tiny: PodProfile) -> None:
    found = plans(tiny, PodSpace(16, 3e6))
    kinds = {plan.layout.kind for plan in found}
    few = explain.shown(found, len(kinds))
    assert {plan.layout.kind for plan in few} == kinds
    assert few[0] is found[0]
    assert explain.shown(found, len(found)) == found


@pytest.mark.parametrize(("slots", "copies"), [(1, 40), (32, 1408), (256, 5000)])
def test_the_busiest_slot_gets_as_many_copies_as_are_drawn(slots: int, copies: int) -> None:
    routing = Routing(slots, 0.0, 0)
    drawn = [routing.counts(event, 0, copies).max() for event in range(200)]
    assert busiest(slots, copies) == pytest.approx(np.mean(drawn), rel=0.08)


def test_cards_are_as_busy_as_the_die_that_most_copies_come_to(r1: PodProfile) -> None:
    """Few copies for each of many dies: chance makes half as many more for one of them."""
    layout = PodLayout(
        kind="moe-attention", dies=22, microbatches=1, routed=32, shared=8, devices=("a800", "l40s")
    )
    run = decode_iteration(
        r1.checkpoint, layout.deployment(r1.demand, 8), r1.demand.context, 8, TimingConfig()
    )
    assert predict(r1, layout, 8) == pytest.approx(run.iteration_ns, rel=0.01)


def test_plans_keep_their_bounds(r1: PodProfile) -> None:
    for plan in plans(r1, PodSpace(64, 60e6)):
        assert plan.layout.total <= 64
        assert plan.iteration_ns <= 60e6
        assert is_known(plan.layout, plan.requests)
        assert plan.requests >= least_known(r1, plan.layout)
        assert plan.requests <= max_requests(r1, plan.layout)
        assert not plan.notes
        assert plan.layout.kind != "pd"


def test_a_batch_is_bound_by_memory_when_there_is_little(r1: PodProfile) -> None:
    layout = PodLayout(kind="colocated", dies=64)
    weights = r1.weight_nbytes("all", 64)
    plan = sized(r1, layout, 1e12, False, (weights + 10.5 * r1.kv_nbytes()) / 0.9 / HBM)
    assert plan is not None
    assert (plan.requests, plan.bound) == (10, "memory")


def test_what_was_not_calibrated_is_marked(tiny: PodProfile) -> None:
    found = plans(tiny, PodSpace(8, 2e6, True))
    marked = [plan for plan in found if plan.layout.kind == "pd"]
    assert marked
    assert all(any("prefill" in note for note in plan.notes) for plan in marked)
    assert all(plan.notes or is_known(plan.layout, plan.requests) for plan in found)


def test_what_cannot_be_planned_is_refused_with_what_would_work(r1: PodProfile, tiny: PodProfile) -> None:
    with pytest.raises(DeploymentError, match="does not fit on 8 dies: the least is 32"):
        plans(r1, PodSpace(8, 50e6))
    with pytest.raises(
        DeploymentError, match=r"no plan keeps T_iter <= 0\.1 ms .* --slo-ms [\d.]+ would do"
    ) as refused:
        plans(tiny, PodSpace(4, 0.1e6))
    assert plans(tiny, PodSpace(4, 1e6 * float(str(refused.value).split("--slo-ms ")[1].split()[0])))


def test_expert_dies_that_hold_unequal_numbers_are_refused(tiny: PodProfile) -> None:
    with pytest.raises(DeploymentError, match=r"equally many of 32 experts.*try experts\.routed_dies=4"):
        layout_of(resolve("moe-attention", ["experts.routed_dies=5"]), tiny.config)


def test_deployments_that_are_not_predicted_are_refused(tiny: PodProfile) -> None:
    for override in ("mtp=1", "tp=2", "pipeline.microbatches=2"):
        with pytest.raises(DeploymentError, match="what is predicted are equal TEs"):
            layout_of(resolve("colocated", ["dies=4", override]), tiny.config)
