"""A server is killed in the middle of a job: its task's process ends with it, and the next one goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.jobs.tools import child_of

SECONDS = 120.0
METHOD = {"type": "quantization", "quantization": {"hyperparameters": {"algorithm": "rtn", "samples": 4}}}
TRAINING = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}}
TOOLS = """
import time
from pathlib import Path

def get_weather(city: str, day: str) -> str:
    "The weather in a city."
    Path(__file__).with_name("called").touch()
    while Path(__file__).with_name("wait").exists():
        time.sleep(0.01)
    return f"sunny, {len(city)} degrees"
"""


class Server:
    """`xdeepserve serve` on a directory, in a `with` block."""

    def __init__(self, state: Path, *options: str) -> None:
        command = [sys.executable, "-m", "xdeepserve", "serve", "--port", "0", "--state", str(state)]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Server:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        address = line.removeprefix("listening on ").strip()
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill(self) -> None:
        """As the kernel does it."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def order(self, method: dict[str, Any] = METHOD) -> str:
        """A job for a model: its id."""
        line = json.dumps({"prompt": "Once upon a time", "completion": " there was a cat, and it was happy."})
        text = "\n".join([line] * 10).encode()
        file = self.client.files.create(file=("a", text), purpose="fine-tune")
        return self.client.fine_tuning.jobs.create(  # type: ignore[call-overload,no-any-return]
            model="tiny", training_file=file.id, method=method
        ).id

    def ended(self, job: str) -> Any:
        """The job, when it has."""
        deadline = time.monotonic() + SECONDS
        while (found := self.client.fine_tuning.jobs.retrieve(job)).status in ("queued", "running"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found

    def agent(self, method: str, path: str = "", **body: Any) -> Any:
        """What the door of agents answers."""
        return getattr(self.client, method)(f"/agent/jobs{path}", cast_to=object, **body)


def test_an_agent_outlives_its_server(tmp_path: Path) -> None:
    """It is killed while a tool runs: the turn is taken once more, and nothing that was said is lost."""
    tools = tmp_path / "tools.py"
    tools.write_text(TOOLS)
    (tmp_path / "wait").touch()
    deadline = time.monotonic() + SECONDS
    messages = [{"role": "user", "content": "What is the weather in Oslo today?"}]
    with Server(tmp_path / "state", "--tools", str(tools)) as server:
        order = {"model": "tiny", "messages": messages, "tools": ["get_weather"], "max_turns": 4}
        job = server.agent("post", body=order)["id"]
        while not (tmp_path / "called").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert server.agent("get", f"/{job}")["status"] == "running"
        server.kill()
    (tmp_path / "wait").unlink()
    with Server(tmp_path / "state", "--tools", str(tools)) as server:
        while (found := server.agent("get", f"/{job}"))["status"] in ("queued", "running"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert (found["status"], found["error"]) == ("succeeded", None)
    assert found["messages"][0] == messages[0]
    assert [each["role"] for each in found["messages"]].count("tool") == 1


@pytest.mark.campaign
def test_a_job_that_waits_outlives_its_server(tmp_path: Path) -> None:
    with Server(tmp_path / "state") as server:
        first, second = server.order(), server.order()
        assert server.client.fine_tuning.jobs.retrieve(second).status == "queued"
        server.kill()
    with Server(tmp_path / "state") as server:
        assert [server.ended(job).status for job in (first, second)] == ["succeeded"] * 2


@pytest.mark.campaign
def test_a_job_whose_model_takes_its_place_outlives_its_server(tmp_path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    with Server(tmp_path / "state") as server:
        job = server.order()
        while (tasks := server.client.fine_tuning.jobs.retrieve(job).tasks)[-1]["state"] != "running":
            assert tasks[-1]["state"] == "waiting"
            assert time.monotonic() < deadline
        server.kill()
    with Server(tmp_path / "state") as server:
        found = server.ended(job)
        assert found.status == "succeeded"
        assert found.fine_tuned_model in [each.id for each in server.client.models.list()]


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["prepare", "quantize", "evaluate", "train"])
def test_a_job_outlives_its_server(tmp_path: Path, kind: str) -> None:
    if kind == "train":
        pytest.importorskip("torch", reason="the train extra")
    deadline = time.monotonic() + SECONDS
    with Server(tmp_path / "state") as server:
        job = server.order(TRAINING if kind == "train" else METHOD)
        while not (tmp_path / "state" / "work" / "00000001" / f"{kind}.log").exists():
            assert time.monotonic() < deadline
        while (child := child_of(server.process.pid)) is None:
            assert time.monotonic() < deadline
        server.kill()
        while Path(f"/proc/{child}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with Server(tmp_path / "state") as server:
        found = server.ended(job)
        assert found.status == "succeeded"
        assert max(task["attempts"] for task in found.tasks) == 2
        answer = server.client.completions.create(
            model=str(found.fine_tuned_model), prompt="Once upon a time", max_tokens=4
        )
        assert answer.choices[0].text
