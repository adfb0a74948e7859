"""A request reaches any job executor that is ready, and another one where that is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from tests.api.tools import FORM, door
from tests.jobs.tools import child_of
from xdeepserve.cli import main
from xdeepserve.jobs.cluster_manager import LEASE_S
from xdeepserve.jobs.door import front_door
from xdeepserve.jobs.door.shared_pod import NAME, TIME
from xdeepserve.jobs.lease import CLUSTER_MANAGER
from xdeepserve.jobs.member_table import POD


async def answers(request: web.Request) -> web.Response:
    body = await request.read()
    return web.json_response(
        {"path": request.path_qs, "sent": body.decode(), "method": request.method}, status=201
    )


async def breaks(request: web.Request) -> web.Response:
    """The process ends while it computes."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def breaks_amid(request: web.Request) -> web.StreamResponse:
    """The process ends when part of an answer has left."""
    kind = "text/event-stream" if "stream" in request.path else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind})
    await response.prepare(request)
    await response.write(b'data: {"n": 1}\n\n')
    assert request.transport is not None
    request.transport.abort()
    return response


async def test_requests_reach_all_members_in_turn(tmp_path: Path) -> None:
    async with door(tmp_path, answers, answers) as (client, _):
        reached = []
        for _ in range(4):
            async with client.post("/v1/files?x=1", data=b"lines", headers=FORM) as answer:
                assert answer.status == 201
                assert await answer.json() == {"path": "/v1/files?x=1", "sent": "lines", "method": "POST"}
                reached.append(answer.headers["X-Job-Executor"])
        assert reached == ["je-0", "je-1"] * 2
        kept = set()
        for _ in range(4):
            async with client.get("/v1/responses/resp-1") as answer:
                kept.add(answer.headers["X-Job-Executor"])
        assert kept == {"je-0"}, "where it was made"
        async with client.get("/cluster") as answer:
            found = await answer.json()
        assert [each["state"] for each in found["members"]] == ["ready", "ready"]
        assert found["leads"] is False


@pytest.mark.parametrize("loss", [breaks, breaks_amid])
async def test_what_a_lost_member_has_not_answered_another_one_does(tmp_path: Path, loss: Any) -> None:
    async with door(tmp_path, loss, loss, answers) as (client, _):
        for _ in range(3):
            async with client.post("/v1/completions", json={}) as answer:
                assert answer.status == 201
                assert answer.headers["X-Job-Executor"] == "je-2"


async def test_a_stream_that_has_begun_ends_with_an_error(tmp_path: Path) -> None:
    async with door(tmp_path, breaks_amid) as (client, _), client.post("/v1/stream", json={}) as answer:
        first, last = (await answer.read()).decode().strip().split("\n\n")
        assert first == 'data: {"n": 1}'
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["message"], error["code"]) == ("je-0 was lost", "job_executor_lost")


def streams(*events: str, seen: list[dict[str, str]], is_cut: bool = False) -> Any:
    """A member that sends events, and then is lost if `is_cut`; `seen` gets the headers of its requests."""

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append({name: request.headers[name] for name in (NAME, TIME, "X-Request-Id")})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {event}\n\n".encode())
        if is_cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


async def test_a_stream_goes_on_at_another_member_of_the_same_pod(tmp_path: Path) -> None:
    """Under the same name, which only the door gives; the client gets each event once."""
    seen: list[dict[str, str]] = []
    members = (
        streams("1", seen=seen, is_cut=True),
        streams(
            "1", "2", "3", "4", seen=seen
        ),  # asked last: of two that are left, it is the other one's turn
        streams("1", "2", "3", seen=seen, is_cut=True),
    )
    async with door(tmp_path, *members, is_shared=True) as (client, _):
        forged = {NAME: "mine", TIME: "0"}
        async with client.post("/v1/completions", json={}, headers=forged) as answer:
            assert await answer.text() == "".join(f"data: {n}\n\n" for n in range(1, 5))
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][NAME] == seen[0]["X-Request-Id"] != "mine"
    assert int(seen[0][TIME]) > 0


@pytest.mark.parametrize("events", [("0", "2"), ("1 2",), ()])
async def test_a_stream_does_not_go_on_with_another_answer(
    tmp_path: Path, events: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door, "WAIT_S", 0.3)
    seen: list[dict[str, str]] = []
    members = streams("1", seen=seen, is_cut=True), streams(*events, seen=seen)
    async with (
        door(tmp_path, *members, is_shared=True) as (client, _),
        client.post("/v1/completions", json={}) as answer,
    ):
        first, last = (await answer.text()).strip().split("\n\n")
    assert first == "data: 1"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "job_executor_lost"


async def test_what_is_kept_in_the_pod_is_asked_there(tmp_path: Path) -> None:
    async with door(tmp_path, answers, answers, is_shared=True) as (client, store):
        lease = store.take_lease("a", LEASE_S, CLUSTER_MANAGER)
        assert lease is not None
        (_, second) = store.members.all()
        store.members.start(POD, 7, lease)
        store.members.beat(POD, 7, str(second.address), [])
        reached = []
        for path in ("/v1/responses", "/v1/files", "/v1/models", "/admin/tes", "/v1/chat/completions"):
            async with client.get(path) as answer:
                reached.append(answer.headers["X-Job-Executor"])
        assert reached == [POD] * 4 + ["je-0"]


async def test_nobody_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door, "WAIT_S", 0.2)
    async with door(tmp_path, answers) as (client, store):
        (member,) = store.members.all()
        lease = store.take_lease("a", LEASE_S, CLUSTER_MANAGER)
        assert lease is not None
        store.members.move(member, "suspect", "silent", lease)
        async with client.get("/v1/models") as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["message"] == "no job executor has been ready for 0.2 s"


# ---- processes --------------------------------------------------------------------------------------

SECONDS = 180.0
METHOD = {"type": "quantization", "quantization": {"hyperparameters": {"algorithm": "rtn", "samples": 4}}}
LINE = json.dumps({"prompt": "Once upon a time", "completion": " there was a cat, and it was happy."})


class ClusterProcess:
    """`xdeepserve cluster` on a directory."""

    def __init__(self, state: Path) -> None:
        command = [sys.executable, "-m", "xdeepserve", "cluster", "--port", "0", "--state", str(state)]
        self.process = subprocess.Popen(
            [*command, "--", "--set", "max_model_len=512"], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().removeprefix("listening on ").strip()
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key="x", max_retries=0)

    def members(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.seen()["members"]
        return found

    def seen(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.address}/cluster", timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def chat(self, model: str = "tiny") -> str:
        asked: Any = [{"role": "user", "content": "Tell me a story."}]
        answer = self.client.chat.completions.create(model=model, messages=asked, max_tokens=8, temperature=0)
        return str(answer.choices[0].message.content)

    def end(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


def until(what: Any) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--deployment", "none.toml"], "deployment none.toml: No such file"),
        (["--model", "gpt-5"], "model 'gpt-5': neither a preset"),
        (["--set", "mpt=1"], "unknown setting"),
        (["--tools", "none.py"], "--tools none.py: No such file"),
        (["--speed"], "unknown option --speed"),
    ],
)
def test_what_every_member_would_refuse_is_said_at_once(
    tmp_path: Path, options: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(["cluster", "--state", str(tmp_path / "state"), "--port", "0", "--", *options])
    except SystemExit as error:
        code = error.code
    assert code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said
    assert not [*tmp_path.glob("state/*.log")], "nobody was started"


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["prepare", "quantize", "evaluate", "serve"])
@pytest.mark.parametrize("lost", ["je", "manager"])
def test_jobs_and_chats_outlive_whoever_is_lost(tmp_path: Path, kind: str, lost: str) -> None:
    """At each task of a job: another JE leads it on, or another manager the members; chats do not change."""
    first, second = ClusterProcess(tmp_path / "state"), ClusterProcess(tmp_path / "state")
    try:
        until(lambda: [each["state"] for each in first.members()] == ["ready", "ready"])
        story = first.chat()
        file = first.client.files.create(file=("a", "\n".join([LINE] * 10).encode()), purpose="fine-tune")
        job = second.client.fine_tuning.jobs.create(model="tiny", training_file=file.id, method=METHOD)

        def is_at_it() -> bool:
            found: Any = second.client.fine_tuning.jobs.retrieve(job.id)
            return any(task["kind"] == kind and task["state"] in ("running", "done") for task in found.tasks)

        until(is_at_it)
        busy = [each["pid"] for each in first.members() if child_of(each["pid"]) is not None]
        os.kill(
            first.process.pid if lost == "manager" else (busy or [first.members()[0]["pid"]])[0],
            signal.SIGKILL,
        )
        assert second.chat() == story
        done = until(lambda: (now := second.client.fine_tuning.jobs.retrieve(job.id)).finished_at and now)
        assert done.status == "succeeded", done.error
        until(lambda: [each["state"] for each in second.members()] == ["ready", "ready"])
        name = str(done.fine_tuned_model)
        until(lambda: all(name in {te["model"] for te in each["tes"]} for each in second.members()))
        assert second.chat() == story
        assert len({second.chat(name) for _ in range(4)}) == 1, "the same bits on both"
        first.process.poll()
        until(lambda: (first if first.process.returncode is None else second).seen()["leads"])
    finally:
        pids = [each["pid"] for each in second.members()]
        second.end()
        first.end()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
