"""Streams of the official client go on over faults: no token twice, none missing, with stops and choices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import openai
import pytest
from aiohttp import ClientSession, web

from xdeepserve.api.server.server import build_app
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import build_engine
from xdeepserve.model.presets import TinyCheckpoint

POD = (
    "prefill.count=2",
    "prefill.dies=2",
    "prefill.tp=2",
    "decode.count=2",
    "decode.dies=2",
    "max_model_len=128",
    "recovery.failover=true",
    "recovery.spare_dies=6",
    "recovery.max_restarts=9",
)
NUM_DIES = 8
KV = ("kv/0/latent", "kv/1/k_pe")


class Answer(NamedTuple):
    """Of one stream: the text of each choice and why it ended."""

    texts: tuple[str, ...]
    reasons: tuple[str | None, ...]


@asynccontextmanager
async def served(tiny: TinyCheckpoint, faults: Sequence[Fault] = ()) -> AsyncIterator[tuple[Engine, str]]:
    """An engine and the address of its endpoint."""
    engine = build_engine(tiny, "pd", "int8", overrides=POD, faults=faults)
    runner = web.AppRunner(build_app(engine), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    yield engine, f"http://{host}:{port}"
    await runner.cleanup()
    engine.check_integrity()
    assert engine.stats().kv_cache_usage == 0


def bodies(count: int) -> list[dict[str, Any]]:
    """Completions of many kinds, which each end by themselves."""
    rng, found = random.Random(7), []
    for i in range(count):
        prompt = [rng.randrange(3, 300) for _ in range(rng.randrange(1, 40))]
        more: dict[str, Any] = {"seed": i, "temperature": rng.choice((0.0, 1.0))}
        more |= rng.choice(({}, {"n": 2}, {"stop": ["e", "\n"]}, {"n": 3, "temperature": 1.0}))
        found.append({"prompt": prompt, "max_tokens": rng.randrange(4, 24), **more})
    return found


async def stream(client: openai.AsyncOpenAI, body: dict[str, Any]) -> Answer:
    """All of a streamed answer."""
    texts, reasons = [""] * body.get("n", 1), [None] * body.get("n", 1)
    async for chunk in await client.completions.create(model="tiny-random", stream=True, **body):
        for choice in chunk.choices:
            assert reasons[choice.index] is None  # nothing follows the end
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    return Answer(tuple(texts), tuple(reasons))


async def answers(url: str, asked: Sequence[dict[str, Any]]) -> list[Answer | openai.APIError]:
    """To all at once, or how they have ended."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:

        async def ask(body: dict[str, Any]) -> Answer | openai.APIError:
            try:
                return await stream(client, body)
            except openai.APIError as error:
                return error

        return list(await asyncio.gather(*map(ask, asked)))


def faults_over(end_us: float, num_lost: int, num_others: int, seed: int) -> list[Fault]:
    """Dies that are lost, glitches and lost pages, in the first nine tenths of a run."""
    rng = random.Random(seed)
    dies = rng.sample(range(NUM_DIES), NUM_DIES)
    found = [Fault(end_us * rng.uniform(0.02, 0.9), die, "lost") for die in dies[:num_lost]]
    for _ in range(num_others):
        at_us, die = end_us * rng.uniform(0.02, 0.9), rng.choice(dies[num_lost:])
        if rng.random() < 0.25:
            found.append(Fault(at_us, die, "bad-page", page=rng.choice(KV)))
        else:
            found.append(Fault(at_us, die, "glitch", code="aicore-exception"))
    return sorted(found, key=lambda fault: fault.at_us or 0)


async def check(tiny: TinyCheckpoint, num_streams: int, num_lost: int, num_others: int, seed: int) -> None:
    """Every stream has what it has without faults."""
    asked = bodies(num_streams)
    async with served(tiny) as (engine, url):
        wanted = await answers(url, asked)
        end_us = engine.stats().virtual_ns / 1000
    assert all(isinstance(each, Answer) for each in wanted)
    async with served(tiny, faults_over(end_us, num_lost, num_others, seed)) as (engine, url):
        found = await answers(url, asked)
        async with ClientSession() as session:
            health: dict[str, Any] = {}
            while not health or any(te["recovering"] for te in health["tes"]):  # it asks dies that rest
                health = await (await session.get(f"{url}/health")).json()
            metrics = await (await session.get(f"{url}/metrics")).text()
        stats = engine.stats()
    assert found == wanted
    assert len(engine.lost) >= num_lost // 2
    assert [te["name"] for te in health["tes"] if te["life"] == "lost"] == list(engine.lost)
    assert stats.num_recoveries["2"] == len(engine.lost)
    for stage, number in stats.num_recoveries.items():
        assert (
            f'xdeepserve:recoveries_total{{model_name="tiny-random",stage="{stage}"}} {number}.0' in metrics
        )


@pytest.mark.always
async def test_streams_go_on(tiny: TinyCheckpoint) -> None:
    await check(tiny, 24, num_lost=2, num_others=4, seed=1)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(3))
async def test_two_hundred_streams_over_twenty_faults(tiny: TinyCheckpoint, seed: int) -> None:
    await check(tiny, 200, num_lost=5, num_others=15, seed=seed)
