"""Tools of the tests of the API: a front door before members that a test writes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.jobs.tools import Time
from xdeepserve.jobs.cluster_manager import LEASE_S, ClusterManager
from xdeepserve.jobs.door.front_door import build_door
from xdeepserve.jobs.job_store import JobStore
from xdeepserve.jobs.lease import CLUSTER_MANAGER

FORM = {"Content-Type": "multipart/form-data; boundary=x"}


async def serve(stack: contextlib.AsyncExitStack, app: web.Application) -> str:
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


@contextlib.asynccontextmanager
async def door(path: Path, *handlers: Any) -> AsyncIterator[tuple[aiohttp.ClientSession, JobStore]]:
    """A door to members of which each does as its handler."""
    store = JobStore(path / "state", Time())
    lease = store.take_lease("a", LEASE_S, CLUSTER_MANAGER)
    assert lease is not None
    async with contextlib.AsyncExitStack() as stack:
        for number, handler in enumerate(handlers):
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", handler)
            store.members.start(f"je-{number}", number, lease)
            store.members.beat(f"je-{number}", number, await serve(stack, app), [])
        manager = ClusterManager(store, "b", [], lambda name: pytest.fail(name))
        address = await serve(stack, build_door(store.members, manager))
        yield await stack.enter_async_context(aiohttp.ClientSession(address)), store
    store.close()
