"""GET /openapi.json and /docs: requests and answers of the endpoint, derived from the types that it decodes
with."""

from __future__ import annotations

import html
import json
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from xdeepserve import __version__
from xdeepserve.api.routes.fields import CHANGES, HARMLESS, OURS, refusals
from xdeepserve.api.routes.route import ROUTES, Route
from xdeepserve.api.server.http_errors import ErrorBody

KEY = {"type": "http", "scheme": "bearer"}
REF = "#/components/schemas/{name}"


UNSERVED = "Known, and refused unless it asks for nothing."
UNREAD = "Taken, and changes nothing."


@cache
def openapi(routes: tuple[Route, ...]) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of the routes of a server."""
    types = [t for each in routes for t in (each.body, each.answer, each.chunk) if t is not None]
    _, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=REF)
    for name, schema in components.items():
        told = schema.setdefault("properties", {})
        for field, unserved in refusals(name).items():
            known = {"default": None, "enum": [None, *unserved.neutral], "description": UNSERVED}
            told.setdefault(field, known)
        for field in {*HARMLESS.get(name, ()), *OURS.get(name, ())}:
            told.setdefault(field, {"default": None, "description": UNREAD})
        if name in CHANGES:  # others are ignored, and named in x-ignored-fields
            schema.pop("additionalProperties", None)
    paths: dict[str, dict[str, Any]] = {}
    for each in routes:
        paths.setdefault(each.canonical, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "xdeepserve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": KEY},
        },
    }


def _operation(each: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if each.answer is not None:
        content["application/json"] = _schema(each.answer)
    if each.chunk is not None:
        content["text/event-stream"] = _schema(each.chunk)
    answers = {"200": {"description": "OK", **({"content": content} if content else {})}}
    name = f"{each.method.lower()} {each.canonical}"
    operation: dict[str, Any] = {"summary": each.summary, "operationId": name}
    names = [part[1:-1] for part in each.canonical.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    for name, schema in (each.query or {}).items():
        parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    if parameters:
        operation["parameters"] = parameters
    if not each.is_open:
        operation["security"] = [{}, {"key": []}]
    if each.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(each.body)}}
    answers["default"] = {"description": "Error", "content": {"application/json": _schema(ErrorBody)}}
    return {**operation, "responses": answers}


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": REF.format(name=kind.__name__)}}


async def show_openapi(request: web.Request) -> web.Response:
    return web.json_response(openapi(request.app[ROUTES]))


async def show_docs(request: web.Request) -> web.Response:
    """Show the content of /openapi.json for people: a page without scripts."""
    schemas = openapi(request.app[ROUTES])["components"]["schemas"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>xdeepserve</title>",
        "<style>body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td,th{text-align:left;vertical-align:top;padding:.1em 1em .1em 0}code{font-size:.9em}</style>",
        f"<h1>xdeepserve {html.escape(__version__)}</h1>",
        "<p>OpenAI's API with vLLM's extensions. For machines: <a href=openapi.json>openapi.json</a>.</p>",
    ]
    for each in request.app[ROUTES]:
        parts.append(
            f"<h2><code>{each.method} {each.canonical}</code></h2><p>{html.escape(each.summary)}</p>"
        )
        if each.body is not None:
            parts.append(_table(schemas[each.body.__name__]))
    return web.Response(text="".join(parts), content_type="text/html")


def _table(schema: dict[str, Any]) -> str:
    """Format the fields of a request, required ones first; then the names of fields without effect."""
    required, fields = schema.get("required", ()), schema["properties"]
    served = [name for name in fields if "description" not in fields[name]]
    rows = []
    for name in sorted(served, key=lambda name: (name not in required, name)):
        kinds = [kind.get("type") or kind.get("$ref", "any").rsplit("/")[-1] for kind in _kinds(fields[name])]
        default = "required" if name in required else json.dumps(fields[name].get("default"))
        shown = html.escape(" or ".join(map(str, kinds)))
        rows.append(f"<tr><td><code>{html.escape(name)}</code><td>{shown}<td>{html.escape(default)}")
    table = f"<table><tr><th>field<th>type<th>default{''.join(rows)}</table>"
    for text in (UNREAD, UNSERVED):
        names = [f"<code>{name}</code>" for name in fields if fields[name].get("description") == text]
        table += f"<p>{text} {', '.join(names)}</p>" if names else ""
    return table


def _kinds(field: dict[str, Any]) -> list[dict[str, Any]]:
    return field.get("anyOf") or [field]
