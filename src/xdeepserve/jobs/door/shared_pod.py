"""The server of a job executor (JE) that shares a pod with others: its models are the pod's.

The door of the cluster names requests, so that another JE answers them under the same ids and times. It alone
can: the JE listens on a Unix socket of its own user.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler

from xdeepserve.api.server.endpoint import CREATED, ENGINE_REQUEST_ID
from xdeepserve.api.server.served_models import MODELS, drain
from xdeepserve.jobs.remote_engine import RemoteEngine

NAME, TIME = "X-Door-Request", "X-Door-Time"  # headers by which a door names a request
FOLLOW_S = 0.5  # between two looks at the models of the pod
DRAIN_S = 5.0  # for the requests of a model that goes


@web.middleware
async def take_name(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Take the name and time that the door has given to a request."""
    name, created = request.headers.get(NAME), request.headers.get(TIME, "")
    if name is not None and created.isdecimal():
        request[ENGINE_REQUEST_ID], request[CREATED] = f"req-{name}", int(created)
    return await handler(request)


async def follow_pod(app: web.Application) -> AsyncIterator[None]:
    """Serve exactly the models of the pod while the server runs."""
    work = asyncio.create_task(_follow(app), name="models of the pod")
    try:
        yield
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _follow(app: web.Application) -> None:
    models, followed = app[MODELS], set[str]()
    first = models.first.engine
    assert isinstance(first, RemoteEngine)
    while True:
        found = {name: each for name, each in first.link.models.items() if name != first.model_name}
        for name in sorted(found.keys() - followed):
            engine = RemoteEngine(first.link, name)
            await engine.start()
            models.add(name, engine, found[name].created)
            followed.add(name)
        for name in sorted(followed - found.keys()):
            followed.remove(name)
            gone = models.take(name)
            await drain([gone], DRAIN_S, asyncio.Event())
            await gone.stop()
        await asyncio.sleep(FOLLOW_S)
