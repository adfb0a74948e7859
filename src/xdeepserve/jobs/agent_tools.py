"""Tools for agents: functions of a file of the operator's (`serve --tools FILE`).

A function without a leading underscore is a tool. Its docstring describes it to the model. Its parameters,
each annotated as str, int, float or bool, are the arguments that a call must have. Its result is shown to the
model as text, and so is an error.
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, get_type_hints

from xdeepserve.errors import InputError
from xdeepserve.reading import Document, mistakes, read_text

KINDS_OF_JSON = {str: "string", int: "integer", float: "number", bool: "boolean"}
MAX_OUTPUT_CHARS = 4096


class AgentTool(NamedTuple):
    """A tool: a function, and the types of its arguments."""

    name: str
    description: str
    parameters: dict[str, type]
    function: Callable[..., Any]

    def shown(self) -> dict[str, Any]:
        """Return the tool's description in OpenAI's format."""
        properties = {name: {"type": KINDS_OF_JSON[kind]} for name, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}

    def call(self, arguments: str) -> str:
        """Call the tool with arguments, a JSON object; return its text, or a description of the error."""
        try:
            given = Document(arguments or "{}", "arguments", "JSON").to(dict[str, Any])
            if given.keys() != self.parameters.keys():
                return f"error: {self.name} takes {', '.join(self.parameters) or 'nothing'}"
            for name, kind in self.parameters.items():
                for wrong in mistakes(given[name], kind, "JSON"):
                    return f"error: {name} {wrong.text}"
            return str(self.function(**given))[:MAX_OUTPUT_CHARS]
        except Exception as error:
            return f"error: {' '.join(str(error).split()) or type(error).__name__}"[:MAX_OUTPUT_CHARS]


def read_tools(path: Path) -> dict[str, AgentTool]:
    """Read the tools of a file, by name. Raises InputError, with a one-line message, for an unusable file or
    function."""
    read_text(path, f"--tools {path}")  # says best why there is none
    try:
        names = runpy.run_path(str(path), run_name="tools")
    except Exception as error:
        raise InputError(f"--tools {path}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    own = {name: each for name, each in names.items() if isinstance(each, FunctionType)}
    return {
        name: _tool(path, name, each)
        for name, each in own.items()
        if each.__module__ == "tools" and not name.startswith("_")
    }


def _tool(path: Path, name: str, function: FunctionType) -> AgentTool:
    hints = get_type_hints(function)
    kinds = {each: hints.get(each, object) for each in inspect.signature(function).parameters}
    for each, kind in kinds.items():
        if kind not in KINDS_OF_JSON:
            raise InputError(f"--tools {path}: parameter {each} of {name} must be str, int, float or bool")
    return AgentTool(name, inspect.getdoc(function) or "", kinds, function)
