"""Turns llguidance's errors about a request's grammar into words for the request's author."""

from __future__ import annotations

import json
import re

from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams

# All that the library knows of JSON Schema's formats; it refuses others, as it could not keep to them.
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")

_PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")  # in a grammar, or what becomes one
_EXAMPLE = 'start: "yes" | "no"'
_IN_SCHEMA, _IN_REGEX = "failed to compile JSON schema: ", "regex parse error:"
_KEYWORDS = re.compile(r"^Unimplemented keys: (?P<names>\[.*\])$")
_FORMAT = re.compile(r"^Unknown format: (?P<name>.*)$")


def reason(message: str, wanted: StructuredOutputsParams) -> str:
    """Turn the library's message into one line that says why a grammar cannot be compiled."""
    first = first_line(message)
    if first == "NoExtensionBias":  # what the library says where no token may come first
        return "no text is allowed by it"
    if first.endswith(_IN_REGEX):  # then come lines that point into the expression, and the error
        errors = [line for line in message.splitlines() if line.startswith("error: ")]
        first = first.removesuffix(_IN_REGEX) + "".join(errors).removeprefix("error: ")
    stripped = _PLACE.sub("", first)[:300]
    if stripped.startswith(_IN_SCHEMA):
        return _of_schema(stripped.removeprefix(_IN_SCHEMA))
    if wanted.grammar is None:
        return stripped
    ebnf = ", not in EBNF with ::=" if "::=" in wanted.grammar else ""
    placed = _PLACE.sub(r"line \g<line>, column \g<column>: ", first)[:300]
    return f"{placed}; grammars are written in Lark{ebnf}: {_EXAMPLE}"


def first_line(message: str) -> str:
    """Return the first line of a library message that is not empty."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[0] if lines else "refused without a reason")[:300]


def _of_schema(message: str) -> str:
    if found := _KEYWORDS.match(message):
        return f"{', '.join(json.loads(found['names']))}: not supported in a JSON schema"
    if found := _FORMAT.match(message):
        return f"format {found['name']}: not supported in a JSON schema; known are {', '.join(FORMATS)}"
    if message.startswith("oneOf "):
        return "oneOf: supported only for schemas that types or constant texts tell apart; use anyOf"
    return f"JSON schema: {message.replace('Expected f64', 'Expected number')}"
