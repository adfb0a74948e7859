"""GET /openapi.json and /docs: requests and answers of the endpoint, derived from the types that it decodes
with."""

from __future__ import annotations

import html
import json
from functools import cache
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from xdeepserve import __version__
from xdeepserve.api import requests as asked
from xdeepserve.api import responses as given
from xdeepserve.api.agent_door import CreateAgentJob
from xdeepserve.api.http_errors import ErrorBody
from xdeepserve.api.input_items import PAGE_QUERY
from xdeepserve.api.job_door import CreateJob
from xdeepserve.api.page_door import BYTES_QUERY
from xdeepserve.api.response_items import REFUSED, ResponsesRequest
from xdeepserve.page.breaking import Breaking, Broken
from xdeepserve.page.die_bytes import DieBytes

REF = "#/components/schemas/{name}"


# Requests that generate, and their fields that are known and not served, with values that ask for nothing.
GENERATING: dict[type[msgspec.Struct], dict[str, tuple[Any, ...]]] = {
    asked.ChatRequest: asked.NEUTRAL | asked.NOT_FOR_CHATS,
    asked.CompletionRequest: asked.NEUTRAL,
    ResponsesRequest: asked.NEUTRAL | REFUSED,
}
# Others that take fields which change nothing, and those fields.
UNREAD_IN: dict[type[msgspec.Struct], tuple[str, ...]] = {
    **dict.fromkeys(
        (*GENERATING, asked.TokenizeRequest, asked.DetokenizeRequest), asked.Harmless.__struct_fields__
    ),
    **dict.fromkeys((asked.ChatMessage, asked.ContentPart, asked.ToolCall), asked.FedBack.__struct_fields__),
    asked.FunctionCall: asked.FedBack.__struct_fields__,
    **dict.fromkeys((asked.Tool, asked.FunctionDefinition), asked.CacheMarked.__struct_fields__),
}
UNSERVED = "Known, and refused unless it asks for nothing."
UNREAD = "Taken, and changes nothing."


class Operation(NamedTuple):
    """An operation of the API: a method of a path."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None  # of the stream that `stream: true` asks for
    query: dict[str, dict[str, Any]] | None = None  # schemas of what may stand behind the path's "?"


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        asked.ChatRequest,
        given.ChatCompletion,
        given.ChatChunk,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Go on with texts or token ids.",
        asked.CompletionRequest,
        given.TextCompletion,
        given.TextCompletion,
    ),
    Operation("post", "/v1/responses", "Answer, and go on from an earlier answer.", ResponsesRequest),
    Operation("get", "/v1/responses/{id}", "An answer that was kept."),
    Operation("delete", "/v1/responses/{id}", "Forget it."),
    Operation(
        "get", "/v1/responses/{id}/input_items", "What its request brought, in pages.", query=PAGE_QUERY
    ),
    Operation("post", "/v1/responses/{id}/cancel", "Always refused: none runs in the background."),
    Operation("get", "/v1/models", "The models, under all their names.", answer=given.ModelList),
    Operation("get", "/v1/models/{model}", "One of them.", answer=given.ModelCard),
    Operation("delete", "/v1/models/{model}", "A model that a job has made goes."),
    Operation("post", "/v1/files", "Keep a file of examples: a form with file and purpose."),
    Operation("get", "/v1/files", "All files, in pages.", query=PAGE_QUERY),
    Operation("get", "/v1/files/{id}", "A file."),
    Operation("get", "/v1/files/{id}/content", "What was uploaded."),
    Operation("delete", "/v1/files/{id}", "Forget it."),
    Operation("post", "/v1/fine_tuning/jobs", "Quantise or fine-tune it (xdeepserve docs jobs).", CreateJob),
    Operation("get", "/v1/fine_tuning/jobs", "All jobs, in pages.", query=PAGE_QUERY),
    Operation("get", "/v1/fine_tuning/jobs/{id}", "A job, with its tasks."),
    Operation(
        "get", "/v1/fine_tuning/jobs/{id}/events", "What has happened to it, in pages.", query=PAGE_QUERY
    ),
    Operation("post", "/v1/fine_tuning/jobs/{id}/cancel", "End it."),
    Operation(
        "post", "/v1/agent/jobs", "An agent chats and calls tools (xdeepserve docs jobs).", CreateAgentJob
    ),
    Operation("get", "/v1/agent/jobs", "All agents, in pages.", query=PAGE_QUERY),
    Operation("get", "/v1/agent/jobs/{id}", "An agent, with its turns."),
    Operation("get", "/v1/agent/jobs/{id}/events", "What has happened to it, in pages.", query=PAGE_QUERY),
    Operation("post", "/v1/agent/jobs/{id}/cancel", "End it."),
    Operation(
        "post", "/tokenize", "Token ids of a text or a chat.", asked.TokenizeRequest, given.TokenizeResponse
    ),
    Operation(
        "post", "/detokenize", "The text of token ids.", asked.DetokenizeRequest, given.DetokenizeResponse
    ),
    Operation(
        "get", "/health", "Whether the engine can serve, its TEs and their DP groups.", answer=given.Health
    ),
    Operation("get", "/ping", "Whether the engine can serve."),
    Operation("get", "/load", "How many sequences it holds.", answer=given.ServerLoad),
    Operation("get", "/version", "The version.", answer=given.Version),
    Operation("get", "/metrics", "Metrics in Prometheus' text format."),
    Operation("get", "/", "The page to watch."),
    Operation("get", "/page/{file}", "A part of that page."),
    Operation("get", "/page/frames", "What it draws: a stream of events (xdeepserve docs page)."),
    Operation("get", "/page/bytes", "What lies in a die's memory.", answer=DieBytes, query=BYTES_QUERY),
    Operation("post", "/page/break", "A die fails; where the server allows it.", Breaking, Broken),
)


@cache
def openapi() -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of the endpoint."""
    types = [t for each in OPERATIONS for t in (each.body, each.answer, each.chunk) if t is not None]
    _, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=REF)
    for kind, refused in GENERATING.items():
        fields = components[kind.__name__]["properties"]
        for name, neutral in refused.items():
            fields[name] |= {"enum": [None, *neutral], "description": UNSERVED}
    for kind, unread in UNREAD_IN.items():
        for name in set(unread) - set(kind.__annotations__):
            components[kind.__name__]["properties"][name]["description"] = UNREAD
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "xdeepserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(each: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if each.answer is not None:
        content["application/json"] = _schema(each.answer)
    if each.chunk is not None:
        content["text/event-stream"] = _schema(each.chunk)
    answers = {"200": {"description": "OK", **({"content": content} if content else {})}}
    operation: dict[str, Any] = {"summary": each.summary, "operationId": f"{each.method} {each.path}"}
    names = [part[1:-1] for part in each.path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    for name, schema in (each.query or {}).items():
        parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    if parameters:
        operation["parameters"] = parameters
    if each.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(each.body)}}
    answers["default"] = {"description": "Error", "content": {"application/json": _schema(ErrorBody)}}
    return {**operation, "responses": answers}


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": REF.format(name=kind.__name__)}}


async def show_openapi(request: web.Request) -> web.Response:
    return web.json_response(openapi())


async def show_docs(request: web.Request) -> web.Response:
    """Show the content of /openapi.json for people: a page without scripts."""
    schemas = openapi()["components"]["schemas"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>xdeepserve</title>",
        "<style>body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td,th{text-align:left;vertical-align:top;padding:.1em 1em .1em 0}code{font-size:.9em}</style>",
        f"<h1>xdeepserve {html.escape(__version__)}</h1>",
        "<p>OpenAI's API with vLLM's extensions. For machines: <a href=openapi.json>openapi.json</a>.</p>",
    ]
    for each in OPERATIONS:
        parts.append(
            f"<h2><code>{each.method.upper()} {each.path}</code></h2><p>{html.escape(each.summary)}</p>"
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
