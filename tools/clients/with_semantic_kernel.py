"""Semantic Kernel: its connector for OpenAI's endpoint, forms, and functions of a plugin."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Literal

import openai
from features import BASE_URL, LONG, MODEL, at_work, feature, hanging_up, version
from pydantic import BaseModel, Field
from semantic_kernel import Kernel
from semantic_kernel.agents import OpenAIResponsesAgent
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextCompletion,
    OpenAITextPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]


class Host:
    """A plugin with one function."""

    def __init__(self) -> None:
        self.greeted: list[str] = []

    @kernel_function(description="Greet a person.")
    def greet(self, mood: str) -> str:
        self.greeted.append(mood)
        return f"You are {mood}."


def client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="none", max_retries=0)


def chat() -> OpenAIChatCompletion:
    return OpenAIChatCompletion(ai_model_id=MODEL, async_client=client())


def asking() -> ChatHistory:
    history = ChatHistory()
    history.add_user_message("Who is glad?")
    return history


def run(check: Callable[[], Coroutine[object, object, None]]) -> Callable[[], None]:
    return lambda: asyncio.run(check())


Settings = OpenAIChatPromptExecutionSettings
version("semantic-kernel")


@feature("text", "get_text_content")
@run
async def _() -> None:
    service = OpenAITextCompletion(ai_model_id=MODEL, async_client=client())
    assert (await service.get_text_content("Once", OpenAITextPromptExecutionSettings(max_tokens=8))).text


@feature("chat", "get_chat_message_content")
@run
async def _() -> None:
    assert (await chat().get_chat_message_content(asking(), Settings(max_tokens=16))).content


@feature("stream", "get_streaming_chat_message_content")
@run
async def _() -> None:
    settings = Settings(max_tokens=16, temperature=0)
    text = (await chat().get_chat_message_content(asking(), settings)).content
    parts = [part async for part in chat().get_streaming_chat_message_content(asking(), settings)]
    assert "".join(part.content for part in parts if part) == text


@feature("structured", "response_format")
@run
async def _() -> None:
    settings = Settings(max_tokens=300, response_format=Person)
    assert Person.model_validate_json((await chat().get_chat_message_content(asking(), settings)).content)


@feature("tools", "FunctionChoiceBehavior.Required")
@run
async def _() -> None:
    kernel, host = Kernel(), Host()
    kernel.add_plugin(host, "host")
    behavior = FunctionChoiceBehavior.Required(auto_invoke=True)
    for seed in range(8):  # schemas are sent without `strict`, so the model decides where arguments end
        settings = Settings(function_choice_behavior=behavior, parallel_tool_calls=False, seed=seed)
        await chat().get_chat_message_content(asking(), settings, kernel=kernel)
        if host.greeted:
            return
    raise AssertionError("the function was never called")


@feature("responses", "OpenAIResponsesAgent, two turns")
@run
async def _() -> None:
    """The agent keeps no turns itself: its thread names the answer before."""
    agent = OpenAIResponsesAgent(ai_model_id=MODEL, client=client(), instructions="Be brief.")
    thread = None
    for _turn in range(2):
        answer = await agent.get_response("Who is glad?", thread=thread)
        assert str(answer.message)
        thread = answer.thread


@feature("cancel", "get_chat_message_content, cancelled")
def _() -> None:
    async def cancelled() -> None:
        answer = asyncio.create_task(chat().get_chat_message_content(asking(), Settings(**LONG)))
        await at_work()
        answer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            raise AssertionError(f"the answer came before it was cancelled: {await answer}")

    with hanging_up():
        asyncio.run(cancelled())


@feature("cancel", "get_streaming_chat_message_content, left")
def _() -> None:
    async def left() -> None:
        parts = chat().get_streaming_chat_message_content(asking(), Settings(**LONG))
        async with contextlib.aclosing(parts):
            async for _ in parts:
                break

    with hanging_up():
        asyncio.run(left())
