"""instructor, in each of its modes for OpenAI's endpoint."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from features import BASE_URL, LONG, MODEL, absent, feature, hanging_up, version
from pydantic import BaseModel, Field

HI = [{"role": "user", "content": "Who is glad?"}]


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    mood: Literal["glad", "sad"]


version("instructor")
absent("text", "the client calls no `/v1/completions`")
# Not PARALLEL_TOOLS, which asks with `tool_choice: auto`: then the model decides whether there is a call.
MODES = {
    "TOOLS": "tools",
    "TOOLS_STRICT": "tools",
    "JSON_SCHEMA": "structured",
}
for mode, column in MODES.items():

    @feature(column, mode)
    def _(mode: str = mode) -> object:
        if not hasattr(instructor.Mode, mode):
            return f"this version has no mode {mode}"
        raw = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)
        client = instructor.from_openai(raw, mode=instructor.Mode[mode])
        found = client.chat.completions.create(
            model=MODEL, messages=HI, response_model=Person, max_tokens=300, max_retries=0
        )
        assert isinstance(found, Person)
        return None


def client() -> instructor.Instructor:
    raw = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)


@feature("responses", "RESPONSES_TOOLS")
def _() -> None:
    raw = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)
    asked = instructor.from_openai(raw, mode=instructor.Mode.RESPONSES_TOOLS)
    found = asked.create(
        model=MODEL, messages=HI, response_model=Person, max_output_tokens=300, max_retries=0
    )
    assert isinstance(found, Person)


@feature("chat", "without a model of the answer")
def _() -> None:
    answer = client().chat.completions.create(
        model=MODEL, messages=HI, response_model=None, max_tokens=16, max_retries=0
    )
    assert answer.choices[0].message.content


@feature("stream", "create_partial")
def _() -> None:
    parts = list(
        client().chat.completions.create_partial(
            model=MODEL, messages=HI, response_model=Person, max_tokens=300, max_retries=0
        )
    )
    assert parts[-1].mood in ("glad", "sad")


@feature("cancel", "stream, left")
def _() -> None:
    with hanging_up():
        parts = client().chat.completions.create(
            model=MODEL, messages=HI, response_model=None, stream=True, max_retries=0, **LONG
        )
        next(iter(parts))
        parts.close()
