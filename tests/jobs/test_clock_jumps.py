"""Clocks that jump: a lease or a heartbeat written by another clock keeps nothing waiting, and every holder
keeps what it holds."""

from __future__ import annotations

import random
import sqlite3
import time
from pathlib import Path

import pytest

from tests.jobs.tools import ORDER, Time
from xdeepserve.jobs.job_master import LEASE_S
from xdeepserve.jobs.job_store import JobStore
from xdeepserve.jobs.lease import CLUSTER_MANAGER, JOB_MASTER, LeaseLostError
from xdeepserve.jobs.state_file import NAME

AHEAD = [LEASE_S + 0.1, 3600.0, 86400.0 * 365, 1.8e9, float("inf")]


def set_ends(state: Path, ends_at: float) -> None:
    """Set the ends of all leases, as a computer with another clock has written them."""
    with sqlite3.connect(state / NAME) as db:
        db.execute("UPDATE leases SET ends_at = ?", (ends_at,))
    db.close()


@pytest.mark.parametrize("what", [JOB_MASTER, CLUSTER_MANAGER])
@pytest.mark.parametrize("ahead", AHEAD)
def test_an_end_that_nobody_can_have_set_holds_nobody_up(tmp_path: Path, ahead: float, what: str) -> None:
    now = Time()
    store = JobStore(tmp_path, now)
    old = store.take_lease("a", LEASE_S, what)
    assert old is not None
    set_ends(tmp_path, now.now + ahead)
    new = store.take_lease("b", LEASE_S, what)
    assert new is not None
    assert new.term == old.term + 1
    assert store.take_lease("c", LEASE_S, what) is None, "b holds it, as everybody does"
    if what == JOB_MASTER:
        number = store.add_job(ORDER, ("prepare",)).number
        with pytest.raises(LeaseLostError):
            store.move_job(number, "running", old)
        assert store.move_job(number, "running", new).state == "running"


def test_an_end_that_a_holder_can_have_set_is_waited_for(tmp_path: Path) -> None:
    now = Time()
    store = JobStore(tmp_path, now)
    assert store.take_lease("a", LEASE_S)
    for passed in (0.0, 5.0, LEASE_S - 5.1):
        now.now += passed
        assert store.take_lease("b", LEASE_S) is None
    now.now += 0.1
    assert store.take_lease("b", LEASE_S)


def test_a_computer_that_starts_anew_begins_its_clock_anew(tmp_path: Path) -> None:
    """Its boot ends every process, holders among them."""
    now = Time()
    store = JobStore(tmp_path, now)
    now.now = 1e6
    assert store.take_lease("a", LEASE_S)
    now.now = 20.0
    assert store.take_lease("b", LEASE_S)


@pytest.mark.parametrize("jump", [-86400.0, -1.0, 3600.0, 1e9])
def test_the_date_may_jump_under_a_leader(tmp_path: Path, jump: float) -> None:
    """Records have the new date; who leads goes on, and nobody else leads."""
    now, date = Time(), Time()
    store, other = (JobStore(tmp_path, now, date) for _ in range(2))
    lease = store.take_lease("a", LEASE_S)
    assert lease is not None
    first = store.add_job(ORDER, ("prepare",))
    date.now += jump
    assert other.take_lease("b", LEASE_S) is None
    assert store.take_lease("a", LEASE_S) == lease
    assert store.move_job(first.number, "running", lease).created_at == 1000
    assert store.add_job(ORDER, ("prepare",)).created_at == 1000 + jump
    now.now += LEASE_S
    assert other.take_lease("b", LEASE_S) is not None


@pytest.mark.parametrize("ahead", [1.0, 3600.0, 1.8e9])
def test_a_heartbeat_to_come_counts_as_of_now(tmp_path: Path, ahead: float) -> None:
    now = Time()
    store = JobStore(tmp_path, now)
    lease = store.take_lease("a", LEASE_S, CLUSTER_MANAGER)
    assert lease is not None
    store.members.start("je", 7, lease)
    now.now += ahead
    store.members.beat("je", 7, "http://there", [])
    store.members.start("other", 8, lease)
    now.now -= ahead
    store.members.date_back(lease)
    assert [each.beat_at for each in store.members.all()] == [now.now, now.now]
    now.now += 2.0
    store.members.date_back(lease)
    assert [each.beat_at for each in store.members.all()] == [now.now - 2.0] * 2, "the past stays as it is"


def test_stores_of_a_server_use_a_clock_that_never_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xdeepserve.api.server.options import ServerOptions
    from xdeepserve.api.server.served_models import ServedModels
    from xdeepserve.jobs.door.desk import JobDesk

    desk = JobDesk(ServedModels({}), ServerOptions(state=tmp_path))
    monkeypatch.setattr(time, "time", lambda: 1.0)
    assert desk.store.take_lease("a", LEASE_S)
    assert desk.store.take_lease("b", LEASE_S) is None
    assert desk.store.now() > 0
    desk.store.close()


@pytest.mark.campaign
def test_two_hundred_jumps(tmp_path: Path) -> None:
    """Masters come, are killed and come again while the date and ends of leases jump: every job gets its end,
    and each task is done by who led."""
    draw, now, date = random.Random(54), Time(), Time()
    done: list[int] = []
    for jump in range(200):
        store = JobStore(tmp_path, now, date)
        date.now += draw.choice([-1e6, -3600.0, 0.0, 5.0, 1e7])
        number = store.add_job(ORDER, ("prepare",)).number
        lease, waited = None, 0.0
        while lease is None:
            lease = store.take_lease(f"master {jump}", LEASE_S)
            waited += 0.0 if lease else 1.0
            now.now += 0.0 if lease else 1.0
            assert waited <= LEASE_S, "it waits longer than any lease lasts"
        for open_job in [job for job in store.jobs() if job.state in ("queued", "running")]:
            if open_job.state == "queued":
                store.move_job(open_job.number, "running", lease)
            if open_job.number == number and draw.random() < 0.3:
                continue  # this master is killed while it is at work
            store.move_job(open_job.number, "succeeded", lease)
            done.append(open_job.number)
        if draw.random() < 0.5:
            set_ends(tmp_path, draw.choice([now.now, date.now, 0.0]) + draw.choice([0.0, *AHEAD]))
        store.close()
        now.now = draw.choice([now.now, now.now + 3.0, 5.0])  # 5: the computer has been started anew
    store = JobStore(tmp_path, now, date)
    unfinished = [job.number for job in store.jobs() if job.state == "running"]
    assert sorted(done + unfinished) == list(range(1, 201))
    assert len(unfinished) <= 1
    store.close()
