"""Mirascope: calls, streams, formats and tools, over chats and over responses."""

from __future__ import annotations

import gc
from typing import Literal

from features import BASE_URL, MODEL, absent, feature, hanging_up, version
from mirascope import llm
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]


class Story(BaseModel):
    """A text that takes a few seconds, whatever the model says."""

    text: str = Field(min_length=4000)


@llm.tool
def greet(mood: Literal["glad", "sad"]) -> str:
    """Greet a person."""
    return f"You are {mood}."


llm.register_provider("openai", scope="openai/", base_url=f"{BASE_URL}/v1", api_key="none")
version("mirascope")
absent("text", "the client calls no `/v1/completions`")

for kind in ("completions", "responses"):
    is_chat, name = kind == "completions", f"openai/{MODEL}:{kind}"

    @feature("chat" if is_chat else "responses", f"{kind}: call")
    def _(name: str = name) -> None:
        answer = llm.Model(name, max_tokens=16).call("Who is glad?")
        assert answer.text()
        assert answer.usage.output_tokens > 0

    @feature("stream" if is_chat else "responses", f"{kind}: stream")
    def _(name: str = name) -> None:
        """Mirascope sends no temperature to an OpenAI model that it does not know: no two texts are equal."""
        assert "".join(llm.Model(name, max_tokens=16).stream("Who is glad?").text_stream())

    for mode in ("strict", "tool"):

        @feature("structured" if is_chat else "responses", f"{kind}: format, {mode}")
        def _(name: str = name, mode: str = mode) -> None:
            form = llm.format(Person, mode=mode)
            answer = llm.Model(name, max_tokens=300).call("Who is glad?", format=form)
            assert isinstance(answer.parse(), Person)

    @feature("tools" if is_chat else "responses", f"{kind}: a call of a tool, and its result")
    def _(name: str = name) -> None:
        """The format in mode `tool` forces a call; without it the model decides."""
        call = llm.ToolCall(id="call_1", name="greet", args='{"mood": "glad"}')
        turns = [
            llm.messages.user("Who is glad?"),
            llm.messages.assistant([call], model_id=name, provider_id="openai"),
            llm.messages.user([greet.execute(call)]),
        ]
        assert llm.Model(name, max_tokens=16).call(turns, tools=[greet]).content

    @feature("cancel" if is_chat else "responses", f"{kind}: stream, left")
    def _(name: str = name) -> None:
        with hanging_up():
            form = llm.format(Story, mode="strict")
            parts = llm.Model(name, max_tokens=1900).stream("A story?", format=form).text_stream()
            next(parts)
            parts.close()
            del parts
            gc.collect()  # Mirascope does not close the stream that it reads
