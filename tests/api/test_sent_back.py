"""Histories as agents send them: what a server has answered, and what libraries make of it, is taken back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Post
from tests.api.fake_engine import FakeEngine
from xdeepserve.engine.serving.request import OutputFormats

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def agent(engine: FakeEngine) -> FakeEngine:
    engine.formats = OutputFormats(shows_tools=True, tools="hermes", reasoning="think")
    return engine


def shown(engine: FakeEngine) -> list[dict[str, Any]]:
    """The messages of the last chat, as its template has them."""
    assert engine.tokenizer is not None
    return engine.tokenizer.chats[-1][0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", ['{"city": "Par', '{"say": "a "b" c"}', "[]", "", "no"])
async def test_a_call_that_is_no_json_comes_back(post: Post, agent: FakeEngine, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    reply = {"role": "tool", "tool_call_id": "c1", "content": "error: no JSON"}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    status, _ = await post(CHAT, messages=[HI, said, reply, HI], tools=[TOOL])
    assert status == 200
    assert str(shown(agent)[1]["tool_calls"][0]["function"]["arguments"]) == (arguments or "{}")
    items = [
        HI,
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "f",
            "arguments": arguments,
            "status": "incomplete",
        },
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "no"}]},
    ]
    assert (await post(RESPONSES, input=items))[0] == 200
    assert shown(agent)[2]["content"] == "no"


@pytest.mark.parametrize("max_tokens", [1, 8, 30, 45, 60])
async def test_an_answer_cut_anywhere_comes_back(post: Post, agent: FakeEngine, max_tokens: int) -> None:
    agent.script = list(b'<think>hm</think>ok<tool_call>{"name": "f", "arguments": {"a": "b c"}}</tool_call>')
    _, body = await post(CHAT, messages=[HI], tools=[TOOL], max_tokens=max_tokens)
    message = body["choices"][0]["message"]
    assert (await post(CHAT, messages=[HI, message, HI], tools=[TOOL]))[0] == 200
    tool = {"type": "function", **TOOL["function"]}
    _, body = await post(RESPONSES, input="hi", tools=[tool], max_output_tokens=max_tokens)
    items = [HI, *body["output"], HI]
    assert (await post(RESPONSES, input=items, tools=[tool]))[0] == 200
    assert (await post(RESPONSES, input="go on", previous_response_id=body["id"], tools=[tool]))[0] == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning": "hm", "reasoning_content": "hm", "reasoning_details": [{"text": "other"}]},
        {"reasoning_content": "", "thinking": "hm"},
        {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
        {"reasoning_text": "hm", "reasoning_opaque": "c2VjcmV0"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm", "index": 0, "format": None}]},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}, {"summary": "hm"}]},
        {
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "yes"},
            ]
        },
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                {"type": "text", "text": "yes"},
            ]
        },
    ],
)
async def test_reasoning_comes_back_in_every_field(
    post: Post, agent: FakeEngine, fields: dict[str, Any]
) -> None:
    said = {"role": "assistant", "content": "yes", **fields}
    status, body = await post(CHAT, messages=[HI, said, HI])
    assert status == 200, body
    assert shown(agent)[1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SUMMED = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"}
YES = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}


@pytest.mark.parametrize(
    ("items", "thoughts"),
    [
        ([THOUGHT, YES], ["hm"]),
        ([SUMMED, YES], ["hm"]),
        ([{**THOUGHT, "summary": SUMMED["summary"]}, YES], ["hm"]),
        ([{"type": "reasoning", "content": "hm"}, YES], ["hm"]),
        ([THOUGHT, SUMMED, YES], ["hmhm"]),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, YES], [None]),
        ([THOUGHT, {"type": "message", "role": "assistant", "content": None}], ["hm"]),
        # A limit has cut the answer within its reasoning, which is not that of a later answer.
        ([THOUGHT, HI, YES], ["hm", None]),
        ([YES, THOUGHT], [None, "hm"]),
    ],
)
async def test_reasoning_stays_with_its_answer(
    post: Post, agent: FakeEngine, items: list[dict[str, Any]], thoughts: list[str | None]
) -> None:
    status, body = await post(RESPONSES, input=[HI, *items, HI])
    assert status == 200, body
    said = [message for message in shown(agent) if message["role"] == "assistant"]
    assert [message.get("reasoning_content") for message in said] == thoughts


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": "x", "reasoning_content": "", "refusal": None, "audio": None},
        {"role": "assistant", "content": None, "refusal": "no", "annotations": [], "function_call": None},
        {"role": "assistant", "content": "x", "finish_reason": "stop", "usage": {"total_tokens": 3}},
        {"role": "tool", "tool_call_id": "c", "content": None},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}], "is_error": True},
        {"role": "tool", "content": [], "name": "f", "tool_call_id": "c"},
        {"role": "system", "content": "in the middle"},
        {"role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"role": "user", "content": [{"type": "text", "text": ""}], "id": "m1", "timestamp": 3},
        {"role": "user", "content": "again", "cache_control": {"type": "ephemeral"}},
    ],
)
async def test_messages_of_other_servers_are_taken(
    post: Post, agent: FakeEngine, message: dict[str, Any]
) -> None:
    status, body = await post(CHAT, messages=[HI, message, HI])
    assert status == 200, body


@pytest.mark.parametrize("given", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": {}}])
async def test_a_call_without_arguments_comes_back(
    post: Post, agent: FakeEngine, given: dict[str, Any]
) -> None:
    said = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", **given}}]}
    assert (await post(CHAT, messages=[HI, said, HI], tools=[TOOL]))[0] == 200
    call = shown(agent)[1]["tool_calls"][0]
    assert (list(call), call["function"]) == (["id", "type", "function"], {"name": "f", "arguments": {}})
    if given.get("arguments") != {}:
        items = [HI, {"type": "function_call", "call_id": "c", "name": "f", **given}]
        assert (await post(RESPONSES, input=items))[0] == 200
        assert shown(agent)[1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("given", [{}, {"output": None}, {"output": ""}, {"output": []}])
async def test_a_function_that_returns_nothing(post: Post, agent: FakeEngine, given: dict[str, Any]) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [HI, call, {"type": "function_call_output", "call_id": "c", **given}]
    assert (await post(RESPONSES, input=items))[0] == 200
    assert shown(agent)[2]["content"] == ""


@pytest.mark.parametrize(
    ("path", "kind", "says"),
    [
        (RESPONSES, "item_reference", ": send the item itself, or previous_response_id"),
        (RESPONSES, "tool_use", "; use function_call"),
        (RESPONSES, "custom_tool_call_output", "; use function_call_output"),
        (RESPONSES, "robot_call", "(known: message, reasoning, function_call, function_call_output)"),
        *(
            (RESPONSES, kind, ": the model cannot be shown such an item; leave it out")
            for kind in ("web_search_call", "local_shell_call", "ghost_snapshot", "compaction")
        ),
        (CHAT, "tool_use", "; use tool_calls of the message"),
        (CHAT, "tool-call", "; use tool_calls of the message"),
        (CHAT, "function_call", "; use tool_calls of the message"),
        (CHAT, "tool_result", "; use a message of role tool for each result"),
        (CHAT, "function_call_output", "; use a message of role tool for each result"),
        (CHAT, "document", "; write its text into a part of type text"),
        (CHAT, "image_url", ": this model reads text only"),
    ],
)
async def test_what_other_apis_have_says_what_to_send(
    post: Post, agent: FakeEngine, path: str, kind: str, says: str
) -> None:
    each: dict[str, Any] = {"type": kind, "id": "x"}
    said = {"role": "assistant", "content": [each]}
    status, body = await post(path, **({"messages": [HI, said]} if path == CHAT else {"input": [each]}))
    assert (status, body["error"]["message"].endswith(says)) == (400, True), body


async def test_thoughts_are_an_assistants(post: Post, agent: FakeEngine) -> None:
    for fields in ({"thinking": "hm"}, {"content": [{"type": "thinking", "thinking": "hm"}]}):
        assert (await post(CHAT, messages=[{**HI, **fields}]))[0] == 400
