"""A soak: requests of every kind and length through the HTTP endpoint, over loopback, all in one process.

Clients ask known questions: some whole, some streamed, some for JSON of a schema. A third of them hang up at
any moment: while they send, before the answer begins, in the middle of it. Some read slowly, some ask
nonsense. In the end every answer that arrived must be right to the token (the right ones come from one die,
one question at a time), every other request must have got an explicit error, counters must agree, no KV block
may be in use, and memory may not have grown with the number of requests.

    python tools/soak.py --requests 2000                    # colocated
    python tools/soak.py --requests 100000 --pods all       # shared by ten pods, one after the other
    python tools/soak.py --requests 2000 --pods pd-by-layer,failover

Pods are small on purpose: sequences are preempted, prefixes are evicted, and the queue overflows.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from xdeepserve import LLM, SamplingParams
from xdeepserve.api.server.server import build_app
from xdeepserve.engine.dp.structured_outputs import StructuredOutputsParams
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.hw.faults import Fault
from xdeepserve.llm import build_engine

SMALL = (
    "max_model_len=128",
    "cache.num_blocks=12",
    "scheduler.max_num_seqs=8",
    "scheduler.max_num_batched_tokens=64",
    "scheduler.max_waiting=36",
)


class Pod(NamedTuple):
    """A deployment that is soaked: its name, settings beside SMALL, and what breaks meanwhile."""

    deployment: str
    overrides: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    share: int = 1  # of the requests: pods of one die take many times as many a second


UNEQUAL_TP = ("prefill.dies=2", "prefill.tp=2", "decode.dies=1")
FEW_EXPERT_DIES = (
    "attention.domains=2",
    "attention.dies=1",
    "experts.routed_dies=2",
    "experts.shared_dies=1",
)
PODS = {
    "monolithic": Pod("monolithic", ("mtp=1",), share=12),
    "colocated": Pod("colocated", ("dies=2", "mtp=1"), share=3),
    "planning-ahead": Pod("colocated", ("dies=2", "execution.overlap=true"), share=3),
    "swap": Pod("monolithic", ("mtp=2", "cache.preemption=swap", "cache.num_host_blocks=24"), share=6),
    "pd": Pod("pd", ("mtp=1", *UNEQUAL_TP)),
    "pd-by-layer": Pod("pd", ("transfer=layer", "scheduler.admission=decode", *UNEQUAL_TP)),
    "moe-attention": Pod("moe-attention", ("mtp=1", *FEW_EXPERT_DIES)),
    "dataflow": Pod("moe-attention", ("dataflow=true", "execution.mode=op", *FEW_EXPERT_DIES)),
    "transformerless": Pod("transformerless", ("mtp=1", "prefill.dies=2", "prefill.tp=2", *FEW_EXPERT_DIES)),
    "failover": Pod(
        "pd",
        (
            *UNEQUAL_TP,
            "decode.count=2",
            "recovery.failover=true",
            "recovery.spare_dies=2",
            "health.lost_s=0.5",
            "health.suspect_s=0.1",
        ),
        (Fault(at_us=200_000.0, die=2, kind="lost"), Fault(at_us=5_000_000.0, die=0, kind="lost")),
    ),
}
CLIENTS = 40  # at a time
MAX_TRIES = 50  # of a client that is told to come again
NUM_QUESTIONS = 64
MAX_GROWTH_MB = 64  # from a quarter of the requests on
STAY = {"whole": 26, "stream": 20, "chat": 6, "structured": 6, "slow": 4, "nonsense": 4}
HANG_UP = {"hang up": 14, "leave": 12, "half a body": 4, "time out": 4}
KINDS = STAY | HANG_UP  # what a client does, and how many in a hundred do it
STREAMS = ("stream", "leave", "slow")
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["sum", "ok"],
    "additionalProperties": False,
}


@dataclass
class Question:
    """A request body and the token ids of the right answer, by choice."""

    body: dict[str, Any]
    answer: list[list[int]]
    kind: str = "plain"  # or "chat", "structured"


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


Asked = list[Question]


def questions(rng: random.Random) -> Asked:
    """Prompts of 1 to 90 tokens, half of which begin alike; the answers of a single die."""
    shared = [rng.randrange(3, 259) for _ in range(48)]
    asked: Asked = []
    with LLM("tiny", "monolithic") as llm:
        assert llm.tokenizer is not None
        for i in range(NUM_QUESTIONS):
            own = [rng.randrange(3, 259) for _ in range(rng.randint(1, 40))]
            sampling = {
                "max_tokens": rng.randint(1, 12),
                "temperature": rng.choice([0.0, 0.8]),
                "seed": rng.randrange(1000),
                "n": rng.choice([1, 1, 1, 2]),
                "ignore_eos": rng.random() < 0.5,
            }
            kind = ("chat", "plain", "plain", "plain", "structured", "plain", "plain", "plain")[i % 8]
            if kind == "structured":
                sampling |= {"max_tokens": 24, "ignore_eos": False}
                ids = llm.tokenizer.encode("Give a sum.") + own
                form = {"prompt": ids, "structured_outputs": {"json": SCHEMA}}
            elif kind == "chat":
                messages = [{"role": "user", "content": llm.tokenizer.decode(own)}]
                ids, form = llm.tokenizer.apply_chat_template(messages), {"messages": messages}
            else:
                ids = shared + own if rng.random() < 0.5 else own
                form = {"prompt": ids}
            asks = StructuredOutputsParams(json=SCHEMA) if kind == "structured" else None
            [output] = llm.generate([ids], SamplingParams(**sampling, structured_outputs=asks))
            body = {**form, **sampling, "priority": rng.randint(-1, 1), "return_token_ids": True}
            asked.append(Question(body, [choice.token_ids for choice in output.outputs], kind))
    return asked


def kinds(rng: random.Random, count: int) -> Iterator[str]:
    names, weights = list(KINDS), list(KINDS.values())
    for _ in range(count):
        yield rng.choices(names, weights)[0]


class Soak:
    """One run against a server at `url`."""

    def __init__(self, engine: Engine, url: str, asked: Asked, seed: int) -> None:
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
        wanted = kind if kind in ("chat", "structured") else "plain"
        if kind in ("hang up", "time out"):
            wanted = self.rng.choice(["plain", "chat", "structured"])
        question = self.rng.choice([each for each in self.asked if each.kind == wanted])
        body = dict(question.body)
        if self.rng.random() < 0.5:  # changes nothing, whatever it is
            body["prompt_cache_key"] = f"key {self.rng.randrange(9)}"
        path = "/v1/chat/completions" if wanted == "chat" else "/v1/completions"
        if kind == "nonsense":
            body["max_tokens"] = self.rng.choice([0, -1, 10_000])
        if kind == "half a body":
            await self._hang_up_while_sending(path, body)
            self._count("hung up", False, question)
            return
        is_stream = kind in STREAMS or (kind not in ("whole", "nonsense") and self.rng.random() < 0.5)
        patience = {"hang up": self.rng.uniform(0, 0.05), "time out": self.rng.uniform(0.05, 1.0)}.get(
            kind, 300
        )
        limit = self.rng.randint(1, 4) if kind == "leave" else None
        try:
            async with asyncio.timeout(patience):
                for _ in range(MAX_TRIES):
                    status, got = await self._send(session, path, body | {"stream": is_stream}, limit, kind)
                    if status != 429:
                        break
                    self.report.outcomes["(429, and asked again)"] += 1
                    await asyncio.sleep(self.rng.uniform(0.01, 0.1))
        except TimeoutError:
            leaves = kind in ("hang up", "time out")
            self._count("hung up" if leaves else "no answer", not leaves, question)
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
        self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], limit: int | None, kind: str
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
                if kind == "slow":
                    await asyncio.sleep(0.05)
                event = json.loads(line[6:])
                if "error" in event:
                    return event["error"].get("code", 500), None
                for choice in event["choices"]:
                    tokens[choice["index"]] += choice.get("token_ids") or []
        return 200, tokens

    async def _hang_up_while_sending(self, path: str, body: dict[str, Any]) -> None:
        """Send a part of a request, wait a moment, and reset the connection."""
        host, port = self.url.removeprefix("http://").split(":")
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        whole = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(whole[: self.rng.randint(1, len(whole))])
        await asyncio.sleep(self.rng.uniform(0, 0.02))
        writer.transport.abort()

    def _count(self, outcome: str, is_problem: bool, question: Question) -> None:
        self.report.outcomes[outcome] += 1
        if is_problem:
            self.report.problems.append(f"{outcome}: {question.body}")

    async def _settle(self) -> None:
        """Let the last aborts arrive; then nothing may be left."""
        for _ in range(2000):
            stats = self.engine.stats()
            if not (stats.num_running or stats.num_waiting or stats.kv_cache_usage):
                break
            await asyncio.sleep(0.01)
        self.engine.check_integrity()
        stats, problems = self.engine.stats(), self.report.problems
        if stats.num_running or stats.num_waiting or stats.kv_cache_usage:
            problems.append(f"left behind: {stats}")
        if not self.engine.is_healthy():
            problems.append(f"the engine cannot serve: {self.engine.unhealthy_reason}")
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as response:
            self._check_counters(await response.text())
        if len(self.report.rss_mb) == 4 and self.report.rss_mb[3] - self.report.rss_mb[0] > MAX_GROWTH_MB:
            problems.append(f"memory grew: {self.report.rss_mb} MB at the quarters")
        self.report.num_steps = sum(stats.rows_per_step.values())
        self.report.num_preemptions, self.report.prefix_hits = stats.num_preemptions, stats.prefix_cache_hits
        self.report.key_hits = stats.cache_key_hits
        self.report.num_prefetched = stats.num_prefetched_blocks
        self.report.virtual_seconds = stats.virtual_ns / 1e9

    def _check_counters(self, metrics: str) -> None:
        """Each choice that was begun has ended once, whatever became of its client."""
        totals: Counter[str] = Counter()
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                totals[sample.name] += sample.value
        problems = self.report.problems
        asked, ended = totals["vllm:request_params_n_sum"], totals["vllm:request_success_total"]
        if asked != ended:
            problems.append(f"{asked:g} choices were asked for, and {ended:g} have ended")
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            if totals[gauge]:
                problems.append(f"{gauge} is {totals[gauge]:g} at the end")


async def soak(count: int, seed: int = 0, pod: Pod = PODS["colocated"], asked: Asked | None = None) -> Report:
    """Serve, ask `count` times, stop."""
    asked = asked or await asyncio.to_thread(questions, random.Random(seed))
    overrides = [*SMALL, *pod.overrides]
    engine = build_engine(
        "tiny", pod.deployment, "int8", overrides=overrides, warm_up=True, faults=pod.faults
    )
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
    parser.add_argument("--requests", type=int, default=2000, help="shared by the pods; default 2000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pods", default="colocated", help=f"all, or some of {', '.join(PODS)}")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    names = list(PODS) if args.pods == "all" else args.pods.split(",")
    if unknown := [name for name in names if name not in PODS]:
        parser.error(f"--pods {', '.join(unknown)}: known are {', '.join(PODS)}")
    asked, is_good = questions(random.Random(args.seed)), True
    shares = sum(PODS[name].share for name in names)
    for name in names:
        pod = PODS[name]._replace(overrides=(*PODS[name].overrides, *args.overrides))
        report = asyncio.run(soak(args.requests * pod.share // shares, args.seed, pod, asked))
        show(name, report)
        is_good &= report.is_good
    return 0 if is_good else 1


def show(name: str, report: Report) -> None:
    """Print what came of a pod's requests."""
    number = sum(n for outcome, n in report.outcomes.items() if not outcome.startswith("("))
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(report.outcomes.items()))
    print(
        f"{name}: {number} requests in {report.seconds:.0f} s, {report.virtual_seconds:.3f} s of virtual "
        f"time: {outcomes}\n"
        f"  {report.num_steps} steps, {report.num_preemptions} preemptions, "
        f"{report.prefix_hits} prompt tokens from the prefix cache, {report.key_hits} cache keys known, "
        f"{report.num_prefetched} blocks fetched ahead; memory at the quarters: "
        f"{', '.join(f'{mb:.0f}' for mb in report.rss_mb)} MB; "
        f"{'good' if report.is_good else f'{len(report.problems)} problems'}",
        flush=True,
    )
    for problem in report.problems[:20]:
        print(f"PROBLEM {problem[:300]}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
