"""Task executors that come and go from outside, while clients are served."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from xdeepserve.api.options import ServerOptions
from xdeepserve.api.server import build_app
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
        ("POST", "/admin/tes", {"role": "cook"}, "invalid enum value 'cook'"),
        ("POST", "/admin/tes", {"count": 3}, "unknown field"),
    ]

    async def main() -> None:
        async with TestClient(TestServer(build_app(engine_of(tiny), ServerOptions(admin=True)))) as client:
            for method, path, body, message in cases:
                async with client.request(method, path, json=body) as answer:
                    assert answer.status == 400
                    assert message in (await answer.json())["error"]["message"]

    run(main())
