"""Tools of the tests of jobs: a clock that a test sets, an order, the process of a task."""

from __future__ import annotations

from pathlib import Path

from xdeepserve.jobs.job_records import JobOrder

ORDER = JobOrder(model="tiny", source="tiny", training=1)


class Time:
    """Seconds, as a test sets them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def child_of(parent: int) -> int | None:
    """The process of a task that `parent` has started."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"xdeepserve.jobs.task_work" in command and fields[0] != "Z":
            return int(path.parent.name)
    return None
