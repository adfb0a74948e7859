"""Launching: graph against single-op, pipelined against naive MTP, the scheduler's gap, and jitter."""

import msgspec
import numpy as np
import pytest

from xdeepserve.bench import engine as bench
from xdeepserve.engine.deployment import ExecutionConfig
from xdeepserve.engine.serving.host import GC_PERIOD, Host
from xdeepserve.hw.spec import Spec
from xdeepserve.llm import LLM
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
    return bench.serve(bench._colocated(bench.DECODING, config), WORK, model).mean_tpot_ms()


def test_graph_beats_single_op_and_overlap_beats_both(small_r1: Checkpoint) -> None:
    graph, op, overlap = tpot(small_r1), tpot(small_r1, mode="op"), tpot(small_r1, overlap=True)
    assert overlap < graph < op


def test_pipelined_mtp_beats_naive(small_r1: Checkpoint) -> None:
    assert tpot(small_r1) < tpot(small_r1, mtp="naive")


def launches(steps: int, ranks: int = 8, **execution: object) -> np.ndarray:
    """[steps, ranks], ns."""
    host = Host(ExecutionConfig(overlap=True, **execution), SPEC, [], seed=1)  # type: ignore[arg-type]
    host._launchers = [None] * ranks  # type: ignore[list-item]
    return np.array([1e9 * host._jitter(step) for step in range(steps)])


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


def test_a_graph_is_captured_once_per_bucket() -> None:
    host = Host(ExecutionConfig(), SPEC, [])
    for rows, buckets in (([5, 3], 1), ([8, 1], 1), ([9, 2], 2), ([16], 2)):
        host.launches_ns(0, rows)
        assert len(host.captured) == buckets


@pytest.mark.parametrize("mode", ["graph", "op"])
def test_execution_modes_change_time_and_no_token(mode: str) -> None:
    """On a model that computes."""
    prompts, outputs = [[5, 6, 7]], []
    times = []
    for overrides in ([], [f"execution.mode={mode}"]):
        with LLM("tiny", "colocated", overrides=["dies=2", *overrides]) as llm:
            outputs.append(llm.generate(prompts)[0].outputs[0].token_ids)
            times.append(llm.virtual_ns)
    assert outputs[0] == outputs[1]
    assert times[1] > times[0] + 16 * 1e9 * SPEC.scheduler_gap.value * 0.9
