"""CrewAI: its model for servers like OpenAI's, forms, tools, and a crew of one agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Literal

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "true"

from crewai import LLM, Agent, Crew, Task
from features import BASE_URL, LONG, MODEL, absent, at_work, feature, hanging_up, version
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def model(**more: object) -> LLM:
    return LLM(f"openai/{MODEL}", base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0, **more)


version("crewai")
absent("text", "the client calls no `/v1/completions`")


@feature("chat", "call")
def _() -> None:
    assert model(max_tokens=16).call("Who is glad?")


@feature("chat", "a crew of one")
def _() -> None:
    agent = Agent(role="host", goal="greet", backstory="A host.", llm=model(max_tokens=60), max_iter=2)
    task = Task(description="Who is glad?", expected_output="a name", agent=agent)
    assert Crew(agents=[agent], tasks=[task]).kickoff().raw


@feature("stream", "stream")
def _() -> None:
    text = model(max_tokens=16, temperature=0).call("Who is glad?")
    assert model(max_tokens=16, temperature=0, stream=True).call("Who is glad?") == text


@feature("structured", "response_format")
def _() -> None:
    found = model(max_tokens=300, response_format=Person).call("Who is glad?")
    assert isinstance(found if isinstance(found, Person) else Person.model_validate_json(found), Person)


@feature("tools", "available_functions")
def _() -> None:
    """CrewAI asks with `tool_choice: auto`: the question is one that `tiny` answers by a call."""
    cities = []

    def get_weather(city: str) -> str:
        cities.append(city)
        return "rain"

    asked = model(max_tokens=300, temperature=0)
    answer = asked.call(
        "Weather in Paris tomorrow?", tools=[TOOL], available_functions={"get_weather": get_weather}
    )
    assert cities, answer


@feature("responses", "call")
def _() -> None:
    assert model(max_tokens=16, api="responses").call("Who is glad?")


@feature("cancel", "acall, cancelled")
def _() -> None:
    async def cancelled() -> None:
        answer = asyncio.create_task(model(additional_params=LONG).acall("Who is glad?"))
        await at_work()
        answer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            raise AssertionError(f"the answer came before it was cancelled: {await answer}")

    with hanging_up():
        asyncio.run(cancelled())
