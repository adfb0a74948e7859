"""Streams and batched accesses: the same bytes and times as their plain forms, in the right order."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.errors import AddressError
from xdeepserve.hw.engines import Copy, Targets
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.stream import Stream

NODES = (0, 1, 5, 16, 40)
SIZE = 4096


def make_pod() -> Pod:
    pod = Pod()
    for node in NODES:
        pod.plan(node).app.alloc("data", SIZE)
    pod.materialise()
    for node in NODES:
        pod.memory(node).buffer[:] = np.random.default_rng(node).bytes(SIZE)
    return pod


def image(pod: Pod) -> list[bytes]:
    return [bytes(pod.memory(node).buffer) for node in NODES]


def times(pod: Pod) -> list[Any]:
    mte = pod.dies[0].mte
    return [pod.clock.now, mte.mte2_busy_until, mte.mte3_busy_until]


pieces = st.lists(
    st.tuples(st.sampled_from(NODES), st.integers(0, SIZE // 2), st.integers(0, 200)), max_size=8
)


@given(pieces, st.sampled_from([None, 1, 3, 48]))
def test_a_gather_is_a_copy_of_the_same_pieces(rows: list[tuple[int, int, int]], cores: int | None) -> None:
    start = SIZE - 1700
    copies, at = [], start
    for node, offset, size in rows:
        copies.append(Copy(Address(node, offset), Address(0, at), size))
        at += size
    one, other, third = make_pod(), make_pod(), make_pod()
    nodes, offsets, sizes = np.array(rows, np.int64).reshape(-1, 3).T

    async def main() -> None:
        await one.dies[0].spawn(one.dies[0].mte.copy(copies, cores))
        await other.dies[0].spawn(other.dies[0].mte.gather(nodes, offsets, sizes, start, cores))
        await third.dies[0].spawn(third.dies[0].urma.gather(nodes, offsets, sizes, start))
        assert times(one) == times(other)

    asyncio.run(main())
    assert image(one) == image(other) == image(third)


@given(st.lists(st.tuples(st.sampled_from(NODES), st.integers(0, SIZE - 32)), max_size=8))
def test_a_scatter_is_a_store_of_the_same_pieces(rows: list[tuple[int, int]]) -> None:
    data = np.random.default_rng(len(rows)).integers(0, 256, (len(rows), 32), np.uint8)
    one, other = make_pod(), make_pod()
    seen: list[list[tuple[int, int]]] = [[], []]
    for pod, notes in zip((one, other), seen, strict=True):
        for node in NODES:
            pod.memory(node).watch(0, 100, lambda offset, nbytes, notes=notes: notes.append((offset, nbytes)))
    nodes, offsets = np.array(rows, np.int64).reshape(-1, 2).T

    async def main() -> None:
        stores = [(Address(*row), bytes(raw)) for row, raw in zip(rows, data, strict=True)]
        await one.dies[0].spawn(one.dies[0].mte.store(stores))
        mte = other.dies[0].mte
        await other.dies[0].spawn(mte.scatter(Targets(mte.fabric, mte.place, nodes, offsets, 32), data))
        assert times(one) == times(other)

    asyncio.run(main())
    assert image(one) == image(other)
    assert seen[0] == seen[1]


async def test_a_view_takes_the_time_of_a_store() -> None:
    one, other = make_pod(), make_pod()
    await one.dies[0].spawn(one.dies[0].mte.store([(Address(0, 0), bytes(500))]))
    await other.dies[0].spawn(other.dies[0].mte.store_view(500, 1))
    assert times(one) == times(other)


@pytest.mark.parametrize(
    ("nodes", "offsets", "size", "message"),
    [
        ([0, 1], [0, SIZE - 31], 32, "node 1: 32 bytes at offset 4065 do not lie within one area"),
        ([0, 1], [-1, 0], 32, "node 0: 32 bytes at offset -1 do not lie"),
        ([0, 7], [0, 0], 32, "node 7 has no memory"),
        ([0, 900], [0, 0], 32, "node 900 has no memory"),
        ([0, -1], [0, 0], 32, "node -1 has no memory"),
    ],
)
async def test_one_bad_piece_of_many_is_named_and_nothing_moves(
    nodes: list[int], offsets: list[int], size: int, message: str
) -> None:
    pod = make_pod()
    before, mte = image(pod), pod.dies[0].mte
    where = np.array(nodes), np.array(offsets)
    with pytest.raises(AddressError, match=message):
        Targets(mte.fabric, mte.place, *where, size)
    targets = Targets(mte.fabric, mte.place, np.array([0, 1]), np.array([0, 0]), size)
    with pytest.raises(AddressError, match=r"2 targets of 32 bytes take no \[2, 33\] bytes"):
        await pod.dies[0].spawn(mte.scatter(targets, np.zeros((2, size + 1), np.uint8)))
    with pytest.raises(AddressError, match=message):
        await pod.dies[0].spawn(mte.gather(*where, np.array([size, size]), 0))
    with pytest.raises(AddressError, match="node 0: 64 bytes at offset 4090 do not lie"):
        await pod.dies[0].spawn(mte.gather(np.array([1, 1]), np.array([0, 0]), np.array([32, 32]), 4090))
    assert image(pod) == before
    assert times(pod) == [0, 0, 0]


# ---- streams ----------------------------------------------------------------------------------------


async def test_chunks_overlap_and_become_visible_in_order_flags_last() -> None:
    pod = make_pod()
    die, order = pod.dies[0], []
    stream = Stream(die.mte, "test")
    expected = bytes(pod.memory(0).buffer[:600])

    async def program() -> None:
        await stream.open()
        for i, node in enumerate((16, 1, 16)):  # far, near, far
            part = Copy(Address(0, 200 * i), Address(node, 200 * i), 200)
            flag = (Address(node, 4000), bytes([i + 1]))
            await stream.copy(
                [part], 1, [flag], lambda are_flags, i=i: order.append((i, are_flags, pod.clock.now))
            )
        assert pod.clock.now == 500 + 3 * 6  # three loads of 200 bytes at 34 GB/s: the stores are under way
        await stream.drain()

    await die.spawn(program())
    assert [(i, are_flags) for i, are_flags, _ in order] == [(i, f) for i in range(3) for f in (False, True)]
    moments = [at for _, _, at in order]
    assert moments == sorted(moments)
    assert moments[0] > 1500  # to another server
    assert bytes(pod.memory(16).buffer[:200]) == expected[:200]
    assert bytes(pod.memory(1).buffer[200:400]) == expected[200:400]
    assert (pod.memory(16).buffer[4000], pod.memory(1).buffer[4000]) == (3, 2)


async def test_a_full_unified_buffer_makes_the_loads_wait_for_the_stores() -> None:
    """Stores to another die on 48 cores are slower than loads: the port is shared, HBM is not the bound."""
    pod = Pod()
    for node in (0, 1):
        pod.plan(node).app.alloc("data", 48 * 96 * 1024)
    pod.materialise()
    die, nbytes = pod.dies[0], 48 * 96 * 1024
    loaded = []

    async def program() -> None:
        stream = Stream(die.mte, "test")
        for _ in range(4):
            await stream.copy([Copy(Address(0, 0), Address(1, 0), nbytes)], 48)
            loaded.append(pod.clock.now)
        await stream.drain()
        loaded.append(pod.clock.now)

    await die.spawn(program())
    load, store = loaded[0], round(nbytes / 196)
    assert loaded[1] == 2 * load  # both halves
    assert loaded[2] == pytest.approx(load + store + load, abs=3)  # when the first half is stored
    assert loaded[4] == pytest.approx(load + 4 * store, abs=6)  # MTE3 never pauses


async def test_a_stream_whose_callback_raises_is_dead() -> None:
    pod = make_pod()
    die, before = pod.dies[0], bytes(pod.memory(1).buffer)
    stream, told = Stream(die.mte, "test"), []

    def fail(are_flags: bool) -> None:
        raise RuntimeError("lost power")

    async def program() -> None:
        stream.on_error = lambda: told.append(pod.clock.now)
        await stream.copy([], 1, [(Address(1, 0), b"flag")], fail)
        await stream.copy([Copy(Address(0, 0), Address(1, 0), 99)], 1)
        with pytest.raises(RuntimeError, match="lost power"):
            await stream.drain()
        with pytest.raises(RuntimeError, match="lost power"):
            await stream.copy([], 1)

    await die.spawn(program())
    assert len(told) == 1
    assert bytes(pod.memory(1).buffer) == before


async def test_a_bad_piece_or_flag_is_refused_before_anything_moves() -> None:
    pod = make_pod()
    stream, before = Stream(pod.dies[0].mte, "test"), image(pod)
    good = Copy(Address(0, 0), Address(1, 0), 10)
    with pytest.raises(AddressError):
        await pod.dies[0].spawn(stream.copy([good, Copy(Address(0, 0), Address(1, SIZE), 1)], 1))
    with pytest.raises(AddressError):
        await pod.dies[0].spawn(stream.copy([good], 1, [(Address(1, SIZE), b"x")]))
    assert image(pod) == before


def test_streams_to_one_die_share_its_port_and_those_to_others_do_not() -> None:
    """A far end that two write to takes both one after the other; within a chip no port is passed."""

    def ends(routes: list[tuple[int, int]]) -> list[int]:
        pod, nbytes = Pod(), 1 << 22
        for node in {node for route in routes for node in route}:
            pod.plan(node).app.alloc("data", nbytes)
        pod.materialise()

        async def send(src: int, dst: int) -> int:
            stream = Stream(pod.dies[src].mte, "send")
            await stream.copy([Copy(Address(src, 0), Address(dst, 0), nbytes)], 48)
            await stream.drain()
            return pod.clock.now

        async def main() -> list[int]:
            return list(await asyncio.gather(*[pod.dies[src].spawn(send(src, dst)) for src, dst in routes]))

        return asyncio.run(main())

    (alone,) = ends([(16, 0)])
    assert ends([(16, 0), (17, 40)]) == [alone, alone]
    first, second = ends([(16, 0), (40, 0)])
    assert first == alone
    (load,) = ends([(0, 1)])  # most of it is MTE2, of the die's own memory
    assert second > 1.8 * alone - load
    assert ends([(0, 1), (16, 1)])[0] == load
