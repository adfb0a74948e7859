"""The special tokens of the trained model and its chat format, which are DeepSeek's.

`render` writes in Python what the model's Jinja chat template writes; a test holds the two together.
Tool calls are as DeepSeek-V3.1 writes them: the tool's name, a separator, the arguments as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OUTPUT, END_OUTPUT = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"

Tool = dict[
    str, Any
]  # OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}


def render(user: str, system: str = "", tools: Sequence[Tool] = ()) -> str:
    """Render a chat of a single user message, ready for the answer."""
    parts = [part for part in (system, tool_section(tools)) if part]
    return BEGIN + "\n\n".join(parts) + USER + user + ASSISTANT


def tool_section(tools: Sequence[Tool]) -> str:
    """Write the tools for the system message; "" without tools."""
    if not tools:
        return ""
    return "## Tools\n" + "\n".join(
        f"### {tool['function']['name']}\n{tool['function']['description']}\n"
        f"{json.dumps(tool['function']['parameters'], ensure_ascii=False)}"
        for tool in tools
    )


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """Write an assistant's message with a call of a tool."""
    text = json.dumps(arguments, ensure_ascii=False)
    return f"{CALLS}{CALL}{name}{SEPARATOR}{text}{END_CALL}{END_CALLS}"


def tool_output(text: str) -> str:
    """Write a tool's output, for use between a call and the assistant's next message."""
    return f"{OUTPUT}{text}{END_OUTPUT}"
