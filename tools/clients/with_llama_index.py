"""LlamaIndex's model for servers like OpenAI's: completions, chats, tools, structured answers."""

from __future__ import annotations

import gc
from typing import Literal

from features import BASE_URL, LONG, MODEL, feature, hanging_up, version
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai.responses import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

HI = [ChatMessage(role="user", content="Who is glad?")]


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    mood: Literal["glad", "sad"]


def model(*, is_chat: bool, max_tokens: int = 300) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=f"{BASE_URL}/v1",
        api_key="none",
        is_chat_model=is_chat,
        is_function_calling_model=is_chat,
        should_use_structured_outputs=is_chat,
        context_window=2048,
        max_tokens=max_tokens,
        max_retries=0,
        temperature=0,
    )


def greet(mood: str) -> str:
    """Greet a person."""
    return mood


version("llama-index-llms-openai-like")


@feature("text", "complete, stream_complete")
def _() -> None:
    llm = model(is_chat=False, max_tokens=16)
    text = llm.complete("Once upon a time").text
    assert "".join(part.delta or "" for part in llm.stream_complete("Once upon a time")) == text


@feature("chat", "chat")
def _() -> None:
    assert model(is_chat=True, max_tokens=16).chat(HI).message.content


@feature("stream", "stream_chat")
def _() -> None:
    llm = model(is_chat=True, max_tokens=16)
    text = llm.chat(HI).message.content
    assert "".join(part.delta or "" for part in llm.stream_chat(HI)) == text


@feature("cancel", "stream_chat, left")
def _() -> None:
    """The client does not close its stream: Python's collection of it does."""
    with hanging_up():
        parts = model(is_chat=True).stream_chat(HI, **LONG)
        next(parts)
        del parts
        gc.collect()


@feature("tools", "chat_with_tools, required")
def _() -> None:
    llm, tool = model(is_chat=True), FunctionTool.from_defaults(greet)
    answer = llm.chat_with_tools([tool], user_msg="Who is glad?", tool_required=True)
    [call] = llm.get_tool_calls_from_response(answer)[:1]
    assert isinstance(call.tool_kwargs["mood"], str)


@feature("tools", "stream_chat_with_tools, required")
def _() -> None:
    llm, tool = model(is_chat=True), FunctionTool.from_defaults(greet)
    *_, last = llm.stream_chat_with_tools([tool], user_msg="Who is glad?", tool_required=True)
    [call] = llm.get_tool_calls_from_response(last)[:1]
    assert isinstance(call.tool_kwargs["mood"], str)


@feature("structured", "as_structured_llm")
def _() -> None:
    found = model(is_chat=True).as_structured_llm(Person).complete("Who is glad?").raw
    assert isinstance(found, Person)


@feature("responses", "OpenAIResponses: chat, stream_chat")
def _() -> None:
    llm = OpenAIResponses(
        model=MODEL,
        api_base=f"{BASE_URL}/v1",
        api_key="none",
        context_window=2048,
        max_output_tokens=16,
        max_retries=0,
        temperature=0,
    )
    text = llm.chat(HI).message.content
    assert text
    assert "".join(part.delta or "" for part in llm.stream_chat(HI)) == text
