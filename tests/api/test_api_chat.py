"""/v1/chat/completions: templates, roles, streaming, log probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Post
from tests.api.fake_engine import ASSISTANT, BOS, EOS, USER, FakeEngine
from xdeepserve.engine.serving.request import OutputFormats

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
HI_IDS = [BOS, USER, 104, 105, ASSISTANT]


async def test_answer(post: Post, engine: FakeEngine) -> None:
    status, body = await post(URL, model="fake", messages=HI, max_tokens=2)
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert engine.submitted[0].prompt == HI_IDS
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ux", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_by_default_the_answer_may_fill_the_context(post: Post, engine: FakeEngine) -> None:
    engine.max_model_len = 50
    _, body = await post(URL, messages=HI)
    assert engine.submitted[0].params.max_tokens is None
    assert body["usage"]["total_tokens"] == 50


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit(post: Post, name: str) -> None:
    _, body = await post(URL, messages=HI, **{name: 3})
    assert body["usage"]["completion_tokens"] == 3
    status, body = await post(URL, messages=HI, **{name: 0})
    assert (status, body["error"]["param"]) == (400, name)


async def test_content_parts_and_roles(post: Post, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts, "name": "someone"},
        {"role": "assistant", "content": "c"},
    ]
    status, _ = await post(URL, messages=messages, add_generation_prompt=False)
    assert status == 200
    assert engine.submitted[0].prompt == [BOS, ASSISTANT, 100, USER, 97, 10, 98, ASSISTANT, 99]


async def test_stream(post: Post) -> None:
    _, chunks = await post(URL, messages=HI, max_tokens=2, stream=True)
    assert chunks.pop() == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "u"},
        {"content": "x"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]


async def test_stream_of_several_choices(post: Post) -> None:
    fields = {"messages": HI, "n": 3, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "seed": 5}
    _, whole = await post(URL, **fields)
    _, chunks = await post(URL, stream=True, stream_options={"include_usage": True}, **fields)
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for expected in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        assert parts[0]["delta"]["role"] == "assistant"
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == expected["message"]["content"]
        logprobs = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert logprobs == expected["logprobs"]["content"]
        assert len(logprobs) == 4


async def test_logprobs(post: Post, engine: FakeEngine) -> None:
    engine.script = [0xE2, EOS]
    _, body = await post(URL, messages=HI, logprobs=True, top_logprobs=1)
    first, last = body["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "bytes:\\xe2",
        "logprob": -1.0,
        "bytes": [0xE2],
        "top_logprobs": [{"token": "bytes:\\xe3", "logprob": -0.5, "bytes": [0xE3]}],
    }
    assert last["token"] == "<eos>"
    _, body = await post(URL, messages=HI, logprobs=True, max_tokens=1)
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_token_ids_on_request(post: Post) -> None:
    _, body = await post(URL, messages=HI, max_tokens=2, return_token_ids=True)
    assert body["prompt_token_ids"] == HI_IDS
    assert body["choices"][0]["token_ids"] == [117, 120]
    _, chunks = await post(URL, messages=HI, max_tokens=2, return_token_ids=True, stream=True)
    assert chunks[0]["prompt_token_ids"] == HI_IDS
    ids = [c.get("token_ids", []) for chunk in chunks[:-1] for c in chunk["choices"]]
    assert [token_id for part in ids for token_id in part] == [117, 120]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "hi", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [*HI, {"role": "assistant", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HI, "echo": True}, "echo"),
        ({"messages": HI, "enable_thinking": False}, "enable_thinking"),
        ({"messages": HI, "max_tokens": 5.5}, "max_tokens"),
        (
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HI, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": HI, "chat_template_kwargs": {"documents": []}}, "chat_template_kwargs"),
        ({"messages": HI, "chat_template_kwargs": {"forbidden": True}}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        ({"messages": [*HI, {"role": "user", "content": "a", "prefx": True}]}, "messages[1].prefx"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "user", "content": "a", "reasoning": "b"}]}, "messages[0].reasoning"),
        ({"messages": HI, "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"messages": HI, "reasoning_effort": "a lot"}, "reasoning_effort"),
    ],
)
async def test_refuses(post: Post, engine: FakeEngine, fields: dict[str, Any], param: str) -> None:
    status, body = await post(URL, **fields)
    assert status == 400
    assert body["error"]["param"] == param
    assert body["error"]["type"] == "invalid_request_error"
    assert not engine.submitted


async def test_our_own_answers_may_be_sent_back(post: Post, engine: FakeEngine) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": None},
        refusal,
        *HI,
    ]
    status, _ = await post(URL, messages=history, max_tokens=5.0)
    assert status == 200
    assert engine.submitted[0].params.max_tokens == 5
    assert engine.tokenizer is not None
    [(shown, _)] = engine.tokenizer.chats
    assert shown[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert [message["content"] for message in shown] == ["hi", None, "4", "", "no", "hi"]


async def test_what_libraries_keep_beside_an_answer_may_be_sent_back(post: Post, engine: FakeEngine) -> None:
    engine.max_model_len = 1000
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}, "provider_specific_fields": None}
    call = {"id": "1", "type": "function", "index": 0, "function": function}
    extras = dict.fromkeys(("audio", "function_call", "refusal", "annotations", "parsed", "tool_call_id"))
    mark = {"cache_control": {"type": "ephemeral"}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "hi", **mark}], **mark},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "id": "a",
            "status": "completed",
            **extras,
        },
        {"role": "tool", "content": "4", "tool_call_id": "1", "unheard_of": None},
        {"role": "assistant", "content": "four", "reasoning": "hm", "annotations": [], "images": []},
        {"role": "assistant", "content": None, "refusal": "no", "reasoning_details": [{}]},
        *HI,
    ]
    tool = {"type": "function", "function": {"name": "f", **mark}, **mark}
    engine.formats = OutputFormats(tools="hermes", shows_tools=True)
    options = {"include_obfuscation": False, "include_usage": True}
    status, _ = await post(
        URL, messages=history, tools=[tool], max_tokens=1, stream=True, stream_options=options
    )
    assert status == 200
    assert engine.tokenizer is not None
    [(shown, tools)] = engine.tokenizer.chats
    assert [message["content"] for message in shown] == ["hi", None, "4", "four", "no", "hi"]
    assert set().union(*shown) == {"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}
    assert shown[3]["reasoning_content"] == "hm"
    assert tools == [{"type": "function", "function": {"name": "f"}}]


async def test_no_effort_is_no_thinking(post: Post, engine: FakeEngine) -> None:
    assert engine.tokenizer is not None
    await post(URL, messages=HI, reasoning_effort="none", max_tokens=1)
    variables = engine.tokenizer.variables
    names = ("reasoning_effort", "thinking", "enable_thinking")
    assert [variables[name] for name in names] == ["none", False, False]


async def test_prompt_logprobs(post: Post) -> None:
    messages = [{"role": "user", "content": "hi"}]
    _, body = await post(URL, messages=messages, prompt_logprobs=1, max_tokens=2)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert body["prompt_logprobs"][0] is None
    assert body["prompt_logprobs"][2]["104"] == {"logprob": -1.0, "rank": 2, "decoded_token": "h"}
    status, body = await post(URL, messages=messages, prompt_logprobs=1, stream=True)
    assert (status, body["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize(
    ("begun", "reasoning", "content"),
    [
        ("<think>7 + 9 = 16", ", write 6", "done"),
        ([{"type": "text", "text": "<think>7 + 9 = 16"}], ", write 6", "done"),
        ("<think>hm</think>It is", None, ", write 6</think>done"),
        ("It is", None, ", write 6</think>done"),
    ],
)
async def test_going_on_within_a_reasoning(
    post: Post, engine: FakeEngine, begun: str | list[dict[str, str]], reasoning: str | None, content: str
) -> None:
    engine.formats = OutputFormats(reasoning=True)
    engine.script = [*b", write 6</think>done", EOS]
    messages = [{"role": "user", "content": "7 + 9?"}, {"role": "assistant", "content": begun}]
    _, body = await post(URL, messages=messages, continue_final_message=True, add_generation_prompt=False)
    message = body["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


async def test_reasoning_may_be_left_out(post: Post, engine: FakeEngine) -> None:
    engine.formats = OutputFormats(reasoning=True)
    engine.script = [*b"<think>hm</think>4", EOS]
    for shows in (True, False):
        asked: dict[str, Any] = {"messages": HI, "include_reasoning": shows, "max_tokens": 50}
        _, body = await post(URL, **asked)
        message = body["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content")) == ("4", "hm" if shows else None)
        _, chunks = await post(URL, stream=True, **asked)
        deltas = [choice["delta"] for chunk in chunks[:-1] for choice in chunk["choices"]]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == ("hm" if shows else "")
        assert "".join(delta.get("content", "") for delta in deltas) == "4"


async def test_the_template_is_told_the_effort(post: Post, engine: FakeEngine) -> None:
    assert engine.tokenizer is not None
    await post(URL, messages=HI, reasoning_effort="low", max_tokens=1)
    assert engine.tokenizer.variables["reasoning_effort"] == "low"
    other = {"reasoning_effort": "high"}
    await post(URL, messages=HI, reasoning_effort="low", chat_template_kwargs=other, max_tokens=1)
    assert engine.tokenizer.variables["reasoning_effort"] == "high"
    await post(URL, messages=HI, max_tokens=1)
    assert "reasoning_effort" not in engine.tokenizer.variables


async def test_tokens_may_be_called_by_their_ids(post: Post, engine: FakeEngine) -> None:
    asked: dict[str, Any] = {"max_tokens": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    _, body = await post(URL, messages=HI, logprobs=True, top_logprobs=1, **asked)
    [choice] = body["choices"]
    [entry] = choice["logprobs"]["content"]
    assert entry["token"] == f"token_id:{choice['token_ids'][0]}"
    assert entry["top_logprobs"][0]["token"].startswith("token_id:")
    _, body = await post("/v1/completions", prompt="hi", logprobs=1, **asked)
    [choice] = body["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{choice['token_ids'][0]}"]
