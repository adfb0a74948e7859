"""What a task's process is told."""

from __future__ import annotations

from pathlib import Path

import msgspec

from xdeepserve.jobs.job_records import JobOrder


class TaskSpec(msgspec.Struct, frozen=True):
    """What a task's process is told: its kind, what was ordered, and where it works and reads (paths)."""

    kind: str
    order: JobOrder
    directory: str
    training: str
    validation: str | None = None

    @property
    def model(self) -> Path:
        """The checkpoint that the job makes."""
        return Path(self.directory) / "model"
