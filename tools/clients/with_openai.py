"""OpenAI's own client for Python: chats, streams, parsed forms, tools and responses."""

from __future__ import annotations

import contextlib
import json
from typing import Literal

import openai
from features import BASE_URL, LONG, MODEL, PERSON, check_person, feature, hanging_up, version
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)
HI = [{"role": "user", "content": "Who is glad?"}]
TOOL = {"type": "function", "function": {"name": "greet", "parameters": PERSON, "strict": True}}


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    mood: Literal["glad", "sad"]


version("openai")


@feature("text", "completion, logprobs")
def _() -> None:
    done = client.completions.create(model=MODEL, prompt="Once", max_tokens=8, logprobs=2, temperature=0)
    assert done.choices[0].logprobs
    assert len(done.choices[0].logprobs.tokens) == done.usage.completion_tokens


@feature("text", "models")
def _() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@feature("chat", "answer")
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=16, n=2, seed=1)
    assert len(answer.choices) == 2
    assert answer.usage.total_tokens > 0


@feature("chat", "errors")
def _() -> None:
    code = "none: an unknown model was served"
    try:
        client.chat.completions.create(model="another", messages=HI)
    except openai.NotFoundError as error:
        code = error.code
    assert code == "model_not_found"


@feature("stream", "chat and usage")
def _() -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=16, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens > 0
    assert any(chunk.choices and chunk.choices[0].finish_reason for chunk in chunks)


@feature("stream", "accumulated")
def _() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=HI, max_tokens=300, response_format=Person
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)


@feature("cancel", "stream, left")
def _() -> None:
    with (
        hanging_up(),
        client.chat.completions.create(model=MODEL, messages=HI, stream=True, **LONG) as stream,
    ):
        next(stream)


@feature("cancel", "timeout")
def _() -> None:
    with hanging_up(), contextlib.suppress(openai.APITimeoutError):
        client.chat.completions.create(model=MODEL, messages=HI, timeout=0.5, **LONG)


@feature("structured", "parse")
def _() -> None:
    done = client.chat.completions.parse(model=MODEL, messages=HI, max_tokens=300, response_format=Person)
    assert isinstance(done.choices[0].message.parsed, Person)


@feature("structured", "json_object")
def _() -> None:
    done = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        response_format={"type": "json_object"},
        max_tokens=400,
        temperature=1,
        seed=1,
    )
    if done.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(done.choices[0].message.content), dict)


@feature("structured", "vLLM's fields")
def _() -> None:
    for extra in (
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"regex": "yes|no"}},
    ):
        done = client.chat.completions.create(model=MODEL, messages=HI, extra_body=extra)
        assert done.choices[0].message.content in ("yes", "no")


@feature("tools", "required")
def _() -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=HI, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    [call] = done.choices[0].message.tool_calls
    assert call.function.name == "greet"
    check_person(call.function.arguments)


@feature("tools", "loop, streamed")
def _() -> None:
    named = {"type": "function", "function": {"name": "greet"}}
    with client.chat.completions.stream(
        model=MODEL, messages=HI, tools=[TOOL], tool_choice=named, parallel_tool_calls=False
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    check_person(message.tool_calls[0].function.arguments)
    again = [
        *HI,
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in message.tool_calls
            ],
        },
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "good day"},
    ]
    done = client.chat.completions.create(
        model=MODEL, messages=again, tools=[TOOL], tool_choice="none", max_tokens=16
    )
    assert done.choices[0].message.content


@feature("responses", "answer, go on, delete")
def _() -> None:
    first = client.responses.create(model=MODEL, input="Who is glad?", max_output_tokens=16)
    assert first.output_text
    second = client.responses.create(
        model=MODEL, input="And sad?", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)


@feature("responses", "streamed")
def _() -> None:
    with client.responses.stream(model=MODEL, input="Who is glad?", text_format=Person) as stream:
        kinds = [event.type for event in stream]
        assert isinstance(stream.get_final_response().output_parsed, Person)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


@feature("responses", "parse")
def _() -> None:
    done = client.responses.parse(
        model=MODEL, input="Who is glad?", text_format=Person, max_output_tokens=300
    )
    assert isinstance(done.output_parsed, Person)


@feature("responses", "tool")
def _() -> None:
    tool = {"type": "function", "name": "greet", "parameters": PERSON, "strict": True}
    done = client.responses.create(model=MODEL, input="Who?", tools=[tool], tool_choice="required")
    check_person(next(item for item in done.output if item.type == "function_call").arguments)
