"""Slow, half-open and greedy clients, and templates that loop: nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from tests.api.conftest import Post
from tests.api.fake_engine import FakeEngine
from xdeepserve.api.routes import body
from xdeepserve.api.server import server
from xdeepserve.api.server.server import build_app, serve
from xdeepserve.errors import OverloadedError, RequestError
from xdeepserve.llm import build_engine
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.template_process import TemplateProcess
from xdeepserve.model.tokenizer import load_tokenizer

HI = [{"role": "user", "content": "hi"}]
TEXT = "/v1/completions"


@pytest.fixture
async def address(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, int]]:
    """A server that is quickly out of patience."""
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(body, "BODY_SECONDS", 0.5)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(engine, "127.0.0.1", 0, listening.set_result))
    host, port = (await listening).removeprefix("http://").split(":")
    yield host, int(port)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
async def test_a_connection_without_a_whole_header_is_closed(address: tuple[str, int], sent: bytes) -> None:
    connections = [await asyncio.open_connection(*address) for _ in range(20)]
    for _, writer in connections:
        writer.write(sent)
    async with asyncio.timeout(20):
        for reader, writer in connections:
            assert await reader.read() == b""
            writer.close()


async def test_a_body_that_does_not_come_is_a_timeout(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    kind = "Content-Type: application/json\r\n"
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\n{kind}Content-Length: 100\r\n\r\n"
    writer.write(head.encode() + b'{"prompt"')
    async with asyncio.timeout(20):
        assert (await reader.readline()).split()[1] == b"408"
        assert b"request_timeout" in await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("header", "status", "says"),
    [
        ("Content-Encoding: br", 415, "must be one of identity, gzip, deflate"),
        ("Content-Encoding: zstd", 415, "must be one of identity, gzip, deflate"),
        ("Content-Encoding: nonsense", 415, 'found "nonsense"'),
        ("Expect: nonsense", 417, "Unknown Expect: nonsense"),
        ("Content-Length: nonsense", 400, "Content-Length"),
        ("Content-Encoding: identity", 200, "choices"),
    ],
)
async def test_what_no_handler_sees_is_an_error_in_json(
    address: tuple[str, int], header: str, status: int, says: str
) -> None:
    data = b'{"prompt": "hi", "max_tokens": 1}'
    length = [] if header.startswith("Content-Length") else [f"Content-Length: {len(data)}"]
    reader, writer = await asyncio.open_connection(*address)
    lines = [
        f"POST {TEXT} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Connection: close",
        *length,
        header,
        "",
        "",
    ]
    writer.write("\r\n".join(lines).encode() + data)
    async with asyncio.timeout(20):
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.split()[1] == str(status).encode()
    assert b"Content-Type: application/json" in head
    answer = json.loads(content)
    if status >= 400:
        assert answer["error"]["type"] == "invalid_request_error"
    assert says in str(answer)


async def test_a_prompt_that_cannot_fit_is_not_tokenised(post: Post, engine: FakeEngine) -> None:
    assert engine.tokenizer is not None
    for prompt in ("x" * 500_000, ["hi", "x" * 300]):
        status, answer = await post(TEXT, prompt=prompt)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert not engine.tokenizer.threads


def test_a_real_tokenizer_bounds_tokens_from_below() -> None:
    tokenizer = load_tokenizer(PRESET_DIRECTORY / "tiny")
    assert tokenizer is not None
    for text in ("", "a", "the cat sat on the mat. " * 40, "é€😀" * 99, " " * 1000, "<think>" * 30):
        assert tokenizer.fewest_tokens(len(text)) <= len(tokenizer.encode(text))
    assert tokenizer.fewest_tokens(10**6) > 2048
    with pytest.raises(RequestError, match="at least") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "x" * 10**6}], max_tokens=2048)
    assert caught.value.code == "context_length_exceeded"


async def test_prompts_are_admitted_together_or_not_at_all(post: Post, engine: FakeEngine) -> None:
    engine.max_live = 3
    status, _ = await post(TEXT, prompt=["a", "b"], n=2)
    assert status == 429
    assert not engine.submitted
    assert (await post(TEXT, prompt=["a", "b", "c"], max_tokens=1))[0] == 200


async def test_what_can_never_be_admitted_is_a_bad_request() -> None:
    engine = build_engine("tiny-random", "monolithic", "int8", overrides=["scheduler.max_waiting=8"])
    engine.load()
    limit = 8 + sum(group.steps.max_seqs for group in engine.groups)
    engine.check_room(limit)
    with pytest.raises(RequestError, match=f"at most {limit} sequences") as caught:
        engine.check_room(limit + 1)
    assert not isinstance(caught.value, OverloadedError)
    await engine.stop()


async def test_response_ids_differ_from_server_to_server(post: Post, engine: FakeEngine) -> None:
    from aiohttp.test_utils import TestServer

    ids = set()
    for _ in range(2):
        async with TestClient(TestServer(build_app(engine))) as client:
            for _ in range(2):
                response = await client.post(TEXT, json={"prompt": "hi", "max_tokens": 1})
                ids.add((await response.json())["id"])
    assert len(ids) == 4


@pytest.fixture
def templates() -> Iterator[TemplateProcess]:
    process = TemplateProcess(max_seconds=2.0, max_chars=10_000)
    yield process
    process.close()


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ '%1000000000d' % 1 }}{{ '%2000000000d' % 1 }}"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (LOOPS, "took longer"),
        (HUGE, "refuses these messages|more memory than it may"),
        ("{% for a in range(9999) %}abc{% endfor %}", "more than 10000 characters"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_a_hostile_template_is_stopped(templates: TemplateProcess, source: str, says: str) -> None:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    began = time.monotonic()
    with pytest.raises(RequestError, match=says):
        templates.render(source, "here", given)
    assert time.monotonic() - began < 30
    assert templates.render("{{ messages[0]['content'] }}!", "here", given) == "hi!"


async def test_others_do_not_wait_for_a_template(tmp_path: Any) -> None:
    """The event loop turns while a template does not end."""
    process, loop = TemplateProcess(max_seconds=2.0), asyncio.get_running_loop()
    slow = loop.run_in_executor(None, process.render, LOOPS, "here", {"messages": []})
    longest, last = 0.0, time.monotonic()
    while not slow.done():
        await asyncio.sleep(0.002)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    with pytest.raises(RequestError, match="took longer"):
        await slow
    process.close()
    assert longest < 1.0  # it would be 2 s and more


def test_isolated_and_plain_templates_say_the_same() -> None:
    tokenizer = load_tokenizer(PRESET_DIRECTORY / "tiny")
    assert tokenizer is not None
    for messages in (HI, [*HI, {"role": "assistant", "content": "é"}, *HI]):
        assert tokenizer.apply_chat_template(messages) == tokenizer.apply_chat_template(
            messages, is_isolated=True
        )
    tokenizer.close()
