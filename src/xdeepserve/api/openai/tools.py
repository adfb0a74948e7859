"""Tools offered by a client, and the effects of `tool_choice`, `strict` and `parallel_tool_calls`."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from xdeepserve.api.openai.requests import ChatRequest, Tool
from xdeepserve.api.openai.structured import refuse_unknown
from xdeepserve.engine.serving.request import OutputFormats, ToolRules
from xdeepserve.errors import RequestError, abridged
from xdeepserve.parsing.call_grammar import Function
from xdeepserve.parsing.schema_values import json_type

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
CHOICES = ("auto", "none", "required")
_BY_NAME = '{"type": "function", "function": {"name": ...}}'
_WORDS = {**{name: name for name in CHOICES}, "any": "required"}  # by the type of an object
OTHER_CHOICES = ("allowed_tools", "custom")  # OpenAI's, which this server lacks
_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}}


class OfferedTools(msgspec.Struct, frozen=True):
    """Tools offered by a request.

    `shown` go to the chat template; `rules` are None if calls are left to the model. `functions` have the
    client's schemas.
    """

    shown: list[dict[str, Any]]
    rules: ToolRules | None
    functions: tuple[Function, ...]

    @property
    def must_call(self) -> bool:
        """Whether the answer must consist of calls, without content."""
        return self.rules is not None and self.rules.must_call


def offered_tools(
    body: ChatRequest, formats: OutputFormats, model: str, *, has_form: bool = False
) -> OfferedTools | None:
    """Read the tools of a request; None if the model may call none.

    `has_form`: content must have a form, so a grammar must also allow calls. Raises RequestError for bad
    definitions, a choice of a tool that is not offered, and a model that cannot call tools.
    """
    tools, choice = body.tools or [], "auto" if body.tool_choice is None else body.tool_choice
    for i, tool in enumerate(tools):
        _check(f"tools[{i}]", tool)
    named = _named(choice, tools)
    if choice == "required" and not tools:
        raise RequestError("tool_choice required needs tools", param="tool_choice")
    if not tools or choice == "none":
        return None
    check_shown(formats, model)
    if formats.tools is None:
        raise _no_tools(model, "its output has no known format of tool calls")
    must_call, is_single = choice != "auto", named is not None or body.parallel_tool_calls is False
    rules = None
    if must_call or is_single or has_form or any(tool.function.strict for tool in tools):
        rules = ToolRules(
            functions=tuple(_function(tool, must_call) for tool in ([named] if named else tools)),
            must_call=must_call,
            is_single=is_single,
        )
    functions = [Function(tool.function.name, json.dumps(tool.function.parameters or {})) for tool in tools]
    return OfferedTools([tool.shown() for tool in tools], rules, tuple(functions))


def check_shown(formats: OutputFormats, model: str) -> None:
    """Raise RequestError for a model whose chat template ignores tools."""
    if not formats.shows_tools:
        raise _no_tools(model, "its template shows none")


def _no_tools(model: str, lack: str) -> RequestError:
    return RequestError(
        f'the model "{model}" cannot call tools: {lack} (deployment setting output.tools)',
        param="tools",
        code="unsupported_parameter",
    )


def _check(where: str, tool: Tool) -> None:
    if tool.type != "function":
        raise RequestError(
            f"{where}.type must be function, found {abridged(tool.type)}", param=f"{where}.type"
        )
    if not _NAME.fullmatch(tool.function.name):
        raise RequestError(
            f"{where}.function.name must be 1 to 128 of a-z, A-Z, 0-9, '_', '.' and '-', "
            f"found {abridged(tool.function.name)}",
            param=f"{where}.function.name",
        )
    kinds = (tool.function.parameters or {}).get("type", "object")
    if "object" not in map(json_type, kinds if isinstance(kinds, list) else [kinds]):
        param = f"{where}.function.parameters.type"
        raise RequestError(f"{param} must be object, found {abridged(kinds)}", param=param)


def _named(choice: str | dict[str, Any], tools: list[Tool]) -> Tool | None:
    """Return the tool required by a request, if the request names one."""
    if isinstance(choice, str):
        if choice not in CHOICES:
            known = f"{', '.join(CHOICES)} or a tool"
            if choice in _WORDS or any(tool.function.name == choice for tool in tools):
                known = _BY_NAME if choice not in _WORDS else f'"{_WORDS[choice]}"'
            raise RequestError(f"tool_choice must be {known}, found {abridged(choice)}", param="tool_choice")
        return None
    if (kind := choice.get("type")) in OTHER_CHOICES:
        raise RequestError(
            f"tool_choice.type {kind} is not supported; supported are {', '.join(CHOICES)}, "
            "and a function by its name",
            param="tool_choice.type",
            code="unsupported_parameter",
        )
    function = choice.get("function")
    if function is None and (instead := _instead(choice)):
        raise RequestError(f"tool_choice must be {instead}, found {abridged(choice)}", param="tool_choice")
    refuse_unknown("tool_choice", choice, ("type", "function"))
    refuse_unknown("tool_choice.function", function, ("name",))
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(f"tool_choice as an object must be {_BY_NAME}", param="tool_choice")
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise RequestError(f"tool_choice names {abridged(name)}, which is not among tools", param="tool_choice")


def _instead(choice: dict[str, Any]) -> str | None:
    """Say how a choice in the form of another API is written here; None for one that has no such form."""
    kind = choice.get("type")
    if kind in (None, "function", "tool") and isinstance(choice.get("name"), str):
        return _BY_NAME
    word = _WORDS.get(kind) if isinstance(kind, str) else None
    return word and f'the text "{word}"'


def _function(tool: Tool, must_call: bool) -> Function:
    """Describe a function for a grammar. Arguments follow the schema where that is promised: in a strict
    tool, and in a call that the model has not chosen to make. There a function without parameters takes none.
    """
    function = tool.function
    schema: dict[str, Any] = _ANY_OBJECT
    if function.strict or must_call:
        schema = function.parameters or _NO_ARGUMENTS
        if schema.get("properties") == {}:
            schema = {"additionalProperties": False, **schema}
        schema = {**schema, "type": "object"}  # be it said or not: nobody could send back another call
    return Function(function.name, json.dumps(schema))
