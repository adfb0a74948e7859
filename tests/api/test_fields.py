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
from xdeepserve.api.openai.requests import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    Tool,
    ToolCall,
)
from xdeepserve.api.routes.fields import (
    CHANGES,
    HARMLESS,
    HOSTED,
    MAX_IGNORED,
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
from xdeepserve.model.chat_template import ChatTemplate
from xdeepserve.model.message_fields import SERVED

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
        (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
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
        (CHAT, {"verbosity": "high"}, "verbosity"),
        (RESPONSES, {"text": {"verbosity": "high"}}, "text.verbosity"),
        (CHAT, {"messages": [{**HI, "prefix": True}]}, "messages[0].prefix"),
        (CHAT, {"messages": [{**HI, "contnet": "b"}]}, "messages[0].contnet"),
        (CHAT, {"tools": [{**TOOL, "strct": True}]}, "tools[0].strct"),
        (RESPONSES, {"messages": [HI]}, "messages"),
        (RESPONSES, {"input": [{**HI, "contents": []}]}, "input[0].contents"),
        (TEXT, {"temprature": 0}, "temprature"),
        ("/tokenize", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("/tokenize", {"enable_thinking": False}, "enable_thinking"),
        ("/tokenize", {"documents": ["a"]}, "documents"),
        ("/tokenize", {"messages": [HI], "images": ["x"]}, "images"),
    ],
)
async def test_what_would_change_the_answer_is_refused(
    post: Post, engine: FakeEngine, path: str, fields: dict[str, Any], param: str
) -> None:
    status, body = await post(path, **{**BODIES[path], **fields})
    assert (status, body["error"]["param"]) == (400, param)
    assert not engine.submitted


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def call(**fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", **fields}]}, HI]
    }


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# Names, a value of each, and the end of the refusal.
NAMES: list[tuple[str, str, Any, str]] = [
    (CHAT, "images files attachments imageData", ["x"], ": this model reads text only"),
    (CHAT, "extra_body generation_config generationConfig", {"n": 2}, "; its fields stand beside model here"),
    (CHAT, "parameters options sampling_params", {"n": 2}, "; its fields stand beside model here"),
    (CHAT, "system_prompt preamble systemInstruction", "x", "; use a message of role system"),
    (CHAT, "chat_history contents inputs query", [HI], "; use messages"),
    (CHAT, "random_seed sampling_seed randomSeed", 5, "; use seed"),
    (CHAT, "stop_words stop_strings stopping_strings until stopSequences", ["x"], "; use stop"),
    (CHAT, "schema guided_json_object guided_decoding", {}, "; use structured_outputs"),
    (CHAT, "json_mode responseSchema response_model", True, "; use response_format"),
    (CHAT, "min_length min_new_tokens", 3, "; use min_tokens"),
    (CHAT, "reasoning_budget thinking_budget", 99, ": no limit is for the reasoning alone"),
    (CHAT, "maxOutputTokens max_gen_toks num_predict", 3, "; use max_tokens"),
    (CHAT, "k", 3, "; use top_k"),
    (CHAT, "candidateCount", 2, "; use n"),
    (CHAT, "negative_prompt guidance_scale tool_prompt stop_regex", "none", ""),
    (CHAT, "reasoning_format", "none", ": the reasoning is always apart from the content; leave it out"),
    (CHAT, "search_parameters", {}, ""),
    (CHAT, "separate_reasoning", False, ": the reasoning is always apart from the content; leave it out"),
    (TEXT, "reasoning_format", "none", ": it is for chats only"),
    (CHAT, "parse_tool_calls", False, ""),
    (CHAT, "end_sequences", ["x"], "; use stop"),
    (CHAT, "tokens_to_generate max_response_tokens max_out_len", 3, "; use max_tokens"),
    (CHAT, "terminators stop_ids", [1], "; use stop_token_ids"),
    (CHAT, "beam_size", 4, ""),
    (CHAT, "response_prefix prefill assistantPrefix", "So", "; use continue_final_message"),
    (TEXT, "response_prefix", "So", "; write it at the end of prompt"),
    (TEXT, "input_prefix input_suffix", "x", "; write it into the prompt"),
    (CHAT, "enable_search", True, ""),
    (TEXT, "chat_history", [HI], "; use prompt"),
    (TEXT, "system_prompt", "x", ": it is for chats only"),
    (TEXT, "thinking", {"type": "enabled"}, ": it is for chats only"),
    (TEXT, "random_seed", 5, "; use seed"),
    (RESPONSES, "system_prompt", "x", "; use instructions"),
    (RESPONSES, "chat_history", [HI], "; use input"),
    (RESPONSES, "json_mode", True, "; use text.format"),
    (RESPONSES, "maxNewTokens", 5, "; use max_output_tokens"),
    (RESPONSES, "thinking", {"type": "disabled"}, "; use reasoning.effort"),
]
SCHEMAS = [
    "inputSchema",
    "input_schema",
    "parameters_json_schema",
    "parametersJsonSchema",
    "args_schema",
    "schema",
]
INSIDE: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, function(**{name: SCHEMA}), "; use parameters") for name in SCHEMAS),
    *((CHAT, {"tools": [{**TOOL, name: SCHEMA}]}, "; use function") for name in SCHEMAS),
    *(
        (RESPONSES, {"tools": [{"type": "function", "name": "f", name: SCHEMA}]}, "; use parameters")
        for name in SCHEMAS
    ),
    *(
        (CHAT, call(function={"name": "f", name: {"a": 1}}), "; use arguments")
        for name in ("args", "input", "parameters", "params")
    ),
    (CHAT, call(function={"name": "f"}, arguments={"a": 1}), "; use function"),
    *(
        (CHAT, {"messages": [HI, {"role": "tool", "tool_call_id": "c", name: "4"}]}, "; use content")
        for name in ("output", "result", "response", "text")
    ),
    *(
        (CHAT, {"messages": [{"role": "assistant", name: ["x"]}, HI]}, "; use content")
        for name in ("text", "parts")
    ),
    *(
        (CHAT, {"messages": [{**HI, name: ["x"]}]}, ": this model reads text only")
        for name in ("images", "files", "attachments", "audio", "videos")
    ),
    (CHAT, {"messages": [{**HI, "function_call": {"name": "f"}}]}, "; use tool_calls"),
    (
        CHAT,
        {"messages": [{**HI, "content": [{"type": "text", "text": "a", "image_url": "x"}]}]},
        ": this model reads text only",
    ),
    (
        RESPONSES,
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "args": {}}]},
        "; use arguments",
    ),
    *((path, {name: value}, says) for path, names, value, says in NAMES for name in names.split()),
]


@pytest.mark.parametrize(("path", "fields", "says"), INSIDE, ids=str)
async def test_names_of_other_servers_say_what_to_use(
    post: Post, engine: FakeEngine, path: str, fields: dict[str, Any], says: str
) -> None:
    engine.formats = OutputFormats(shows_tools=True, tools="hermes")
    status, body = await post(path, **{**BODIES[path], **fields})
    assert status == 400
    assert body["error"]["message"].endswith(f"is not supported{says}")
    assert not engine.submitted


MISSPELT: list[tuple[dict[str, Any], str]] = [
    ({"messages": [HI, {"role": "tool", "contnet": "4"}]}, "messages[1].contnet (did you mean content?)"),
    (
        {"messages": [{"role": "assistant", "toolCalls": [{}]}, HI]},
        "messages[0].toolCalls (did you mean tool_calls?)",
    ),
    (
        call(function={"name": "f", "argumnets": {}}),
        "messages[0].tool_calls[0].function.argumnets (did you mean arguments?)",
    ),
    (function(parametres={}), "tools[0].function.parametres (did you mean parameters?)"),
]
ROLES = ("human", "ai", "model", "function", "ipython", "User")
# What changes nothing is taken everywhere.
TAKEN: list[dict[str, Any]] = [
    {"messages": [{**HI, "name": "me", "id": "m", "timestamp": 3, "metadata": {"a": 1}, "mood": 1}]},
    {"messages": [{**HI, "images": [], "function_call": None, "parts": [], "audio": None, "text": ""}]},
    {"messages": [HI], "tools": [{**TOOL, "cache_control": {}, "mood": 1}]},
    call(function={"name": "f", "arguments": "{}", "id": "x", "mood": 1}, index=0, extra_content={}),
]


@pytest.mark.parametrize(("fields", "says"), MISSPELT, ids=str)
async def test_misspelt_names_say_what_may_be_meant(
    post: Post, engine: FakeEngine, fields: dict[str, Any], says: str
) -> None:
    engine.formats = OutputFormats(shows_tools=True, tools="hermes")
    status, body = await post(CHAT, **{**BODIES[CHAT], **fields})
    assert (status, body["error"]["message"]) == (400, f"unknown field {says}")


CHATS = [
    *(fields for path, fields, _ in INSIDE if path == CHAT and {"messages", "tools"} & fields.keys()),
    *(fields for fields, _ in MISSPELT),
    *({"messages": [{"role": role, "content": "x"}]} for role in ROLES),
    *TAKEN,
]


@pytest.mark.parametrize("fields", CHATS, ids=str)
async def test_python_refuses_what_the_endpoint_does(
    post: Post, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    engine.formats = OutputFormats(shows_tools=True, tools="hermes")
    status, body = await post(CHAT, **{**BODIES[CHAT], **fields})
    template, said = ChatTemplate("{{ messages | tojson }}", "a test"), None
    try:
        template.render(messages=fields.get("messages", [HI]), tools=fields.get("tools"))
    except RequestError as error:
        said = str(error)
    assert said == (body["error"]["message"] if status == 400 else None)
    assert (status == 200) == (fields in TAKEN)


HARMLESS_NAMES = """chat_id client conversation_id conversation_name context_id extra_headers headers labels
    message_id num_ctx query_id rid session tags timeout title trace_id ttl user_id"""


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES])
async def test_names_that_change_nothing_are_not_taken_for_others(client: TestClient, path: str) -> None:
    fields = dict.fromkeys(HARMLESS_NAMES.split(), "x")
    async with client.post(path, json={**BODIES[path], **fields}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["X-Ignored-Fields"] == ", ".join(fields)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"thinking": {"type": "disabled"}, "enable_thinking": False, "think": False}),
        (TEXT, {"images": [], "stop_words": [], "system_prompt": "", "json_mode": False, "seed": 0}),
        (CHAT, {"extra_body": {}, "min_length": 0, "reasoning_budget": -1, "separate_reasoning": True}),
        (
            CHAT,
            {"guidance_scale": 1.0, "negative_prompt": "", "files": [], "schema": False, "random_seed": -1},
        ),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 5}}),
        (CHAT, {"stop": [], "logit_bias": {}, "tools": [], "top_k": None, "verbosity": "medium"}),
        # An editor's request: all that an agent may need, with a tool that has no parameters.
        (
            CHAT,
            {
                "tools": [TOOL],
                "parallel_tool_calls": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        # System messages anywhere, and turns of a user in a row.
        (CHAT, {"messages": [HI, {**HI, "role": "system"}, HI, HI, {**HI, "role": "system"}]}),
        (RESPONSES, {"text": {"verbosity": "medium", "format": {"type": "text"}}}),
        (f"{TEXT}?api-version=2025-01-01", {}),
    ],
)
async def test_values_that_ask_for_nothing_are_taken(
    post: Post, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    engine.formats = OutputFormats(shows_tools=True, tools="hermes")
    status, body = await post(path, **{**BODIES[path.partition("?")[0]], **fields})
    assert status == 200, body


@pytest.mark.parametrize(
    ("thinking", "told"),
    [
        ({"type": "enabled"}, True),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, None),
        (True, True),
        (False, False),
        (None, None),
    ],
)
async def test_thinking_is_told_to_the_template(
    post: Post, engine: FakeEngine, thinking: Any, told: bool | None
) -> None:
    status, _ = await post(CHAT, messages=[HI], thinking=thinking)
    assert status == 200
    assert engine.tokenizer is not None
    assert engine.tokenizer.variables.get("enable_thinking") is told  # type: ignore[attr-defined]
    assert (await post(CHAT, messages=[HI], thinking={"type": "on"}))[0] == 400
    assert (await post(CHAT, messages=[HI], thinking={"type": "enabled", "budgt": 1}))[0] == 400


async def test_variables_that_no_template_reads_are_named(client: TestClient, engine: FakeEngine) -> None:
    for path in (CHAT, "/tokenize"):
        given = {"thinking": False, "mood": "calm", "nothing": None}
        body = {"messages": [HI], "chat_template_kwargs": given}
        async with client.post(path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["X-Ignored-Fields"] == "chat_template_kwargs.mood"
        async with client.post(path, json={**body, "chat_template_kwargs": {"thinkin": False}}) as answer:
            assert "chat_template_kwargs.thinkin (did you mean thinking?)" in await answer.text()
            assert answer.status == 400
        async with client.post(path, json={**body, "chat_template_kwargs": {"thinking": False}}) as answer:
            assert "X-Ignored-Fields" not in answer.headers
    body = {"messages": [HI], "chat_template_kwargs": {"mood": "calm"}}
    async with strict(engine) as all_refused, all_refused.post(CHAT, json=body) as answer:
        assert (answer.status, "chat_template_kwargs.mood" in await answer.text()) == (400, True)


async def test_an_effort_that_no_template_reads_is_named(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a template may still read `thinking`, by which it can be told not to reason."""
    kind = type(engine.tokenizer)
    monkeypatch.setattr(kind, "template_variables", frozenset({"messages", "thinking"}))
    for effort, named in (("high", True), ("none", False), (None, False)):
        async with client.post(CHAT, json={"messages": [HI], "reasoning_effort": effort}) as answer:
            assert answer.status == 200, await answer.text()
            assert ("reasoning_effort" in answer.headers.get("X-Ignored-Fields", "")) == named
        body = {"input": "Hi", "reasoning": {"effort": effort}}
        async with client.post("/v1/responses", json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert ("reasoning.effort" in answer.headers.get("X-Ignored-Fields", "")) == named


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
    for kind in (ChatMessage, ContentPart, ToolCall, FunctionCall, Tool, FunctionDefinition):
        assert SERVED[kind.__name__] == set(kind.__struct_fields__)
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


async def test_a_request_may_have_so_many_unknown_fields(post: Post) -> None:
    for number, status in ((MAX_IGNORED, 200), (MAX_IGNORED + 1, 400)):
        fields = {f"zz{i}": 1 for i in range(number)}
        assert (await post(TEXT, prompt="x", **fields))[0] == status


@pytest.mark.parametrize("kind", ["web_search_preview_2025_03_11", "mcp", "computer_use_preview"])
def test_tools_of_servers(kind: str) -> None:
    assert HOSTED["Tool"].fullmatch(kind)
    with pytest.raises(RequestError, match="unknown field x"):
        Fields(is_strict=True).served({"x": 1}, FieldPlace("Tool", frozenset({"type"})))
