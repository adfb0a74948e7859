"""Agents: a bounded loop of chat tasks with the operator's tools, which goes on whoever is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import build_app
from xdeepserve.errors import InputError
from xdeepserve.jobs.agent_tools import read_tools
from xdeepserve.llm import build_engine

TOOLS = '''
import time
from pathlib import Path

def get_weather(city: str, day: str) -> str:
    """The weather in a city."""
    while Path(__file__).with_name("wait").exists():
        time.sleep(0.01)
    return f"sunny, {len(city)} degrees"

def find_train(start: str, hour: int) -> str:
    """Find a train."""
    raise ValueError("no train on a Sunday")

def _helper(x):
    return x
'''
WEATHER = [{"role": "user", "content": "What is the weather in Oslo today?"}]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path / "tools.py"


class Agents:
    """A server, and a client of its agents."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def __call__(self, method: str, path: str = "", **body: Any) -> Any:
        async with self.session.request(method, f"/v1/agent/jobs{path}", json=body or None) as answer:
            return await answer.json()

    async def ended(self, **order: Any) -> Any:
        job = await self("POST", **{"model": "tiny", "messages": WEATHER, **order})
        async with asyncio.timeout(120):
            while job["status"] in ("queued", "running"):
                await asyncio.sleep(0.05)
                job = await self("GET", f"/{job['id']}")
        return job


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Agents]:
    engine = build_engine(
        "tiny", "monolithic", "int8", overrides=["max_model_len=512", "cache.block_size=16"]
    )
    options = ServerOptions(state=folder / "state", tools=folder / "tools.py")
    runner = web.AppRunner(build_app(engine, options), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
        yield Agents(session)
    await runner.cleanup()


@pytest.fixture
async def agents(tmp_path: Path, tools: Path) -> AsyncIterator[Agents]:
    async with running(tmp_path) as client:
        yield client


async def test_an_agent_calls_a_tool_and_answers(agents: Agents, tools: Path) -> None:
    job = await agents.ended(tools=["get_weather"], max_turns=4)
    assert (job["id"], job["status"], job["error"]) == ("agentjob-00000001", "succeeded", None)
    first, call, heard, last = job["messages"]
    assert first == WEATHER[0]
    assert call["tool_calls"][0]["function"]["name"] == "get_weather"
    assert heard == {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "content": "sunny, 4 degrees",
    }
    body = {"messages": job["messages"][:-1], "tools": [read_tools(tools)["get_weather"].shown()]}
    async with agents.session.post("/v1/chat/completions", json={**body, "temperature": 0}) as answer:
        chat = await answer.json()
    assert job["output"] == last["content"] == chat["choices"][0]["message"]["content"]
    assert job["output"].startswith("The weather in Oslo ")
    assert [task["state"] for task in job["tasks"]] == ["done", "done", "cancelled", "cancelled"]
    cached = job["tasks"][1]["result"]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 16, "KV of the turn before is found by the job's id"
    events = await agents("GET", f"/{job['id']}/events?order=asc")
    said = [event["message"] for event in events["data"]]
    assert said[0] == "the job is queued: turn, turn, turn, turn"
    assert said[-1] == "the job is succeeded"
    assert {event["object"] for event in events["data"]} == {"agent.job.event"}
    async with agents.session.get("/v1/fine_tuning/jobs") as answer:
        assert (await answer.json())["data"] == []
    async with agents.session.get("/v1/fine_tuning/jobs/ftjob-00000001") as answer:
        assert answer.status == 404


async def test_an_agent_goes_on_where_its_server_was_lost(tmp_path: Path, tools: Path) -> None:
    order = {"tools": ["get_weather"], "max_turns": 3}
    async with running(tmp_path) as agents:
        expected = await agents.ended(**order)
        (tmp_path / "wait").touch()
        job = await agents("POST", **{"model": "tiny", "messages": WEATHER, **order})
        while (await agents("GET", f"/{job['id']}"))["tasks"][0]["state"] != "running":
            await asyncio.sleep(0.02)
    (tmp_path / "wait").unlink()
    async with running(tmp_path) as agents, asyncio.timeout(120):
        while (found := await agents("GET", f"/{job['id']}"))["status"] != "succeeded":
            await asyncio.sleep(0.05)
    assert found["output"] == expected["output"]


async def test_an_agent_without_an_answer_says_so(agents: Agents) -> None:
    job = await agents.ended(tools=["get_weather"], max_turns=1)
    assert job["status"] == "failed"
    assert job["error"]["message"] == "the agent has not come to an answer in 1 turns"
    long = [{"role": "user", "content": "and then " * 400}]
    job = await agents.ended(messages=long)
    assert job["status"] == "failed"
    assert job["error"]["message"].startswith("turn: the model's context holds 512 tokens")


@pytest.mark.parametrize(
    ("order", "line"),
    [
        ({"tools": ["fly"]}, 'there is no tool "fly": this server has get_weather, find_train'),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"content": "x"}]}, "messages: Object missing required field role"),
        ({"max_turns": 0}, "max_turns must be 1 to 32, found 0"),
        ({"model": "gpt-5"}, 'the model "gpt-5" does not exist'),
        ({"speed": 1}, "unknown field speed"),
    ],
)
async def test_an_order_that_cannot_be(agents: Agents, order: dict[str, Any], line: str) -> None:
    found = await agents("POST", **{"model": "tiny", "messages": WEATHER, **order})
    assert line in found["error"]["message"]


def test_tools_are_what_the_file_says(tools: Path) -> None:
    found = read_tools(tools)
    assert list(found) == ["get_weather", "find_train"]
    assert found["find_train"].shown()["function"] == {
        "name": "find_train",
        "description": "Find a train.",
        "parameters": {
            "type": "object",
            "properties": {"start": {"type": "string"}, "hour": {"type": "integer"}},
            "required": ["start", "hour"],
        },
    }
    train = found["find_train"].call
    assert train('{"start": "Oslo", "hour": 7}') == "error: no train on a Sunday"
    assert train('{"start": "Oslo"}') == "error: find_train takes start, hour"
    assert train('{"start": "Oslo", "hour": "late"}') == "error: hour must be a whole number, found 'late'"
    assert train("{").startswith(
        "error: arguments, line 1, column 2: not valid JSON: expecting property name"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def f(x): pass", "parameter x of f must be str, int, float or bool"),
        ("def f(", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_of_tools_that_will_not_do(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "tools.py").write_text(text)
    with pytest.raises(InputError, match=line) as caught:
        read_tools(tmp_path / "tools.py")
    assert "\n" not in str(caught.value)
