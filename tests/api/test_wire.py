"""Wire format: lines of event streams, fields that vendors' types require, limits and defaults."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.api.conftest import Post
from tests.api.fake_engine import FakeEngine
from tests.api.tools import missing
from xdeepserve.api.answers.sse import escaped
from xdeepserve.api.server.defaults import sampling_defaults
from xdeepserve.api.server.endpoint import ENDPOINT
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import build_app, max_body_bytes
from xdeepserve.engine.dp.json_schema import json_rule
from xdeepserve.engine.serving.request import OutputFormats
from xdeepserve.errors import InputError, RequestError

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HI: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


BODIES: dict[str, Any] = {TEXT: {"prompt": "x"}, CHAT: {"messages": [HI]}, RESPONSES: {"input": "x"}}


@contextlib.asynccontextmanager
async def served(engine: FakeEngine, **options: Any) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(build_app(engine, ServerOptions(**options)))) as client:
        yield client


@pytest.mark.parametrize("text", ["a\u2028b", "\u2029", "x\x85y", "\x0b\x0c\x1c\x1e", "é\u2027\u202a\u2028"])
def test_no_event_has_a_line_end_within(text: str) -> None:
    data = escaped(msgspec.json.encode({"text": text}))
    assert msgspec.json.decode(data) == {"text": text}
    assert len(data.decode().splitlines()) == 1


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES])
async def test_streams_can_be_split_by_unicodes_lines(
    client: TestClient, engine: FakeEngine, path: str
) -> None:
    text = "one\u2028two\u2029three\x85four"
    engine.script = list(text.encode())
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    async with client.post(path, json={**BODIES[path], "stream": True, limit: len(engine.script)}) as answer:
        lines = (await answer.text()).splitlines()
    assert all(line.startswith(("data: ", "event: ")) for line in lines if line)
    events = [msgspec.json.decode(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = {
        TEXT: lambda each: each["choices"][0]["text"],
        CHAT: lambda each: each["choices"][0]["delta"].get("content", ""),
        RESPONSES: lambda each: each["delta"] if each["type"] == "response.output_text.delta" else "",
    }
    assert "".join(map(pieces[path], events)) == text


async def test_input_tokens_of_a_response(post: Post) -> None:
    for fields in ({"input": "hi"}, {"input": [HI], "instructions": "be brief"}):
        status, counted = await post(f"{RESPONSES}/input_tokens", **fields)
        assert (status, counted["object"]) == (200, "response.input_tokens")
        _, body = await post(RESPONSES, **fields)
        assert counted["input_tokens"] == body["usage"]["input_tokens"]
    _, body = await post(RESPONSES, input="hi")
    _, counted = await post(f"{RESPONSES}/input_tokens", input="x", previous_response_id=body["id"])
    assert counted["input_tokens"] > 10
    assert (await post(f"{RESPONSES}/input_tokens", input=[{"role": "user"}]))[0] == 400


async def test_the_limit_of_a_body_follows_the_context_or_a_setting(engine: FakeEngine) -> None:
    assert max_body_bytes(engine) == 1 << 20
    engine.max_model_len = 163_840
    assert max_body_bytes(engine) > 163_840 * len("163839, ")
    async with (
        served(engine, max_body_bytes=2048) as client,
        client.post(TEXT, json={"prompt": "x" * 3000}) as answer,
    ):
        assert answer.status == 413
        message = (await answer.json())["error"]["message"]
        assert message == "the request body is larger than 2048 bytes: --max-body-bytes of serve allows more"
    with pytest.raises(InputError, match="1024 or more, found 0"):
        ServerOptions(max_body_bytes=0)


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        ({"do_sample": False, "eos_token_id": 1}, {}),
        ({"temperature": 0.6, "top_k": 1, "top_p": 0.95, "repetition_penalty": 1.05}, None),
        ({"temperature": 1.0, "top_k": 0, "min_p": 0}, {}),
        ({"top_k": 20.0}, {"top_k": 20}),
        ({"temperature": None, "top_p": "0.9", "top_k": True}, {}),
        ({"temperature": -1, "top_p": 0.5}, {"top_p": 0.5}),
        ({"temperature": 9, "repetition_penalty": 0}, {}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"max_new_tokens": 16.0, "max_length": 20}, {"max_tokens": 16}),
        ({"max_new_tokens": 0, "top_k": 2.5, "min_p": [0.1]}, {}),
    ],
)
def test_sampling_defaults_of_a_checkpoint(found: dict[str, Any], taken: dict[str, Any] | None) -> None:
    assert sampling_defaults(found) == (found if taken is None else taken)


def test_defaults_that_are_not_taken_are_logged_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    assert not sampling_defaults({"temperature": 9, "top_p": "0.9", "max_new_tokens": -1})
    assert [each.split(": ", 1)[1] for each in caplog.messages] == [
        "temperature 9 is not taken: temperature must be between 0 and 2, found 9",
        'top_p "0.9" is not taken: top_p must be a number, found "0.9"',
        "max_new_tokens -1 is not taken: max_new_tokens must be an integer, 1 or more, found -1",
    ]


async def test_requests_without_a_value_take_the_checkpoints(engine: FakeEngine) -> None:
    app = build_app(engine)
    app[ENDPOINT].defaults = {"temperature": 0.6, "top_k": 1}
    async with TestClient(TestServer(app)) as client:
        for fields, expected in (({}, (0.6, 1)), ({"temperature": 0, "top_k": None}, (0, 1))):
            for path, body in (
                (TEXT, {"prompt": "x"}),
                (CHAT, {"messages": [HI]}),
                (RESPONSES, {"input": "x"}),
            ):
                async with client.post(path, json={**body, **fields}) as answer:
                    assert answer.status == 200
                params = engine.submitted[-1].params
                assert (params.temperature, params.top_k) == expected


async def test_requests_without_a_limit_take_the_checkpoints(engine: FakeEngine) -> None:
    app = build_app(engine)
    app[ENDPOINT].defaults = {"max_tokens": 7}
    async with TestClient(TestServer(app)) as client:
        for path, body, limit in (
            (TEXT, {"prompt": "x"}, "max_tokens"),
            (CHAT, {"messages": [HI]}, "max_completion_tokens"),
            (RESPONSES, {"input": "x"}, "max_output_tokens"),
        ):
            for fields, expected in (({}, 7), ({limit: 9}, 9), ({limit: None}, 7)):
                async with client.post(path, json={**body, **fields}) as answer:
                    assert answer.status == 200
                assert engine.submitted[-1].params.max_tokens == expected
        long = "x" * (engine.max_model_len - 5)
        async with client.post(TEXT, json={"prompt": long}) as answer:
            assert answer.status == 200
        assert engine.submitted[-1].params.max_tokens == 5
        async with client.post(CHAT, json={"messages": [HI], "min_tokens": 8}) as answer:
            assert answer.status == 400
            assert "min_tokens must not be above max_tokens" in await answer.text()


# ---- vendors' types ---------------------------------------------------------------------------------------


CASES: list[dict[str, Any]] = [
    {},
    {"tools": [TOOL]},
    {"n": 2, "logprobs": True, "top_logprobs": 2},
    {"max_tokens": 3},
]


@pytest.mark.parametrize("fields", CASES)
async def test_openais_chat_types(post: Post, engine: FakeEngine, fields: dict[str, Any]) -> None:
    chat = pytest.importorskip("openai.types.chat")
    engine.formats = OutputFormats(shows_tools=True, tools="hermes", reasoning="think")
    engine.script = list(b'<think>hm</think>ok<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    fields = {"messages": [HI], "max_tokens": len(engine.script), **fields}
    _, body = await post(CHAT, **fields)
    assert not list(missing(chat.ChatCompletion, body))
    chat.ChatCompletion.model_validate(body)
    _, chunks = await post(CHAT, stream=True, stream_options={"include_usage": True}, **fields)
    for chunk in chunks[:-1]:
        assert not list(missing(chat.ChatCompletionChunk, chunk))
        chat.ChatCompletionChunk.model_validate(chunk)


async def test_openais_other_types(post: Post, client: TestClient) -> None:
    openai = pytest.importorskip("openai.types")
    _, body = await post(TEXT, prompt="x", logprobs=2)
    assert not list(missing(openai.Completion, body))
    async with client.get("/v1/models") as answer:
        for card in (await answer.json())["data"]:
            assert not list(missing(openai.Model, card))


@pytest.mark.parametrize("limit", [4, 12, 25, 200])
async def test_openais_response_types(client: TestClient, engine: FakeEngine, limit: int) -> None:
    responses = pytest.importorskip("openai.types.responses")
    pydantic = pytest.importorskip("pydantic")
    engine.formats = OutputFormats(shows_tools=True, tools="hermes", reasoning="think")
    engine.script = list(b'<think>hm</think>ok<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    tool = {"type": "function", **TOOL["function"], "strict": None}
    fields = {"input": "hi", "tools": [tool], "max_output_tokens": min(limit, len(engine.script))}
    async with client.post(RESPONSES, json=fields) as answer:
        body = await answer.json()
    assert not list(missing(responses.Response, body))
    assert body["usage"]["input_tokens_details"].keys() >= {"cached_tokens", "cache_write_tokens"}
    responses.Response.model_validate(body)
    adapter = pydantic.TypeAdapter(responses.ResponseStreamEvent)
    async with client.post(RESPONSES, json={**fields, "stream": True}) as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith("data: "):
                adapter.validate_python(msgspec.json.decode(line[6:]))


# ---- propertyNames ----------------------------------------------------------------------------------------


ONLY_A = {"properties": {"a": True}, "additionalProperties": False}
ALL_X = {"patternProperties": {"^x_": True}, "additionalProperties": False}
DEFS = {
    "A": {"const": "a", "title": "A", "type": "string"},
    "B": {"$ref": "#/$defs/A"},
    "C": {"$ref": "#/$defs/C"},
}


@pytest.mark.parametrize(
    ("names", "fields", "others"),
    [
        ({"type": "string"}, {}, {}),
        (True, {}, {}),
        (
            {"pattern": "^x_"},
            {"additionalProperties": {"type": "integer"}},
            {"patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
        ),
        (
            {"type": "string", "enum": ["a", "b"]},
            {"properties": {"a": {"type": "null"}}},
            {"properties": {"a": {"type": "null"}, "b": True}, "additionalProperties": False},
        ),
        ({"pattern": "^x_"}, {"properties": {"y": True}}, ALL_X),
        (
            {"maxLength": 3},
            {},
            {"patternProperties": {r"^[\s\S]{0,3}$": True}, "additionalProperties": False},
        ),
        ({"minLength": 1}, {}, {"patternProperties": {r"^[\s\S]{1,}$": True}, "additionalProperties": False}),
        (False, {}, {"properties": {}, "additionalProperties": False}),
        ({"const": "a", "title": "A"}, {}, ONLY_A),
        ({"enum": ["a", 1]}, {"required": ["a"]}, {"required": ["a"], **ONLY_A}),
        ({"anyOf": [{"const": "a"}, {"enum": ["a"], "type": "string"}]}, {}, ONLY_A),
        ({"oneOf": [{"const": "a"}, {"const": "b"}, {"const": "b"}]}, {}, ONLY_A),
        ({"allOf": [{"const": "a"}]}, {}, ONLY_A),
        ({"$ref": "#/$defs/A"}, {}, ONLY_A),
        ({"anyOf": [{"$ref": "#/$defs/B"}]}, {}, ONLY_A),
    ],
)
def test_property_names_are_written_in_other_keywords(
    names: Any, fields: dict[str, Any], others: dict[str, Any]
) -> None:
    schema = {"type": "object", **fields, "propertyNames": names}
    inner = {"anyOf": [{"properties": {"propertyNames": schema}}]}
    for given, place in ((schema, []), (inner, ["anyOf", 0, "properties", "propertyNames"])):
        found = msgspec.json.decode(json_rule({**given, "$defs": DEFS}).removeprefix("%json "))
        found.pop("$defs")
        for step in place:
            found = found[step]
        found.pop("x-guidance", None)
        left = {} if "patternProperties" in others else fields
        assert found == {"type": "object", **left, **others}


@pytest.mark.parametrize(
    ("kind", "written"),
    [("INTEGER", "integer"), ("float", "number"), ("str", "string"), (["bool", "null"], ["boolean", "null"])],
)
def test_types_are_written_in_jsons_words(kind: Any, written: Any) -> None:
    schema = {"type": "OBJECT", "properties": {"type": {"items": {"type": kind}}}}
    found = msgspec.json.decode(json_rule(schema).removeprefix("%json "))
    assert found["type"] == "object"
    assert found["properties"] == {"type": {"items": {"type": written}}}


@pytest.mark.parametrize(
    ("names", "fields", "says"),
    [
        ({"format": "uuid"}, {}, "supported are an enum of texts, or a const, or a pattern, or lengths"),
        ({"type": "integer"}, {}, "one of them alone"),
        ({"not": {"const": "a"}}, {}, "one of them alone"),
        ({"pattern": "^x", "maxLength": 3}, {}, "one of them alone"),
        ({"pattern": "("}, {}, "one of them alone"),
        ({"maxLength": "3"}, {}, "one of them alone"),
        ({"maxLength": -3}, {}, "one of them alone"),
        ({"anyOf": [{"const": "a"}, {"pattern": "^x"}]}, {}, "one of them alone"),
        ({"$ref": "#/$defs/C"}, {}, "one of them alone"),
        ({"$ref": "#/$defs/D"}, {}, "#/$defs/D points to nothing"),
        ({"$ref": "other.json"}, {}, "other.json points to nothing"),
        ({"enum": ["a"]}, {"required": ["b"]}, "excludes 'b', which is required"),
        ({"enum": ["a"]}, {"patternProperties": {"a": True}}, "beside patternProperties"),
    ],
)
def test_other_property_names_are_refused(names: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as refused:
        json_rule({"type": "object", **fields, "propertyNames": names, "$defs": DEFS})
    assert says in str(refused.value)
