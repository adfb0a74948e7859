"""Tools of the tests of the API: a front door before members that a test writes."""

from __future__ import annotations

import contextlib
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import aiohttp
import pytest
from aiohttp import web

from tests.jobs.tools import Time
from xdeepserve.jobs.cluster_manager import LEASE_S, ClusterManager
from xdeepserve.jobs.door.front_door import build_door
from xdeepserve.jobs.job_store import JobStore
from xdeepserve.jobs.lease import CLUSTER_MANAGER
from xdeepserve.jobs.member_table import POD

FORM = {"Content-Type": "multipart/form-data; boundary=x"}


async def serve(stack: contextlib.AsyncExitStack, app: web.Application) -> str:
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


@contextlib.asynccontextmanager
async def door(
    path: Path, *handlers: Any, is_shared: bool = False
) -> AsyncIterator[tuple[aiohttp.ClientSession, JobStore]]:
    """A door to members of which each does as its handler; `is_shared`: as if they shared a pod."""
    store = JobStore(path / "state", Time())
    lease = store.take_lease("a", LEASE_S, CLUSTER_MANAGER)
    assert lease is not None
    async with contextlib.AsyncExitStack() as stack:
        for number, handler in enumerate(handlers):
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", handler)
            store.members.start(f"je-{number}", number, lease)
            store.members.beat(f"je-{number}", number, await serve(stack, app), [])
        manager = ClusterManager(store, "b", [POD] * is_shared, lambda name: pytest.fail(name))
        address = await serve(stack, build_door(store.members, manager))
        yield await stack.enter_async_context(aiohttp.ClientSession(address)), store
    store.close()


def missing(kind: Any, value: Any, path: str = "") -> Iterator[str]:
    """Walk a vendor's model beside an answer, and yield the required fields that the answer lacks."""
    fields = getattr(kind, "model_fields", None)
    if fields is not None and isinstance(value, dict):
        for name, field in fields.items():
            if name in value:
                yield from missing(field.annotation, value[name], f"{path}.{name}")
            elif field.is_required():
                yield f"{path}.{name}"
        return
    inner = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        found = [list(missing(each, value, path)) for each in inner if each is not type(None)]
        yield from min(found, key=len, default=[])
    elif isinstance(value, list) and inner:
        for i, each in enumerate(value):
            yield from missing(inner[0], each, f"{path}[{i}]")
    elif hasattr(kind, "__metadata__"):
        yield from missing(inner[0], value, path)
