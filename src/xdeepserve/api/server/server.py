"""The OpenAI-compatible server: request ids, start and graceful stop.

Every handler treats a request in the same order: read the body, check it, make token ids, submit, answer. A
client that disconnects cancels its handler (`handler_cancellation`), whose `async with` aborts its requests
in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from xdeepserve import wings
from xdeepserve.api.routes.fields import IGNORED, ignored_header
from xdeepserve.api.routes.route import add_routes
from xdeepserve.api.routes.routes import routes
from xdeepserve.api.server.access import (
    ADDRESS,
    add_cors_headers,
    cors_middleware,
    guard_middleware,
    key_middleware,
)
from xdeepserve.api.server.endpoint import (
    CREATED,
    ENDPOINT,
    ENGINE_REQUEST_ID,
    MAX_REQUEST_ID_CHARS,
    REQUEST_ID,
    ApiEndpoint,
)
from xdeepserve.api.server.http_errors import BYTES_PER_TOKEN, MAX_BODY_BYTES, error_middleware, protocol_log
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.protocol_errors import JsonRunner
from xdeepserve.api.server.served_models import DRAIN_POLL_S, MODELS, ServedModels, drain
from xdeepserve.api.server.server_log import log_middleware, pod_logged
from xdeepserve.engine.serving.request import AsyncEngine
from xdeepserve.errors import InputError

SHUTDOWN_GRACE_S = 5.0
SAME_SIGNAL_S = 1.0  # signals that come within this time are one
IDLE_SECONDS = 30.0  # a connection is closed that has no whole header of a request for so long
BACKLOG = 1024  # connections that come at once and are not accepted yet; the system drops more

log = logging.getLogger("xdeepserve.api")


def build_app(engine: AsyncEngine, options: ServerOptions | None = None) -> web.Application:
    """Build the web application around an engine: its startup starts the engine, its cleanup stops it.

    Run it with `handler_cancellation=True`, as `serve` does, or disconnected clients keep their KV blocks.
    """
    options = options or ServerOptions()
    app = web.Application(
        middlewares=[
            request_id_middleware,
            log_middleware(options),
            error_middleware,
            guard_middleware(options),
            cors_middleware(options),
            key_middleware(options),
        ],
        client_max_size=options.max_body_bytes or max_body_bytes(engine),
    )
    app[ENDPOINT] = ApiEndpoint(engine, options)
    app[MODELS] = ServedModels(app[ENDPOINT])
    add_routes(app, tuple(row for row in routes() if row.option is None or getattr(options, row.option)))
    app.on_response_prepare.append(_add_headers)
    app.cleanup_ctx.append(_run_engine)
    for wing in wings.endpoint():
        wing.furnish(app)
    return app


def max_body_bytes(engine: AsyncEngine) -> int:
    """Return the largest body that is read: what fills the context fits, however it is written."""
    return max(MAX_BODY_BYTES, BYTES_PER_TOKEN * engine.max_model_len)


@web.middleware
async def request_id_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request: by the client's X-Request-Id if it is printable and short enough, else by number."""
    number = request.app[ENDPOINT].new_request_id()
    given = request.headers.get("X-Request-Id", "")
    is_decent = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_CHARS
    request[REQUEST_ID] = given if is_decent else number
    request[ENGINE_REQUEST_ID] = f"req-{number}"
    request[CREATED] = int(time.time())
    return await handler(request)


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    add_cors_headers(request, response, request.app[ENDPOINT].options)
    if IGNORED in request and request[IGNORED].ignored:
        names = response.headers["X-Ignored-Fields"] = ignored_header(request[IGNORED])
        request.app[ENDPOINT].note_ignored(names.split(", "))
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]


async def _run_engine(app: web.Application) -> AsyncIterator[None]:
    engine = app[ENDPOINT].engine
    await engine.start()
    try:
        with pod_logged(engine):  # not that TEs come and go with the server itself
            yield
    finally:
        await engine.stop()


async def serve(
    engine: AsyncEngine,
    host: str,
    port: int,
    ready: Callable[[str], None] | None = None,
    options: ServerOptions | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or cancellation, then let running requests finish for a few seconds.

    A second signal, a second later or more, ends them at once. `port` 0 picks a free one. Once connections
    are accepted, `ready` gets the address ("http://host:port"); without it the address is printed. Raises
    InputError if the address cannot be bound, before the engine starts.
    """
    options = options or ServerOptions()
    context = options.ssl_context()
    listener = bind(host, port) if options.uds is None else bind_unix(options.uds)
    app = build_app(engine, options)
    address = app[ADDRESS] = address_of(listener, is_encrypted=context is not None)
    runner = JsonRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=protocol_log,
        keepalive_timeout=IDLE_SECONDS,
        handle_signals=False,
        shutdown_timeout=1.0,  # of handlers that `_drain` has ended already
    )
    async with stop_signals() as (stopped, hurried):  # until all has ended: no signal cuts that short
        try:
            await runner.setup()
            site = web.SockSite(runner, listener, ssl_context=context, backlog=BACKLOG)
            await site.start()
            (ready or _announce)(address)
            await stopped.wait()
            await site.stop()
            await _drain(app[MODELS], hurried)
        finally:
            await runner.cleanup()
            listener.close()
            if options.uds is not None:
                remove_socket(options.uds)


async def _drain(models: ServedModels, hurried: asyncio.Event) -> None:
    """Let running requests finish for a while, then abort them, so that their streams end in order."""
    engines = [endpoint.engine for endpoint in models]
    if not await drain(engines, SHUTDOWN_GRACE_S, hurried):
        for engine in reversed(engines):  # the first one has the pod of the others
            await engine.stop()
        await asyncio.sleep(DRAIN_POLL_S)  # the last events leave


def run_server(
    engine_factory: Callable[[], AsyncEngine],
    host: str,
    port: int,
    ready: Callable[[str], None] | None = None,
    options: ServerOptions | None = None,
) -> None:
    """Run `serve` on a new uvloop event loop, in which the engine is also built. Returns after a signal."""

    async def main() -> None:
        engine = engine_factory()
        gc.collect()
        gc.freeze()  # a full collection of all that stays would hold up every client for 0.1 s
        await serve(engine, host, port, ready, options)

    try:
        import uvloop
    except ImportError:  # not made for Windows
        asyncio.run(main())
    else:
        uvloop.run(main())


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket and listen. Raises InputError, with a one-line message, if that is impossible."""
    where = f"{host}:{port}"
    if not 0 <= port <= 65535:
        raise InputError(f"cannot listen on {where}: a port is between 0 and 65535")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise InputError(f"cannot listen on {where}: {exc.strerror or exc}") from exc
    # "localhost" may be both ::1 and 127.0.0.1; one socket is enough, and clients fall back to IPv4.
    family, kind, proto, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        hint = "; --port 0 picks a free one" if exc.errno == errno.EADDRINUSE else ""
        raise InputError(f"cannot listen on {where}: {exc.strerror or exc}{hint}") from exc
    listener.setblocking(False)
    return listener


def bind_unix(path: str) -> socket.socket:
    """Bind a Unix socket at `path` that only its owner may use; a socket without a listener is replaced.

    Raises InputError.
    """
    where = f"cannot listen on {path}"
    if not hasattr(socket, "AF_UNIX"):
        raise InputError(f"{where}: this system has no Unix sockets")
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX) as other, contextlib.suppress(ConnectionRefusedError):
            other.connect(path)
            raise InputError(f"{where}: another server does")
        remove_socket(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise InputError(f"{where}: {exc.strerror or exc}") from exc
    listener.setblocking(False)
    return listener


def remove_socket(path: str) -> None:
    """Remove a Unix socket's file, as the server no longer listens."""
    Path(path).unlink(missing_ok=True)


def address_of(listener: socket.socket, is_encrypted: bool = False) -> str:
    """Return the address for clients to connect to."""
    if isinstance(name := listener.getsockname(), str):
        return f"unix://{name}"
    scheme, (host, port) = "https" if is_encrypted else "http", name[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _announce(address: str) -> None:
    print(f"listening on {address}", flush=True)


@contextlib.asynccontextmanager
async def stop_signals() -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
    """Yield two events set by SIGINT and SIGTERM: by the first signal, and by one that comes a second later
    or more.

    Signals within a second count as one, because `timeout` and its like signal a process and then its group.
    Outside the main thread there are no signals.
    """
    loop, stopped, hurried = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    installed, first = [], math.inf

    def signalled() -> None:
        nonlocal first
        first = min(first, loop.time())
        (hurried if loop.time() - first >= SAME_SIGNAL_S else stopped).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, signalled)
            installed.append(number)
    try:
        yield stopped, hurried
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
