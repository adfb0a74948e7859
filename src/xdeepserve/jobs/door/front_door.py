"""The door of a cluster: a request reaches any job executor that is ready (xDeepServe 5.1).

Doors keep no state, so there may be several. If a JE is lost before it has answered, its request goes to
another one. That gives the same answer, because no bit depends on which JE computes it. A stream that has
begun ends with an error event: another JE would send its beginning again under another id.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from xdeepserve.api.answers.responses import json_response
from xdeepserve.api.routes.route import PASSED_ON, Route, add_routes
from xdeepserve.api.server.access import ADDRESS, guard_middleware, is_own_origin
from xdeepserve.api.server.http_errors import ApiError, ErrorDetail, encode_error, error_middleware
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import address_of, bind, stop_signals
from xdeepserve.jobs.cluster_manager import ClusterManager
from xdeepserve.jobs.door.files import MAX_FILE_BYTES
from xdeepserve.jobs.member_table import ClusterMember, MemberTable

CONNECT_S = 5.0
WAIT_S, POLL_S = 10.0, 0.1  # for somebody to be ready
OF_A_HOP = ("connection", "keep-alive", "transfer-encoding", "host", "content-length", "te", "upgrade")
KEPT_THERE = "/v1/responses"  # what these refer to is in the memory of the JE that has made it
STREAM = "text/event-stream"


class FrontDoor:
    """Door of a cluster: passes requests on to members, in turn."""

    def __init__(self, members: MemberTable) -> None:
        self._members = members
        self._turn = itertools.count()
        self._session: aiohttp.ClientSession | None = None

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Keep a client session open while the door is open."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as self._session:
            yield

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Pass a request to members in turn until one answers. Raises ApiError if none is ready."""
        body, tried = await request.read(), set[int]()
        for _ in range(round(WAIT_S / POLL_S)):
            member = self._next(request.path, tried)
            if member is None:
                await asyncio.sleep(POLL_S)
                continue
            tried.add(member.pid)
            answer = await self._ask(member, request, body)
            if answer is not None:
                return answer
        raise ApiError(503, f"no job executor has been ready for {WAIT_S:g} s", code="not_ready")

    def _next(self, path: str, tried: set[int]) -> ClusterMember | None:
        """Choose the next ready member, in turn, without those that have failed to answer this request."""
        ready = [each for each in self._members.all() if each.state == "ready" and each.pid not in tried]
        if not ready:
            return None
        return ready[0 if path.startswith(KEPT_THERE) else next(self._turn) % len(ready)]

    async def _ask(
        self, member: ClusterMember, request: web.Request, body: bytes
    ) -> web.StreamResponse | None:
        """Ask a member and return its answer; None if the member is lost meanwhile."""
        assert self._session is not None
        # To a member, whose address is another one, the door's own page would be one of another origin.
        dropped = (*OF_A_HOP, "origin") if is_own_origin(request) else OF_A_HOP
        stream: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                f"{member.address}{request.path_qs}",
                headers={k: v for k, v in request.headers.items() if k.lower() not in dropped},
                data=body or None,
                allow_redirects=False,
            ) as answer:
                headers = {k: v for k, v in answer.headers.items() if k.lower() not in OF_A_HOP}
                headers["X-Job-Executor"] = member.name
                if answer.content_type != STREAM:
                    return web.Response(status=answer.status, headers=headers, body=await answer.read())
                stream = web.StreamResponse(status=answer.status, headers=headers)
                await stream.prepare(request)
                async for piece in answer.content.iter_any():
                    await stream.write(piece)
        except aiohttp.ClientError:
            if stream is None:
                return None
            lost = ErrorDetail(f"{member.name} was lost", type="server_error", code="job_executor_lost")
            await stream.write(b"data: " + encode_error(lost) + b"\n\n")
        await stream.write_eof()
        return stream


def build_door(
    members: MemberTable, manager: ClusterManager, options: ServerOptions | None = None
) -> web.Application:
    """Build the application of a door. It is guarded like its members: `options` are theirs.

    GET /cluster tells whether the door's manager leads, and lists the members.
    """

    async def show(request: web.Request) -> web.Response:
        found: dict[str, Any] = {"leads": manager.leads, "members": msgspec.to_builtins(members.all())}
        return json_response(found)

    door = FrontDoor(members)
    app = web.Application(
        middlewares=[error_middleware, guard_middleware(options or ServerOptions())],
        client_max_size=MAX_FILE_BYTES + (1 << 20),
    )
    add_routes(
        app,
        (
            Route("GET", "/cluster", show, "Tell who leads, and list the members."),
            Route("*", "/{path:.*}", door.pass_on, "Ask a member.", takes=PASSED_ON),
        ),
    )
    app.cleanup_ctx.append(door.run)
    return app


async def serve_door(
    members: MemberTable, manager: ClusterManager, host: str, port: int, options: ServerOptions
) -> None:
    """Pass requests on until a signal, while the manager leads or stands by. Raises InputError if the address
    cannot be bound."""
    listener = bind(host, port)
    app = build_door(members, manager, options)
    app[ADDRESS] = address_of(listener)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    work = asyncio.create_task(manager.run(), name="cluster manager")
    async with stop_signals() as (stopped, _):
        try:
            await runner.setup()
            await web.SockSite(runner, listener).start()
            print(f"listening on {app[ADDRESS]}", flush=True)
            await stopped.wait()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await runner.cleanup()
            manager.close()
