"""Marvin: runs, casts, extraction, streams and tools, over pydantic-ai's model for OpenAI's endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from typing import Literal

os.environ["MARVIN_DATABASE_URL"] = f"sqlite+aiosqlite:///{tempfile.mkdtemp()}/marvin.db"
os.environ["MARVIN_ENABLE_DEFAULT_PRINT_HANDLER"] = "false"

import marvin
from features import BASE_URL, LONG, MODEL, absent, at_work, feature, hanging_up, version
from pydantic import BaseModel, Field
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]


def agent(kind: type = OpenAIChatModel, **more: object) -> marvin.Agent:
    model = kind(MODEL, provider=OpenAIProvider(base_url=f"{BASE_URL}/v1", api_key="none"))
    return marvin.Agent(model=model, model_settings={"max_tokens": 400, "temperature": 0, **more})


version("marvin")
absent("text", "the client calls no `/v1/completions`")
loop = asyncio.new_event_loop()  # one for all: Marvin's locks and connections belong to it


@feature("chat", "run_async")
def _() -> None:
    assert loop.run_until_complete(marvin.run_async("Who is glad?", agents=[agent()]))


@feature("responses", "run_async")
def _() -> None:
    assert loop.run_until_complete(marvin.run_async("Who is glad?", agents=[agent(OpenAIResponsesModel)]))


@feature("stream", "run_tasks_stream")
def _() -> None:
    async def streamed() -> list[str]:
        task = marvin.Task("Who is glad?", agents=[agent()])
        return [event.type async for event in marvin.run_tasks_stream([task])]

    kinds = loop.run_until_complete(streamed())
    assert any("delta" in kind for kind in kinds), kinds


# Not `classify`: Marvin asks for any integer, and whether that is a label's is up to the model.
@feature("structured", "cast_async")
def _() -> None:
    found = loop.run_until_complete(marvin.cast_async("Anna is glad.", Person, agent=agent()))
    assert isinstance(found, Person)


@feature("tools", "run_async")
def _() -> None:
    """Whether the model then says that its task is done is up to it: `tiny` calls until a limit ends it."""
    cities = []

    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        cities.append(city)
        return "rain"

    asked = marvin.run_async("Weather in Paris tomorrow?", agents=[agent()], tools=[get_weather])
    with contextlib.suppress(AgentRunError):
        loop.run_until_complete(asked)
    assert cities


@feature("cancel", "run_async, cancelled")
def _() -> None:
    async def cancelled() -> None:
        asked = agent(**{**LONG, "max_tokens": 1500})  # Marvin's prompt has 443 tokens
        answer = asyncio.create_task(marvin.run_async("Who is glad?", agents=[asked]))
        await at_work()
        answer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            raise AssertionError(f"the answer came before it was cancelled: {await answer}")

    with hanging_up():
        loop.run_until_complete(cancelled())
