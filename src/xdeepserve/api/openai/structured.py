"""Structured output in the spellings of OpenAI and of vLLM, converted to a single form."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from aiohttp import web

from xdeepserve.api.openai.requests import GenerationRequest
from xdeepserve.api.routes.fields import note_ignored
from xdeepserve.engine.dp.json_schema import unread_words
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.engine.serving.request import Parse
from xdeepserve.errors import RequestError, abridged, meant

# vLLM's older names, and the fields of `structured_outputs` that they became.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# What vLLM's object has beside its form; these values ask for what is done anyway.
_NEUTRAL = {
    "disable_fallback": (None, False, True),
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
    "whitespace_pattern": (None,),
    "structural_tag": (None,),
}
# What json_schema has beside its schema: type, and what a message calls it.
_BESIDE_SCHEMA: dict[str, tuple[type, str]] = {
    "name": (str, "a string"),
    "description": (str, "a string"),
    "strict": (bool, "true or false"),
}
# What response_format has beside its type. A schema in json_object is llama.cpp's spelling.
_FORMATS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}


def requested_form(body: GenerationRequest) -> tuple[StructuredOutputsParams | None, str]:
    """Return the required form of a choice's text, and the name of the field that requires it, which errors
    blame."""
    found: list[tuple[StructuredOutputsParams, str]] = []
    for name in ("response_format", "structured_outputs", *GUIDED):
        value = getattr(body, name)
        if value is None:
            continue
        try:
            form = _read(name, value)
        except RequestError as error:
            param = error.param if (error.param or "").startswith(f"{name}.") else name
            raise RequestError(str(error), param=param, code=error.code) from None
        if form is not None and all(form != other for other, _ in found):  # Guidance sends its form twice
            found.append((form, name))
    if len(found) > 1:
        names = " and ".join(name for _, name in found)
        raise RequestError(f"{names} cannot be combined", param=found[1][1])
    return found[0] if found else (None, "structured_outputs")


def note_unread_words(request: web.Request, params: SamplingParams, parse: Parse) -> None:
    """Note the words without effect in schemas that a request asks its answer to follow."""
    form, rules = params.structured_outputs, parse.tool_rules
    words = [f"schema.{word}" for word in (unread_words(str(form.json)) if form and form.json else ())]
    for function in rules.functions if rules else ():
        words += [f"tools.parameters.{word}" for word in unread_words(function.parameters)]
    note_ignored(request, words)


def _read(name: str, value: Any) -> StructuredOutputsParams | None:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return StructuredOutputsParams(**{GUIDED[name]: value})


def _response_format(value: Any) -> StructuredOutputsParams | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _FORMATS:
        known = "text, json_object or json_schema"
        param = "response_format.type" if isinstance(value, dict) else "response_format"
        found = kind if isinstance(value, dict) else value
        raise RequestError(f"response_format.type must be {known}, found {abridged(found)}", param=param)
    refuse_unknown("response_format", value, ("type", *_FORMATS[kind]))
    if kind == "text":
        return None
    where, described = "response_format", value
    if kind == "json_schema":
        where, described = "response_format.json_schema", value.get("json_schema")
        _check_types(where, described)
    schema = described.get("schema")
    if schema is None and kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if not isinstance(schema, dict):
        param = f"{where}.schema"
        raise RequestError(f"{param} must be an object, found {abridged(schema)}", param=param)
    return StructuredOutputsParams(json=schema)


def _check_types(where: str, described: Any) -> None:
    """Raise RequestError for a `json_schema` with wrong fields; its schema is checked elsewhere."""
    if not isinstance(described, dict):
        raise RequestError(f"{where} must be an object, found {abridged(described)}", param=where)
    refuse_unknown(where, described, ("schema", *_BESIDE_SCHEMA))
    for name, (kind, what) in _BESIDE_SCHEMA.items():
        value = described.get(name)
        if value is not None and not isinstance(value, kind):
            param = f"{where}.{name}"
            raise RequestError(f"{param} must be {what}, found {abridged(value)}", param=param)


def refuse_unknown(where: str, value: Any, known: Collection[str]) -> None:
    """Raise RequestError for an unknown field of an object that is not null."""
    for name, each in value.items() if isinstance(value, dict) else ():
        if name not in known and each is not None:
            path = f"{where}.{name[:100]}"
            raise RequestError(
                f"unknown field {path}{meant(name, known)}", param=path, code="unknown_parameter"
            )


def _structured_outputs(value: Any) -> StructuredOutputsParams | None:
    if not isinstance(value, dict):
        raise RequestError(f"structured_outputs must be an object, found {abridged(value)}")
    form = {}
    for name, each in value.items():
        if name in StructuredOutputsParams.__struct_fields__:
            if each is not None:
                form[name] = each
        elif name not in _NEUTRAL:
            raise RequestError(f"structured_outputs has no {abridged(name)}")
        elif each not in _NEUTRAL[name]:
            raise RequestError(f"structured_outputs.{name} is not supported", code="unsupported_parameter")
    return StructuredOutputsParams(**form) if form else None
