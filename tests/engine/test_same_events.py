"""The same seed gives the same events, however often the event loop turns before somebody asks for something.

Every history runs twice, on pods of their own: the trace must be the same byte for byte, and so must the
virtual time at the end. `make campaign` runs a hundred of each kind.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.engine.histories import DEPLOYMENTS, abort_on_the_way, batches, turns
from xdeepserve import LLM, SamplingParams
from xdeepserve.api.server.server import build_app
from xdeepserve.engine.dp.events import Mended, Preempted
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.history import History, serve
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import build_engine
from xdeepserve.loop import run
from xdeepserve.model.presets import TinyCheckpoint

WAYS = ("llm", "endpoint", "engine")
NUM_TURNS = (0, 1, 2, 3, 5, 8, 13, 40, 100, 400)


class Events(msgspec.Struct, frozen=True):
    """What came of a history."""

    trace: list[bytes]  # lines of the file
    virtual_ns: int
    outputs: Any


def _events(engine: Engine, outputs: Any, file: Path) -> Events:
    pod = engine.plan.pod
    pod.trace.write(file)
    return Events(file.read_bytes().splitlines(), pod.clock.now, outputs)


def through_llm(tiny: TinyCheckpoint, seed: int, num_turns: int, file: Path) -> Events:
    asked, aborts = batches(seed)
    pod, outputs = asked[0], []
    with LLM(tiny, pod.deployment, overrides=pod.settings, trace=True, clock_seed=pod.clock_seed) as llm:
        abort_on_the_way(llm.engine, aborts)
        for batch in asked:
            llm.run(turns(num_turns))
            made = llm.generate(batch.prompts, batch.params, arrivals_ns=batch.arrivals_ns)
            outputs += [[(c.token_ids, c.finish_reason) for c in output.outputs] for output in made]
        llm.run(turns(num_turns))
        return _events(llm.engine, outputs, file)


async def through_endpoint(tiny: TinyCheckpoint, seed: int, num_turns: int, file: Path) -> Events:
    engine, asked = _traced(tiny, seed)
    outputs = []
    async with TestClient(TestServer(build_app(engine))) as client:
        for batch in asked:
            for prompt, params in batch:
                await turns(num_turns)
                async with client.post("/v1/completions", json=_body(prompt, params)) as answer:
                    assert answer.status == 200
                    made = await answer.json()
                    outputs.append([(c["text"], c["finish_reason"]) for c in made["choices"]])
        await engine.settle()
        return _events(engine, outputs, file)


def _traced(tiny: TinyCheckpoint, seed: int) -> tuple[Engine, list[list[Any]]]:
    """An engine, and for each batch its prompts with how they are continued."""
    asked, aborts = batches(seed)
    pod = asked[0]
    engine = build_engine(
        tiny, pod.deployment, "int8", overrides=pod.settings, trace=True, clock_seed=pod.clock_seed
    )
    abort_on_the_way(engine, aborts)
    return engine, [[*zip(batch.prompts, batch.params, strict=True)] for batch in asked]


def _body(prompt: list[int], params: SamplingParams) -> dict[str, Any]:
    sent = ("max_tokens", "temperature", "n", "logprobs", "priority", "ignore_eos")
    # Two prompts in one request, which come to the engine together.
    return {"prompt": [prompt, prompt[::-1]], **{name: getattr(params, name) for name in sent}}


async def through_engine(tiny: TinyCheckpoint, seed: int, num_turns: int, file: Path) -> Events:
    """As `LLM`, but in one thread, where no turn at all may lie between the start and the first request."""
    engine, asked = _traced(tiny, seed)
    outputs = []
    await engine.start()
    for number, batch in enumerate(asked):
        await turns(num_turns)
        requests = [engine.submit(*each, f"{number}-{index}") for index, each in enumerate(batch)]
        for request in requests:
            outputs.append([(d.token_ids, d.finish_reason, d.at_ns) async for d in request])
    await engine.settle()
    events = _events(engine, outputs, file)
    await engine.stop()
    engine.check_integrity()
    return events


def check(tiny: TinyCheckpoint, seed: int, way: str, file: Path) -> None:
    """Run a history twice, with other turns and, but for `LLM`, on another event loop."""
    first, other = NUM_TURNS[seed % len(NUM_TURNS)], NUM_TURNS[(seed * 3 + 7) % len(NUM_TURNS)]
    assert first != other
    if way == "llm":
        _check_equal(*(through_llm(tiny, seed, num_turns, file) for num_turns in (first, other)))
        return
    through = through_endpoint if way == "endpoint" else through_engine
    _check_equal(asyncio.run(through(tiny, seed, first, file)), run(through(tiny, seed, other, file)))


def _check_equal(one: Events, other: Events) -> None:
    assert one.outputs == other.outputs
    assert one.virtual_ns == other.virtual_ns
    assert len(one.trace) == len(other.trace)
    # Not the lists themselves: what differs in so many lines would be explained for minutes.
    assert (
        next((lines for lines in zip(one.trace, other.trace, strict=True) if len({*lines}) > 1), None) is None
    )


@pytest.mark.thin(4)
# Each deployment twice, and never the same way.
@pytest.mark.parametrize(
    ("seed", "way"), [(seed, WAYS[seed % len(WAYS)]) for seed in range(2 * len(DEPLOYMENTS))]
)
def test_the_same_events(tiny: TinyCheckpoint, seed: int, way: str, tmp_path: Path) -> None:
    check(tiny, seed, way, tmp_path / "trace.json")


@pytest.mark.campaign
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(100))
def test_the_same_events_a_hundred_times(tiny: TinyCheckpoint, seed: int, way: str, tmp_path: Path) -> None:
    check(tiny, seed, way, tmp_path / "trace.json")


def test_an_observer_that_fails_harms_nobody(tiny: TinyCheckpoint, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def fail(event: Any) -> None:
        seen.append("faulty")
        if len(seen) > 2:
            raise ValueError("a bug of the observer's")

    with LLM(tiny, "monolithic") as llm:
        llm.engine.observe(fail)
        llm.engine.observe(lambda event: seen.append("other"))
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert llm.engine.is_healthy()
    assert seen.count("faulty") == 2
    assert seen.count("other") > 5
    assert "a listener failed" in caplog.text


def test_metrics_count_what_the_log_tells() -> None:
    """Preemptions and rollbacks that observers are told of, and those that the engine's stats have, agree."""
    overrides = ("max_model_len=160", "cache.num_blocks=12", "cache.prefix=false")
    prompts, params = [[i] * 30 for i in range(4)], SamplingParams(max_tokens=40, ignore_eos=True)
    faults = (Fault(900.0, 0, "glitch", code="mte-error"),)
    history = History("monolithic", overrides, prompts, params, faults=faults)
    told = serve(history, hears=(Preempted, Mended))
    assert told.stats.num_preemptions == len(told.of(Preempted)) > 0
    assert told.stats.num_recoveries["3"] == len(told.of(Mended)) == 1
