"""LangChain's ChatOpenAI: `with_structured_output` in all its methods, and tools."""

from __future__ import annotations

from typing import Literal

from features import BASE_URL, LONG, MODEL, PERSON, check_person, feature, hanging_up, version
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from openai import LengthFinishReasonError
from pydantic import BaseModel, Field

QUESTION = "Who is glad? Answer in JSON."


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    mood: Literal["glad", "sad"]


@tool
def greet(mood: Literal["glad", "sad"]) -> str:
    """Greet somebody."""
    return f"a {mood} day"


def chat(**more: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{BASE_URL}/v1", api_key="none", model=MODEL, max_retries=0, **more)


version("langchain-openai")


@feature("text", "OpenAI, invoke and stream")
def _() -> None:
    model = OpenAI(
        base_url=f"{BASE_URL}/v1", api_key="none", model=MODEL, max_retries=0, max_tokens=16, temperature=0
    )
    text = model.invoke("Once upon a time")
    assert text
    assert "".join(model.stream("Once upon a time")) == text


@feature("chat", "invoke")
def _() -> None:
    answer = chat(max_tokens=16).invoke("Who is glad?")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


@feature("chat", "batch")
def _() -> None:
    assert len(chat(max_tokens=8).batch(["Who?", "What?", "Where?"])) == 3


@feature("stream", "stream")
def _() -> None:
    assert sum(len(chunk.content) for chunk in chat(max_tokens=16, stream_usage=True).stream("Who?")) > 0


@feature("cancel", "stream, left")
def _() -> None:
    with hanging_up():
        parts = chat(**LONG).stream("Who?")
        next(parts)
        parts.close()


for method in ("json_schema", "function_calling"):
    for form in (Person, PERSON):

        @feature("structured", f"{method}, {'pydantic' if form is Person else 'schema'}")
        def _(method: str = method, form: object = form) -> None:
            found = chat(max_tokens=300).with_structured_output(form, method=method).invoke(QUESTION)
            check_person(found.model_dump() if isinstance(found, Person) else found)


@feature("structured", "json_schema, strict, raw")
def _() -> None:
    asked = chat(max_tokens=300).with_structured_output(
        Person, method="json_schema", strict=True, include_raw=True
    )
    found = asked.invoke(QUESTION)
    assert found["parsing_error"] is None
    check_person(found["parsed"].model_dump())


@feature("structured", "json_mode")
def _() -> None:
    """Any object: the schema is not sent, so the model alone decides what is in it, and when it ends."""
    for seed in range(8):
        asked = chat(max_tokens=400, temperature=1, seed=seed)
        try:
            found = asked.with_structured_output(PERSON, method="json_mode").invoke(QUESTION)
        except LengthFinishReasonError:
            continue
        assert isinstance(found, dict), found
        return
    raise AssertionError("no object ended within 400 tokens")


@feature("structured", "streamed")
def _() -> None:
    parts = list(chat(max_tokens=300).with_structured_output(PERSON, method="json_schema").stream(QUESTION))
    check_person(parts[-1])


@feature("tools", "bind_tools, loop")
def _() -> None:
    asked = HumanMessage("Greet somebody glad.")
    call = chat().bind_tools([greet], tool_choice="required", strict=True).invoke([asked])
    [wanted] = call.tool_calls
    assert wanted["args"]["mood"] in ("glad", "sad")
    result = greet.invoke(wanted)
    assert isinstance(result, ToolMessage)
    answer = chat(max_tokens=16).bind_tools([greet], tool_choice="none").invoke([asked, call, result])
    assert answer.content


for is_responses in (False, True):

    @feature("responses" if is_responses else "tools", "bind_tools, streamed")
    def _(is_responses: bool = is_responses) -> None:
        asked = chat(use_responses_api=is_responses, max_tokens=300).bind_tools(
            [greet], tool_choice="required", strict=True, parallel_tool_calls=False
        )
        first, *more = asked.stream("Greet somebody glad.")
        for part in more:
            first += part
        [call] = first.tool_calls
        assert call["args"]["mood"] in ("glad", "sad")


@feature("responses", "invoke")
def _() -> None:
    assert chat(use_responses_api=True, max_tokens=16).invoke("Who is glad?").text
