"""Clients that hold connections open and grammars made to be slow: others go on, and nothing stays behind.

They measure wall time, so they are for `make campaign`, where nothing else runs beside them. What stalls
others does so each time: one try of three without a stall is enough, since other work may hold up a computer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import random
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from xdeepserve.api.routes import body
from xdeepserve.api.server import server
from xdeepserve.api.server.server import serve
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.llm import build_engine
from xdeepserve.model.presets import PRESET_DIRECTORY

pytestmark = [pytest.mark.campaign, pytest.mark.idle]
NUM_SLOW = 300
LONGEST_STALL_S = 0.1
STREAM = {
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
}


class Stalled(AssertionError):
    """A client had to wait for too long."""


def check_stalls(waits: Sequence[float], alone: float) -> None:
    """Compare waits of clients beside others with the longest wait of one that was alone, in seconds: on a
    busy computer that is longer, too.
    """
    longest, allowed = max(waits), LONGEST_STALL_S + 10 * alone
    print(f"longest wait between two chunks: {1000 * longest:.0f} ms in {len(waits)} streams")
    if longest >= allowed:
        raise Stalled(f"a client waited for {1000 * longest:.0f} ms, and {1000 * allowed:.0f} are allowed")


def three_tries(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The test, again after a stall, at most twice."""

    @functools.wraps(test)
    async def again(*args: Any, **kwargs: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(Stalled):
                return await test(*args, **kwargs)
        return await test(*args, **kwargs)

    return again


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """`tiny`, or a copy whose tokenizer splits text by the regular expression that a test gives."""
    if not hasattr(request, "param"):
        return "tiny"
    shutil.copytree(PRESET_DIRECTORY / "tiny", tmp_path / "copy")
    path = tmp_path / "copy" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": request.param}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"]["pretokenizers"].insert(0, split)
    path.write_text(json.dumps(tokenizer))
    return path.parent


@pytest.fixture
async def engine(model: str | Path) -> Engine:
    engine = build_engine(model, "monolithic", "int8", overrides=["mtp=1"], warm_up=True)
    engine.load()
    return engine


@pytest.fixture
async def address(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A server that waits two seconds for a header or a body."""
    monkeypatch.setattr(server, "IDLE_SECONDS", 2.0)
    monkeypatch.setattr(body, "BODY_SECONDS", 2.0)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(engine, "127.0.0.1", 0, listening.set_result))
    yield await listening
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def client() -> aiohttp.ClientSession:
    """One that gives up a connection before the server does: it would write to one that is being closed."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=1.0))


async def streamed(session: aiohttp.ClientSession, address: str) -> tuple[str, float]:
    """What the well-behaved client reads, and the longest it waits between two chunks, in seconds."""
    text, longest, last = "", 0.0, 0.0
    async with session.post(f"{address}/v1/completions", json=STREAM) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                now = time.monotonic()
                longest, last = max(longest, now - last if last else 0.0), now
    return text, longest


async def slow_connection(address: str, kind: int) -> bytes:
    """One that dribbles a header, never sends its body, reads nothing of a stream, or just stays."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    asked = json.dumps(STREAM | {"max_tokens": 50}).encode()
    sent = {
        0: b"",
        1: begun,
        2: begun + b"Content-Length: 100\r\n\r\n{",
        3: begun + b"Content-Length: %d\r\n\r\n%b" % (len(asked), asked),
    }[kind]
    if kind == 1:
        for byte in sent:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
    else:
        writer.write(sent)
    await asyncio.sleep(1.0)
    if kind == 3:
        writer.transport.abort()  # hangs up in the middle of its stream, unread
        return b""
    answer = await reader.read()
    writer.close()
    return answer


async def settled(engine: Engine) -> None:
    for _ in range(500):
        stats = engine.stats()
        if not (stats.num_running or stats.num_waiting or stats.kv_cache_usage):
            break
        await asyncio.sleep(0.01)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    engine.check_integrity()


@three_tries
async def test_300_slow_and_half_open_connections(engine: Engine, address: str) -> None:
    async with client() as session, asyncio.timeout(120):
        text_alone, alone = await streamed(session, address)
        slow = [asyncio.create_task(slow_connection(address, number % 4)) for number in range(NUM_SLOW)]
        waits = []
        while not all(task.done() for task in slow):
            text, longest = await streamed(session, address)
            assert text == text_alone
            waits.append(longest)
        answers = await asyncio.gather(*slow)
        assert not [answer for answer in answers if answer.startswith(b"HTTP/1.1 5")]
        await settled(engine)
    check_stalls(waits, alone)


def hostile() -> list[dict[str, Any]]:
    """Grammars that are large, deep, ambiguous or long."""
    rng = random.Random(1)

    def word(length: int) -> str:
        return "".join(rng.choice("abcdefgh") for _ in range(length))

    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(60):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    rules = "\n".join(f'r{i}: /[a-z]+{i}/ start | "q{i}"' for i in range(1500))
    wide = {word(8): {"type": "string", "pattern": "^[a-z]*$"} for _ in range(1500)}
    return [
        {"regex": "a{100000}"},
        {"regex": "a{9000}"},
        {"regex": "([a-z]{0,40}[0-9]{0,40}){0,40}"},
        {"regex": "(a|b)*a(a|b){18}"},
        {"regex": "|".join(f".*{word(4)}.*" for _ in range(60))},
        {"choice": [word(40) for _ in range(1024)]},
        {"grammar": 'start: s\ns: s s s | s s | "a" | "aa" | "ab" | "b"\n'},
        {"grammar": "start: " + " | ".join(f"r{i}" for i in range(1500)) + "\n" + rules},
        {"json": nested},
        {"json": {"type": "object", "properties": wide}},
        {"json": {"enum": [word(12) for _ in range(10_000)]}},
        {"json": {"const": "ab" * 9000}},
        {"json": {"type": "array", "minItems": 400, "items": {"type": "string", "format": "date-time"}}},
    ]


@three_tries
async def test_hostile_grammars_do_not_stall_others(engine: Engine, address: str) -> None:
    async def ask(session: aiohttp.ClientSession, form: dict[str, Any]) -> int:
        asked = {"prompt": "a", "max_tokens": 60, "structured_outputs": form}
        async with session.post(f"{address}/v1/completions", json=asked) as response:
            answer = await response.json()
            assert response.status in (200, 400), answer
            return response.status

    async with client() as session, asyncio.timeout(300):
        text_alone, alone = await streamed(session, address)
        waits, seen = [], []
        for form in hostile():
            asking = [asyncio.create_task(ask(session, form)) for _ in range(4)]
            while not all(task.done() for task in asking):
                text, longest = await streamed(session, address)
                assert text == text_alone
                waits.append(longest)
            seen += await asyncio.gather(*asking)
        await settled(engine)
    assert {200, 400} == set(seen)
    check_stalls(waits, alone)


@pytest.mark.parametrize("model", [r"(a|aa)+$|\s+"], indirect=True)
@three_tries
async def test_a_hostile_tokenizer_does_not_stall_others(engine: Engine, address: str) -> None:
    """Its expression takes milliseconds for each run of the letter a, and gives up on long ones."""
    chat = [{"role": "user", "content": "a" * 200 + "b"}]
    bodies = [
        ("/tokenize", {"prompt": "b".join(["a" * 22] * 300)}, 200),
        ("/v1/completions", {"prompt": "b".join(["a" * 22] * 10), "max_tokens": 4}, 200),
        ("/v1/completions", {"prompt": "a" * 200 + "b"}, 400),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 4}, 400),
    ]

    async def ask(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> int:
        async with session.post(address + path, json=body) as response:
            answer = await response.text()
            assert response.status == 200 or "tokenizer gave up" in answer, answer
            return response.status

    async with client() as session, asyncio.timeout(120):
        text_alone, alone = await streamed(session, address)
        asking = [asyncio.create_task(ask(session, path, body)) for path, body, _ in bodies * 4]
        waits = []
        while not all(task.done() for task in asking):
            text, longest = await streamed(session, address)
            assert text == text_alone
            waits.append(longest)
        assert await asyncio.gather(*asking) == [status for *_, status in bodies * 4]
        await settled(engine)
    check_stalls(waits, alone)


JSON = {"Content-Type": "application/json"}


@three_tries
async def test_long_texts_and_many_tokens_do_not_stall_others(engine: Engine, address: str) -> None:
    bodies = [
        ("/tokenize", {"prompt": "a" * 1_000_000}),
        ("/tokenize", {"prompt": "a" * 1_000_000, "return_token_strs": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 1_000_000}]}),
        ("/detokenize", {"tokens": [5] * 500_000}),
    ]

    async def ask(session: aiohttp.ClientSession, path: str, body: bytes) -> int:
        async with session.post(address + path, data=io.BytesIO(body), headers=JSON) as response:
            await response.read()
            return response.status

    async with client() as session, asyncio.timeout(120):
        text_alone, alone = await streamed(session, address)
        encoded = [(path, json.dumps(body, separators=(",", ":")).encode()) for path, body in bodies * 2]
        asking = [asyncio.create_task(ask(session, path, body)) for path, body in encoded]
        waits = []
        while not all(task.done() for task in asking):
            text, longest = await streamed(session, address)
            assert text == text_alone
            waits.append(longest)
        assert await asyncio.gather(*asking) == [200] * len(encoded)
        await settled(engine)
    check_stalls(waits, alone)
