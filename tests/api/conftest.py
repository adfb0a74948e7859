from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import TestClient, TestServer
from fake_engine import FakeEngine

from xdeepserve.api.server import build_app


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    """An engine in which, whatever the test did, no request may stay behind."""
    engine = FakeEngine()
    yield engine
    assert not engine.live


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(build_app(engine))) as client:
        yield client
