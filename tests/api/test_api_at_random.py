"""Random bodies: whatever a client sends, it is answered or told what is wrong, and nothing stays behind."""

from __future__ import annotations

import asyncio
import collections
import functools
import json
import random
from collections.abc import Callable, Coroutine
from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import HealthCheck, given, settings

from tests.api.fake_engine import FakeEngine
from xdeepserve.api.openai import requests
from xdeepserve.api.openai.response_items import ResponsesRequest
from xdeepserve.api.server.server import build_app
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


# ---- bodies made of what /openapi.json says ---------------------------------------------------------------

WORDS = (
    *("user", "assistant", "system", "developer", "tool", "text", "function", "message", "reasoning", "auto"),
    *("function_call", "function_call_output", "input_text", "output_text", "refusal", "thinking", "none"),
    *(
        "tool_use",
        "tool_result",
        "any",
        "required",
        "json_schema",
        "json_object",
        "low",
        "f",
        "c",
        "hi",
        "tiny",
    ),
    *(
        "{}",
        '{"a": 1}',
        "",
        "\x00",
        "\ud800",
        "e\u0301",
        "<think>",
        "<tool_call>",
        "resp_1",
        "[a-c]+",
        "object",
    ),
)
TEXTS = st.one_of(st.sampled_from(WORDS), st.text(max_size=6))
NUMBERS = st.one_of(
    st.sampled_from((0, 1, 2, 3, -1, 0.5, 2.0, 21, 2**31, 2**63, 2**64, -(2**64), 1e300, -0.0, 10**40)),
    st.integers(-3, 300),
    st.floats(),
)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)


NAMED = {  # fields whose values must be words that a server knows
    "model": st.sampled_from(("fake", None, None)),
    "role": st.sampled_from(("user", "user", "assistant", "system", "tool")),
    "type": st.sampled_from(("text", "function", "message", "tool_use", "tool_result", "json_object")),
    "content": st.one_of(st.text(max_size=4), st.lists(st.just({"type": "text", "text": "x"}), max_size=2)),
}


class Bodies:
    """Values of the schemas in an OpenAPI document, one in forty of another type, at any place."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._components = document["components"]["schemas"]
        self.operations = [
            (method.upper(), path, self.of(operation["requestBody"]["content"]["application/json"]["schema"]))
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if "requestBody" in operation
        ]

    def of(self, schema: dict[str, Any], depth: int = 6) -> st.SearchStrategy[Any]:
        right = st.deferred(lambda: self._right(schema, depth)) if depth else st.none()
        return st.integers(0, 39).flatmap(lambda n: JUNK if n == 0 else right)

    def _right(self, schema: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            return self._right(self._components[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return st.one_of([self._right(each, depth - 1) for each in schema["anyOf"]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        kinds = schema.get("type", "any")
        found = [
            self._of_type(kind, schema, depth) for kind in ([kinds] if isinstance(kinds, str) else kinds)
        ]
        return st.one_of(found)

    def _of_type(self, kind: str, schema: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
        if kind == "object" and depth:
            return self._object(schema, depth)
        if kind == "array" and depth:
            return st.lists(self.of(schema.get("items") or {}, depth - 1), max_size=3)
        simple = {
            "string": TEXTS,
            "boolean": st.booleans(),
            "null": st.none(),
            "integer": st.integers(-2, 20),
        }
        return simple.get(kind, NUMBERS if kind == "number" else JUNK)

    def _object(self, schema: dict[str, Any], depth: int) -> st.SearchStrategy[dict[str, Any]]:
        fields = schema.get("properties", {})
        wanted = [name for name in fields if name in schema.get("required", ())]
        others = [name for name in fields if name not in wanted]
        chosen = st.lists(st.sampled_from(others), max_size=4, unique=True) if others else st.just([])

        def made(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
            return st.fixed_dictionaries({name: self._field(name, fields[name], depth) for name in names})

        known = chosen.flatmap(lambda more: made([*wanted, *more]))
        unknown = st.dictionaries(TEXTS, JUNK, max_size=1) if not fields else st.just({})
        return st.builds(lambda one, two: {**one, **two}, known, unknown)

    def _field(self, name: str, schema: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
        value = self.of(schema, depth - 1)
        return st.integers(0, 9).flatmap(lambda n: value if n == 0 else NAMED.get(name, value))


async def answered(client: TestClient, method: str, path: str, body: Any) -> int:
    sent = json.dumps(body)
    async with asyncio.timeout(60):
        response = await client.request(method, path, data=sent, headers={"Content-Type": "application/json"})
        text = await response.text()
    assert response.status < 500, (method, path, sent, text)
    if response.status >= 400:
        error = json.loads(text)["error"]
        assert error["message"], (path, sent)
        assert "\n" not in error["message"], (path, sent, error)
    return response.status


def send_drawn(
    runner: asyncio.Runner,
    send: Callable[[Any], Coroutine[Any, Any, int]],
    body: st.SearchStrategy[Any],
    count: int,
    seed: int,
) -> collections.Counter[int]:
    """Send bodies of one operation, and count the statuses of the answers."""
    seen = collections.Counter[int]()

    @hypothesis.seed(seed)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(body)
    def check(sent: Any) -> None:
        seen[runner.run(send(sent))] += 1

    check()
    return seen


def send_bodies(count: int, seed: int) -> None:
    """Bodies of every operation that takes JSON; none makes a server's error, and no request is left."""

    async def start() -> tuple[FakeEngine, TestClient]:
        engine = FakeEngine()
        engine.formats = OutputFormats(reasoning=True, tools="hermes", shows_tools=True)
        client = TestClient(TestServer(build_app(engine)))
        await client.start_server()
        return engine, client

    with asyncio.Runner() as runner:
        engine, client = runner.run(start())
        document = runner.run(client.get("/openapi.json"))
        bodies = Bodies(runner.run(document.json()))

        seen = collections.Counter[int]()
        for method, path, body in bodies.operations:
            send = functools.partial(answered, client, method, path)
            seen += send_drawn(runner, send, body, count, seed)
        assert seen[200] > count
        assert not engine.live
        runner.run(client.close())


def test_bodies_of_the_openapi_document() -> None:
    send_bodies(60, 1)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(2, 10))
def test_many_bodies_of_the_openapi_document(seed: int) -> None:
    send_bodies(2000, 1000 * seed)
