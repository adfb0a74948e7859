"""Jobs go on, or say why they do not, whoever is lost in whichever state."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.tools import ORDER, Time
from xdeepserve.errors import InputError
from xdeepserve.jobs import job_master
from xdeepserve.jobs.job_master import MAX_ATTEMPTS, JobMaster
from xdeepserve.jobs.job_records import JobRecord
from xdeepserve.jobs.job_states import JOB_MOVES, is_over
from xdeepserve.jobs.job_store import JobStore
from xdeepserve.jobs.task_process import TaskFailedError, TaskLostError, TaskSpec
from xdeepserve.jobs.task_work import KINDS

LEASE_S = 10.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_master, "POLL_S", 0.002)
    monkeypatch.setattr(job_master, "TROUBLE_S", 0.002)


class Works:
    """What tasks do: each is counted, ends at once, and leaves its kind; some do as they are told here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.kept: dict[str, Callable[[], Awaitable[None]]] = {}
        self.models: list[str] = []
        monkeypatch.setattr(job_master, "run_task", self.run)

    async def run(self, spec: TaskSpec, on_event: Any) -> dict[str, Any]:
        os.makedirs(spec.directory, exist_ok=True)
        on_event("begins", {"step": 0})
        await self._do(spec.kind)
        return {"kind": spec.kind}

    async def serve(self, name: str, directory: Path) -> None:
        await self._do("serve")
        self.models.append(name)

    async def follow(self) -> None:
        pass

    async def _do(self, kind: str) -> None:
        self.begun.append(kind)
        if kind in self.kept:
            await self.kept[kind]()


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> Works:
    return Works(monkeypatch)


@contextlib.asynccontextmanager
async def at_work(store: JobStore, holder: str, works: Works) -> AsyncIterator[JobMaster]:
    master = JobMaster(store, holder, works.serve, works.follow, LEASE_S)
    task = asyncio.create_task(master.run())
    try:
        yield master
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ended(store: JobStore, number: int = 1) -> JobRecord:
    async with asyncio.timeout(20):
        while True:
            job = store.job(number)
            assert job is not None
            if job.is_over:
                return job
            await asyncio.sleep(0.002)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_a_job_does_its_tasks_in_their_order(tmp_path: Path, works: Works) -> None:
    store = JobStore(tmp_path / "state", Time())
    for _ in range(2):
        store.add_job(ORDER, KINDS)
    async with at_work(store, "a", works):
        jobs = [await ended(store, number) for number in (1, 2)]
    assert works.begun == [*KINDS] * 2
    assert [job.state for job in jobs] == ["succeeded"] * 2
    assert works.models == [job.result_name for job in jobs] == list(store.models())
    assert [(task.state, task.attempts) for job in jobs for task in job.tasks] == [("done", 1)] * 8
    assert store.events(1)[3].data == {"step": 0}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_master_lost_at_any_task_has_a_successor(tmp_path: Path, works: Works, kind: str) -> None:
    """The standby waits for the end of the lease, goes on with the task that was under way, and what the
    first one comes to say afterwards changes nothing."""
    time, late = Time(), asyncio.Event()
    first, second = (JobStore(tmp_path / "state", time) for _ in range(2))
    first.add_job(ORDER, KINDS)

    async def stuck() -> None:
        del works.kept[kind]
        first.take_lease = lambda *_: None  # type: ignore[method-assign]  # it sleeps, and renews nothing
        await late.wait()

    works.kept[kind] = stuck
    masters = at_work(first, "a", works), at_work(second, "b", works)
    async with masters[0] as a:
        await until(lambda: kind in works.begun)
        a.renew = lambda: True  # type: ignore[method-assign]  # nor does it know that time goes by
        async with masters[1] as b:
            await asyncio.sleep(0.02)
            assert (b.leads, second.jobs()[0].state) == (False, "running")
            time.now += LEASE_S
            job = await ended(second)
            assert b.leads
            events = second.events(1)
            late.set()
            await asyncio.sleep(0.02)
            assert (second.job(1), second.events(1)) == (job, events)
    assert job.state == "succeeded"
    assert [task.attempts for task in job.tasks] == [1 + (each == kind) for each in KINDS]
    assert f"{kind} was lost: its master was lost" in [event.message for event in events]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_orderly_end_is_no_attempt(tmp_path: Path, works: Works, kind: str) -> None:
    store = JobStore(tmp_path / "state", Time())
    store.add_job(ORDER, KINDS)
    works.kept[kind] = for_ever
    for holder in ("a", "b"):  # the second one need not wait: the first has given up the lease
        async with at_work(store, holder, works):
            await until(lambda: works.begun[-1:] == [kind])
            works.begun.append("-")
    works.kept.clear()
    async with at_work(store, "c", works):
        job = await ended(store)
    assert (job.state, [task.attempts for task in job.tasks]) == ("succeeded", [1] * len(KINDS))


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("num_losses", [1, MAX_ATTEMPTS])
async def test_a_lost_process_is_started_again_but_not_for_ever(
    tmp_path: Path, works: Works, kind: str, num_losses: int
) -> None:
    store = JobStore(tmp_path / "state", Time())
    store.add_job(ORDER, KINDS)

    async def lose() -> None:
        if works.begun.count(kind) <= num_losses:
            raise TaskLostError("killed")

    works.kept[kind] = lose
    async with at_work(store, "a", works):
        job = await ended(store)
    assert works.begun.count(kind) == min(num_losses + 1, MAX_ATTEMPTS)
    if num_losses < MAX_ATTEMPTS:
        assert job.state == "succeeded"
    else:
        assert job.reason == f"{kind} was begun 3 times and never ended; the last time killed"
        assert not store.work_path(1).exists()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_that_fails_says_why(tmp_path: Path, works: Works, kind: str) -> None:
    store = JobStore(tmp_path / "state", Time())
    store.add_job(ORDER, KINDS)

    async def fail() -> None:
        raise InputError("no room") if kind == "serve" else TaskFailedError("no room")

    works.kept[kind] = fail
    async with at_work(store, "a", works):
        job = await ended(store)
    assert (job.state, job.reason) == ("failed", f"{kind}: no room")
    at = KINDS.index(kind)
    later = ["cancelled"] * (len(KINDS) - at - 1)
    assert [task.state for task in job.tasks] == ["done"] * at + ["failed", *later]
    assert store.events(1)[-1].level == "error"
    assert store.models() == {}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_task_ends(tmp_path: Path, works: Works, kind: str) -> None:
    store = JobStore(tmp_path / "state", Time())
    for _ in range(2):
        store.add_job(ORDER, KINDS)
    has_ended = []

    async def stuck() -> None:
        del works.kept[kind]
        try:
            await for_ever()
        finally:
            has_ended.append(kind)

    works.kept[kind] = stuck
    async with at_work(store, "a", works):
        await until(lambda: kind in works.begun)
        store.move_job(1, "cancelled")
        assert (await ended(store, 2)).state == "succeeded"  # and the next one's turn comes
    assert has_ended == [kind]
    assert is_over(JOB_MOVES, store.jobs()[0].state)
    assert list(store.models()) == [store.jobs()[1].result_name]


@pytest.mark.parametrize("write", ["take_lease", "next_job", "move_job", "move_task", "add_event"])
async def test_a_directory_that_cannot_be_used_for_a_while_holds_jobs_up(
    tmp_path: Path, works: Works, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore(tmp_path / "state", Time())
    store.add_job(ORDER, KINDS)
    whole, failures = getattr(store, write), [sqlite3.OperationalError("disk is full")] * 2

    def fails_twice(*args: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return whole(*args, **more)

    monkeypatch.setattr(store, write, fails_twice)
    async with at_work(store, "a", works):
        assert (await ended(store)).state == "succeeded"
    assert not failures


@pytest.mark.parametrize("trouble", ["cancelled job", "lost lease", "broken store"])
async def test_a_master_ends_whatever_its_store_says(
    tmp_path: Path, works: Works, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """The server ends just when a job is cancelled, a lease lost, a directory gone."""
    store = JobStore(tmp_path / "state", time := Time())
    store.add_job(ORDER, KINDS)
    works.kept = {KINDS[0]: for_ever}
    master = asyncio.create_task(JobMaster(store, "a", works.serve, works.follow, LEASE_S).run())
    await until(lambda: bool(works.begun))
    if trouble == "cancelled job":
        store.move_job(1, "cancelled")
    elif trouble == "lost lease":
        time.now += 2 * LEASE_S
        assert store.take_lease("b", LEASE_S)
    else:

        def broken(*args: Any, **kwargs: Any) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(store, "move_task", broken)
    master.cancel()
    done, _ = await asyncio.wait({master}, timeout=5)
    assert done
    assert master.cancelled()
