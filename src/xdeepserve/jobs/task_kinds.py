"""The tasks of each type of job, in their order, and who does them (DeepServe 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xdeepserve.jobs import quantizing, training
from xdeepserve.jobs.quantizing import Tell
from xdeepserve.jobs.task_spec import TaskSpec

TASKS: dict[str, Callable[[TaskSpec, Tell], dict[str, Any]]] = {
    "prepare": quantizing.prepare,
    "quantize": quantizing.quantize,
    "train": training.train,
    "evaluate": quantizing.evaluate,
}
SERVE = "serve"  # the last task, which is the server's own: the model takes its place on the pod
KINDS = ("prepare", "quantize", "evaluate", SERVE)
TRAINING_KINDS = ("prepare", "train", "evaluate", SERVE)
