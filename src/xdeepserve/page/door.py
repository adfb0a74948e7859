"""The page to watch a pod: its files, the frames that it draws, a die's bytes, and requests for faults.

GET   /                     the page
GET   /page/FILE            the page's parts
GET   /page/frames          the frames that it draws, as server-sent events (docs/page.md)
GET   /page/bytes?die=N     regions of a die's memory; &region=NAME: the bytes of a region
POST  /page/break           {"die": 3, "kind": "lost"}; only with --admin
"""

from __future__ import annotations

import contextlib
import mimetypes
from collections.abc import AsyncIterator
from functools import cache
from importlib import resources

from aiohttp import web

from xdeepserve.api.answers.responses import json_response
from xdeepserve.api.answers.sse import HEADERS
from xdeepserve.api.routes.body import read_body
from xdeepserve.api.routes.route import Route
from xdeepserve.api.server.endpoint import ENDPOINT
from xdeepserve.api.server.http_errors import ApiError, describe, encode_error
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import RequestError, abridged
from xdeepserve.page.breaking import NEEDS_ADMIN, Breaker, Breaking, Broken
from xdeepserve.page.die_bytes import DieBytes, die_bytes
from xdeepserve.page.page_record import PageRecord
from xdeepserve.page.watch import HELLO, PodWatch

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'"  # no other page may show it in a frame, and have its buttons clicked
)
BYTES_QUERY = {"die": {"type": "integer"}, "region": {"type": "string"}}
WATCH = web.AppKey("WATCH", PodWatch)
BREAKER = web.AppKey("BREAKER", Breaker)


@cache
def page_files() -> dict[str, bytes]:
    """Read the page's own files, by name."""
    folder = resources.files("xdeepserve.page") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


async def show_file(request: web.Request) -> web.Response:
    """Return a file of the page, which may load nothing from elsewhere."""
    name, files = request.match_info.get("file", "index.html"), page_files()
    if name not in files:
        raise ApiError(404, f"the page has no file {abridged(name)}", code="unknown_url")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    return web.Response(body=files[name], content_type=kind, charset="utf-8", headers=headers)


def furnish(app: web.Application) -> None:
    """Add the watch of the pod and the record to a server. The page shows the project's own engine only."""
    engine, options = app[ENDPOINT].engine, app[ENDPOINT].options
    if isinstance(engine, Engine):
        app[WATCH] = PodWatch(engine, None if options.admin else NEEDS_ADMIN)
        app[BREAKER] = Breaker(engine)
        if options.record is not None:
            app.cleanup_ctx.append(record_page)


async def record_page(app: web.Application) -> AsyncIterator[None]:
    """Write the page's frames to the file of the options while the server runs."""
    path = app[ENDPOINT].options.record
    assert path is not None
    async with PageRecord(path).of_watch(app[WATCH]):
        yield


def _watched(request: web.Request) -> Engine:
    engine = request.app[ENDPOINT].engine
    if not isinstance(engine, Engine):
        raise ApiError(404, "the engine of this server cannot be watched", code="unknown_url")
    return engine


async def stream_frames(request: web.Request) -> web.StreamResponse:
    """Stream frames for as long as the client reads them. The first event tells the format; an error of the
    engine is the last event."""
    _watched(request)
    frames = request.app[WATCH].frames()
    response = web.StreamResponse(headers=HEADERS)
    async with contextlib.aclosing(frames):
        try:
            await response.prepare(request)
            await response.write(b"event: hello\ndata: %b\n\n" % HELLO)
            async for frame in frames:
                await response.write(b"event: frame\ndata: %b\n\n" % frame if frame else b": here\n\n")
        except ConnectionResetError:
            pass
        except Exception as error:
            _, detail = describe(error, request)
            with contextlib.suppress(ConnectionResetError):
                await response.write(b"event: failed\ndata: %b\n\n" % encode_error(detail))
    return response


async def show_bytes(request: web.Request) -> web.Response:
    """Show the bytes of a region of a die's memory."""
    number = request.query.get("die", "")
    if not (number.isascii() and number.isdecimal() and len(number) < 8):
        raise RequestError(f"a die has a number, found {abridged(number)}", param="die")
    return json_response(die_bytes(_watched(request), int(number), request.query.get("region")))


async def break_one(request: web.Request) -> web.Response:
    """Break a die, if the server allows it."""
    _watched(request)
    if not request.app[ENDPOINT].options.admin:
        raise ApiError(403, NEEDS_ADMIN, code="not_allowed")
    return json_response(request.app[BREAKER].break_die(await read_body(request, Breaking)))


ROUTES = (
    Route("GET", "/", show_file, "Show the page to watch.", is_open=True),
    Route("GET", "/page/frames", stream_frames, "Stream what the page draws (xdeepserve docs page)."),
    Route("GET", "/page/bytes", show_bytes, "Show a die's memory.", answer=DieBytes, query=BYTES_QUERY),
    Route("POST", "/page/break", break_one, "Break a die (--admin).", Breaking, Broken),
    Route("GET", "/page/{file}", show_file, "Show a part of the page.", is_open=True),
)
