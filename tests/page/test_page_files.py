"""The page's own files: small, whole, and with nothing from elsewhere."""

from __future__ import annotations

import json
import re

from aiohttp.test_utils import TestClient, TestServer

from tests.api.fake_engine import FakeEngine
from xdeepserve import LLM, SamplingParams
from xdeepserve.api.server.server import build_app
from xdeepserve.page.door import page_files

MOST = 100_000


def test_the_page_is_small() -> None:
    assert sum(map(len, page_files().values())) < MOST


def test_nothing_comes_from_elsewhere() -> None:
    for name, data in page_files().items():
        text = data.decode()
        assert not re.findall(r"https?://|//cdn|@import|import\(", text), name
        for asked in re.findall(r'(?:src|href)="([^"]+)"', text):
            assert asked == "data:," or asked.removeprefix("page/") in page_files(), f"{name}: {asked}"
        for asked in re.findall(r'from "([^"]+)"', text):
            assert asked.startswith("./"), f"{name}: {asked}"
            assert asked.removeprefix("./") in page_files(), f"{name}: {asked}"


def test_what_the_page_suggests_ends_within_its_limit() -> None:
    """By itself, with `stop`: no suggested story is cut off."""
    files = {name: data.decode() for name, data in page_files().items()}
    ideas = json.loads(re.search(r"^const IDEAS = (\[.*\]);", files["chat.js"], re.MULTILINE)[1])
    (most,) = re.findall(r'id="most" type="number" value="(\d+)"', files["index.html"])
    assert f'$("most").value || {most}' in files["chat.js"]
    assert len(ideas) > 2
    params = SamplingParams(max_tokens=int(most), temperature=0.0)
    with LLM("tiny") as llm:
        for idea in ideas:
            answer = llm.chat([{"role": "user", "content": idea}], params).outputs[0]
            assert answer.finish_reason == "stop", idea


async def test_all_files_are_served_with_a_policy() -> None:
    async with TestClient(TestServer(build_app(FakeEngine()))) as client:
        answer = await client.get("/")
        assert answer.content_type == "text/html"
        assert await answer.read() == page_files()["index.html"]
        kinds = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
        for name, data in page_files().items():
            answer = await client.get(f"/page/{name}")
            assert (answer.status, await answer.read()) == (200, data)
            assert answer.content_type == kinds[name.rsplit(".")[-1]]
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        for path in ("/page/nothing.js", "/page/../server.py", "/page/__init__.py"):
            assert (await client.get(path)).status == 404


async def test_an_engine_of_another_kind_cannot_be_watched() -> None:
    async with TestClient(TestServer(build_app(FakeEngine()))) as client:
        for path in ("/page/frames", "/page/bytes?die=0"):
            answer = await client.get(path)
            assert answer.status == 404
            assert "cannot be watched" in (await answer.json())["error"]["message"]
