"""A server is killed in the middle of a job: its task's process ends with it, and the next one goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from tests.jobs.test_task_process import child_of

SECONDS = 120.0
METHOD = {"type": "quantization", "quantization": {"hyperparameters": {"algorithm": "rtn", "samples": 4}}}


class Server:
    """`xdeepserve serve` on a directory, in a `with` block."""

    def __init__(self, state: Path) -> None:
        command = [sys.executable, "-m", "xdeepserve.cli", "serve", "--port", "0", "--state", str(state)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

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


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["prepare", "quantize", "evaluate"])
def test_a_job_outlives_its_server(tmp_path: Path, kind: str) -> None:
    line = json.dumps({"prompt": "Once upon a time", "completion": " there was a cat, and it was happy."})
    deadline = time.monotonic() + SECONDS
    with Server(tmp_path / "state") as server:
        file = server.client.files.create(file=("a", "\n".join([line] * 10).encode()), purpose="fine-tune")
        job = server.client.fine_tuning.jobs.create(model="tiny", training_file=file.id, method=METHOD)
        while not (tmp_path / "state" / "work" / "00000001" / f"{kind}.log").exists():
            assert time.monotonic() < deadline
        while (child := child_of(server.process.pid)) is None:
            assert time.monotonic() < deadline
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(20)
        while Path(f"/proc/{child}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with Server(tmp_path / "state") as server:
        while (found := server.client.fine_tuning.jobs.retrieve(job.id)).status in ("queued", "running"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert found.status == "succeeded"
        assert max(task["attempts"] for task in found.tasks) == 2
        answer = server.client.completions.create(
            model=str(found.fine_tuned_model), prompt="Once upon a time", max_tokens=4
        )
        assert answer.choices[0].text
