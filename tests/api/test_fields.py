"""Fields that the server does not act on: ignored and named, or refused, by one rule at every place."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.api.conftest import Post
from tests.api.fake_engine import FakeEngine
from xdeepserve.api.openai.requests import ChatRequest
from xdeepserve.api.routes.fields import (
    CHANGES,
    HARMLESS,
    HOSTED,
    OURS,
    FieldPlace,
    Fields,
    ignored_header,
    place_of,
)
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import build_app
from xdeepserve.engine.serving.request import OutputFormats
from xdeepserve.errors import RequestError

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HI: dict[str, Any] = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "x"},
    CHAT: {"messages": [HI]},
    RESPONSES: {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


@contextlib.asynccontextmanager
async def strict(engine: FakeEngine) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(build_app(engine, ServerOptions(strict=True)))) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
async def test_what_changes_nothing_is_named_in_a_header_and_once_in_the_log(
    client: TestClient, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "xdeepserve.api"):
        for _ in range(2):
            body = {**BODIES[path], "colour": "blue", "user": "me", "nothing": None}
            async with client.post(path, json=body) as answer:
                assert answer.status == 200
                assert answer.headers["X-Ignored-Fields"] == "colour, user"
    assert sum("field colour" in record.message for record in caplog.records) == 1
    async with client.post(path, json=BODIES[path]) as answer:
        assert "X-Ignored-Fields" not in answer.headers


async def test_streams_and_errors_name_them_too(client: TestClient) -> None:
    for fields, status in (({"stream": True}, 200), ({"max_tokens": 10**6}, 400)):
        async with client.post(TEXT, json={"prompt": "x", "colour": 1, **fields}) as answer:
            assert (answer.status, answer.headers["X-Ignored-Fields"]) == (status, "colour")


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"messages": [{**HI, "finish_reason": "stop"}]}, "messages.finish_reason"),
        (CHAT, {"messages": [HI, {**HI, "mood": 1}, {**HI, "mood": 2}]}, "messages.mood"),
        (CHAT, {"messages": [{**HI, "content": [{"type": "text", "text": "a", "tone": 1}]}]}, "content.tone"),
        (
            CHAT,
            {"prediction": {"type": "content", "content": "x"}, "session_id": "s"},
            "prediction, session_id",
        ),
        (CHAT, {"tools": [TOOL, {"type": "web_search"}]}, "tools.web_search"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "cost": 1}}]},
            "tools.function.cost",
        ),
        (RESPONSES, {"client_metadata": {"a": "b"}}, "client_metadata"),
        (RESPONSES, {"input": [{**HI, "mood": 1}]}, "input.mood"),
        (
            RESPONSES,
            {"input": [{**HI, "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "content.b",
        ),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "cost": 1}]}, "tools.cost"),
        (
            RESPONSES,
            {"tools": [{"type": "custom", "name": "p"}, {"type": "local_shell"}]},
            "custom, tools",
        ),
    ],
)
async def test_places(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any], named: str
) -> None:
    engine.formats = OutputFormats(shows_tools=True, tools="hermes")
    async with client.post(path, json={**BODIES[path], **fields}) as answer:
        assert answer.status == 200, await answer.text()
        assert named in answer.headers["X-Ignored-Fields"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"min_new_tokens": 4}, "min_new_tokens"),
        (CHAT, {"mirostat": 2}, "mirostat"),
        (CHAT, {"messages": [{**HI, "prefix": True}]}, "messages[0].prefix"),
        (CHAT, {"messages": [{**HI, "contnet": "b"}]}, "messages[0].contnet"),
        (CHAT, {"tools": [{**TOOL, "strct": True}]}, "tools[0].strct"),
        (RESPONSES, {"messages": [HI]}, "messages"),
        (RESPONSES, {"input": [{**HI, "contents": []}]}, "input[0].contents"),
        (TEXT, {"temprature": 0}, "temprature"),
        ("/tokenize", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("/tokenize", {"enable_thinking": False}, "enable_thinking"),
        ("/tokenize", {"documents": ["a"]}, "documents"),
    ],
)
async def test_what_would_change_the_answer_is_refused(
    post: Post, engine: FakeEngine, path: str, fields: dict[str, Any], param: str
) -> None:
    status, body = await post(path, **{**BODIES[path], **fields})
    assert (status, body["error"]["param"]) == (400, param)
    assert not engine.submitted


async def test_a_strict_server_refuses_all(engine: FakeEngine) -> None:
    async with strict(engine) as client:
        for fields, code in (
            ({"colour": 1}, "unknown_parameter"),
            ({"user": "me"}, "unsupported_parameter"),
            ({"messages": [{**HI, "is_error": True}]}, "unsupported_parameter"),
        ):
            async with client.post(CHAT, json={**BODIES[CHAT], **fields}) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (400, code)
        for message in ({**HI, "annotations": []}, {**HI, "colour": None}):
            async with client.post(CHAT, json={"messages": [message]}) as answer:
                assert answer.status == 200
                assert "X-Ignored-Fields" not in answer.headers


@pytest.mark.parametrize(
    "fields", [{"top_k": 40.0, "n": 1.0}, {"seed": 42.0, "max_tokens": 5.0}, {"min_tokens": 1.0, "user": "x"}]
)
async def test_whole_numbers_may_have_a_point(post: Post, fields: dict[str, Any]) -> None:
    assert (await post(CHAT, messages=[HI], **fields))[0] == 200


async def test_half_numbers_are_refused(post: Post) -> None:
    status, body = await post(CHAT, messages=[HI], top_k=40.5)
    assert (status, body["error"]["param"]) == (400, "top_k")


def test_no_served_field_is_in_the_tables() -> None:
    for name in {*CHANGES, *HARMLESS, *OURS}:
        known = [*CHANGES.get(name, ()), *HARMLESS.get(name, ()), *OURS.get(name, ())]
        assert len(known) == len(set(known)), name
    served = place_of(ChatRequest)
    assert not served.served & {*CHANGES["ChatRequest"], *HARMLESS["ChatRequest"]}
    assert served.inner["messages"].name == "ChatMessage"


def test_headers_are_ascii_and_short() -> None:
    fields = Fields()
    fields.served({f"bläh\r\n,{i}": 1 for i in range(100)}, FieldPlace("ChatMessage", frozenset({"a"})))
    header = ignored_header(fields)
    assert header.isascii()
    assert header.isprintable()
    assert header.count(",") == 32
    assert header.endswith("and-68-more")


@pytest.mark.parametrize("kind", ["web_search_preview_2025_03_11", "mcp", "computer_use_preview"])
def test_tools_of_servers(kind: str) -> None:
    assert HOSTED["Tool"].fullmatch(kind)
    with pytest.raises(RequestError, match="unknown field x"):
        Fields(is_strict=True).served({"x": 1}, FieldPlace("Tool", frozenset({"type"})))
