"""Random bodies: whatever a client sends, it is answered or told what is wrong, and nothing stays behind."""

from __future__ import annotations

import asyncio
import collections
import json
import random
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.api.fake_engine import FakeEngine
from xdeepserve.api import requests
from xdeepserve.api.response_items import ResponsesRequest
from xdeepserve.api.server import build_app
from xdeepserve.engine.serving.request import OutputFormats
from xdeepserve.llm import build_engine

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 5, 5.5, 1e308, -0.0, 2**31, 2**63, 2**64, 10**30, 1e999),
    *("", "x", "json", "auto", "required", "none", "\ud800", "\x00", "é" * 300),
    *([], [1], ["a"], [[]], [None], {}, {"a": 1}, {"1": 5}, {"1": "x"}, {"-1": 0}),
    *({"type": "text"}, {"type": "json_object"}, SCHEMA, {"format": SCHEMA}, {"format": 5}),
    *({"regex": "a("}, {"json": True}, {"choice": ["a"]}, {"choice": []}, {"include_usage": True}),
    *(HI, [{"role": "assistant", "content": None}], [TOOL], [{"type": "function", "name": "f"}]),
    *({"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}),
    *([CALL], [CALL, {"type": "function_call_output", "call_id": "c", "output": "x"}]),
    [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}, CALL],
]
PATHS: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
    ("/v1/chat/completions", requests.ChatRequest, {"messages": HI, "max_tokens": 3}),
    ("/v1/completions", requests.CompletionRequest, {"prompt": "hi", "max_tokens": 3}),
    ("/v1/responses", ResponsesRequest, {"input": "hi", "max_output_tokens": 3}),
    ("/tokenize", requests.TokenizeRequest, {"prompt": "x"}),
    ("/detokenize", requests.DetokenizeRequest, {"tokens": [1]}),
]


async def send(client: TestClient, seed: int, count: int) -> None:
    """Random bodies, one after another; each is answered, or told what is wrong, in 120 seconds."""
    rng, seen = random.Random(seed), collections.Counter[int]()
    for _ in range(count):
        path, schema, base = rng.choice(PATHS)
        names = schema.__struct_fields__
        fields = rng.sample(names, rng.randrange(min(4, len(names) + 1)))
        body = json.dumps(base | {name: rng.choice(VALUES) for name in fields})
        async with asyncio.timeout(120):
            response = await client.post(path, data=body, headers={"Content-Type": "application/json"})
            answer = await response.text()
        assert response.status in (200, 400, 404), (path, body, answer)
        assert response.status == 200 or json.loads(answer)["error"]["message"], (path, body)
        seen[response.status] += 1
    assert min(seen[200], seen[400]) > count / 10


async def send_without_engine(client: TestClient, engine: FakeEngine, seed: int, count: int) -> None:
    engine.formats = OutputFormats(reasoning=True, tools="hermes", shows_tools=True)
    await send(client, seed, count)
    assert not engine.live


async def test_random_bodies(client: TestClient, engine: FakeEngine) -> None:
    await send_without_engine(client, engine, 1, 300)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(2, 12))
async def test_many_random_bodies(client: TestClient, engine: FakeEngine, seed: int) -> None:
    await send_without_engine(client, engine, seed, 1000)


async def send_to_an_engine(deployment: str, overrides: list[str], seeds: range, count: int) -> None:
    """As many clients at once as seeds, of a model that computes; all that it holds is free at the end."""
    engine = build_engine("tiny", deployment, "int8", overrides=["max_model_len=96", *overrides])
    async with TestClient(TestServer(build_app(engine))) as client:
        await asyncio.gather(*(send(client, seed, count) for seed in seeds))
        stats = engine.stats()
        assert engine.is_healthy()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
        async with client.get("/metrics") as response:
            shown = await response.text()
        assert 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0' in shown
    engine.check_integrity()


async def test_random_bodies_on_an_engine() -> None:
    await send_to_an_engine("monolithic", ["mtp=1"], range(20, 24), 40)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("deployment", "overrides"),
    [("monolithic", ["mtp=1"]), ("colocated", ["dies=2"]), ("moe-attention", [])],
)
async def test_many_random_bodies_on_an_engine(deployment: str, overrides: list[str]) -> None:
    await send_to_an_engine(deployment, overrides, range(30, 38), 400)
