"""The formulas against tables and runs, against the published values, and against themselves."""

from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timing.closed_forms import ClosedForms
from xdeepserve.bench.papers import pipelines, production, superpod
from xdeepserve.bench.papers.paper_rows import EP288
from xdeepserve.bench.report import Row, published
from xdeepserve.comm.cost import OPS, CommCost
from xdeepserve.engine.deploy.deployment import PipelineConfig, SchedulerConfig
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.hw.spec import Spec
from xdeepserve.model.presets import resolve_model
from xdeepserve.planner.performance import Times
from xdeepserve.prices.formula import EP320, SPLITS, LayerCost, Load, PrefillCost
from xdeepserve.prices.profile import Demand, PodProfile
from xdeepserve.prices.step_run import DecodeRun, StepShare, one_step
from xdeepserve.step.stage import Counts

COST = LayerCost(resolve_model("deepseek-r1").config)
FORMS = ClosedForms(COST.config)


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.name: row for row in superpod.cloudmatrix() + superpod.megascale()}


def error(row: Row) -> float:
    assert row.error_pct is not None
    return abs(row.error_pct)


def test_sizes_of_deepseek_r1() -> None:
    assert FORMS.down_projection + FORMS.up_projection + FORMS.output_projection == 170_328_064
    assert FORMS.absorbed(128 + 128) == 16_777_216
    assert FORMS.expert == 44_040_192


@pytest.mark.parametrize("cores", [24, 16, 7])
@pytest.mark.parametrize(("rows", "context"), [(1, 4096), (96, 4096), (2048, 1024), (7, 1)])
def test_stages_cost_what_is_written_down_by_hand(rows: int, context: int, cores: int) -> None:
    """Prolog and output projection together: a roofline of each, or one of both, differ a little where one
    of them is bound by memory."""
    counts = Counts(rows, rows * context, rows * context, copies=3 * rows, touched=2)

    def price(name: str) -> float:
        return COST.spec.stage_ns(COST.stage_work(name, counts), cores)

    assert price("MLA") == pytest.approx(FORMS.attention_ns(rows * context, rows * context, cores))
    assert price("Gate") == FORMS.gate_ns()
    vectors = FORMS.mlp_vectors_ns(3 * rows, COST.config.moe_intermediate_size, is_quantised=False)
    assert price("Experts") == pytest.approx(FORMS.mlp_ns(3 * rows, FORMS.expert, 2, cores) + vectors)
    both = FORMS.projection_ns(rows, cores) + FORMS.small_kernels_ns()
    assert price("MLAProlog") + price("OProj") == pytest.approx(both, rel=0.01)


def test_table_4_within_the_bounds_of_its_fit(rows: dict[str, Row]) -> None:
    for batch in (128, 112, 96, 24):
        assert error(rows[f"cm.t4/batch={batch}"]) < 10
    assert (
        error(rows["cm.t4/batch=8"]) < 22
    )  # launches, waits and two whole heads: more than the paper's step
    fitted = {name for name in rows if name.startswith(("cm.streams/", "cm.mtp.layer/"))}
    assert {name for name in rows if name.startswith("cm.") and rows[name].kind == "calibrated"} == fitted


def test_rows_beyond_their_bound_say_so(rows: dict[str, Row], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {name for name, row in rows.items() if "NOT KEPT" in row.note}
    assert broken == {"cm.t4/batch=8", "cm.t4/throughput/batch=8"}
    assert rows["cm.t4/throughput/batch=24"].note == "batch / TPOT"
    monkeypatch.setattr(superpod, "TPOT_BOUND", 5.2)  # throughput of batch 112 is 5.4 % high
    notes = {row.name: row.note for row in superpod.cloudmatrix()}
    assert notes["cm.t4/throughput/batch=112"] == "batch / TPOT, bound of 5.2 % NOT KEPT"
    assert not notes["cm.t4/batch=112"]


def test_simulated_table_4_within_the_bounds_of_the_formula(rows: dict[str, Row]) -> None:
    """Both bill a pass alike. Simulated, three layers are dense, and streams have to fill and to drain."""
    simulated = {row.name.split("/simulated=")[0]: row for row in pipelines.table_4()}
    assert len(simulated) == 5
    for name, row in simulated.items():
        assert error(row) < (23 if name == "cm.t4/batch=8" else 10)  # none is fitted
        assert row.value == pytest.approx(rows[name].value, rel=0.02)


def test_layers_and_streams_within_10_percent(rows: dict[str, Row]) -> None:
    for name in ("cm.streams/stream0", "cm.streams/stream1", "cm.mtp.layer/with", "cm.mtp.layer/without"):
        assert error(rows[name]) < 10


def test_throughput_is_batch_over_tpot(rows: dict[str, Row]) -> None:
    for batch in (128, 112, 96, 24, 8):
        ours, theirs = rows[f"cm.t4/batch={batch}"], published()[f"cm.t4/throughput/batch={batch}"]
        assert rows[f"cm.t4/throughput/batch={batch}"].value == pytest.approx(1000 * batch / ours.value)
        assert theirs.value == pytest.approx(
            1000 * batch / published()[f"cm.t4/batch={batch}"].value, rel=0.01
        )


def test_megascale_ping_pong(rows: dict[str, Row]) -> None:
    assert rows["ms.pp.m23/DBRX"].kind == "calibrated"
    for model in ("Mixtral-8x22B", "Scaled-MoE"):
        assert rows[f"ms.pp.m23/{model}"].kind == "predicted"
        assert error(rows[f"ms.pp.m23/{model}"]) < 6
    assert Times(1, 1, 0.28).throughput(4) == Times(1, 1, 0.28).throughput(3)  # "marginal"


def test_fitted_parameters_say_so() -> None:
    for name in ("small_kernels", "barrier_stretch", "core_meeting", "exchange_copy"):
        assert getattr(Spec(), name).source.startswith("fitted")


@given(st.floats(1, 128), st.floats(128, 32768), st.integers(1, 3))
def test_more_work_never_takes_less_time(requests: float, context: float, rows: int) -> None:
    load = Load(requests=requests, rows=rows, context=context)
    time = COST.iteration_ns(load, EP320)
    assert COST.iteration_ns(load, EP320, microbatches=False) >= time
    for more in (
        Load(requests=requests * 1.5, rows=rows, context=context),
        Load(requests=requests, rows=rows, context=context * 1.5),
        Load(requests=requests, rows=rows + 1, context=context),
    ):
        assert COST.iteration_ns(more, EP320) >= time


def test_a_die_is_billed_for_more_only_when_it_is_hotter_than_the_stretch() -> None:
    stretch = Spec().barrier_stretch.value
    assert Spec().billed_copies(120, 100) == Spec().billed_copies(100, 100) == stretch * 100
    assert Spec().billed_copies(300, 100) == 300


def test_a_die_without_rows_is_billed_for_none_and_a_cold_one_in_proportion() -> None:
    assert Spec().billed_copies(0, 2_192) == 0
    assert Spec().billed_copies(50, 100) == Spec().barrier_stretch.value * 50


def test_disaggregated_throughput_stands_beside_what_the_published_tpot_makes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2400 tokens/s of a chip are less than 46,080 tokens in 49 ms on 384 chips."""
    run = DecodeRun(iteration_ns=83_000_000, spent_ns=defaultdict(float), num_requests=46_080, num_tokens=0)
    monkeypatch.setattr(superpod, "simulate", lambda *_: run)
    rows = {row.name: row for row in superpod.disaggregated()}
    tput = rows["xds.disagg.perf/tput"]
    implied = 46_080 / 0.049 / 384
    assert tput.note == (
        "batch / TPOT, bound of 10 % NOT KEPT; published 2400 is 2 % below its own 46,080 tokens / 49 ms / "
        f"384 chips = {implied:.0f}, against which this is {100 * (tput.value / implied - 1):+.1f} %"
    )
    # By the same TPOT: as much too fast as TPOT is too short.
    assert tput.value / implied == pytest.approx(49 / rows["xds.disagg.perf/tpot"].value)
    assert not rows["xds.disagg.perf/tpot"].note


# ---- beside a run and a table ----------------------------------------------------------------------------


def test_two_streams_take_what_their_formula_says() -> None:
    """A layer of CloudMatrix's decode, at every split of the cores, and without the pipeline."""
    load = Load(requests=48, rows=2, context=pipelines.CM_CONTEXT)
    half = Load(requests=24, rows=2, context=pipelines.CM_CONTEXT)
    serial = pipelines.simulated_layer_us(48, 1, None)
    assert serial == pytest.approx(COST.serial_ns(load, EP320) / 1000, rel=0.01)
    for cores in SPLITS:
        formula = 2 * max(COST.streams_ns(half, EP320, cores)) / 1000
        assert pipelines.simulated_layer_us(48, 1, cores) == pytest.approx(formula, rel=0.01)
    assert pipelines.simulated_layer_us(48, 1, 16) < serial


@pytest.mark.parametrize("batch", [4, 60])
def test_a_layer_of_dp288_takes_what_its_formula_says(batch: int) -> None:
    """Of two experts on each die the weights are read, their tokens are counted, and replicas are found."""
    preset, runs = msgspec.structs.replace(resolve("dp288"), execution=None), []
    for layers in (4, 5):
        model = resolve_model("deepseek-r1")
        model.config = msgspec.structs.replace(model.config, num_hidden_layers=layers)
        runs.append(superpod.simulate(preset, batch, model=model))
    few, more = runs
    spent = {name: ns - few.spent_ns[name] for name, ns in more.spent_ns.items() if ns > few.spent_ns[name]}
    cost, load = (
        LayerCost(COST.config, comm=CommCost()),
        Load(requests=batch, rows=2, context=superpod.CONTEXT),
    )
    assert more.iteration_ns - few.iteration_ns == pytest.approx(cost.serial_ns(load, EP288), rel=0.03)
    for name in ("Gate", "Collect", "Route"):
        assert spent[name] == pytest.approx(cost.stage_ns(name, Counts(2 * batch)), rel=0.001)


def test_experts_without_replicas_are_neither_counted_nor_found() -> None:
    load, alone = Load(requests=60, rows=2, context=4096), msgspec.structs.replace(EP288, redundant=0)
    found = sum(COST.stage_ns(name, Counts(120)) for name in ("Collect", "Route"))
    assert COST.routing_ns(120, EP288) - COST.routing_ns(120, alone) == pytest.approx(found)
    assert COST.experts_work(load, EP288).weights == 2 * COST.experts_work(load, alone).weights


def test_ping_pong_takes_what_its_formula_says() -> None:
    """Two microbatches double the throughput, a third helps, a fourth does not (MS 7.4)."""
    rows = {row.name: row.value for row in pipelines.ping_pong()}
    for m in pipelines.PING_PONG_DEPTHS:
        simulated = rows[f"pingpong.r1/m={m}/simulated=trampolines"]
        assert simulated == pytest.approx(rows[f"pingpong.r1/m={m}"], rel=0.02)
    gains = [rows[f"pingpong.r1/m={m + 1}"] / rows[f"pingpong.r1/m={m}"] for m in (1, 2, 3)]
    assert gains[0] == pytest.approx(2)
    assert 1.1 < gains[1] < 1.4
    assert gains[2] == pytest.approx(1)


@pytest.mark.parametrize("prompt", [1024, 4096])
def test_prefill_takes_what_its_formula_says(prompt: int) -> None:
    """Of CloudMatrix 4.1, with one microbatch and with two; but one layer of the run is dense."""
    model, layers = resolve_model("deepseek-r1"), 13
    model.config = msgspec.structs.replace(model.config, num_hidden_layers=layers, first_k_dense_replace=1)
    cost, preset = PrefillCost(model.config, prompt=prompt), resolve("cloudmatrix384")
    for microbatches in (1, 2):
        te = msgspec.structs.replace(
            production.prefill_te(model, preset),
            mtp=0,
            pipeline=PipelineConfig(
                microbatches=microbatches, overlap="engines" if microbatches > 1 else None
            ),
            scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8 * cost.tokens),
        )
        prompts = [StepShare(0, prompt)] * (8 * cost.tokens // prompt)
        run = one_step(model, te, lambda _, prompts=prompts: prompts, TimingConfig())  # type: ignore[misc]
        assert run.iteration_ns == pytest.approx(cost.batch_ns(microbatches > 1), rel=0.04)


@pytest.mark.parametrize(("requests", "context"), [(64, 1536), (56, 2176), (48, 4224), (4, 4224)])
def test_a_table_of_stages_is_the_formula_at_the_points_of_table_4(requests: int, context: int) -> None:
    """On as many dies as there are experts; between two of the table's points exchanges are nearly lines."""
    profile = PodProfile(resolve_model("deepseek-r1"), Demand.at(context, context + 64))
    cost, dies = LayerCost(profile.config, comm=CommCost()), profile.config.n_routed_experts
    parts = cost.stream0_parts_ns(Load(requests=requests, rows=1, context=context + 1))
    mean = requests * profile.config.num_experts_per_tok
    copies = cost.spec.billed_copies(mean, mean)
    formula = dict(zip(profile.names, parts, strict=True))
    formula |= dict(
        zip(OPS, cost.exchanges_ns(dies, requests, profile.config.num_experts_per_tok), strict=True)
    )
    formula["Gate"] = cost.stage_ns("Gate", Counts(requests))
    formula["Experts"] = cost.stage_ns("Experts", Counts(0, copies=copies, touched=1))
    quantised = FORMS.vectors_ns(requests, cost.config.hidden_size, 0)  # which a routed row has been already
    formula["SharedExpert"] = cost.stage_ns("Experts", Counts(0, copies=requests, touched=1)) + quantised
    table = profile.stages(dies)
    assert {name: table[name](requests) for name in formula} == pytest.approx(formula, rel=0.002)
    assert table.keys() - formula.keys() == {"MLP", "Embed", "Norm", "Sample"}
