"""The job master: runs jobs, one task after the other, while it leads (DeepServe 3, 7).

Several servers may share a state directory. One leads, and the others stand by. A standby takes over when the
leader has given up its lease or the lease has run out, and begins interrupted tasks again. All state is in
the store, so a master needs to remember nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from xdeepserve.errors import XDeepServeError
from xdeepserve.jobs.job_records import JobRecord
from xdeepserve.jobs.job_states import IllegalMoveError
from xdeepserve.jobs.job_store import JobStore
from xdeepserve.jobs.lease import LeaseLostError, MasterLease
from xdeepserve.jobs.task_process import TaskLostError, TaskSpec, run_task
from xdeepserve.jobs.task_work import SERVE

LEASE_S = 10.0
POLL_S = 0.2
TROUBLE_S = 1.0  # before it looks again, when the directory cannot be used or somebody else leads
MAX_ATTEMPTS = 3  # of a task whose process is lost

Serve = Callable[[str, Path], Awaitable[None]]  # a model's name and directory; InputError if it cannot be
Turn = Callable[[JobRecord], Awaitable[dict[str, Any]]]  # the next one of an agent
Follow = Callable[[], Awaitable[None]]  # serve the models that the store has, and no others

REFUSED = (LeaseLostError, sqlite3.Error, OSError)  # what the store may say at any time

log = logging.getLogger("xdeepserve.jobs")


class JobMaster:
    """Master of a state directory's jobs. Leads or stands by, as `holder`, until `run` is cancelled."""

    def __init__(
        self,
        store: JobStore,
        holder: str,
        serve: Serve,
        follow: Follow,
        lease_s: float = LEASE_S,
        turn: Turn | None = None,
    ) -> None:
        self._store, self._holder, self._lease_s = store, holder, lease_s
        self._serve, self._follow, self._turn = serve, follow, turn
        self._lease: MasterLease | None = None
        self._renew_at = 0.0

    @property
    def leads(self) -> bool:
        """Whether the master held the lease at its last look."""
        return self._lease is not None

    async def run(self) -> None:
        """Run jobs until cancelled; then release the lease and leave interrupted tasks to the next leader."""
        try:
            while True:
                try:
                    if not (self.renew() and await self._advance()):
                        await self._follow()
                        await asyncio.sleep(POLL_S)
                except REFUSED as error:
                    log.warning("jobs wait for %g s: %s", TROUBLE_S, error)
                    self._lease = None
                    await asyncio.sleep(TROUBLE_S)
        finally:
            if self._lease is not None:
                self._store.give_up(self._lease)

    def renew(self) -> bool:
        """Renew the lease when a third of it is over; return whether this master still leads."""
        now = self._store.now()
        if self._lease is None or now >= self._renew_at:
            self._lease = self._store.take_lease(self._holder, self._lease_s)
            self._renew_at = now + self._lease_s / 3
        return self._lease is not None

    async def _advance(self) -> bool:
        """Do the next task of the next job; return False if there is nothing to do."""
        assert self._lease is not None
        job, lease = self._store.next_job(), self._lease
        if job is None:
            return False
        try:
            if job.state == "queued":
                job = self._store.move_job(job.number, "running", lease)
            if job.is_answered:
                self._store.move_job(job.number, "succeeded", lease)
            elif job.next_task is None and job.order.agent is not None:
                reason = f"the agent has not come to an answer in {len(job.tasks)} turns"
                self._store.move_job(job.number, "failed", lease, reason)
            elif job.next_task is None:
                self._store.move_job(job.number, "succeeded", lease, model=job.result_name)
            elif job.next_task[1].state == "running":
                self._take_up(job, "its master was lost", lease)
            else:
                await self._do(job, lease)
        except IllegalMoveError:  # cancelled meanwhile
            pass
        if (ended := self._store.job(job.number)) and ended.state in ("failed", "cancelled"):
            self._store.clear_work(job.number)
        return True

    def _take_up(self, job: JobRecord, why: str, lease: MasterLease) -> None:
        """Put a lost task back to wait, or fail its job after MAX_ATTEMPTS attempts."""
        assert job.next_task is not None
        place, task = job.next_task
        if task.attempts >= MAX_ATTEMPTS:
            reason = f"{task.kind} was begun {task.attempts} times and never ended; the last time {why}"
            self._store.move_job(job.number, "failed", lease, reason)
        else:
            self._store.add_event(job.number, f"{task.kind} was lost: {why}", None, lease)
            self._store.move_task(job.number, place, "waiting", lease)

    async def _do(self, job: JobRecord, lease: MasterLease) -> None:
        """Run the next task to its end."""
        assert job.next_task is not None
        place, task = job.next_task
        self._store.move_task(job.number, place, "running", lease)
        try:
            result = await self._watched(job, task.kind, lease)
        except asyncio.CancelledError:  # the server ends in order: that is no attempt
            # Whatever the store says to that (the job may be cancelled, too), the cancellation goes on: `run`
            # takes the store's errors for a reason to look again, and would never end.
            with contextlib.suppress(*REFUSED, IllegalMoveError):
                self._store.move_task(job.number, place, "waiting", lease, is_put_back=True)
            raise
        except TaskLostError as error:
            found = self._store.job(job.number)
            assert found is not None
            self._take_up(found, str(error), lease)
        except (LeaseLostError, IllegalMoveError):
            raise
        except XDeepServeError as error:
            self._store.move_task(job.number, place, "failed", lease)
            self._store.move_job(job.number, "failed", lease, f"{task.kind}: {error}")
        else:
            self._store.move_task(job.number, place, "done", lease, result)

    async def _watched(self, job: JobRecord, kind: str, lease: MasterLease) -> dict[str, Any]:
        """Run a task and return its result; stop it early if the lease is lost or the job is cancelled."""
        work = asyncio.ensure_future(self._perform(job, kind, lease))
        try:
            while not (await asyncio.wait({work}, timeout=POLL_S))[0]:
                if not self.renew() or self._lease != lease:
                    raise LeaseLostError(f"{self._holder} does not lead any more")
                found = self._store.job(job.number)
                if found is None or found.state != "running":
                    raise IllegalMoveError(f"{job.id} has been cancelled")
            return work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _perform(self, job: JobRecord, kind: str, lease: MasterLease) -> dict[str, Any]:
        """Perform a task: an agent's turn, serving a model, or a process of its own."""
        if job.order.agent is not None:
            assert self._turn is not None, "this server takes no turns of agents"
            return await self._turn(job)
        directory, order = self._store.work_path(job.number), job.order
        if kind == SERVE:
            await self._serve(job.result_name, directory / "model")
            return {"model": job.result_name}
        validation = None if order.validation is None else str(self._store.file_path(order.validation))
        training = str(self._store.file_path(order.training))
        spec = TaskSpec(kind, order, str(directory), training, validation)
        return await run_task(
            spec, lambda what, data: self._store.add_event(job.number, f"{kind}: {what}", data, lease)
        )
