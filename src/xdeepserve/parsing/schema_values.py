"""Meaning of a parameter's text where calls are tags and not JSON: whether `5` is a number or a text.

The schema of the function decides. `Allowed` is what a schema says of a value's kind, after `$ref`, `allOf`,
`anyOf`, `oneOf`, lists of types, `enum`, `const` and `nullable`; other keywords do not tell kinds apart. A
parameter is declared by `properties`, `patternProperties` or, without these, `additionalProperties`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeAlias
from urllib.parse import unquote

from xdeepserve.parsing.loose_json import json_text, read_loosely

Allowed: TypeAlias = Mapping[str, tuple[Any, ...] | None]
"""Kind of JSON -> the values that are allowed of it; None allows all."""

ANY: Allowed = dict.fromkeys(("string", "integer", "number", "boolean", "null", "array", "object"))
NUMBERS = ("integer", "number")
MAX_DEPTH = 50  # of schemas within schemas: what is deeper says nothing


# Well-known names of types beside JSON's own, which may also be in capitals (Gemini).
_SPELLINGS = {
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "long"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double", "decimal"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("none", "nonetype"), "null"),
    **dict.fromkeys(("list", "tuple", "set"), "array"),
    **dict.fromkeys(("dict", "map"), "object"),
}


def json_type(name: Any) -> Any:
    """Return JSON Schema's name of a type, be it written `int`, `INTEGER` or `list[int]`; others stay."""
    if not isinstance(name, str) or name in ANY:
        return name
    plain = name.partition("[")[0].strip().lower()
    found = "array" if name.endswith("[]") else _SPELLINGS.get(plain, plain)
    return found if found in ANY else name


class FunctionSchema:
    """Schema of a function's arguments."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._by_ref: dict[str, Allowed | None] = {}
        self._by_key: dict[str, Allowed | None] = {}
        parts = list(self._parts(schema, set()))
        self.names = frozenset(name for each in parts for name in _mapping(each, "properties"))
        self._patterns = [pattern for each in parts for pattern in _mapping(each, "patternProperties")]

    def declares(self, name: str) -> bool:
        """Whether a call may have such a parameter; a schema that names none declares all."""
        is_one = name in self.names or any(_matches(pattern, name) for pattern in self._patterns)
        return is_one or not self.names

    def json_of(self, name: str, text: str, is_text: bool | None = None) -> str:
        """Return the JSON of a parameter's text. `is_text` is what the model says of it, if anything."""
        allowed = self.parameter(name)
        as_text, read = json_text(text), read_loosely(text)
        if (
            read is not None
            and is_text is None
            and allowed == ANY
            and not read[1]
            and text.strip()[0] not in "[{"
        ):
            read = None  # `True`, 'a', +49 and (52.5, 13.4) of no known kind are words
        value = None if read is None else read[0]
        is_unknown = allowed == ANY and name not in self.names
        is_number = value is not None and _kind(json.loads(value)) in NUMBERS
        # A zip code that may be a text is one.
        prefers_text = (
            is_plain_text(allowed) or (is_number and not is_unknown) if is_text is None else is_text
        )
        order = [as_text, value] if prefers_text else [value, as_text]
        order.append(json_text(text.strip()))
        for each in order:
            if each is not None and _admits(allowed, json.loads(each)):
                return each
        return value if value is not None and not is_text and "string" not in allowed else as_text

    def parameter(self, name: str) -> Allowed:
        """Return the kinds that a parameter may have, in whatever branch the schema declares it."""
        if name not in self._by_key:
            self._by_key[name] = self._declared(self._root, name, set())
        found = self._by_key[name]
        return ANY if found is None else found

    def allowed(self, schema: Any, depth: int = 0) -> Allowed | None:
        """Return the kinds that a schema within this one allows; None if it says nothing of kinds."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return None
        said: list[Allowed | None] = []
        if isinstance(kinds := schema.get("type"), str | list):
            names = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if isinstance(kind, str)]
            names = list(map(json_type, names))
            named = {kind for kind in names if kind in ANY} | ({"integer"} if "number" in names else set())
            named |= {"null"} if schema.get("nullable") is True else set()
            said.append(dict.fromkeys(sorted(named)) or None)
        if "const" in schema or isinstance(schema.get("enum"), list):
            said.append(
                _values(schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]])
            )
        if isinstance(ref := schema.get("$ref"), str):
            if ref not in self._by_ref:
                self._by_ref[ref] = None  # so says what refers to itself
                self._by_ref[ref] = self.allowed(self._at(ref), depth + 1)
            said.append(self._by_ref[ref])
        said += [self.allowed(each, depth + 1) for each in _list(schema, "allOf")]
        for keyword in ("anyOf", "oneOf"):
            options = [self.allowed(each, depth + 1) for each in _list(schema, keyword)]
            said.append(None if None in options else _either(options))
        return _both(said)

    def _declared(self, schema: Any, name: str, seen: set[str], depth: int = 0) -> Allowed | None:
        """Return the kinds that a schema of arguments allows a parameter; None if it declares no such one."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return None
        said: list[Allowed | None] = []
        if name in (properties := _mapping(schema, "properties")):
            said.append(self.allowed(properties[name]) or ANY)
        patterns = _mapping(schema, "patternProperties").items()
        said += [self.allowed(each) or ANY for pattern, each in patterns if _matches(pattern, name)]
        if not said and isinstance(others := schema.get("additionalProperties"), dict):
            said.append(self.allowed(others))
        parts, branches = self._required_parts(schema, seen), _branches(schema)
        said += [self._declared(each, name, seen, depth + 1) for each in parts]
        said.append(_either([self._declared(each, name, seen, depth + 1) for each in branches]))
        return _both(said)

    def _parts(self, schema: Any, seen: set[str], depth: int = 0) -> Iterator[dict[str, Any]]:
        """Yield a schema of arguments, and those that it is composed of."""
        if isinstance(schema, dict) and depth <= MAX_DEPTH:
            yield schema
            for each in (*self._required_parts(schema, seen), *_branches(schema)):
                yield from self._parts(each, seen, depth + 1)

    def _required_parts(self, schema: dict[str, Any], seen: set[str]) -> list[Any]:
        """Return the schemas that hold together with this one. `seen` are references already followed."""
        parts = list(_list(schema, "allOf"))
        if isinstance(ref := schema.get("$ref"), str) and ref not in seen:
            seen.add(ref)
            parts.append(self._at(ref))
        return parts

    @cached_property
    def _named(self) -> dict[str, Any]:
        """Schemas within this one, itself among them, by what references call them: `$id`, # and `$anchor`,
        or both; "" for this one."""
        found: dict[str, Any] = {}
        todo: list[tuple[str, Any]] = [("", self._root)]
        while todo:
            base, each = todo.pop()
            if isinstance(each, dict):
                if isinstance(own := each.get("$id"), str):
                    base = own.removesuffix("#")
                    found.setdefault(base, each)
                for key in ("$anchor", "$dynamicAnchor"):
                    if isinstance(name := each.get(key), str):
                        found.setdefault(f"{base}#{name}", each)
                        found.setdefault(f"#{name}", each)
                todo += ((base, value) for value in each.values())
            elif isinstance(each, list):
                todo += ((base, value) for value in each)
        return {**found, "": self._root}

    def _at(self, ref: str) -> Any:
        """Return the schema that a reference points to; None if it is not within this one."""
        base, _, pointer = unquote(ref).partition("#")
        is_name = pointer and not pointer.startswith("/")
        found = self._named.get(f"{base}#{pointer}" if is_name else base)
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                found = found.get(key) if isinstance(found, dict) else None
        return found


def _matches(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern of a schema. Patterns whose search could take long match nothing."""
    try:
        return not _SLOW.search(pattern) and re.search(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return False


# Repeated groups, references to groups, and more than two repetitions.
_SLOW = re.compile(r"\)[*+?{]|\\[1-9]|([*+?{].*){3}", re.DOTALL)


def is_plain_text(allowed: Allowed | None) -> bool:
    """Whether a schema allows nothing but texts."""
    return allowed is not None and allowed.keys() == {"string"}


def _branches(schema: dict[str, Any]) -> list[Any]:
    """Return the schemas of which one or another holds."""
    either = [each for name in ("anyOf", "oneOf") for each in _list(schema, name)]
    either += [schema[name] for name in ("then", "else") if name in schema]
    return either + list(_mapping(schema, "dependentSchemas").values())


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _mapping(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    found = schema.get(keyword)
    return found if isinstance(found, dict) else {}


def _values(values: Iterable[Any]) -> Allowed:
    found: dict[str, tuple[Any, ...]] = {}
    for value in values:
        found[_kind(value)] = (*found.get(_kind(value), ()), value)
    return found


def _either(options: Iterable[Allowed | None]) -> Allowed | None:
    """Return the kinds that any of the options allows; None where none says anything."""
    known = [option for option in options if option is not None]
    found: dict[str, tuple[Any, ...] | None] = {}
    for option in known:
        for kind, values in option.items():
            old = found.get(kind, ())
            found[kind] = None if values is None or old is None else (*old, *values)
    return found if known else None


def _both(said: Iterable[Allowed | None]) -> Allowed | None:
    """Return the kinds that all allow; where they exclude each other, those that any allows."""
    known = [each for each in said if each is not None]
    if not known:
        return None
    found = dict(known[0])
    for each in known[1:]:
        shared = {kind: _shared(found[kind], each[kind]) for kind in found if kind in each}
        found = {kind: values for kind, values in shared.items() if values != ()}
    return found or _either(known)


def _shared(left: tuple[Any, ...] | None, right: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if left is None or right is None:
        return right if left is None else left
    return tuple(value for value in left if value in right)


def _admits(allowed: Allowed, value: Any) -> bool:
    kind = _kind(value)
    if kind not in allowed:
        return False
    values = allowed[kind]
    return values is None or value in values


def _kind(value: Any) -> str:
    """Return a value's kind; a number without a fraction is an integer, however it is written."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return _KINDS.get(type(value), "null")


_KINDS = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
