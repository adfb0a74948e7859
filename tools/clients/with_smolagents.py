"""smolagents: its model for servers like OpenAI's, and an agent that calls tools."""

from __future__ import annotations

import gc

from features import BASE_URL, LONG, MODEL, PERSON, absent, check_person, feature, hanging_up, version
from smolagents import OpenAIServerModel, tool

HI = [{"role": "user", "content": [{"type": "text", "text": "Who is glad?"}]}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
model = OpenAIServerModel(
    model_id=MODEL, api_base=f"{BASE_URL}/v1", api_key="none", max_tokens=300, temperature=0
)
version("smolagents")
absent("text responses", "the client calls `/v1/chat/completions` only")


@tool
def greet(mood: str) -> str:
    """Greet a person.

    Args:
        mood: How the person feels.
    """
    return f"You are {mood}."


@feature("chat", "generate, stop_sequences")
def _() -> None:
    assert model.generate(HI, stop_sequences=["Observation:", "Calling tools:"]).token_usage.output_tokens


@feature("stream", "generate_stream")
def _() -> None:
    parts = [part.content or "" for part in model.generate_stream(HI)]
    assert "".join(parts) == (model.generate(HI).content or "")


@feature("cancel", "generate_stream, left")
def _() -> None:
    """The client does not close its stream: Python's collection of it does."""
    with hanging_up():
        parts = model.generate_stream(HI, **LONG)
        next(parts)
        del parts
        gc.collect()


@feature("structured", "response_format")
def _() -> None:
    check_person(model.generate(HI, response_format=SCHEMA).content)


@feature("tools", "tools_to_call_from")
def _() -> None:
    [call] = model.generate(HI, tools_to_call_from=[greet]).tool_calls[:1]
    assert call.function.name == "greet"
