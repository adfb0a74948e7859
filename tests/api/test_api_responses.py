"""/v1/responses: the official client streams, calls functions, and goes on from earlier answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, get_args

import openai
import pytest
from aiohttp.test_utils import TestClient

from tests.api.conftest import Post
from tests.api.fake_engine import EOS, FakeEngine
from xdeepserve.api.openai.requests import ChatMessage
from xdeepserve.api.openai.response_store import ResponseStore
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.engine.serving.request import OutputFormats, ToolRules
from xdeepserve.parsing.call_grammar import Function

URL = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'
PART = {"type": "input_text", "text": "x"}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RETURNED = {"type": "function_call_output", "call_id": "c", "output": "4"}
SUMMARY = {"type": "summary_text", "text": "x"}
THOUGHT_PART = {"type": "reasoning_text", "text": "x"}
THOUGHT = {"type": "reasoning", "summary": [SUMMARY], "content": [THOUGHT_PART]}


def says(engine: FakeEngine, text: str) -> None:
    engine.script = [*text.encode(), EOS]


@pytest.fixture
def speaker(engine: FakeEngine) -> FakeEngine:
    engine.formats = OutputFormats(reasoning=True, tools="hermes", shows_tools=True)
    engine.max_model_len = 1000
    return engine


@pytest.fixture
async def api(client: TestClient) -> AsyncIterator[openai.AsyncOpenAI]:
    url = str(client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        yield api


def shown(engine: FakeEngine) -> list[dict[str, Any]]:
    """The messages of the latest chat, as the template saw them."""
    assert engine.tokenizer is not None
    return engine.tokenizer.chats[-1][0]


async def test_an_answer(api: openai.AsyncOpenAI, speaker: FakeEngine) -> None:
    says(speaker, "<think>hm</think>4 degrees")
    answer = await api.responses.create(model="fake", input="hi", instructions="Be short.")
    assert answer.status == "completed"
    assert answer.output_text == "4 degrees"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(speaker.script)
    assert shown(speaker) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hi"},
    ]
    cut = await api.responses.create(model="fake", input="hi", max_output_tokens=12)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


async def test_a_stream_says_what_the_answer_says(api: openai.AsyncOpenAI, speaker: FakeEngine) -> None:
    says(speaker, "<think>hm</think>Let me see. " + CALL)
    given: dict[str, Any] = {"model": "fake", "input": "hi", "tools": [TOOL]}
    whole = await api.responses.create(**given)
    names, numbers, text, arguments, last = [], [], "", "", None
    async for event in await api.responses.create(**given, stream=True):
        names.append(event.type)
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
        if event.type == "response.completed":
            last = event.response
    assert numbers == list(range(len(names)))
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert text == "Let me see."
    assert json.loads(arguments) == {"city": "Bern"}
    assert last is not None
    for item, other in zip(last.output, whole.output, strict=True):
        one, two = item.to_dict(), other.to_dict()
        assert {**one, "id": "", "call_id": ""} == {**two, "id": "", "call_id": ""}
        assert one["id"] != two["id"]
    for kind in ("output_item.added", "output_item.done"):
        assert names.count(f"response.{kind}") == 3
    assert names.count("response.content_part.done") == 2


async def test_a_helper_for_streams_follows(api: openai.AsyncOpenAI, speaker: FakeEngine) -> None:
    says(speaker, "<think>hm</think>yes" + CALL)
    async with api.responses.stream(model="fake", input="hi", tools=[TOOL]) as stream:  # type: ignore[list-item]
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == "yes"


async def test_functions_are_called_and_the_answer_goes_on(
    api: openai.AsyncOpenAI, speaker: FakeEngine
) -> None:
    says(speaker, CALL)
    tools: Any = [TOOL]
    first = await api.responses.create(model="fake", input="hi", tools=tools, instructions="first only")
    [call] = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Bern"}
    says(speaker, "4 degrees")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    kept = await api.responses.create(
        model="fake", previous_response_id=first.id, input=[output], tools=tools
    )
    by_id = shown(speaker)
    await api.responses.create(
        model="fake", input=[{"role": "user", "content": "hi"}, call.to_dict(), output], tools=tools
    )
    assert shown(speaker) == by_id
    assert [message["role"] for message in by_id] == ["user", "assistant", "tool"]
    assert by_id[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Bern"}}
    third = await api.responses.create(model="fake", previous_response_id=kept.id, input="and now?")
    assert [message["content"] for message in shown(speaker)] == ["hi", None, "4", "4 degrees", "and now?"]
    assert (await api.responses.retrieve(third.id)).output_text == "4 degrees"
    await api.responses.delete(third.id)
    with pytest.raises(openai.NotFoundError, match="forgotten"):
        await api.responses.retrieve(third.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await api.responses.create(model="fake", previous_response_id=third.id, input="x")
    assert caught.value.param == "previous_response_id"
    unkept = await api.responses.create(model="fake", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        await api.responses.retrieve(unkept.id)


@pytest.mark.parametrize(
    ("arguments", "status", "kind", "follows"),
    [
        ('{"a": 1', "incomplete", "function_call", 0),
        ("{a<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "completed", "message", 1),
    ],
)
async def test_a_call_that_no_chat_may_have_is_an_answer_and_not_gone_on_from(
    post: Post, speaker: FakeEngine, arguments: str, status: str, kind: str, follows: int
) -> None:
    """A call that a limit has cut is one; what has no arguments in JSON is a text."""
    said = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{arguments}"
    speaker.formats = OutputFormats(tools="deepseek_v31", shows_tools=True)
    says(speaker, said)
    limit = len(said.encode()) if status == "incomplete" else 500
    code, body = await post(URL, input="hi", tools=[TOOL], max_output_tokens=limit)
    assert code == 200, body
    assert body["status"] == status
    assert [item["type"] for item in body["output"]] == [kind]
    code, _ = await post(URL, input="and?", previous_response_id=body["id"])
    assert code == 200
    assert [message["content"] for message in shown(speaker)] == ["hi", *[said] * follows, "and?"]


async def test_forms_and_forced_calls_reach_the_engine(post: Post, speaker: FakeEngine) -> None:
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    await post(URL, input="hi", max_output_tokens=1, text={"format": form})
    assert speaker.submitted[-1].params.structured_outputs == StructuredOutputsParams(json=schema)
    choice = {"type": "function", "name": "get_weather"}
    await post(URL, input="hi", max_output_tokens=1, tools=[TOOL], tool_choice=choice)
    rules = ToolRules(
        functions=(Function("get_weather", '{"type": "object"}'),), must_call=True, is_single=True
    )
    assert speaker.submitted[-1].parse.tool_rules == rules


async def test_truncation_is_refused_only_where_the_input_does_not_fit(
    post: Post, speaker: FakeEngine
) -> None:
    for word in ("auto", "disabled"):
        assert (await post(URL, input="hi", truncation=word))[0] == 200
        status, body = await post(URL, input="x" * speaker.max_model_len, truncation=word)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_compacting_is_refused_by_name(post: Post) -> None:
    status, body = await post(f"{URL}/compact", input="hi")
    assert (status, body["error"]["code"]) == (400, "unsupported_endpoint")


async def test_what_asks_for_nothing_is_taken(post: Post, speaker: FakeEngine) -> None:
    typed = pytest.importorskip("openai.types.responses")
    include = list(get_args(typed.ResponseIncludable))
    for context, mode in (("auto", "standard"), (None, None)):
        reasoning = {"context": context, "mode": mode, "effort": "low"}
        status, body = await post(URL, input="hi", include=include, reasoning=reasoning)
        assert status == 200, body


async def test_a_result_in_a_message_says_what_to_use(post: Post, speaker: FakeEngine) -> None:
    for fields in ({"tool_call_id": "c"}, {}):
        status, body = await post(URL, input=[{"role": "tool", "content": "x", **fields}])
        assert status == 400
        assert body["error"]["message"].endswith("; use an item of type function_call_output")


async def test_reasoning_and_truncation(post: Post, speaker: FakeEngine) -> None:
    reasoning = {"effort": "high", "summary": "auto"}
    status, body = await post(URL, input="hi", reasoning=reasoning, truncation="disabled")
    assert (status, body["truncation"]) == (200, "disabled")
    assert speaker.tokenizer is not None
    assert speaker.tokenizer.variables["reasoning_effort"] == "high"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.5),
        ("logit_bias", {5: 100.0}),
        ("stop", ("a",)),
        ("stop_token_ids", (7,)),
        ("min_tokens", 2),
        ("min_p", 0.1),
        ("ignore_eos", True),
        ("bad_words", ("no",)),
        ("structured_outputs", StructuredOutputsParams(choice=("yes",))),
    ],
)
async def test_sampling_is_that_of_chats(post: Post, speaker: FakeEngine, name: str, value: Any) -> None:
    asked = {"choice": ["yes"]} if name == "structured_outputs" else value
    status, _ = await post(URL, input="hi", max_output_tokens=12, **{name: asked})
    assert status == 200
    assert getattr(speaker.submitted[-1].params, name) == value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": "x", "max_tokens": 3}, "max_tokens"),
        ({"input": "x", "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"input": "x", "response_format": {"type": "json_object"}}, "response_format"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
        ({"input": "x" * 2000}, "input"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"input": "x", "reasoning": {"effort": "a lot"}}, "reasoning.effort"),
        ({"input": "x", "reasoning": {"tokens": 5}}, "reasoning.tokens"),
        ({"input": "x", "reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"input": "x", "reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"input": "x", "include": ["web_search_call.colour"]}, "include"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"input": "x", "max_output_tokens": 2.5}, "max_output_tokens"),
        ({"input": "x", "text": {"formt": {"type": "text"}}}, "text.formt"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "shema": {}}}}, "text.format.shema"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"input": "x", "stream_options": {"include_all": True}}, "stream_options.include_all"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]}, "input[1].role"),
        ({"input": []}, "input"),
        ({"input": "x", "tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{**TOOL, "strct": True}]}, "tools[0].strct"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "f", "x": 1}},
            "tool_choice.x",
        ),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "truncation": "never"}, "truncation"),
        ({"input": [{"role": "user", "content": "x", "summary": []}]}, "input[0].summary"),
        ({"input": [CALLED, {**RETURNED, "arguments": "{}"}]}, "input[1].arguments"),
        (
            {"input": [{"role": "user", "content": [{**PART, "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"type": {"a": 1}}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}, "input[0].content[0]"),
    ],
)
async def test_refuses(post: Post, speaker: FakeEngine, fields: dict[str, Any], param: str) -> None:
    status, body = await post(URL, **fields)
    assert (status, body["error"]["param"]) == (400, param)
    for of_chats in ("messages", "response_format", "reasoning_effort", "max_completion_tokens", ".function"):
        assert of_chats in fields or of_chats not in body["error"]["message"]
    assert not speaker.submitted


async def test_items_are_sent_back_as_clients_got_them(post: Post, speaker: FakeEngine) -> None:
    """With all that OpenAI's answers and its libraries have in them, and with nulls for what they lack."""
    part = {"annotations": [], "logprobs": [], "parsed": {"a": 1}, "bog": None}
    of_all = {"id": "x", "status": "completed", "created_by": "me", "bog": None}
    of_calls = {"namespace": "n", "caller": {"type": "direct"}, **of_all}
    said = {"role": "assistant", "phase": "commentary", **of_all}
    items: list[dict[str, Any]] = [
        {"type": None, "role": "user", "content": [{**PART, "prompt_cache_breakpoint": {}, "bog": None}]},
        {**THOUGHT, "encrypted_content": "e", **of_all},
        {"type": "message", "content": [{"type": "output_text", "text": "a", **part}], **said},
        {**CALLED, "parsed_arguments": {}, **of_calls},
        {**RETURNED, "name": "f", **of_calls},
        {"type": "message", "content": [{"type": "refusal", "refusal": "no", "text": None}], **said},
        {"role": "user", "content": "y"},
    ]
    status, body = await post(URL, input=items)
    assert status == 200, body
    assert [message["content"] for message in shown(speaker)] == ["x", "a", "4", "no", "y"]
    assert shown(speaker)[1]["reasoning_content"] == "x"


async def test_an_item_whose_type_is_null_is_listed_as_a_message(api: openai.AsyncOpenAI, post: Post) -> None:
    _, body = await post(URL, input=[{"type": None, "role": "user", "content": "x"}])
    [item] = [item async for item in api.responses.input_items.list(body["id"])]
    assert item.type == "message"


def test_the_oldest_answers_are_forgotten() -> None:
    store = ResponseStore(max_bytes=1000)
    for number in range(5):
        store.keep({"id": str(number)}, [ChatMessage(role="user", content="x" * 200)], [])
    with pytest.raises(Exception, match='no response "0"'):
        store.find("0", "previous_response_id")
    assert store.find("4", "previous_response_id").messages[0].content == "x" * 200
    store.forget("4")
    with pytest.raises(Exception, match='no response "4"'):
        store.forget("4")


async def test_log_probabilities_are_those_of_the_messages_tokens(
    api: openai.AsyncOpenAI, speaker: FakeEngine
) -> None:
    says(speaker, "<think>hm</think>4\u00b0" + CALL)
    include: Any = ["message.output_text.logprobs"]
    asked: dict[str, Any] = {"model": "fake", "input": "hi", "include": include, "top_logprobs": 2}
    whole = await api.responses.create(**asked, tools=[TOOL])
    _, message, _ = whole.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert b"".join(bytes(each.bytes) for each in part.logprobs) == "4\u00b0".encode()
    assert [len(each.top_logprobs) for each in part.logprobs] == [2, 2, 2]
    streamed = [
        each.token
        async for event in await api.responses.create(**asked, tools=[TOOL], stream=True)
        if event.type == "response.output_text.delta"
        for each in event.logprobs
    ]
    assert streamed == [each.token for each in part.logprobs]


async def test_what_a_request_brought_is_listed(api: openai.AsyncOpenAI, client: TestClient) -> None:
    history: Any = [
        {"role": "user", "content": "7 + 9?"},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "?"}],
        },
        {"type": "function_call_output", "call_id": "c", "output": "16"},
    ]
    answer = await api.responses.create(model="fake", input=history)
    items = [item async for item in api.responses.input_items.list(answer.id, order="asc", limit=2)]
    assert [item.type for item in items] == ["message", "message", "function_call_output"]
    assert items[0].content[0].to_dict() == {"type": "input_text", "text": "7 + 9?"}  # type: ignore[union-attr]
    assert items[1].id == "msg_1"
    assert len({item.id for item in items}) == 3
    newest = await api.responses.input_items.list(answer.id, limit=1)
    assert ([item.id for item in newest.data], newest.has_more) == ([items[2].id], True)
    answer = await api.responses.create(model="fake", input="hi")
    [only] = [item async for item in api.responses.input_items.list(answer.id)]
    assert only.content[0].to_dict() == {"type": "input_text", "text": "hi"}  # type: ignore[union-attr]
    for name, value in (("order", "up"), ("limit", "0"), ("limit", "101"), ("limit", "x"), ("after", "x")):
        response = await client.get(f"{URL}/{answer.id}/input_items", params={name: value})
        assert (response.status, (await response.json())["error"]["param"]) == (400, name)
    assert (await client.get(f"{URL}/resp_none/input_items")).status == 404


async def test_nothing_runs_in_the_background_that_could_be_cancelled(
    api: openai.AsyncOpenAI, speaker: FakeEngine
) -> None:
    answer = await api.responses.create(model="fake", input="hi")
    with pytest.raises(openai.BadRequestError, match="only a response with background: true"):
        await api.responses.cancel(answer.id)
    with pytest.raises(openai.NotFoundError, match='there is no response "resp_none"'):
        await api.responses.cancel("resp_none")
