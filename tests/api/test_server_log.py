"""What `serve` logs, and that nothing waits for whoever reads it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from tests.api.fake_engine import FakeEngine
from xdeepserve.api.server import server_log
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import build_app
from xdeepserve.api.server.server_log import log_to
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import build_engine
from xdeepserve.model.presets import TinyCheckpoint

TEXT = "/v1/completions"
BODY = {"prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
SOON = ["max_model_len=64", "health.suspect_s=0.01", "health.lost_s=0.05"]


@contextlib.contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """The lines that are written meanwhile, without their time."""
    lines: list[str] = []
    with log_to(lambda text: lines.append(text.rstrip("\n")), level):
        yield lines
    lines[:] = [line[20:] for line in lines]


async def test_a_line_for_each_request(engine: FakeEngine) -> None:
    options = ServerOptions(log_requests=True)
    with logged() as lines:
        async with TestClient(TestServer(build_app(engine, options), handler_cancellation=True)) as client:
            await client.post(TEXT, json={"prompt": "hi", "max_tokens": 3}, headers={"X-Request-Id": "mine"})
            await client.get("/v1/no%0Athing")
            engine.hold(2)
            asking = asyncio.create_task(client.post(TEXT, json={"prompt": "hi", "max_tokens": 9}))
            await engine.until_submitted(2)
            await asyncio.sleep(0.05)
            asking.cancel()
            while engine.live:
                await asyncio.sleep(0.01)
            engine.release()
    assert lines[0].startswith(f"POST {TEXT} 200, 3 tokens, ")
    assert lines[0].endswith(" ms, 0.000 ms virtual (mine)")
    assert lines[1].startswith("GET /v1/no%0Athing 404 unknown_url: Invalid URL (GET /v1/no thing) (")
    assert lines[2].startswith("GET /v1/no%0Athing 404, 0 tokens, ")
    assert lines[3].startswith(f"POST {TEXT} aborted, 2 tokens, ")
    assert len(lines) == 4


async def test_a_flood_of_requests_is_no_flood_of_lines(engine: FakeEngine) -> None:
    with logged() as lines:
        async with TestClient(TestServer(build_app(engine))) as client:
            for _ in range(40):
                assert (await client.post(TEXT, json={"prompt": 1})).status == 400
            await asyncio.sleep(1.1)
    assert 5 < len(lines) <= 12
    assert lines[0].startswith(f"POST {TEXT} 400 invalid_request_error: prompt: expected")
    counted = sum(int(line.split()[0]) for line in lines if "more requests were refused" in line)
    assert counted + sum(line.startswith("POST") for line in lines) == 40
    with logged(logging.ERROR) as lines:
        async with TestClient(TestServer(build_app(engine))) as client:
            await client.post(TEXT, json={"prompt": 1})
    assert lines == [], "--quiet"


async def test_nobody_waits_for_a_reader_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "WAITING_LINES", 3)
    monkeypatch.setattr(server_log, "LAST_WORDS_S", 0.05)
    stuck, lines = threading.Event(), []

    def write(text: str) -> None:
        stuck.wait(20)
        lines.append(text)

    with log_to(write, logging.INFO):
        for number in range(50):
            server_log.log.info("%d", number)
        server_log.log.info("%d", "no number")  # is left out as well
    stuck.set()
    while not any("lines were left out" in line for line in lines):
        await asyncio.sleep(0.01)


async def test_what_happens_to_the_pod(tiny: TinyCheckpoint) -> None:
    settings = [*SOON, "dies=2", "recovery.failover=true"]
    engine = build_engine(tiny, "colocated", "int8", overrides=settings, faults=[Fault(300.0, 1, "lost")])
    with logged() as lines:
        async with TestClient(TestServer(build_app(engine))) as client:
            assert (await client.post(TEXT, json=BODY)).status == 200
            told = await (await client.get("/health")).json()
    assert told["status"] == "ok"
    (lost,) = [te for te in told["tes"] if te["life"] == "lost"]
    assert (lost["lost_dies"], lost["lost_groups"], lost["replaced_by"]) == ([1], [0, 1], "te 1")
    assert lines[0].startswith("die 1 of te is lost; the TE is given up, another TE comes in its place")
    assert [line.partition(" (pod at ")[0] for line in lines[1:]] == [
        "a test of what te had: die 0 is well, and free again; die 1 is not well, and lost",
        "te 1 loads its weights on die 0",
        "te 1 is ready on die 0",
        "failover has ended: another TE is in the place of each that was given up",
    ]


async def test_the_loss_of_all_is_one_line_and_the_error_has_what_there_was(tiny: TinyCheckpoint) -> None:
    settings = [*SOON, "dies=2"]
    engine = build_engine(tiny, "colocated", "int8", overrides=settings, faults=[Fault(5000.0, 1, "lost")])
    with logged() as lines:
        async with TestClient(TestServer(build_app(engine))) as client:
            answer = await client.post(TEXT, json={**BODY, "max_tokens": 50})
            error = (await answer.json())["error"]
    assert answer.status == 500
    assert "requests would have gone on with recovery.failover=true" in error["message"]
    assert lines[0].startswith("die 1 of te is lost; the TE is given up, no TE can serve")
    assert lines[1].startswith(f"POST {TEXT} 500 engine_error: ")
    assert len(lines) == 2


async def test_the_te_that_ended_the_service_is_named_before_those_that_end_with_it(
    tiny: TinyCheckpoint,
) -> None:
    settings = [*SOON, "prefill.dies=2", "decode.dies=2"]
    engine = build_engine(tiny, "pd", "int8", overrides=settings, faults=[Fault(5000.0, 3, "lost")])
    with logged() as lines:
        async with TestClient(TestServer(build_app(engine))) as client:
            assert (await client.post(TEXT, json={**BODY, "max_tokens": 50})).status == 500
    assert lines[0].startswith("die 3 of decode 0 is lost; the TE is given up, no TE can serve, and ")
    assert lines[1].startswith("prefill 0 ends: no TE can serve any more (pod at ")
    assert lines[2].startswith(f"POST {TEXT} 500 engine_error: ")
    assert len(lines) == 3


async def test_what_was_generated_comes_with_the_error(engine: FakeEngine) -> None:
    async with TestClient(TestServer(build_app(engine))) as client:
        whole = (await (await client.post(TEXT, json={"prompt": "hi", "max_tokens": 6})).json())["choices"]
        engine.failure, engine.fail_at_step = XDeepServeError("die 3 is lost"), engine.num_steps + 4
        answer = await client.post(TEXT, json={"prompt": "hi", "max_tokens": 6})
        error = (await answer.json())["error"]
        assert (answer.status, error["message"]) == (500, "die 3 is lost")
        assert error["partial"] == [whole[0]["text"][:4]]
        answer = await client.post(TEXT, json={"prompt": "hi", "max_tokens": 6})
        assert "partial" not in (await answer.json())["error"], "nothing was generated"


def counters(text: str) -> dict[Any, float]:
    """All samples that may only grow."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type in ("counter", "histogram") and not sample.name.endswith("_created")
    }


async def test_counters_never_fall(tiny: TinyCheckpoint) -> None:
    """TEs roll back, are lost with what they have counted, come and go."""
    faults = [Fault(600.0, 0, "glitch", code="mte-error"), Fault(1800.0, 1, "lost")]
    settings = [*SOON, "dies=2", "cache.num_blocks=8", "recovery.failover=true", "recovery.spare_dies=2"]
    engine = build_engine(tiny, "colocated", "int8", overrides=settings, faults=faults)
    async with TestClient(TestServer(build_app(engine, ServerOptions(admin=True)))) as client:
        seen: dict[Any, float] = {}
        rollbacks: dict[str, int] = {}

        async def look() -> dict[Any, float]:
            told = await (await client.get("/health")).json()
            now = counters(await (await client.get("/metrics")).text())
            fallen = {
                name: (seen[name], now.get(name)) for name in seen if not now.get(name, -1) >= seen[name]
            }
            assert not fallen
            for name, number in [
                ("", told["num_rollbacks"]),
                *((te["name"], te["num_rollbacks"]) for te in told["tes"]),
            ]:
                assert number >= rollbacks.get(name, 0)
                rollbacks[name] = number
            seen.update(now)
            return now

        await look()
        for _ in range(4):
            answers = [client.post(TEXT, json={**BODY, "prompt": [i] * 20}) for i in range(4)]
            assert {answer.status for answer in await asyncio.gather(*answers)} == {200}
            await look()
        assert list(engine.lost) == ["te"]
        assert (rollbacks[""], rollbacks["te"]) == (1, 1)
        (added,) = [(await (await client.post("/admin/tes", json={})).json())["name"]]
        await asyncio.gather(*(client.post(TEXT, json={**BODY, "prompt": [i] * 9}) for i in range(4)))
        await look()
        assert (await client.delete("/admin/tes/te 1")).status == 200
        now = await look()
        assert added in {te.name for te in engine.health()}
        assert now[("xdeepserve:recoveries_total", ("model_name", "tiny-random"), ("stage", "3"))] == 1
        assert now[("xdeepserve:recoveries_total", ("model_name", "tiny-random"), ("stage", "2"))] == 1
