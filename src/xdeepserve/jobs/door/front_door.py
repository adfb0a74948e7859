"""The door of a cluster: a request reaches any job executor (JE) that is ready (xDeepServe 5.1).

Doors keep no state, so there may be several. If a JE is lost before it has answered, its request goes to
another one. That gives the same answer, because no bit depends on which JE computes it.

Where JEs share a pod, so does a stream that has begun. The door names each request, the pod has kept its
output under that name, and another JE makes the same bytes of it again. What the client has is left out. If
other bytes come, or if each JE has a pod of its own, the stream ends with an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from xdeepserve.api.answers.responses import json_response
from xdeepserve.api.routes.route import PASSED_ON, Route, add_routes
from xdeepserve.api.server.access import ADDRESS, guard_middleware, is_own_origin
from xdeepserve.api.server.http_errors import ApiError, ErrorDetail, encode_error, error_middleware
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import address_of, bind, stop_signals
from xdeepserve.errors import XDeepServeError
from xdeepserve.jobs.cluster_manager import LOOK_S, ClusterManager
from xdeepserve.jobs.door.files import MAX_FILE_BYTES
from xdeepserve.jobs.door.shared_pod import NAME, TIME
from xdeepserve.jobs.je_scaling import LoadSince, wanted_jes
from xdeepserve.jobs.member_table import POD, ClusterMember, MemberTable

CONNECT_S = 5.0
WAIT_S, POLL_S = 10.0, 0.1  # for somebody to be ready
OF_A_HOP = ("connection", "keep-alive", "transfer-encoding", "host", "content-length", "te", "upgrade")
KEPT_THERE = "/v1/responses"  # what these refer to is in the memory of the JE that has made it
# Where JEs share a pod, they answer these; all else is kept or known in the pod.
FOR_JES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
    "/metrics",
)
UNIX = "unix://"  # begins the address of a Unix socket
STREAM = "text/event-stream"


class PassedAnswer:
    """Answer to a request, as far as the client has it."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None
        self.is_whole = False
        self._num_bytes, self._digest = 0, hashlib.sha256()

    async def give(self, member: ClusterMember, answer: aiohttp.ClientResponse) -> None:
        """Pass a member's answer on, without what the client has already. Raises ChangedError if that part
        differs."""
        headers = {k: v for k, v in answer.headers.items() if k.lower() not in OF_A_HOP}
        headers["X-Job-Executor"] = member.name
        if self.response is None and answer.content_type != STREAM:
            body = await answer.read()
            self.response = web.Response(status=answer.status, headers=headers, body=body)
        elif self.response is None:
            self.response = web.StreamResponse(status=answer.status, headers=headers)
            await self.response.prepare(self._request)
        if answer.content_type == STREAM:
            await self._stream(answer, self.response)
        elif self.is_begun:
            raise ChangedError
        self.is_whole = True

    @property
    def is_begun(self) -> bool:
        """Whether the client has the beginning of a stream."""
        return self.response is not None and self.response.prepared

    async def _stream(self, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
        num_known, known = self._num_bytes, hashlib.sha256()
        async for piece in answer.content.iter_any():
            again, new = piece[:num_known], piece[num_known:]
            num_known -= len(again)
            known.update(again)
            if again and not num_known and known.digest() != self._digest.digest():
                raise ChangedError
            if new:
                self._num_bytes += len(new)
                self._digest.update(new)
                await response.write(new)
        if num_known:
            raise ChangedError

    async def end(self, error: ErrorDetail | None = None) -> web.StreamResponse:
        """End the response, a stream that is not whole with an error event."""
        assert self.response is not None
        if self.is_begun:
            if error is not None:
                await self.response.write(b"data: " + encode_error(error) + b"\n\n")
            await self.response.write_eof()
        return self.response


class ChangedError(XDeepServeError):
    """Error: another job executor gives another answer to a request whose answer has begun."""


class FrontDoor:
    """Door of a cluster: passes requests on to members, in turn. `is_shared`: JEs share the TEs of a pod."""

    def __init__(self, members: MemberTable, is_shared: bool) -> None:
        self._members, self._is_shared = members, is_shared
        self._places, self._numbers = itertools.count(), itertools.count()
        self.in_flight = 0  # requests for job executors
        self._name = secrets.token_hex(4)
        self._sessions: dict[str, aiohttp.ClientSession] = {}  # by Unix socket; "" for all other addresses

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Keep client sessions open while the door is open."""
        try:
            yield
        finally:
            for session in self._sessions.values():
                await session.close()

    def _session(self, member: ClusterMember) -> tuple[aiohttp.ClientSession, str]:
        """Return the session for a member, and the beginning of its URLs."""
        assert member.address is not None  # a ready member has said where it is
        path = member.address.removeprefix(UNIX) if member.address.startswith(UNIX) else ""
        if path not in self._sessions:
            self._sessions[path] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path) if path else None,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                auto_decompress=False,
            )
        return self._sessions[path], "http://localhost" if path else member.address

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on as `_pass_on` does, and count it while it is in flight."""
        is_for_jes = request.path.startswith(FOR_JES)
        self.in_flight += is_for_jes
        try:
            return await self._pass_on(request)
        finally:
            self.in_flight -= is_for_jes

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Pass a request to members in turn until one answers. Raises ApiError if none is ready."""
        body, tried, answer = await request.read(), set[int](), PassedAnswer(request)
        headers, lost = self._headers(request), ""
        for _ in range(round(WAIT_S / POLL_S)):
            member = self._next(request.path, tried)
            if member is None:
                await asyncio.sleep(POLL_S)
                continue
            tried.add(member.pid)
            with contextlib.suppress(ChangedError):
                await self._ask(member, request, headers, body, answer)
            if answer.is_whole:
                return await answer.end()
            lost = member.name
            if answer.is_begun and (not self._is_shared or request.transport is None):
                break
        if answer.is_begun:
            error = ErrorDetail(f"{lost} was lost", type="server_error", code="job_executor_lost")
            return await answer.end(error)
        raise ApiError(503, f"no job executor has been ready for {WAIT_S:g} s", code="not_ready")

    def _headers(self, request: web.Request) -> CIMultiDict[str]:
        """Return the headers that a member gets, with the door's own name and time of the request."""
        # To a member, whose address is another one, the door's own page would be one of another origin.
        dropped = (*OF_A_HOP, NAME.lower(), TIME.lower(), *(("origin",) if is_own_origin(request) else ()))
        name = f"{self._name}-{next(self._numbers):08d}"
        headers = CIMultiDict((k, v) for k, v in request.headers.items() if k.lower() not in dropped)
        headers.setdefault("X-Request-Id", name)
        headers.extend({NAME: name, TIME: f"{time.time():.0f}"})
        return headers

    def _next(self, path: str, tried: set[int]) -> ClusterMember | None:
        """Choose the next ready member, in turn, without those that have failed to answer this request. Where
        there is a pod, it answers what is not for JEs."""
        members = self._members.all()
        wants_pod = self._is_shared and not path.startswith(FOR_JES)
        ready = [each for each in members if each.state == "ready" and (each.name == POD) == wants_pod]
        ready = [each for each in ready if each.pid not in tried]
        if not ready:
            return None
        is_kept = not self._is_shared and path.startswith(KEPT_THERE)
        return ready[0 if is_kept else next(self._places) % len(ready)]

    async def _ask(
        self,
        member: ClusterMember,
        request: web.Request,
        headers: CIMultiDict[str],
        body: bytes,
        answer: PassedAnswer,
    ) -> None:
        """Ask a member and pass its answer on, as far as it comes: the member may be lost meanwhile."""
        session, address = self._session(member)
        with contextlib.suppress(aiohttp.ClientError):
            async with session.request(
                request.method,
                f"{address}{request.path_qs}",
                headers=headers,
                data=body or None,
                allow_redirects=False,
            ) as found:
                await answer.give(member, found)


DOOR = web.AppKey("DOOR", FrontDoor)


def build_door(
    members: MemberTable, manager: ClusterManager, options: ServerOptions | None = None
) -> web.Application:
    """Build the application of a door. It is guarded like its members: `options` are theirs.

    GET /cluster tells whether the door's manager leads, and lists the members.
    """

    async def show(request: web.Request) -> web.Response:
        found: dict[str, Any] = {"leads": manager.leads, "members": msgspec.to_builtins(members.all())}
        return json_response(found)

    door = FrontDoor(members, POD in manager.names)
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
    app[DOOR] = door
    app.cleanup_ctx.append(door.run)
    return app


async def scale_jes(door: FrontDoor, manager: ClusterManager, most: int) -> None:
    """Let the number of job executors follow the requests that this door has in flight, if it may change."""
    jes = [name for name in manager.names if name != POD]
    least, since = len(jes), LoadSince()
    while manager.is_scaled:
        await asyncio.sleep(LOOK_S)
        now = asyncio.get_running_loop().time()
        wanted, since = wanted_jes(now, door.in_flight, len(jes), least, most, since)
        jes = [f"je-{number}" for number in range(wanted)]
        manager.names = [POD, *jes]


async def serve_door(
    members: MemberTable, manager: ClusterManager, host: str, port: int, options: ServerOptions, most_jes: int
) -> None:
    """Pass requests on until a signal, while the manager leads or stands by. Raises InputError if the address
    cannot be bound."""
    listener = bind(host, port)
    app = build_door(members, manager, options)
    scaling = asyncio.create_task(scale_jes(app[DOOR], manager, most_jes), name="number of job executors")
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
            for task in (work, scaling):
                task.cancel()
            await asyncio.gather(work, scaling, return_exceptions=True)
            await runner.cleanup()
            manager.close()
