"""Messages of a chat, checked and converted to the form that chat templates expect."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from xdeepserve.api.openai.requests import ChatMessage, ContentPart, ToolCall
from xdeepserve.engine.serving.request import ServingTokenizer
from xdeepserve.errors import RequestError, abridged
from xdeepserve.model.chat_template import JsonText
from xdeepserve.parsing.tool_formats import THINK, THINK_END

# OpenAI's newer models call the system role "developer"; templates know only "system".
ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"developer": "system"}
# Fields of an assistant's reasoning: those of this server, of DeepSeek, Ollama, LiteLLM and OpenRouter.
REASONING = ("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details")
THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")  # parts of reasoning
TEXTS = ("text", "input_text", "output_text")  # parts of text; the latter are those of /v1/responses
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
    content = _plain_content(f"messages[{len(messages) - 1}]", messages[-1]) if messages else None
    return content is not None and content.rfind(THINK) > content.rfind(THINK_END)


def plain_message(where: str, message: ChatMessage) -> dict[str, Any]:
    """Convert a message to the form that templates take. Raises RequestError, which calls the message
    `where`."""
    if message.role not in ROLES:
        supported = ", ".join(ROLES)
        raise RequestError(
            f"{where}.role must be one of {supported}, found {abridged(message.role)}", param=f"{where}.role"
        )
    for name, role in (
        ("tool_calls", "assistant"),
        *((name, "assistant") for name in REASONING),
        ("refusal", "assistant"),
        ("tool_call_id", "tool"),
    ):
        if getattr(message, name) and message.role != role:
            raise RequestError(f"{where}.{name} belongs to the role {role}", param=f"{where}.{name}")
    plain: dict[str, Any] = {"role": ROLES[message.role], "content": _plain_content(where, message)}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if reasoning := _reasoning(message):
        plain["reasoning_content"] = reasoning
    if message.tool_calls:  # templates ask whether the key is there
        plain["tool_calls"] = [
            _plain_call(f"{where}.tool_calls[{j}]", c) for j, c in enumerate(message.tool_calls)
        ]
    return plain


def _plain_call(where: str, call: ToolCall) -> dict[str, Any]:
    if call.type != "function":
        raise RequestError(
            f"{where}.type must be function, found {abridged(call.type)}", param=f"{where}.type"
        )
    arguments = JsonText.of_call(call.function.arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


def _reasoning(message: ChatMessage) -> str:
    """Return the reasoning of an assistant's message, from the first field that has any."""
    parts = message.content if isinstance(message.content, list) else []
    thoughts = [part for part in parts if part.type in THOUGHTS]
    return next(filter(None, (_thought(getattr(message, name)) for name in REASONING)), _thought(thoughts))


def _thought(value: Any) -> str:
    """Return the text of a reasoning: a text, or a list of objects of which each has some; those of hidden
    reasoning have none."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_thought, value))
    if isinstance(value, ContentPart):
        value = msgspec.to_builtins(value)
    found = (value.get(name) for name in ("thinking", "text", "summary")) if isinstance(value, dict) else ()
    return next(filter(None, map(_thought, found)), "")


def _plain_content(where: str, message: ChatMessage) -> str | None:
    """Return a message's text. Text parts are joined by newlines, as in vLLM for templates that take plain
    strings."""
    if isinstance(message.content, str):
        return message.content
    if message.content is None and message.role == "assistant":
        # As a client has it from an answer without text.
        return message.refusal or (None if message.tool_calls else "")
    if message.content is None and message.role == "tool":
        return ""  # a function that returns nothing
    if message.content is None:
        raise RequestError(f"{where}.content is required", param=f"{where}.content")
    texts = []
    for j, part in enumerate(message.content):
        param = f"{where}.content[{j}]"
        if part.type in THOUGHTS and message.role == "assistant":
            continue
        if part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
            continue
        if part.type not in TEXTS:
            raise RequestError(
                f"{param}.type must be text, found {abridged(part.type)}: this model reads text only",
                param=f"{param}.type",
            )
        if part.text is None:
            raise RequestError(f"{param}.text is required", param=f"{param}.text")
        texts.append(part.text)
    return "\n".join(texts)
