"""DSPy: its model, predictions in its adapters, tools, and streams."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

import dspy
from dspy.lm15 import (
    AccessPolicy,
    EndpointSupport,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
    register_provider,
)
from features import BASE_URL, LONG, MODEL, at_work, feature, hanging_up, version
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]


class Ask(dspy.Signature):
    """Answer a question."""

    question: str = dspy.InputField()
    person: Person = dspy.OutputField()


class Call(dspy.Signature):
    """Answer a question by calling tools."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def greet(mood: Literal["glad", "sad"]) -> str:
    """Greet a person."""
    return f"You are {mood}."


# DSPy takes schemas to be known only of models in its catalog; a declared provider states it.
HERE = AccessPolicy(
    provider="here",
    supports=EndpointSupport(complete=True, stream=True),
    auth_modes=("bearer",),
    base_url=f"{BASE_URL}/v1",
)
register_provider(
    ProviderDefinition.chat(HERE, compat=OpenAIChatCompat.preset("openai")),
    supports=ModelSupport(function_calling=True, response_schema=True),
)


def model(provider: str = "openai", **more: object) -> dspy.LM:
    return dspy.LM(
        f"{provider}/{MODEL}", api_base=f"{BASE_URL}/v1", api_key="none", cache=False, num_retries=0, **more
    )


HI = [{"role": "user", "content": "Who is glad?"}]
version("dspy")


@feature("text", "model_type text")
def _() -> None:
    assert model(model_type="text", max_tokens=8)("Once")


@feature("chat", "LM")
def _() -> None:
    assert model(max_tokens=16)(messages=HI)


@feature("structured", "Predict, JSONAdapter")
def _() -> None:
    with dspy.context(lm=model("here", max_tokens=400), adapter=dspy.JSONAdapter()):
        assert isinstance(dspy.Predict(Ask)(question="Who is glad?").person, Person)


@feature("stream", "streamify")
def _() -> None:
    async def streamed() -> list[object]:
        program = dspy.streamify(dspy.Predict(Ask))
        return [part async for part in program(question="Who is glad?")]

    with dspy.context(lm=model("here", max_tokens=400), adapter=dspy.JSONAdapter()):
        parts = asyncio.run(streamed())
    assert isinstance(parts[-1], dspy.Prediction)
    assert len(parts) > 2, parts


@feature("tools", "ToolCalls")
def _() -> None:
    adapter = dspy.JSONAdapter(use_native_function_calling=True)
    lm = model("here", max_tokens=400, temperature=0, tool_choice="required")
    with dspy.context(lm=lm, adapter=adapter):
        done = dspy.Predict(Call)(question="Who is glad?", tools=[dspy.Tool(greet)])
    assert done.calls.tool_calls[0].name == "greet", done


@feature("responses", "model_type responses")
def _() -> None:
    assert model(model_type="responses", max_tokens=16)(messages=HI)


@feature("cancel", "acall, cancelled")
def _() -> None:
    async def cancelled() -> None:
        answer = asyncio.create_task(model(**LONG).acall(messages=HI))
        await at_work()
        answer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            raise AssertionError(f"the answer came before it was cancelled: {await answer}")

    with hanging_up():
        asyncio.run(cancelled())
