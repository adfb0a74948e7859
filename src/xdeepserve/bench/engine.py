"""`xdeepserve bench engine`: FlowServe's choices against what they replaced, in virtual time.

DeepSeek-R1, timing-only, at a few DP groups that stand for a pod of 288 dies. Workloads are seeded, requests
arrive in virtual time, the same for both sides of a comparison. All rows are predictions of the model; the
papers publish no number for these comparisons but say which side wins. TTFT and TPOT: see `RequestMetrics`.

Rows named `gain` divide what was replaced by what replaced it: above 1 the newer choice wins. Rows of MTP on
`tiny`, and of its experts, are measured on a model that computes (bench/acceptance.py, bench/balancing.py);
rows of the way from prefill to decode are in bench/pd.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from xdeepserve.bench import acceptance, balancing, pd
from xdeepserve.bench.report import Row
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import (
    CacheConfig,
    Deployment,
    ExecutionConfig,
    SchedulerConfig,
    TEConfig,
)
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.run.clock.clock_net import ClockNet
from xdeepserve.engine.run.clock.routing import TimingConfig, generator
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.loop import run
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.planner.decode_run import uncollected

MODEL = "deepseek-r1"
DIES, OF_DIES = 4, 288
ACCEPTANCE = 0.9
GRAPHS = ExecutionConfig()
SEEDS = (1, 2, 3, 11)  # of the decode workloads
STATUS_PERIODS = (0.1, 1.0, 10.0)  # s
DECODE = {"kv_spread": "points", "p99_tpot": "ms"}  # what is compared there, and its unit


class TimedRequest(msgspec.Struct, frozen=True):
    """A request of a workload."""

    at_ns: int
    num_prompt: int
    num_output: int


class WorkloadResult(msgspec.Struct, frozen=True):
    """What a workload met with."""

    metrics: list[RequestMetrics]
    usage: list[list[float]]  # of each sample, each decoding group's share of used KV blocks
    spreads_ns: list[int]  # of each step's first dispatch: last arrival - first arrival

    def p99_ttft_ms(self) -> float:
        return _percentile([m.ttft_ns for m in self.metrics if m.ttft_ns is not None])

    def p99_tpot_ms(self) -> float:
        return _percentile([m.tpot_ns for m in self.metrics if m.tpot_ns is not None])

    def mean_tpot_ms(self) -> float:
        return float(np.mean([m.tpot_ns for m in self.metrics if m.tpot_ns is not None])) / 1e6

    def kv_spread(self) -> float:
        """Highest use of a group minus lowest, in points, on average over time."""
        return 100 * float(np.mean([max(each) - min(each) for each in self.usage]))


def _percentile(values: Sequence[float]) -> float:
    return float(np.percentile(np.asarray(values, np.float64), 99)) / 1e6


def all_rows() -> Iterator[Row]:
    """Rows as they are found."""
    parts = prefill, decode, pd.rows, mtp, acceptance.rows, execution, jitter, balancing.rows
    return itertools.chain.from_iterable(part() for part in parts)


# ---- what is compared -----------------------------------------------------------------------------------


def prefill(num_requests: int = 200) -> list[Row]:
    """XDS 4.3: one shared queue and a leader, who knows the groups as they are or by an all-gather, against a
    queue for each group, filled in turn."""
    work = workload(num_requests, rate=4, prompts=(128, 4096), outputs=(2, 6), seed=1)
    rows, base = [], SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=4096)
    ways = {
        "collaborative": base,
        "collaborative/all-gather": msgspec.structs.replace(base, statuses="all-gather"),
        "two-level": msgspec.structs.replace(base, dispatch="two-level"),
    }
    for way, scheduler in ways.items():
        result = serve(_colocated(scheduler), work)
        rows.append(_row(f"prefill/{way}/p99_ttft", result.p99_ttft_ms(), "ms"))
    return [*rows, _gain("prefill/gain/p99_ttft", rows, "two-level/p99_ttft", "collaborative/p99_ttft")]


def decode(num_requests: int = 300, seeds: Sequence[int] = SEEDS) -> list[Row]:
    """XDS 4.3: to the group with the lowest KV use, reservations counted, against round robin.

    Where groups come near their batch limit, which is what the paper describes: round robin sends requests to
    groups that are full, where they wait while others have room, and that is in their TPOT. Outputs are of
    very different lengths, and each request reserves its own. Every seed is another workload. Values are
    means over them, gains are geometric means, and `worst_seed` is the least gain of any. At a third of this
    load every group has room for everybody: then only the spread of KV use differs, and TPOT but for noise.

    Groups send their KV use every so often (XDS 4.3 says "periodic" and no number): rows `status_period` have
    the first seed's workload for some periods, the shortest first; 0, as they are, is what the rest has.

    With 4 of the 61 layers, to save wall time.
    """
    policies: tuple[Literal["kv", "round-robin"], ...] = ("kv", "round-robin")
    results: dict[str, list[tuple[float, float]]] = {policy: [] for policy in policies}
    for seed in seeds:
        work = workload(num_requests, rate=120, prompts=(64, 4096), outputs=(32, 1025), seed=seed)
        for policy in policies:
            results[policy].append(_decode(policy, work))
    rows = []
    for policy in policies:
        for what, values in zip(DECODE, np.array(results[policy]).T, strict=True):
            rows.append(_row(f"decode/{policy}/{what}", float(values.mean()), DECODE[what]))
    gains = np.array(results["round-robin"]) / np.array(results["kv"])
    for what, values in zip(DECODE, gains.T, strict=True):
        rows.append(_row(f"decode/gain/{what}", float(np.exp(np.log(values).mean())), "x"))
        rows.append(_row(f"decode/gain/{what}/worst_seed", float(values.min()), "x"))
    work = workload(num_requests, rate=120, prompts=(64, 4096), outputs=(32, 1025), seed=seeds[0])
    for period in STATUS_PERIODS:
        for what, value in zip(DECODE, _decode("kv", work, period), strict=True):
            rows.append(_row(f"decode/status_period={period:g}s/{what}", value, DECODE[what]))
    light = workload(num_requests // 3, rate=40, prompts=(64, 4096), outputs=(32, 1025), seed=seeds[0])
    new, old = (_decode(policy, light) for policy in policies)
    for what, after, before in zip(DECODE, new, old, strict=True):
        rows.append(_row(f"decode/light_load/gain/{what}", before / after, "x"))
    return rows


def _decode(
    policy: Literal["kv", "round-robin"], work: Sequence[TimedRequest], period: float = 0.0
) -> tuple[float, float]:
    """Spread of KV use and p99 TPOT, with enough prefill dies for decode to be the bottleneck."""
    deployment = Deployment(
        name="pd",
        kind="pd",
        prefill=TEConfig(dies=2 * DIES, tp=1, max_num_batched_tokens=8192),
        decode=TEConfig(dies=DIES),
        mtp=1,
        max_model_len=5200,
        scheduler=SchedulerConfig(
            max_num_seqs=24, max_num_batched_tokens=4096, decode=policy, status_period=period
        ),
        cache=CacheConfig(block_size=128, num_blocks=256, prefix=False),
        execution=GRAPHS,
    )
    result = serve(deployment, work, _with_layers(4))
    return result.kv_spread(), result.p99_tpot_ms()


def mtp(num_requests: int = 24) -> list[Row]:
    """CM 4.2.4: all of a step's graphs launched ahead, against the host between them. XDS 4.6: tokens per
    step, counted from what was handed out, beside 1 + p with one draft and 1 + p1 + p1 p2 with two, from the
    acceptance that was met with (bench/acceptance.py says why the two may differ)."""
    work = workload(num_requests, rate=1e6, prompts=(512, 1024), outputs=(96, 97), seed=3)
    rows = []
    for way in ("pipelined", "naive"):
        execution = msgspec.structs.replace(GRAPHS, mtp=way)
        result = serve(_colocated(DECODING, execution), work)
        rows.append(_row(f"mtp/{way}/tpot", result.mean_tpot_ms(), "ms"))
        if way == "pipelined":
            rows += _tokens_per_step(f"p={ACCEPTANCE}", result)
    rows.append(_gain("mtp/gain/tpot", rows, "naive/tpot", "pipelined/tpot"))
    twice = msgspec.structs.replace(_colocated(DECODING), mtp=2)
    result = serve(twice, work)
    rows.append(_row("mtp/pipelined/k=2/tpot", result.mean_tpot_ms(), "ms"))
    return rows + _tokens_per_step(f"k=2/p={ACCEPTANCE}", result)


def _tokens_per_step(way: str, result: WorkloadResult) -> list[Row]:
    found = acceptance.Drafts.of(result.metrics)
    return [
        _row(f"mtp/tokens_per_step/{way}", found.tokens_per_step, ""),
        _row(f"mtp/tokens_per_step/{way}/expected", found.expected, ""),
    ]


def execution(num_requests: int = 16) -> list[Row]:
    """XDS 2.3: a graph is one launch, single-op many. DeepServe: planning overlaps the step before."""
    work = workload(num_requests, rate=1e6, prompts=(512, 1024), outputs=(24, 25), seed=4)
    ways = {
        "graph": GRAPHS,
        "single-op": msgspec.structs.replace(GRAPHS, mode="op"),
        "graph-overlap": msgspec.structs.replace(GRAPHS, overlap=True),
    }
    rows = [
        _row(f"execution/{name}/tpot", serve(_colocated(DECODING, config), work).mean_tpot_ms(), "ms")
        for name, config in ways.items()
    ]
    rows.append(_gain("execution/gain/graph", rows, "single-op/tpot", "/graph/tpot"))
    rows.append(_gain("execution/gain/overlap", rows, "/graph/tpot", "graph-overlap/tpot"))
    return rows


def jitter(num_steps: int = 2048) -> list[Row]:
    """XDS 4.4: how far apart the groups reach the first dispatch of a step (the fourth layer): p99 and most.

    A step sees an automatic collection once in 64, four groups taken together, so that p99 needs thousands of
    steps. One request in each group is enough, and no drafts, since jitter is the host's.
    """
    work = workload(DIES, rate=1e6, prompts=(64, 65), outputs=(num_steps, num_steps + 1), seed=5)
    ways = {
        "controlled": GRAPHS,
        "no-core-pinning": msgspec.structs.replace(GRAPHS, pin_cores=False),
        "no-cached-graphs": msgspec.structs.replace(GRAPHS, cache_graphs=False),
        "automatic-gc": msgspec.structs.replace(GRAPHS, control_gc=False),
    }
    # The layers after the first MoE layer change nothing but the wall time.
    model = _with_layers(4)
    rows = []
    for name, config in ways.items():
        deployment = msgspec.structs.replace(_colocated(DECODING, config), mtp=0)
        spreads = serve(deployment, work, model).spreads_ns
        rows.append(_row(f"jitter/{name}/first_dispatch_p99", _percentile(spreads), "ms"))
        rows.append(_row(f"jitter/{name}/first_dispatch_max", max(spreads) / 1e6, "ms"))
    return rows


DECODING = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=4096)


def _with_layers(count: int) -> Checkpoint:
    """The model with fewer layers, all of full width."""
    model = resolve_model(MODEL)
    model.config = msgspec.structs.replace(model.config, num_hidden_layers=count)
    return model


def _row(name: str, value: float, unit: str) -> Row:
    return Row(f"engine/{name}", value, unit, "predicted")


def _gain(name: str, rows: Sequence[Row], old: str, new: str) -> Row:
    """The rows whose names end in `old` and `new`, divided."""
    before, after = (next(row.value for row in rows if row.name.endswith(end)) for end in (old, new))
    return _row(name, before / after, "x")


def _colocated(scheduler: SchedulerConfig, execution: ExecutionConfig = GRAPHS) -> Deployment:
    return Deployment(
        name="colocated",
        kind="colocated",
        dies=DIES,
        mtp=1,
        max_model_len=8192,
        scheduler=scheduler,
        cache=CacheConfig(block_size=128, num_blocks=1024, prefix=False),
        execution=execution,
    )


# ---- running a workload ---------------------------------------------------------------------------------


def workload(
    num_requests: int, rate: float, prompts: tuple[int, int], outputs: tuple[int, int], seed: int
) -> list[TimedRequest]:
    """Poisson arrivals, `rate` a second; lengths log-uniform in [low, high)."""
    rng = generator(seed, 0, 0)
    gaps = rng.exponential(1e9 / rate, num_requests)

    def lengths(low: int, high: int) -> list[int]:
        return np.exp(rng.uniform(np.log(low), np.log(high), num_requests)).astype(int).tolist()

    times = np.cumsum(gaps).astype(np.int64).tolist()
    return [TimedRequest(*each) for each in zip(times, lengths(*prompts), lengths(*outputs), strict=True)]


def serve(
    deployment: Deployment, arrivals: Sequence[TimedRequest], model: Checkpoint | None = None
) -> WorkloadResult:
    """Serve a workload with the real engine, whose arithmetic is left out, until the last token."""
    timing = TimingConfig(acceptance=ACCEPTANCE, of_dies=OF_DIES)
    engine = Engine(PodPlan(model or resolve_model(MODEL), deployment, timing=timing))
    with uncollected():
        return run(_serve(engine, arrivals))


async def _serve(engine: Engine, arrivals: Sequence[TimedRequest]) -> WorkloadResult:
    await engine.start()
    clock, requests = engine.plan.pod.clock, []
    usage: list[list[float]] = []
    decoding = engine.je.tes[-1].groups

    async def client() -> None:
        for number, arrival in enumerate(arrivals):
            await clock.sleep_until(arrival.at_ns)
            params = SamplingParams(max_tokens=arrival.num_output, temperature=0.0, ignore_eos=True)
            prompt = [0] * arrival.num_prompt
            requests.append(engine.submit(prompt, params, f"request {number}", is_bounded=False))

    async def monitor() -> None:
        """KV use of the decoding groups, every 50 ms of virtual time while there is any."""
        while True:
            await clock.sleep(50_000_000)
            each = [group.rtc.usage for group in decoding]
            if any(each):
                usage.append(each)

    sampler = clock.spawn(monitor(), name="monitor")
    await clock.spawn(client(), name="client")
    metrics = []
    for request in requests:
        async for delta in request:
            if delta.metrics is not None:
                metrics.append(delta.metrics)
    sampler.cancel()
    engine.check_integrity()
    await engine.stop()
    te = engine.plan.tes[-1]
    assert isinstance(te.net, ClockNet)
    spreads = te.net.hubs[0].spreads_ns
    per_step = te.config.num_moe_layers + te.sizes.mtp
    return WorkloadResult(
        metrics, usage, [ns for event, ns in spreads.items() if event % per_step == 1 % per_step]
    )
