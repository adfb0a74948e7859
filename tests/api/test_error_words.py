"""Errors name the fields that the client used, and show values as JSON; a stream that breaks off says so."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import openai
import pytest
from aiohttp.test_utils import TestClient

from tests.api.conftest import Post
from tests.api.fake_engine import FakeEngine
from xdeepserve.engine.serving.request import OutputFormats
from xdeepserve.errors import OverloadedError, RequestError, TransferError, abridged

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
TEXT_PART = {"type": "text", "text": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
}


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": {}, **fields}}


def text_format(**fields: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "schema": {}, **fields}}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "max_completion_tokens"),
        (CHAT, "max_tokens"),
        (TEXT, "max_tokens"),
        (TEXT, "max_completion_tokens"),
        (RESPONSES, "max_output_tokens"),
    ],
)
async def test_the_limit_is_called_as_the_client_calls_it(
    post: Post, engine: FakeEngine, path: str, name: str
) -> None:
    others = {"max_tokens", "max_completion_tokens", "max_output_tokens"} - {name}
    for fields, param, says in (
        ({name: 256}, name, f"and {name}=256"),
        ({name: 0}, name, f"{name} must be 1 or more, found 0"),
        ({name: -3}, name, f"{name} must be 1 or more, found -3"),
        ({name: 1.5}, name, f"{name} must be an integer, found 1.5"),
        ({name: 4, "min_tokens": 5}, "min_tokens", f"above {name}, found min_tokens=5 and {name}=4"),
    ):
        status, body = await post(path, **BODIES[path], **fields)
        error = body["error"]
        assert (status, error["param"]) == (400, param), error
        assert says in error["message"]
        assert not any(re.search(rf"\b{other}\b", error["message"]) for other in others)
        assert ("echo" in error["message"]) == (path == TEXT and fields == {name: 0})
    assert not engine.submitted


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        (TEXT, {"prompt": [1, None]}, "prompt", "prompt[1] must be a token id, found null"),
        (TEXT, {"prompt": [None]}, "prompt[0]", "must be text or token ids, found null"),
        (TEXT, {"prompt": [True]}, "prompt", "found true"),
        (TEXT, {"prompt": [{"a": False}]}, "prompt[0]", 'found {"a": false}'),
        (TEXT, {"prompt": "x", "stop": [1]}, "stop[0]", "expected `string`, got `integer`"),
        (
            TEXT,
            {"prompt": "x", "temperature": "warm"},
            "temperature",
            "expected `number | null`, got `string`",
        ),
        (TEXT, {"prompt": "x", "top_k": 1.5}, "top_k", "expected `integer | null`, got `number`"),
        (TEXT, {"prompt": "x", "stream": 5}, "stream", "expected `boolean | null`, got `integer`"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", 'found "robot"'),
        (CHAT, {"response_format": None, "guided_choice": [None]}, "guided_choice", "found [null]"),
        (
            RESPONSES,
            {"input": [{"role": None, "content": "x"}]},
            "input[0].role",
            "expected `string`, got `null`",
        ),
        (RESPONSES, {"input": [{"type": 5}]}, "input[0].type", "input[0].type 5 is not supported"),
        (RESPONSES, {"input": [{"role": "user", "content": None}]}, "input[0].content", "found null"),
        (
            RESPONSES,
            {"input": [{"type": "function_call", "call_id": 1, "name": "f", "arguments": "{}"}]},
            "input[0].call_id",
            "expected `string | null`, got `integer`",
        ),
        (RESPONSES, {"tools": [{"type": "function", "name": True}]}, "tools[0].name", "got `boolean`"),
        (RESPONSES, {"tools": [{"type": None}]}, "tools[0].type", "found null"),
        (RESPONSES, {"reasoning": {"effort": False}}, "reasoning.effort", "found false"),
    ],
)
async def test_values_are_shown_as_clients_write_them(
    post: Post, path: str, fields: dict[str, Any], param: str, says: str
) -> None:
    status, body = await post(path, **{**BODIES[path], **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert says in body["error"]["message"]
    assert not re.search(r"\b(None|NoneType|True|False|str|int|dict)\b", body["error"]["message"])


async def test_a_field_of_chats_in_a_response_is_called_by_its_own_name(post: Post) -> None:
    for fields, param, use in (
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools[0].function",
            "; its fields stand beside type here",
        ),
        (
            {"input": [{"role": "user", "content": "x", "tool_calls": []}]},
            "input[0].tool_calls",
            "; send an item of type function_call",
        ),
        ({"conversation": "conv_1"}, "conversation", "; use previous_response_id"),
    ):
        status, body = await post(RESPONSES, **{"input": "x", **fields})
        assert (status, body["error"]["message"]) == (400, f"{param} is not supported{use}")
        assert body["error"]["param"] == param
    _, body = await post(RESPONSES, input=[{"content": "x"}])
    assert body["error"]["message"] == "input[0].role is required"


async def test_a_clients_value_is_no_field_to_be_renamed(post: Post, engine: FakeEngine) -> None:
    engine.formats = OutputFormats(shows_tools=True, tools="hermes")
    for role in ("prompt", "messages", 'a "prompt"', "prompt" * 99):
        status, body = await post(RESPONSES, input=[{"role": role, "content": "x"}])
        assert status == 400
        assert f"found {abridged(role)}" in body["error"]["message"]
    choice = {"type": "function", "name": "messages"}
    tools = [{"type": "function", "name": "f"}]
    _, body = await post(RESPONSES, input="x", tools=tools, tool_choice=choice)
    assert body["error"]["message"] == 'tool_choice names "messages", which is not among tools'


def test_any_value_can_be_shown() -> None:
    assert abridged("\ud800") == '"\\ud800"'
    assert abridged("é\n") == '"é\\n"'
    assert abridged(b"x") == "b'x'"
    assert "too many digits" in abridged(10**5000)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "levels" in abridged(deep)
    assert abridged("x" * 99, 10) == '"xxxxxxxxx... (101 characters)'


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("name", 5, "a string, found 5"),
        ("name", ["a"], 'a string, found ["a"]'),
        ("description", {}, "a string, found {}"),
        ("strict", "yes", 'true or false, found "yes"'),
        ("strict", 1, "true or false, found 1"),
        ("schema", [], "an object, found []"),
        ("schema", None, "an object, found null"),
        ("schema", True, "an object, found true"),
    ],
)
async def test_what_is_beside_a_schema_has_its_type(
    post: Post, engine: FakeEngine, name: str, value: Any, what: str
) -> None:
    for path in (CHAT, TEXT):
        status, body = await post(path, **BODIES[path], response_format=json_schema(**{name: value}))
        assert (status, body["error"]["param"]) == (400, f"response_format.json_schema.{name}")
        assert body["error"]["message"] == f"response_format.json_schema.{name} must be {what}"
    status, body = await post(RESPONSES, input="hi", text=text_format(**{name: value}))
    assert (status, body["error"]["param"]) == (400, f"text.format.{name}")
    assert body["error"]["message"] == f"text.format.{name} must be {what}"
    assert not engine.submitted


@pytest.mark.parametrize("name", ["audio_url", "file", "image_url", "input_audio", "video_url"])
async def test_media_beside_a_text_are_refused(post: Post, engine: FakeEngine, name: str) -> None:
    messages = [{"role": "user", "content": [TEXT_PART, {**TEXT_PART, name: {"url": "x"}}]}]
    status, body = await post(CHAT, messages=messages)
    assert (status, body["error"]["param"]) == (400, f"messages[0].content[1].{name}")
    assert "this model reads text only" in body["error"]["message"]
    status, _ = await post(CHAT, messages=[{"role": "user", "content": [{**TEXT_PART, name: None}]}])
    assert status == 200
    assert len(engine.submitted) == 1


async def test_options_of_streams_need_a_stream(post: Post, engine: FakeEngine) -> None:
    for path in BODIES:
        status, body = await post(path, **BODIES[path], stream_options={"include_obfuscation": False})
        assert (status, body["error"]["param"]) == (400, "stream_options")
        assert body["error"]["message"] == "stream_options is only allowed when stream is true"
    assert not engine.submitted


async def test_a_long_name_of_a_model_is_abridged(post: Post) -> None:
    for path in BODIES:
        status, body = await post(path, **BODIES[path], model="m" * 100_000)
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert len(body["error"]["message"]) < 200
        assert '"' + "m" * 63 + "... (100002 characters)" in body["error"]["message"]
        assert 'this server has "fake"' in body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}),
        (CHAT, {"type": "custom", "custom": {"name": "f"}}),
        (RESPONSES, {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}),
    ],
)
async def test_a_choice_of_tools_that_is_not_served(
    post: Post, engine: FakeEngine, path: str, choice: dict[str, Any]
) -> None:
    engine.formats = OutputFormats(shows_tools=True, tools="hermes")
    tools = [TOOL] if path == CHAT else [{"type": "function", "name": "f"}]
    status, body = await post(path, **BODIES[path], tools=tools, tool_choice=choice)
    error = body["error"]
    assert (status, error["param"], error["code"]) == (400, "tool_choice.type", "unsupported_parameter")
    assert f"tool_choice.type {choice['type']} is not supported" in error["message"]
    assert "supported are auto, none, required, and a function by its name" in error["message"]


async def test_each_listed_item_has_an_id_of_its_own(post: Post, client: TestClient) -> None:
    """Else whoever turns pages by what came last would turn the same one for ever."""
    message = {"role": "user", "content": "x"}
    ids = ["a", "a", None, 5, "", "b"]
    _, answer = await post(RESPONSES, input=[{**message, "id": each} for each in ids])
    after: dict[str, str] = {}
    seen = []
    for _ in ids:
        url = f"{RESPONSES}/{answer['id']}/input_items"
        page = await (await client.get(url, params={"order": "asc", "limit": "1", **after})).json()
        seen += [item["id"] for item in page["data"]]
        after = {"after": page["last_id"]}
    assert not page["has_more"]
    assert len(set(seen)) == len(ids)
    assert (seen[0], seen[-1]) == ("a", "b")
    assert all(isinstance(each, str) and each for each in seen)
    made = seen[1]
    _, answer = await post(RESPONSES, input=[{**message, "id": made}, message])
    page = await (await client.get(f"{RESPONSES}/{answer['id']}/input_items")).json()
    assert len({item["id"] for item in page["data"]}) == 2


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RuntimeError("boom"), "server_error"),
        (TransferError("no decode TE can be reached"), "server_error"),
        (RequestError("the grammar is too complex"), "invalid_prompt"),
        (OverloadedError("too many wait"), "rate_limit_exceeded"),
    ],
)
async def test_a_response_that_breaks_off_ends_with_what_failed(
    client: TestClient, engine: FakeEngine, failure: Exception, code: str
) -> None:
    engine.failure, engine.fail_at_step = failure, 20
    response = await client.post(RESPONSES, json={"input": "hi", "stream": True})
    assert response.status == 200
    lines = [event.split("\n") for event in (await response.text()).split("\n\n") if event]
    events = [msgspec.json.decode(data.removeprefix("data: ")) for _, data in lines]
    assert [name for name, _ in lines] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events].count("response.output_text.delta") == 20
    assert [event["type"] for event in events].count("response.failed") == 1
    last = events[-1]["response"]
    assert (events[-1]["type"], last["status"]) == ("response.failed", "failed")
    assert list(last["error"]) == ["code", "message"]
    assert last["error"]["code"] == code
    assert str(failure) in last["error"]["message"]
    [item] = last["output"]
    assert item["status"] == "incomplete"
    assert len(item["content"][0]["text"]) == 20
    engine.failure = None
    assert (await client.get(f"{RESPONSES}/{last['id']}")).status == 404
    assert (await client.post(RESPONSES, json={"input": "hi", "max_output_tokens": 2})).status == 200


async def test_the_official_client_sees_that_a_response_failed(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.failure, engine.fail_at_step = RuntimeError("boom"), 20
    url = str(client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        stream = await api.responses.create(model="fake", input="hi", stream=True)
        *_, last = [event async for event in stream]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "server_error"
        assert "boom" in last.response.error.message
        engine.num_steps = 0
        with pytest.raises(openai.InternalServerError, match="boom"):
            await api.responses.create(model="fake", input="hi")
