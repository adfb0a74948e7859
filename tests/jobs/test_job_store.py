"""Files, jobs and their states on disk, and who may move them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.jobs.tools import ORDER, Time
from xdeepserve.errors import InputError, OverloadedError
from xdeepserve.jobs import job_store
from xdeepserve.jobs.job_states import JOB_MOVES, TASK_MOVES, IllegalMoveError
from xdeepserve.jobs.job_store import JobStore
from xdeepserve.jobs.lease import LeaseLostError

KINDS = ("prepare", "quantize")


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "state", Time())
    (tmp_path / "mine").write_text("text")
    file = store.add_file("mine.jsonl", "fine-tune", tmp_path / "mine")
    job = store.add_job(ORDER, KINDS)
    lease = store.take_lease("a", 10)
    assert lease is not None
    store.move_job(job.number, "running", lease)
    store.move_task(job.number, 0, "running", lease)
    store.move_task(job.number, 0, "done", lease, {"examples": 3})
    before = store.jobs(), store.events(job.number), store.files()
    store.close()
    store = JobStore(tmp_path / "state", Time())
    assert (store.jobs(), store.events(job.number), store.files()) == before
    assert store.file_path(file.number).read_text() == "text"
    (found,) = store.jobs()
    assert (found.id, found.tasks[0].result) == ("ftjob-00000001", {"examples": 3})
    assert found.next_task is not None
    assert found.next_task[0] == 1
    store.delete_file(file.number)
    assert store.files() == []
    assert not store.file_path(file.number).exists()


@pytest.mark.parametrize("old", JOB_MOVES)
@pytest.mark.parametrize("new", JOB_MOVES)
def test_a_job_goes_only_where_the_table_says(tmp_path: Path, old: str, new: str) -> None:
    store = JobStore(tmp_path / "state", Time())
    number = store.add_job(ORDER, KINDS).number
    ways = {"queued": [], "running": ["running"], "cancelled": ["cancelled"]}
    for state in ways.get(old, ["running", old]):
        store.move_job(number, state)
    if new in JOB_MOVES[old]:
        assert store.move_job(number, new).state == new
    else:
        before = store.jobs(), store.events(number)
        with pytest.raises(
            IllegalMoveError, match=rf"^job 1 is {old}, from which it goes to .* not to {new}$"
        ):
            store.move_job(number, new)
        assert (store.jobs(), store.events(number)) == before


@pytest.mark.parametrize("old", TASK_MOVES)
@pytest.mark.parametrize("new", TASK_MOVES)
def test_a_task_goes_only_where_the_table_says(tmp_path: Path, old: str, new: str) -> None:
    store = JobStore(tmp_path / "state", Time())
    number = store.add_job(ORDER, KINDS).number
    lease = store.take_lease("a", 10)
    assert lease is not None
    for state in {"waiting": [], "running": ["running"], "cancelled": ["cancelled"]}.get(
        old, ["running", old]
    ):
        store.move_task(number, 0, state, lease)
    if new in TASK_MOVES[old]:
        assert store.move_task(number, 0, new, lease).tasks[0].state == new
    else:
        with pytest.raises(IllegalMoveError, match=f"^task prepare of job 1 is {old}"):
            store.move_task(number, 0, new, lease)


def test_every_state_has_an_end_and_a_way_to_it() -> None:
    for moves, start in ((JOB_MOVES, "queued"), (TASK_MOVES, "waiting")):
        reached, found = {start}, [start]
        while found:
            more = set(moves[found.pop()]) - reached
            reached |= more
            found += more
        assert reached == moves.keys()
        assert any(not moves[state] for state in moves)


def test_a_standby_leads_when_the_lease_has_run_out_and_the_late_one_writes_nothing(tmp_path: Path) -> None:
    time = Time()
    first, second = (JobStore(tmp_path / "state", time) for _ in range(2))
    number = first.add_job(ORDER, KINDS).number
    lease = first.take_lease("a", 10)
    assert lease is not None
    assert (lease.term, second.take_lease("b", 10)) == (1, None)
    time.now += 9
    assert first.take_lease("a", 10) == lease  # renewed
    time.now += 9
    assert second.take_lease("b", 10) is None
    time.now += 1
    taken = second.take_lease("b", 10)
    assert taken is not None
    assert taken.term == 2
    before = first.jobs(), first.events(number)
    writes = (
        lambda: first.move_job(number, "running", lease),
        lambda: first.move_task(number, 0, "running", lease),
        lambda: first.add_event(number, "late", None, lease),
    )
    for write in writes:
        with pytest.raises(LeaseLostError, match=r"^a led in term 1; it is term 2 now, of b$"):
            write()
    assert (first.jobs(), first.events(number)) == before
    first.give_up(lease)  # not its own any more: nothing happens
    assert first.take_lease("a", 10) is None
    second.give_up(taken)
    again = first.take_lease("a", 10)
    assert again is not None
    assert again.term == 3


def test_what_ends_early_takes_its_tasks_along(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "state", Time(), Time())
    job = store.add_job(ORDER, KINDS)
    lease = store.take_lease("a", 10)
    assert lease is not None
    store.move_job(job.number, "running", lease)
    store.move_task(job.number, 0, "running", lease)
    job = store.move_job(job.number, "cancelled")
    assert [task.state for task in job.tasks] == ["cancelled"] * 2
    assert job.finished_at == 1000
    assert store.next_job() is None


def test_one_that_runs_comes_before_those_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_store, "MAX_OPEN_JOBS", 3)
    store = JobStore(tmp_path / "state", Time())
    numbers = [store.add_job(ORDER, KINDS).number for _ in range(3)]
    with pytest.raises(OverloadedError, match="3 jobs are open"):
        store.add_job(ORDER, KINDS)
    assert store.next_job() == store.job(numbers[0])
    store.move_job(numbers[1], "running")
    assert store.next_job() == store.job(numbers[1])


def test_a_directory_that_will_not_do(tmp_path: Path) -> None:
    def refused(directory: Path) -> str:
        with pytest.raises(InputError) as caught:
            JobStore(directory, Time())
        assert "\n" not in str(caught.value)
        return str(caught.value)

    JobStore(tmp_path / "not" / "there", Time()).close()  # it is made
    (tmp_path / "file").write_text("x")
    assert "cannot be made" in refused(tmp_path / "file" / "there")
    assert "cannot be made" in refused(tmp_path / "file")
    JobStore(tmp_path / "newer", Time()).close()
    with sqlite3.connect(tmp_path / "newer" / "jobs.sqlite") as db:
        db.execute("PRAGMA user_version = 3")
    assert "of version 3; this program reads version 2" in refused(tmp_path / "newer")
    for name, content in (("torn", b"SQLite format 3\0" + b"x" * 4000), ("text", b"notes " * 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "jobs.sqlite").write_bytes(content)
        assert "cannot be used" in refused(tmp_path / name)
    (tmp_path / "other").mkdir()
    with sqlite3.connect(tmp_path / "other" / "jobs.sqlite") as db:
        db.execute("CREATE TABLE t (x)")
    assert "somebody else's file is left alone" in refused(tmp_path / "other")
