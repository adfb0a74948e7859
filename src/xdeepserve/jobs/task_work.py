"""The process of a task: it sends its progress to its parent, a JSON object a line.

    {"event": ["layer 0", {"step": 0, "total_steps": 6}]}   any number of them
    {"result": {...}} or {"failed": "one line"}             the last one

The process ends with its parent, because the pipe that it reads is closed then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from xdeepserve.errors import XDeepServeError
from xdeepserve.jobs import quantizing, training
from xdeepserve.jobs.quantizing import Tell
from xdeepserve.jobs.task_process import TaskSpec

# The tasks of each type of job, in their order, and who does them (DeepServe 3).

TASKS: dict[str, Callable[[TaskSpec, Tell], dict[str, Any]]] = {
    "prepare": quantizing.prepare,
    "quantize": quantizing.quantize,
    "train": training.train,
    "evaluate": quantizing.evaluate,
}
SERVE = "serve"  # the last task, which is the server's own: the model takes its place on the pod
KINDS = ("prepare", "quantize", "evaluate", SERVE)
TRAINING_KINDS = ("prepare", "train", "evaluate", SERVE)


NICENESS = 10  # it works on what serving leaves


def main(path: str) -> None:
    """Do the task described by the file at `path`."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as parent:
        os.dup2(2, 1)  # what a library prints is no message
        threading.Thread(target=_end_with_parent, daemon=True).start()
        with contextlib.suppress(OSError):
            os.nice(NICENESS)

        def say(**message: Any) -> None:
            parent.write(msgspec.json.encode(message) + b"\n")

        spec = msgspec.json.decode(Path(path).read_bytes(), type=TaskSpec)
        try:
            say(result=TASKS[spec.kind](spec, lambda what, data: say(event=[what, data])))
        except XDeepServeError as error:
            say(failed=" ".join(str(error).split()))


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
