"""POST /v1/responses: the requests of clients, and their conversion to chats.

A conversation is a list of items: messages, reasoning, calls of functions and their outputs. It becomes a
list of chat messages, and the request a chat request, so that both endpoints answer alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from xdeepserve.api.openai.conversation import plain_message
from xdeepserve.api.openai.requests import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionDefinition,
    SamplingRequest,
    StreamOptions,
    Tool,
    ToolCall,
)
from xdeepserve.api.openai.structured import refuse_unknown
from xdeepserve.api.routes.body import T, converted, mistyped
from xdeepserve.api.routes.fields import ITEMS, PARTS
from xdeepserve.errors import OverloadedError, RequestError, abridged
from xdeepserve.model.chat_template import JsonText


def item_kind(item: dict[str, Any]) -> Any:
    """Return an item's type, known or not; an item without a type, or with null, is a message."""
    kind = item.get("type")
    return "message" if kind is None else kind


class ResponsesRequest(SamplingRequest, kw_only=True):
    """Body of POST /v1/responses, with vLLM's extensions."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None  # usage is in the last event anyway
    max_output_tokens: int | float | None = None
    metadata: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    top_logprobs: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether messages shall include log probabilities of their tokens."""
        return LOGPROBS in (self.include or ())


LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (  # the reasoning is in the clear anyway, and no answer has the others' parts
    *(LOGPROBS, "reasoning.encrypted_content", "web_search_call.results", "web_search_call.action.sources"),
    *("file_search_call.results", "code_interpreter_call.outputs", "message.input_image.image_url"),
    "computer_call_output.output.image_url",
)
_SHARED = (*SamplingRequest.__annotations__, "parallel_tool_calls")  # what a chat has under the same name
# What is called otherwise in the chat that a request becomes, longer names first.
_CLIENTS_NAMES = (
    (r"\bresponse_format\.json_schema\b|\bresponse_format\b", "text.format"),
    (r"\bmax_completion_tokens\b|\bmax_tokens\b", "max_output_tokens"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\bmessages\b|\bprompt\b", "input"),
    (r"(\btools\[\d+\]|\binput\[\d+\])(?:\.tool_calls\[0\])?\.function\b", r"\1"),
    (r"(\binput\[\d+\])\.(?:tool_call_id|id)\b", r"\1.call_id"),
)
_NAMED_IN_CHATS, _NAMED = '"function": {"name": ...}', '"name": ...'
_VALUE = re.compile(r'("(?:[^"\\]|\\.)*(?:"|\.\.\. \())')  # a client's, as `abridged` shows it


def in_clients_words(error: RequestError, names: Sequence[tuple[str, str]] = _CLIENTS_NAMES) -> RequestError:
    """Convert an error of the chat that a request became: it then uses the request's names of fields."""
    if isinstance(error, OverloadedError):
        return error
    message, param = (_in_clients_words(text, names) for text in (str(error), error.param or ""))
    return RequestError(message, param=param or None, code=error.code)


def _in_clients_words(text: str, names: Sequence[tuple[str, str]]) -> str:
    words = _VALUE.split(text.replace(_NAMED_IN_CHATS, _NAMED))
    for name, clients in names:
        words[::2] = [re.sub(name, clients, each) for each in words[::2]]  # what is between are values
    return "".join(words)


def chat_request(body: ResponsesRequest, before: list[ChatMessage]) -> ChatRequest:
    """Convert a request to a chat, after the messages `before`. Raises RequestError."""
    for name in body.include or ():
        if name not in INCLUDABLE:
            known = ", ".join(INCLUDABLE)
            raise RequestError(f"include: known are {known}, found {abridged(name)}", param="include")
    if body.top_logprobs and not body.wants_logprobs:
        raise RequestError(f"top_logprobs needs include to have {LOGPROBS}", param="top_logprobs")
    instructions = [] if body.instructions is None else [_message("system", body.instructions)]
    return ChatRequest(
        messages=[*instructions, *before, *chat_messages(body.input)],
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [_tool(i, tool) for i, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_format(body.text),
        reasoning_effort=_effort(body.reasoning),
        logprobs=body.wants_logprobs,
        stream_options=body.stream_options,
        top_logprobs=body.top_logprobs,
        **{name: getattr(body, name) for name in _SHARED},
    )


def chat_messages(given: str | list[dict[str, Any]]) -> list[ChatMessage]:
    """Convert items to chat messages. Calls join the assistant's message before them, reasoning the message
    after it; without one, as where a limit has cut it, reasoning is a message. Raises RequestError that names
    the bad item."""
    if isinstance(given, str):
        return [_message("user", given)]
    messages: list[ChatMessage] = []
    reasoning: str | None = None

    def end_turn() -> None:
        nonlocal reasoning
        if reasoning is not None:
            messages.append(ChatMessage(role="assistant", content="", reasoning_content=reasoning))
        reasoning = None

    for i, item in enumerate(given):
        where, kind = f"input[{i}]", item_kind(item)
        if not isinstance(kind, str) or kind not in ITEMS:
            raise RequestError(
                f"{where}.type {abridged(kind)} is not supported{_INSTEAD.get(str(kind), _KNOWN)}",
                param=f"{where}.type",
            )
        if kind == "reasoning":
            fields = (_texts(f"{where}.{name}", item.get(name) or []) for name in ("content", "summary"))
            text = next(filter(None, map("".join, fields)), "")
            reasoning = (reasoning or "") + text or None
            continue
        if kind == "function_call":
            function = {name: item[name] for name in ("name", "arguments") if name in item}
            call = _of_item(where, {"function": function, "id": item.get("call_id")}, ToolCall)
            _check(where, ChatMessage(role="assistant", tool_calls=[call]))
            last = messages[-1] if messages else None
            if last is None or last.role != "assistant" or reasoning is not None:
                messages.append(ChatMessage(role="assistant", tool_calls=[call], reasoning_content=reasoning))
            else:
                last.tool_calls = [*(last.tool_calls or []), call]
            reasoning = None
        elif kind == "function_call_output":
            text = "".join(_texts(f"{where}.output", item.get("output") or []))
            call_id = _of_item(where, {"role": "tool", "tool_call_id": item.get("call_id")}, ChatMessage)
            end_turn()
            messages.append(ChatMessage(role="tool", content=text, tool_call_id=call_id.tool_call_id))
        else:
            if item.get("role") == "tool":
                reason = f"{where}.role tool is not supported; use an item of type function_call_output"
                raise RequestError(reason, param=f"{where}.role")
            message = _of_item(where, {name: item[name] for name in ("role",) if name in item}, ChatMessage)
            content = item.get("content")
            if content is None and message.role == "assistant":
                content = []
            texts = _texts(f"{where}.content", content)
            message.content = [ContentPart(type="text", text=text) for text in texts]
            _check(where, message)
            if message.role == "assistant":
                message.reasoning_content, reasoning = reasoning, None
            end_turn()
            messages.append(message)
    end_turn()
    return messages


_KNOWN = f" (known: {', '.join(ITEMS)})"
_LEFT_OUT = """apply_patch_call apply_patch_call_output code_interpreter_call compaction compaction_summary
    computer_call computer_call_output file_search_call ghost_snapshot image_generation_call
    local_shell_call local_shell_call_output mcp_approval_request mcp_approval_response mcp_call
    mcp_list_tools shell_call shell_call_output tool_search_call tool_search_output web_search_call"""
_INSTEAD = {
    **dict.fromkeys(_LEFT_OUT.split(), ": the model cannot be shown such an item; leave it out"),
    "item_reference": ": send the item itself, or previous_response_id",
    **dict.fromkeys(("custom_tool_call", "tool_call", "tool_use"), "; use function_call"),
    **dict.fromkeys(("custom_tool_call_output", "tool_result"), "; use function_call_output"),
}


def answered_messages(items: list[dict[str, Any]]) -> list[ChatMessage]:
    """Convert an answer's items to chat messages, for requests that continue from it. Chats cannot contain a
    call that was cut off or has invalid arguments, so such calls are left out."""
    return chat_messages([item for item in items if item["type"] != "function_call" or _is_whole(item)])


def _is_whole(call: dict[str, Any]) -> bool:
    try:
        JsonText(call["arguments"] or "{}")
    except ValueError:
        return False
    return bool(call["status"] == "completed")


def _check(where: str, message: ChatMessage) -> None:
    """Raise RequestError for a message that no chat may have; the error names the item."""
    try:
        plain_message(where, message)
    except RequestError as error:
        raise in_clients_words(error) from None


def _message(role: str, text: str) -> ChatMessage:
    return ChatMessage(role=role, content=text)


def _texts(where: str, parts: Any) -> list[str]:
    """Return the texts of a list of content parts; a text stands for a list of one."""
    if isinstance(parts, str):
        return [parts]
    if not isinstance(parts, list):
        raise RequestError(f"{where} must be text or a list of parts, found {abridged(parts)}", param=where)
    texts = []
    for j, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in PARTS.by_type or not isinstance(text, str):
            raise RequestError(
                f"{where}[{j}] must be a part with text, found type {abridged(kind)}: "
                "this model reads text only",
                param=f"{where}[{j}]",
            )
        texts.append(text)
    return texts


def _decoded(where: str, value: Any, kind: type[T]) -> T:
    try:
        return converted(value, kind)
    except msgspec.ValidationError as error:
        raise mistyped(str(error), kind, where) from None


def _of_item(where: str, value: Any, kind: type[T]) -> T:
    """Convert a value to the chats' type of an item. Errors name the item."""
    try:
        return _decoded(where, value, kind)
    except RequestError as error:
        raise in_clients_words(error) from None


def _tool(i: int, tool: dict[str, Any]) -> Tool:
    """Convert a tool to the form of chats, which has an extra level."""
    where = f"tools[{i}]"
    if tool.get("type") != "function":
        raise RequestError(
            f"{where}.type must be function, found {abridged(tool.get('type'))}", param=f"{where}.type"
        )
    described = {name: value for name, value in tool.items() if name != "type"}
    function: FunctionDefinition = _decoded(where, described, FunctionDefinition)
    return Tool(type="function", function=function)


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        if "function" in choice:
            reason = 'tool_choice must be {"type": "function", "name": ...}: function has no place in it'
            raise RequestError(reason, param="tool_choice.function", code="unknown_parameter")
        refuse_unknown("tool_choice", choice, ("type", "name"))
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


# What `reasoning` may have beside the effort, with the value that asks for nothing.
_REASONING = {"context": "auto", "mode": "standard"}


def _effort(reasoning: dict[str, Any] | None) -> str | None:
    """Return `reasoning.effort`. Requests for summaries are ignored: the reasoning is returned as it is."""
    refuse_unknown("reasoning", reasoning, ("effort", "summary", "generate_summary", *_REASONING))
    for name, neutral in _REASONING.items():
        if (reasoning or {}).get(name) not in (None, neutral):
            param = f"reasoning.{name}"
            reason = f'{param} must be "{neutral}" or left out, found {abridged((reasoning or {})[name])}'
            raise RequestError(reason, param=param, code="unsupported_parameter")
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestError(
            f"reasoning.effort must be a text, found {abridged(effort)}", param="reasoning.effort"
        )
    return effort


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """Convert `text.format` to a `response_format` of chats."""
    if text is None:
        return None
    refuse_unknown("text", text, ("format", "verbosity"))
    if text.get("verbosity") not in (None, "medium"):
        param = "text.verbosity"
        raise RequestError(f"{param} is not supported", param=param, code="unsupported_parameter")
    wanted = text.get("format")
    if wanted is not None and not isinstance(wanted, dict):
        raise RequestError(f"text.format must be an object, found {abridged(wanted)}", param="text.format")
    if wanted is not None and wanted.get("type") == "json_schema":
        described = {name: value for name, value in wanted.items() if name != "type"}
        return {"type": "json_schema", "json_schema": described}
    return wanted
