"""Errors as OpenAI's error body: every failure becomes {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from msgspec import UNSET, UnsetType

from xdeepserve.api.answers.generation import GENERATION
from xdeepserve.api.routes.route import ANTHROPIC, ROUTES, route_of
from xdeepserve.errors import (
    InputError,
    OverloadedError,
    RequestError,
    TransferError,
    XDeepServeError,
    meant,
)

MAX_BODY_BYTES = 1 << 20  # of a request, or more where the context holds more
BYTES_PER_TOKEN = 32  # of a body: a token id takes 8, a word of ASCII about 5, one of escaped characters 18
RETRY_AFTER_S = 1  # a hint for clients; the queue may be longer or shorter then

# Paths of other servers, and all below them: the most similar path here would do something else.
_TEXT_ONLY = ": the models here generate text only"
_UNSERVED = {
    **dict.fromkeys(("/v1/assistants", "/v1/threads"), ": assistants are not kept; use /v1/responses"),
    **dict.fromkeys(("/v1/audio", "/v1/embeddings", "/v1/images", "/v1/moderations"), _TEXT_ONLY),
    **dict.fromkeys(("/v1/rerank", "/v1/score", "/v1/videos"), _TEXT_ONLY),
    "/v1/batches": ": requests are answered at once, each by its own path",
    "/v1/conversations": ": conversations are not kept; use previous_response_id of /v1/responses",
    **dict.fromkeys(("/api/chat", "/api/generate"), ": Ollama's API is not served; use /v1/chat/completions"),
}

log = logging.getLogger("xdeepserve.api")
# What aiohttp logs by: not requests that are no HTTP, which are answered with a 400 like other bad ones.
protocol_log = logging.getLogger("xdeepserve.api.http")
protocol_log.addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
)


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object. `partial` has the text of each choice when the engine failed."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    partial: list[str] | UnsetType = UNSET


REFUSAL = web.RequestKey("REFUSAL", ErrorDetail)  # what a request has been answered instead


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(InputError):
    """An error with an HTTP status other than the 400 of a RequestError."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def describe(exc: Exception, request: web.Request) -> tuple[int, ErrorDetail]:
    """Return HTTP status and error object for any exception of a handler."""
    match exc:
        case OverloadedError():
            return 429, ErrorDetail(str(exc), type="rate_limit_error", param=exc.param, code=exc.code)
        case RequestError():
            return 400, ErrorDetail(str(exc), param=exc.param, code=exc.code)
        case ApiError():
            kind = "server_error" if exc.status >= 500 else "invalid_request_error"
            return exc.status, ErrorDetail(str(exc), type=kind, param=exc.param, code=exc.code)
        case web.HTTPNotFound():
            begin = "/".join(request.path.split("/")[:3])
            hint = _UNSERVED.get(begin) or meant(request.path, _paths(request))
            return 404, ErrorDetail(
                f"Invalid URL ({request.method} {request.path}){hint}", code="unknown_url"
            )
        case web.HTTPMethodNotAllowed():
            begin, _, last = request.path.rpartition("/")
            routes = [each.canonical for each in request.app[ROUTES] if each.method == request.method]
            within = [
                path for path in routes if path.startswith(f"{begin}/{{") and path.endswith(f"}}/{last}")
            ]
            allowed = " or ".join(within) or ", ".join(sorted(exc.allowed_methods))
            return 405, ErrorDetail(f"{request.method} is not allowed on {request.path}; try {allowed}")
        case web.HTTPRequestEntityTooLarge():
            most = request.client_max_size
            message = f"the request body is larger than {most} bytes: --max-body-bytes of serve allows more"
            return 413, ErrorDetail(message, code="request_too_large")
        case web.HTTPException():
            kind = "server_error" if exc.status >= 500 else "invalid_request_error"
            return exc.status, ErrorDetail(exc.reason, type=kind)
        case TransferError():
            return 503, ErrorDetail(str(exc), type="server_error", code="transfer_failed")
        case XDeepServeError():
            return 500, ErrorDetail(str(exc), type="server_error", code="engine_error")
        case _:
            return 500, ErrorDetail(f"internal error: {type(exc).__name__}: {exc}", type="server_error")


def _paths(request: web.Request) -> list[str]:
    """List the fixed paths of this server that accept the method of a request."""
    routes = request.app.router.routes()
    found = {each.resource.canonical for each in routes if each.method == request.method and each.resource}
    return sorted(path for path in found if "{" not in path)


def encode_error(detail: ErrorDetail) -> bytes:
    return msgspec.json.encode(ErrorBody(detail))


_ANTHROPICS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(status: int, detail: ErrorDetail) -> dict[str, Any]:
    """Convert an error to Anthropic's error body."""
    usual = "api_error" if status >= 500 else "invalid_request_error"
    return {"type": "error", "error": {"type": _ANTHROPICS.get(status, usual), "message": detail.message}}


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn any exception of a handler into a response. Cancellation passes, because the client has gone."""
    try:
        return await handler(request)
    except Exception as exc:
        if isinstance(exc, web.HTTPException) and exc.status < 400:
            raise
        status, detail = describe(exc, request)
        if status >= 500 and not isinstance(
            exc, XDeepServeError
        ):  # a bug, of which one wants to see the place
            log.error("%s %s failed: %s", request.method, request.path, detail.message, exc_info=exc)
        if status >= 500 and GENERATION in request and request[GENERATION].num_generated:
            texts = ["".join(pieces) for pieces in request[GENERATION].texts]
            detail = msgspec.structs.replace(detail, partial=texts)
        request[REFUSAL] = detail
        body = encode_error(detail)
        if (route := route_of(request)) is not None and route.errors == ANTHROPIC:
            body = msgspec.json.encode(anthropic_error(status, detail))
        response = web.Response(status=status, body=body, content_type="application/json")
        if isinstance(exc, OverloadedError):
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
        if isinstance(exc, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = exc.headers["Allow"]
        if isinstance(exc.__cause__, web.RequestPayloadError):
            # What is left of the body cannot be read either: aiohttp would try, and print a traceback.
            request.content.feed_eof()
            response.force_close()
        return response
