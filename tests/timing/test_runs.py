"""Timing-only runs: the engine's own path, next to no memory, and times that follow from what happens."""

import asyncio
import re

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.timing.closed_forms import ClosedForms
from xdeepserve.bench.papers import pipelines, superpod
from xdeepserve.cli import main
from xdeepserve.comm.cost import CommCost
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import Deployment, ExpertConfig
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.numbers import DieRank
from xdeepserve.engine.walk.timeline import Timeline
from xdeepserve.engine.ways.among import clock as among_clock
from xdeepserve.engine.ways.among.clock import AmongClock, DrawnLoads
from xdeepserve.engine.ways.meeting import Meeting
from xdeepserve.engine.ways.routing import Routing, TimingConfig
from xdeepserve.errors import CheckpointError, DeadlineError, DeploymentError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.spec import Spec, Work
from xdeepserve.hw.topology import Topology
from xdeepserve.llm import LLM
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.formula import expert_layer
from xdeepserve.prices.step_run import DecodeRun, DummyTokens, decode_iteration
from xdeepserve.step.frame import Model
from xdeepserve.step.layer import Where, decoder_layer
from xdeepserve.step.stage import Counts, stages

NUM_LAYERS = 8


@pytest.fixture(scope="module")
def small_r1() -> Checkpoint:
    """DeepSeek-R1 in full width, with 8 layers."""
    model = resolve_model("deepseek-r1")
    model.config = msgspec.structs.replace(model.config, num_hidden_layers=NUM_LAYERS)
    return model


def decode(model: Checkpoint, deployment: Deployment, **timing: float) -> DecodeRun:
    return decode_iteration(model, deployment, 3072, 20, TimingConfig(**timing))  # type: ignore[arg-type]


def test_without_weights_only_timing_runs_are_possible(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match="deepseek-r1: a configuration without weights"):
        PodPlan(resolve_model("deepseek-r1"), resolve("colocated"), "int8")
    assert main(["generate", "--model", "deepseek-r1", "--prompt-ids", "1"]) == 2
    error = capsys.readouterr().err
    assert "deepseek-r1 is a configuration without weights: give --timing-only" in error
    assert error.count("\n") == 1


def test_a_pod_of_hundreds_of_gigabytes_takes_a_few_megabytes(small_r1: Checkpoint) -> None:
    plan = PodPlan(small_r1, superpod.colocated_deployment(16, 20), timing=TimingConfig())
    assert sum(mem.weight_nbytes for te in plan.tes for _, mem in te.all_memories) > 100 << 30
    assert plan.pod.memories.nbytes < 8 << 20


def test_an_iteration_is_the_sum_of_its_stages(small_r1: Checkpoint) -> None:
    """On a die that waits for nobody; and each stage has the cost of its formula."""
    run = decode(small_r1, superpod.colocated_deployment(16, 20))
    cost = ClosedForms(small_r1.config)
    spent = sum(run.spent_ns.values())
    assert 0 <= run.iteration_ns - spent < 5_000  # the commands' latency, and rounding
    layers = NUM_LAYERS + 1
    assert run.spent_ns["Gate"] == pytest.approx((layers - 3) * cost.gate_ns())
    main_model = cost.attention_ns(20 * (3073 + 3074), 20 * 3074)
    assert NUM_LAYERS * main_model < run.spent_ns["MLA"] <= layers * main_model * 1.001


def test_same_seed_same_run(small_r1: Checkpoint) -> None:
    deployment = superpod.colocated_deployment(8, 20)
    assert decode(small_r1, deployment) == decode(small_r1, deployment)
    assert decode(small_r1, deployment) != decode(small_r1, deployment, seed=1)


def test_skewed_routing_costs_time(small_r1: Checkpoint) -> None:
    deployment = superpod.colocated_deployment(32, 20)
    times = [decode(small_r1, deployment, skew=skew).iteration_ns for skew in (0.0, 0.8, 1.6)]
    assert times[0] < times[1] < times[2]


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_tokens_per_step_are_one_plus_p(small_r1: Checkpoint, acceptance: float) -> None:
    run = decode(small_r1, superpod.colocated_deployment(8, 20), acceptance=acceptance)
    noise = 4 * (acceptance * (1 - acceptance) / run.num_requests) ** 0.5
    assert abs(run.num_tokens / run.num_requests - 1 - acceptance) <= noise


def test_moe_attention_runs_its_streams(small_r1: Checkpoint) -> None:
    """The experts keep up with three domains of two microbatches, so attention dies hardly wait."""
    run = decode(small_r1, superpod.disaggregated_deployment(3, 5, 8, 1, 20))
    assert run.spent_ns["A2E"] > 0
    assert "dispatch" not in run.spent_ns
    one = decode(small_r1, superpod.disaggregated_deployment(1, 5, 8, 1, 20))
    assert one.iteration_ns <= run.iteration_ns


def test_dies_for_the_shared_expert_are_those_that_are_said(small_r1: Checkpoint) -> None:
    """As if so many dies held routed experts; and with replicas, each die of these reads more experts."""
    deployment = superpod.colocated_deployment(288, 20)
    apart = msgspec.structs.replace(deployment, experts=ExpertConfig(shared_dies=32))
    said, meant = decode(small_r1, apart), decode(small_r1, deployment, routed_dies=256)
    spent = {name: ns for name, ns in said.spent_ns.items() if ns}
    assert said.iteration_ns - spent.pop("Route") == pytest.approx(meant.iteration_ns, abs=1)
    assert spent == pytest.approx({name: ns for name, ns in meant.spent_ns.items() if ns}, rel=1e-6)
    assert said.iteration_ns != decode(small_r1, deployment).iteration_ns
    replicas = msgspec.structs.replace(apart, experts=ExpertConfig(shared_dies=32, redundant_slots=1))
    assert decode(small_r1, replicas).spent_ns["Experts"] > said.spent_ns["Experts"]
    with pytest.raises(DeploymentError, match=r"of_dies and experts\.shared_dies exclude each other"):
        decode(small_r1, apart, of_dies=320)


def test_a_die_with_a_shared_and_a_routed_expert_is_billed_for_both(small_r1: Checkpoint) -> None:
    loads = DrawnLoads(CommCost(), small_r1.config, 288, TimingConfig())
    _, found = loads.settle("dispatch", 1, dict.fromkeys(range(288), 64))
    shared, mean = 64 * 288 // 32, 64 * 8
    routed = found[-1].received - shared
    copies, touched, _ = found[-1].bill
    assert (copies, touched) == (Spec().billed_copies(routed, mean) + shared, 2)


def test_as_a_sample_of_a_pod_the_exchanges_cost_what_they_do_there(small_r1: Checkpoint) -> None:
    few = decode(small_r1, superpod.colocated_deployment(4, 20), of_dies=16)
    all_ = decode(small_r1, superpod.colocated_deployment(16, 20))
    assert few.iteration_ns == pytest.approx(all_.iteration_ns, rel=0.01)


@pytest.mark.parametrize(("key", "value"), [("acceptance", 1.5), ("skew", -1.0), ("of_dies", 0)])
def test_impossible_settings_are_refused(key: str, value: float) -> None:
    with pytest.raises(DeploymentError, match=key):
        TimingConfig(**{key: value})  # type: ignore[arg-type]


@given(st.integers(1, 64), st.floats(0, 3), st.integers(0, 10_000), st.integers(0, 1000))
@settings(max_examples=50)
def test_routing_loses_no_copy(slots: int, skew: float, copies: int, event: int) -> None:
    routing = Routing(slots, skew, seed=3)
    counts = routing.counts(event, 0, copies)
    assert counts.sum() == copies
    assert len(counts) == slots
    assert (counts == Routing(slots, skew, seed=3).counts(event, 0, copies)).all()


async def test_a_meeting_ends_for_all_after_the_last_has_come() -> None:
    clock = Clock()
    meeting = Meeting[float](clock, "dispatch", 1, range(3), 1000, lambda m: (100.0, sum(m.came.values())))
    ends = []

    async def member(rank: int) -> None:
        await clock.sleep(10 * rank)
        meeting.come(rank, rank)
        assert await meeting.wait(rank) == 3
        ends.append(clock.now)

    await asyncio.gather(*[clock.spawn(member(rank)) for rank in range(3)])
    assert ends == [120] * 3


async def test_who_is_missing_is_named() -> None:
    clock = Clock()
    meeting = Meeting[None](clock, "dispatch", 7, ["rank a", "rank b", "rank c"], 1000, lambda m: (0.0, None))

    async def member() -> None:
        await clock.sleep(5)
        meeting.come(1, 1)
        await meeting.wait("rank b")

    async def busy() -> None:
        await clock.sleep(10**6)  # as another TE may be: this is no deadlock

    others = clock.spawn(busy())
    expected = (
        "dispatch: deadline passed at 1005 ns: rank rank b waits for peer ['rank a', 'rank c'], "
        "field event 7: expected 3, seen 1"
    )
    with pytest.raises(DeadlineError, match=re.escape(expected)):
        await clock.spawn(member())
    await others


async def test_spreads_of_old_events_are_forgotten(
    small_r1: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(among_clock, "KEPT", 3)
    pod, cost = Pod(), CommCost(Spec(), Topology())
    for die in range(2):
        pod.plan(die)
    pod.materialise()
    clock = pod.clock
    loads = DrawnLoads(cost, small_r1.config, 2, TimingConfig())
    hub = AmongClock(clock, range(2), 1000, loads.settle, small_r1.config.num_experts_per_tok)
    x, nobody = np.zeros((1, small_r1.config.hidden_size), np.float32), np.zeros((1, 0), np.int32)

    async def rank(number: DieRank) -> None:
        end = hub.end(number, Timeline(pod.dies[number]))
        for event in range(1, 9):
            await clock.sleep(10 * event * number)
            await end.dispatch(x, nobody, event)

    await asyncio.gather(*[clock.spawn(rank(DieRank(number))) for number in range(2)])
    assert list(hub.spreads_ns) == [6, 7, 8]
    assert hub.spreads_ns[8] == 80


def test_dummy_tokens_are_a_list_in_all_that_the_engine_does_with_one() -> None:
    tokens: list[int] = DummyTokens(10)
    assert len(tokens) == 10
    assert tokens[3:5] == [tokens[0]] * 2
    assert tokens[8:20] == [tokens[0]] * 2
    tokens += [1, 2]
    assert len(tokens) == 12


def test_the_facade_serves_a_model_without_weights() -> None:
    with LLM("deepseek-r1", "colocated", overrides=["dies=2", "mtp=1"], timing_only=True) as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        outputs = llm.generate([[1, 2, 3], [4] * 200], params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]
        assert llm.virtual_ns > 0


def test_streams_and_layers_within_10_percent_and_gains_within_7() -> None:
    """With the split of the cores that the papers give: 16 and 8."""
    rows = {row.name: row for row in pipelines.streams() + pipelines.gains()}
    errors = {name: abs(row.error_pct) for name, row in rows.items() if row.error_pct is not None}
    assert len(errors) == len(rows) == 10
    gains = {name for name in errors if name.startswith("cm.mb.decode")}
    assert all(errors[name] < 10 for name in errors.keys() - gains)
    assert all(errors[name] < 7 for name in gains)


def test_prompts_take_less_with_keys_and_values_of_all_heads() -> None:
    """CM 4.3.1: in time, as the closed form has it; tokens are the same, and so is decode's time."""
    times = {}
    for form in ("absorbed", "unabsorbed"):
        settings = ["dies=2", "max_model_len=4400", "scheduler.max_num_batched_tokens=4096"]
        settings.append(f"prefill_attention={form}")
        with LLM("deepseek-r1", "colocated", overrides=settings, timing_only=True) as llm:
            (output,) = llm.generate([[7] * 4096], SamplingParams(max_tokens=3, ignore_eos=True))
        assert output.metrics is not None
        times[form] = output.metrics.ttft_ns, output.metrics.tpot_ns
    c = resolve_model("deepseek-r1").config
    context, heads = 4096 * 4097 / 2, c.num_attention_heads
    widths = 2 * c.kv_lora_rank + c.qk_rope_head_dim, c.qk_head_dim + c.v_head_dim
    spec = Spec()
    saved = 2 * context * heads * (widths[0] - widths[1])
    expected = 1e9 * saved / spec.bf16_peak.value / spec.compute_efficiency.value * c.num_hidden_layers
    assert times["absorbed"][0] - times["unabsorbed"][0] == pytest.approx(expected, rel=1e-6)
    assert times["absorbed"][1] == times["unabsorbed"][1]


def test_chunks_make_keys_and_values_of_earlier_positions_again() -> None:
    """And rows that decode stay absorbed, which takes them fewer operations."""
    config = resolve_model("deepseek-r1").config
    layer, heads = expert_layer(config), config.num_attention_heads
    (stage,) = [each for each in stages(decoder_layer(layer, Where()).attention) if each.attends]

    def work(counts: Counts, unabsorbed: bool = True) -> Work:
        return stage.work(Model(config, "int8", heads, unabsorbed), layer, counts)

    whole, chunk = work(Counts(2048, 2048 * 1024, 2048)), work(Counts(2048, 2048 * 3072, 4096))
    assert (whole.bf16, chunk.attention) == (0, 3 * whole.attention)
    widths = config.qk_nope_head_dim + config.v_head_dim
    assert chunk.bf16 == 2.0 * 2048 * heads * config.kv_lora_rank * widths
    assert (whole.weights, chunk.weights) == (0, 2.0 * heads * config.kv_lora_rank * widths)
    decoding = Counts(2, 2 * 4096, 4096)
    assert work(decoding) == work(decoding, unabsorbed=False)
