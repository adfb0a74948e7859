"""Faults of the memory pool's parts: what breaks, what is refused, what is as before when it is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ems.tools import get, key, make, put, run, server_of
from xdeepserve.ems.directory import verify
from xdeepserve.ems.memory_pool import MemoryPool
from xdeepserve.errors import InputError
from xdeepserve.hw.faults import Fault, check_faults, schedule
from xdeepserve.hw.volume import Volume

NUMBERS = [*range(12)]


def begin(pool: MemoryPool, *plan: Fault) -> None:
    """Have faults happen from now on."""
    check_faults(plan, pool.pod)
    schedule(plan, pool.pod)


async def found(pool: MemoryPool) -> list[int]:
    """The numbers whose values are there; others have none."""
    client, there = pool.client(), []
    for number in NUMBERS:
        value = await get(pool, client, number)
        assert value in (None, number.to_bytes(4, "big") * 10_000)
        there += [number] if value is not None else []
    return there


def on_server(pool: MemoryPool, name: str) -> list[int]:
    return [number for number in NUMBERS if server_of(pool, number).name == name]


@pytest.mark.parametrize("fault", ["error", "full"])
def test_a_broken_disk_takes_nothing_and_then_all(tmp_path: Path, fault: str) -> None:
    pool = make(tmp_path, servers=1)
    volume, client = pool.servers[0].volume, pool.client()
    run(pool, put(pool, client, NUMBERS[:6]))
    volume.disk.fault = fault
    assert run(pool, put(pool, client, NUMBERS[6:])) == 0
    assert volume.num_failed == 1
    assert run(pool, found(pool)) == NUMBERS[:6]  # from DRAM
    for number in NUMBERS[:6]:
        pool.servers[0].dram.evict(key(number))
    readable = [] if fault == "error" else NUMBERS[:6]
    assert run(pool, found(pool)) == readable
    volume.disk.fault = None
    assert run(pool, put(pool, client, NUMBERS[6:])) == 6
    assert run(pool, found(pool)) == NUMBERS
    pool.check_integrity()
    pool.close()
    assert [report.num_bad for report in verify(tmp_path)] == [0]


def test_what_a_full_disk_cannot_forget_it_forgets_later(tmp_path: Path) -> None:
    """Else a value that comes again would be there twice, and the file would be taken for damaged."""
    pool = make(tmp_path, servers=1)
    volume, client = pool.servers[0].volume, pool.client()
    run(pool, put(pool, client, NUMBERS))
    volume.disk.fault = "full"
    pool.servers[0].delete([key(0), key(1)])
    assert key(0) not in volume.rows
    volume.disk.fault = None
    assert run(pool, put(pool, client, [0])) == 1
    pool.close()
    again = Volume(volume.path)
    again.open()
    assert again.num_rebuilt == 0
    assert {each.digest for each in again.rows} == {key(number).digest for number in NUMBERS if number != 1}
    again.close()


@pytest.mark.parametrize("num_values", [1, 3, 12])
def test_a_torn_commit_loses_values_and_never_gives_wrong_ones(tmp_path: Path, num_values: int) -> None:
    pool = make(tmp_path, servers=1)
    client = pool.client()
    run(pool, put(pool, client, NUMBERS[num_values:]))
    pool.servers[0].volume.disk.fault = "torn"
    run(pool, put(pool, client, NUMBERS[:num_values]))
    assert pool.servers[0].volume.disk.fault is None  # once
    run(pool, found(pool))
    pool.close()
    (report,) = verify(tmp_path)
    assert report.num_bad
    assert [each.num_bad for each in verify(tmp_path)] == [0]  # mended
    again = make(tmp_path, servers=1)
    assert set(run(again, found(again))) != {*NUMBERS}
    assert run(again, put(again, again.client(), NUMBERS)) > 0
    assert run(again, found(again)) == NUMBERS
    again.close()


def test_a_server_that_is_lost_for_a_time(tmp_path: Path) -> None:
    pool = make(tmp_path)
    run(pool, put(pool, pool.client(), NUMBERS))
    gone = on_server(pool, "server-01")
    now_us = pool.pod.clock.now / 1000
    begin(pool, Fault(now_us + 1, mp_server=1, kind="lost", for_us=5000))
    run(pool, pool.pod.clock.sleep(2_000))
    assert run(pool, found(pool)) == [number for number in NUMBERS if number not in gone]
    run(pool, pool.pod.clock.sleep(6_000_000))
    assert run(pool, found(pool)) == NUMBERS
    assert pool.counts()["volume hits"] == len(gone)  # its DRAM was worth nothing
    pool.check_integrity()
    pool.close()


def test_a_server_on_a_lost_host_does_not_come_back(tmp_path: Path) -> None:
    pool = make(tmp_path)
    begin(pool, Fault(1, mp_server=1, kind="lost", for_us=10), Fault(5, host=1, kind="lost"))
    run(pool, pool.pod.clock.sleep(50_000))
    assert pool.servers[1].is_lost
    pool.close()


def test_views_that_are_stale_and_a_controller_that_is_lost(tmp_path: Path) -> None:
    pool = make(tmp_path)
    client = pool.client()
    moved = on_server(pool, "server-01")
    run(pool, put(pool, client, NUMBERS))
    now_us = pool.pod.clock.now / 1000
    begin(
        pool,
        Fault(now_us + 1, mp_server=1, kind="left", for_us=100),
        Fault(now_us + 50, mp_controller=0, kind="lost", for_us=20),
    )
    run(pool, pool.pod.clock.sleep(2_000))
    assert not client.contains(key(moved[0]))
    assert client.counts["stale views"] == 1
    run(pool, pool.pod.clock.sleep(60_000))
    assert not client.contains(key(moved[0]))  # it goes on with the view that it has
    run(pool, pool.pod.clock.sleep(60_000))
    assert client.contains(key(moved[0]))
    pool.check_integrity()
    pool.close()


def test_all_servers_leave(tmp_path: Path) -> None:
    """Whoever has a view of before asks one of them, and finds that it has nothing."""
    pool = make(tmp_path, servers=2)
    client = pool.client()
    begin(pool, *(Fault(1, mp_server=number, kind="left") for number in range(2)))
    run(pool, pool.pod.clock.sleep(2_000))
    assert not client.contains(key(0))
    assert client.begin(key(0), 100) is None
    pool.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(5, volume=3, kind="full"), "the deployment has no volume 3; it has 3: 0, 1, 2"),
        (Fault(5, mp_server=-1, kind="lost"), "the deployment has no mp server -1; it has 3: 0, 1, 2"),
        (Fault(5, mp_controller=1, kind="lost"), "no mp controller 1; it has 1: 0"),
        (Fault(5, volume=0, kind="lost"), "kind of a volume must be one of error, full, torn"),
        (Fault(5, mp_server=0, kind="torn"), "kind of a mp server must be one of lost, left"),
        (Fault(5, volume=0, kind="torn", for_us=3), "it has no for_us"),
        (Fault(5, volume=0, kind="full", for_us=0), "for_us must be more than 0"),
    ],
    ids=str,
)
def test_what_cannot_happen(tmp_path: Path, fault: Fault, message: str) -> None:
    pool = make(tmp_path)
    with pytest.raises(InputError, match=message) as refusal:
        check_faults([fault], pool.pod)
    assert "\n" not in str(refusal.value)
    pool.close()
