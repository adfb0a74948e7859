"""Servers, clients and the Controller: phases of put and get, tiers, loss, views, bad directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ems.tools import SIZE, data, get, key, make, put, run, server_of, write
from xdeepserve.ems.mp_server import LEASE_NS
from xdeepserve.ems.ring import Ring
from xdeepserve.errors import InputError, ProtocolError


def test_values_come_from_dram_and_after_a_restart_from_volumes(tmp_path: Path) -> None:
    pool = make(tmp_path)
    client = pool.client()
    assert run(pool, put(pool, client, [*range(20)])) == 20
    assert all(run(pool, get(pool, client, n)) == data(n) for n in range(20))
    assert (pool.counts()["dram hits"], pool.counts()["volume hits"]) == (20, 0)
    took = pool.pod.clock.now
    assert run(pool, get(pool, client, 21)) is None
    assert run(pool, get(pool, client, 1, "b")) is None
    pool.check_integrity()
    pool.close()
    again = make(tmp_path)
    client = again.client()
    assert all(run(again, get(again, client, n)) == data(n) for n in range(20))
    assert again.counts()["volume hits"] == 20
    assert again.usage()["dram values"] == again.usage()["volume values"] == 20
    assert run(again, put(again, client, [3])) == 0  # it is there: stored once
    assert took > 20 * SIZE / 50e9 * 1e9 / 3  # bytes to volumes take a card's time
    again.close()


@pytest.mark.parametrize(("before", "after"), [(3, 4), (4, 3), (1, 5), (5, 1)])
def test_other_servers_bring_keys_to_their_new_owners(tmp_path: Path, before: int, after: int) -> None:
    pool = make(tmp_path, before)
    for first in range(0, 40, 10):
        assert run(pool, put(pool, pool.client(), [*range(first, first + 10)])) == 10
    pool.close()
    again = make(tmp_path, after)
    names = [[f"server-{i:02d}" for i in range(count)] for count in (before, after)]
    rings = [Ring(each) for each in names]
    assert again.num_moved == sum(rings[0].owner(key(n)) != rings[1].owner(key(n)) for n in range(40))
    client = again.client()
    assert all(run(again, get(again, client, n)) == data(n) for n in range(40))
    assert len([*tmp_path.glob("*.sqlite")]) == after
    again.close()


def test_a_put_is_there_when_it_has_ended_and_not_before(tmp_path: Path) -> None:
    pool = make(tmp_path)
    client = pool.client()
    lease = client.begin(key(1), SIZE)
    assert lease is not None
    assert client.begin(key(1), SIZE) is None  # somebody writes it
    assert not client.contains(key(1))
    client.revoke([lease])
    client.revoke([lease])
    pool.check_integrity()
    assert run(pool, client.commit([lease])) == 0
    assert run(pool, put(pool, client, [1])) == 1
    assert client.contains(key(1))
    pool.close()


def test_eviction_spares_what_is_pinned_and_the_volume_refills_dram(tmp_path: Path) -> None:
    pool = make(tmp_path, servers=1, dram=400_000)
    client = pool.client()
    run(pool, put(pool, client, [0, 1]))
    pinned = client.pin(key(0))
    assert pinned is not None
    for n in range(2, 20):
        assert run(pool, put(pool, client, [n])) == 1
    server = pool.servers[0]
    assert server.is_in_dram(key(0))
    assert not server.is_in_dram(key(1))
    assert pool.counts()["dram evictions"] >= 10
    assert client.release(pinned)
    assert run(pool, get(pool, client, 1)) == data(1)
    assert pool.counts()["volume hits"] == 1
    pool.check_integrity()
    leases = [lease for n in range(20) if (lease := client.begin(key(100 + n), SIZE)) is not None]
    assert 0 < len(leases) < 20  # all else has gone, and what is being written stays
    client.revoke(leases)
    pool.check_integrity()
    pool.close()


def test_a_full_volume_forgets_what_was_not_used_for_longest(tmp_path: Path) -> None:
    pool = make(tmp_path, servers=1, volume=400_000)
    client = pool.client()
    run(pool, put(pool, client, [*range(6)]))
    for n in range(6, 12):
        assert run(pool, get(pool, client, 0)) == data(0)
        run(pool, put(pool, client, [n]))
    assert client.contains(key(0))
    assert not client.contains(key(1))
    assert pool.usage()["volume bytes"] <= 400_000
    pool.check_integrity()
    pool.close()
    smaller = make(tmp_path, servers=1, volume=200_000)
    assert 0 < smaller.usage()["volume bytes"] <= 200_000
    assert run(smaller, get(smaller, smaller.client(), 11)) == data(11)
    smaller.close()


def test_a_namespace_keeps_to_its_quota_and_sees_itself_alone(tmp_path: Path) -> None:
    pool = make(tmp_path, servers=1, quota=3 * SIZE)
    client = pool.client()
    run(pool, put(pool, client, [0, 1], "b"))
    for n in range(6):
        run(pool, put(pool, client, [n]))
    assert [n for n in range(6) if client.contains(key(n))] == [3, 4, 5]
    assert client.contains(key(0, "b"))
    assert client.begin(key(50), 4 * SIZE) is None
    pool.controller.create_namespace("c", None)
    assert run(pool, put(pool, client, [7], "c")) == 1
    pool.controller.delete_namespace("c")
    with pytest.raises(ProtocolError, match="no namespace c"):
        client.contains(key(7, "c"))
    pool.check_integrity()
    pool.close()


def test_bytes_that_change_in_dram_come_from_the_volume(tmp_path: Path) -> None:
    pool = make(tmp_path, servers=1)
    client = pool.client()
    run(pool, put(pool, client, [5]))
    lease = client.pin(key(5))
    assert lease is not None
    assert lease.address is not None
    pool.pod.memories.write(lease.address.plus(77), b"x")
    assert run(pool, get(pool, client, 5)) == data(5)
    assert not client.release(lease)  # who was reading meanwhile may have read anything
    assert pool.counts()["mismatches"] == 1
    pool.check_integrity()
    pool.close()


def test_a_lost_server_loses_dram_and_leases_but_not_its_volume(tmp_path: Path) -> None:
    pool = make(tmp_path)
    client = pool.client()
    run(pool, put(pool, client, [*range(30)]))
    lost = server_of(pool, 0)
    mine = [n for n in range(30) if server_of(pool, n) is lost]
    reading = client.pin(key(0))
    writing = next(
        lease
        for n in range(100, 200)
        if server_of(pool, n) is lost and (lease := client.begin(key(n), SIZE)) is not None
    )
    assert reading is not None
    lost.lose()
    assert not client.release(reading)
    assert all((run(pool, get(pool, client, n)) is None) == (n in mine) for n in range(30))
    lost.recover()
    write(pool, writing, 1)
    assert run(pool, client.commit([writing])) == 0  # of an older epoch
    assert all(run(pool, get(pool, client, n)) == data(n) for n in range(30))
    pool.check_integrity()
    pool.close()


def test_a_server_that_leaves_and_a_controller_that_is_lost(tmp_path: Path) -> None:
    pool = make(tmp_path)
    client, other = pool.client(), pool.client()
    run(pool, put(pool, client, [*range(30)]))
    lost = server_of(pool, 0)
    lost.lose()
    pool.controller.leave(lost.name)
    mine = [n for n in range(30) if client.ring.owner(key(n)) == lost.name]
    assert run(pool, put(pool, client, mine)) == len(mine)  # others have these keys now
    assert client.ring.version == pool.controller.view().version
    assert all(run(pool, get(pool, client, n)) == data(n) for n in range(30))
    pool.controller.is_lost = True
    # One knows the newest view; the other asks a server that is lost, and nobody tells it of another.
    assert all(run(pool, get(pool, client, n)) == data(n) for n in range(30))
    assert all((run(pool, get(pool, other, n)) is None) == (n in mine) for n in range(30))
    lost.recover()
    assert run(pool, get(pool, other, mine[0])) is None
    assert other.counts["stale views"] == 1
    pool.controller.is_lost = False
    assert all(run(pool, get(pool, other, n)) == data(n) for n in range(30))
    pool.controller.join(lost.name)
    assert all(run(pool, get(pool, client, n)) == data(n) for n in range(30))
    pool.check_integrity()
    pool.close()


def test_who_does_not_come_back_for_what_is_pinned_loses_it(tmp_path: Path) -> None:
    pool = make(tmp_path, servers=1)
    client = pool.client()
    run(pool, put(pool, client, [1, 2]))
    lease = client.pin(key(1))
    assert lease is not None
    run(pool, pool.pod.clock.sleep(LEASE_NS))
    client.pin(key(2))
    assert not client.release(lease)
    pool.close()


def test_directories_that_will_not_do(tmp_path: Path) -> None:
    make(tmp_path / "not" / "yet").close()
    assert (tmp_path / "not" / "yet").is_dir(), "it is made, and so is the one that it lies in"
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "within"):
        with pytest.raises(InputError, match="/file: not a directory"):
            make(path)
    pool = make(tmp_path)
    with pytest.raises(InputError, match=r"in use by another LLM of this process; close that one first"):
        make(tmp_path)
    pool.close()
    (tmp_path / "server-02.sqlite").write_bytes(b"somebody else's poems " * 99)
    with pytest.raises(InputError, match=r"server-02\.sqlite: not a volume of a memory pool"):
        make(tmp_path)
    (tmp_path / "server-02.sqlite").unlink()
    make(tmp_path).close()


def test_many_values_at_once_keep_to_what_there_is_room_for(tmp_path: Path) -> None:
    """The first ones of a commit, beside what readers have pinned: those that follow are of less use."""
    for number, bound in enumerate(({"quota": 3 * SIZE}, {"volume": 4 * SIZE})):
        (tmp_path / str(number)).mkdir()
        pool = make(tmp_path / str(number), servers=1, **bound)
        client = pool.client()
        assert run(pool, put(pool, client, [*range(6)])) == 3
        assert [n for n in range(6) if client.contains(key(n))] == [0, 1, 2]
        pins = [client.pin(key(n)) for n in (0, 1)]
        assert run(pool, put(pool, client, [6, 7])) == 1
        assert [n for n in range(8) if client.contains(key(n))] == [0, 1, 6]
        pins.append(client.pin(key(6)))
        assert run(pool, put(pool, client, [8])) == 0  # all that could go is being read
        assert pool.counts()["refused"] == 5
        assert all(pin is not None and client.release(pin) for pin in pins)
        assert run(pool, put(pool, client, [8])) == 1
        pool.check_integrity()
        pool.close()


def test_a_namespace_that_is_deleted_does_not_come_back(tmp_path: Path) -> None:
    """Not even what was read or written just then."""
    pool = make(tmp_path, servers=1)
    client = pool.client()
    run(pool, put(pool, client, [1, 2], "b"))
    reading, writing = client.pin(key(1, "b")), client.begin(key(3, "b"), SIZE)
    assert reading is not None
    assert writing is not None
    write(pool, writing, 3)
    pool.controller.delete_namespace("b")
    assert client.release(reading)  # what was read is sound
    assert run(pool, client.commit([writing])) == 0
    assert pool.usage()["volume values"] == pool.usage()["dram values"] == 0
    pool.controller.create_namespace("b", None)
    assert not any(client.contains(key(n, "b")) for n in (1, 2, 3))
    pool.check_integrity()
    pool.close()
