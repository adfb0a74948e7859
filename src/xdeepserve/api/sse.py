"""Server-sent events: a stream of chunks as `data: {json}` lines, then `data: [DONE]`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from xdeepserve.api.http_errors import describe, encode_error

log = logging.getLogger("xdeepserve.api")

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def stream_events(
    request: web.Request, chunks: AsyncGenerator[Any, None], are_named: bool = False
) -> web.StreamResponse:
    """Sends each chunk as it comes. With `are_named` each is an object whose type is also the event's name,
    and the last one is the end; else `[DONE]` is.

    The response begins with the first chunk, so that a failure before it still gets a proper status. After
    that, a failure is sent as an event with OpenAI's error body, without `[DONE]`, and the stream ends.
    A client that has gone ends it quietly.
    """
    response = web.StreamResponse(headers=HEADERS)
    encoder = msgspec.json.Encoder()
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                if not response.prepared:
                    await response.prepare(request)
                name = b"event: %b\n" % chunk["type"].encode() if are_named else b""
                await response.write(b"%bdata: %b\n\n" % (name, encoder.encode(chunk)))
        if not are_named:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    except ConnectionResetError:
        return response
    except Exception as exc:
        if not response.prepared:
            raise
        _, detail = describe(exc, request)
        log.error(
            "%s %s failed while streaming: %s", request.method, request.path, detail.message, exc_info=exc
        )
        await _send_last(response, b"data: %b\n\n" % encode_error(detail))
    return response


async def _send_last(response: web.StreamResponse, event: bytes) -> None:
    try:
        await response.write(event)
        await response.write_eof()
    except ConnectionResetError:
        pass  # nobody is left to tell
