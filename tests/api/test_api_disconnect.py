"""A client that goes away frees what it held at once; seen from a real socket that closes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from tests.api.fake_engine import FakeEngine
from xdeepserve.api.answers.generation import Generation
from xdeepserve.api.server.metrics import Metrics, RequestTracker
from xdeepserve.api.server.server import bind, build_app
from xdeepserve.engine.dp.sampling_params import SamplingParams

# Far above what an abort takes, so that a busy machine cannot fail the test; the engine is held back, so
# that only the disconnect can end a request.
PATIENCE_S = 5

Socket = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def socket(client: TestClient) -> AsyncIterator[Socket]:
    reader, writer = await asyncio.open_connection(client.host, client.port)
    yield reader, writer
    writer.close()


def raw_request(path: str, **body: Any) -> bytes:
    data = json.dumps(body).encode()
    kind = "Host: localhost\r\nContent-Type: application/json"
    head = f"POST {path} HTTP/1.1\r\n{kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def hang_up(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "close":
        writer.close()
    elif how == "reset":
        writer.transport.abort()
    else:
        writer.write_eof()


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_disconnect_aborts_every_request(
    engine: FakeEngine,
    socket: Socket,
    caplog: pytest.LogCaptureFixture,
    path: str,
    stream: bool,
    how: str,
) -> None:
    caplog.set_level(logging.WARNING)
    reader, writer = socket
    engine.hold(3)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    asked: dict[str, Any] = chat if "chat" in path else {"prompt": ["a", "b"]}
    writer.write(raw_request(path, **asked, n=2, stream=stream, max_tokens=50))
    await asyncio.wait_for(engine.stepped.wait(), PATIENCE_S)
    if stream:
        await asyncio.wait_for(reader.readuntil(b"data: "), PATIENCE_S)
    assert engine.live
    await hang_up(writer, how)
    for handle in engine.submitted:
        assert await asyncio.wait_for(handle.is_aborted.wait(), PATIENCE_S)
    assert not engine.live
    await asyncio.sleep(0.01)
    assert not caplog.records


async def test_disconnect_before_the_first_token(engine: FakeEngine, socket: Socket) -> None:
    engine.hold(0)
    _, writer = socket
    writer.write(raw_request("/v1/completions", prompt="a", stream=True))
    await engine.until_submitted()
    await hang_up(writer, "close")
    assert await asyncio.wait_for(engine.submitted[0].is_aborted.wait(), PATIENCE_S)


async def test_disconnect_within_the_body(
    engine: FakeEngine, client: TestClient, socket: Socket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    _, writer = socket
    writer.write(raw_request("/v1/completions", prompt="a" * 100)[:-50])
    await writer.drain()
    await asyncio.sleep(0.01)
    await hang_up(writer, "close")
    assert (await client.get("/health")).status == 200
    assert not engine.submitted
    assert not caplog.records


async def test_a_client_that_stops_reading_and_leaves(engine: FakeEngine, socket: Socket) -> None:
    """Its socket's buffer is full, so the handler waits in a write when the connection breaks."""
    engine.max_model_len = 1 << 20
    _, writer = socket
    writer.transport.pause_reading()
    writer.write(raw_request("/v1/completions", prompt=["a"] * 64, n=16, stream=True, max_tokens=1000))
    await asyncio.wait_for(engine.stepped.wait(), PATIENCE_S)
    await asyncio.sleep(0.2)
    await hang_up(writer, "reset")
    for handle in engine.submitted:
        assert await asyncio.wait_for(handle.is_aborted.wait(), PATIENCE_S)


async def test_a_failed_write_ends_a_stream_quietly(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The second line of defence: without cancellation, the next write notices that nobody is there."""
    caplog.set_level(logging.WARNING)
    runner = web.AppRunner(build_app(engine), handler_cancellation=False)
    await runner.setup()
    with bind("127.0.0.1", 0) as listener:
        await web.SockSite(runner, listener).start()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        engine.hold(1)
        writer.write(raw_request("/v1/completions", prompt="a", stream=True, max_tokens=200))
        await asyncio.wait_for(reader.readuntil(b"data: "), PATIENCE_S)
        await hang_up(writer, "reset")
        await asyncio.sleep(0.01)
        assert engine.live
        engine.release()
        assert await asyncio.wait_for(engine.submitted[0].is_aborted.wait(), PATIENCE_S)
        await runner.cleanup()
    assert not caplog.records


async def test_a_generation_left_before_its_first_output_is_aborted(engine: FakeEngine) -> None:
    generation = Generation(engine, Metrics("fake", engine.stats), [[1], [2]], SamplingParams(), "request")
    async with generation:
        assert len(engine.live) == 2
    assert all(handle.is_aborted.is_set() for handle in engine.submitted)


async def test_others_are_not_disturbed(engine: FakeEngine, client: TestClient, socket: Socket) -> None:
    engine.hold(2)
    _, writer = socket
    writer.write(raw_request("/v1/completions", prompt="a"))
    await asyncio.wait_for(engine.stepped.wait(), PATIENCE_S)
    other = asyncio.create_task(client.post("/v1/completions", json={"prompt": "b", "max_tokens": 4}))
    await engine.until_submitted(2)
    await hang_up(writer, "close")
    assert await asyncio.wait_for(engine.submitted[0].is_aborted.wait(), PATIENCE_S)
    engine.release()
    response = await asyncio.wait_for(other, PATIENCE_S)
    assert (await response.json())["usage"]["completion_tokens"] == 4
    assert not engine.submitted[1].is_aborted.is_set()


async def test_aborted_choices_are_counted(engine: FakeEngine, client: TestClient, socket: Socket) -> None:
    engine.hold(2)
    _, writer = socket
    writer.write(raw_request("/v1/completions", prompt="a", n=2))
    await asyncio.wait_for(engine.stepped.wait(), PATIENCE_S)
    await hang_up(writer, "close")
    assert await asyncio.wait_for(engine.submitted[0].is_aborted.wait(), PATIENCE_S)
    text = await (await client.get("/metrics")).text()
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="fake"} 2.0' in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["track", "begin", "observe", "close"])
async def test_metrics_that_fail_harm_no_request(
    client: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    stream: bool,
) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "stream": stream, "return_token_ids": True}

    async def tokens() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 200
            text = await response.text()
        lines = text.splitlines() if stream else [f"data: {text}"]
        for line in lines:
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    found.setdefault(choice["index"], []).extend(choice["token_ids"] or [])
        return found

    expected = await tokens()
    assert len(expected) == 4

    def fail(*args: object) -> None:
        raise ValueError("a bug of the metrics'")

    monkeypatch.setattr(Metrics if name == "track" else RequestTracker, name, fail)
    assert await tokens() == expected
    [record] = caplog.records  # once a request, however often they fail
    assert record.getMessage().startswith("request req-")
    assert (await client.get("/health")).status == 200
