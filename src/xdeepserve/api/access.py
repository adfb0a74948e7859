"""Who may call: API keys, and web pages of other origins (CORS)."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from xdeepserve.api.http_errors import ApiError
from xdeepserve.api.options import ServerOptions

GUARDED = ("/v1/", "/tokenize", "/detokenize", "/admin/", "/page/frames", "/page/bytes", "/page/break")
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Max-Age": "600",
}


def key_middleware(options: ServerOptions) -> Middleware:
    """401 for a request to the model without one of the keys."""
    keys = [key.encode() for key in options.api_keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if keys and request.path.startswith(GUARDED):
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            sent = given.strip().encode("utf-8", "surrogateescape")
            # Every key is compared, and each in the same time, whatever was sent.
            matches = [hmac.compare_digest(sent, key) for key in keys]
            if scheme.lower() != "bearer" or not any(matches):
                raise ApiError(
                    401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key"
                )
        return await handler(request)

    return check


def cors_middleware(options: ServerOptions) -> Middleware:
    """Answers a browser's question before a request (preflight). Needs no key: browsers send none with it."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if options.allowed_origins and is_preflight:
            asked = request.headers.get("Access-Control-Request-Headers")
            more = {} if asked is None else {"Access-Control-Allow-Headers": asked}
            return web.Response(status=204, headers={**_PREFLIGHT, **more})
        return await handler(request)

    return answer


def add_cors_headers(request: web.Request, response: web.StreamResponse, options: ServerOptions) -> None:
    """Let a page of an allowed origin read the answer, streams and errors included."""
    origin = request.headers.get("Origin")
    if origin is not None and ("*" in options.allowed_origins or origin in options.allowed_origins):
        response.headers["Access-Control-Allow-Origin"] = "*" if "*" in options.allowed_origins else origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id"
        response.headers["Vary"] = "Origin"
