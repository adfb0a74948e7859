"""Request bodies: converts bytes to a checked Struct, or raises a RequestError that says where and why."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from aiohttp import web

from xdeepserve.api.routes.fields import IGNORED, FieldPlace, Fields, has_untyped, place_of
from xdeepserve.api.server.endpoint import ENDPOINT
from xdeepserve.api.server.http_errors import ApiError
from xdeepserve.errors import RequestError, abridged, meant

BODY_SECONDS = 30.0  # of wall time for a client to send its whole body
ENCODINGS = ("identity", "gzip", "deflate")  # surely; what else aiohttp decodes depends on what is installed
_DECODED = (*ENCODINGS, "br", "zstd")  # of these, what comes here has been decoded

# msgspec has Python's words for types.
JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_TYPES = re.compile(rf"(?<=[`| ])(?:{'|'.join(JSON_TYPES)})(?=[`| ])")

T = TypeVar("T", bound=msgspec.Struct)
AnyT = TypeVar("AnyT")

# msgspec ends a message with "- at `$.messages[0].role`", and names an absent field in backquotes.
_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>[^`]*)`")
_MAY_BE_RIGHT = re.compile(
    r"^Object contains unknown field |^Expected `int|^Object missing required field `function`"
)
_ENUM = re.compile(r"^Invalid enum value ")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]+)`")


async def read_body(request: web.Request, schema: type[T]) -> T:
    """Read the request's JSON object as a `schema`. Its content type has been checked before
    (api/server/access.py).

    Raises RequestError for bytes that are not UTF-8, not JSON, not of the schema's types, or with a field
    that is refused (api/routes/fields.py). Raises ApiError for an unknown encoding.
    """
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in _DECODED:
        raise ApiError(
            415,
            f"the Content-Encoding of a body must be one of {', '.join(ENCODINGS)}, "
            f"found {abridged(encoding)}",
        )
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await request.read()
    except TimeoutError:
        raise ApiError(
            408, f"the request body did not come within {BODY_SECONDS:g} s", code="request_timeout"
        ) from None
    except web.RequestPayloadError as exc:
        reason = " ".join(str(exc).split())
        raise RequestError(f"the request body could not be read: {reason}") from exc
    if not data.strip():
        raise RequestError("the request body is empty: a JSON object is expected")
    try:
        return _decoded(data, schema, request)
    except msgspec.ValidationError as exc:
        raise mistyped(str(exc), schema) from exc
    except UnicodeDecodeError as exc:
        raise RequestError(f"the request body is not UTF-8: {exc.reason}") from exc
    except RecursionError as exc:
        raise RequestError("the request body is nested too deeply") from exc
    except msgspec.DecodeError as exc:
        raise RequestError(f"the request body is not valid JSON: {exc}") from exc


def _decoded(data: bytes, schema: type[T], request: web.Request) -> T:
    """Decode JSON as a `schema`. Raises msgspec's errors, and RequestError for a field that is refused."""
    if not has_untyped(schema):
        try:
            return msgspec.json.decode(data, type=schema)
        except msgspec.ValidationError as error:
            if not _MAY_BE_RIGHT.match(str(error)):
                raise
    fields = request[IGNORED] = Fields(request.app[ENDPOINT].options.strict)
    return converted(msgspec.json.decode(data), schema, fields)


def converted(value: Any, schema: type[AnyT], fields: Fields | None = None) -> AnyT:
    """Convert `value`, from JSON, to a `schema`. Raises msgspec's errors, and RequestError for a field that
    is refused."""
    place: FieldPlace = place_of(schema)  # type: ignore[arg-type]  # a type is hashable
    return msgspec.convert((fields or Fields()).served(value, place), schema)


def judge_variables(request: web.Request, given: Mapping[str, Any] | None, known: frozenset[str]) -> None:
    """Name the variables of a request that the chat template does not read, as other ignored fields. Raises
    RequestError for one that is misspelt."""
    if given:
        fields = request[IGNORED] = request.get(IGNORED) or Fields(request.app[ENDPOINT].options.strict)
        fields.judge_variables(given, known)


def _choices(schema: Any, path: str) -> str:
    """List the allowed words of a field as the end of an error message; "" if its type is not a list of
    words.

    `path` leads to the field from an object of type `schema`, such as `tools[0].type`.
    """
    kinds = [schema]
    for name in re.findall(r"[^.\[\]]+", re.sub(r"\[[^\]]*\]", "", path)):
        structs = [
            kind for kind in _parts(kinds) if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        ]
        kinds = [hint for kind in structs if (hint := get_type_hints(kind).get(name)) is not None]
    words = [word for kind in _parts(kinds) if get_origin(kind) is Literal for word in get_args(kind)]
    return f": {' or '.join(map(str, words))}" if words else ""


def _parts(kinds: list[Any]) -> list[Any]:
    """Return the types, and the parts of those that are lists or unions."""
    inner = [each for kind in kinds if get_origin(kind) is not Literal for each in get_args(kind)]
    return kinds + _parts(inner) if inner else kinds


def mistyped(message: str, schema: type[msgspec.Struct], where: str = "") -> RequestError:
    """Turn msgspec's message about a JSON object, the body or a part of it at `where`, into a RequestError.

    `Expected `int`, got `str` - at `$.n`` becomes "n: expected `integer`, got `string`", with param "n".
    """
    found = _PATH.search(message)
    path = f"{where}{found['path']}".lstrip(".") if found else where
    reason = message[: found.start()] if found else message
    missing = _MISSING.match(reason)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        return RequestError(f"{path} is required", param=path)
    if unknown := _UNKNOWN.match(reason):
        name = unknown["field"]
        hint = "" if path else meant(name, schema.__struct_fields__)
        path = f"{path}.{name[:100]}" if path else name[:100]
        return RequestError(f"unknown field {path}{hint}", param=path, code="unknown_parameter")
    reason += _choices(schema, path.removeprefix(where).lstrip(".")) if _ENUM.match(reason) else ""
    reason = reason[:1].lower() + _TYPES.sub(lambda kind: JSON_TYPES[kind[0]], reason[1:])
    return RequestError(f"{path}: {reason}" if path else f"the request body: {reason}", param=path or None)
