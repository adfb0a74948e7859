"""/v1/messages: Anthropic's form of a chat, whole and streamed, with tools, thinking and errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.api.fake_engine import FakeEngine
from tests.api.tools import missing
from xdeepserve.api.anthropic.message_endpoint import completed
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import build_app
from xdeepserve.engine.serving.request import OutputFormats

URL = "/v1/messages"
HI: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
FORMAT: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object"}}
CALL: dict[str, Any] = {"type": "tool_use", "id": "c1", "name": "f"}
SCRIPT = b'<think>hm</think>ok<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def agent(engine: FakeEngine) -> FakeEngine:
    engine.formats = OutputFormats(shows_tools=True, tools="hermes", reasoning="think")
    engine.script = list(SCRIPT)
    return engine


async def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    body = {"messages": [HI], "max_tokens": len(SCRIPT), **fields}
    async with client.post(URL, json=body) as answer:
        found: dict[str, Any] = await answer.json()
        assert answer.status == 200, found
    return found


async def events(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": [HI], "max_tokens": len(SCRIPT), "stream": True, **fields}
    async with client.post(URL, json=body) as answer:
        assert answer.status == 200
        told = [line.split("\n") for line in (await answer.text()).split("\n\n") if line]
    found = [msgspec.json.decode(data.removeprefix("data: ")) for _, data in told]
    assert [name.removeprefix("event: ") for name, _ in told] == [each["type"] for each in found]
    return found


def collected(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Add events up to the message, as Anthropic's own client does."""
    assert [each["type"] for each in found[:2]] == ["message_start", "ping"]
    assert [each["type"] for each in found[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = found[0]["message"]
    is_open = False
    for event in found[2:-1]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                is_open, pieces = True, ""
            case "content_block_delta":
                assert is_open
                delta = event["delta"]
                block = message["content"][event["index"]]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        pieces += delta["partial_json"]
                        with contextlib.suppress(ValueError):
                            block["input"] = json.loads(pieces)
            case "content_block_stop":
                assert is_open
                is_open = False
            case "message_delta":
                assert not is_open
                message |= event["delta"]
                message["usage"] = event["usage"]
    return message


async def test_thinking_text_and_a_call(client: TestClient, agent: FakeEngine) -> None:
    message = await ask(client, tools=[TOOL])
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "ok"},
        {"type": "tool_use", "id": message["content"][2]["id"], "name": "f", "input": {"a": 1}},
    ]
    assert (message["type"], message["role"], message["stop_sequence"]) == ("message", "assistant", None)
    assert message["usage"]["output_tokens"] == len(SCRIPT)
    streamed = collected(await events(client, tools=[TOOL]))
    for each in (message, streamed):
        del each["id"], each["content"][2]["id"], each["usage"]
    assert streamed == message


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["k"], "tools": None}, "stop_sequence", "k"),
        ({"max_tokens": 10**6}, "model_context_window_exceeded", None),
    ],
)
async def test_why_an_answer_ends(
    client: TestClient, agent: FakeEngine, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    for message in (await ask(client, **fields), collected(await events(client, **fields))):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("max_tokens", [1, 12, 20, 50, 70, 80])
async def test_answers_come_back_wherever_they_are_cut(
    client: TestClient, agent: FakeEngine, max_tokens: int
) -> None:
    said = await ask(client, tools=[TOOL], max_tokens=max_tokens)
    calls = [block for block in said["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "no", "is_error": True}
        for call in calls
    ]
    reply = {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}
    await ask(client, messages=[HI, {"role": "assistant", "content": said["content"]}, reply], tools=[TOOL])


ARGUMENTS = '{"city": "Pa\\"r{is", "n": [1, -2.5, {"x": null, "z": {}}], "e": "", "k": {"q": "w,]"}, "l": 5}'


@pytest.mark.parametrize("length", [1, 8, 12, 21, 30, 38, 52, 60, 75, 88, len(ARGUMENTS)])
async def test_a_call_that_is_cut_off_has_its_whole_members(
    client: TestClient, agent: FakeEngine, length: int
) -> None:
    script = b'<tool_call>{"name": "f", "arguments": ' + ARGUMENTS.encode()
    agent.script = list(script + b"}</tool_call>")
    max_tokens = len(script) - len(ARGUMENTS) + length
    whole = await ask(client, tools=[TOOL], max_tokens=max_tokens)
    streamed = collected(await events(client, tools=[TOOL], max_tokens=max_tokens))
    assert (
        whole["content"][0]["input"]
        == streamed["content"][0]["input"]
        == json.loads(completed(ARGUMENTS[:length]))
    )
    assert whole["stop_reason"] == "max_tokens"


def is_part(found: Any, whole: Any) -> bool:
    """Whether an object has the first members of another, all of them whole."""
    return list(found.items()) == list(whole.items())[: len(found)]


def test_members_that_are_whole() -> None:
    for length in range(1, len(ARGUMENTS) + 1):
        assert is_part(json.loads(completed(ARGUMENTS[:length])), json.loads(ARGUMENTS)), length
    assert completed(ARGUMENTS) == ARGUMENTS
    for text, found in {
        "": "",
        '{"city": "Paris': "{}",
        '{"city": "Paris"': '{"city": "Paris"}',
        '{"n": 12': "{}",
        '{"n": 12, "b': '{"n": 12}',
        '{"a": tru': "{}",
        '{"a": true': '{"a": true}',
        '{"a": {"b": [1, 2': "{}",
        '{"a": {"b": [1, 2]': "{}",
        '{"a": {"b": [1, 2]}': '{"a": {"b": [1, 2]}}',
        '{"a": {"b": [1, 2]}}': '{"a": {"b": [1, 2]}}',
        '{"a": "x", "b": [1, 1': '{"a": "x"}',
        '{"a": "x", "b": [1, 1,': '{"a": "x"}',
        '{"a": "x", "b": [1, 1]': '{"a": "x", "b": [1, 1]}',
        '{"a": "x", "b": [': '{"a": "x"}',
        '{"a": [], "b': '{"a": []}',
        '{"a": {"x": "y"': "{}",
        '{"a": {"x": "y"}': '{"a": {"x": "y"}}',
        '{"a": [{"x": 1}, {"x": 2}': "{}",
        '{"a": ["]", "}"': "{}",
        '{"a": [[1], [2]], "b": {': '{"a": [[1], [2]]}',
        '{"a": -1.5e': "{}",
        '{"a\\': "{}",
        "{'a': 1, 'b": "",
        '"{\\"a': "",
    }.items():
        assert completed(text) == found


@pytest.mark.parametrize("given", [{}, {"input": None}, {"input": {}}, {"input": "{}"}])
async def test_a_call_without_arguments_has_none(
    client: TestClient, agent: FakeEngine, given: dict[str, Any]
) -> None:
    messages = [HI, {"role": "assistant", "content": [{**CALL, **given}]}, HI]
    await ask(client, messages=messages, tools=[TOOL])
    assert agent.tokenizer is not None
    assert agent.tokenizer.chats[-1][0][1]["tool_calls"][0]["function"]["arguments"] == {}


async def test_thinking_may_be_left_out_of_the_answer(client: TestClient, agent: FakeEngine) -> None:
    fields = {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, "tools": [TOOL]}
    for message in (await ask(client, **fields), collected(await events(client, **fields))):
        assert message["content"][:2] == [
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "text", "text": "ok"},
        ]
    async with client.post(URL, json={"messages": [HI], "max_tokens": 1, **fields}) as answer:
        assert answer.headers["X-Ignored-Fields"] == "thinking.budget_tokens"


async def test_what_the_template_is_shown(client: TestClient, agent: FakeEngine) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}], **mark}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **mark}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "more"}]},
    ]
    await ask(
        client,
        system=[{"type": "text", "text": "be brief", **mark}],
        messages=messages,
        tools=[{**TOOL, **mark}],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert agent.tokenizer is not None
    shown, tools = agent.tokenizer.chats[-1]
    assert [each["role"] for each in shown] == ["system", "user", "assistant", "tool", "user"]
    assert [each["content"] for each in shown] == ["be brief", "a\nb", "", "4", "more"]
    assert shown[2]["reasoning_content"] == "hm"
    assert shown[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert shown[3]["tool_call_id"] == "c1"
    assert tools is not None
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert tools == [{"type": "function", "function": function}]
    assert agent.tokenizer.variables["enable_thinking"] is True


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source}


PLAIN = document(type="text", media_type="text/plain", data="It rains.")


async def test_documents_of_text_are_read(client: TestClient, agent: FakeEngine) -> None:
    parts = document(type="content", content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    found = {
        "type": "search_result",
        "source": "http://x",
        "title": "X",
        "content": [{"type": "text", "text": "c"}],
    }
    titled = {**PLAIN, "title": "Weather", "context": "Bern", "citations": {"enabled": True}}
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [PLAIN, found]}
    messages = [
        {"role": "user", "content": [titled, parts, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    await ask(client, messages=messages, tools=[TOOL])
    assert agent.tokenizer is not None
    shown = [each["content"] for each in agent.tokenizer.chats[-1][0]]
    assert shown == ["Weather\nBern\nIt rains.\na\nb\n?", "", "It rains.\nX\nhttp://x\nc"]


@pytest.mark.parametrize(
    ("role", "block", "says"),
    [
        ("user", document(type="base64", data="aGk="), 'source.type must be text or content, found "base64"'),
        ("user", document(type="text"), "messages[0].content[0].source.data must be a text, found null"),
        ("user", {"type": "document"}, "source.type must be text or content, found null"),
        ("user", {"type": "image", "source": {}}, "this model reads text only"),
        ("user", {"type": "audio"}, "(known: text, document, search_result, tool_result)"),
        *(
            ("assistant", {"type": kind}, ": the model cannot be shown such a block; leave it out")
            for kind in ("server_tool_use", "mcp_tool_use", "web_search_tool_result", "tool_reference")
        ),
        (
            "user",
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference"}]},
            ": the model cannot be shown such a block; leave it out",
        ),
        ("assistant", {"type": "compaction"}, "; write its text into a block of type text"),
        ("assistant", PLAIN, "(known: text, thinking, redacted_thinking, tool_use)"),
        (
            "user",
            {"type": "search_result", "content": [PLAIN]},
            'content[0].type "document" is not supported',
        ),
        (
            "user",
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]},
            "reads text only",
        ),
    ],
)
async def test_other_blocks_are_refused(
    client: TestClient, agent: FakeEngine, role: str, block: dict[str, Any], says: str
) -> None:
    body = {"messages": [{"role": role, "content": [block]}], "max_tokens": 3}
    async with client.post(URL, json=body) as answer:
        assert answer.status == 400
        assert says in (await answer.json())["error"]["message"]


async def test_the_beginning_of_an_answer_is_continued(client: TestClient, agent: FakeEngine) -> None:
    await ask(client, messages=[HI, {"role": "assistant", "content": "It is"}])
    assert agent.tokenizer is not None
    assert agent.tokenizer.variables["continue_final_message"] is True


async def test_tokens_are_counted_as_they_are_used(client: TestClient, agent: FakeEngine) -> None:
    fields: dict[str, Any] = {"messages": [HI], "system": "be brief", "tools": [TOOL]}
    async with client.post(f"{URL}/count_tokens", json=fields) as answer:
        counted = await answer.json()
    usage = (await ask(client, **fields))["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ({"type": "auto"}, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
        ({"type": "tool", "name": "f"}, True),
        ({"type": "none"}, False),
    ],
)
async def test_tool_choice(
    client: TestClient, agent: FakeEngine, choice: dict[str, Any], calls: bool
) -> None:
    message = await ask(client, tools=[TOOL], tool_choice=choice)
    assert ("tool_use" in [block["type"] for block in message["content"]]) == calls


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role must be user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "tool_use_id must be",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "name must be"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema must be an object, found null"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "some"}},
            "must be auto, any, none or tool",
        ),
        ({"thinking": {"type": "on"}}, "thinking.type must be enabled"),
        # Objects within a request take their own fields only.
        ({"thinking": {"type": "enabled", "displai": "omitted"}}, "thinking.displai (did you mean display?)"),
        ({"thinking": {"type": "enabled", "display": "none"}}, "thinking.display: invalid enum value 'none'"),
        ({"thinking": {"enabled": True}}, "unknown field thinking.enabled; known are display, type"),
        ({"output_config": {"fmt": FORMAT}}, "output_config.fmt (did you mean format?)"),
        ({"output_config": {"task_budget": {}}}, "unknown field output_config.task_budget"),
        (
            {"output_config": {"format": {**FORMAT, "scema": {}}}},
            "output_config.format.scema (did you mean schema",
        ),
        (
            {"output_config": {"format": {**FORMAT, "strict": True}}},
            "unknown field output_config.format.strict",
        ),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is required"),
        (
            {"output_config": {"format": {"type": "json_object"}}},
            "output_config.format.type: invalid enum value",
        ),
        (
            {"output_format": {**FORMAT, "name": "x"}},
            "unknown field output_format.name; known are schema, type",
        ),
        ({"output_config": {"effort": "ultra"}}, "output_config.effort must be one of none, minimal"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "disable_paralel_tool_use": True}},
            "tool_choice.disable_paralel_tool_use (did you mean disable_parallel_tool_use?)",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": "yes"}},
            "tool_choice.disable_parallel_tool_use: expected `boolean",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}},
            'needs {"type": "tool", "name": ...}',
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name must be a tool's, found null"),
        (
            {"tools": [TOOL], "tool_choice": "auto"},
            'must be an object such as {"type": "auto"}, found "auto"',
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice any needs tools"),
        ({"tools": [{**TOOL, "strict": "yes"}]}, "tools[0].strict: expected `boolean"),
        ({"tools": [{**TOOL, "description": 5}]}, "tools[0].description: expected `string"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name must be 1 to 128"),
        (
            {"tools": [{**TOOL, "input_schema": {"type": "string"}}]},
            "tools[0].input_schema.type must be object",
        ),
        ({"tools": [{"name": "f", "parameters": {}}]}, "parameters is not supported; use input_schema"),
        (
            {"tools": [{"name": "f", "inputSchema": {}}]},
            "unknown field tools[0].inputSchema (did you mean input_schema?)",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{**PLAIN, "source": {**PLAIN["source"], "dta": "x"}}]}
                ]
            },
            "source.dta",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**CALL, "arguments": {}}]}]},
            "content[0].arguments is not supported; use input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**CALL, "input": 5}]}]},
            "content[0].input must be an object",
        ),
        ({"random_seed": 1}, "random_seed is not supported"),
        ({"stopSequences": ["x"]}, "unknown field stopSequences (did you mean stop_sequences?)"),
        ({"system_prompt": "x"}, "system_prompt is not supported; use system"),
        ({"json_mode": True}, "json_mode is not supported; use output_config.format"),
        ({"stop": ["x"]}, "stop is not supported; use stop_sequences"),
        ({"seed": 1}, "seed is not supported"),
        (
            {"chat_template_kwargs": {"thinking": False}},
            "chat_template_kwargs is not supported; use thinking",
        ),
        ({"guided_json": {}}, "guided_json is not supported; use output_config.format"),
        ({"presence_penalty": 0.5}, "presence_penalty is not supported"),
        ({"max_tokns": 5}, "did you mean max_tokens?"),
        ({"system": 5}, "system: expected"),
        ({"temperature": 1.5}, "temperature must be between 0 and 1, found 1.5"),
        ({"model": "claude"}, "the model"),
    ],
)
async def test_errors_have_anthropics_form(
    client: TestClient, agent: FakeEngine, fields: dict[str, Any], says: str
) -> None:
    body = {"messages": [HI], "max_tokens": 5, **fields}
    async with client.post(URL, json=body) as answer:
        found = await answer.json()
    assert found.keys() == {"type", "error"}
    assert found["type"] == "error"
    kind = {400: "invalid_request_error", 404: "not_found_error"}[answer.status]
    assert found["error"]["type"] == kind
    assert says in found["error"]["message"]
    assert not agent.submitted


@contextlib.asynccontextmanager
async def guarded(engine: FakeEngine) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(build_app(engine, ServerOptions(api_keys=("one",))))) as client:
        yield client


async def test_the_key_is_where_anthropics_clients_have_it(agent: FakeEngine) -> None:
    body = {"messages": [HI], "max_tokens": 5}
    async with guarded(agent) as client:
        for headers, status in (
            *(({}, 401), ({"x-api-key": "two"}, 401), ({"x-api-key": "one"}, 200), ({"api-key": "one"}, 200)),
            ({"x-api-key": "two", "Authorization": "Bearer one"}, 200),
            ({"x-api-key": "two", "Authorization": "Basic one"}, 401),
        ):
            async with client.post(URL, json=body, headers=headers) as answer:
                assert answer.status == status
                if status == 401:
                    assert (await answer.json())["error"]["type"] == "authentication_error"


async def test_what_claude_code_sends_is_taken(client: TestClient, agent: FakeEngine) -> None:
    body = {
        "messages": [HI],
        "max_tokens": 32000,
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": "u"},
        "context_management": {
            "edits": [
                {"type": "clear_thinking_20251015", "keep": "all"},
                {"type": "clear_tool_uses_20250919"},
                {"type": "compact_20260112"},
            ]
        },
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "stream": True,
    }
    async with client.post(f"{URL}?beta=true", json=body) as answer:
        assert answer.status == 200, await answer.text()
        ignored = answer.headers["X-Ignored-Fields"]
    assert ignored == "tools.web_search_20250305, metadata, context_management"


async def test_anthropics_own_types(client: TestClient, agent: FakeEngine) -> None:
    anthropic = pytest.importorskip("anthropic.types")
    pydantic = pytest.importorskip("pydantic")
    message = await ask(client, tools=[TOOL])
    assert not list(missing(anthropic.Message, message))
    anthropic.Message.model_validate(message)
    adapter = pydantic.TypeAdapter(anthropic.RawMessageStreamEvent)
    for event in await events(client, tools=[TOOL]):
        if event["type"] != "ping":  # not among its types, though its server sends it
            adapter.validate_python(event)
