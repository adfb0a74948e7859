"""Server-sent events: a stream of chunks as `data: {json}` lines, then `data: [DONE]`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from xdeepserve.api.server.http_errors import REFUSAL, ErrorBody, ErrorDetail, describe
from xdeepserve.errors import XDeepServeError

log = logging.getLogger("xdeepserve.api")

_ENCODER = msgspec.json.Encoder()
LINE_ENDS = {"\x85".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def stream_events(
    request: web.Request,
    chunks: AsyncGenerator[Any, None],
    failed: Callable[[ErrorDetail], dict[str, Any]] | None = None,
) -> web.StreamResponse:
    """Send each chunk in turn, then `[DONE]`. With `failed`, chunks are objects whose type is also the
    event's name, and the last chunk is the end.

    The response begins with the first chunk, so a failure before it still gets a proper status. A later
    failure is sent as the event that `failed` makes of it, or as one with OpenAI's error body, and the stream
    ends without `[DONE]`. If the client has gone, the stream ends quietly.
    """
    response = web.StreamResponse(headers=HEADERS)
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(_event(chunk, is_named=failed is not None))
        if failed is None:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    except ConnectionResetError:
        return response
    except Exception as exc:
        if not response.prepared:
            raise
        _, detail = describe(exc, request)
        request[REFUSAL] = detail
        if not isinstance(exc, XDeepServeError):
            what = f"{request.method} {request.path} failed while streaming"
            log.error("%s: %s", what, detail.message, exc_info=exc)
        last = _event(ErrorBody(detail)) if failed is None else _event(failed(detail), is_named=True)
        await _send_last(response, last)
    return response


def _event(chunk: Any, is_named: bool = False) -> bytes:
    name = b"event: %b\n" % chunk["type"].encode() if is_named else b""
    return b"%bdata: %b\n\n" % (name, escaped(_ENCODER.encode(chunk)))


def escaped(data: bytes) -> bytes:
    """Escape the line separators of Unicode in JSON: clients that split a stream with `str.splitlines` would
    cut an event there."""
    for raw, written in LINE_ENDS.items():
        if raw in data:
            data = data.replace(raw, written)
    return data


async def _send_last(response: web.StreamResponse, event: bytes) -> None:
    try:
        await response.write(event)
        await response.write_eof()
    except ConnectionResetError:
        pass  # nobody is left to tell
