"""Anthropic's own client: messages, streams, tools, thinking, and counted tokens."""

from __future__ import annotations

import json

import anthropic
from features import BASE_URL, MODEL, PERSON, absent, check_person, feature, hanging_up, version

client = anthropic.Anthropic(base_url=BASE_URL, api_key="none", max_retries=0)
HI = [{"role": "user", "content": "Who is glad?"}]
GREEDY = {"temperature": 0}  # newer versions have no argument for it
TOOL = {"name": "greet", "description": "Greet a person.", "input_schema": PERSON}

version("anthropic")
absent("text responses", "the client calls `/v1/messages` only")


@feature("chat", "message")
def _() -> None:
    answer = client.messages.create(model=MODEL, messages=HI, max_tokens=8, system="Be brief.")
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert answer.usage.input_tokens > 0
    assert 1 <= answer.usage.output_tokens <= 8


@feature("chat", "count_tokens")
def _() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HI)
    answer = client.messages.create(model=MODEL, messages=HI, max_tokens=1)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@feature("chat", "errors")
def _() -> None:
    kind = "none: an unknown model was served"
    try:
        client.messages.create(model="another", messages=HI, max_tokens=1)
    except anthropic.NotFoundError as error:
        kind = error.body["error"]["type"]
    assert kind == "not_found_error"


@feature("chat", "a begun answer")
def _() -> None:
    begun = [*HI, {"role": "assistant", "content": "The cat"}]
    answer = client.messages.create(model=MODEL, messages=begun, max_tokens=8, extra_body=GREEDY)
    assert answer.content


@feature("stream", "events and text")
def _() -> None:
    wanted = client.messages.create(model=MODEL, messages=HI, max_tokens=24, extra_body=GREEDY)
    with client.messages.stream(model=MODEL, messages=HI, max_tokens=24, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.model_dump() for block in found.content] == [block.model_dump() for block in wanted.content]
    assert found.usage.output_tokens == wanted.usage.output_tokens


@feature("cancel", "stream, left")
def _() -> None:
    story = {"type": "string", "minLength": 4000}  # takes a few seconds, whatever the model says
    form = {"output_config": {"format": {"type": "json_schema", "schema": story}}}
    asked = {"model": MODEL, "messages": HI, "max_tokens": 1900, "extra_body": form}
    with hanging_up(), client.messages.stream(**asked) as stream:
        next(iter(stream))
    assert client.messages.create(model=MODEL, messages=HI, max_tokens=1)


@feature("tools", "a call, and its result")
def _() -> None:
    choice = {"type": "tool", "name": "greet"}
    answer = client.messages.create(
        model=MODEL, messages=HI, max_tokens=300, tools=[TOOL], tool_choice=choice
    )
    [call] = [block for block in answer.content if block.type == "tool_use"]
    check_person(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "hello"}
    turns = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model=MODEL, messages=turns, max_tokens=8, tools=[TOOL]).usage.output_tokens


@feature("tools", "streamed")
def _() -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=MODEL, messages=HI, max_tokens=300, tools=[TOOL], tool_choice=choice
    ) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        [call] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert json.loads("".join(parts)) == call.input
    check_person(call.input)


@feature("structured", "output_config")
def _() -> object:
    form = {"format": {"type": "json_schema", "schema": PERSON}}
    try:
        answer = client.messages.create(model=MODEL, messages=HI, max_tokens=300, output_config=form)
    except TypeError:
        return "this version has no output_config"
    check_person("".join(block.text for block in answer.content if block.type == "text"))
    return None
