"""JSON schemas as terms of a grammar, in the keywords that the grammar library has.

The library refuses what it does not know among JSON Schema's own words, and passes over all other words. Here
keywords that it lacks are written in others where that is possible, those whose value excludes nothing are
left out, and words that it would pass over although they mean something are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from xdeepserve.errors import RequestError, meant
from xdeepserve.parsing.schema_values import json_type

# Between two tokens of JSON a space or an indented line: a model cannot go on with white space for ever.
_WHITE_SPACE = r" |\n {0,16}"
# Keywords whose values are schemas by name, lists of schemas, and schemas.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = (
    *("items", "additionalProperties", "additionalItems", "propertyNames", "contains", "not"),
    *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
_VALUES = (
    *("$ref", "$dynamicRef", "$recursiveRef", "const", "dependencies", "dependentRequired", "enum"),
    *("exclusiveMaximum", "exclusiveMinimum", "format", "maxContains", "maxItems", "maxLength"),
    *("maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum"),
    *("multipleOf", "pattern", "required", "type", "uniqueItems"),
)
KEYWORDS = (*_MAPS, *_LISTS, *_SCHEMAS, *_VALUES)
# JSON Schema's words that exclude nothing.
ANNOTATIONS = (
    *("$anchor", "$comment", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary"),
    *("contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated", "description"),
    *("example", "examples", "id", "readOnly", "title", "writeOnly", "x-guidance"),
)
_HOLDERS = ("defs", "definition")  # as good as any word for schemas that `$ref` points to
# Words of older drafts that exclude something, and what says the same today.
_OLD = {"divisibleBy": "multipleOf", "disallow": "not", "extends": "allOf"}
_BESIDE_NAMES = ("$comment", "description", "title", "type")  # in propertyNames, beside what it asks for
MAX_NAME_CHARS = 10_000  # that a schema of names may give
MAX_REFS = 32  # from one schema of names to the next
_NAME_FORMS = (
    "an enum of texts, or a const, or a pattern, or lengths (minLength, maxLength), one of them alone, "
    "by $ref, anyOf or oneOf too"
)


def json_rule(schema: dict[str, Any] | bool) -> str:
    """Return a term of a grammar rule that matches JSON of a schema. Raises RequestError for a keyword that
    would not be kept."""
    if schema is False:
        raise refused_schema("nothing fulfils the schema false")
    options = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
    written = _written(schema, schema) if isinstance(schema, dict) else {}
    return "%json " + json.dumps({**written, **options})


@lru_cache(maxsize=64)
def unread_words(schema: str) -> tuple[str, ...]:
    """List the words of a schema, given as text, that are neither keywords nor annotations: they have no
    effect."""
    found: dict[str, None] = {}
    for each in _schemas(json.loads(schema)):
        found.update(dict.fromkeys(each.keys() - {*KEYWORDS, *ANNOTATIONS}))
    return tuple(sorted(found))


def refused_schema(reason: str) -> RequestError:
    """Return the error for a schema that cannot be promised."""
    return RequestError(f"structured output: {reason}", param="structured_outputs")


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """Name every schema directly within another one: its keyword, its place in that, and itself."""
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            yield from ((keyword, name, each) for name, each in value.items())
        elif keyword in (*_LISTS, "items") and isinstance(value, list):
            yield from ((keyword, place, each) for place, each in enumerate(value))
        elif keyword in _SCHEMAS:
            yield keyword, None, value


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Name a schema and all that it contains, except the values true and false."""
    if isinstance(schema, dict):
        yield schema
        for _, _, each in _inner(schema):
            yield from _schemas(each)


def _written(schema: Any, root: dict[str, Any]) -> Any:
    """Write a schema within `root` in keywords that the library has. What has no such form stays; the library
    refuses it by name."""
    if not isinstance(schema, dict):
        return schema
    _check_words(schema)
    made = {keyword: value for keyword, value in schema.items() if not _excludes_nothing(schema, keyword)}
    if "type" in made:
        kinds = made["type"]
        made["type"] = [*map(json_type, kinds)] if isinstance(kinds, list) else json_type(kinds)
    for keyword, place, each in list(_inner(made)):
        if place is None:
            made[keyword] = each if keyword == "propertyNames" else _written(each, root)
        else:
            if made[keyword] is schema[keyword]:
                made[keyword] = made[keyword].copy()
            made[keyword][place] = _written(each, root)
    return _without_names(made, root)


def _check_words(schema: dict[str, Any]) -> None:
    """Raise RequestError for a word that means something and has no effect: one of an older draft, or a
    misspelt keyword."""
    for word in schema.keys() - {*KEYWORDS, *ANNOTATIONS, *_HOLDERS}:
        if word in _OLD:
            raise refused_schema(f"{word}: not supported in a JSON schema; use {_OLD[word]}")
        plain = re.sub(r"[-_ ]", "", word).lower()
        if plain in _PLAIN or _is_misspelt(word):
            raise refused_schema(f"unknown keyword {word[:100]} in a JSON schema{meant(word, KEYWORDS)}")
    if schema.get("format") == "unknown":  # the library's own word for formats to be passed over
        raise refused_schema('format "unknown": not supported in a JSON schema')


_PLAIN = {keyword.lower() for keyword in KEYWORDS}


def _is_misspelt(word: str) -> bool:
    """Whether a word has the letters of a keyword but for one that is missing, added, changed or moved."""
    lower = word[:100].lower()
    for keyword in _PLAIN:
        if abs(len(lower) - len(keyword)) > 1 or len(keyword) < 5:
            continue
        begin = next((i for i, (a, b) in enumerate(zip(lower, keyword, strict=False)) if a != b), None)
        if begin is None:
            return True
        rest, wanted = lower[begin:], keyword[begin:]
        if rest[1:] == wanted or rest == wanted[1:] or rest[1:] == wanted[1:]:
            return True
        if rest[:2] == wanted[1::-1] and rest[2:] == wanted[2:]:
            return True
    return False


def _excludes_nothing(schema: dict[str, Any], keyword: str) -> bool:
    """Whether the library refuses a keyword that has no effect, by its value or without another one."""
    value = schema[keyword]
    match keyword:
        case "$dynamicAnchor" | "$recursiveAnchor":
            return True
        case "uniqueItems" | "not":
            return value is False
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return value == {}
        case "unevaluatedItems" | "unevaluatedProperties":
            return value is True or value == {}
        case "if":
            return not {"then", "else"} & schema.keys()
        case "then" | "else":
            return "if" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema
    return False


def _without_names(made: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Write `propertyNames` as properties or a pattern of properties. Raises RequestError where that says
    another thing."""
    if "propertyNames" not in made:
        return made
    allowed = _names(made.pop("propertyNames"), root)
    known, others = made.get("properties", {}), made.get("additionalProperties", True)
    if allowed is None:
        return made
    if not isinstance(known, dict) or "patternProperties" in made:
        raise refused_schema("propertyNames beside patternProperties: not supported in a JSON schema")
    known = {name: each for name, each in known.items() if _is_allowed(name, allowed)}
    if lost := [name for name in made.get("required", ()) if not _is_allowed(str(name), allowed)]:
        raise refused_schema(f"propertyNames excludes {lost[0]!r}, which is required")
    if isinstance(allowed, str):
        patterns = {} if others is False else {"patternProperties": {allowed: others}}
        shown = {"properties": known} if known else {}
        made = {keyword: value for keyword, value in made.items() if keyword != "properties"}
        return {**made, **shown, **patterns, "additionalProperties": False}
    new = {name: others for name in allowed if others is not False and name not in known}
    return {**made, "properties": {**known, **new}, "additionalProperties": False}


def _is_allowed(name: str, allowed: list[str] | str) -> bool:
    return bool(re.search(allowed, name)) if isinstance(allowed, str) else name in allowed


def _names(schema: Any, root: dict[str, Any], depth: int = 0) -> list[str] | str | None:
    """Return the names that a schema of names allows, or their pattern; None for all. Raises RequestError for
    other schemas."""
    refused = refused_schema(f"propertyNames: not supported in a JSON schema; supported are {_NAME_FORMS}")
    if schema is True:
        return None
    if schema is False:
        return []
    if (
        not isinstance(schema, dict)
        or json_type(schema.get("type", "string")) != "string"
        or depth > MAX_REFS
    ):
        raise refused
    told = {word: value for word, value in schema.items() if word not in ANNOTATIONS and word != "type"}
    if told.keys() <= {"minLength", "maxLength"}:
        if not all(isinstance(length, int) and 0 <= length <= MAX_NAME_CHARS for length in told.values()):
            raise refused
        return f"^[\\s\\S]{{{told.get('minLength', 0)},{told.get('maxLength', '')}}}$" if told else None
    match told if len(told) == 1 else {}:
        case {"$ref": str(ref)}:
            return _names(_referred(ref, root), root, depth + 1)
        case {"allOf": [part]}:
            return _names(part, root, depth + 1)
        case {"anyOf": list(parts)} | {"oneOf": list(parts)}:
            found = [_names(part, root, depth + 1) for part in parts]
            if not all(isinstance(each, list) for each in found):
                raise refused
            every = [name for each in found for name in each or ()]
            return [name for name in dict.fromkeys(every) if "anyOf" in told or every.count(name) == 1]
        case {"const": value}:
            return [value] if isinstance(value, str) else []
        case {"enum": list(values)}:
            return [value for value in values if isinstance(value, str)]
        case {"pattern": str(pattern)} if _is_regex(pattern):
            return pattern
    raise refused


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _referred(ref: str, root: dict[str, Any]) -> Any:
    """Return the schema that a reference within a schema points to. Raises RequestError if there is none."""
    found: Any = root
    for step in ref.split("/")[1:] if ref.startswith("#/") else [ref]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or step not in found:
            raise refused_schema(f"propertyNames: $ref {ref[:100]} points to nothing in the schema")
        found = found[step]
    return found
