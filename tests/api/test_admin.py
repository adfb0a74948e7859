"""Task executors that come and go from outside, while clients are served."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import build_app
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.llm import build_engine
from xdeepserve.loop import run
from xdeepserve.model.presets import TinyCheckpoint

BODY = {"prompt": [5, 6, 7], "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


def engine_of(tiny: TinyCheckpoint) -> Engine:
    return build_engine(tiny, "colocated", "int8", overrides=["dies=2", "max_model_len=64"])


def test_the_routes_are_there_only_if_they_are_asked_for(tiny: TinyCheckpoint) -> None:
    async def main() -> int:
        app = build_app(engine_of(tiny))
        async with TestClient(TestServer(app)) as client, client.get("/admin/tes") as answer:
            return answer.status

    assert run(main()) == 404


def test_a_te_joins_and_another_leaves_under_load(tiny: TinyCheckpoint) -> None:
    async def complete(client: Any) -> str:
        async with client.post("/v1/completions", json=BODY) as answer:
            assert answer.status == 200, await answer.text()
            return str((await answer.json())["choices"][0]["text"])

    async def main() -> None:
        async with TestClient(TestServer(build_app(engine_of(tiny), ServerOptions(admin=True)))) as client:
            expected = await complete(client)
            clients = [asyncio.ensure_future(complete(client)) for _ in range(8)]
            await asyncio.sleep(0)
            async with client.post("/admin/tes", json={"source": "peer"}) as answer:
                joined = await answer.json()
            assert (joined["name"], joined["life"], joined["dies"]) == ("te 1", "ready", [2, 3])
            async with client.delete("/admin/tes/te") as answer:
                assert [te["name"] for te in (await answer.json())["data"]] == ["te 1"]
            assert set(await asyncio.gather(*clients)) == {expected}
            async with client.get("/admin/tes") as answer:
                (only,) = (await answer.json())["data"]
            assert (only["name"], only["role"], only["num_sequences"]) == ("te 1", "both", 0)
            assert await complete(client) == expected
            async with client.get("/health") as answer:
                assert (await answer.json())["status"] == "ok"

    run(main())


def test_what_cannot_be_is_refused_with_one_line(tiny: TinyCheckpoint) -> None:
    cases = [
        ("DELETE", "/admin/tes/te", None, "TE te cannot leave: it is the only one"),
        ("DELETE", "/admin/tes/nobody", None, "there is no TE nobody: this engine has te"),
        ("DELETE", "/admin/tes/te?drain=yes", None, 'drain must be 0 or 1, found "yes"'),
        ("POST", "/admin/tes", {"role": "decode"}, "none of role decode"),
        ("POST", "/admin/tes", {"role": "cook"}, "invalid enum value 'cook': both or prefill or decode"),
        ("POST", "/admin/tes", {"count": 3}, "unknown field"),
    ]

    async def main() -> None:
        async with TestClient(TestServer(build_app(engine_of(tiny), ServerOptions(admin=True)))) as client:
            for method, path, body, message in cases:
                async with client.request(method, path, json=body) as answer:
                    assert answer.status == 400
                    assert message in (await answer.json())["error"]["message"]

    run(main())


def test_expert_servers_join_and_leave_under_load(tiny: TinyCheckpoint) -> None:
    settings = ["max_model_len=64", "experts.copies=1", "experts.vacancies=1"]
    refusals = [
        ("POST", "/admin/servers", {"server": 0}, "expert server 0 of TE te is there already, on die 4"),
        (
            "POST",
            "/admin/servers",
            {"model": "big"},
            'an expert server of model "big" cannot join: it is tiny',
        ),
        ("POST", "/admin/servers", {"precision": "fp32"}, 'of precision "fp32" cannot join: it is int8 here'),
        ("POST", "/admin/servers", {"die": 3}, "unknown field"),
        ("DELETE", "/admin/servers/te/4", None, "expert server 4 of TE te cannot leave: it is absent"),
        ("DELETE", "/admin/servers/te/x", None, 'an expert server has a number, found "x"'),
        ("DELETE", "/admin/servers/nobody/1", None, 'there is no TE "nobody": this engine has te'),
    ]

    async def main() -> None:
        engine = build_engine(tiny, "eaas", "int8", overrides=settings)
        async with TestClient(TestServer(build_app(engine, ServerOptions(admin=True)))) as client:

            async def complete() -> str:
                async with client.post("/v1/completions", json=BODY) as answer:
                    assert answer.status == 200, await answer.text()
                    return str((await answer.json())["choices"][0]["text"])

            expected = await complete()
            for method, path, body, message in refusals:
                async with client.request(method, path, json=body) as answer:
                    assert answer.status == 400
                    assert message in (await answer.json())["error"]["message"]
            clients = [asyncio.ensure_future(complete()) for _ in range(6)]
            await asyncio.sleep(0)
            async with client.post("/admin/servers", json={}) as answer:
                joined = await answer.json()
            assert (joined["server"], joined["presence"], joined["die"], joined["epoch"]) == (
                4,
                "there",
                8,
                2,
            )
            async with client.delete("/admin/servers/te/1") as answer:
                found = (await answer.json())["data"]
            assert [server["presence"] for server in found] == ["there", "absent", *["there"] * 5]
            assert set(await asyncio.gather(*clients)) == {expected}
            async with client.post("/admin/servers", json={"te": "te", "server": 1}) as answer:
                assert (await answer.json())["epoch"] == 2
            async with client.get("/admin/servers") as answer:
                found = (await answer.json())["data"]
            assert {server["presence"] for server in found} == {"there"}
            assert await complete() == expected

    run(main())
