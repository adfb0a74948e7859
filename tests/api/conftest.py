from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.api.fake_engine import FakeEngine
from xdeepserve.api.server.server import build_app

Post = Callable[..., Awaitable[tuple[int, Any]]]


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


@pytest.fixture
def post(client: TestClient) -> Post:
    """`await post(path, **body)` gives the status and the decoded answer; of a stream, its events."""

    async def send(path: str, **body: Any) -> tuple[int, Any]:
        response = await client.post(path, json=body)
        if response.content_type == "text/event-stream":
            return response.status, events(await response.text())
        return response.status, await response.json()

    return send


def events(text: str) -> list[Any]:
    """The decoded `data:` lines of a stream; the closing [DONE] as that text."""
    found = []
    for event in text.split("\n\n"):
        if event:
            assert event.startswith("data: ")
            assert "\n" not in event
            data = event.removeprefix("data: ")
            found.append(data if data == "[DONE]" else msgspec.json.decode(data))
    return found
