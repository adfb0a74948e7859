"""The jobs of a server: their store, who moves them on, and the models that they make. Jobs of all types show
their events alike, and are cancelled alike.
It is there with `--state DIR`; without, whatever has to do with jobs is refused in one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from xdeepserve.api.server.http_errors import ApiError
from xdeepserve.api.server.options import ServerOptions
from xdeepserve.api.server.served_models import MODELS, ServedModels
from xdeepserve.errors import RequestError
from xdeepserve.jobs.agent_tools import read_tools
from xdeepserve.jobs.door.agent_turns import AgentTurns
from xdeepserve.jobs.door.model_shelf import ModelShelf
from xdeepserve.jobs.job_master import JobMaster
from xdeepserve.jobs.job_records import JobEvent, JobRecord
from xdeepserve.jobs.job_states import IllegalMoveError
from xdeepserve.jobs.job_store import JobStore


class JobDesk:
    """Desk of a server's jobs: store, models, agents' turns and master.

    Raises InputError for an unusable directory.
    """

    def __init__(self, models: ServedModels, options: ServerOptions) -> None:
        assert options.state is not None
        self.store = JobStore(options.state, time.monotonic)
        self.shelf = ModelShelf(models, self.store)
        holder = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.turns = AgentTurns(models, {} if options.tools is None else read_tools(options.tools))
        self.master = JobMaster(self.store, holder, self.shelf.load, self.shelf.follow, turn=self.turns.take)


DESK = web.AppKey("DESK", JobDesk)


def desk_of(request: web.Request) -> JobDesk:
    """Return the server's desk. Raises ApiError if it has none."""
    if DESK not in request.app:
        raise ApiError(
            403, "this server keeps neither files nor jobs: start it with --state DIR", code="not_allowed"
        )
    return request.app[DESK]


def number_of(shown_id: str, prefix: str) -> int | None:
    """Parse the number in an id such as file-00000001; None for any other text."""
    digits = shown_id.removeprefix(prefix)
    is_one = shown_id.startswith(prefix) and digits.isascii() and digits.isdigit() and len(digits) <= 15
    return int(digits) if is_one else None


async def run_desk(app: web.Application) -> AsyncIterator[None]:
    """Run the desk while the server runs: serve the models of earlier jobs, and run jobs."""
    desk = app[DESK] = JobDesk(app[MODELS], app[MODELS].first.options)
    await desk.shelf.follow()
    work = asyncio.create_task(desk.master.run(), name="job master")
    try:
        yield
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        await desk.shelf.close()
        desk.store.close()


def cancelled(request: web.Request, job: JobRecord) -> JobRecord:
    """The job, which ends within a moment. RequestError when it is over."""
    try:
        return desk_of(request).store.move_job(job.number, "cancelled")
    except IllegalMoveError:
        raise RequestError(f"{job.id} is {job.state}, and cannot be cancelled", param="job_id") from None


def shown_event(event: JobEvent) -> dict[str, Any]:
    """An event in OpenAI's shape."""
    return {
        "id": event.id,
        "object": "fine_tuning.job.event",
        "created_at": event.created_at,
        "level": event.level,
        "message": event.message,
        "type": "message" if event.data is None else "metrics",
        "data": event.data,
    }
