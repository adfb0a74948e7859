"""Two microbatches that overlap on dies with attention and experts: the same bits, and less virtual time."""

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from tests.tools import one_die
from xdeepserve import LLM, SamplingParams
from xdeepserve.bench.papers import pipelines
from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.fitting import fit
from xdeepserve.engine.deploy.resolve import resolve
from xdeepserve.engine.lanes import STREAMS
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.walk.schedule import InOrder, Schedule, side_by_side
from xdeepserve.errors import DeadlineError, DeploymentError, XDeepServeError
from xdeepserve.hw.clock import Clock, Waiting
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.hw.trace import TraceSpan
from xdeepserve.llm import build_engine, digest
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.presets import PRESET_DIRECTORY, TinyCheckpoint
from xdeepserve.model.seeded import SeededCheckpoint
from xdeepserve.step.stage import Program

PROMPTS = [[1, 2, 3], list(range(100)), [7] * 50, [9], [10, 11], [5] * 150]
PARAMS = SamplingParams(max_tokens=4, temperature=0.5, seed=1, ignore_eos=True)
TWO = "pipeline.microbatches=2"
ENGINES = "pipeline.overlap=engines"


@pytest.fixture(scope="module", params=["fp32", "int8"])
def precision(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(precision: str) -> str:
    return digest(one_die(PROMPTS, PARAMS, precision))


SHAPES = [
    ("colocated", ["dies=4"]),
    ("colocated", ["dies=4", "mtp=1", "pipeline.attention_cores=20"]),
    ("colocated", ["dies=3", "mtp=2", "scheduler.max_num_batched_tokens=49"]),
    ("colocated", ["dies=1"]),
    ("colocated", ["dies=4", ENGINES, "mtp=2"]),
    ("colocated", ["dies=3", ENGINES, "execution.overlap=true", "mtp=1"]),
    ("colocated", ["dies=2", "execution.mode=op"]),
    ("colocated", ["dies=2", ENGINES, "execution.mode=graph"]),
    ("pd", ["prefill.dies=2", "prefill.tp=1", "decode.dies=2"]),
    ("transformerless", ["prefill.dies=2", "mtp=1"]),
    *[
        (deployment, [*overrides, f"{role}tp_mode={mode}"])
        for mode in ("tp", "sp-tp-sp")
        for deployment, role, overrides in (
            ("colocated", "", ["dies=2", "tp=2", "mtp=2"]),
            ("colocated", "", ["dies=4", "tp=2", ENGINES, "mtp=1", "execution.overlap=true"]),
            ("colocated", "", ["dies=4", "tp=4", "scheduler.max_num_batched_tokens=33", "mtp=1"]),
            ("colocated", "", ["dies=4", "tp=4", ENGINES, "execution.mode=op"]),
            ("colocated", "", ["dies=4", "tp=2", "execution.mode=graph", "mtp=2"]),
            ("colocated", "", ["dies=8", "tp=8", ENGINES, "execution.mode=graph"]),
            ("pd", "prefill.", ["decode.dies=4", "decode.tp=2", "mtp=1", "transfer=layer"]),
            ("transformerless", "prefill.", ["mtp=1"]),
        )
    ],
]


@pytest.mark.thin(6)
@pytest.mark.parametrize(("deployment", "overrides"), SHAPES, ids=[str(i) for i in range(len(SHAPES))])
def test_the_bits_of_one_die(
    tiny: TinyCheckpoint, precision: str, expected: str, deployment: str, overrides: list[str]
) -> None:
    with LLM(tiny, deployment, precision, overrides=[TWO, *overrides]) as llm:
        assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == expected
        llm.engine.check_integrity()


@pytest.mark.parametrize("overlap", ["cores", "engines"])
def test_dies_that_wake_in_another_order_change_nothing(
    tiny: TinyCheckpoint, overlap: str, expected: str, precision: str
) -> None:
    overrides = ["dies=4", TWO, f"pipeline.overlap={overlap}"]
    with LLM(tiny, "colocated", precision, overrides=overrides, clock_seed=3) as llm:
        assert digest(llm.generate(PROMPTS, PARAMS, keep_logits=True)) == expected


def test_prefill_overlaps_by_engines_and_decode_by_cores(tiny_config: ModelConfig) -> None:
    prefill, decode = fit(resolve("pd", [TWO]), tiny_config)
    assert (prefill.walk.overlap, decode.walk.overlap) == ("engines", "cores")
    assert [te.walk.overlap for te in fit(resolve("transformerless", [TWO]), tiny_config)] == [
        "engines",
        None,
    ]


@pytest.mark.parametrize(
    ("deployment", "overrides", "reason"),
    [
        ("colocated", ["pipeline.microbatches=3"], "pipeline.microbatches must be 1 or 2, found 3"),
        ("colocated", [TWO, "pipeline.attention_cores=24"], "must be between 1 and 23"),
        ("monolithic", [TWO], "pipeline is no setting of monolithic"),
        ("moe-attention", [TWO], "pipeline is no setting of moe-attention"),
    ],
)
def test_what_cannot_be_is_refused(
    tiny_config: ModelConfig, deployment: str, overrides: list[str], reason: str
) -> None:
    with pytest.raises(DeploymentError, match=reason) as caught:
        fit(resolve(deployment, overrides), tiny_config)
    assert "\n" not in str(caught.value)


async def test_a_stream_takes_its_turns_in_order() -> None:
    clock, done = Clock(), []
    stream = InOrder(clock, "stream")

    async def take(number: int) -> None:
        await clock.sleep(10 * (3 - number))  # the last comes first
        async with stream.turn(number):
            await clock.sleep(5)
            done.append((number, clock.now))

    await asyncio.gather(*[clock.spawn(take(number)) for number in range(3)])
    assert done == [(0, 35), (1, 40), (2, 45)]


async def test_a_microbatch_that_fails_does_not_leave_the_other_waiting(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=["dies=2", TWO])
    await engine.start()

    async def broken(*_: object) -> None:
        raise ZeroDivisionError("the stream caught fire")

    engine.je.tes[0].executors[0].traversal.runners[0].run = broken  # type: ignore[method-assign]
    with pytest.raises((XDeepServeError, DeadlineError), match="caught fire"):
        async for _ in engine.submit(list(range(40)), PARAMS, "r"):
            pass
    await engine.stop()


async def test_an_error_ends_a_microbatch_that_waits_for_other_dies(tiny: TinyCheckpoint) -> None:
    engine = build_engine(tiny, "colocated", "int8", overrides=["dies=2", TWO])
    await engine.start()
    executor, clock, told, ended = engine.je.tes[0].executors[0], engine.plan.pod.clock, [], []
    first, second = executor.traversal.runners
    run, num_runs = first.run, 0

    async def broken(program: Program) -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs > 1:
            await clock.sleep(1000)
            told.append(clock.now)
            raise ZeroDivisionError("the stream caught fire")
        await run(program)

    async def exchange(program: Program) -> None:
        try:
            waiter = clock.waiter(lambda: Waiting("dispatch", 0, 1, "flag", 1, 0))
            await clock.wait(waiter, clock.now + 10**12)
        finally:
            ended.append(clock.now)

    async def reported(schedule: Schedule, *args: Any) -> None:
        try:
            await schedule(*args)
        finally:
            told.append(clock.now)

    first.run, second.run = broken, exchange  # type: ignore[method-assign]
    executor.traversal = executor.traversal._replace(schedule=partial(reported, executor.traversal.schedule))
    with pytest.raises((XDeepServeError, DeadlineError), match="caught fire"):
        async for _ in engine.submit(list(range(40)), PARAMS, "r"):
            pass
    await engine.stop()
    assert len(told) == 2
    assert ended == [told[0]] == [told[1]]


async def test_the_first_error_of_parts_is_theirs() -> None:
    clock, ended = Clock(), []

    async def part(number: int) -> None:
        try:
            await clock.sleep(10 * (3 - number))
            raise ZeroDivisionError(f"part {number}")
        finally:
            ended.append((number, clock.now))
            if number == 1:
                raise KeyError("while it was cancelled")

    with pytest.raises(ZeroDivisionError, match="part 2"):
        await clock.spawn(side_by_side(clock, [partial(part, number) for number in range(3)]))
    assert ended == [(2, 10), (0, 10), (1, 10)]
    assert clock.rests


# ---- virtual time -------------------------------------------------------------------------------------


def slow(compute: float, links: float) -> Spec:
    """A die whose kernels and links are slow enough for a small model to keep it as busy as a large one."""
    spec = Spec()

    def scaled(param: Param, factor: float) -> Param:
        return Param(param.value * factor, param.unit, "slowed down")

    return msgspec.structs.replace(
        spec,
        int8_peak=scaled(spec.int8_peak, compute),
        bf16_peak=scaled(spec.bf16_peak, compute),
        exchange_copy=scaled(spec.exchange_copy, 1 / links),
    )


class Served(msgspec.Struct):
    """Tokens, mean times in us of the second round, whose prompts are cached, and what was traced."""

    tokens: list[list[int]]
    ttft: float
    tpot: float
    spans: list[TraceSpan]


def serve(
    model: SeededCheckpoint, spec: Spec, num_requests: int, length: int, overrides: Sequence[str]
) -> Served:
    """The same prompts twice; of both rounds, the first's time to the first token and the second's others."""
    deployment = resolve("colocated", ["dies=4", "cache.num_blocks=600", *overrides])
    plan = PodPlan(model, deployment, "int8", trace=True, spec=spec)
    engine = Engine(plan)

    async def rounds() -> Served:
        await engine.start()
        results = []
        for number in range(2):
            params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            requests = [engine.submit([i + 1] * length, params, f"{number}-{i}") for i in range(num_requests)]
            deltas = [[delta async for delta in request] for request in requests]
            tokens = [[t for delta in some for t in delta.token_ids] for some in deltas]
            metrics = [some[-1].metrics for some in deltas]
            ttft = sum(m.ttft_ns for m in metrics if m is not None) / num_requests / 1000
            tpot = sum(m.tpot_ns or 0 for m in metrics if m is not None) / num_requests / 1000
            results.append((tokens, ttft, tpot))
        await engine.stop()
        return Served(results[0][0], results[0][1], results[1][2], plan.pod.trace.spans)

    return asyncio.run(rounds())


def test_two_streams_of_cores_beat_one_after_the_other_in_decode(tiny: TinyCheckpoint) -> None:
    """Both streams are about equally busy, at so many cores, and there are layers enough to fill them.

    The die is slow in arithmetic and exchanges but not in memory, whose bandwidth the streams would share.
    """
    config = msgspec.structs.replace(tiny.config, num_hidden_layers=8)
    deep = SeededCheckpoint("deep", PRESET_DIRECTORY / "tiny-random", config, seed=1)
    spec = slow(3e-5, 1 / 200)
    serial = serve(deep, spec, 16, 240, [])
    piped = serve(deep, spec, 16, 240, [TWO, "pipeline.overlap=cores", "pipeline.attention_cores=12"])
    assert piped.tokens == serial.tokens
    assert piped.tpot < 0.95 * serial.tpot


def test_engines_side_by_side_beat_one_after_the_other_in_prefill(tiny: TinyCheckpoint) -> None:
    spec = slow(3e-4, 1 / 20)
    serial = serve(tiny, spec, 16, 40, [])
    piped = serve(tiny, spec, 16, 40, [TWO, ENGINES])
    assert piped.tokens == serial.tokens
    assert piped.ttft < 0.85 * serial.ttft


def overlap(a: TraceSpan, b: TraceSpan) -> bool:
    return a.start_ns < b.end_ns and b.start_ns < a.end_ns


def test_streams_swap_microbatches(tiny: TinyCheckpoint) -> None:
    """Attention of one microbatch runs while the experts of the other do, layer after layer."""
    spans = serve(tiny, slow(1e-3, 1 / 20), 8, 40, [TWO]).spans
    turns = [span for span in spans if span.node == 0 and span.lane in STREAMS]
    overlaps = [
        (a.args, b.args)
        for a in turns
        for b in turns
        if (a.lane, b.lane) == STREAMS and b.name.startswith("experts") and overlap(a, b)
    ]
    assert overlaps
    for attention, experts in overlaps:
        assert attention is not None
        assert experts is not None
        assert attention["microbatch"] != experts["microbatch"]
        ahead = attention["layer"] - experts["layer"]
        assert ahead == (0 if attention["microbatch"] else 1)


def test_prefill_spreads_over_three_kinds_of_engines(tiny: TinyCheckpoint) -> None:
    """CM Figure 18b: while one microbatch is on its way by DMA, AIC cores work on the other."""
    spans = serve(tiny, slow(3e-4, 1 / 20), 8, 40, [TWO, ENGINES]).spans
    mine = [span for span in spans if span.node == 0]
    assert {s.lane for s in mine if s.name in ("dispatch 6-7 pull", "combine 6-7 pull")} == {"URMA"}
    assert {s.lane for s in mine if s.name in ("CombineCompute", "dispatch 2 quantise")} == {"AIV"}
    kernels = [s for s in mine if s.lane == "AIC" and s.args and "microbatch" in s.args]
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(kernels))
    away = [s for s in mine if s.name in ("dispatch 6-7", "combine 6-7")]
    assert {s.lane for s in away} == {"XCCL microbatch 0", "XCCL microbatch 1"}
    assert {s.lane for s in mine if s.name in ("attention", "experts")} == {"microbatch 0", "microbatch 1"}
    for name in ("MLA", "Experts"):
        assert any(
            overlap(a, b) and a.args["microbatch"] != b.args["microbatch"]
            for a in away
            for b in kernels
            if b.name == name and a.args and b.args
        )


@pytest.mark.parametrize(("context", "batch", "start"), [(1024, 48, 22), (16384, 12, 6)])
def test_cores_move_to_the_stream_that_takes_longer(context: int, batch: int, start: int) -> None:
    """CM 4.2.3: from a split that suits the other case, near the best one of some that stay."""
    moving = pipelines.simulated_layer_us(batch, 1, start, context, adaptive=True)
    fixed = [pipelines.simulated_layer_us(batch, 1, cores, context) for cores in (start, 10, 16)]
    assert moving < 1.03 * min(fixed)
    assert moving < 0.95 * fixed[0]


def test_moving_cores_changes_no_token(tiny: TinyCheckpoint) -> None:
    spec = slow(3e-5, 1 / 200)
    fixed = serve(tiny, spec, 8, 60, [TWO, "pipeline.overlap=cores", "pipeline.attention_cores=4"])
    moving = serve(
        tiny,
        spec,
        8,
        60,
        [TWO, "pipeline.overlap=cores", "pipeline.attention_cores=4", "pipeline.adaptive=true"],
    )
    assert moving.tokens == fixed.tokens
    assert moving.tpot < fixed.tpot
