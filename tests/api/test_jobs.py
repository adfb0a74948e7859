"""The official client uploads a file, has the model quantised, follows it, and chats with the result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from xdeepserve import LLM, SamplingParams
from xdeepserve.api.options import ServerOptions
from xdeepserve.api.server import build_app
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.llm import build_engine

HI = [{"role": "user", "content": "Tell me a story about a cat."}]
METHOD = {"type": "quantization", "quantization": {"hyperparameters": {"algorithm": "rtn", "samples": 4}}}
SECONDS = 120.0


def examples(count: int = 10) -> bytes:
    lines: list[dict[str, Any]] = [
        {"messages": [*HI, {"role": "assistant", "content": f"There were {i} cats."}]}
        for i in range(count - 1)
    ]
    lines.append({"prompt": "Once upon a time", "completion": " there was a fox."})
    return b"\n".join(json.dumps(line).encode() for line in lines)


class running:
    """A server on the shipped model, in a `with` block: the official client."""

    def __init__(self, state: Path | None, *overrides: str) -> None:
        self.engine: Engine = build_engine("tiny", "monolithic", "int8", overrides=overrides, warm_up=True)
        options = ServerOptions(state=state)
        self.runner = web.AppRunner(build_app(self.engine, options), handler_cancellation=True)

    async def __aenter__(self) -> openai.AsyncOpenAI:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        port = self.runner.addresses[0][1]
        self.client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
        return self.client

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.runner.cleanup()


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with running(tmp_path / "state", "max_model_len=256") as client:
        yield client


async def ordered(api: openai.AsyncOpenAI, **more: Any) -> Any:
    file = await api.files.create(file=("mine.jsonl", examples()), purpose="fine-tune")
    return await api.fine_tuning.jobs.create(
        **{"model": "tiny", "training_file": file.id, "method": METHOD, **more}
    )


async def ended(api: openai.AsyncOpenAI, job_id: str) -> Any:
    async with asyncio.timeout(SECONDS):
        while (job := await api.fine_tuning.jobs.retrieve(job_id)).status in ("queued", "running"):
            await asyncio.sleep(0.1)
    return job


async def test_a_model_is_quantised_and_served(tmp_path: Path) -> None:
    """Its bits are those of the same checkpoint on a pod of its own, beside a stream that goes on, and after
    the server has been started again."""
    state = tmp_path / "state"
    async with running(state, "max_model_len=256") as api:
        job = await ordered(api, suffix="mine", metadata={"for": "me"})
        assert (job.status, job.object, job.fine_tuned_model) == ("queued", "fine_tuning.job", None)
        job = await ended(api, job.id)
        assert (job.status, job.error, job.fine_tuned_model) == ("succeeded", None, "ft:tiny:mine:1")
        found = {task["kind"]: task["result"] for task in job.tasks}
        assert found["prepare"]["calibration_examples"] == 8
        assert found["prepare"]["held_out_examples"] == 2
        perplexity = found["evaluate"]["perplexity"]
        assert 1 < perplexity["original"] != perplexity["quantized"] < 1.1 * perplexity["original"]
        events = [event async for event in api.fine_tuning.jobs.list_events(job.id, limit=3)]
        said = [event.message for event in reversed(events)]
        assert said[0].startswith("the job is queued")
        assert said[-1] == "the job is succeeded"
        assert [text for text in said if text.endswith("is done")] == [f"{kind} is done" for kind in found]
        assert [model.id async for model in api.models.list()] == ["tiny", "ft:tiny:mine:1"]
        answers = [await chat(api, name) for name in ("tiny", "ft:tiny:mine:1")]
    with LLM(state / "work" / "00000001" / "model", overrides=["max_model_len=256"]) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.0)
        assert llm.chat(HI, params).outputs[0].text == answers[1]
    async with running(state, "max_model_len=256") as api:
        assert [await chat(api, name) for name in ("tiny", "ft:tiny:mine:1")] == answers
        assert (await api.models.delete("ft:tiny:mine:1")).deleted
        assert [model.id async for model in api.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await chat(api, "ft:tiny:mine:1")
    assert not (state / "work" / "00000001").exists()


async def chat(api: openai.AsyncOpenAI, model: str) -> str | None:
    answer = await api.chat.completions.create(model=model, messages=HI, max_tokens=12, temperature=0)
    assert answer.model == model
    return answer.choices[0].message.content
