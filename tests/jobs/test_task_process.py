"""A task's process: its result, its refusal, its death and its parent's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.jobs.tools import child_of
from xdeepserve.jobs.job_records import JobOrder
from xdeepserve.jobs.task_process import TaskFailedError, TaskLostError, TaskSpec, run_task

LINE = '{"prompt": "Once upon a time", "completion": " there was a cat."}\n'


def spec_in(folder: Path, text: str, kind: str = "prepare") -> TaskSpec:
    (folder / "lines").write_text(text)
    order = JobOrder(model="tiny", source="tiny", training=1)
    return TaskSpec(kind, order, str(folder / "work"), str(folder / "lines"))


async def test_results_and_refusals(tmp_path: Path) -> None:
    found = await run_task(spec_in(tmp_path, LINE * 10), lambda *_: None)
    assert (found["calibration_examples"], found["held_out_examples"]) == (8, 2)
    with pytest.raises(TaskFailedError, match=r"^line 2: unknown field x; known are messages"):
        await run_task(spec_in(tmp_path, LINE + '{"x": 1}'), lambda *_: None)


async def test_a_process_that_dies_is_lost(tmp_path: Path) -> None:
    """Whether somebody kills it or it fails by a fault of its own, which its last line tells."""
    with pytest.raises(TaskLostError, match=r"ended with 1: FileNotFoundError: .*prepared.json"):
        await run_task(spec_in(tmp_path, LINE, "evaluate"), lambda *_: None)
    task = asyncio.create_task(run_task(spec_in(tmp_path, LINE * 10), lambda *_: None))
    while (child := child_of(os.getpid())) is None:
        await asyncio.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(TaskLostError, match=f"ended with -{signal.SIGKILL.value}: "):
        await task


async def test_one_that_is_cancelled_is_ended(tmp_path: Path) -> None:
    task = asyncio.create_task(run_task(spec_in(tmp_path, LINE * 10), lambda *_: None))
    while child_of(os.getpid()) is None:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert child_of(os.getpid()) is None


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """The pipe that its parent held is closed, whichever way that ended."""
    told = tmp_path / "told.json"
    os.mkfifo(tmp_path / "never")
    spec = TaskSpec("prepare", JobOrder(model="tiny", source="tiny", training=1), "", str(tmp_path / "never"))
    told.write_bytes(msgspec.json.encode(spec))  # to read it is to wait for ever
    command = [sys.executable, "-m", "xdeepserve.jobs.task_work", str(told)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(1.0)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(20) == 1
