"""A route of the endpoint: one row says who answers, who may ask, and what the documents tell about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

JSON, FORM = "application/json", "multipart/form-data"
PASSED_ON = "either"  # the server that answers in the end looks at it
OPENAI, ANTHROPIC = "OpenAI", "Anthropic"
READING = ("GET", "HEAD", "OPTIONS")  # all other methods change something or compute


class Route(msgspec.Struct, frozen=True, eq=False):
    """A method of a path. The server, the check of keys, the check of body types, /openapi.json and /docs all
    follow from these rows.

    is_open  answers without a key, also where the server has keys
    takes    content type of the body, if there is one
    errors   whose form errors have: OpenAI's or Anthropic's
    option   option of `ServerOptions` without which the server does not have the route
    body, answer, chunk, query   types for the documents; `chunk` is of a stream
    """

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None
    query: Mapping[str, dict[str, Any]] | None = None
    is_open: bool = False
    takes: str = JSON
    errors: str = OPENAI
    option: str | None = None

    @property
    def canonical(self) -> str:
        """The path as documents write it: without the expressions of its variables."""
        return self.path.replace(":.+}", "}").replace(":.*}", "}")


ROUTES = web.AppKey("ROUTES", tuple[Route, ...])


def add_routes(app: web.Application, routes: tuple[Route, ...]) -> None:
    """Add routes to a server, whose checks and documents then follow from the rows."""
    app[ROUTES] = routes
    for each in routes:
        for method in ("GET", "HEAD") if each.method == "GET" else (each.method,):
            app.router.add_route(method, each.path, each.handler)


def route_of(request: web.Request) -> Route | None:
    """Find the row of a request; None where no route answers."""
    resource = request.match_info.route.resource
    if resource is None:
        return None
    method = "GET" if request.method == "HEAD" else request.method
    rows = [each for each in request.app[ROUTES] if each.canonical == resource.canonical]
    return next((each for each in rows if each.method in (method, "*")), None)
