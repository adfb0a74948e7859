"""Reasoning and tool calls in chat completions: what clients send, and what they get."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from aiohttp.test_utils import TestClient

from tests.api.conftest import Post
from tests.api.fake_engine import EOS, FakeEngine
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.engine.serving.request import NOTHING, OutputFormats, ToolRules
from xdeepserve.parsing.call_grammar import Function

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = (
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>\n'
    '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
)


def says(engine: FakeEngine, text: str) -> None:
    engine.script = [*text.encode(), EOS]


@pytest.fixture
def speaker(engine: FakeEngine) -> FakeEngine:
    """An engine whose model reasons, and calls tools in the hermes format."""
    engine.formats = OutputFormats(reasoning=True, tools="hermes", shows_tools=True)
    engine.max_model_len = 1000
    return engine


async def streamed(post: Post, **fields: Any) -> tuple[dict[str, Any], str | None]:
    """The message that a stream's deltas make, joined as OpenAI's clients join them."""
    _, chunks = await post(URL, stream=True, **fields)
    assert chunks.pop() == "[DONE]"
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in chunks:
        [choice] = chunk["choices"]
        reason = choice["finish_reason"] or reason
        for call in choice["delta"].pop("tool_calls", []):
            if call["index"] == len(calls):
                assert set(call) == {"index", "id", "type", "function"}
                calls.append({**call, "function": {**call["function"], "arguments": ""}})
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        for key, value in choice["delta"].items():
            message[key] = message.get(key, "") + value
    if calls:
        message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
    return message, reason


@pytest.mark.parametrize(
    ("form", "calls"),
    [
        ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"),
        ("minimax", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">7</parameter>\n'
         "</invoke>\n</minimax:tool_call>"),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
         'name="city" string="true">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'),
    ],
)  # fmt: skip
async def test_texts_of_calls_between_tags_are_those_of_the_schema(
    engine: FakeEngine, post: Post, form: Any, calls: str
) -> None:
    engine.formats, engine.max_model_len = OutputFormats(tools=form, shows_tools=True), 1000
    says(engine, f"So: {calls}")
    message, reason = await streamed(post, messages=HI, tools=[WEATHER])
    assert reason == "tool_calls"
    assert message["content"] == "So:"
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "7"}'}


async def test_reasoning_is_apart_from_the_content(post: Post, speaker: FakeEngine) -> None:
    says(speaker, "<think>é?</think>yes")
    _, body = await post(URL, messages=HI)
    [choice] = body["choices"]
    expected = {"role": "assistant", "content": "yes", "reasoning_content": "é?", "reasoning": "é?"}
    assert choice["message"] == {**expected, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert await streamed(post, messages=HI) == (expected, "stop")


async def test_completions_are_not_parsed(post: Post, speaker: FakeEngine) -> None:
    says(speaker, "<think>a</think>" + CALLS)
    _, body = await post("/v1/completions", prompt="hi", max_tokens=500)
    assert body["choices"][0]["text"] == "<think>a</think>" + CALLS


@pytest.mark.parametrize(("before", "content"), [("", None), ("Let me see.\n", "Let me see.")])
async def test_tool_calls(post: Post, speaker: FakeEngine, before: str, content: str | None) -> None:
    says(speaker, before + CALLS)
    _, body = await post(URL, messages=HI, tools=[WEATHER])
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == content
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "get_weather", "arguments": '{"city": "Bern"}'},
        {"name": "get_time", "arguments": "{}"},
    ]
    assert all(list(call) == ["id", "type", "function"] and call["type"] == "function" for call in calls)
    message, reason = await streamed(post, messages=HI, tools=[WEATHER])
    assert reason == "tool_calls"
    assert message["content"] == (content or "")
    assert [call["function"] for call in message["tool_calls"]] == [call["function"] for call in calls]
    ids = [call["id"] for call in (*calls, *message["tool_calls"])]
    assert len(set(ids)) == 4
    tokenizer = speaker.tokenizer
    assert tokenizer is not None
    assert [tools for _, tools in tokenizer.chats] == [[WEATHER]] * 2


async def test_choices_are_parsed_apart_and_counted_whole(post: Post, speaker: FakeEngine) -> None:
    says(speaker, CALLS)
    _, body = await post(URL, messages=HI, tools=[WEATHER], n=2, logprobs=True)
    assert body["usage"]["completion_tokens"] == 2 * len(speaker.script)
    for choice in body["choices"]:
        assert len(choice["message"]["tool_calls"]) == 2
        assert len(choice["logprobs"]["content"]) == len(speaker.script)


async def test_a_call_cut_off_ends_for_its_length(post: Post, speaker: FakeEngine) -> None:
    speaker.formats = OutputFormats(tools="deepseek_v31", shows_tools=True)
    says(speaker, '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}')
    _, body = await post(URL, messages=HI, tools=[WEATHER], max_tokens=len(speaker.script) - 3)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": '}


async def test_tool_choice_none_shows_and_parses_none(post: Post, speaker: FakeEngine) -> None:
    says(speaker, CALLS)
    _, body = await post(URL, messages=HI, tools=[WEATHER], tool_choice="none")
    assert body["choices"][0]["message"]["content"] == CALLS
    assert body["choices"][0]["finish_reason"] == "stop"
    tokenizer = speaker.tokenizer
    assert tokenizer is not None
    assert tokenizer.chats[0][1] is None


async def test_a_conversation_with_calls(post: Post, speaker: FakeEngine) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city":"Bern"}'},
    }
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "name": "get_weather",
            "content": [{"type": "text", "text": "4"}],
        },
        {"role": "assistant", "content": "4 degrees", "tool_calls": []},
    ]
    assert (await post(URL, messages=messages, max_tokens=1))[0] == 200
    tokenizer = speaker.tokenizer
    assert tokenizer is not None
    [(shown, _)] = tokenizer.chats
    assert shown[1] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{**call, "function": {"name": "get_weather", "arguments": {"city": "Bern"}}}],
    }
    assert str(shown[1]["tool_calls"][0]["function"]["arguments"]) == '{"city":"Bern"}'
    assert shown[2] == {"role": "tool", "content": "4", "name": "get_weather", "tool_call_id": "c1"}
    assert shown[3] == {"role": "assistant", "content": "4 degrees"}


def with_arguments(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [{"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]


def named(name: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, **fields}}]


def choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


ANY = '{"type": "object"}'
NONE = '{"additionalProperties": false, "type": "object", "properties": {}}'
EXACT = json.dumps(WEATHER["function"]["parameters"])  # type: ignore[index]
TWO = [WEATHER, *named("get_time")]


async def test_names_of_functions_may_be_long(post: Post, speaker: FakeEngine) -> None:
    for length, status in ((64, 200), (65, 200), (128, 200), (129, 400)):
        assert (await post(URL, messages=HI, tools=named("f" * length), tool_choice="required"))[0] == status


@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({"tools": TWO}, None),
        ({"tools": named("f", parameters={"type": "OBJECT", "properties": {"a": {"type": "int"}}})}, None),
        ({"tools": TWO, "parallel_tool_calls": True, "tool_choice": "auto"}, None),
        ({"tools": TWO, "tool_choice": "none", "parallel_tool_calls": False}, None),
        ({"parallel_tool_calls": False}, None),
        (
            {"tools": TWO, "parallel_tool_calls": False},
            ToolRules(functions=(Function("get_weather", ANY), Function("get_time", ANY)), is_single=True),
        ),
        (
            {"tools": TWO, "tool_choice": "required"},
            ToolRules(functions=(Function("get_weather", EXACT), Function("get_time", NONE)), must_call=True),
        ),
        (
            {"tools": TWO, "tool_choice": choice("get_weather")},
            ToolRules(functions=(Function("get_weather", EXACT),), must_call=True, is_single=True),
        ),
        (
            {"tools": named("f", strict=True, parameters={"type": "object", "required": ["x"]})},
            ToolRules(functions=(Function("f", '{"type": "object", "required": ["x"]}'),)),
        ),
    ],
)
async def test_what_is_promised_of_calls(
    post: Post, speaker: FakeEngine, fields: dict[str, Any], rules: ToolRules | None
) -> None:
    status, _ = await post(URL, messages=HI, max_tokens=1, **fields)
    assert status == 200
    asked = [parse.tool_rules for _, parse in speaker.prepared]
    assert asked == ([] if rules is None else [rules])
    assert speaker.submitted[0].parse.tool_rules == rules


OBJECT = {"type": "json_object"}


@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({}, ToolRules(functions=(Function("get_weather", ANY),))),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": "required"}, ToolRules(functions=(Function("get_weather", EXACT),), must_call=True)),
    ],
)
async def test_a_form_is_that_of_content_beside_which_calls_are_possible(
    post: Post, speaker: FakeEngine, fields: dict[str, Any], rules: ToolRules | None
) -> None:
    """A forced call leaves no content; what is asked of that is compiled, and so refused if it is wrong."""
    status, _ = await post(URL, messages=HI, max_tokens=1, tools=[WEATHER], response_format=OBJECT, **fields)
    assert status == 200
    assert speaker.submitted[0].parse.tool_rules == rules
    form = StructuredOutputsParams(json_object=True)
    assert speaker.submitted[0].params.structured_outputs == form
    assert speaker.prepared[0] == (speaker.submitted[0].params, NOTHING)


@pytest.mark.parametrize("form", [{"structured_outputs": {"regex": "a"}}, {"guided_choice": ["a"]}])
async def test_a_form_of_the_whole_text_excludes_forced_calls(
    post: Post, speaker: FakeEngine, form: dict[str, Any]
) -> None:
    for forced in ("required", choice("get_weather")):
        status, body = await post(URL, messages=HI, tools=[WEATHER], tool_choice=forced, **form)
        assert (status, body["error"]["param"]) == (400, *form)
        assert f"{next(iter(form))} and tool_choice cannot be combined" in body["error"]["message"]


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {}, "type": "object"}])
async def test_a_function_without_parameters_is_called_without(
    post: Post, speaker: FakeEngine, parameters: dict[str, Any] | None
) -> None:
    tools = named("f", parameters=parameters)
    await post(URL, messages=HI, max_tokens=1, tools=tools, tool_choice="required")
    rules = speaker.submitted[0].parse.tool_rules
    assert rules is not None
    assert json.loads(rules.functions[0].parameters) == json.loads(NONE)


@pytest.mark.parametrize("kind", [{}, {"type": ["object", "null"]}])
async def test_arguments_are_objects_though_the_schema_does_not_say_so(
    post: Post, speaker: FakeEngine, kind: dict[str, Any]
) -> None:
    tools = named("f", parameters={"properties": {"a": {"type": "integer"}}, **kind})
    await post(URL, messages=HI, max_tokens=1, tools=tools, tool_choice="required")
    rules = speaker.submitted[0].parse.tool_rules
    assert rules is not None
    assert json.loads(rules.functions[0].parameters)["type"] == "object"


BY_NAME = '{"type": "function", "function": {"name": ...}}'


@pytest.mark.parametrize(
    ("fields", "param", "says_"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": named("f", parameters={"type": "string"})},
            "tools[0].function.parameters.type",
            'must be object, found "string"',
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice", "must be {"),
        ({"tools": [WEATHER], "tool_choice": choice("get_time")}, "tool_choice", "not among tools"),
        ({"tools": [WEATHER], "tool_choice": {**choice("f"), "x": 1}}, "tool_choice.x", "unknown field"),
        ({"tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice", 'found "perhaps"'),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{**WEATHER, "strct": True}]}, "tools[0].strct", "unknown field"),
        ({"tools": named("f", returns={})}, "tools[0].function.returns", "not supported"),
        ({"tools": named("")}, "tools[0].function.name", "1 to 128"),
        ({"tools": named("a b")}, "tools[0].function.name", 'found "a b"'),
        ({"tools": named("f", parameters=[])}, "tools[0].function.parameters", "expected `object"),
        (
            {"messages": with_arguments(5)},
            "messages[0].tool_calls[0].function.arguments",
            "expected `",
        ),
        *(
            ({"tools": [WEATHER], "tool_choice": each}, "tool_choice", f"must be {says}")
            for each, says in {
                '{"type": "function", "name": "f"}': BY_NAME,
                '{"type": "tool", "name": "get_weather"}': BY_NAME,
                '{"name": "f"}': BY_NAME,
                '"get_weather"': BY_NAME,
                '"any"': '"required"',
                '{"type": "auto"}': 'the text "auto"',
                '{"type": "none"}': 'the text "none"',
                '{"type": "any"}': 'the text "required"',
                '{"type": "required"}': 'the text "required"',
            }.items()
            for each in [json.loads(each)]
        ),
    ],
)
async def test_refuses(
    post: Post, speaker: FakeEngine, fields: dict[str, Any], param: str, says_: str
) -> None:
    status, body = await post(URL, **{"messages": HI, **fields})
    assert status == 400
    assert body["error"]["param"] == param
    assert says_ in body["error"]["message"]
    assert not speaker.submitted


@pytest.mark.parametrize(
    "formats", [OutputFormats(), OutputFormats(tools="hermes"), OutputFormats(shows_tools=True)]
)
async def test_a_model_that_knows_no_tools_says_so(
    post: Post, engine: FakeEngine, formats: OutputFormats
) -> None:
    engine.formats = formats
    status, body = await post(URL, messages=HI, tools=[WEATHER])
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "output.tools" in body["error"]["message"]
    for harmless in ({"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}, {"tool_choice": "auto"}):
        assert (await post(URL, messages=HI, max_tokens=1, **harmless))[0] == 200


@pytest.fixture
async def api(client: TestClient) -> AsyncIterator[openai.AsyncOpenAI]:
    url = str(client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        yield api


async def test_the_official_client_runs_a_tool(api: openai.AsyncOpenAI, speaker: FakeEngine) -> None:
    says(speaker, "<think>hm</think>" + CALLS)
    messages: list[Any] = list(HI)
    answer = await api.chat.completions.create(model="fake", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    message = answer.choices[0].message
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Bern"}  # type: ignore[union-attr]
    assert message.reasoning_content == "hm"  # type: ignore[attr-defined]
    messages += [
        message,
        *({"role": "tool", "tool_call_id": c.id, "content": "4"} for c in message.tool_calls),
    ]
    says(speaker, "4 degrees")
    final = await api.chat.completions.create(model="fake", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    assert final.choices[0].message.content == "4 degrees"


async def test_the_official_client_accumulates_a_stream(api: openai.AsyncOpenAI, speaker: FakeEngine) -> None:
    says(speaker, CALLS)
    async with api.chat.completions.stream(model="fake", messages=HI, tools=[WEATHER]) as stream:  # type: ignore[list-item,arg-type]
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in final.choices[0].message.tool_calls or []] == [
        "get_weather",
        "get_time",
    ]


async def test_an_overloaded_engine(client: TestClient, engine: FakeEngine) -> None:
    engine.max_live = 1
    for body in ({"prompt": ["a", "b"]}, {"prompt": ["a", "b"], "stream": True}):
        response = await client.post("/v1/completions", json=body)
        assert response.status == 429
        assert int(response.headers["Retry-After"]) > 0
        error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "engine_overloaded")
        assert not engine.live
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status == 200


async def test_the_official_client_sees_a_rate_limit(api: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.max_live = 0
    with pytest.raises(openai.RateLimitError, match="overloaded"):
        await api.completions.create(model="fake", prompt="a")


async def test_priority_reaches_the_engine(post: Post, engine: FakeEngine) -> None:
    await post("/v1/completions", prompt="a", priority=-3)
    await post("/v1/completions", prompt="a")
    assert [handle.params.priority for handle in engine.submitted] == [-3, 0]
