"""Messages of a chat, checked and brought into the form that chat templates expect."""

from __future__ import annotations

from typing import Any

from xdeepserve.api.offload import run_for_text
from xdeepserve.api.requests import ChatMessage
from xdeepserve.engine.serving.request import Tokenizer
from xdeepserve.errors import RequestError

# OpenAI's newer models call the system role "developer"; templates know only "system".
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEMPLATE_INPUTS = ("self", "messages", "tools", "add_generation_prompt", "tokenize", "documents")


async def encode_chat(
    tokenizer: Tokenizer,
    messages: list[ChatMessage],
    add_generation_prompt: bool | None,
    template_kwargs: dict[str, Any] | None,
) -> list[int]:
    """Token ids of a conversation. Raises RequestError that names the bad message."""
    if not messages:
        raise RequestError("messages is empty: a conversation needs at least one", param="messages")
    for name in template_kwargs or ():
        if name in _TEMPLATE_INPUTS:
            raise RequestError(f"chat_template_kwargs may not set {name}", param="chat_template_kwargs")
    plain = [_plain_message(i, message) for i, message in enumerate(messages)]
    return await run_for_text(
        sum(len(message["content"]) for message in plain),
        tokenizer.apply_chat_template,
        plain,
        add_generation_prompt=add_generation_prompt is not False,
        **(template_kwargs or {}),
    )


def _plain_message(i: int, message: ChatMessage) -> dict[str, Any]:
    where = f"messages[{i}]"
    if message.role not in ROLES:
        supported = ", ".join(ROLES)
        raise RequestError(
            f"{where}.role must be one of {supported}, found '{message.role[:40]}'", param=f"{where}.role"
        )
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            raise RequestError(f"{where}.{name} is not supported", param=f"{where}.{name}")
    return {"role": ROLES[message.role], "content": _plain_content(where, message)}


def _plain_content(where: str, message: ChatMessage) -> str:
    """Text parts are joined by newlines, as vLLM does for templates that take plain strings."""
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        raise RequestError(f"{where}.content is required", param=f"{where}.content")
    texts = []
    for j, part in enumerate(message.content):
        param = f"{where}.content[{j}]"
        if part.type != "text":
            raise RequestError(
                f"{param}.type must be text, found '{part.type[:40]}': this model reads text only",
                param=f"{param}.type",
            )
        if part.text is None:
            raise RequestError(f"{param}.text is required", param=f"{param}.text")
        texts.append(part.text)
    return "\n".join(texts)
