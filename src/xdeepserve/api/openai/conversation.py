"""Messages of a chat, checked and converted to the form that chat templates expect."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from xdeepserve.api.openai.requests import ChatMessage
from xdeepserve.engine.serving.request import ServingTokenizer
from xdeepserve.errors import RequestError, abridged
from xdeepserve.model.chat_template import plain_message as of_template
from xdeepserve.parsing.tool_formats import THINK, THINK_END

_TEMPLATE_INPUTS = (
    "self",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "is_isolated",
    "max_tokens",
    "tokenize",
    "documents",
)


# One thread, so that slow templates hold up each other and not the tokenising of completions.
_TEMPLATES = ThreadPoolExecutor(1, thread_name_prefix="chat templates")


async def encode_chat(
    tokenizer: ServingTokenizer,
    messages: list[ChatMessage],
    add_generation_prompt: bool | None,
    template_kwargs: dict[str, Any] | None,
    tools: list[dict[str, Any]] | None = None,
    continues: bool = False,
    max_tokens: int | None = None,
) -> list[int]:
    """Encode a conversation as token ids. Raises RequestError that names the bad message.

    With `continues` the last message stays open, so that the model continues it. A conversation that surely
    has more than `max_tokens` is refused before it is tokenised. Templates run off the event loop, one at a
    time.
    """
    if not messages:
        raise RequestError("messages is empty: a conversation needs at least one", param="messages")
    for name in template_kwargs or ():
        if name in _TEMPLATE_INPUTS:
            raise RequestError(f"chat_template_kwargs may not set {name}", param="chat_template_kwargs")
    if continues and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt contradict each other",
            param="continue_final_message",
        )
    plain = [plain_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    render = partial(
        tokenizer.apply_chat_template,
        plain,
        add_generation_prompt=add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        tools=tools,
        is_isolated=True,
        max_tokens=max_tokens,
        **(template_kwargs or {}),
    )
    return await asyncio.get_running_loop().run_in_executor(_TEMPLATES, render)


def ends_in_reasoning(messages: list[ChatMessage]) -> bool:
    """Whether the last message has begun a reasoning and not ended it."""
    content = plain_message(f"messages[{len(messages) - 1}]", messages[-1])["content"] if messages else None
    return content is not None and content.rfind(THINK) > content.rfind(THINK_END)


def plain_message(where: str, message: ChatMessage) -> dict[str, Any]:
    """Convert a message to the form that templates take. Raises RequestError, which calls the message
    `where`."""
    for j, call in enumerate(message.tool_calls or ()):
        if call.type != "function":
            param = f"{where}.tool_calls[{j}].type"
            raise RequestError(f"{param} must be function, found {abridged(call.type)}", param=param)
    given = msgspec.to_builtins(message)
    absent = [name for name, value in given.items() if value is None and name != "content"]
    return of_template(where, {name: value for name, value in given.items() if name not in absent})
