"""Forms required of the text of a choice: vLLM's `StructuredOutputsParams`."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from xdeepserve.engine.dp.json_schema import json_rule
from xdeepserve.errors import RequestError, abridged

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_CHOICES = 1024


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """Form of a choice's text: exactly one field is given. Construction raises RequestError otherwise.

    json          a JSON schema, as an object or as its text: JSON that fulfils it
    json_object   any JSON object
    regex         a regular expression that the whole text matches
    choice        one of these texts
    grammar       a grammar in llguidance's dialect of Lark, whose start rule derives the whole text
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        defaults = zip(self.__struct_fields__, self.__struct_defaults__, strict=True)
        given = [name for name, default in defaults if _is_given(getattr(self, name), default)]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise _refused(f"must have exactly one of {', '.join(self.__struct_fields__)}, found {found}")
        value = getattr(self, given[0])
        if given == ["choice"]:
            self._check_choice(value)
        elif given == ["json"]:
            self._check_json(value)
        elif given == ["json_object"]:
            if value is not True:
                raise _refused(f"json_object must be true or false, found {abridged(value)}")
        elif not isinstance(value, str):
            raise _refused(f"{given[0]} must be a text, found {abridged(value)}")
        if len(self.key) > MAX_GRAMMAR_CHARS:
            raise _refused(f"{given[0]} may have at most {MAX_GRAMMAR_CHARS} characters")

    def _check_choice(self, value: Any) -> None:
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        if not is_list or not all(isinstance(text, str) and text for text in value):
            raise _refused(f"choice must be a list of texts, none empty, found {abridged(value)}")
        if len(value) > MAX_CHOICES:
            raise _refused(f"choice may have at most {MAX_CHOICES} texts, found {len(value)}")
        msgspec.structs.force_setattr(self, "choice", tuple(value))

    def _check_json(self, value: Any) -> None:
        try:
            schema = json.loads(value) if isinstance(value, str) else value
            if isinstance(schema, (dict, bool)):
                msgspec.structs.force_setattr(self, "json", json.dumps(schema))
                return
        except (ValueError, TypeError, RecursionError):
            pass
        raise _refused(f"json must be a JSON schema, found {abridged(value)}")

    @property
    def key(self) -> str:
        """Text for identifying the form, for example as a cache key."""
        return msgspec.json.encode(self).decode()

    @property
    def lark(self) -> str:
        """Return the form as a grammar, whose start rule matches the whole text."""
        return f"start: {self.term}" if self.grammar is None else self.grammar

    @property
    def term(self) -> str:
        """Return the form as a term of a grammar rule. Raises RequestError for a form that is a grammar
        itself."""
        if self.grammar is not None:
            raise _refused("grammar cannot be combined with tools")
        if self.json_object:
            return json_rule(_OBJECT)
        if self.json is not None:
            return json_rule(json.loads(str(self.json)))
        if self.choice:
            return "(" + " | ".join(map(literal, self.choice)) + ")"
        from llguidance import regex_to_lark

        return f"/{regex_to_lark(self.regex or '')}/"


_OBJECT = {"type": "object"}


def literal(text: str) -> str:
    """Return a term of a grammar rule that matches exactly this text."""
    return json.dumps(text)


def _is_given(value: Any, default: Any) -> bool:
    return value is not None and (type(value), value) != (type(default), default)


def _refused(reason: str) -> RequestError:
    return RequestError(f"structured_outputs {reason}", param="structured_outputs")
