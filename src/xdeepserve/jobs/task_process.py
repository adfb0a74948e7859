"""A task's process, as seen by the parent process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from xdeepserve.errors import XDeepServeError
from xdeepserve.jobs.job_records import JobOrder


class TaskSpec(msgspec.Struct, frozen=True):
    """Input of a task's process: its kind, the client's order, and the paths where it works and reads."""

    kind: str
    order: JobOrder
    directory: str
    training: str
    validation: str | None = None

    @property
    def model(self) -> Path:
        """Path of the checkpoint to be made by the job."""
        return Path(self.directory) / "model"


SILENCE_S = 3600.0  # of wall time; a layer of the largest models takes minutes
MAX_LINE = 1 << 20
ONE_CORE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")

OnEvent = Callable[[str, "dict[str, Any] | None"], None]


class TaskFailedError(XDeepServeError):
    """Error: a task has failed for a reason that would recur in another attempt."""


class TaskLostError(XDeepServeError):
    """Error: a task's process has ended without a result."""


async def run_task(spec: TaskSpec, on_event: OnEvent) -> dict[str, Any]:
    """Run a task in a process and return its result. Raises TaskFailedError or TaskLostError; a cancelled
    call ends the process."""
    told, said = _files(spec)
    with said.open("wb") as log:
        # A session of its own, so that an interrupt at the terminal is the parent's alone to handle.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "xdeepserve.jobs.task_work", str(told)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **ONE_CORE},
            start_new_session=True,
            limit=MAX_LINE,
        )
    try:
        async with asyncio.timeout(None) as silence:
            result = await _listen(process, on_event, silence)
            await process.wait()
    except TimeoutError:
        raise TaskLostError(f"{spec.kind} said nothing for {SILENCE_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        assert process.stdin is not None
        process.stdin.close()
    if result is None:
        last = said.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing said"]
        raise TaskLostError(f"the process of {spec.kind} ended with {process.returncode}: {last[0]}")
    return result


def _files(spec: TaskSpec) -> tuple[Path, Path]:
    """Write the process's input file; return its path, and the path of its log."""
    directory = Path(spec.directory)
    directory.mkdir(exist_ok=True)
    told, said = directory / f"{spec.kind}.json", directory / f"{spec.kind}.log"
    told.write_bytes(msgspec.json.encode(spec))
    return told, said


async def _listen(
    process: asyncio.subprocess.Process, on_event: OnEvent, silence: asyncio.Timeout
) -> dict[str, Any] | None:
    """Read messages from the process until it has a result; None if it ends without."""
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    silence.reschedule(loop.time() + SILENCE_S)
    async for line in process.stdout:
        silence.reschedule(loop.time() + SILENCE_S)
        message = msgspec.json.decode(line)
        if "event" in message:
            on_event(*message["event"])
        elif "failed" in message:
            raise TaskFailedError(message["failed"])
        else:
            result: dict[str, Any] = message["result"]
            return result
    return None
