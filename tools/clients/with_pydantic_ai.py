"""pydantic-ai: agents with output by tool and by native schema, tools, streams."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

from features import BASE_URL, LONG, MODEL, absent, at_work, feature, hanging_up, version
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, RunContext, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    mood: Literal["glad", "sad"]


provider = OpenAIProvider(base_url=f"{BASE_URL}/v1", api_key="none")
model = OpenAIChatModel(MODEL, provider=provider)
version("pydantic-ai-slim")
absent("text", "the client calls no `/v1/completions`")


@feature("chat", "run")
def _() -> None:
    found = Agent(model).run_sync("Who is glad?", model_settings={"max_tokens": 16})
    assert found.output


@feature("stream", "run_stream")
def _() -> None:
    found = Agent(model).run_stream_sync("Who is glad?", model_settings={"max_tokens": 16})
    assert "".join(found.stream_text(delta=True))


@feature("cancel", "run, cancelled")
def _() -> None:
    async def cancelled() -> None:
        own = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="none"))
        asked = Agent(OpenAIChatModel(MODEL, provider=own)).run("Who is glad?", model_settings=LONG)
        answer = asyncio.create_task(asked)
        await at_work()
        answer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            raise AssertionError(f"the answer came before it was cancelled: {await answer}")

    with hanging_up():
        asyncio.run(cancelled())


@feature("structured", "ToolOutput")
def _() -> None:
    agent = Agent(model, output_type=ToolOutput(Person, strict=True))
    assert isinstance(agent.run_sync("Who is glad?").output, Person)


@feature("structured", "NativeOutput")
def _() -> None:
    agent = Agent(model, output_type=NativeOutput(Person))
    assert isinstance(agent.run_sync("Who is glad?").output, Person)


@feature("tools", "loop")
def _() -> None:
    """The tool is forced in the first turn, and a text in the second."""
    greeted = []

    def first_a_tool(context: RunContext[None]) -> ModelSettings:
        return ModelSettings(tool_choice="none" if greeted else "required", max_tokens=100)

    agent = Agent(model, model_settings=first_a_tool)

    @agent.tool_plain(strict=True)
    def greet(mood: Literal["glad", "sad"]) -> str:
        """Greet somebody."""
        greeted.append(mood)
        return f"a {mood} day"

    found = agent.run_sync("Greet.")
    assert greeted
    assert found.output


@feature("responses", "run")
def _() -> None:
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider))
    assert agent.run_sync("Who is glad?", model_settings={"max_tokens": 16}).output
