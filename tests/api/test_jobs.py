"""The official client uploads a file, has the model quantised, follows it, and chats with the result."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from xdeepserve import LLM, SamplingParams
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.server import build_app
from xdeepserve.engine.serving.engine import Engine
from xdeepserve.jobs import training
from xdeepserve.jobs.task_work import KINDS
from xdeepserve.llm import build_engine
from xdeepserve.model.answer_lengths import FILE
from xdeepserve.model.presets import PRESET_DIRECTORY

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

    def __init__(self, state: Path | None, *overrides: str, deployment: str = "monolithic") -> None:
        self.engine: Engine = build_engine("tiny", deployment, "int8", overrides=overrides, warm_up=True)
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a server for orders that are refused: it never has a job."""
    async with running(tmp_path_factory.mktemp("state") / "state", "max_model_len=256") as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def file(shared: openai.AsyncOpenAI) -> str:
    """The one file that the shared server keeps."""
    return (await shared.files.create(file=("mine.jsonl", examples()), purpose="fine-tune")).id


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
        async with aiohttp.ClientSession(str(api.base_url.copy_with(path="/"))) as session:
            text = await (await session.get("/metrics")).text()
            health = await (await session.get("/health")).json()
        for name in ("tiny", "ft:tiny:mine:1"):
            assert f'vllm:generation_tokens_total{{engine="0",model_name="{name}"}}' in text
        names = [line for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(set(names)) == len(names)  # Prometheus wants each once
        assert len(health["tes"]) == 2
    model = state / "work" / "00000001" / "model"
    assert (model / FILE).read_bytes() == (PRESET_DIRECTORY / "tiny" / FILE).read_bytes()
    with LLM(model, overrides=["max_model_len=256"]) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.0)
        assert llm.chat(HI, params).outputs[0].text == answers[1]
    async with running(state, "max_model_len=256") as api:
        assert [await chat(api, name) for name in ("tiny", "ft:tiny:mine:1")] == answers
        assert (await api.models.delete("ft:tiny:mine:1")).deleted
        assert [model.id async for model in api.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await chat(api, "ft:tiny:mine:1")
    assert not (state / "work" / "00000001").exists()


@pytest.mark.thin(4)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_te_is_lost_at_each_task_of_a_job(tmp_path: Path, kind: str) -> None:
    """Another one takes its place: chats do not change, and the job ends with a model that is served."""
    pod = ("prefill.dies=1", "decode.dies=1", "max_model_len=256", "recovery.failover=true")
    server = running(tmp_path / "state", *pod, "recovery.spare_dies=4", deployment="pd")
    async with server as api, asyncio.timeout(SECONDS):
        story = await chat(api, "tiny")
        job = await ordered(api)
        while {task["kind"]: task["state"] for task in job.tasks}[kind] == "waiting":
            await asyncio.sleep(0.01)
            job = await api.fine_tuning.jobs.retrieve(job.id)
        (te,) = (te for te in server.engine.je.tes if te.sizes.place.role == "decode")
        server.engine.plan.pod.break_die(te.groups[0].dies[0].index)
        assert await chat(api, "tiny") == story
        assert te not in server.engine.je.tes
        job = await ended(api, job.id)
        assert (job.status, job.error) == ("succeeded", None)
        assert await chat(api, job.fine_tuned_model)
        assert await chat(api, "tiny") == story


async def chat(api: openai.AsyncOpenAI, model: str) -> str | None:
    answer = await api.chat.completions.create(model=model, messages=HI, max_tokens=12, temperature=0)
    assert answer.model == model
    return answer.choices[0].message.content


async def test_a_job_is_cancelled_and_listed_in_pages(api: openai.AsyncOpenAI) -> None:
    jobs = [await ordered(api) for _ in range(3)]
    assert (await api.fine_tuning.jobs.cancel(jobs[2].id)).status == "cancelled"
    page = await api.fine_tuning.jobs.list(limit=2)
    assert ([job.id for job in page.data], page.has_more) == ([jobs[2].id, jobs[1].id], True)
    assert [job.id async for job in api.fine_tuning.jobs.list(limit=1, after=jobs[1].id)] == [jobs[0].id]
    for job in jobs[:2]:
        await api.fine_tuning.jobs.cancel(job.id)
    with pytest.raises(openai.BadRequestError, match=f"{jobs[0].id} is cancelled, and cannot be cancelled"):
        await api.fine_tuning.jobs.cancel(jobs[0].id)
    assert [(await ended(api, job.id)).status for job in jobs] == ["cancelled"] * 3
    assert [model.id async for model in api.models.list()] == ["tiny"]


async def test_files_are_kept_and_forgotten(api: openai.AsyncOpenAI) -> None:
    file = await api.files.create(file=("a.jsonl", examples()), purpose="fine-tune")
    assert (file.bytes, file.filename, file.purpose) == (len(examples()), "a.jsonl", "fine-tune")
    assert (await api.files.content(file.id)).content == examples()
    assert await api.files.retrieve(file.id) == file
    assert [each.id async for each in api.files.list()] == [file.id]
    job = await api.fine_tuning.jobs.create(model="tiny", training_file=file.id, method=METHOD)
    with pytest.raises(openai.BadRequestError, match=f"{file.id} is needed by {job.id}, which is"):
        await api.files.delete(file.id)
    await api.fine_tuning.jobs.cancel(job.id)
    assert (await api.files.delete(file.id)).deleted
    assert [each.id async for each in api.files.list()] == []


LINES = (
    *(b"--x", b"--x--", b"", b"--y", b"\xff", b"{}", b"fine-tune", b"Content-Type: text/plain; charset=none"),
    *(b'Content-Disposition: form-data; name="purpose"', b"Content-Disposition: form-data", b"a: b: c"),
    *(b'Content-Disposition: form-data; name="file"; filename="a"', b"Content-Length: a", b"no header"),
    *(b'Content-Disposition: form-data; name="mood"', b"Content-Transfer-Encoding: base64"),
    *(b"Content-Type: multipart/mixed; boundary=y", b"Content-Encoding: gzip", b"Content-Length: -1"),
    b"Content-Type: multipart/form-data",
)
TYPES = (
    *(None, "", "multipart/form-data", "multipart/form-data; boundary=x", 'multipart/form-data; boundary=""'),
    *(f"multipart/form-data; boundary={'x' * 80}", "multipart/form-data; boundary=\xe9", "multipart/mixed"),
    *("application/json", "multipart/form-data; boundary=x; charset=none"),
)


@pytest.mark.asyncio(loop_scope="module")
async def test_forms_at_random(shared: openai.AsyncOpenAI) -> None:
    """Whatever comes as a form is kept or refused."""
    rng = random.Random(5)
    url = f"{shared.base_url}files"
    async with aiohttp.ClientSession() as session:
        for number in range(300):
            kind = rng.choice(TYPES) if number % 2 else "multipart/form-data; boundary=x"
            lines = [b"--x", *rng.choices(LINES, k=rng.randrange(8)), *rng.choices((b"--x--",), k=number % 2)]
            body = b"" if number % 10 == 1 else b"\r\n".join(lines) + b"\r\n"
            headers = {} if kind is None else {"Content-Type": kind}
            asked = session.post(url, data=body, headers=headers, skip_auto_headers=["Content-Type"])
            async with asked as answer:
                assert answer.status < 500, (kind, body, await answer.text())


def quantization(**settings: Any) -> dict[str, Any]:
    return {"type": "quantization", "quantization": {"hyperparameters": settings}}


def supervised(**settings: Any) -> dict[str, Any]:
    return {"type": "supervised", "supervised": {"hyperparameters": settings}}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("method", [None, supervised(n_epochs=2)])
async def test_training_without_its_extra(
    shared: openai.AsyncOpenAI, file: str, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    with pytest.raises(openai.BadRequestError, match=r"pip install 'xdeepserve\[train\]'"):
        await shared.fine_tuning.jobs.create(
            model="tiny", training_file=file, method=openai.omit if method is None else method
        )


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"method": {"type": "dpo"}}, 'method.type "dpo": this server quantises .* and trains'),
        ({"method": {"type": "supervised", "dpo": {}}}, "method.dpo does not go with supervised"),
        ({"method": supervised(n_epochs=51)}, r"n_epochs must lie in \(0, 50\], found 51"),
        ({"method": supervised(epochs=1)}, "unknown field method.supervised.hyperparameters.epochs"),
        ({"method": quantization(algorithm="gptk")}, 'unknown algorithm "gptk": .* mean gptq'),
        ({"method": quantization(samples=0)}, "samples must be 1 to 4096, found 0"),
        ({"method": quantization(epochs=1)}, "unknown field method.quantization.hyperparameters.epochs"),
        ({"suffix": "a b"}, 'suffix must have 1 to 64 letters, digits and hyphens, found "a b"'),
        ({"hyperparameters": {"n_epochs": 1}}, "hyperparameters is not served"),
        ({"training_file": "file-00000009"}, 'there is no file "file-00000009"'),
        ({"training_file": "mine"}, 'there is no file "mine"'),
        ({"validation_file": "file-9"}, 'there is no file "file-9"'),
        ({"model": "gpt-5"}, 'the model "gpt-5" does not exist; this server has "tiny"'),
        ({"speed": 1}, "unknown field speed"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_job_that_cannot_be(
    shared: openai.AsyncOpenAI, file: str, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], line: str
) -> None:
    monkeypatch.setattr(training, "find_spec", lambda name: name)
    more = {key: fields[key] for key in ("speed",) if key in fields}
    given = {key: openai.omit if fields[key] is None else fields[key] for key in fields if key not in more}
    with pytest.raises(openai.APIStatusError, match=line) as caught:
        await shared.fine_tuning.jobs.create(
            **{"model": "tiny", "training_file": file, "method": METHOD, **given}, extra_body=more
        )
    assert caught.value.status_code in (400, 404)
    assert (await shared.fine_tuning.jobs.list()).data == []


@pytest.mark.parametrize(
    ("content", "purpose", "line"),
    [
        (
            b'{"prompt": "a", "completion": "b"}\n{"prompt": 1}',
            "fine-tune",
            "line 2: completion is missing|line 2: prompt must be a text",
        ),
        (b"", "fine-tune", "the file has no examples"),
        (examples(), "batch", 'purpose must be fine-tune, found "batch"'),
        (b" " * (16 << 20) + b"\n", "fine-tune", "a file has 16777216 bytes at most"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_file_that_cannot_be(
    shared: openai.AsyncOpenAI, file: str, content: bytes, purpose: Any, line: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=line) as caught:
        await shared.files.create(file=("a.jsonl", content), purpose=purpose)
    assert caught.value.status_code in (400, 413)
    assert [each.id for each in (await shared.files.list()).data] == [file]


async def test_what_is_not_there(api: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match='there is no job "ftjob-7"'):
        await api.fine_tuning.jobs.retrieve("ftjob-7")
    with pytest.raises(openai.NotFoundError, match='there is no job "x"'):
        await api.fine_tuning.jobs.cancel("x")
    with pytest.raises(openai.NotFoundError, match='there is no file "file-1"'):
        await api.files.retrieve("file-1")
    with pytest.raises(openai.BadRequestError, match='"tiny" was not made by a job, and stays'):
        await api.models.delete("tiny")


async def test_without_a_directory_jobs_are_refused() -> None:
    async with running(None, "max_model_len=256") as api:
        for refused in (api.fine_tuning.jobs.list(), api.files.list(), api.files.retrieve("file-1")):
            with pytest.raises(openai.PermissionDeniedError, match="start it with --state DIR"):
                await refused


async def test_a_model_without_room_fails_with_the_reason(tmp_path: Path) -> None:
    """All dies of the pod are the first model's, and its own answers go on."""
    state = tmp_path / "state"
    server = running(state, "max_model_len=256")
    pod = server.engine.plan.pod
    async with server as api:
        pod.hold([die for die in range(pod.topology.num_dies) if die not in pod.holders], "somebody")
        job = await ended(api, (await ordered(api)).id)
        assert job.status == "failed"
        assert "serve: " in job.error.message
        assert "has no 1 free dies side by side" in job.error.message
        assert await chat(api, "tiny")
        assert not (state / "work" / "00000001").exists()
