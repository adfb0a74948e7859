"""Descriptions for /openapi.json of fields checked by hand, with better words than a type has."""

from __future__ import annotations

from typing import Any

import msgspec


def described(*kinds: dict[str, Any]) -> msgspec.Meta:
    """Describe a field for /openapi.json that is checked elsewhere, with better words."""
    return msgspec.Meta(extra_json_schema={"anyOf": [*kinds, {"type": "null"}]})


OBJECT, TEXT = {"type": "object"}, {"type": "string"}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
SCHEMA = {"type": "object", "properties": {"name": TEXT, "schema": OBJECT}, "required": ["schema"]}
FORMATS = ("text", "json_object", "json_schema")
FORMAT = {
    "type": "object",
    "properties": {"type": {"enum": FORMATS}, "schema": OBJECT, "json_schema": SCHEMA},
    "required": ["type"],
}
FORM = {
    "type": "object",
    "properties": {
        "json": {"anyOf": [OBJECT, TEXT]},
        "json_object": {"type": "boolean"},
        "regex": TEXT,
        "choice": TEXTS,
        "grammar": TEXT,
    },
}
