"""What the endpoint costs beside bare aiohttp, with a model that costs nothing, in one run.

    python tools/endpoint_overhead.py

Both serve in this process, on one event loop; the client is a process of its own, the same one for both, and
asks them in turns. The model hands out tokens that are there already, so that all that is measured is the
endpoint: reading, checking, counting, encoding. At last, what a step of the engine takes with the smallest
model, and what a schema adds to it for each token.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from xdeepserve import LLM, SamplingParams, StructuredOutputsParams
from xdeepserve.api.server.server import build_app
from xdeepserve.engine.serving.request import EngineStats, OutputDelta, OutputFormats
from xdeepserve.loop import new_event_loop

TOKENS, CLIENTS, SECONDS, TURNS = 64, 16, 1.0, 5
BODY = {"prompt": [1, 2, 3], "max_tokens": TOKENS, "temperature": 0}
JSON = {"Content-Type": "application/json"}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 40}}, "required": ["name"]}


class FreeHandle:
    """A request whose tokens are there."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def abort(self) -> None:
        """Nothing is held."""

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        for number in range(self._num_tokens):
            await asyncio.sleep(0)  # each comes in a step of its own
            ends = "length" if number + 1 == self._num_tokens else None
            yield OutputDelta(index=0, text=" token", token_ids=[7], finish_reason=ends, at_ns=number)


class FreeEngine:
    """A model that costs nothing."""

    model_name, vocab_size, max_model_len, tokenizer = "free", 1000, 4096, None
    formats, unhealthy_reason = OutputFormats(), None

    def submit(self, prompt: Sequence[int], params: SamplingParams, *args: Any, **more: Any) -> FreeHandle:
        return FreeHandle(params.max_tokens or 1)

    def check_room(self, num_new: int) -> None:
        """There always is."""

    def stats(self) -> EngineStats:
        return EngineStats()

    def is_healthy(self) -> bool:
        return True

    async def start(self) -> None:
        """It runs."""

    async def stop(self) -> None:
        """It holds nothing."""


def bare_app(whole: bytes, chunk: bytes) -> web.Application:
    """aiohttp alone, with answers of the same bytes."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if not body.get("stream"):
            return web.Response(body=whole, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0)
            await response.write(chunk)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    return app


async def ask(url: str, is_stream: bool) -> float:
    """Requests, or chunks, a second."""
    body = json.dumps(BODY | {"stream": is_stream, "max_tokens": TOKENS if is_stream else 1})
    end, count = time.monotonic() + SECONDS, 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal count
        while time.monotonic() < end:
            async with session.post(f"{url}/v1/completions", data=body, headers=JSON) as response:
                assert response.status == 200
                await response.read()
                count += TOKENS if is_stream else 1

    begin = time.monotonic()
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
    return count / (time.monotonic() - begin)


async def served(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, "http://{}:{}".format(*runner.addresses[0][:2])


async def asked(url: str, is_stream: bool) -> float:
    """By a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "ask", url, str(int(is_stream)), stdout=subprocess.PIPE
    )
    said, _ = await process.communicate()
    return float(said)


async def measure() -> None:
    """Print requests and chunks a second of both, and their share."""
    ours, url = await served(build_app(FreeEngine()))  # type: ignore[arg-type]
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/completions", json=BODY | {"max_tokens": 1}) as response:
            whole = await response.read()
        async with session.post(f"{url}/v1/completions", json=BODY | {"stream": True}) as response:
            chunk = (await response.read()).split(b"\n\n")[0] + b"\n\n"
    bare, bare_url = await served(bare_app(whole, chunk))
    for is_stream, unit in ((False, "requests"), (True, "chunks")):
        pairs = [(await asked(url, is_stream), await asked(bare_url, is_stream)) for _ in range(TURNS)]
        print(summary(pairs, unit), flush=True)
    await ours.cleanup()
    await bare.cleanup()


def summary(pairs: Sequence[tuple[float, float]], unit: str) -> str:
    """The turn whose share is the median of all turns' shares, both of whose rates it names.

    The medians of rates would be those of different turns, whose quotient is none of the shares.
    """
    median = statistics.median_low(one / other for one, other in pairs)
    mine, theirs = next((one, other) for one, other in pairs if one / other == median)
    rates = f"endpoint {mine:,.0f}, bare aiohttp {theirs:,.0f}"
    return f"{unit}/s: {rates}: {median:.2f} of it, the median turn of {len(pairs)}"


def step_us(llm: LLM, form: StructuredOutputsParams | None) -> float:
    """Wall time for each token of one sequence."""
    params = SamplingParams(max_tokens=32, temperature=1.0, seed=1, structured_outputs=form)
    params = params if form else SamplingParams(max_tokens=32, temperature=1.0, seed=1, ignore_eos=True)
    times = []
    for _ in range(TURNS + 1):
        begin = time.perf_counter()
        [output] = llm.generate(["Once"], params)
        times.append(1e6 * (time.perf_counter() - begin) / len(output.outputs[0].token_ids))
    return statistics.median(times[1:])


def main() -> int:
    if sys.argv[1:2] == ["ask"]:
        print(asyncio.run(ask(sys.argv[2], sys.argv[3] == "1")))
        return 0
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(measure())
    with LLM("tiny") as llm:
        plain, formed = step_us(llm, None), step_us(llm, StructuredOutputsParams(json=SCHEMA))
    print(f"a step of tiny with one sequence: {plain:.0f} us a token")
    print(f"what the JSON of a schema adds to it: {formed - plain:.0f} us a token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
