"""Launching: graph against single-op, pipelined against naive MTP, the scheduler's gap, and jitter."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from xdeepserve.bench.papers import engine as bench
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import ExecutionConfig, RoleExecution
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.description import hosts
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.te.host import GC_PERIOD, PREEMPTION_RATE, Host
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.spec import Spec
from xdeepserve.llm import LLM, digest
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model

SPEC = Spec()
WORK = bench.workload(8, rate=1e6, prompts=(64, 65), outputs=(32, 33), seed=0)


@pytest.fixture(scope="module")
def small_r1() -> Checkpoint:
    model = resolve_model("deepseek-r1")
    model.config = msgspec.structs.replace(model.config, num_hidden_layers=24)
    return model


def tpot(model: Checkpoint, **execution: object) -> float:
    config = ExecutionConfig(**execution)  # type: ignore[arg-type]
    return bench.serve(bench.colocated(bench.DECODING, config), WORK, model).mean_tpot_ms()


def test_graph_beats_single_op_and_overlap_beats_both(small_r1: Checkpoint) -> None:
    graph, op, overlap = tpot(small_r1), tpot(small_r1, mode="op"), tpot(small_r1, overlap=True)
    assert overlap < graph < op


def test_pipelined_mtp_beats_naive(small_r1: Checkpoint) -> None:
    assert tpot(small_r1) < tpot(small_r1, mtp="naive")


def launches(steps: int, ranks: int = 8, **execution: object) -> np.ndarray:
    """[steps, ranks], ns."""
    host = Host(ExecutionConfig(overlap=True, **execution), SPEC, ranks, seed=1)  # type: ignore[arg-type]
    return np.array([1e9 * host.jitter(step) for step in range(steps)])


def test_a_controlled_host_never_lets_groups_drift_apart() -> None:
    times = launches(2 * GC_PERIOD)
    assert (times.max(axis=1) == times.min(axis=1)).all()
    pauses = np.flatnonzero(times[:, 0])
    assert pauses.tolist() == [GC_PERIOD - 1, 2 * GC_PERIOD - 1]  # all groups in the same step


@pytest.mark.parametrize("switch", ["pin_cores", "cache_graphs", "control_gc"])
def test_each_switch_has_its_jitter(switch: str) -> None:
    times = launches(GC_PERIOD - 1, **{switch: False})
    assert (times.max(axis=1) > times.min(axis=1)).any()
    assert (times == launches(GC_PERIOD - 1, **{switch: False})).all()


def test_automatic_collection_stalls_a_group_for_100_ms_while_the_others_wait() -> None:
    times = launches(GC_PERIOD - 1, control_gc=False)
    assert set(np.unique(times)) == {0, 1e9 * SPEC.gc_pause.value}
    assert ((times > 0).sum(axis=1) < 8).all()


@pytest.mark.parametrize("mode", ["graph", "op"])
def test_execution_modes_change_time_and_no_token(mode: str) -> None:
    """On a model that computes."""
    prompts, outputs = [[5, 6, 7]], []
    params, times = SamplingParams(max_tokens=16, ignore_eos=True), []
    for overrides in ([], [f"execution.mode={mode}"]):
        with LLM("tiny", "colocated", overrides=["dies=2", *overrides]) as llm:
            outputs.append(llm.generate(prompts, params)[0].outputs[0].token_ids)
            times.append(llm.virtual_ns)
    assert outputs[0] == outputs[1]
    assert times[1] > times[0] + 16 * 1e9 * SPEC.scheduler_gap.value * 0.9


# ---- each role its own ---------------------------------------------------------------------------------


def times_of(deployment: str, *overrides: str) -> tuple[int, float, list[set[bool]]]:
    """TTFT and TPOT of the second of two equal requests, and whether each TE's steps became graphs."""
    sizes = ["prefill.dies=1", "cache.prefix=false"]
    with LLM("tiny", deployment, overrides=[*sizes, *overrides]) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        metrics = [llm.generate([[5, 6, 7]], params)[0].metrics for _ in range(2)][1]
        assert metrics is not None
        assert metrics.ttft_ns is not None
        assert metrics.tpot_ns is not None
        launchers = [[executor.launcher for executor in te.executors] for te in llm.engine.je.tes]
        graphs = [{bool(each.graphs) for each in some if each is not None} for some in launchers]
        return metrics.ttft_ns, metrics.tpot_ns, graphs


@pytest.mark.parametrize("deployment", ["pd", "transformerless"])
def test_prefill_is_eager_and_decode_runs_graphs(deployment: str) -> None:
    """XDS 5.1. Each role has settings of its own, which cost time there and nowhere else."""
    base_ttft, base_tpot, graphs = times_of(deployment)
    assert graphs == [{False}, {True}]
    graph_ttft, tpot, graphs = times_of(deployment, "execution.prefill.mode=graph")
    assert graphs == [{True}, {True}]
    assert tpot == pytest.approx(base_tpot, abs=1_000)
    assert graph_ttft != base_ttft
    ttft, op_tpot, graphs = times_of(deployment, "execution.decode.mode=op")
    assert graphs == [{False}, {False}]
    assert ttft == base_ttft
    assert op_tpot > base_tpot
    assert times_of(deployment, "execution.mode=graph") == times_of(
        deployment, "execution.prefill.mode=graph"
    )


def test_what_a_role_does_not_set_is_as_for_all() -> None:
    config = ExecutionConfig(overlap=True, pin_cores=False, decode=RoleExecution(overlap=False, mode="op"))
    prefill, decode, both = (config.for_role(role) for role in ("prefill", "decode", "both"))
    assert (prefill.mode, prefill.overlap, prefill.pin_cores) == ("op", True, False)
    assert (decode.mode, decode.overlap, decode.pin_cores) == ("op", False, False)
    assert (both.mode, both.overlap, both.pin_cores) == ("graph", True, False)
    assert ExecutionConfig(mode="graph").for_role("prefill").mode == "graph"
    assert prefill.prefill is prefill.decode is None


def test_only_one_side_plans_ahead_and_the_tokens_are_the_same() -> None:
    with LLM("tiny") as one:
        wanted = digest(one.generate([[5, 6, 7], [9] * 40], keep_logits=True))
    for role, expected in (("prefill", [True, False]), ("decode", [False, True])):
        overrides = ["prefill.dies=1", "decode.dies=1", "mtp=1", f"execution.{role}.overlap=true"]
        with LLM("tiny", "pd", overrides=overrides) as llm:
            assert [te.sizes.steps.plans_ahead for te in llm.engine.plan.tes] == expected
            assert digest(llm.generate([[5, 6, 7], [9] * 40], keep_logits=True)) == wanted


@pytest.mark.parametrize(
    ("deployment", "override", "reason"),
    [
        ("colocated", "execution.prefill.mode=op", "execution.prefill is for pods whose prefill has TEs"),
        (
            "moe-attention",
            "execution.decode.overlap=true",
            "execution.decode is for pods whose prefill has TEs",
        ),
        ("pd", "execution.prefill.mode=eager", "execution.prefill.mode=eager"),
        ("pd", "execution.prefill.depth=2", "execution.prefill.depth=2"),
    ],
)
def test_settings_of_a_role_that_cannot_be_are_refused(deployment: str, override: str, reason: str) -> None:
    with pytest.raises(DeploymentError, match=reason):
        fit(resolve(deployment, [override]), resolve_model("tiny").config)


def test_prefill_may_plan_ahead_of_a_decode_where_tokens_flow() -> None:
    overrides = ["dataflow=true", "execution.prefill.overlap=true"]
    prefill, decode = fit(resolve("transformerless", overrides), resolve_model("tiny").config)
    assert (prefill.steps.plans_ahead, decode.steps.plans_ahead) == (True, False)


def test_describe_tells_both_hosts() -> None:
    plan = PodPlan(resolve_model("tiny"), resolve("pd", ["execution.overlap=true"]), "int8")
    prefill, decode = hosts(plan)
    assert prefill.startswith("host        operators are launched one by one")
    assert prefill.endswith("(prefill)")
    assert decode.strip().startswith("steps are graphs")


def test_the_page_of_costs_has_the_prices_of_the_table() -> None:
    """Every parameter of the host, with its time, and what is assumed is called so."""
    page = (Path(__file__).parents[2] / "docs" / "costs.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+) ms \| (.*) \|$", page, re.MULTILINE)
    names = [
        *("scheduler_gap", "graph_dispatch", "gc_pause", "op_dispatch"),
        *("command_latency", "host_sampling", "guard_checks", "preemption"),
    ]
    assert [name for name, _, _ in rows] == names
    for name, ms, source in rows:
        param = getattr(SPEC, name)
        assert float(ms) == pytest.approx(1e3 * param.value)
        assert source.startswith("assumed") == param.source.startswith("assumed")
    assert f"each {GC_PERIOD} steps" in page
    assert f"{PREEMPTION_RATE:.0%}".replace("%", " %") in page
