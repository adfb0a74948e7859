"""A page of somebody else, in a real browser: it neither reads nor changes anything of a server here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.page.chromium import chromium, find_chromium
from tests.page.conftest import Serve

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium on this machine")

PAGE = """<!doctype html><title>evil</title><iframe name=frame></iframe>
<form method=post target=frame enctype=text/plain>
<input name='{"die": 1, "kind": "lost", "x' value='": null}'></form>"""
BODIES = {
    "v1/completions": {"prompt": [5], "max_tokens": 4},
    "page/break": {"die": 1, "kind": "lost"},
    "admin/tes": {},
}
TRIES = (Path(__file__).parent / "other_origins.js").read_text()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "evil.example"])
async def test_a_page_of_another_origin_neither_reads_nor_changes(serve: Serve, name: str) -> None:
    """`evil.example` has been pointed here: to the browser the server is of the page's own origin then."""

    async def show(request: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html")

    elsewhere = web.Application()
    elsewhere.router.add_get("/", show)
    async with (
        serve("colocated", "dies=4", "recovery.failover=true", admin=True) as (address, engine),
        TestServer(elsewhere) as evil,
        chromium("--host-resolver-rules=MAP evil.example 127.0.0.1") as tab,
    ):
        is_rebound = name == "evil.example"
        target = address.replace("127.0.0.1", name) if is_rebound else address
        await tab.open(str(evil.make_url("/")).replace("127.0.0.1", name))
        await tab.until("document.forms.length === 1")
        before = engine.stats()
        told = await tab.run(TRIES % (json.dumps(target), json.dumps(BODIES)))
        assert len(told) > 30
        read = {what: found for what, found in told.items() if found.startswith("read")}
        assert read == {}
        if (
            is_rebound
        ):  # the page itself comes by that name: the browser would let it read all, and is told nothing
            await tab.send("Page.navigate", url=target)
            await tab.until("document.body && document.body.textContent.includes('is not called')")
            own = TRIES.replace("document.forms[0]", "document.createElement('form')")
            told = await tab.run(own % (json.dumps("/"), json.dumps(BODIES)))
            assert {found[:8] for what, found in told.items() if found.startswith("read")} == {"read 421"}
        after = engine.stats()
        assert not engine.plan.pod.lost
        assert after.rows_per_step == before.rows_per_step
        assert [te.name for te in after.health] == ["te"]
