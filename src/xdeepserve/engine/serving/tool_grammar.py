"""Grammar of tool calls in the model's own format, as promised by `tool_choice` and `strict`.

The parser (`xdeepserve.parsing`) reads what the grammar lets through. A tag is a token of its own where the
vocabulary has one, which no text can spell otherwise; else its characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from xdeepserve.engine.dp.json_schema import json_rule
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams, literal
from xdeepserve.engine.serving.request import ToolRules
from xdeepserve.errors import RequestError
from xdeepserve.parsing.call_grammar import Function
from xdeepserve.parsing.schema_values import FunctionSchema, is_plain_text
from xdeepserve.parsing.tool_formats import DSML, NOTATIONS, Tags, ToolFormat

TokenOf = Callable[[str], int | None]
ANY_TEXT = r"(.|\n)*"
_TAG = re.compile(f"<.*>|{DSML}")
_PIECES = re.compile(f"({DSML}|</?[^<>｜]*>)")  # of tags, which may be tokens
LINE = "\n"
_UNSPELT = ("pattern", "format")  # what a schema may ask of a text, but is not said here


def tool_grammar(
    form: ToolFormat, rules: ToolRules, content: StructuredOutputsParams | None, token_of: TokenOf
) -> StructuredOutputsParams:
    """Return a grammar for a choice with tools: only calls or, if none is required, content with or without
    calls.

    `content` is the form required of content, which then excludes calls.
    """

    def tag(text: str) -> str:
        """Return a text as grammar terms; tags with a token of their own are named by token id."""
        if (token_id := token_of(text)) is not None and _TAG.fullmatch(text):
            return f"<[{token_id}]>"
        pieces = [each for each in _PIECES.split(text) if each]
        return " ".join(map(tag, pieces)) if len(pieces) > 1 else literal(text)

    notation = NOTATIONS[form]
    first, last = notation.begins[0], notation.ends[0]
    if first in notation.between:  # around each call, and so part of its rule
        last = ""
    elif notation.body == "tags":
        last = f"\n{last}"
    lines = [f"call_{number}: {_call(form, each, tag)}" for number, each in enumerate(rules.functions)]
    call = "(" + " | ".join(f"call_{number}" for number in range(len(rules.functions))) + ")"
    between = tag(notation.between) if notation.between else ""
    more = "" if rules.is_single else f" ({between} {call})*"
    lines.append(f"calls: {call}{more} {tag(last) if last else ''}")
    lines += [_any_value(notation.tags, tag)] if notation.tags else []
    if rules.must_call:
        lines.append(f"start: {tag(first)} calls")
    elif content is not None:
        lines.append(f"start: {content.term} | {tag(first)} calls")
    elif "<[" in tag(first):
        lines += [f"start: text ({tag(first)} calls)?", f"text: /{ANY_TEXT}/"]
    else:
        lines += [
            "start: text | head calls",
            f"text: /{ANY_TEXT}/",
            f"head[lazy]: /{ANY_TEXT}/ {literal(first)}",
        ]
    return StructuredOutputsParams(grammar="\n".join(lines))


def _call(form: ToolFormat, function: Function, tag: Callable[[str], str]) -> str:
    """Return the grammar rule of a single call. Where each call has its own opening tag, the rule begins
    after it."""
    n = NOTATIONS[form]
    if n.tags is not None:
        return _tagged_call(form, n.tags, function, tag)
    name, arguments = function.name, json_rule(json.loads(function.parameters))
    if form == "hermes":
        begin, end = f'\n{{"name": {json.dumps(name)}, "arguments": ', "}\n"
        return f"{literal(begin)} {arguments} {literal(end)} {tag(n.ends[0])}"
    header, end = literal(name), ""
    if form == "kimi":
        header = f"{literal(f'functions.{name}:')} /[0-9]{{1,3}}/"
    if form == "deepseek":
        header, end = literal("function"), literal("\n```")
        arguments = literal(f"{name}\n```json\n") + f" {arguments}"
    return f"{tag(n.call)} {header} {tag(n.separator)} {arguments} {end} {tag(n.call_end)}"


def _tagged_call(form: ToolFormat, t: Tags, function: Function, tag: Callable[[str], str]) -> str:
    """Return the rule of a call with tags instead of JSON: only the schema's parameters, in its order."""
    schema = json.loads(function.parameters)
    known, required = schema.get("properties"), schema.get("required", ())
    parts = [tag(f"{'' if form == 'glm' else LINE}{t.first}{function.name}{t.named}")]
    for name, each in (known or {}).items():
        given = f"{tag(t.key)} {literal(name)} {_value(function.name, t, name, each, schema, tag)}"
        parts.append(given if name in required else f"({given})?")
    if known is None and schema.get("additionalProperties") is not False:
        parts.append(f"({tag(t.key)} /[A-Za-z0-9_.-]{{1,64}}/ {tag(t.is_text or t.value)} any_value)*")
    last = {"glm": "</tool_call>", "qwen3_coder": f"{t.last}{LINE}</tool_call>"}.get(form, t.last)
    return " ".join([*parts, tag(last)])


def _value(
    function: str, t: Tags, name: str, schema: Any, whole: dict[str, Any], tag: Callable[[str], str]
) -> str:
    """Return the rule of a parameter's value up to its end tag: plain text, or JSON."""
    if not is_plain_text(FunctionSchema(whole).allowed(schema)):
        shared: dict[str, Any] = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        own = schema if isinstance(schema, dict) else {}
        return f"{tag(t.value)} {json_rule({**shared, **own})} {tag(t.end)}"
    for keyword in _UNSPELT:
        if keyword in schema:
            raise RequestError(
                f"the function {function} wants a {keyword} of the text {name}, which cannot be promised "
                "where calls are no JSON: leave it out, or strict",
                param="tools",
            )
    begin, values = (
        tag(t.is_text or t.value),
        schema.get("enum", [schema["const"]] if "const" in schema else []),
    )
    if values:
        return f"{begin} ({' | '.join(map(literal, values))}) {tag(t.end)}"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        return f"{begin} /[^<]{{{least},{most}}}/ {tag(t.end)}"
    return f"{begin} any_value"


def _any_value(t: Tags, tag: Callable[[str], str]) -> str:
    """Return the rule of any text up to the tag that ends it."""
    end = t.end
    if "<[" in tag(end):
        return f"any_value: /{ANY_TEXT}/ {tag(end)}"
    return f"any_value[lazy]: /{ANY_TEXT}/ {literal(end)}"
