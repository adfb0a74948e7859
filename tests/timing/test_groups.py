"""DP groups of several dies in timing-only runs: the program of a run that computes, at each die's share."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.timing.closed_forms import ClosedForms
from tests.timing.tools import watch, watch_end, without_experts
from xdeepserve.comm.collectives.cost import CollectiveCost
from xdeepserve.comm.collectives.handle import Collectives
from xdeepserve.comm.collectives.layout import CollectiveLayout
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.run.clock.wiring import ClockWiring
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.hw.pod import Pod
from xdeepserve.llm import LLM
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.config import TP_SIZES, TPMode
from xdeepserve.model.presets import resolve_model

MODES: tuple[TPMode, ...] = ("tp", "sp-tp-sp")
LAYERS, PROMPT = 8, 4000

# ---- collectives: the formula beside the simulated protocol -----------------------------------------------

GROUPS = [(0, 1), (0, 1, 2, 3), tuple(range(8, 16)), (14, 15, 16, 17)]  # the last one in two servers


def simulated_ns(dies: tuple[int, ...], call: Callable[[Collectives], Any]) -> int:
    async def main() -> int:
        pod, layout = Pod(), CollectiveLayout(len(dies), 1 << 24)
        for die in dies:
            layout.plan(pod.plan(die))
        pod.materialise()
        ranks = [Collectives(pod.dies[die], dies, layout) for die in dies]
        await asyncio.gather(*[rank.die.spawn(call(rank)) for rank in ranks])
        return pod.clock.now

    return asyncio.run(main())


@pytest.mark.parametrize("dies", GROUPS, ids=str)
@pytest.mark.parametrize("rows", [8, 512])
def test_the_formula_of_collectives_agrees_with_the_protocol(dies: tuple[int, ...], rows: int) -> None:
    cost, width = CollectiveCost(dies), 1024
    x = np.zeros((rows, width), np.int32)
    parts = [x[: rows // len(dies)].copy() for _ in dies]
    sent = [[part.nbytes for part in parts]] * len(dies)
    uneven = [rows // 2, rows - rows // 2, *[0] * (len(dies) - 2)]
    pairs = [
        (cost.all_reduce_ns(x.size), simulated_ns(dies, lambda rank: rank.all_reduce(x, 1))),
        (cost.all_gather_ns(parts[0].nbytes), simulated_ns(dies, lambda rank: rank.all_gather(parts[0], 1))),
        (
            cost.broadcast_ns(x.nbytes, len(dies) - 1),
            simulated_ns(dies, lambda rank: rank.broadcast(x, len(dies) - 1, 1)),
        ),
        (cost.all_to_all_ns(sent), simulated_ns(dies, lambda rank: rank.all_to_all(parts, 1))),
        (
            cost.reduce_scatter_ns([count * width for count in uneven]),
            simulated_ns(dies, lambda rank: rank.reduce_scatter(x, 1, counts=uneven)),
        ),
    ]
    for formula, simulated in pairs:
        assert formula == pytest.approx(simulated, rel=1e-3)


# ---- the same program -------------------------------------------------------------------------------------


def program_of(
    tp: int, mode: TPMode, mtp: int, microbatches: int, timing_only: bool
) -> list[list[tuple[object, ...]]]:
    """What each prefill die does on two prompts, one of them in chunks: stages and exchanges, with shapes.

    Outside of layers or in all of them, and then in those of each microbatch.
    """
    overrides = [
        f"prefill.dies={max(tp, 2)}",
        f"prefill.tp={tp}",
        f"prefill.tp_mode={mode}",
        "decode.dies=1",
        f"mtp={mtp}",
        "scheduler.max_num_batched_tokens=48",
        "cache.prefix=false",
        "execution.prefill.mode=op",
        f"pipeline.microbatches={microbatches}",
    ]
    logs: list[list[tuple[object, ...]]] = []
    with LLM("tiny", "pd", overrides=overrides, timing_only=timing_only) as llm:
        for executor in llm.engine.je.tes[0].executors:
            runners = dict.fromkeys((executor.runner, *executor.traversal.runners))
            for runner in runners:
                log: list[tuple[object, ...]] = []
                logs.append(log)
                watch(runner, "launch", log, lambda args: (args[0],))
                if runner.exchange is not None:
                    watch_end(runner, "exchange", "dispatch", log, lambda args: (args[0].shape, args[2]))
                    watch_end(runner, "exchange", "combine", log, lambda args: (args[2],))
                if runner.group is not None:
                    watch_end(
                        runner,
                        "group",
                        "all_reduce",
                        log,
                        lambda args: (args[0].shape, args[0].dtype, *args[1:]),
                    )
                    watch_end(
                        runner,
                        "group",
                        "all_gather",
                        log,
                        lambda args: (args[0].shape, args[0].dtype, args[1]),
                    )
                    watch_end(
                        runner, "group", "to_slices", log, lambda args: [(x.shape, x.dtype) for x in args[0]]
                    )
        llm.generate([list(range(70)), [5] * 7], SamplingParams(max_tokens=2, ignore_eos=True))
    return logs


@pytest.mark.thin(3)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp", TP_SIZES)
def test_stages_and_collectives_are_those_of_a_run_that_computes(
    tp: int, mode: TPMode, microbatches: int
) -> None:
    """In the same order, with the same shapes, on every die."""
    mtp = tp % 3  # 1, 2, 1, 2
    real, timing = (program_of(tp, mode, mtp, microbatches, timing_only) for timing_only in (False, True))
    per_die = 1 + microbatches if microbatches > 1 else 1
    assert len(real) == max(tp, 2) * per_die
    for number, (ours, theirs) in enumerate(zip(timing, real, strict=True)):
        assert without_experts(ours) == without_experts(theirs)
        if per_die > 1 and number % per_die == 0:
            continue  # not in layers
        assert len(ours) > 50
        names = {entry[0] for entry in ours}
        assert ("to_slices" in names) == (tp > 1 and mode == "sp-tp-sp")
        assert ("all_reduce" in names) == (tp > 1 and mode == "tp")


# ---- what it takes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_r1() -> Checkpoint:
    """DeepSeek-R1 in full width, with 8 layers."""
    model = resolve_model("deepseek-r1")
    model.config = msgspec.structs.replace(model.config, num_hidden_layers=LAYERS)
    return model


def prefill(
    model: Checkpoint, tp: int, mode: TPMode, *overrides: str
) -> tuple[RequestMetrics, dict[str, float]]:
    """One long prompt on a group of `tp` dies: what its request met with, and what its first die spent."""
    settings = [
        f"prefill.dies={tp}",
        f"prefill.tp={tp}",
        f"prefill.tp_mode={mode}",
        "decode.dies=1",
        "scheduler.max_num_batched_tokens=4096",
        "max_model_len=8192",
        "cache.block_size=128",
        "cache.num_blocks=192",
        *overrides,
    ]
    deployment = msgspec.structs.replace(resolve("pd", settings), execution=None)  # a host that costs nothing
    with LLM(model, deployment, timing_only=True) as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        metrics = llm.generate([[3] * PROMPT], params)[0].metrics
        wiring = llm.engine.plan.tes[0].wiring
        assert isinstance(wiring, ClockWiring)
        assert metrics is not None
        return metrics, dict(wiring.timelines[0][0].spent_ns)


@pytest.mark.parametrize("mode", MODES)
def test_a_die_takes_the_time_of_its_share(small_r1: Checkpoint, mode: TPMode) -> None:
    cost, config = ClosedForms(small_r1.config), small_r1.config
    whole = prefill(small_r1, 1, mode)[1]
    times = []
    for tp in TP_SIZES:
        metrics, spent = prefill(small_r1, tp, mode)
        assert metrics.ttft_ns is not None
        times.append(metrics.ttft_ns)
        assert sum(spent.values()) == pytest.approx(metrics.ttft_ns, abs=20_000)  # it waits for nobody
        assert spent["MLA"] == pytest.approx(whole["MLA"] / tp, rel=1e-3)
        rows = -(-PROMPT // tp)
        if mode == "tp":
            both = LAYERS * (cost.projection_ns(PROMPT, tp=tp) + cost.small_kernels_ns())
            projections = spent["MLAProlog"] + spent["OProj"] + spent.get("OProj inputs", 0)
            assert projections == pytest.approx(both, rel=1e-3)
            mlp = cost.mlp_ns(PROMPT, 3 * config.hidden_size * config.intermediate_size / tp)
            mlp += cost.mlp_vectors_ns(PROMPT, config.intermediate_size / tp)
            assert spent["MLP"] + spent.get("MLP inputs", 0) == pytest.approx(3 * mlp, rel=1e-3)
        elif tp > 1:
            down = cost.linear_ns(rows, cost.down_projection) + cost.small_kernels_ns() / 2
            down += cost.down_vectors_ns(rows)
            assert spent["DownProj"] == pytest.approx(LAYERS * down, rel=1e-3)
            out = cost.linear_ns(rows, cost.output_projection) + cost.small_kernels_ns() / 2
            out += cost.out_vectors_ns(rows)
            assert spent["OProj"] == pytest.approx(LAYERS * out, rel=1e-3)
    assert times == sorted(times, reverse=True)
    assert times[0] > 2 * times[-1]


def test_sp_tp_sp_beats_tp_on_long_prompts(small_r1: Checkpoint) -> None:
    """CM 4.3.1: less is computed twice, and narrower rows cross the dies."""
    for tp in (2, 4, 8):
        (by_tp, tp_spent), (hybrid, sp_spent) = (prefill(small_r1, tp, mode) for mode in MODES)
        assert by_tp.ttft_ns is not None
        assert hybrid.ttft_ns is not None
        assert hybrid.ttft_ns < by_tp.ttft_ns
        assert (
            sp_spent["all-gather"] + sp_spent["all-to-all"] < tp_spent["all-reduce"] + tp_spent["all-gather"]
        )


@pytest.mark.parametrize("mode", MODES)
def test_ranks_of_a_group_accept_the_same_drafts(small_r1: Checkpoint, mode: TPMode) -> None:
    """Else their collectives would differ, and somebody would wait for ever."""
    overrides = ["dies=4", "tp=2", f"tp_mode={mode}", "mtp=2", "execution.overlap=true"]
    with LLM(small_r1, "colocated", overrides=overrides, timing_only=True) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        outputs = llm.generate([[3] * n for n in (40, 100, 7, 300)], params)
        assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)
        metrics = outputs[0].metrics
        assert metrics is not None
        assert 0 < metrics.num_accepted < metrics.num_drafts


def test_a_rank_holds_its_share_of_the_weights(small_r1: Checkpoint) -> None:
    """As `describe` tells it; the latents are all there on every rank."""
    sizes = []
    for tp in (1, 4):
        plan = PodPlan(small_r1, resolve("colocated", ["dies=4", f"tp={tp}"]), timing=TimingConfig())
        sizes.append((plan.tes[0].memories[0].weight_nbytes, plan.tes[0].memories[0].cache_nbytes))
    (whole, cache), (share, same) = sizes
    assert share < whole
    assert cache == same


def test_kv_goes_from_te_to_te_at_its_true_size(small_r1: Checkpoint) -> None:
    """By the bytes and pieces of its layers, of which the memories hold little. Over RoCE: bytes alone."""
    plan = PodPlan(small_r1, resolve("pd", ["cache.block_size=128"]), timing=TimingConfig())
    mem, config = plan.tes[0].memories[0], small_r1.config
    nbytes = 128 * (config.kv_lora_rank + 4 + 2 * config.qk_rope_head_dim) * LAYERS  # INT8 with a scale, BF16
    assert mem.kv.block_nbytes * plan.kv_weight == nbytes
    spec = plan.pod.spec
    for fabric, bandwidth in (("roce", spec.roce_bandwidth.value), ("vpc", spec.vpc_bandwidth.value)):
        gaps = []
        for transfer in ("request", "layer"):
            metrics, _ = prefill(small_r1, 1, "tp", f"fabric={fabric}", f"transfer={transfer}")
            assert metrics.last_token_ns is not None
            assert metrics.first_token_ns is not None
            gaps.append(metrics.last_token_ns - metrics.first_token_ns)
        num_blocks = -(-PROMPT // 128)
        by_request = 1e9 * num_blocks * nbytes / bandwidth
        # All layers but the last move while prefill goes on; messages' startup, some 70 us, does not shrink.
        assert gaps[0] - gaps[1] == pytest.approx(by_request, abs=80_000)


@pytest.mark.parametrize("tp", [1, 4])
def test_prefill_on_other_hardware_takes_its_time(small_r1: Checkpoint, tp: int) -> None:
    """What is bound by arithmetic takes longer by the ratio of cores; no stage is quicker."""
    over_roce, spent = prefill(small_r1, tp, "tp", "fabric=roce")
    on_910b, longer = prefill(small_r1, tp, "tp", "prefill.hardware=910b")
    assert spent.keys() == longer.keys()
    assert all(longer[name] >= spent[name] for name in spent)
    assert max(longer[name] / spent[name] for name in ("MLA", "Experts") if name in spent) == pytest.approx(
        24 / 20, rel=0.02
    )
    assert on_910b.first_token_ns is not None
    assert over_roce.first_token_ns is not None
    ratio = on_910b.first_token_ns / over_roce.first_token_ns
    assert 1.05 < ratio < 1.25 if tp == 1 else 1.25 < ratio < 2  # HCCS has less for collectives than UB
    assert on_910b.last_token_ns is not None
    assert over_roce.last_token_ns is not None
    gaps = [m.last_token_ns - m.first_token_ns for m in (on_910b, over_roce)]  # type: ignore[operator]
    assert gaps[0] == pytest.approx(gaps[1], rel=0.01)  # decode is what it was
