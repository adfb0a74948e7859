"""A soak: requests of every kind and length through the HTTP endpoint, over loopback, all in one process.

Clients ask known questions, some whole, some streamed; some leave in the middle, some before the answer
begins, some ask nonsense. In the end every answer that arrived must be right to the token (the right ones
come from one die, one question at a time), every other request must have got an explicit error, no KV block
may be in use, and memory may not have grown with the number of requests.

    python tools/soak.py --requests 2000

The pod is small on purpose: sequences are preempted, prefixes are evicted, and the queue overflows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from xdeepserve import LLM, SamplingParams
from xdeepserve.api.server import build_app
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.llm import build_engine

POD = (
    "max_model_len=128",
    "cache.num_blocks=12",
    "scheduler.max_num_seqs=8",
    "scheduler.max_num_batched_tokens=64",
    "scheduler.max_waiting=36",
)
DIES = ("dies=2", "mtp=1")  # of the deployment "colocated"
CLIENTS = 40  # at a time
MAX_TRIES = 50  # of a client that is told to come again
NUM_QUESTIONS = 64
MAX_GROWTH_MB = 64  # from a quarter of the requests on
# What a client does, and how many in a hundred do it.
KINDS = {"whole": 38, "stream": 30, "chat": 8, "leave": 12, "hang up": 8, "nonsense": 4}


@dataclass
class Question:
    """A request body and the token ids of the right answer, by choice."""

    body: dict[str, Any]
    answer: list[list[int]]
    is_chat: bool = False


@dataclass
class Report:
    """What came of it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)  # at every quarter
    seconds: float = 0.0
    virtual_seconds: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_hits: int = 0
    key_hits: int = 0
    num_prefetched: int = 0

    @property
    def is_good(self) -> bool:
        return not self.problems


def questions(rng: random.Random) -> list[Question]:
    """Prompts of 1 to 90 tokens, half of which begin alike; the answers of a single die."""
    shared = [rng.randrange(3, 259) for _ in range(48)]
    asked: list[Question] = []
    with LLM("tiny", "monolithic") as llm:
        assert llm.tokenizer is not None
        for i in range(NUM_QUESTIONS):
            own = [rng.randrange(3, 259) for _ in range(rng.randint(1, 40))]
            sampling = {
                "max_tokens": rng.randint(1, 24),
                "temperature": rng.choice([0.0, 0.8]),
                "seed": rng.randrange(1000),
                "n": rng.choice([1, 1, 1, 2]),
                "ignore_eos": rng.random() < 0.5,
            }
            is_chat = i % 4 == 0
            if is_chat:
                messages = [{"role": "user", "content": llm.tokenizer.decode(own)}]
                ids, form = llm.tokenizer.apply_chat_template(messages), {"messages": messages}
            else:
                ids = shared + own if rng.random() < 0.5 else own
                form = {"prompt": ids}
            [output] = llm.generate([ids], SamplingParams(**sampling))
            body = {**form, **sampling, "priority": rng.randint(-1, 1), "return_token_ids": True}
            asked.append(Question(body, [choice.token_ids for choice in output.outputs], is_chat))
    return asked


def kinds(rng: random.Random, count: int) -> Iterator[str]:
    names, weights = list(KINDS), list(KINDS.values())
    for _ in range(count):
        yield rng.choices(names, weights)[0]


class Soak:
    """One run against a server at `url`."""

    def __init__(self, engine: Engine, url: str, asked: list[Question], seed: int) -> None:
        self.engine, self.url, self.asked = engine, url, asked
        self.rng = random.Random(seed)
        self.report = Report()

    async def run(self, count: int) -> Report:
        work = kinds(self.rng, count)
        quarters, done = {max(1, count * q // 4) for q in (1, 2, 3, 4)}, 0

        async def client(session: aiohttp.ClientSession) -> None:
            nonlocal done
            for kind in work:
                await self._ask(session, kind)
                done += 1
                if done in quarters:
                    self.report.rss_mb.append(rss_mb())

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(client(session) for _ in range(min(CLIENTS, count))))
        await self._settle()
        return self.report

    async def _ask(self, session: aiohttp.ClientSession, kind: str) -> None:
        chats = [q for q in self.asked if q.is_chat]
        plain = [q for q in self.asked if not q.is_chat]
        question = self.rng.choice(chats if kind == "chat" else plain)
        body = dict(question.body)
        if self.rng.random() < 0.5:  # changes nothing, whatever it is
            body["prompt_cache_key"] = f"key {self.rng.randrange(9)}"
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        if kind == "nonsense":
            body["max_tokens"] = self.rng.choice([0, -1, 10_000])
        is_stream = kind in ("stream", "leave") or (kind == "chat" and self.rng.random() < 0.5)
        patience = self.rng.uniform(0, 0.2) if kind == "hang up" else 300
        limit = self.rng.randint(1, 4) if kind == "leave" else None
        try:
            async with asyncio.timeout(patience):
                for _ in range(MAX_TRIES):
                    status, got = await self._send(session, path, body | {"stream": is_stream}, limit)
                    if status != 429:
                        break
                    self.report.outcomes["(429, and asked again)"] += 1
                    await asyncio.sleep(self.rng.uniform(0.01, 0.1))
        except TimeoutError:
            self._count("hung up" if kind == "hang up" else "no answer", kind != "hang up", question)
            return
        if status != 200:
            is_expected = (kind, status) == ("nonsense", 400) or status == 429
            self._count(f"refused with {status}", not is_expected, question)
        elif kind == "nonsense":
            self._count("nonsense answered", True, question)
        elif got is None:
            self._count("left", False, question)
        else:
            self._count("right" if got == question.answer else "WRONG", got != question.answer, question)

    async def _send(
        self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], limit: int | None
    ) -> tuple[int, list[list[int]] | None]:
        """Status and the answer's token ids by choice; None if the client leaves after `limit` chunks."""
        tokens: list[list[int]] = [[] for _ in range(body["n"])]
        async with session.post(self.url + path, json=body) as response:
            if response.status != 200:
                assert "message" in (await response.json())["error"]
                return response.status, None
            if not body["stream"]:
                for choice in (await response.json())["choices"]:
                    tokens[choice["index"]] = choice["token_ids"]
                return 200, tokens
            num_chunks = 0
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                if num_chunks == limit:
                    response.close()
                    return 200, None
                num_chunks += 1
                for choice in json.loads(line[6:])["choices"]:
                    tokens[choice["index"]] += choice.get("token_ids") or []
        return 200, tokens

    def _count(self, outcome: str, is_problem: bool, question: Question) -> None:
        self.report.outcomes[outcome] += 1
        if is_problem:
            self.report.problems.append(f"{outcome}: {question.body}")

    async def _settle(self) -> None:
        """Let the last aborts arrive; then nothing may be left."""
        for _ in range(200):
            stats = self.engine.stats()
            if not (stats.num_running or stats.num_waiting or stats.kv_cache_usage):
                break
            await asyncio.sleep(0.01)
        self.engine.check_integrity()
        stats, problems = self.engine.stats(), self.report.problems
        if stats.num_running or stats.num_waiting or stats.kv_cache_usage:
            problems.append(f"left behind: {stats}")
        if len(self.report.rss_mb) == 4 and self.report.rss_mb[3] - self.report.rss_mb[0] > MAX_GROWTH_MB:
            problems.append(f"memory grew: {self.report.rss_mb} MB at the quarters")
        self.report.num_steps = sum(stats.rows_per_step.values())
        self.report.num_preemptions, self.report.prefix_hits = stats.num_preemptions, stats.prefix_cache_hits
        self.report.key_hits = stats.cache_key_hits
        self.report.num_prefetched = stats.num_prefetched_blocks
        self.report.virtual_seconds = stats.virtual_ns / 1e9


async def soak(
    count: int, seed: int = 0, deployment: str = "colocated", overrides: Sequence[str] = DIES
) -> Report:
    """Serve, ask `count` times, stop."""
    asked = await asyncio.to_thread(questions, random.Random(seed))
    engine = build_engine("tiny", deployment, "int8", overrides=[*POD, *overrides], warm_up=True)
    runner = web.AppRunner(build_app(engine), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        begin = time.monotonic()
        report = await Soak(engine, f"http://{host}:{port}", asked, seed).run(count)
        report.seconds = time.monotonic() - begin
    finally:
        await runner.cleanup()
    return report


def rss_mb() -> float:
    """Memory of this process now, in MB; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak the endpoint.")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deployment", default="colocated")
    parser.add_argument("--set", dest="overrides", action="append", metavar="KEY=VALUE")
    args = parser.parse_args()
    overrides = args.overrides or (DIES if args.deployment == "colocated" else ())
    report = asyncio.run(soak(args.requests, args.seed, args.deployment, overrides))
    print(
        f"{args.requests} requests in {report.seconds:.1f} s, {report.virtual_seconds:.3f} s of virtual time"
    )
    for outcome, number in sorted(report.outcomes.items()):
        print(f"  {number:6d} {outcome}")
    print(
        f"{report.num_steps} steps, {report.num_preemptions} preemptions, "
        f"{report.prefix_hits} prompt tokens from the prefix cache, {report.key_hits} cache keys known, "
        f"{report.num_prefetched} blocks fetched ahead"
    )
    print(f"memory at the quarters: {', '.join(f'{mb:.0f}' for mb in report.rss_mb)} MB")
    for problem in report.problems[:20]:
        print(f"PROBLEM {problem}", file=sys.stderr)
    print("good" if report.is_good else f"{len(report.problems)} problems")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
