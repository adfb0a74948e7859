"""Write `docs/json-schema.md`: each keyword of JSON Schema, tried with documents that fulfil it and others.

python tools/write_schema_keywords.py [FILE]
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xdeepserve.engine.dp.grammar import FORMATS, Grammars
from xdeepserve.engine.dp.json_schema import unread_words
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.errors import RequestError
from xdeepserve.model.presets import PRESET_DIRECTORY
from xdeepserve.model.tokenizer import load_tokenizer

FILE = Path(__file__).parent.parent / "docs" / "json-schema.md"
HEAD = """# JSON Schema in structured output

What each keyword does in a schema of `response_format`, `structured_outputs`, `guided_json` and of strict or
forced tools. Every row was tried: *served* takes each document that fulfils the example and none that does
not; *no effect* is an annotation, or a value that excludes nothing; *noted* has no effect either, and is
named in the header `x-ignored-fields`; *refused* is a 400 in these words. This page is made by
`tools/write_schema_keywords.py`; a test tries every row again and asks the package `jsonschema` about each
document.
"""
TAIL = """
- Properties come in the order of the schema, then those that only `required` names, then others.
- No key comes twice in an object, and a key has no `\\u` escapes. Where a pattern of properties leaves
  nothing but a key that is there, it does come again.
- A keyword counts for its own type alone, as JSON Schema says: `{"minimum": 3}` takes any text.
- Numbers are written as a schema needs them, not in all spellings: a whole number is never `1.0` or `1e2`.
- A word that is like a keyword (`minlength`, `requird`) is refused, and so are words of older drafts that
  would exclude something (`divisibleBy`, `disallow`, `extends`).
- A schema that nothing fulfils is refused when the request comes, where the library can know it.
"""
EOS = 1  # end-of-sequence token of the model `tiny`
TREE = {"type": "object", "properties": {"n": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}}
CLOSED: dict[str, Any] = {"additionalProperties": False}
A_OR_B = {"type": "object", "properties": {"a": {}, "b": {}}, **CLOSED}
ARMS = [
    {"properties": {"k": {"const": kind}}, "required": ["k"], "type": "object", **CLOSED}
    for kind in ("x", "y")
]


@dataclass(frozen=True)
class Trial:
    """One keyword in an example schema, with documents as JSON texts: some fulfil it, others do not."""

    keyword: str
    schema: dict[str, Any] | bool
    valid: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()
    draft: int = 2020


def _formats() -> list[Trial]:
    right = {
        "date": '"2024-02-29"',
        "date-time": '"2024-02-29T12:00:00Z"',
        "duration": '"P3D"',
        "email": '"a@b.org"',
        "hostname": '"a.org"',
        "ipv4": '"10.0.0.1"',
        "ipv6": '"::1"',
        "time": '"12:00:00Z"',
        "uri": '"https://a.org/b"',
        "uuid": '"123e4567-e89b-12d3-a456-426614174000"',
    }
    known = [Trial(f"format {name}", {"format": name}, (right[name], "1"), ('"no !"',)) for name in FORMATS]
    number = Trial("format of a number", {"type": "integer", "format": "int32"}, ("1",), ('"x"',))
    return [*known, Trial("any other format", {"type": "string", "format": "password"}), number]


TRIALS = [
    Trial("true", True, ("1", '{"a": [null]}')),
    Trial("false", False),
    Trial("type", {"type": "boolean"}, ("true",), ("1", "null")),
    Trial("type of several", {"type": ["string", "null"]}, ('"a"', "null"), ("1", "[]")),
    Trial("enum", {"enum": [1, "a", None, {"b": [2]}]}, ("1", '"a"', '{"b": [2]}'), ("2", '"b"', "{}")),
    Trial("const", {"const": {"a": [1]}}, ('{"a": [1]}',), ('{"a": [2]}', "1")),
    Trial("minimum, maximum", {"type": "integer", "minimum": 3, "maximum": 12}, ("3", "12"), ("2", "13")),
    Trial(
        "exclusiveMinimum, exclusiveMaximum",
        {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        ("1.5", "1.01"),
        ("1", "2", "0.5"),
    ),
    Trial(
        "exclusiveMinimum of draft 4",
        {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
        ("4",),
        ("3",),
        4,
    ),
    Trial("multipleOf", {"type": "number", "multipleOf": 3}, ("0", "-9", "12"), ("1", "2.5", "3.3")),
    Trial("multipleOf a fraction", {"multipleOf": 0.25}, ("0.75", "2", '"a"'), ("0.3", "0.05", "1.01")),
    Trial(
        "minLength, maxLength",
        {"type": "string", "minLength": 1, "maxLength": 2},
        ('"é"', '"ab"'),
        ('""', '"abc"'),
    ),
    Trial("pattern", {"type": "string", "pattern": "b+$"}, ('"ab"', '"bb"'), ('"ba"', '""')),
    Trial(
        "pattern beside maxLength",
        {"type": "string", "pattern": "^[a-z]+$", "maxLength": 2},
        ('"ab"',),
        ('"abc"', '"A"', '""'),
    ),
    Trial("pattern that looks around", {"type": "string", "pattern": "^(?!a)"}),
    *_formats(),
    Trial("items", {"type": "array", "items": {"type": "integer"}}, ("[]", "[1, 2]"), ('["a"]', "[1, null]")),
    Trial(
        "prefixItems",
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "null"}},
        ("[]", "[1]", "[1, null]"),
        ('["a"]', "[1, 1]"),
    ),
    Trial(
        "additionalItems of older drafts",
        {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
        ("[]", "[1]"),
        ('["a"]', "[1, 1]"),
        7,
    ),
    Trial(
        "minItems, maxItems",
        {"type": "array", "minItems": 1, "maxItems": 2},
        ("[1]", "[1, 1]"),
        ("[]", "[1, 1, 1]"),
    ),
    Trial("uniqueItems", {"type": "array", "uniqueItems": True}),
    Trial("uniqueItems false", {"type": "array", "uniqueItems": False}, ("[1, 1]",)),
    Trial("contains", {"type": "array", "contains": {"const": 1}}),
    Trial("minContains, maxContains alone", {"minContains": 2, "maxContains": 3}, ("[]", "1")),
    Trial("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    Trial(
        "properties",
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        ("{}", '{"a": 1}', '{"b": "x"}', '{"a": 1, "b": null}'),
        ('{"a": "x"}',),
    ),
    Trial("required", {"type": "object", "required": ["a", "b"]}, ('{"a": 1, "b": 2}',), ("{}", '{"a": 1}')),
    Trial("additionalProperties false", A_OR_B, ("{}", '{"a": 1, "b": 1}'), ('{"c": 1}',)),
    Trial(
        "additionalProperties",
        {"type": "object", "additionalProperties": {"type": "null"}},
        ("{}", '{"a": null, "b": null}'),
        ('{"a": 1}',),
    ),
    Trial(
        "patternProperties",
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, **CLOSED},
        ("{}", '{"a": 1, "ab": 2}'),
        ('{"a": "x"}', '{"b": 1}'),
    ),
    Trial("patternProperties that meet", {"type": "object", "patternProperties": {"^a": {}, "^.b": {}}}),
    Trial(
        "propertyNames of an enum, a constant or a pattern",
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
        ("{}", '{"a": null}', '{"a": null, "b": null}'),
        ('{"c": null}', '{"a": 1}'),
    ),
    Trial(
        "propertyNames by $ref",
        {"type": "object", "propertyNames": {"$ref": "#/$defs/c"}, "$defs": {"c": {"enum": ["a", "b"]}}},
        ("{}", '{"a": 1, "b": 2}'),
        ('{"c": 1}',),
    ),
    Trial(
        "propertyNames by anyOf",
        {"type": "object", "propertyNames": {"anyOf": [{"const": "a"}, {"enum": ["b"]}]}, "required": ["a"]},
        ('{"a": 1}', '{"a": 1, "b": 2}'),
        ("{}", '{"b": 1}', '{"a": 1, "c": 1}'),
    ),
    Trial(
        "propertyNames of lengths",
        {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 3}},
        ("{}", '{"a": 1}', '{"abc": 1, "ä": 2}'),
        ('{"": 1}', '{"abcd": 1}'),
    ),
    Trial("propertyNames otherwise", {"type": "object", "propertyNames": {"format": "uuid"}}),
    Trial(
        "minProperties, maxProperties",
        {"type": "object", "minProperties": 1, "maxProperties": 2},
        ('{"a": 1}', '{"a": 1, "b": 1}'),
        ("{}", '{"a": 1, "b": 1, "c": 1}'),
    ),
    Trial(
        "minProperties 1 of optional properties",
        {**A_OR_B, "minProperties": 1},
        ('{"b": 1}', '{"a": 1, "b": 1}'),
        ("{}",),
    ),
    Trial("minProperties of optional properties and others", {"properties": {"a": {}}, "minProperties": 1}),
    Trial("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    Trial("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
    Trial("dependencies of older drafts", {"type": "object", "dependencies": {"a": ["b"]}}),
    Trial("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    Trial(
        "anyOf",
        {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]},
        ("1", '"a"'),
        ('"ab"', "null"),
    ),
    Trial(
        "oneOf told apart by types",
        {"oneOf": [{"type": "integer"}, {"type": "null"}]},
        ("1", "null"),
        ('"a"',),
    ),
    Trial(
        "oneOf told apart by a constant", {"oneOf": ARMS}, ('{"k": "x"}', '{"k": "y"}'), ('{"k": "z"}', "{}")
    ),
    Trial("oneOf otherwise", {"oneOf": [{"minimum": 3}, {"maximum": 5}]}),
    Trial("allOf", {"type": "integer", "allOf": [{"minimum": 1}, {"maximum": 3}]}, ("1", "3"), ("0", "4")),
    Trial("not", {"not": {"type": "integer"}}),
    Trial("if, then, else", {"if": {"type": "integer"}, "then": {"minimum": 1}}),
    Trial("then or if alone", {"then": {"type": "integer"}}, ("1", '"a"')),
    Trial(
        "$ref and $defs",
        {"$ref": "#/$defs/a~1b%20c", "maxLength": 1, "$defs": {"a/b c": {"type": "string"}}},
        ('"a"',),
        ('"ab"', "1"),
    ),
    Trial("$ref to a whole schema, recursively", TREE, ("{}", '{"n": [{"n": []}]}'), ('{"n": [1]}',)),
    Trial(
        "$ref to an $anchor",
        {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "null"}}},
        ("null",),
        ("1",),
    ),
    Trial("$ref to itself", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    Trial("$ref to another document", {"$ref": "https://example.org/schema"}),
    Trial("$dynamicRef", {"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a"}}}),
    Trial("$recursiveRef of draft 2019-09", {"$recursiveRef": "#"}),
    Trial(
        "$schema, $id, $comment, $vocabulary",
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.org/x",
            "$comment": "c",
            "$vocabulary": {},
        },
        ("1",),
    ),
    Trial(
        "title, description, default, examples",
        {"title": "t", "description": "d", "default": 1, "examples": [1]},
        ('"a"',),
    ),
    Trial(
        "deprecated, readOnly, writeOnly", {"deprecated": True, "readOnly": True, "writeOnly": True}, ("1",)
    ),
    Trial(
        "contentEncoding, contentMediaType, contentSchema",
        {"contentEncoding": "base64", "contentMediaType": "text/html", "contentSchema": {}},
        ('"a b"',),
    ),
    Trial(
        "nullable, discriminator, xml of OpenAPI",
        {"type": "string", "nullable": True, "discriminator": {"propertyName": "a"}, "xml": {}},
        ('"a"',),
        ("null", "1"),
    ),
    Trial("words of one's own", {"x-order": 1, "propertyOrdering": ["a"]}, ("1",)),
    Trial("divisibleBy, disallow, extends of draft 3", {"divisibleBy": 2}),
    Trial("a misspelt keyword", {"type": "string", "minlength": 2}),
]


class Tries:
    """Grammars of the model `tiny`, which take documents token by token or do not."""

    def __init__(self) -> None:
        path = PRESET_DIRECTORY / "tiny"
        self._tokenizer = load_tokenizer(path)
        self._grammars = Grammars((path / "tokenizer.json").read_text(), 1280, [EOS])

    def takes(self, form: StructuredOutputsParams, document: str) -> bool:
        """Whether a model could write this document and end there."""
        matcher = self._grammars.matcher(form)
        for token_id in [*self._tokenizer.encode(document), EOS]:
            mask = matcher.allowed()
            if mask is None or not mask[token_id] or not matcher.take(token_id):
                return False
        return True

    def outcome(self, trial: Trial) -> str:
        """Say what comes of a keyword. Raises AssertionError for a document that is judged wrongly."""
        form = StructuredOutputsParams(json=trial.schema)
        try:
            self._grammars.matcher(form)
        except RequestError as error:
            return f"refused: {str(error).removeprefix('structured output: ')}"
        assert all(self.takes(form, each) for each in trial.valid), trial
        assert trial.valid, f"{trial.keyword} is taken, and has no documents"
        assert not any(self.takes(form, each) for each in trial.invalid), trial
        if unread_words(json.dumps(trial.schema)):
            return "noted"
        return "served" if trial.invalid or trial.schema is True else "no effect"


def page() -> str:
    """Make the page: a row for each keyword."""
    tries = Tries()
    shown = [json.dumps(trial.schema, ensure_ascii=False) for trial in TRIALS]
    rows = [
        f"| {trial.keyword} | `{text}` | {tries.outcome(trial)} |"
        for trial, text in zip(TRIALS, shown, strict=True)
    ]
    return "\n".join([HEAD, "| keyword | example | |", "|---|---|---|", *rows, TAIL])


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else FILE).write_text(page(), encoding="utf-8")
