"""What `xdeepserve serve` can be told: names, keys, origins, encryption, sockets; how it describes itself."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.api.conftest import Post
from tests.api.fake_engine import FakeEngine
from xdeepserve.api.routes.openapi import UNREAD, UNSERVED, openapi
from xdeepserve.api.routes.route import ROUTES
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import bind_unix, build_app, serve
from xdeepserve.errors import InputError

TEXT = "/v1/completions"
BODY = {"prompt": "hi", "max_tokens": 1}


@asynccontextmanager
async def served(engine: FakeEngine, **options: Any) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(build_app(engine, ServerOptions(**options)))) as client:
        yield client


async def test_one_of_the_keys_is_required(engine: FakeEngine) -> None:
    async with served(engine, api_keys=("one", "zwölf"), admin=True) as client:
        for sent in ("", "Bearer ", "Bearer two", "one", "Basic one", "Bearer one two"):
            headers = {"Authorization": sent} if sent else {}
            for path in (TEXT, "/v1/nothing", "/tokenize", "/detokenize", "/admin/tes"):
                response = await client.post(path, json=BODY, headers=headers)
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        for key in ("Bearer one", "bearer zwölf"):
            assert (await client.post(TEXT, json=BODY, headers={"Authorization": key})).status == 200
        for path in ("/health", "/ping", "/metrics", "/version", "/docs", "/openapi.json"):
            assert (await client.get(path)).status == 200


async def test_a_model_may_have_several_names(engine: FakeEngine) -> None:
    async with served(engine, served_model_names=("gpt-4", "mine/r1")) as client:
        for name in ("gpt-4", "mine/r1", None):
            response = await client.post(TEXT, json={**BODY, "model": name})
            assert (await response.json())["model"] == "gpt-4"
        refused = await client.post(TEXT, json={**BODY, "model": "fake"})
        assert refused.status == 404
        assert 'this server has "gpt-4", "mine/r1"' in (await refused.json())["error"]["message"]
        models = await (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["gpt-4", "mine/r1"]
        assert (await (await client.get("/v1/models/mine/r1")).json())["root"] == "fake"


async def test_pages_of_allowed_origins_may_call(engine: FakeEngine) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with served(engine, allowed_origins=("https://a.example",), api_keys=("k",)) as client:
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            response = await client.options(TEXT, headers={"Origin": origin, **asks})
            assert response.status == (204 if allowed else 403)
            assert response.headers.get("Access-Control-Allow-Origin") == allowed
            assert response.headers.get("Access-Control-Allow-Headers") == (allowed and "authorization")
            for stream in (False, True):
                response = await client.post(
                    TEXT,
                    json={**BODY, "stream": stream},
                    headers={"Origin": origin, "Authorization": "Bearer k"},
                )
                assert response.status == (200 if allowed else 403)
                assert response.headers.get("Access-Control-Allow-Origin") == allowed
                await response.read()
        response = await client.post(TEXT, json=BODY, headers={"Origin": "https://a.example"})
        assert response.status == 401
        assert "Access-Control-Allow-Origin" in response.headers
    async with served(engine) as client:
        assert (await client.options(TEXT, headers={"Origin": "https://a.example", **asks})).status == 403


@asynccontextmanager
async def listening(engine: FakeEngine, options: ServerOptions) -> AsyncIterator[str]:
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(engine, "127.0.0.1", 0, address.set_result, options))
    yield await address
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def mode_of(path: str) -> int | None:
    """Who may use a file; None if there is none."""
    return Path(path).stat().st_mode & 0o777 if Path(path).exists() else None


def make_certificate(key: str, cert: str) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert]
    name = ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *name], check=True, capture_output=True)


async def test_a_unix_socket(engine: FakeEngine, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    for _ in range(2):
        async with listening(engine, ServerOptions(uds=path)) as address:
            assert address == f"unix://{path}"
            assert mode_of(path) == 0o600
            connector = aiohttp.UnixConnector(path)
            async with aiohttp.ClientSession(connector=connector) as session:
                assert (await session.get("http://x/ping")).status == 200
            with pytest.raises(InputError, match="another server"):
                bind_unix(path)
        assert mode_of(path) is None
    bind_unix(path).close()  # left behind, as by a process that was killed
    async with listening(engine, ServerOptions(uds=path)):
        pass
    with pytest.raises(InputError, match="cannot listen on"):
        bind_unix(str(tmp_path / "no" / "s"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
async def test_https(engine: FakeEngine, tmp_path: Path) -> None:
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    make_certificate(key, cert)
    async with listening(engine, ServerOptions(ssl_certfile=cert, ssl_keyfile=key)) as address:
        assert address.startswith("https://")
        trusted = ssl.create_default_context(cafile=cert)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as session:
            response = await session.post(address + TEXT, json=BODY)
            assert response.status == 200
    with pytest.raises(InputError, match="--ssl-certfile"):
        ServerOptions(ssl_certfile=key, ssl_keyfile=key).ssl_context()


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(InputError, match="needs --ssl-certfile"):
        ServerOptions(ssl_keyfile="x")
    with pytest.raises(InputError, match="--api-key must not be empty"):
        ServerOptions(api_keys=("",))
    with pytest.raises(InputError, match="nowhere"):
        ServerOptions(ssl_certfile="nowhere").ssl_context()


async def test_ping_and_load(client: TestClient, engine: FakeEngine) -> None:
    assert (await client.get("/ping")).status == 200
    assert (await client.post("/ping")).status == 200
    assert await (await client.get("/load")).json() == {"server_load": 0}
    engine.healthy = False
    assert (await client.get("/ping")).status == 503


async def test_the_endpoint_describes_itself(client: TestClient, post: Post) -> None:
    document = await (await client.get("/openapi.json")).json()
    assert document == json.loads(json.dumps(openapi(client.app[ROUTES])))  # type: ignore[index]
    assert document["openapi"].startswith("3.1")
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in client.app.router.routes()  # type: ignore[union-attr]
        if route.resource is not None
    }
    told = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert {(m, p) for m, p in routes if m != "head"} == told
    # What it says of answers is what they are.
    for path, fields in (
        (TEXT, BODY),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}),
    ):
        _, answer = await post(path, **fields)
        schema = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer, {**schema, "components": document["components"]})
    page = await (await client.get("/docs")).text()
    for path in document["paths"]:
        assert path in page
    assert "response_format" in page


async def test_fields_that_do_nothing_are_told_apart(client: TestClient) -> None:
    schemas = (await (await client.get("/openapi.json")).json())["components"]["schemas"]
    suffix = schemas["CompletionRequest"]["properties"]["suffix"]
    assert suffix == {"default": None, "enum": [None, ""], "description": UNSERVED}
    assert schemas["ChatRequest"]["properties"]["user"]["description"] == UNREAD
    assert schemas["ChatRequest"]["properties"]["echo"]["enum"] == [None, False]
    assert schemas["ChatRequest"]["properties"]["add_special_tokens"]["description"] == UNSERVED
    assert "description" not in schemas["CompletionRequest"]["properties"]["echo"]
    for kind, name in (
        ("TokenizeRequest", "user"),
        ("Tool", "cache_control"),
        ("ChatMessage", "annotations"),
    ):
        assert schemas[kind]["properties"][name]["description"] == UNREAD
    for kind in ("ChatRequest", "CompletionRequest", "ResponsesRequest"):
        for name, field in schemas[kind]["properties"].items():
            assert set(field) != {"default"}, f"{kind}.{name} has no type"
    answers = schemas["ResponsesRequest"]["properties"]
    assert answers["background"]["enum"] == [None, False]
    assert "description" not in answers["metadata"]  # which it gives back
    page = await (await client.get("/docs")).text()
    for table, first in zip(page.split("<table>")[1:4], ("messages", "prompt", "input"), strict=True):
        rows, behind = table.split("</table>")
        assert rows.split("<code>")[1].startswith(f"{first}</code>")
        unread, unserved = behind.split(UNSERVED)
        assert UNREAD in unread
        for name, text in (("user", unread), ("suffix", unserved)):
            assert f"<code>{name}</code>" not in rows
            assert f"<code>{name}</code>" in text
        assert "<code>temperature</code>" in rows


async def test_metrics_that_vllms_dashboard_asks_for(client: TestClient, post: Post) -> None:
    await post(TEXT, prompt=["a", "b"], n=2, max_tokens=3)
    text = await (await client.get("/metrics")).text()
    labels = '{engine="0",model_name="fake"}'
    for name, count in (
        ("request_prefill_time_seconds", 4),
        ("request_decode_time_seconds", 4),
        ("request_inference_time_seconds", 4),
        ("request_params_n", 2),
        ("request_params_max_tokens", 2),
        ("request_max_num_generation_tokens", 2),
    ):
        assert f"vllm:{name}_count{labels} {count}.0" in text
    assert f"vllm:request_params_n_sum{labels} 4.0" in text
    assert f"vllm:request_max_num_generation_tokens_sum{labels} 6.0" in text
    assert 'vllm:cache_config_info{block_size="0",engine="0",model_name="fake"' in text
    assert all('engine="0"' in line for line in text.splitlines() if line.startswith("vllm:"))
