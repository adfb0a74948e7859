"""POST /v1/messages, Anthropic's form of a chat: the requests of clients, and their conversion to chats.

A message has text, or blocks: text, documents of text, thinking, calls of tools (`tool_use`), and their
results (`tool_result`), which stand in a user's message here and are messages of their own in a chat.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from xdeepserve.api.openai.conversation import plain_message
from xdeepserve.api.openai.requests import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    StreamOptions,
    ThinkingChoice,
    Tool,
    ToolCall,
)
from xdeepserve.errors import RequestError, abridged

MAX_TEMPERATURE = 1.0  # Anthropic's
TEXT_BLOCKS = ("text", "document", "search_result")
BLOCK_TYPES = {
    "user": (*TEXT_BLOCKS, "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
MEDIA = ("container_upload", "image")
# Blocks of tools that Anthropic's servers run.
HOSTED = re.compile(r"(server|mcp)_tool_use|[a-z_]+_tool_result|tool_reference")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# What a chat calls otherwise, which errors of the chat that a request becomes name.
CLIENTS_NAMES = (
    (r"\bresponse_format\.json_schema\b|\bresponse_format\b", "output_config.format"),
    (r"\breasoning_effort\b", "output_config.effort"),
    (r"\btools\[(\d+)\]\.function\.parameters\b", r"tools[\1].input_schema"),
    (r"\btools\[(\d+)\]\.function\b", r"tools[\1]"),
    (r"\btool_choice required\b", "tool_choice any"),
    (r"\bparallel_tool_calls\b", "tool_choice.disable_parallel_tool_use"),
    (r"\bstop(?!_)\b(?=\[|:| must| may)", "stop_sequences"),
)


class MessageParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of the conversation so far."""

    role: str
    content: str | list[dict[str, Any]]


class MessageTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of the client's; tools of Anthropic's servers are left out before."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model has to call a tool, and which."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Form of the answer's text: JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class MessageConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Form of the answer, and how much the model reasons before it."""

    format: MessageFormat | None = None
    effort: str | None = None


class MessagesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages, and of /v1/messages/count_tokens, which needs no `max_tokens`."""

    messages: list[MessageParam]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[MessageTool] | None = None
    tool_choice: ToolChoice | str | None = None
    thinking: ThinkingChoice | bool | None = None
    output_config: MessageConfig | None = None
    output_format: MessageFormat | None = None


def chat_of(body: MessagesRequest) -> ChatRequest:
    """Convert a request to a chat. Raises RequestError that names the bad field."""
    messages = [] if not body.system else [ChatMessage(role="system", content=_text("system", body.system))]
    for i, message in enumerate(body.messages):
        messages += _chat_messages(f"messages[{i}]", message)
    if body.temperature is not None and body.temperature > MAX_TEMPERATURE:
        found = abridged(body.temperature)
        raise RequestError(
            f"temperature must be between 0 and {MAX_TEMPERATURE:g}, found {found}", param="temperature"
        )
    choice, is_single = _choice(body.tool_choice)
    config = body.output_config or MessageConfig()
    form = body.output_format or config.format
    return ChatRequest(
        model=body.model,
        messages=messages,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
        stream=body.stream,
        stream_options=StreamOptions() if body.stream else None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())] or None,
        tool_choice=choice if body.tools or choice not in ("auto", "none") else None,
        parallel_tool_calls=False if is_single else None,
        response_format=None
        if form is None
        else {"type": "json_schema", "json_schema": {"schema": form.schema}},
        reasoning_effort=config.effort,
        # The last message is the beginning of the answer, if it is the assistant's.
        continue_final_message=True if _begins_answer(messages) else None,
        thinking=body.thinking,
    )


def _begins_answer(messages: list[ChatMessage]) -> bool:
    last = messages[-1] if messages else None
    return last is not None and last.role == "assistant" and bool(last.content) and not last.tool_calls


def _chat_messages(where: str, message: MessageParam) -> list[ChatMessage]:
    """Convert a message to messages of a chat: first the results of tools, then the rest."""
    if message.role not in ("user", "assistant", "system"):
        raise RequestError(
            f"{where}.role must be user or assistant, found {abridged(message.role)}", param=f"{where}.role"
        )
    blocks = message.content
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    made, texts, thoughts, calls = [], list[str](), list[str](), list[ToolCall]()
    for j, block in enumerate(blocks):
        at, kind = f"{where}.content[{j}]", block.get("type")
        match message.role, kind:
            case (_, "text") | ("user", "document" | "search_result"):
                texts.append(_block_text(at, block))
            case "assistant", "thinking":
                thoughts.append(_field(at, block, "thinking"))
            case "assistant", "redacted_thinking":
                pass
            case "assistant", "tool_use":
                function = FunctionCall(name=_field(at, block, "name"), arguments=_input(at, block))
                calls.append(ToolCall(id=_field(at, block, "id"), function=function))
            case "user", "tool_result":
                text = _text(f"{at}.content", block.get("content") or "", TEXT_BLOCKS)
                call_id = _field(at, block, "tool_use_id")
                made.append(ChatMessage(role="tool", content=text, tool_call_id=call_id))
            case _:
                raise RequestError(
                    f"{at}.type {abridged(kind)} is not supported in a message of the {message.role}"
                    f"{_why_not(kind, BLOCK_TYPES.get(message.role, ('text',)))}",
                    param=f"{at}.type",
                )
    if texts or thoughts or calls or not made:
        chat = ChatMessage(role=message.role, content="\n".join(texts), tool_calls=calls or None)
        chat.reasoning_content = "".join(thoughts) or None
        made.append(chat)
    for each in made:
        plain_message(where, each)
    return made


def _field(where: str, block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a text, found {abridged(value)}", param=f"{where}.{name}")
    return value


def _input(where: str, block: dict[str, Any]) -> dict[str, Any] | str | None:
    """Return the arguments of a call: an object, its JSON as a text, or nothing."""
    given = block.get("input")
    if given is not None and not isinstance(given, dict | str):
        reason = f"{where}.input must be an object, found {abridged(given)}"
        raise RequestError(reason, param=f"{where}.input")
    return given


def _why_not(kind: Any, known: tuple[str, ...]) -> str:
    """Say why a block is refused: because it is no text, or what types are known."""
    if isinstance(kind, str) and HOSTED.fullmatch(kind):
        return ": the model cannot be shown such a block; leave it out"
    if kind == "compaction":
        return "; write its text into a block of type text"
    return ": this model reads text only" if kind in MEDIA else f" (known: {', '.join(known)})"


def _block_text(where: str, block: dict[str, Any]) -> str:
    """Return the text of a block: text, a document of text or a result of a search, behind their titles."""
    match block.get("type"):
        case "document":
            source = block.get("source")
            kind = source.get("type") if isinstance(source, dict) else None
            if not isinstance(source, dict) or kind not in ("text", "content"):
                raise RequestError(
                    f"{where}.source.type must be text or content, found {abridged(kind)}: this model reads "
                    "text only",
                    param=f"{where}.source.type",
                )
            if kind == "text":
                text = _field(f"{where}.source", source, "data")
            else:
                text = _text(f"{where}.source.content", source.get("content"))
            heads = ("title", "context")
        case "search_result":
            text = _text(f"{where}.content", block.get("content"))
            heads = ("title", "source")
        case _:
            return _field(where, block, "text")
    return "\n".join([*(_field(where, block, name) for name in heads if block.get(name) is not None), text])


def _text(where: str, content: Any, known: tuple[str, ...] = ("text",)) -> str:
    """Return a text, or the text of a list of blocks of known types."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        reason = f"{where} must be text or a list of blocks, found {abridged(content)}"
        raise RequestError(reason, param=where)
    for j, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in known:
            param = f"{where}[{j}].type"
            why = _why_not(kind, known)
            raise RequestError(f"{param} {abridged(kind)} is not supported{why}", param=param)
    return "\n".join(_block_text(f"{where}[{j}]", block) for j, block in enumerate(content))


def _tool(where: str, tool: MessageTool) -> Tool:
    if tool.type not in (None, "custom"):
        param = f"{where}.type"
        raise RequestError(f"{param} must be custom, found {abridged(tool.type)}", param=param)
    if tool.input_schema is None:
        param = f"{where}.input_schema"
        raise RequestError(f"{param} must be an object, found null", param=param)
    return Tool(
        type="function",
        function=FunctionDefinition(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict or None,
        ),
    )


def _choice(choice: ToolChoice | str | None) -> tuple[str | dict[str, Any] | None, bool]:
    """Return the chat's `tool_choice`, and whether there may be one call only."""
    if choice is None:
        return None, False
    if isinstance(choice, str):
        reason = f'tool_choice must be an object such as {{"type": "auto"}}, found {abridged(choice)}'
        raise RequestError(reason, param="tool_choice")
    is_single = choice.disable_parallel_tool_use is True
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name must be a tool's, found null", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}, is_single
    if choice.type not in CHOICES:
        known = f"{', '.join(CHOICES)} or tool"
        param = "tool_choice.type"
        raise RequestError(f"{param} must be {known}, found {abridged(choice.type)}", param=param)
    if choice.name is not None:
        reason = 'tool_choice.name needs {"type": "tool", "name": ...}'
        raise RequestError(reason, param="tool_choice.name")
    return CHOICES[choice.type], is_single
