"""Engines and kernels: bytes arrive, at the time that the physical parameters give, in order."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.errors import AddressError, DeadlineError, DeploymentError, HardwareError, ProtocolError
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.spec import Param, Spec
from xdeepserve.hw.stream import Stream
from xdeepserve.hw.trace import Trace

SPEC = Spec()
HALF = 96 * 1024


def make_pod(num_dies: int = 20, nbytes: int = 1024, trace: bool = False) -> Pod:
    """Dies whose app area is `nbytes` and filled with a pattern of their own, after one 32-byte field."""
    pod = Pod(trace=Trace(trace))
    for node in range(num_dies):
        pod.plan(node).metadata.alloc("field", 32)
        pod.plan(node).app.alloc("data", nbytes)
    pod.materialise()
    for node in range(num_dies):
        memory = pod.memory(node)
        view = memory.view(memory.app.regions["data"], np.uint8, nbytes)
        view[:] = np.random.default_rng(node).integers(0, 256, nbytes, np.uint8)
    return pod


def data(pod: Pod, node: int, offset: int = 0) -> Address:
    return pod.memory(node).app.regions["data"].address.plus(offset)


# ---- what the time is -------------------------------------------------------------------------------


NS = st.floats(1, 1e5)


@given(st.integers(0, 9), st.just(0) | st.integers(0, HALF - 1), NS, NS, st.integers(1, 3))
def test_ping_pong_is_the_two_buffer_recurrence(
    num_full: int, rest: int, load_ns: float, store_ns: float, cores: int
) -> None:
    chunk = HALF * cores
    nbytes = num_full * chunk + rest
    if nbytes == 0:
        assert SPEC.ping_pong_ns(load_ns, store_ns, 0, cores) == (0, 0, 0)
        return
    sizes = [chunk] * (nbytes // chunk) + ([nbytes % chunk] if nbytes % chunk else [])
    loaded, stored = [], []
    for i, size in enumerate(sizes):
        # Chunk i goes into the half that chunk i - 2 must have left.
        begin = max(loaded[-1] if loaded else 0.0, stored[i - 2] if i >= 2 else 0.0)
        loaded.append(begin + load_ns * size / nbytes)
        stored.append(max(loaded[i], stored[-1] if stored else 0.0) + store_ns * size / nbytes)
    ends = SPEC.ping_pong_ns(load_ns, store_ns, nbytes, cores)
    for mine, oracle in zip(ends, (loaded[-1], loaded[0], stored[-1]), strict=True):
        assert abs(mine - oracle) <= 1 + 1e-6 * oracle


async def copy_ns(nbytes: int, cores: int, engine: str = "mte", src: int = 0, dst: int = 1) -> int:
    pod = make_pod(20, nbytes)
    die = pod.dies[0]

    async def program() -> int:
        pieces = [Copy(data(pod, src), data(pod, dst), nbytes)]
        if engine == "mte":
            await die.mte.copy(pieces, cores)
        else:
            await (die.dma if engine == "dma" else die.urma).copy(pieces)
        return pod.clock.now

    expected = bytes(pod.memories.read(data(pod, src), nbytes))
    took = await die.spawn(program())
    assert bytes(pod.memories.read(data(pod, dst), nbytes)) == expected
    return took


async def test_a_copy_beyond_one_half_buffer_overlaps_load_and_store() -> None:
    """Two AIV cores at 34 GB/s each, 8 chunks: 9 chunk times with ping-pong, 16 would be without."""
    nbytes = 8 * 2 * HALF
    chunk_ns = 2 * HALF / (2 * 34e9) * 1e9
    fixed = 500 + 1000
    assert await copy_ns(nbytes, cores=2) == math.ceil(fixed + 9 * chunk_ns)
    assert await copy_ns(2 * HALF, cores=2) == math.ceil(fixed + 2 * chunk_ns)


async def test_between_servers_is_3_percent_slower_and_1_us_later() -> None:
    nbytes = 1 << 20
    near, far = await copy_ns(nbytes, 48, dst=2), await copy_ns(nbytes, 48, dst=16)
    port_ns = nbytes / 196e9 * 1e9
    assert far - near == pytest.approx(1000 + port_ns * (1 / 0.97 - 1), abs=2)


async def test_the_servers_own_host_is_near_and_other_hosts_are_far() -> None:
    pod = make_pod(1)
    for server in (0, 1):
        pod.plan(pod.topology.host(server)).app.alloc("dram", 64)
    pod.materialise()

    async def store_ns(server: int) -> int:
        start = pod.clock.now
        await pod.dies[0].mte.store([(Address(pod.topology.host(server), 0), b"x")])
        return pod.clock.now - start

    assert await pod.dies[0].spawn(store_ns(0)) == 1501
    assert await pod.dies[0].spawn(store_ns(1)) == 2501


async def test_operations_of_one_engine_queue_up() -> None:
    pod = make_pod(2, 1 << 20)
    die = pod.dies[0]
    pieces = [Copy(data(pod, 0), data(pod, 1), 1 << 20)]

    async def ends(*operations: Callable[[], Awaitable[None]]) -> list[int]:
        async def one(operation: Callable[[], Awaitable[None]]) -> int:
            await operation()
            return pod.clock.now - start

        start = pod.clock.now
        return await pod.clock.gather(*[one(operation) for operation in operations])

    def copy() -> Awaitable[None]:
        return die.mte.copy(pieces)

    def store() -> Awaitable[None]:
        return die.mte.store([(data(pod, 1), b"x")])

    def dma() -> Awaitable[None]:
        return die.dma.copy(pieces)

    # 1 MB in one chunk: loaded at the 1345.6 GB/s of HBM, stored at the 196 GB/s of UB.
    load_ns, store_ns = 780, 5350
    alone = 1500 + load_ns + store_ns
    assert await die.spawn(ends(copy)) == [alone]
    # The store needs MTE3, which the copy holds to its end.
    assert await die.spawn(ends(copy, store)) == [alone, alone + 1501]
    # A copy starts up and loads while MTE3 is still at the one before.
    assert await die.spawn(ends(copy, copy)) == [alone, alone + store_ns]
    assert await die.spawn(ends(dma, dma, copy)) == [11000 + store_ns, 22000 + 2 * store_ns, alone]


async def test_small_messages_favour_mte_and_bulk_favours_dma() -> None:
    small = [await copy_ns(1024, 48, engine) for engine in ("mte", "urma", "dma")]
    assert small == sorted(small)
    assert await copy_ns(16 << 20, 2, "mte") > await copy_ns(16 << 20, 2, "dma")


async def test_pulling_and_pushing_cost_the_same() -> None:
    assert await copy_ns(4096, 48, src=3, dst=0) == await copy_ns(4096, 48, src=0, dst=3)


# ---- what the bytes do ------------------------------------------------------------------------------


async def test_a_batch_moves_all_its_pieces_in_one_event() -> None:
    pod = make_pod(20)
    die = pod.dies[0]

    async def program() -> int:
        before = pod.clock.counts().made
        loaded = await die.mte.load([(data(pod, node, node), 8) for node in range(20)])
        await die.mte.store([(data(pod, node, 100), piece) for node, piece in enumerate(loaded)])
        await die.mte.copy([Copy(data(pod, node, 0), data(pod, node, 200), 16) for node in range(20)])
        return pod.clock.counts().made - before

    sources = [bytes(pod.memories.read(data(pod, node), 64)) for node in range(20)]
    # All three are the earliest events of a lone process: none goes through the heap.
    assert await die.spawn(program()) == 0
    for node, source in enumerate(sources):
        assert bytes(pod.memories.read(data(pod, node, 100), 8)) == source[node : node + 8]
        assert bytes(pod.memories.read(data(pod, node, 200), 16)) == source[:16]


async def test_bytes_become_visible_at_completion_and_engines_serve_in_order() -> None:
    pod = make_pod(2)
    die, log = pod.dies[0], []

    async def store(value: bytes) -> None:
        await die.mte.store([(data(pod, 1), value)])
        log.append((pod.clock.now, value))

    async def looks() -> None:
        while len(log) < 2:
            log.append((pod.clock.now, bytes(pod.memories.read(data(pod, 1), 1))))
            await pod.clock.sleep(1499)

    pod.memories.write(data(pod, 1), b"-")
    first, second, third = die.spawn(store(b"a")), die.spawn(store(b"b")), die.spawn(looks())
    await asyncio.gather(first, second, third)
    # Each store takes 0.5 us + 1 us + a fraction of a nanosecond; the second starts when the first ends.
    assert log == [(0, b"-"), (1499, b"-"), (1501, b"a"), (3002, b"b")]


async def test_urma_reads_at_completion() -> None:
    pod = make_pod(2)
    die = pod.dies[0]
    await die.spawn(die.urma.copy([Copy(data(pod, 0), data(pod, 1), 4)]))
    assert pod.clock.now == 7001
    assert pod.memories.read(data(pod, 1), 4) == pod.memories.read(data(pod, 0), 4)


async def test_out_of_bounds_is_refused_before_anything_moves() -> None:
    pod = make_pod(2, 64)
    before = bytes(pod.memory(1).buffer)
    good, bad = Copy(data(pod, 0), data(pod, 1), 4), Copy(data(pod, 0), data(pod, 1, 60), 8)

    async def program() -> None:
        for engine in (pod.dies[0].mte, pod.dies[0].dma):
            with pytest.raises(AddressError, match="node 1: 8 bytes at offset"):
                await engine.copy([good, bad])
        with pytest.raises(AddressError, match="node 1"):
            await pod.dies[0].mte.store([(data(pod, 1), b"1"), (data(pod, 1, 64), b"2")])
        with pytest.raises(AddressError, match="node 1"):
            await pod.dies[0].mte.load([(data(pod, 1, 1), 64)])

    await pod.dies[0].spawn(program())
    assert bytes(pod.memory(1).buffer) == before
    assert pod.clock.now == 0


# ---- kernels, commands, flags -----------------------------------------------------------------------


def test_kernel_time_is_overhead_plus_roofline() -> None:
    assert SPEC.kernel_ns(0, 0) == 8100
    flops = 752e12 * 0.654 * 1e-3
    assert SPEC.kernel_ns(flops, 0) == 8100 + 1_000_000
    assert SPEC.kernel_ns(flops, 0, cores=6) == 8100 + 4_000_000
    assert SPEC.kernel_ns(flops, 0, arithmetic="bf16") == 8100 + 2_000_000
    assert SPEC.kernel_ns(0, 1.6e12 * 0.841 * 2e-3, cores=6) == 8100 + 2_000_000


async def test_kernels_share_cores_or_queue_up() -> None:
    pod = make_pod(1)
    die, ends = pod.dies[0], {}

    async def kernel(name: str, core: str, cores: int | None) -> None:
        ends[name] = await die.compute(name, lambda: name, core=core, cores=cores), pod.clock.now

    jobs = [("a", "aic", 16), ("b", "aic", 8), ("c", "aic", None), ("v", "aiv", None)]
    await asyncio.gather(*[die.spawn(kernel(*job)) for job in jobs])
    assert ends == {"a": ("a", 8100), "b": ("b", 8100), "c": ("c", 16200), "v": ("v", 8100)}


async def test_a_kernel_of_no_time_makes_no_event_unless_its_cores_are_busy() -> None:
    pod = make_pod(1)
    die, ends = pod.dies[0], []

    async def idle() -> None:
        await pod.clock.sleep(100)

    async def kernels() -> None:
        before = pod.clock.counts().made
        await die.run("a", lambda: None, 0)
        ends.append((pod.clock.now, pod.clock.counts().made - before))

    async def busy() -> None:
        await die.run("b", lambda: None, 40)

    await asyncio.gather(*[die.spawn(program) for program in (idle(), kernels(), busy(), kernels())])
    assert [at for at, _ in ends] == [0, 40]
    assert ends[0][1] == 0


async def test_kernels_that_cannot_be_are_refused() -> None:
    pod = make_pod(1)
    with pytest.raises(HardwareError, match="asks for 25 of 24 aic cores"):
        await pod.dies[0].spawn(pod.dies[0].compute("k", int, cores=25))
    with pytest.raises(DeploymentError, match="hbm_bandwidth must be a number >= 0, not -1"):
        Spec(hbm_bandwidth=Param(-1, "B/s", "test"))


class Launch(msgspec.Struct, frozen=True):
    step: int


async def test_commands_reach_an_idle_die_in_order() -> None:
    pod = make_pod(1)
    die, log = pod.dies[0], []

    async def program() -> None:
        while (command := await die.next_command()) != Launch(-1):
            log.append((command, pod.clock.now))
            await pod.clock.sleep(10_000)

    running = die.spawn(program())
    await asyncio.sleep(0)
    for step in (1, 2, -1):
        die.put(Launch(step))
    await running
    assert log == [(Launch(1), 2000), (Launch(2), 12000)]
    with pytest.raises(HardwareError, match="a command is a msgspec Struct, not dict"):
        die.put({"step": 1})  # type: ignore[arg-type]


async def test_idle_dies_wake_once_for_a_command() -> None:
    pod = make_pod(2)
    running = [die.spawn(die.next_command()) for die in (pod.dies[0], pod.dies[1])]
    while not pod.clock.rests:
        await asyncio.sleep(0)
    before = pod.clock.counts().made
    for die in (pod.dies[0], pod.dies[1]):
        die.put(Launch(1))
    assert await asyncio.gather(*running) == [Launch(1), Launch(1)]
    assert (pod.clock.now, pod.clock.counts().made - before) == (2000, 2)


def flag_wait(pod: Pod, seen: list[int], deadline_ns: int | None):
    """A program on die 0 that waits until byte 0 of its field is 2; byte 9 there is a protocol error."""
    memory = pod.memory(0)

    def observe(offset: int, nbytes: int) -> bool:
        value = memory.read(0, 1)[0]
        seen.append(value)
        if value == 9:
            raise ProtocolError("nine")
        return value == 2

    def describe() -> Waiting:
        return Waiting("test", 0, 1, "byte", 2, memory.read(0, 1)[0])

    async def program() -> int:
        await pod.dies[0].wait_fields(0, 32, observe, deadline_ns=deadline_ns, describe=describe)
        return pod.clock.now

    return program()


async def store_flags(pod: Pod, *values: int) -> None:
    for value in values:
        await pod.dies[1].mte.store([(Address(0, 0), bytes([value]))])


async def test_a_flag_written_by_a_peer_ends_a_wait_one_poll_later() -> None:
    pod, seen = make_pod(2), []
    waits = pod.dies[0].spawn(flag_wait(pod, seen, 100_000))
    pod.dies[1].spawn(store_flags(pod, 1, 2, 3))
    assert await waits == 2 * 1501 + 500
    assert seen == [0, 1, 2]  # no look without a write, and none after the end
    assert pod.memory(0).watches == []


async def test_writes_after_the_one_that_ended_the_wait_are_not_looked_at() -> None:
    pod, seen = make_pod(2), []
    waits = pod.dies[0].spawn(flag_wait(pod, seen, 100_000))

    async def two_pieces() -> None:
        await pod.dies[1].mte.store([(Address(0, 0), b"\2"), (Address(0, 0), b"\11")])

    pod.dies[1].spawn(two_pieces())
    assert await waits == 1501 + 500
    assert seen == [0, 2]


async def test_a_flag_that_never_comes_is_an_error_at_the_deadline() -> None:
    pod, seen = make_pod(2), []
    waits = pod.dies[0].spawn(flag_wait(pod, seen, 100_000))
    pod.dies[1].spawn(store_flags(pod, 1))
    with pytest.raises(DeadlineError, match="field byte: expected 2, seen 1") as caught:
        await waits
    assert caught.value.at_ns == 100_000
    assert pod.memory(0).watches == []


async def test_what_observing_raises_is_raised_in_the_waiting_program() -> None:
    pod = make_pod(2)
    waits, stores = pod.dies[0].spawn(flag_wait(pod, [], 100_000)), pod.dies[1].spawn(store_flags(pod, 9, 1))
    with pytest.raises(ProtocolError, match="nine"):
        await waits
    await stores


def test_every_parameter_has_a_unit_and_a_source() -> None:
    for name in SPEC.__struct_fields__:
        param = getattr(SPEC, name)
        assert param.value > 0, name
        assert param.unit in {"cores", "op/s", "ratio", "B", "B/s", "s", "slots", "launches"}, name
        assert param.source.startswith(
            ("CM ", "XDS ", "DS ", "public", "fitted: ", "fitted, weakly: ", "assumed: ", "half of INT8")
        ), name


async def test_numpys_integers_do_not_wrap_around_in_engines() -> None:
    pod = Pod()
    pod.plan(0).app.alloc("a", 256)
    pod.materialise()
    die, far = pod.dies[0], np.int8(100)
    pod.memory(0).write(0, bytes(range(256)))
    beyond, good = Address(np.int8(0), far), Address(0, 0)
    calls = [
        lambda n: die.mte.copy([Copy(beyond, good, n)]),
        lambda n: die.mte.copy([Copy(good, beyond, n)]),
        lambda n: die.dma.copy([Copy(good, beyond, n)]),
        lambda n: die.mte.load([(beyond, n)]),
        lambda n: die.mte.store([(beyond, bytes(int(n)))]),
        lambda n: Stream(die.mte, "s").copy([Copy(good, beyond, n)], 1, [(beyond, bytes(int(n)))]),
    ]
    for call in calls:
        await die.spawn(call(far))  # ends at 200, in 8 bits at -56
        with pytest.raises(AddressError, match="200 bytes at offset 100"):
            await die.spawn(call(np.uint8(200)))
    (loaded,) = await die.spawn(die.mte.load([(beyond, far)]))
    assert loaded == bytes(pod.memory(0).buffer[100:200])
    with pytest.raises(AddressError, match="whole numbers"):
        await die.spawn(die.mte.copy([Copy(Address(0, 1.0), good, 1)]))  # type: ignore[arg-type]
