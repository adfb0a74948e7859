"""Common answers of jobs of all types: their events, and their cancellation."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from xdeepserve.api.job_desk import desk_of
from xdeepserve.errors import RequestError
from xdeepserve.jobs.job_records import JobEvent, JobRecord
from xdeepserve.jobs.job_states import IllegalMoveError


def cancelled(request: web.Request, job: JobRecord) -> JobRecord:
    """Cancel a job and return it; it ends within a moment. Raises RequestError when it is over."""
    try:
        return desk_of(request).store.move_job(job.number, "cancelled")
    except IllegalMoveError:
        raise RequestError(f"{job.id} is {job.state}, and cannot be cancelled", param="job_id") from None


def shown_event(event: JobEvent) -> dict[str, Any]:
    """Convert an event to OpenAI's format."""
    return {
        "id": event.id,
        "object": "fine_tuning.job.event",
        "created_at": event.created_at,
        "level": event.level,
        "message": event.message,
        "type": "message" if event.data is None else "metrics",
        "data": event.data,
    }
