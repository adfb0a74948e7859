"""Calls of tools as a grammar, in the format that the model speaks: what `tool_choice` and `strict` promise.

The parser (parsers.py) reads what the grammar lets through. A tag is a token of its own where the vocabulary
has one, which no text can spell otherwise; else its characters.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from xdeepserve.engine.deploy.deployment import ToolFormat
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams, json_rule, literal
from xdeepserve.engine.serving.parsers import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_CALLS,
    KIMI_CALLS_END,
    KIMI_SEP,
    SEP,
)
from xdeepserve.engine.serving.request import Function, ToolRules

TokenOf = Callable[[str], int | None]
ANY_TEXT = r"(.|\n)*"
_SECTIONS: dict[ToolFormat, tuple[str, str]] = {  # what stands around all calls
    "deepseek": (CALLS, CALLS_END),
    "deepseek_v31": (CALLS, CALLS_END),
    "kimi": (KIMI_CALLS, KIMI_CALLS_END),
}


def tool_grammar(
    form: ToolFormat, rules: ToolRules, content: StructuredOutputsParams | None, token_of: TokenOf
) -> StructuredOutputsParams:
    """What a choice may say that has tools: calls, or if it need not call any, content with or without them.

    `content` is what content has to look like, which then excludes calls.
    """

    def tag(text: str) -> str:
        token_id = token_of(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    first, last = _SECTIONS.get(form, ("<tool_call>", ""))
    lines = [f"call_{number}: {_call(form, each, tag)}" for number, each in enumerate(rules.functions)]
    call = "(" + " | ".join(f"call_{number}" for number in range(len(rules.functions))) + ")"
    # In hermes' format each call has its own tag, and the first one's stands before `calls`.
    between = {"deepseek": '"\\n"', "hermes": '"\\n" ' + tag("<tool_call>")}.get(form, "")
    more = "" if rules.is_single else f" ({between} {call})*"
    lines.append(f"calls: {call}{more} {tag(last) if last else ''}")
    if rules.must_call:
        lines.append(f"start: {tag(first)} calls")
    elif content is not None:
        lines.append(f"start: {content.term} | {tag(first)} calls")
    elif token_of(first) is not None:
        lines += [f"start: text ({tag(first)} calls)?", f"text: /{ANY_TEXT}/"]
    else:
        lines += [
            "start: text | head calls",
            f"text: /{ANY_TEXT}/",
            f"head[lazy]: /{ANY_TEXT}/ {literal(first)}",
        ]
    return StructuredOutputsParams(grammar="\n".join(lines))


def _call(form: ToolFormat, function: Function, tag: Callable[[str], str]) -> str:
    """The rule of one call; in hermes' format, what follows its tag."""
    name, arguments = function.name, json_rule(json.loads(function.parameters))
    if form == "hermes":
        begin, end = f'\n{{"name": {json.dumps(name)}, "arguments": ', "}\n"
        return f"{literal(begin)} {arguments} {literal(end)} {tag('</tool_call>')}"
    if form == "kimi":
        header = f"{literal(f'functions.{name}:')} /[0-9]{{1,3}}/"
        return f"{tag(KIMI_CALL)} {header} {tag(KIMI_SEP)} {arguments} {tag(KIMI_CALL_END)}"
    if form == "deepseek_v31":
        return f"{tag(CALL)} {literal(name)} {tag(SEP)} {arguments} {tag(CALL_END)}"
    block = literal(f"{name}\n```json\n")
    end = literal("\n```")
    return f"{tag(CALL)} {literal('function')} {tag(SEP)} {block} {arguments} {end} {tag(CALL_END)}"
