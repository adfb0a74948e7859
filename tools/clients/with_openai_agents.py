"""OpenAI's Agents SDK, over chats and over responses."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

import openai
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from features import BASE_URL, LONG, MODEL, absent, at_work, feature, hanging_up, version
from pydantic import BaseModel, ConfigDict, Field

set_tracing_disabled(True)
KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
version("openai-agents")
absent("text", "the client calls no `/v1/completions`")


class Person(BaseModel):
    """Somebody."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]


@function_tool
def greet(mood: Literal["glad", "sad"]) -> str:
    """Greet a person."""
    return f"You are {mood}."


def model_of(kind: str) -> Model:
    """A model of a new client: a client's connections belong to one event loop."""
    client = openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)
    return KINDS[kind](MODEL, client)


async def streamed(agent: Agent) -> object:
    result = Runner.run_streamed(agent, "Who is glad?")
    async for _ in result.stream_events():
        pass
    return result.final_output


for kind in KINDS:
    column = "responses" if kind == "responses" else None

    @feature(column or "chat", f"{kind}: run")
    def _(kind: str = kind) -> None:
        agent = Agent(
            name="a",
            instructions="Be brief.",
            model=model_of(kind),
            model_settings=ModelSettings(max_tokens=60),
        )
        assert isinstance(Runner.run_sync(agent, "Who is glad?").final_output, str)

    @feature(column or "stream", f"{kind}: run_streamed")
    def _(kind: str = kind) -> None:
        agent = Agent(name="a", model=model_of(kind), model_settings=ModelSettings(max_tokens=60))
        assert isinstance(asyncio.run(streamed(agent)), str)

    @feature(column or "structured", f"{kind}: output_type")
    def _(kind: str = kind) -> None:
        agent = Agent(
            name="a", model=model_of(kind), output_type=Person, model_settings=ModelSettings(max_tokens=300)
        )
        assert isinstance(Runner.run_sync(agent, "Who is glad?").final_output, Person)

    @feature(column or "tools", f"{kind}: function_tool")
    def _(kind: str = kind) -> None:
        settings = ModelSettings(max_tokens=300, tool_choice="required", temperature=0)
        agent = Agent(name="a", model=model_of(kind), tools=[greet], model_settings=settings)
        result = Runner.run_sync(agent, "Who is glad?", max_turns=3)
        assert any(item.type == "tool_call_output_item" for item in result.new_items)

    @feature(column or "tools", f"{kind}: function_tool, run_streamed")
    def _(kind: str = kind) -> None:
        settings = ModelSettings(max_tokens=300, tool_choice="required", temperature=0)
        agent = Agent(name="a", model=model_of(kind), tools=[greet], model_settings=settings)
        assert isinstance(asyncio.run(streamed(agent)), str)

    @feature("cancel", f"{kind}: run, cancelled")
    def _(kind: str = kind) -> None:
        async def cancelled() -> None:
            settings = ModelSettings(**LONG)
            agent = Agent(name="a", model=model_of(kind), model_settings=settings)
            answer = asyncio.create_task(Runner.run(agent, "Who is glad?"))
            await at_work()
            answer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                raise AssertionError(f"the answer came before it was cancelled: {await answer}")

        with hanging_up():
            asyncio.run(cancelled())
