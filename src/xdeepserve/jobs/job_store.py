"""Files, jobs, tasks, events and models of a state directory.

Every change is a transaction, and every change of state is checked against the tables of `job_states` within
it. Changes that move jobs on need a lease.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from xdeepserve.errors import OverloadedError
from xdeepserve.jobs import lease as leases
from xdeepserve.jobs.job_records import JobEvent, JobOrder, JobRecord, StoredFile, TaskRecord
from xdeepserve.jobs.job_states import JOB_MOVES, TASK_MOVES, JobState, TaskState, check_move, is_over
from xdeepserve.jobs.lease import JOB_MASTER, MasterLease
from xdeepserve.jobs.member_table import MemberTable
from xdeepserve.jobs.state_file import open_state, transaction

MAX_OPEN_JOBS = 64  # queued and running
FILE, JOB = "SELECT number, name, purpose, num_bytes, created_at FROM files", "SELECT * FROM jobs"


class JobStore:
    """Store in the state directory at `directory`.

    `now` gives seconds that never jump, and is the same clock in all processes of this computer: leases and
    heartbeats are kept in it. `date` gives seconds since 1970, for records. Raises InputError for an unusable
    directory.
    """

    def __init__(
        self, directory: Path, now: Callable[[], float], date: Callable[[], float] = time.time
    ) -> None:
        self.directory, self.now, self._date = directory, now, date
        self._db = open_state(directory)
        self.members = MemberTable(self._db, now)

    def close(self) -> None:
        """Close the database. Harmless when repeated."""
        self._db.close()

    @contextlib.contextmanager
    def _writing(self, lease: MasterLease | None = None) -> Iterator[sqlite3.Connection]:
        """Open a transaction. With `lease`, raises LeaseLostError and writes nothing if the lease is not the
        current one."""
        with transaction(self._db) as db:
            if lease is not None:
                leases.check_held(db, lease)
            yield db

    # ---- who leads ----------------------------------------------------------------------------------

    def take_lease(self, holder: str, seconds: float, what: str = JOB_MASTER) -> MasterLease | None:
        """Take or renew a lease for `seconds` from now; None if another process has it."""
        return leases.take(self._db, holder, self.now(), seconds, what)

    def give_up(self, lease: MasterLease) -> None:
        """Release a lease for a standby to lead at once."""
        leases.give_up(self._db, lease)

    # ---- files --------------------------------------------------------------------------------------

    def file_path(self, number: int) -> Path:
        """Return the path of a file's content."""
        return self.directory / "files" / f"{number:08d}"

    def add_file(self, name: str, purpose: str, content: Path) -> StoredFile:
        """Keep the file at `content`, which is moved into the directory."""
        row = (name, purpose, content.stat().st_size, int(self._date()))
        with self._writing() as db:
            number = db.execute(
                "INSERT INTO files (name, purpose, num_bytes, created_at) VALUES (?, ?, ?, ?)", row
            ).lastrowid
            assert number is not None
            os.replace(content, self.file_path(number))
        return StoredFile(number, *row)

    def files(self) -> list[StoredFile]:
        """List all files, in the order of their upload."""
        return [StoredFile(*row) for row in self._db.execute(f"{FILE} ORDER BY number")]

    def file(self, number: int) -> StoredFile | None:
        """Return a file's record, or None."""
        row = self._db.execute(f"{FILE} WHERE number = ?", (number,)).fetchone()
        return row and StoredFile(*row)

    def delete_file(self, number: int) -> None:
        """Delete a file together with its record."""
        with self._writing() as db:
            db.execute("DELETE FROM files WHERE number = ?", (number,))
        self.file_path(number).unlink(missing_ok=True)

    # ---- jobs ---------------------------------------------------------------------------------------

    def work_path(self, job: int) -> Path:
        """Return the working directory of a job's tasks; the job's model is there under `model`."""
        return self.directory / "work" / f"{job:08d}"

    def add_job(self, order: JobOrder, kinds: tuple[str, ...]) -> JobRecord:
        """Queue a new job with tasks of the given kinds. Raises OverloadedError if too many jobs are open."""
        now = int(self._date())
        with self._writing() as db:
            states = "state IN ('queued', 'running')"
            if db.execute(f"SELECT count(*) FROM jobs WHERE {states}").fetchone()[0] >= MAX_OPEN_JOBS:
                raise OverloadedError(
                    f"{MAX_OPEN_JOBS} jobs are open, and no more are taken; try again later"
                )
            number = db.execute(
                "INSERT INTO jobs (work, state, created_at) VALUES (?, 'queued', ?)",
                (msgspec.json.encode(order), now),
            ).lastrowid
            assert number is not None
            tasks = [(number, place, kind, "waiting", 0) for place, kind in enumerate(kinds)]
            db.executemany("INSERT INTO tasks VALUES (?, ?, ?, ?, ?, NULL)", tasks)
            _add_event(db, number, now, "info", f"the job is queued: {', '.join(kinds)}", None)
        return self._found(number)

    def jobs(self) -> list[JobRecord]:
        """List all jobs, in the order of their creation."""
        return [self._with_tasks(row) for row in self._db.execute(f"{JOB} ORDER BY number").fetchall()]

    def job(self, number: int) -> JobRecord | None:
        """Return the job of a number, or None."""
        row = self._db.execute(f"{JOB} WHERE number = ?", (number,)).fetchone()
        return row and self._with_tasks(row)

    def next_job(self) -> JobRecord | None:
        """Return the job to work on: a running job, no matter which master began it, else the first in the
        queue."""
        row = self._db.execute(
            f"{JOB} WHERE state IN ('running', 'queued') ORDER BY state DESC, number LIMIT 1"
        ).fetchone()
        return row and self._with_tasks(row)

    def _found(self, number: int) -> JobRecord:
        job = self.job(number)
        assert job is not None, f"there is no job {number}"
        return job

    def _with_tasks(self, row: tuple[Any, ...]) -> JobRecord:
        number, order, state, created_at, finished_at, reason = row
        tasks = self._db.execute(
            "SELECT kind, state, attempts, result FROM tasks WHERE job = ? ORDER BY place", (number,)
        )
        found = [
            TaskRecord(kind, task_state, attempts, result and msgspec.json.decode(result))
            for kind, task_state, attempts, result in tasks
        ]
        decoded = msgspec.json.decode(order, type=JobOrder)
        return JobRecord(number, decoded, state, created_at, finished_at, reason, found)

    def move_job(
        self,
        number: int,
        state: JobState,
        lease: MasterLease | None = None,
        reason: str | None = None,
        model: str | None = None,
    ) -> JobRecord:
        """Move a job to `state`. A final state also cancels its open tasks; a success may add its `model` to
        those served. Raises IllegalMoveError or LeaseLostError."""
        now = int(self._date())
        with self._writing(lease) as db:
            old = db.execute("SELECT state FROM jobs WHERE number = ?", (number,)).fetchone()[0]
            check_move(f"job {number}", JOB_MOVES, old, state)
            ended = now if is_over(JOB_MOVES, state) else None
            row = (state, ended, reason, number)
            db.execute("UPDATE jobs SET state = ?, finished_at = ?, reason = ? WHERE number = ?", row)
            if ended is not None:  # an agent may need fewer turns than it has
                db.execute(
                    "UPDATE tasks SET state = ? WHERE job = ? AND state IN ('waiting', 'running')",
                    ("cancelled", number),
                )
            if model is not None:
                db.execute("INSERT INTO models VALUES (?, ?, ?)", (model, number, now))
            level, why = ("error", f": {reason}") if state == "failed" else ("info", "")
            _add_event(db, number, now, level, f"the job is {state}{why}", None)
        return self._found(number)

    def move_task(
        self,
        job: int,
        place: int,
        state: TaskState,
        lease: MasterLease,
        result: dict[str, Any] | None = None,
        *,
        is_put_back: bool = False,
    ) -> JobRecord:
        """Move a task to `state`. A move to "running" counts as an attempt; `is_put_back` takes the attempt
        back. Raises IllegalMoveError or LeaseLostError."""
        with self._writing(lease) as db:
            kind, old = db.execute(
                "SELECT kind, state FROM tasks WHERE job = ? AND place = ?", (job, place)
            ).fetchone()
            check_move(f"task {kind} of job {job}", TASK_MOVES, old, state)
            kept = None if result is None else msgspec.json.encode(result)
            db.execute(
                "UPDATE tasks SET state = ?, result = ?, attempts = attempts + ? WHERE job = ? AND place = ?",
                (state, kept, (state == "running") - is_put_back, job, place),
            )
            _add_event(db, job, int(self._date()), "info", f"{kind} is {state}", result)
        return self._found(job)

    def models(self) -> dict[str, tuple[Path, int]]:
        """List the models made by jobs, by name: directory, and the time when each was ready."""
        rows = self._db.execute("SELECT name, job, created_at FROM models ORDER BY name")
        return {name: (self.work_path(job) / "model", at) for name, job, at in rows}

    def delete_model(self, name: str) -> None:
        """Remove a model from the served ones, and delete the files of its job."""
        with self._writing() as db:
            row = db.execute("DELETE FROM models WHERE name = ? RETURNING job", (name,)).fetchone()
        if row is not None:
            self.clear_work(row[0])

    def clear_work(self, job: int) -> None:
        """Delete the files made by a job. Harmless when repeated."""
        shutil.rmtree(self.work_path(job), ignore_errors=True)

    # ---- events -------------------------------------------------------------------------------------

    def add_event(self, job: int, message: str, data: dict[str, Any] | None, lease: MasterLease) -> None:
        """Record an event reported by a task."""
        with self._writing(lease) as db:
            _add_event(db, job, int(self._date()), "info", message, data)

    def events(self, job: int) -> list[JobEvent]:
        """List all events of a job, in order."""
        rows = self._db.execute(
            "SELECT number, created_at, level, message, data FROM events WHERE job = ? ORDER BY number",
            (job,),
        )
        return [
            JobEvent(number, at, level, message, data and msgspec.json.decode(data))
            for number, at, level, message, data in rows
        ]


def _add_event(
    db: sqlite3.Connection, job: int, at: int, level: str, message: str, data: dict[str, Any] | None
) -> None:
    encoded = None if data is None else msgspec.json.encode(data)
    db.execute(
        "INSERT INTO events (job, created_at, level, message, data) VALUES (?, ?, ?, ?, ?)",
        (job, at, level, message, encoded),
    )
