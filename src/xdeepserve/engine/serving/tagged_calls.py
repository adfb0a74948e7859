"""Tool calls written with tags instead of JSON, as by GLM, MiniMax, Qwen's coder and DeepSeek-V3.2.

    glm            <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>
    qwen3_coder    <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> </function> </tool_call>,
                   each on a line of its own
    minimax        <minimax:tool_call>\\n<invoke name="NAME">\\n<parameter name="KEY">VALUE</parameter>\\n
                   </invoke>\\n</minimax:tool_call>
    deepseek_v32   as minimax, with function_calls around them, ｜DSML｜ at the beginning of each tag, and
                   string="true" or "false" behind KEY

A text stands there as it is, anything else as JSON: so whether `5` is a number is for the function's schema
to say. `TAGGED` has the pieces. A call is read by patterns made of them, which do not mind white space
between tags, and written (tool_grammar.py) as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import msgspec

from xdeepserve.engine.deploy.deployment import ToolFormat
from xdeepserve.engine.serving.request import Function

DSML = "｜DSML｜"  # a token of its own, within tags

Kinds: TypeAlias = frozenset[str]
"""Of JSON, which a schema allows; empty: any."""

TEXT: Kinds = frozenset({"string"})


class Tags(NamedTuple):
    """Tags around a call's name and parameters: first NAME named (key KEY value VALUE end)* last.

    `first` and `last` are marks of the parser where they are not empty. `is_text` takes the place of `value`
    before a text, if there is one.
    """

    first: str
    named: str
    key: str
    value: str
    end: str
    last: str
    is_text: str = ""


TAGGED: dict[ToolFormat, Tags] = {
    "glm": Tags("", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    "qwen3_coder": Tags("<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>"),
    "minimax": Tags('<invoke name="', '">\n', '<parameter name="', '">', "</parameter>\n", "</invoke>"),
    "deepseek_v32": Tags(
        first=f'<{DSML}invoke name="',
        named='">\n',
        key=f'<{DSML}parameter name="',
        value='" string="false">',
        end=f"</{DSML}parameter>\n",
        last=f"</{DSML}invoke>",
        is_text='" string="true">',
    ),
}


class TaggedCall(NamedTuple):
    """Name of a call, and its arguments as JSON; a cut call has cut arguments."""

    name: str
    arguments: str


class CallReader:
    """Reads tool calls of a given format. `functions` are offered to the model, with their schemas."""

    def __init__(self, form: ToolFormat, functions: Sequence[Function]) -> None:
        t = self._tags = TAGGED[form]
        self._functions = functions
        self._name = re.compile(rf'\s*(?P<name>[^\s<>"]+)\s*{re.escape(t.named.strip())}\s*')
        tag = "|".join(_pattern(each) for each in (t.is_text, t.value) if each)
        self._parameter = re.compile(
            rf"\s*{_pattern(t.key)}(?P<key>.*?)(?P<tag>{tag})(?P<value>.*?){_pattern(t.end)}", re.DOTALL
        )

    def read(self, text: str, is_cut: bool = False) -> TaggedCall | None:
        """Read the call in `text`, the text between `first` and `last`; None if there is no call.

        With `is_cut` it may end anywhere behind the name: a parameter that is not whole is left out.
        """
        name = self._name.match(text)
        if name is None or (is_cut and name.end("name") == len(text)):
            return None
        at, members, kinds = name.end(), [], self._kinds.get(name["name"], {})
        while pair := self._parameter.match(text, at):
            at, key = pair.end(), pair["key"]
            kind = kinds.get(key, frozenset())
            if self._tags.is_text:
                kind = TEXT if pair["tag"] == self._tags.is_text else frozenset()
            members.append(f"{_json(key)}: {_value(pair['value'], kind)}")
        if is_cut:
            return TaggedCall(name["name"], "{" + ", ".join(members) if members else "")
        return None if text[at:].strip() else TaggedCall(name["name"], "{" + ", ".join(members) + "}")

    @cached_property
    def _kinds(self) -> Mapping[str, Mapping[str, Kinds]]:
        """Kinds of JSON allowed by the schemas, by function and parameter."""
        schemas = {each.name: json.loads(each.parameters) for each in self._functions}
        return {
            name: {key: kinds_of(each) for key, each in (schema.get("properties") or {}).items()}
            for name, schema in schemas.items()
        }


def kinds_of(schema: Any) -> Kinds:
    """Return the kinds of JSON allowed by a schema, as far as it says so."""
    if not isinstance(schema, dict):
        return frozenset()
    if isinstance(kind := schema.get("type"), str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(map(str, kind))
    if "const" in schema or "enum" in schema:
        return frozenset(_kind(each) for each in schema.get("enum", [schema.get("const")]))
    options = [kinds_of(each) for name in ("anyOf", "oneOf") for each in schema.get(name, ())]
    return frozenset().union(*options) if all(options) else frozenset()


def _kind(value: Any) -> str:
    for kind, types in _TYPES.items():
        if isinstance(value, types):
            return kind
    return "null"


_TYPES: dict[str, Any] = {
    "boolean": bool,
    "integer": int,
    "number": float,
    "string": str,
    "array": list,
    "object": dict,
}


def _value(text: str, kinds: Kinds) -> str:
    """Return JSON of a parameter's text: the text itself, if it is JSON of an allowed kind, or a string."""
    if kinds == TEXT:
        return _json(text)
    try:
        kind = _kind(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _json(text)
    is_allowed = kind in kinds or (kind == "integer" and "number" in kinds)
    return text.strip() if is_allowed or "string" not in kinds else _json(text)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(tag: str) -> str:
    """Return a pattern for a tag: line breaks around it are optional, and line breaks within match any white
    space."""
    inner = r"\s*".join(map(re.escape, tag.strip("\n").split("\n")))
    return "\n?" * tag.startswith("\n") + inner + "\n?" * tag.endswith("\n")
