"""`xdeepserve bench engine`: FlowServe's choices against the alternatives that they replaced, in virtual
time.

DeepSeek-R1 runs timing-only, on a few DP groups that stand for a pod of 288 dies. Workloads are seeded;
requests arrive in virtual time, the same for both sides of a comparison. All rows are predictions of the
model; the papers publish no number for these comparisons but say which side wins. TTFT and TPOT: see
`RequestMetrics`.

Rows named `gain` divide the old choice by the new one: above 1 the newer choice wins. Rows of MTP on `tiny`,
and of its experts, are measured on a model that computes (bench/papers/acceptance.py, and
`balancing` here). Rows of the way from prefill to decode are in bench/papers/pd.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from xdeepserve.bench.papers import acceptance, pd, prefill_parallelism
from xdeepserve.bench.papers.sizes import MODEL
from xdeepserve.bench.report import Row
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import (
    CacheConfig,
    Decode,
    Deployment,
    ExecutionConfig,
    Route,
    SchedulerConfig,
    TEConfig,
)
from xdeepserve.engine.deploy.policies import DECODE as DECODE_POLICIES
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.run.clock.wiring import ClockWiring
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.engine.te.host import GC_PERIOD, PREEMPTION_RATE
from xdeepserve.engine.ways.routing import TimingConfig, generator
from xdeepserve.errors import XDeepServeError
from xdeepserve.evals.samples import examined
from xdeepserve.hw.spec import Spec
from xdeepserve.llm import LLM
from xdeepserve.loop import run
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.presets import resolve_model
from xdeepserve.prices.step_run import uncollected

DIES, OF_DIES = 4, 288
ACCEPTANCE = 0.9
GRAPHS = ExecutionConfig()
SEEDS = (1, 2, 3, 11)  # of the decode workloads
TALK_SEEDS = (7, 8, 9, 10, 11)
PROMPTS, OUTPUTS = (64, 4096), (32, 1025)  # of these
STATUS_PERIODS = (0.1, 1.0, 10.0)  # s
DECODE = {"kv_spread": "points", "p99_ttst": "ms", "p99_tpot": "ms"}  # what is compared there, and its unit


class TimedRequest(msgspec.Struct, frozen=True):
    """A request of a workload: its arrival, lengths and prompt."""

    at_ns: int
    num_prompt: int
    num_output: int
    token: int = 0  # of which its prompt consists: prompts of one token are prefixes of one another


class WorkloadResult(msgspec.Struct, frozen=True):
    """Times and counts of a workload's run."""

    metrics: list[RequestMetrics]
    ttst_ns: list[int]  # of each request with two tokens: arrival to second token
    usage: list[list[float]]  # of each sample, each decoding group's share of used KV blocks
    spreads_ns: list[int]  # of each step's first dispatch: last arrival - first arrival

    def p99_ttft_ms(self) -> float:
        return _percentile([m.ttft_ns for m in self.metrics if m.ttft_ns is not None])

    def p99_tpot_ms(self) -> float:
        return _percentile([m.tpot_ns for m in self.metrics if m.tpot_ns is not None])

    def p99_ttst_ms(self) -> float:
        return _percentile(self.ttst_ns)

    def mean_ttft_ms(self) -> float:
        return float(np.mean([m.ttft_ns for m in self.metrics if m.ttft_ns is not None])) / 1e6

    def mean_tpot_ms(self) -> float:
        return float(np.mean([m.tpot_ns for m in self.metrics if m.tpot_ns is not None])) / 1e6

    def kv_spread(self) -> float:
        """Compute the highest KV use of a group minus the lowest, in percentage points, on average over
        time."""
        return 100 * float(np.mean([max(each) - min(each) for each in self.usage]))


def _percentile(values: Sequence[float]) -> float:
    return float(np.percentile(np.asarray(values, np.float64), 99)) / 1e6


def all_rows() -> Iterator[Row]:
    """Yield all rows in order of computation."""
    parts = (
        *(prefill, prefill_parallelism.rows, decode, routes, pd.rows),
        *(mtp, acceptance.rows, execution, jitter, balancing),
    )
    return itertools.chain.from_iterable(part() for part in parts)


# ---- what is compared -----------------------------------------------------------------------------------


def prefill(num_requests: int = 200) -> list[Row]:
    """Compare ways to distribute prompts (XDS 4.3): one shared queue with a leader, who knows the groups
    exactly or by an all-gather, against a queue for each group, filled in turn."""
    work = workload(num_requests, rate=4, prompts=(128, 4096), outputs=(2, 6), seed=1)
    rows, base = [], SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=4096)
    ways = {
        "collaborative": base,
        "collaborative/all-gather": msgspec.structs.replace(base, statuses="all-gather"),
        "two-level": msgspec.structs.replace(base, dispatch="two-level"),
    }
    for way, scheduler in ways.items():
        result = serve(colocated(scheduler), work)
        rows.append(_row(f"prefill/{way}/p99_ttft", result.p99_ttft_ms(), "ms"))
    return [*rows, _gain("prefill/gain/p99_ttft", rows, "two-level/p99_ttft", "collaborative/p99_ttft")]


def decode(num_requests: int = 300, seeds: Sequence[int] = SEEDS) -> list[Row]:
    """Compare ways to choose a decode group (XDS 4.3): the group with the lowest KV use among those with
    room, reservations counted.

    The alternatives are simpler. The first takes the next in turn of the groups with room (next-open), so
    only the look at KV use differs. The second takes the next in turn of all groups. Requests then wait at
    full groups while others have room, which is part of their time to the second token (TTST) and of TPOT.
    Groups come near their batch limit, as the paper describes; outputs are of very different lengths, and
    each request reserves its own. Every seed is another workload. Values are means over seeds, gains are
    geometric means, and `worst_seed` is the least gain of any seed. At a third of this load every group has
    room for all requests.

    Groups send their KV use periodically (XDS 4.3 says "periodic" and no number). Rows `status_period` have
    the first seed's workload for some periods, the shortest first; the other rows use the exact state, a
    period of 0. 4 of the 61 layers are run, to save wall time.
    """
    policies = [*DECODE_POLICIES.rows]
    loads = [workload(num_requests, rate=120, prompts=PROMPTS, outputs=OUTPUTS, seed=seed) for seed in seeds]
    results = {policy: np.array([_decode(policy, work) for work in loads]) for policy in policies}
    rows = [
        _row(f"decode/{policy}/{what}", float(values.mean()), DECODE[what])
        for policy in policies
        for what, values in zip(DECODE, results[policy].T, strict=True)
    ]
    for policy in policies[1:]:
        for what, gains in zip(DECODE, (results[policy] / results["kv"]).T, strict=True):
            name = f"decode/gain/over_{policy}/{what}"
            rows.append(_row(name, float(np.exp(np.log(gains).mean())), "x"))
            rows.append(_row(f"{name}/worst_seed", float(gains.min()), "x"))
    for period in STATUS_PERIODS:
        for what, value in zip(DECODE, _decode("kv", loads[0], period), strict=True):
            rows.append(_row(f"decode/status_period={period:g}s/{what}", value, DECODE[what]))
    light = workload(num_requests // 3, rate=40, prompts=PROMPTS, outputs=OUTPUTS, seed=seeds[0])
    new, *old = (_decode(policy, light) for policy in policies)
    for policy, values in zip(policies[1:], old, strict=True):
        for what, after, before in zip(DECODE, new, values, strict=True):
            rows.append(_row(f"decode/light_load/gain/over_{policy}/{what}", before / after, "x"))
    return rows


def _decode(policy: Decode, work: Sequence[TimedRequest], period: float = 0.0) -> tuple[float, ...]:
    """Measure the spread of KV use, p99 TTST and p99 TPOT, with enough prefill dies to make decode the
    bottleneck."""
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
    result = serve(deployment, work, with_layers(4))
    return result.kv_spread(), result.p99_ttst_ms(), result.p99_tpot_ms()


def routes(num_talks: int = 24, num_turns: int = 5) -> list[Row]:
    """Compare ways to choose a prefill TE for a request (XDS 5.1, step 1). The choice by cached prefix,
    prompt length and load, made by one job executor or by four without a common ledger, is compared with the
    TE with fewest requests. Values are means over seeds, each with talks of its own, and gains are geometric
    means, as of `decode`.

    4 of the 61 layers are run, to save wall time.
    """
    ways: dict[str, tuple[Route, int]] = {"cost": ("cost", 1), "cost/4_job_executors": ("cost", 4)}
    units = {"mean_ttft": "ms", "p99_ttft": "ms", "cached": "%"}
    rows, found = [], {}
    for way, (route, num_executors) in (ways | {"sequences": ("sequences", 1)}).items():
        works = [talks(num_talks, num_turns, seed) for seed in TALK_SEEDS]
        found[way] = np.array([_routed(prefill_tes(route, num_executors), work) for work in works])
        means = found[way].mean(axis=0).tolist()
        rows += [
            _row(f"route/{way}/{what}", mean, units[what]) for what, mean in zip(units, means, strict=True)
        ]
    for what, gains in zip(("mean_ttft", "p99_ttft"), (found["sequences"] / found["cost"]).T, strict=False):
        rows.append(_row(f"route/gain/{what}", float(np.exp(np.log(gains).mean())), "x"))
        rows.append(_row(f"route/gain/{what}/worst_seed", float(gains.min()), "x"))
    return rows


def _routed(deployment: Deployment, work: Sequence[TimedRequest]) -> tuple[float, float, float]:
    """Measure mean and p99 of TTFT, and the share of prompt tokens found in caches, in percent."""
    result = serve(deployment, work, with_layers(4))
    cached = sum(m.num_cached_tokens for m in result.metrics) / sum(each.num_prompt for each in work)
    return result.mean_ttft_ms(), result.p99_ttft_ms(), 100 * cached


def talks(num_talks: int = 24, num_turns: int = 5, seed: int = 7) -> list[TimedRequest]:
    """Make a workload of talks of several turns, each of which begins with the turn before, among single
    prompts of 8,192 tokens."""
    rng, work = generator(seed, 0, 0), list[TimedRequest]()
    for talk in range(num_talks):
        at_ns, num_prompt = int(rng.integers(0, 2_000_000_000)), 0
        for _ in range(num_turns):
            num_prompt += int(rng.integers(200, 700))
            work.append(TimedRequest(at_ns, num_prompt, 2, token=1 + talk))
            at_ns += int(rng.integers(400_000_000, 900_000_000))
    for number in range(num_talks // 2):
        at_ns = int(rng.integers(0, 4_000_000_000))
        work.append(TimedRequest(at_ns, 8192, 2, token=1 + num_talks + number))
    return sorted(work, key=lambda each: each.at_ns)


def prefill_tes(route: Route, num_executors: int) -> Deployment:
    """Make a deployment of three prefill TEs in which prompts, not tokens, are the bottleneck."""
    return Deployment(
        name="pd",
        kind="pd",
        prefill=TEConfig(count=3, dies=2, tp=1, max_num_batched_tokens=2048),
        decode=TEConfig(dies=DIES),
        max_model_len=8448,
        scheduler=SchedulerConfig(max_num_seqs=32, route=route, job_executors=num_executors),
        cache=CacheConfig(block_size=128, num_blocks=512),
        execution=GRAPHS,
    )


def mtp(num_requests: int = 24) -> list[Row]:
    """Compare MTP with all of a step's graphs launched ahead and with the host between them (CM 4.2.4).
    Tokens per step, counted at the output, stand beside the expectation from the acceptance met (XDS 4.6);
    bench/papers/acceptance.py explains the difference."""
    work = workload(num_requests, rate=1e6, prompts=(512, 1024), outputs=(96, 97), seed=3)
    rows = []
    for way in ("pipelined", "naive"):
        execution = msgspec.structs.replace(GRAPHS, mtp=way)
        result = serve(colocated(DECODING, execution), work)
        note = _assumed("host_sampling") if way == "naive" else ""
        row = _row(f"mtp/{way}/tpot", result.mean_tpot_ms(), "ms")
        rows.append(msgspec.structs.replace(row, note=note))
        if way == "pipelined":
            rows += _tokens_per_step(f"p={ACCEPTANCE}", result)
    rows.append(_gain("mtp/gain/tpot", rows, "naive/tpot", "pipelined/tpot"))
    twice = msgspec.structs.replace(colocated(DECODING), mtp=2)
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
    """Compare ways to launch a step: a graph is one launch, single operators are many (XDS 2.3); planning may
    overlap the step before (DeepServe)."""
    work = workload(num_requests, rate=1e6, prompts=(512, 1024), outputs=(24, 25), seed=4)
    ways = {
        "graph": GRAPHS,
        "single-op": msgspec.structs.replace(GRAPHS, mode="op"),
        "graph-overlap": msgspec.structs.replace(GRAPHS, overlap=True),
    }
    rows = [
        _row(f"execution/{name}/tpot", serve(colocated(DECODING, config), work).mean_tpot_ms(), "ms")
        for name, config in ways.items()
    ]
    rows.append(_gain("execution/gain/graph", rows, "single-op/tpot", "/graph/tpot"))
    rows.append(_gain("execution/gain/overlap", rows, "/graph/tpot", "graph-overlap/tpot"))
    return rows


def jitter(num_steps: int = 2048) -> list[Row]:
    """Measure the spread of the groups' arrivals at a step's first dispatch, in the fourth layer (XDS 4.4):
    p99 and maximum.

    A step sees an automatic garbage collection once in 64, for all four groups together, so p99 needs
    thousands of steps. One request in each group is enough, without drafts, because jitter comes from the
    host. The sizes of its effects are assumed, and rows name those that they depend on.
    """
    work = workload(DIES, rate=1e6, prompts=(64, 65), outputs=(num_steps, num_steps + 1), seed=5)
    ways = {
        "controlled": (GRAPHS, ""),
        "no-core-pinning": (
            msgspec.structs.replace(GRAPHS, pin_cores=False),
            f"{_assumed('preemption')}, {100 * PREEMPTION_RATE:g} % of launches",
        ),
        "no-cached-graphs": (msgspec.structs.replace(GRAPHS, cache_graphs=False), _assumed("guard_checks")),
        "automatic-gc": (
            msgspec.structs.replace(GRAPHS, control_gc=False),
            f"{_assumed('gc_pause')}, once in {GC_PERIOD} steps",
        ),
    }
    # The layers after the first MoE layer change nothing but the wall time.
    model = with_layers(4)
    rows = []
    for name, (config, note) in ways.items():
        deployment = msgspec.structs.replace(colocated(DECODING, config), mtp=0)
        spreads = serve(deployment, work, model).spreads_ns
        for what, value in (("p99", _percentile(spreads)), ("max", max(spreads) / 1e6)):
            row = _row(f"jitter/{name}/first_dispatch_{what}", value, "ms")
            rows.append(msgspec.structs.replace(row, note=note))
    return rows


def _assumed(name: str) -> str:
    """Describe an effect of the host whose size is assumed, by its parameter."""
    return f"assumed: {name} = {1000 * getattr(Spec(), name).value:g} ms"


DECODING = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=4096)


def with_layers(count: int) -> Checkpoint:
    """Return the model with fewer layers, all of full width."""
    model = resolve_model(MODEL)
    model.config = msgspec.structs.replace(model.config, num_hidden_layers=count)
    return model


def _row(name: str, value: float, unit: str) -> Row:
    return Row(f"engine/{name}", value, unit, "predicted")


def _gain(name: str, rows: Sequence[Row], old: str, new: str) -> Row:
    """Divide two rows: the first with a name ending in `old`, by the first ending in `new`."""
    before, after = (next(row.value for row in rows if row.name.endswith(end)) for end in (old, new))
    return _row(name, before / after, "x")


def colocated(scheduler: SchedulerConfig, execution: ExecutionConfig = GRAPHS) -> Deployment:
    """Make a colocated deployment of the bench, with its own scheduler and execution."""
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
    """Draw a workload: Poisson arrivals, `rate` a second; lengths log-uniform in [low, high)."""
    rng = generator(seed, 0, 0)
    gaps = rng.exponential(1e9 / rate, num_requests)

    def lengths(low: int, high: int) -> list[int]:
        return np.exp(rng.uniform(np.log(low), np.log(high), num_requests)).astype(int).tolist()

    times = np.cumsum(gaps).astype(np.int64).tolist()
    return [TimedRequest(*each) for each in zip(times, lengths(*prompts), lengths(*outputs), strict=True)]


def serve(
    deployment: Deployment, arrivals: Sequence[TimedRequest], model: Checkpoint | None = None
) -> WorkloadResult:
    """Serve a workload to the last token with the real engine, without its arithmetic."""
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
            prompt = [arrival.token] * arrival.num_prompt
            requests.append(engine.submit(prompt, params, f"request {number}", is_bounded=False))

    async def monitor() -> None:
        """Sample the KV use of decoding groups every 50 ms of virtual time while there is any."""
        while True:
            await clock.sleep(50_000_000)
            each = [group.rtc.usage for group in decoding]
            if any(each):
                usage.append(each)

    sampler = clock.spawn(monitor(), name="monitor")
    await clock.spawn(client(), name="client")
    metrics, ttst_ns = [], []
    for arrival, request in zip(arrivals, requests, strict=True):
        num_tokens = 0
        async for delta in request:
            if num_tokens < 2 <= num_tokens + len(delta.token_ids):
                ttst_ns.append(delta.at_ns - arrival.at_ns)
            num_tokens += len(delta.token_ids)
            if delta.metrics is not None:
                metrics.append(delta.metrics)
    sampler.cancel()
    engine.check_integrity()
    await engine.stop()
    te = engine.plan.tes[-1]
    assert isinstance(te.wiring, ClockWiring)
    spreads = te.wiring.among[0].spreads_ns
    per_step = te.config.num_moe_layers + te.sizes.steps.mtp
    return WorkloadResult(
        metrics, ttst_ns, usage, [ns for event, ns in spreads.items() if event % per_step == 1 % per_step]
    )


# What EPLB brings on the trained model, which computes: how many rows the hottest die has to the mean.
#
# The `tiny` preset, one routed expert and one redundant slot on each of 32 dies, answers held-out prompts of
# a single kind, which have their favourite experts (`examples/12_experts.py`). The first half of the prompts
# is what the TE-shell learns from; rows are counted, where they arrive, during the second half.

KIND, NUM_DIES, NUM_PROMPTS, MAX_TOKENS = "arithmetic", 32, 24, 24
INTERVALS = {"primaries": 0.0, "eplb": 0.008}  # virtual seconds; about half as long as the first half takes


def balancing(num_dies: int = NUM_DIES) -> list[Row]:
    """Compute rows of the hottest die over the mean, on average over layers, without replicas and with
    them."""
    found = {name: hottest_over_mean(seconds, num_dies) for name, seconds in INTERVALS.items()}
    made = [
        Row(f"engine/experts/tiny/{name}/hottest_die_over_mean", value, "x", "measured")
        for name, value in found.items()
    ]
    gain = found["primaries"] / found["eplb"]
    return [*made, Row("engine/experts/gain/hottest_die_over_mean", gain, "x", "measured")]


def hottest_over_mean(interval: float, num_dies: int) -> float:
    """Measure the rows of the hottest die over the mean, averaged over layers, in the second half of the
    prompts.

    Replicas are balanced every `interval` virtual seconds; 0 means never.
    """
    prompts = [examined(KIND, i).prompt for i in range(NUM_PROMPTS)]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    settings = [f"dies={num_dies}", "experts.redundant_slots=1", f"experts.balance_interval={interval}"]
    with LLM("tiny", "colocated", overrides=[*settings, "max_model_len=768"]) as llm:
        half = NUM_PROMPTS // 2
        llm.generate(prompts[:half], params)
        before = _rows_by_die(llm)
        llm.generate(prompts[half:], params)
        came = _rows_by_die(llm) - before
        if interval and not llm.engine.stats().num_reconfigurations:
            raise XDeepServeError("no replica of an expert has changed: the interval is too long")
    return float(np.mean(came.max(axis=0) / came.mean(axis=0)))


def _rows_by_die(llm: LLM) -> np.ndarray:
    """Count the token copies received for each die's experts, [dies, layers]."""
    (plan,) = llm.engine.plan.tes
    return np.array([mem.redundant.num_rows for mem in plan.memories if mem.redundant is not None])
