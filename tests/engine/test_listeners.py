"""Whoever listens to a request, its metrics or the engine's events may fail: nobody else is harmed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from xdeepserve import LLM, SamplingParams
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.engine.serving.live import Request
from xdeepserve.errors import XDeepServeError
from xdeepserve.llm import digest
from xdeepserve.model.presets import TinyCheckpoint

# Pods whose hosts take virtual time to plan and launch steps: one loop for all DP groups, and one for each.
LAUNCHES_TAKE_TIME = {
    "monolithic": ("execution.mode=op",),
    "pd": (),
    "pd-by-layer": ("transfer=layer",),
    "dataflow": ("execution.mode=op", "dataflow=true"),
    "planning-ahead": ("execution.overlap=true",),
}
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0, n=2)


class Listener:
    """Notes what it is told, and whether that is after its request has been aborted."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.is_aborted = False
        self.told_late: list[int] = []

    def begin(self, choice: int) -> None:
        (self.told_late if self.is_aborted else self.told).append(choice)


async def abort_after(engine: Engine, number: int, delay_ns: int) -> Listener:
    """Submit a request and abort it `delay_ns` of virtual time later."""
    listener = Listener()
    request = engine.submit([3, 1, 4, 1, 5], PARAMS, f"left-{number}", on_scheduled=listener.begin)
    await engine.plan.pod.clock.sleep(delay_ns)
    listener.is_aborted = True
    request.abort()
    return listener


@pytest.mark.parametrize("name", LAUNCHES_TAKE_TIME)
def test_an_aborted_choice_does_not_begin(tiny: TinyCheckpoint, name: str) -> None:
    deployment = {"pd-by-layer": "pd", "dataflow": "moe-attention"}.get(name, name)
    deployment = "monolithic" if name == "planning-ahead" else deployment
    listeners: list[Listener] = []

    async def clients_that_leave(engine: Engine) -> None:
        for number, delay_us in enumerate((0, 1, 300, 1000, 1900, 2500, 6000, 20_000)):
            listeners.append(await abort_after(engine, number, 1000 * delay_us))

    with LLM(tiny, deployment, overrides=LAUNCHES_TAKE_TIME[name]) as llm:
        llm.generate([[1, 2, 3]], PARAMS, meanwhile=clients_that_leave)
        assert llm.engine.is_healthy()
        stats = llm.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        llm.engine.check_integrity()
    assert not any(listener.told_late for listener in listeners)
    assert {len(listener.told) for listener in listeners} >= {0, 2}  # some left in time, some did not


@pytest.mark.parametrize("error", [ValueError("a bug of the listener's"), asyncio.CancelledError()])
@pytest.mark.parametrize("deployment", ["monolithic", "pd", "moe-attention"])
def test_listeners_that_fail_harm_nobody(
    tiny: TinyCheckpoint, deployment: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, params = [[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)

    def fail(*args: Any) -> None:
        raise error

    with LLM(tiny, deployment) as llm:
        expected = digest(llm.generate(prompts, params, keep_logits=True))

    others: list[Request] = []

    async def submit_another(engine: Engine) -> None:
        engine.observe(fail)
        short = SamplingParams(max_tokens=1, ignore_eos=True)
        others.append(engine.submit([9, 8, 7], short, "another", on_scheduled=fail))

    with LLM(tiny, deployment) as llm:
        outputs = llm.generate(prompts, params, keep_logits=True, meanwhile=submit_another)
        assert digest(outputs) == expected
        [another] = others  # goes on, too
        assert (another.is_over, another.outputs[0].finish_reason) == (True, "length")
        assert llm.engine.is_healthy()
    assert "request another: a listener failed" in caplog.text
    assert all(record.levelno == logging.ERROR for record in caplog.records)


def test_an_error_beside_requests_is_raised_when_they_have_ended(tiny: TinyCheckpoint) -> None:
    async def fail(engine: Engine) -> None:
        raise XDeepServeError("what ran beside has failed")

    with LLM(tiny, "monolithic") as llm:
        with pytest.raises(XDeepServeError, match="what ran beside"):
            llm.generate([[1, 2]], PARAMS, meanwhile=fail)
        assert llm.engine.stats().kv_cache_usage == 0
        assert llm.generate([[1, 2]], PARAMS)[0].finished
