from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from aiohttp.test_utils import TestServer

from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import build_app
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.llm import build_engine

Serve = Callable[..., AbstractAsyncContextManager[tuple[str, Engine]]]


@pytest.fixture
def serve() -> Serve:
    """`async with serve(deployment, "key=value", admin=True) as (address, engine)`: the tiny model's."""

    @asynccontextmanager
    async def serving(
        deployment: str = "transformerless", *overrides: str, admin: bool = False, keys: tuple[str, ...] = ()
    ) -> AsyncIterator[tuple[str, Engine]]:
        engine = build_engine("tiny", deployment, "int8", overrides=overrides)
        server = TestServer(build_app(engine, ServerOptions(admin=admin, api_keys=keys)))
        await server.start_server(shutdown_timeout=1.0)  # as `serve` has it: a page that is open never ends
        async with server:
            yield str(server.make_url("/")), engine

    return serving
