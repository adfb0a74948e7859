"""Tools that a client offers, and what of `tool_choice` this server can promise."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from xdeepserve.api.requests import ChatRequest
from xdeepserve.engine.serving.request import OutputFormats
from xdeepserve.errors import RequestError

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_UNSUPPORTED = "unsupported_parameter"


def offered_tools(body: ChatRequest, formats: OutputFormats, model: str) -> list[dict[str, Any]] | None:
    """The tools that the chat template is to show; None if the model may call none.

    A model is free to call a tool or not, and writes its arguments as it likes. To force it would need
    constrained decoding, which this server lacks. So RequestError for `tool_choice` "required" or a named
    tool, for `strict` schemas, for bad definitions, and for a model that knows nothing of tools.
    """
    choice = "auto" if body.tool_choice is None else body.tool_choice
    if isinstance(choice, dict) or choice == "required":
        raise RequestError(
            "tool_choice may be auto or none: to force a call needs constrained decoding, "
            "which is not supported",
            param="tool_choice",
            code=_UNSUPPORTED,
        )
    if choice not in ("auto", "none"):
        raise RequestError(f"tool_choice must be auto or none, found '{choice[:40]}'", param="tool_choice")
    for i, tool in enumerate(body.tools or ()):
        where = f"tools[{i}]"
        if tool.type != "function":
            raise RequestError(
                f"{where}.type must be function, found '{tool.type[:40]}'", param=f"{where}.type"
            )
        if not _NAME.fullmatch(tool.function.name):
            raise RequestError(
                f"{where}.function.name must be 1 to 64 of a-z, A-Z, 0-9, '_', '.' and '-', "
                f"found '{tool.function.name[:40]}'",
                param=f"{where}.function.name",
            )
        if tool.function.strict:
            raise RequestError(
                f"{where}.function.strict needs constrained decoding, which is not supported",
                param=f"{where}.function.strict",
                code=_UNSUPPORTED,
            )
    if not body.tools or choice == "none":
        return None
    if formats.tools is None or not formats.shows_tools:
        lack = "its template shows none"
        if formats.shows_tools:
            lack = "its output has no known format of tool calls"
        raise RequestError(
            f"the model '{model}' cannot call tools: {lack} (deployment setting output.tools)",
            param="tools",
            code=_UNSUPPORTED,
        )
    return [msgspec.to_builtins(tool) for tool in body.tools]
