"""CloudMatrix's two streams and Table 4, and MegaScale's ping-pong, simulated beside formulas.

The time of a layer in the steady state is the difference of two timing-only runs of different depth. The
filling and draining of the pipeline, and the head, are in both runs and cancel. Whole iterations include
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from xdeepserve.bench.papers.sizes import DIES_PER_CHIP, MODEL
from xdeepserve.bench.report import Row
from xdeepserve.comm.cost import CommCost
from xdeepserve.engine.deploy.deployment import (
    AttentionConfig,
    CacheConfig,
    Deployment,
    ExpertConfig,
    PipelineConfig,
    SchedulerConfig,
)
from xdeepserve.engine.ways.routing import TimingConfig
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.formula import ACCEPTANCE, EP320, SPLITS, LayerCost, Load
from xdeepserve.prices.step_run import DecodeRun, decode_iteration
from xdeepserve.step.stage import Counts

SHALLOW, DEEP = 13, 23  # layers
CM_CONTEXT = 4096
CM_SPLIT = 16  # AIC cores of stream 0 (CM 4.2.3)
CM_BATCHES = (64, 96, 128)  # of an NPU (CM 5.4.1)
# Four dies stand for EP320: 256 routed and 32 redundant experts, 32 copies of the shared one.
CM_TIMING = TimingConfig(acceptance=ACCEPTANCE, of_dies=EP320.total, routed_dies=EP320.routed)
CM_SAMPLE = 4
# Requests of an NPU, prompt, output.
TABLE_4 = ((128, 1024, 1024), (112, 2048, 256), (96, 4096, 256), (24, 4096, 256), (8, 4096, 256))

# Dies for ping-pong: attention, routed experts, shared expert. Requests of a microbatch and their context are
# such that attention and experts take about as long (condition 1 of MS 4.1).
PING_PONG = (10, 32, 4)
PING_PONG_BATCH, PING_PONG_CONTEXT = 32, 128
PING_PONG_DEPTHS = (1, 2, 3, 4)


def all_rows() -> Iterator[Row]:
    """Yield all rows in order of computation."""
    parts = table_4, streams, gains, ping_pong
    return itertools.chain.from_iterable(part() for part in parts)


def _decode(deployment: Deployment, context: int, batch: int, timing: TimingConfig, layers: int) -> DecodeRun:
    model = resolve_model(MODEL)
    model.config = msgspec.structs.replace(model.config, num_hidden_layers=layers)
    return decode_iteration(model, deployment, context, batch, timing)


def _layer_us(deployment: Deployment, context: int, batch: int, timing: TimingConfig) -> float:
    """Compute the time of a pipeline's layer in the steady state, from two runs [us]."""
    shallow, deep = (_decode(deployment, context, batch, timing, layers) for layers in (SHALLOW, DEEP))
    return (deep.iteration_ns - shallow.iteration_ns) / (DEEP - SHALLOW) / 1000


# ---- CloudMatrix: two streams ----------------------------------------------------------------------------


def cloudmatrix_deployment(
    batch: int, mtp: int, attention_cores: int | None, context: int = CM_CONTEXT, adaptive: bool = False
) -> Deployment:
    """Make a deployment with `batch` requests on each die. Without `attention_cores`, stages run one after
    the other."""
    pipeline = PipelineConfig()
    if attention_cores is not None:
        pipeline = PipelineConfig(
            microbatches=2, overlap="cores", attention_cores=attention_cores, adaptive=adaptive
        )
    return Deployment(
        name="colocated, EP320",
        kind="colocated",
        exchange="push",
        dies=CM_SAMPLE,
        mtp=mtp,
        pipeline=pipeline,
        max_model_len=context + 64,
        scheduler=SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=(1 + mtp) * batch),
        cache=CacheConfig(block_size=128, num_blocks=batch * (context // 128 + 1), prefix=False),
    )


def simulated_layer_us(
    batch: int, mtp: int, attention_cores: int | None, context: int = CM_CONTEXT, adaptive: bool = False
) -> float:
    """Simulate a MoE layer of CloudMatrix's decode [us]. If `adaptive`, the layer is one from the fourteenth
    on."""
    deployment = cloudmatrix_deployment(batch, mtp, attention_cores, context, adaptive)
    return _layer_us(deployment, context, batch, CM_TIMING)


def table_4() -> list[Row]:
    """Simulate TPOT of whole iterations, with two streams where the formula finds a split that gains (CM
    Table 4)."""
    cost, rows = LayerCost(resolve_model(MODEL).config), []
    for npu_batch, prompt, output in TABLE_4:
        batch, context = npu_batch // DIES_PER_CHIP, prompt + output // 2
        load = Load(requests=batch, rows=2, context=context)
        ways: dict[int | None, float] = {None: cost.serial_ns(load, EP320)}
        ways |= {cores: cost.microbatched_ns(load, EP320, (cores,)) for cores in SPLITS}
        deployment = cloudmatrix_deployment(batch, 1, min(ways, key=ways.__getitem__), context)
        run = _decode(deployment, context, batch, CM_TIMING, cost.config.num_hidden_layers)
        tpot = run.iteration_ns / (1 + CM_TIMING.acceptance) / 1e6
        rows.append(Row(f"cm.t4/batch={npu_batch}/simulated=die programs", tpot, "ms", "predicted"))
    return rows


def streams() -> list[Row]:
    """Simulate the stages of both streams, and a layer of two microbatches with the best split (CM 4.2.3,
    5.4.2)."""
    batch = 96 // DIES_PER_CHIP
    shallow, deep = (
        _decode(cloudmatrix_deployment(batch, 1, CM_SPLIT), CM_CONTEXT, batch, CM_TIMING, layers).spent_ns
        for layers in (SHALLOW, DEEP)
    )
    rows = []
    for number, stages in enumerate(
        (
            ("MLAProlog", "MLA", "OProj"),
            ("Gate", "Collect", "Route", "dispatch", "Experts", "SharedExpert", "combine"),
        )
    ):
        spent = sum(deep[name] - shallow[name] for name in stages) / (DEEP - SHALLOW) / 2
        rows.append(Row(f"cm.streams/stream{number}/simulated=microbatch", spent / 1000, "us", "calibrated"))
    for name, mtp in (("with", 1), ("without", 0)):
        layer = min(simulated_layer_us(batch, mtp, cores) for cores in SPLITS)
        rows.append(Row(f"cm.mtp.layer/{name}/simulated=2 streams", layer, "us", "calibrated"))
    return rows


def gains_by_formula(cost: LayerCost) -> list[Row]:
    """Compute the gain of two streams by formula, without simulation (CM 5.4.1)."""
    rows = []
    for npu_batch in CM_BATCHES:
        load = Load(requests=npu_batch // DIES_PER_CHIP, rows=2, context=CM_CONTEXT)
        serial_ns = cost.iteration_ns(load, EP320, microbatches=False)
        gain = serial_ns / cost.iteration_ns(load, EP320, splits=(CM_SPLIT,))
        rows.append(Row(f"cm.mb.decode/batch={npu_batch}", gain, "x", "predicted"))
    return rows


def gains() -> list[Row]:
    """Compute decode throughput with two streams over that without, by formula and simulated (CM 5.4.1).

    The split is the one that the paper gives for this ablation, at all batch sizes: it would be adjusted by
    the context (CM 4.2.3), which stays the same. A smaller share for attention would gain more at batch 128.
    """
    cost, rows = LayerCost(resolve_model(MODEL).config), []
    layers = cost.config.num_hidden_layers
    for npu_batch, formula in zip(CM_BATCHES, gains_by_formula(cost), strict=True):
        batch = npu_batch // DIES_PER_CHIP
        serial, piped = (
            _decode(
                cloudmatrix_deployment(batch, 1, cores), CM_CONTEXT, batch, CM_TIMING, layers
            ).iteration_ns
            for cores in (None, CM_SPLIT)
        )
        rows.append(formula)
        rows.append(Row(f"{formula.name}/simulated=2 streams", serial / piped, "x", "predicted"))
    return rows


# ---- MegaScale: ping-pong --------------------------------------------------------------------------------


def ping_pong_deployment(microbatches: int) -> Deployment:
    """Make a deployment with microbatches of constant size, as in MS 7.4."""
    attention, routed, shared = PING_PONG
    batch = PING_PONG_BATCH * microbatches
    return Deployment(
        name=f"ping-pong, m = {microbatches}",
        kind="moe-attention",
        attention=AttentionConfig(domains=1, dies=attention, microbatches=microbatches),
        experts=ExpertConfig(routed_dies=routed, shared_dies=shared),
        max_model_len=PING_PONG_CONTEXT + 64,
        scheduler=SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=batch),
        cache=CacheConfig(block_size=128, num_blocks=2 * batch, prefix=False),
    )


def ping_pong_stages_us() -> tuple[float, ...]:
    """Compute the times of a microbatch in a layer [us]: attention and posting, A2E, experts, E2A, the way
    back."""
    cost = LayerCost(resolve_model(MODEL).config, comm=CommCost())
    c, (attention, routed, shared), b = cost.config, PING_PONG, PING_PONG_BATCH
    load = Load(requests=b, rows=1, context=PING_PONG_CONTEXT + 1)
    own = cost.stream0_ns(load) + cost.stage_ns("Gate", Counts(b))
    top_k = c.num_experts_per_tok + 1
    post, back = cost.comm.post_ns(b), cost.comm.return_ns(b, top_k)
    there = cost.comm.among_ns("dispatch", routed + shared, b, top_k, trampolines=attention)
    answers = cost.comm.among_ns("combine", routed + shared, b, top_k, trampolines=attention)
    mean = attention * b * c.num_experts_per_tok / routed
    copies = cost.spec.billed_copies(mean, mean)
    experts = max(
        cost.stage_ns("Experts", Counts(b, copies=copies, touched=c.n_routed_experts / routed)),
        cost.stage_ns("Experts", Counts(b, copies=attention * b / shared, touched=1)),
    )
    return tuple(ns / 1000 for ns in (own + post, there, experts, answers, back))


def simulated_ping_pong_us(microbatches: int) -> float:
    """Simulate a layer of `microbatches` microbatches [us]."""
    deployment, batch = ping_pong_deployment(microbatches), PING_PONG_BATCH * microbatches
    return _layer_us(deployment, PING_PONG_CONTEXT, batch, TimingConfig())


def ping_pong() -> list[Row]:
    """Compute throughput of m microbatches over that of one: m / max(m T_f, T_cycle), and simulated (MS 4.1,
    7.4)."""
    stages = ping_pong_stages_us()
    cycle, busiest = sum(stages), max(stages)
    rows, simulated = [], {m: simulated_ping_pong_us(m) for m in PING_PONG_DEPTHS}
    for m in PING_PONG_DEPTHS:
        rows.append(Row(f"pingpong.r1/m={m}", m * cycle / max(m * busiest, cycle), "x", "predicted"))
        gain = m * simulated[1] / simulated[m]
        rows.append(Row(f"pingpong.r1/m={m}/simulated=trampolines", gain, "x", "predicted"))
    return rows
