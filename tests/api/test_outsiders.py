"""Web pages that somebody visits neither read nor change anything here, by whatever name and request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from tests.api.fake_engine import FakeEngine
from tests.api.tools import FORM, door
from xdeepserve.api.server.access import is_loopback_name
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import bind_unix, build_app
from xdeepserve.errors import InputError

TEXT = "/v1/completions"
BODY = {"prompt": "hi", "max_tokens": 1}
EVIL = "http://evil.example"
POSTS = (
    TEXT,
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/page/break",
    "/admin/tes",
)
POSTS = (*POSTS, "/admin/servers", "/v1/fine_tuning/jobs", "/v1/agent/jobs", "/ping", "/v1/nothing")


@asynccontextmanager
async def served(engine: FakeEngine, **options: Any) -> AsyncIterator[TestClient]:
    options = {"admin": True, **options}
    async with TestClient(TestServer(build_app(engine, ServerOptions(**options)))) as client:
        yield client


async def refusal(response: aiohttp.ClientResponse) -> tuple[int, str]:
    """Status and message of an error in OpenAI's form, one line."""
    error = (await response.json())["error"]
    assert "\n" not in error["message"]
    assert "Access-Control-Allow-Origin" not in response.headers
    return response.status, error["message"]


LOOPBACK = ["localhost", "LocalHost", "localhost.", "demo.localhost", "127.0.0.1", "127.9.9.9", "[::1]"]
LOOPBACK += ["[::ffff:127.0.0.1]", "localhost:1", "[::1]:80", "127.0.0.1:65535"]
OTHERS = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "evillocalhost",
    "192.168.1.5",
    "0.0.0.0",
]
OTHERS += ["evil.example:8000", "[::2]", "[fe80::1]", "[::ffff:10.0.0.1]", "evil@localhost", "localhost evil"]
OTHERS += ["", ".", "localhost:x", "localhost/", "127.1", "host.docker.internal"]


async def test_a_loopback_address_is_served_by_loopback_names_alone(engine: FakeEngine) -> None:
    async with served(engine) as client:
        for name in LOOPBACK:
            response = await client.post(TEXT, json=BODY, headers={"Host": name})
            assert response.status == 200, name
        for name in OTHERS:
            for method, path in (("GET", "/"), ("GET", "/v1/models"), ("POST", TEXT), ("OPTIONS", TEXT)):
                response = await client.request(method, path, json=BODY, headers={"Host": name})
                status, said = await refusal(response)
                assert (status, "this server is not called" in said) == (421, True), name
        _, said = await refusal(await client.get("/", headers={"Host": "My.Host:8000"}))
        assert said.endswith('"My.Host:8000": --allowed-hosts my.host serves it')


async def test_allowed_hosts_are_served_too(engine: FakeEngine) -> None:
    async with served(engine, allowed_hosts=("My.Host", "fe80::1")) as client:
        for name in ("my.host", "MY.HOST.:8000", "[fe80::1]:1", *LOOPBACK):
            assert (await client.get("/ping", headers={"Host": name})).status == 200, name
        assert (await client.get("/ping", headers={"Host": "a.my.host"})).status == 421
    async with served(engine, allowed_hosts=("*",)) as client:
        assert (await client.get("/ping", headers={"Host": "evil.example"})).status == 200
    for name in ("http://my.host", "my.host:80", "", "a b", "*.host"):
        with pytest.raises(InputError, match="--allowed-hosts"):
            ServerOptions(allowed_hosts=(name,))


async def raw(client: TestClient, *lines: str) -> tuple[int, str]:
    """Status and body of what is answered to a request as it is written."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write("\r\n".join([*lines, "", ""]).encode())
    async with asyncio.timeout(20):
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), content.decode()


async def test_unusual_ways_to_name_a_host(engine: FakeEngine) -> None:
    async with served(engine) as client:
        assert (await raw(client, "GET /version HTTP/1.0"))[0] == 200  # no browser leaves the name out
        end = "Connection: close"
        for line, host, status in (
            ("GET http://evil.example/version HTTP/1.1", "localhost", 421),
            ("GET http://localhost:80/version HTTP/1.1", "evil.example", 200),
            ("GET http://LOCALHOST/version HTTP/1.1", "localhost", 200),
            ("GET http://localhost@evil.example/version HTTP/1.1", "localhost", 421),
        ):
            assert (await raw(client, line, f"Host: {host}", end))[0] == status, line
        twice = await raw(client, "GET /version HTTP/1.1", "Host: localhost", "Host: evil.example", end)
        assert twice[0] == 400


async def test_other_addresses_are_served_by_any_name_until_some_are_allowed(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a connection has reached counts, not where the server listens: 0.0.0.0 is reached by loopback."""
    local: Any = ("192.168.1.5", 8000)
    monkeypatch.setattr(web.Request, "get_extra_info", lambda *_: local)
    for options, statuses in (({}, (200, 200)), ({"allowed_hosts": ("my.host",)}, (421, 200))):
        async with served(engine, **options) as client:
            names = ("evil.example", "my.host")
            found = [(await client.get("/ping", headers={"Host": name})).status for name in names]
            assert tuple(found) == statuses
    local = ("::ffff:127.0.0.1", 8000, 0, 0)
    async with served(engine) as client:
        assert (await client.get("/ping", headers={"Host": "evil.example"})).status == 421


async def test_a_unix_socket_is_served_by_any_name(engine: FakeEngine, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    runner = web.AppRunner(build_app(engine))
    await runner.setup()
    await web.SockSite(runner, bind_unix(path)).start()
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session:
        assert (await session.post(f"http://any.name{TEXT}", json=BODY)).status == 200
    await runner.cleanup()


async def test_what_computes_or_changes_takes_json(engine: FakeEngine) -> None:
    data = json.dumps(BODY).encode()
    async with served(engine) as client:
        for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
            assert (await client.post(TEXT, data=data, headers={"Content-Type": kind})).status == 200, kind
        for path in POSTS:
            for kind in (
                "text/plain",
                "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=x",
            ):
                response = await client.post(path, data=data, headers={"Content-Type": kind})
                status, said = await refusal(response)
                assert (status, "curl: -H 'Content-Type: application/json'" in said) == (415, True), path
                assert kind in said
        for kind in ("text/plain; application/json", "application/jsonp", "application/json, text/plain", ""):
            assert (await client.post(TEXT, data=data, headers={"Content-Type": kind})).status == 415, kind
        for method in ("PUT", "PATCH", "DELETE"):
            assert (await client.request(method, TEXT, data="x")).status == 415
        untyped = await client.post(TEXT, data=data, skip_auto_headers=["Content-Type"])
        assert await refusal(untyped) == (
            415,
            "a body must be JSON, and say so (with curl: -H 'Content-Type: application/json'); "
            "found no Content-Type",
        )
        status, said = await refusal(await client.post("/v1/files", json={}))
        assert (status, "a file comes as multipart/form-data" in said) == (415, True)
        _, said = await refusal(await client.post("/v1/files", data=b"--x--", headers=FORM))
        assert "--state" in said, "the handler's word"
        # Without a body there is nothing to type; the origin is looked at all the same.
        assert (await client.post("/v1/responses/resp-1/cancel")).status == 404
        response = await client.post("/v1/responses/resp-1/cancel", headers={"Origin": EVIL})
        assert response.status == 403
    assert not engine.live


async def test_pages_of_other_origins_are_refused(engine: FakeEngine) -> None:
    async with served(engine, allowed_origins=("https://a.example",)) as client:
        own = f"http://{client.host}:{client.port}"
        good = (own, own.upper(), "https://a.example")
        bad = ("null", EVIL, own.replace("http", "https"), f"http://{client.host}", f"http://{client.host}:1")
        bad = (*bad, f"http://localhost:{client.port}", "", "https://b.a.example", "https://a.example.evil")
        for origin in good:
            response = await client.post(TEXT, json=BODY, headers={"Origin": origin})
            assert response.status == 200, origin
        submitted = len(engine.submitted)
        for origin in bad:
            for path in POSTS:
                response = await client.post(path, json=BODY, headers={"Origin": origin})
                assert (await refusal(response))[0] == 403, (origin, path)
            for path in ("/", "/v1/models", "/page/frames", "/page/bytes", "/health", "/metrics"):
                assert (await client.get(path, headers={"Origin": origin})).status == 403, (origin, path)
            assert (await client.delete("/admin/tes/te", headers={"Origin": origin})).status == 403
        assert len(engine.submitted) == submitted
        _, said = await refusal(await client.post(TEXT, json=BODY, headers={"Origin": EVIL}))
        assert said == f'web pages of "{EVIL}" may not call this server: --allowed-origins lets them'
    async with served(engine, allowed_origins=("*",)) as client:
        assert (await client.post(TEXT, json=BODY, headers={"Origin": EVIL})).status == 200


async def test_what_browsers_ask_for_pages_without_naming_their_origin(engine: FakeEngine) -> None:
    async with served(engine) as client:
        for site, to, method, status in (
            ("cross-site", "image", "GET", 403),
            ("same-site", "script", "GET", 403),
            ("cross-site", "iframe", "GET", 403),
            ("cross-site", "document", "GET", 200),  # a link that somebody follows
            ("cross-site", "document", "POST", 403),
            ("same-origin", "empty", "GET", 200),
            ("none", "document", "GET", 200),
        ):
            headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": to}
            assert (await client.request(method, "/ping", headers=headers)).status == status, (site, to)
        policy = (await client.get("/")).headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in policy


async def test_a_preflight_needs_an_allowed_origin(engine: FakeEngine) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    async with served(engine, allowed_origins=("https://a.example",)) as client:
        response = await client.options(TEXT, headers={"Origin": "https://a.example", **asks})
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert (await refusal(await client.options(TEXT, headers={"Origin": EVIL, **asks})))[0] == 403


async def test_the_door_of_a_cluster_is_guarded_alike(tmp_path: Path) -> None:
    """Its own page is one of another origin to a member, which must serve it all the same."""
    seen: list[tuple[str, str | None]] = []

    async def member(request: web.Request) -> web.Response:
        seen.append((request.host, request.headers.get("Origin")))
        return web.json_response({})

    async with door(tmp_path, member) as (client, _):
        async with client.get("/v1/models") as answer:
            own = str(answer.url.origin())
        seen.clear()
        assert (await client.post(TEXT, json=BODY, headers={"Origin": own})).status == 200
        assert (await client.get("/v1/models")).status == 200
        assert [origin for _, origin in seen] == [None, None]
        assert all(is_loopback_name(host.partition(":")[0]) for host, _ in seen)
        for headers, status in (({"Origin": EVIL}, 403), ({"Host": "evil.example"}, 421)):
            for path in (TEXT, "/cluster"):
                response = await client.post(path, json=BODY, headers=headers)
                assert (await refusal(response))[0] == status
        response = await client.post(TEXT, data=b"{}", headers={"Content-Type": "text/plain"})
        assert (await refusal(response))[0] == 415
        assert len(seen) == 2
