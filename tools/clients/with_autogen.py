"""AutoGen: its model client for OpenAI's endpoint, and an assistant that calls tools."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from typing import Literal

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.agents.openai import OpenAIAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from features import BASE_URL, LONG, MODEL, absent, at_work, feature, hanging_up, version
from pydantic import BaseModel, ConfigDict, Field

HI = [UserMessage(content="Who is glad?", source="user")]
INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}


class Person(BaseModel):
    """Somebody."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]


async def greet(mood: Literal["glad", "sad"]) -> str:
    """Greet a person."""
    return f"You are {mood}."


async def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return "rain"


def client(**more: object) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=MODEL, base_url=f"{BASE_URL}/v1", api_key="none", model_info=INFO, max_retries=0, **more
    )


def run(check: Callable[[], Coroutine[object, object, None]]) -> Callable[[], None]:
    return lambda: asyncio.run(check())


version("autogen-ext")
absent("text", "the client calls no `/v1/completions`")


@feature("chat", "create")
@run
async def _() -> None:
    done = await client(max_tokens=16).create(HI)
    assert done.content
    assert done.usage.completion_tokens > 0


@feature("stream", "create_stream")
@run
async def _() -> None:
    parts = [part async for part in client(max_tokens=16).create_stream(HI, include_usage=True)]
    assert "".join(part for part in parts if isinstance(part, str)) == parts[-1].content
    assert parts[-1].usage.completion_tokens > 0


@feature("structured", "json_output")
@run
async def _() -> None:
    done = await client(max_tokens=300).create(HI, json_output=Person)
    assert Person.model_validate_json(done.content)


@feature("structured", "output_content_type")
@run
async def _() -> None:
    agent = AssistantAgent("a", client(max_tokens=300), output_content_type=Person)
    done = await agent.run(task="Who is glad?")
    assert isinstance(done.messages[-1].content, Person)


@feature("tools", "AssistantAgent")
@run
async def _() -> None:
    """An agent asks with `tool_choice: auto`: the question is one that `tiny` answers by a call."""
    tool = FunctionTool(get_weather, description="Get the weather of a city.", strict=True)
    agent = AssistantAgent("a", client(max_tokens=300, temperature=0), tools=[tool], system_message=None)
    done = await agent.run(task="Weather in Paris tomorrow?")
    assert done.messages[-1].content == "rain", done.messages


@feature("tools", "a call, and its result")
@run
async def _() -> None:
    tool = FunctionTool(greet, description="Greet a person.", strict=True)
    asked = client(max_tokens=300, parallel_tool_calls=False)
    [call] = (await asked.create(HI, tools=[tool], tool_choice="required")).content
    text = await tool.run_json(json.loads(call.arguments), CancellationToken())
    assert text in ("You are glad.", "You are sad.")
    result = FunctionExecutionResult(content=text, name=call.name, call_id=call.id, is_error=False)
    turns = [
        *HI,
        AssistantMessage(content=[call], source="a"),
        FunctionExecutionResultMessage(content=[result]),
    ]
    assert (await asked.create(turns, tools=[tool], tool_choice="none")).content


@feature("responses", "OpenAIAgent, two turns")
@run
async def _() -> None:
    asked = openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)
    agent = OpenAIAgent("a", "An agent.", asked, MODEL, "Be brief.", max_output_tokens=16)
    for _turn in range(2):
        assert (await agent.run(task="Who is glad?")).messages[-1].content


@feature("cancel", "CancellationToken")
def _() -> None:
    async def cancelled() -> None:
        token = CancellationToken()
        asked = client(**LONG).create(HI, cancellation_token=token)
        answer = asyncio.create_task(asked)
        await at_work()
        token.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            raise AssertionError(f"the answer came before it was cancelled: {await answer}")

    with hanging_up():
        asyncio.run(cancelled())


@feature("cancel", "create_stream, left")
def _() -> None:
    async def left() -> None:
        async with contextlib.aclosing(client(**LONG).create_stream(HI)) as parts:
            async for _ in parts:
                break

    with hanging_up():
        asyncio.run(left())
