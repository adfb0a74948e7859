"""`xdeepserve bench superpod`: DeepSeek-R1 at full size, in virtual time, beside the published values.

Rows of CloudMatrix and MegaScale are formulas (`prices/formula.py`), beside simulations of
the same (`bench/papers/pipelines.py`). The two deployments of xDeepServe 7.1 are simulated: one decode
iteration of 288 and of 768 dies, by the engine itself without its arithmetic.

Two numbers of the decode model (`hw/spec.py`) are fitted to the four times of a layer that CloudMatrix tells
(4.2.3, Figure 20b). All other rows of decode are predictions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from xdeepserve.bench.papers import pipelines
from xdeepserve.bench.papers.sizes import DIES_PER_CHIP, MODEL
from xdeepserve.bench.report import Row, published
from xdeepserve.engine.deploy.deployment import (
    AttentionConfig,
    CacheConfig,
    Deployment,
    ExpertConfig,
    SchedulerConfig,
)
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.planner.performance import Times
from xdeepserve.prices.formula import EP320, LayerCost, Load
from xdeepserve.prices.step_run import DecodeRun, decode_iteration

XDS_ACCEPTANCE = 0.9

# How far TPOT may be off, in percent: Table 4, its batch 8; the two deployments of xDeepServe.
TPOT_BOUND, SMALL_BATCH_BOUND = 10, 15
COLOCATED_BOUND, DISAGGREGATED_BOUND = 6, 10
CONTEXT = 3072  # 2K prompts, half way through 2K outputs (XDS 7.1)
BATCH_288, BATCH_768 = 60, 96  # requests of a DP group; 48 in each of two microbatches
INT8_LAYERS = Param(
    0.5,
    "ratio",
    "assumed: XDS 4.7 says no number of layers whose attention is INT8; half gives the share of Figure 20",
)
HALF = "/simulated=half INT8"  # of a row's name: with INT8 attention in as many layers

NUM_STAGES = 62 * 2  # layers, MTP's included, of two microbatches each
NUM_MOE_STAGES = 59 * 2  # of these, layers with experts
DOMAINS = 3

COMM_RATIO_DBRX = 0.28  # T_c / T_f, fitted to DBRX; proportional to hidden x top-k
MEGASCALE = {"DBRX": 6144 * 4, "Mixtral-8x22B": 6144 * 2, "Scaled-MoE": 8192 * 4}


def all_rows(trace: Path | None = None) -> Iterator[Row]:
    """Yield all rows in order of computation. `trace` is a file for the timeline of the disaggregated
    iteration."""
    parts = cloudmatrix, megascale, pipelines.all_rows, colocated, lambda: disaggregated(trace)
    return itertools.chain.from_iterable(part() for part in parts)


# ---- formulas -------------------------------------------------------------------------------------------


def cloudmatrix() -> list[Row]:
    """Compute CloudMatrix's decode at EP320: Table 4, 4.2.3 and 5.4."""
    rows = formulas(LayerCost(resolve_model(MODEL).config))
    return [_noted(row, SMALL_BATCH_BOUND if row.name.endswith("/batch=8") else TPOT_BOUND) for row in rows]


def _noted(row: Row, bound: int) -> Row:
    """Add a note to a row of TPOT or throughput: its origin, and whether it breaks TPOT's bound, in percent.

    Throughput is a reciprocal: where TPOT is 9.4 % too low, it is 10.4 % too high.
    """
    is_throughput = "/throughput/" in row.name or row.name.endswith("tput")
    if not (is_throughput or row.name.startswith("cm.t4/")) or row.error_pct is None:
        return row
    notes = ["batch / TPOT"] if is_throughput else []
    if abs(row.error_pct) > bound:
        notes.append(f"bound of {bound} % NOT KEPT")
    return msgspec.structs.replace(row, note=", ".join(notes))


def formulas(cost: LayerCost) -> list[Row]:
    """Compute CloudMatrix's decode rows. Two numbers are fitted to the times of a layer, and none to Table
    4."""
    rows = []
    for batch, prompt, output in pipelines.TABLE_4:  # batch of an NPU, which is two dies
        load = Load(requests=batch / DIES_PER_CHIP, rows=2, context=prompt + output / 2)
        tpot = cost.iteration_ns(load, EP320) / (1 + pipelines.CM_TIMING.acceptance) / 1e6
        rows.append(Row(f"cm.t4/batch={batch}", tpot, "ms", "predicted"))
        rows.append(Row(f"cm.t4/throughput/batch={batch}", 1000 * batch / tpot, "tok/s", "predicted"))
    half = Load(requests=24, rows=2, context=4096)
    for number, ns in enumerate(cost.streams_ns(half, EP320, pipelines.CM_SPLIT)):
        rows.append(Row(f"cm.streams/stream{number}", ns / 1000, "us", "calibrated"))
    drafted, without = (
        cost.microbatched_ns(Load(requests=48, rows=rows, context=4096), EP320) for rows in (2, 1)
    )
    rows.append(Row("cm.mtp.layer/with", drafted / 1000, "us", "calibrated"))
    rows.append(Row("cm.mtp.layer/without", without / 1000, "us", "calibrated"))
    rows.append(Row("cm.mtp.layer/increase", 100 * (drafted / without - 1), "%", "calibrated"))
    return rows


def third_microbatch(model: str, comm_ratio: float) -> list[Row]:
    """Compute the gain of a third microbatch, with DBRX's ratio of moving to computing time as
    `comm_ratio`."""
    times = Times(1, 1, comm_ratio * MEGASCALE[model] / MEGASCALE["DBRX"])
    gain = times.throughput(3) / times.throughput(2)
    return [Row(f"ms.pp.m23/{model}", gain, "x", "calibrated" if model == "DBRX" else "predicted")]


def megascale() -> list[Row]:
    """Compute ping-pong of attention and experts: throughput with one more microbatch (MS 7.4)."""
    rows = [row for model in MEGASCALE for row in third_microbatch(model, COMM_RATIO_DBRX)]
    times = Times(1, 1, COMM_RATIO_DBRX)
    rows.append(Row("ms.pp.m12", times.throughput(2) / times.throughput(1), "x", "predicted"))
    return rows


# ---- simulated ------------------------------------------------------------------------------------------


def colocated_deployment(dies: int, batch: int) -> Deployment:
    """Make a deployment with DP and EP over all dies, as in XDS 7.1, with one MTP layer."""
    return Deployment(
        name=f"colocated, DP{dies}",
        kind="colocated",
        dies=dies,
        mtp=1,
        max_model_len=CONTEXT + 64,
        scheduler=SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=2 * batch),
        cache=CacheConfig(block_size=128, num_blocks=batch * (CONTEXT // 128 + 1), prefix=False),
    )


def disaggregated_deployment(domains: int, dies: int, routed: int, shared: int, batch: int) -> Deployment:
    """Make a deployment with MoE and attention apart, as in XDS 5.2: `dies` attention dies in each DP domain,
    two microbatches."""
    colocated = colocated_deployment(1, batch)
    return msgspec.structs.replace(
        colocated,
        name="moe-attention",
        kind="moe-attention",
        dies=None,
        attention=AttentionConfig(domains=domains, dies=dies, microbatches=2),
        experts=ExpertConfig(routed_dies=routed, shared_dies=shared),
    )


SUPERPOD = disaggregated_deployment(DOMAINS, 160, 256, 32, BATCH_768)  # XDS 7.1


def simulate(
    deployment: Deployment,
    batch: int,
    trace: Path | bool = False,
    spec: Spec | None = None,
    model: Checkpoint | None = None,
) -> DecodeRun:
    """Run a decode iteration of DeepSeek-R1, or of a model made of it."""
    timing = TimingConfig(acceptance=XDS_ACCEPTANCE)
    return decode_iteration(model or resolve_model(MODEL), deployment, CONTEXT, batch, timing, trace, spec)


def models() -> dict[str, Checkpoint]:
    """Return DeepSeek-R1 by the ends of rows' names: plain, and with INT8 attention in half of its layers."""
    return {"": resolve_model(MODEL), HALF: half_int8_r1()}


def half_int8_r1() -> Checkpoint:
    """Make DeepSeek-R1 as xDeepServe 4.7 quantises it: attention is INT8 in some of its layers."""
    model, every = resolve_model(MODEL), round(1 / INT8_LAYERS.value)
    layers = frozenset(range(0, model.config.num_layers_with_mtp, every))
    model.config = msgspec.structs.replace(model.config, int8_attention=layers)
    return model


def gap_ms(spec: Spec | None = None) -> float:
    """Return the scheduler's gap between two iterations [ms]."""
    return 1e3 * (spec or Spec()).scheduler_gap.value


def colocated(spec: Spec | None = None) -> list[Row]:
    """Simulate the colocated deployment of XDS 7.1, preset `dp288`, without the host's launches: those of a
    graph's first step, which is captured, are not those of later ones."""
    deployment = msgspec.structs.replace(resolve("dp288"), execution=None)
    runs = {way: simulate(deployment, BATCH_288, False, spec, model) for way, model in models().items()}
    return [row for way, run in runs.items() for row in _colocated_rows(way, run, spec)]


def _colocated_rows(way: str, run: DecodeRun, spec: Spec | None) -> Iterator[Row]:
    iteration = run.iteration_ns / 1e6
    tpot = (iteration + gap_ms(spec)) / (1 + XDS_ACCEPTANCE)
    rows = [
        ("xds.dec288.iter", iteration, "ms"),
        ("xds.dec288.iter/tpot", tpot, "ms"),
        ("xds.dec288.tput", _tput(run, tpot, 288), "tok/s"),
        ("xds.dec288.attn", run.share("MLA"), "%"),
        ("xds.dec288.comm", run.share("dispatch", "combine"), "%"),
    ]
    for name, value, unit in rows:
        yield _noted(Row(name + way, value, unit, "predicted"), COLOCATED_BOUND)


def disaggregated(trace: Path | None = None, spec: Spec | None = None) -> list[Row]:
    """Simulate the disaggregated deployment of XDS 7.1: 3 domains of 160 attention dies, 256 dies of routed
    experts and 32 of the shared expert.

    The paper's forward time includes the scheduler's gap. An attention stage ends with the output projection,
    which the paper does not name.
    """
    traces = {"": trace or True, HALF: True}
    runs = {way: simulate(SUPERPOD, BATCH_768, traces[way], spec, model) for way, model in models().items()}
    return [row for way, run in runs.items() for row in _disaggregated_rows(way, run, spec)]


def _disaggregated_rows(way: str, run: DecodeRun, spec: Spec | None) -> Iterator[Row]:
    forward = run.iteration_ns / 1e6 + gap_ms(spec)
    tpot = forward / (1 + XDS_ACCEPTANCE)
    stages = ("MLAProlog", "MLA", "OProj", "Gate", "A2E")
    layer = sum(run.spent_ns[name] for name in stages) / NUM_STAGES / 1000
    rows = [
        ("xds.disagg.perf/forward", forward, "ms"),
        ("xds.disagg.perf/tpot", tpot, "ms"),
        ("xds.disagg.perf/tput", _tput(run, tpot, 768), "tok/s"),
        ("xds.disagg.terms/attention_stage", layer, "us"),
        ("xds.disagg.terms/moe", run.experts_ns / (DOMAINS * NUM_MOE_STAGES) / 1000, "us"),
        ("xds.disagg.terms/mtp_layer", run.drafts_ns / 1e6, "ms"),
    ]
    for name, value, unit in rows:
        row = _noted(Row(name + way, value, unit, "predicted"), DISAGGREGATED_BOUND)
        yield _against_own_tpot(row, run) if name.endswith("/tput") else row


def _against_own_tpot(row: Row, run: DecodeRun) -> Row:
    """Add a note to the disaggregated throughput: the published one is a little less than the published TPOT
    implies, which is part of the row's error."""
    printed, tpot = row.published, published()["xds.disagg.perf/tpot"].value
    assert printed is not None
    implied = _tput(run, tpot, 768)
    note = (
        f"published {printed.value:g} is {100 * (1 - printed.value / implied):.0f} % below its own "
        f"{run.num_requests:,} tokens / {tpot:g} ms / {768 // DIES_PER_CHIP} chips = {implied:.0f}, "
        f"against which this is {100 * (row.value / implied - 1):+z.1f} %"
    )
    return msgspec.structs.replace(row, note="; ".join(filter(None, (row.note, note))))


def _tput(run: DecodeRun, tpot_ms: float, num_dies: int) -> float:
    """Compute the tokens per second of a chip."""
    return run.num_requests / tpot_ms * 1000 * DIES_PER_CHIP / num_dies
