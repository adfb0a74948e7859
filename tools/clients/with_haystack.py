"""Haystack: its generator for OpenAI's endpoint, streams, forms, and an agent that calls tools."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Annotated, Literal

from features import BASE_URL, LONG, MODEL, absent, at_work, feature, hanging_up, version
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel, ConfigDict, Field

HI = [ChatMessage.from_user("Who is glad?")]


class Person(BaseModel):
    """Somebody."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]


@tool
def greet(mood: Annotated[Literal["glad", "sad"], "How the person feels."]) -> str:
    """Greet a person."""
    return f"You are {mood}."


def generator(**more: object) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=Secret.from_token("none"),
        api_base_url=f"{BASE_URL}/v1",
        model=MODEL,
        max_retries=0,
        tools_strict=True,
        generation_kwargs=more,
    )


version("haystack-ai")
absent("text", "the client calls no `/v1/completions`")


@feature("chat", "run")
def _() -> None:
    [answer] = generator(max_tokens=16).run(HI)["replies"]
    assert answer.text
    assert answer.meta["usage"]["completion_tokens"] > 0


@feature("stream", "streaming_callback")
def _() -> None:
    parts: list[str] = []

    def take(chunk: StreamingChunk) -> None:
        parts.append(chunk.content)

    [answer] = generator(max_tokens=16).run(HI, streaming_callback=take)["replies"]
    assert "".join(parts) == answer.text
    assert len(parts) > 1


@feature("structured", "response_format")
def _() -> None:
    [answer] = generator(max_tokens=300, response_format=Person).run(HI)["replies"]
    assert Person.model_validate_json(answer.text)


@feature("tools", "a call, and its result")
def _() -> None:
    asked = generator(max_tokens=300, tool_choice="required", parallel_tool_calls=False)
    [answer] = asked.run(HI, tools=[greet])["replies"]
    [call] = answer.tool_calls
    result = ChatMessage.from_tool(greet.invoke(**call.arguments), origin=call)
    done = asked.run([*HI, answer, result], tools=[greet], generation_kwargs={"tool_choice": "none"})
    assert done["replies"][0].text


@feature("tools", "Agent")
def _() -> None:
    asked = generator(max_tokens=300, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(chat_generator=asked, tools=[greet], exit_conditions=["greet"])
    messages = agent.run(messages=HI)["messages"]
    assert messages[-1].tool_call_results[0].result.startswith("You are"), messages


@feature("responses", "run")
def _() -> None:
    asked = OpenAIResponsesChatGenerator(
        api_key=Secret.from_token("none"), api_base_url=f"{BASE_URL}/v1", model=MODEL, max_retries=0
    )
    [answer] = asked.run(HI, generation_kwargs={"max_output_tokens": 16})["replies"]
    assert answer.text


@feature("cancel", "run_async, cancelled")
def _() -> None:
    async def cancelled() -> None:
        answer = asyncio.create_task(generator(**LONG).run_async(HI))
        await at_work()
        answer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            raise AssertionError(f"the answer came before it was cancelled: {await answer}")

    with hanging_up():
        asyncio.run(cancelled())


@feature("cancel", "a callback that raises")
def _() -> None:
    def leave(chunk: StreamingChunk) -> None:
        raise KeyError(chunk.index)

    with hanging_up():
        with contextlib.suppress(KeyError):
            generator(**LONG).run(HI, streaming_callback=leave)
        gc.collect()  # Haystack does not close the stream
