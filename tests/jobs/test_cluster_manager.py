"""Job executors are started, watched over and started again, whoever of them or of their managers is lost."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.jobs.tools import Time
from xdeepserve.errors import InputError
from xdeepserve.jobs import cluster_manager, state_file
from xdeepserve.jobs.cluster_manager import LEASE_S, LOST_S, START_S, SUSPECT_S, ClusterManager, is_there
from xdeepserve.jobs.je_scaling import UP, LoadSince, wanted_jes
from xdeepserve.jobs.job_states import MEMBER_MOVES, IllegalMoveError
from xdeepserve.jobs.job_store import JobStore
from xdeepserve.jobs.lease import CLUSTER_MANAGER, LeaseLostError, MasterLease
from xdeepserve.jobs.member_table import ClusterMember, MemberTE, ReplacedError

TES = [MemberTE("te", "tiny", "both", "ready")]


class Computer:
    """Processes that a test starts and ends, by number; each is what `Popen` would give."""

    class Child:
        def __init__(self, pid: int) -> None:
            self.pid, self.code = pid, None

        def poll(self) -> int | None:
            return self.code

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.children: dict[int, Computer.Child] = {}
        self.killed: list[tuple[int, int]] = []
        monkeypatch.setattr(cluster_manager, "is_there", self.is_there)
        monkeypatch.setattr(cluster_manager.os, "kill", self.kill)

    def boot(self, name: str) -> Computer.Child:
        child = self.children[100 + len(self.children)] = Computer.Child(100 + len(self.children))
        return child

    def is_there(self, member: ClusterMember) -> bool:
        return member.pid in self.children and self.children[member.pid].code is None

    def kill(self, pid: int, how: int) -> None:
        self.killed.append((pid, how))
        self.children[pid].code = -how


class Cluster:
    """A state directory, its time, and managers on it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time, self.computer = Time(), Computer(monkeypatch)
        self.store = JobStore(path / "state", self.time)
        self.members = self.store.members

    def manager(self, holder: str = "a", count: int = 2) -> ClusterManager:
        names = [f"je-{number}" for number in range(count)]
        return ClusterManager(self.store, holder, names, self.computer.boot)

    def beat(self, *names: str) -> None:
        for member in self.members.all():
            if member.name in names:
                self.members.beat(member.name, member.pid, f"http://{member.name}", TES)

    def states(self) -> list[str]:
        return [member.state for member in self.members.all()]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def test_members_are_started_and_tell_of_their_tes(cluster: Cluster) -> None:
    manager = cluster.manager()
    manager.look()
    assert manager.leads
    assert cluster.states() == ["starting", "starting"]
    cluster.beat("je-1")
    assert cluster.states() == ["starting", "ready"]
    found = cluster.members.all()[1]
    assert (found.address, found.tes, found.boots) == ("http://je-1", TES, 0)


def test_who_ends_fails_or_is_silent_is_started_again(cluster: Cluster) -> None:
    manager = cluster.manager(count=3)
    manager.look()
    cluster.beat("je-0", "je-1", "je-2")
    before = [member.pid for member in cluster.members.all()]
    cluster.computer.children[before[0]].code = 1
    cluster.members.end("je-1", before[1], "lost", "its engine has failed: the die is on fire")
    cluster.time.now += SUSPECT_S
    manager.look()
    assert cluster.states() == ["lost", "starting", "suspect"]
    assert [member.reason for member in cluster.members.all()] == [
        "its process ended with 1", None, "silent for 3 s"
    ]  # fmt: skip
    assert (before[1], signal.SIGKILL) in cluster.computer.killed
    cluster.beat("je-1")
    cluster.time.now += LOST_S - SUSPECT_S
    cluster.beat("je-1")
    manager.look()
    assert cluster.states() == ["starting", "ready", "lost"]
    manager.look()
    assert (before[2], signal.SIGKILL) in cluster.computer.killed, "nobody else may think that it serves"
    with pytest.raises(ReplacedError, match=f"process {before[2]} is not je-2 any more"):
        cluster.members.beat("je-2", before[2], "http://late", TES)


def test_who_never_comes_is_tried_less_and_less_often(cluster: Cluster) -> None:
    manager, begun = cluster.manager(count=1), cluster.time.now
    while len(cluster.computer.children) < 6:
        manager.look()
        for child in cluster.computer.children.values():
            child.code = 1
        cluster.time.now += 0.25
    assert 1 + 2 + 4 + 8 + 16 <= cluster.time.now - begun <= 40


def test_one_that_is_not_ready_in_time_is_lost(cluster: Cluster) -> None:
    manager = cluster.manager(count=1)
    manager.look()
    cluster.time.now += START_S
    manager.look()
    assert cluster.members.all()[0].reason == f"it was not ready within {START_S:g} s"


def test_a_standby_takes_over_with_all_members(cluster: Cluster) -> None:
    first, second = cluster.manager("a"), cluster.manager("b")
    first.look()
    second.look()
    assert (first.leads, second.leads) == (True, False)
    cluster.beat("je-0", "je-1")
    second.close()
    assert cluster.states() == ["ready", "ready"], "who stands by ends nobody"
    cluster.time.now += LEASE_S
    cluster.beat("je-0", "je-1")
    second.look()
    assert second.leads
    assert len(cluster.computer.children) == 2
    pid = cluster.members.all()[0].pid
    cluster.computer.children[pid].code = -9
    second.look()
    second.look()
    assert cluster.states() == ["starting", "ready"]
    first.look()
    assert not first.leads
    late = MasterLease("a", 1, CLUSTER_MANAGER)
    with pytest.raises(LeaseLostError):
        cluster.members.move(cluster.members.all()[1], "lost", "a late thought", late)
    second.close()
    assert cluster.states() == ["gone", "gone"]
    assert cluster.store.take_lease("c", LEASE_S, CLUSTER_MANAGER) is not None, "at once"
    assert cluster.store.take_lease("d", LEASE_S) is not None, "jobs have a lease of their own"


@pytest.mark.parametrize("old", MEMBER_MOVES)
@pytest.mark.parametrize("new", MEMBER_MOVES)
def test_a_member_goes_only_where_the_table_says(cluster: Cluster, old: str, new: str) -> None:
    lease = cluster.store.take_lease("a", LEASE_S, CLUSTER_MANAGER)
    assert lease is not None
    cluster.members.start("je", 1, lease)
    ways = {"suspect": ["ready", "suspect"], "starting": []}
    for state in ways.get(old, [old]):
        cluster.members.move(cluster.members.all()[0], state, "so", lease)  # type: ignore[arg-type]
    member = cluster.members.all()[0]
    if new in MEMBER_MOVES[old]:
        cluster.members.move(member, new, "so", lease)  # type: ignore[arg-type]
        assert cluster.states() == [new]
    else:
        with pytest.raises(IllegalMoveError):
            cluster.members.move(member, new, "so", lease)  # type: ignore[arg-type]
        assert cluster.states() == [old]


def test_members_without_a_name_are_ended_where_their_number_may_change(cluster: Cluster) -> None:
    cluster.manager(count=3).look()
    cluster.beat("je-0", "je-1", "je-2")
    pid = cluster.members.all()[2].pid
    cluster.manager(count=2).look()
    assert cluster.states() == ["ready"] * 3, "a manager of a fixed number leaves others alone"
    scaled = ClusterManager(cluster.store, "a", ["je-0", "je-1"], cluster.computer.boot, is_scaled=True)
    scaled.look()
    assert cluster.states() == ["ready", "ready", "gone"]
    assert cluster.computer.killed == [(pid, signal.SIGKILL)]
    scaled.names.append("je-2")
    scaled.look()
    assert cluster.states() == ["ready", "ready", "starting"]


def counts(load: list[int]) -> list[int]:
    """The numbers of job executors while a cluster of 1 to 4 has this load, a number each half second."""
    count, since, found = 1, LoadSince(), []
    for step, in_flight in enumerate(load):
        count, since = wanted_jes(step / 2, in_flight, count, 1, 4, since)
        found.append(count)
    return found


def test_job_executors_come_and_go_with_load_that_lasts() -> None:
    found = counts([4 * UP] * 100)
    assert found[3:6] == [1, 2, 2], "after 2 s"
    assert found[-1] == 4, "the load is not above the bound for more than 4"
    assert counts([100 * UP] * 100)[-1] == 4
    assert set(counts([100 * UP, 0] * 100)) == {1}, "a load that does not last"
    falls = counts([4 * UP] * 40 + [0] * 400)
    assert [falls[40 + step] for step in (0, 58, 60, 120, 122, 184)] == [4, 4, 3, 3, 2, 1]
    assert falls[-1] == 1


@pytest.mark.parametrize("in_flight", range(0, 5 * UP, 4))
def test_a_steady_load_has_a_steady_number(in_flight: int) -> None:
    """No number is left that the same load brings back."""
    found = counts([in_flight] * 1000)
    assert found == sorted(found)
    down = counts([100 * UP] * 40 + [in_flight] * 1000)[40:]
    assert down == sorted(down, reverse=True)


def test_a_number_that_another_process_has_by_now_is_left_alone() -> None:
    assert not is_there(ClusterMember("je-0", "lost", None, os.getpid(), 0, 0.0, None, []))


def test_a_directory_without_members_gets_the_table(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    JobStore(directory, Time()).close()
    with closing(sqlite3.connect(directory / state_file.NAME, isolation_level=None)) as db:
        db.execute("DROP TABLE members")
        db.execute("PRAGMA user_version = 1")
    store = JobStore(directory, Time())
    assert store.members.all() == []
    store.close()
    with closing(sqlite3.connect(directory / state_file.NAME, isolation_level=None)) as db:
        db.execute(f"PRAGMA user_version = {state_file.VERSION + 1}")
    with pytest.raises(InputError, match="of version 3; this program reads version 2"):
        JobStore(directory, Time())
