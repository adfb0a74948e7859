"""send and receive: rings, handles and pieces, and what else `contract` does not say of them."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xdeepserve.comm.p2p.handle import PointToPoint
from xdeepserve.comm.p2p.layout import RING_FIELD, Mode, RingField, RingLayout
from xdeepserve.comm.p2p.rules import RECEIVE, SEND, Move, PairEnd, PairState, Progress
from xdeepserve.errors import AddressError, DeadlineError, DeploymentError, OutOfMemoryError, ProtocolError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.memory import MemoryPlan
from xdeepserve.hw.pod import Pod

DIES = (3, 40, 17)
BUFFER = 4096


def build(
    layout: RingLayout, seed: int | None = None, buffer: int = BUFFER, **options: Any
) -> list[PointToPoint]:
    """One handle on each of three dies, each with an outbound and an inbound buffer."""
    pod = Pod(clock=Clock(seed))
    for die in DIES[: layout.num_ranks]:
        plan = pod.plan(die)
        layout.plan(plan)
        plan.app.alloc("out", buffer)
        plan.app.alloc("in", buffer)
    pod.materialise()
    dies = DIES[: layout.num_ranks]
    return [PointToPoint(pod.dies[die], rank, dies, layout, **options) for rank, die in enumerate(dies)]


def out(p2p: PointToPoint) -> int:
    return p2p.die.memory.app.regions["out"].offset


def inbox(p2p: PointToPoint) -> int:
    return p2p.die.memory.app.regions["in"].offset


def fill(p2p: PointToPoint, data: bytes) -> None:
    p2p.die.memory.write(out(p2p), data)


def received(p2p: PointToPoint, nbytes: int) -> bytes:
    return bytes(p2p.die.memory.read(inbox(p2p), nbytes))


async def run(*programs: tuple[PointToPoint, Any], safe: bool = False) -> list[Any]:
    tasks = [p2p.die.spawn(program) for p2p, program in programs]
    return await asyncio.gather(*tasks, return_exceptions=safe)


# ---- bytes ------------------------------------------------------------------------------------------


@given(
    st.integers(0, 4096),
    st.integers(1, 4),
    st.sampled_from(["mte", "dma", "urma"]),
    st.none() | st.integers(0, 9),
)
def test_zero_copy_takes_the_bytes_from_the_senders_app_area(
    nbytes: int, cores: int, engine: Any, seed: int | None
) -> None:
    async def main() -> None:
        a, b = build(RingLayout(2, num_cores=4, slot_nbytes=64, num_slots=2), seed)
        message = np.random.default_rng(nbytes).bytes(nbytes)
        fill(a, message)
        await run(
            (a, a.send(out(a), nbytes, 1, 5, cores=2, zero_copy=True)),
            (b, b.receive(inbox(b), nbytes, 0, 5, cores=cores, engine=engine)),
        )
        assert received(b, nbytes) == message
        assert not any(b.die.memory.read(b.memory.rings.offset, b.memory.rings.nbytes))
        (field,) = b.memory.fields(b.memory.tails.offset, 0, 1)
        assert field == RingField(5, 1, out(a), nbytes, 1, Mode.ZERO_COPY)

    asyncio.run(main())


async def test_all_pairs_at_once_in_both_directions() -> None:
    handles = build(RingLayout(3, num_cores=2, slot_nbytes=32, num_slots=2), seed=4)
    third = BUFFER // 4

    def data(source: int, target: int) -> bytes:
        return bytes((source * 16 + target + i) % 251 for i in range(500 + 10 * source + target))

    async def sender(p2p: PointToPoint, peer: int) -> None:
        at = out(p2p) + third * peer
        p2p.die.memory.write(at, data(p2p.rank, peer))
        await p2p.send(at, len(data(p2p.rank, peer)), peer, 1)

    async def receiver(p2p: PointToPoint, peer: int) -> bytes:
        at, nbytes = inbox(p2p) + third * peer, len(data(peer, p2p.rank))
        await p2p.receive(at, nbytes, peer, 1)
        return bytes(p2p.die.memory.read(at, nbytes))

    pairs = [(p2p, peer) for p2p in handles for peer in range(3) if peer != p2p.rank]
    await run(
        *[(p2p, sender(p2p, peer)) for p2p, peer in pairs],
        *[(p2p, receiver(p2p, peer)) for p2p, peer in pairs],
    )
    for p2p, peer in pairs:
        expected = data(peer, p2p.rank)
        assert bytes(p2p.die.memory.read(inbox(p2p) + third * peer, len(expected))) == expected


async def test_a_full_ring_holds_the_sender_back_until_the_receiver_takes() -> None:
    layout = RingLayout(2, num_cores=2, slot_nbytes=64, num_slots=4)
    a, b = build(layout)
    fill(a, bytes(range(256)) * 2)

    async def late(p2p: PointToPoint) -> tuple[int, int]:
        await p2p.die.clock.sleep(100_000)
        tails = p2p.memory.fields(p2p.memory.tails.offset, 0, 2)
        await p2p.receive(inbox(p2p), 512, 0, 1)
        return tails[0].chunk_id, tails[1].chunk_id

    _, seen = await run((a, a.send(out(a), 512, 1, 1)), (b, late(b)))
    assert seen == (3, 4)  # four slots written, four chunks to come, and there it stood for 100 us
    assert received(b, 512) == bytes(range(256)) * 2


async def test_asynchronous_ends_complete_when_looked_at() -> None:
    a, b = build(RingLayout(2, num_cores=2, slot_nbytes=64, num_slots=8))
    clock = a.die.clock
    fill(a, bytes(range(200)))

    async def send(p2p: PointToPoint) -> list[bool]:
        sending = await p2p.send_async(out(p2p), 200, 1, 1)
        looks = [sending.is_complete, await sending.look()]
        with pytest.raises(ProtocolError, match="send: rank 0 cannot start with peer 1 while awaiting ack"):
            await p2p.send(out(p2p), 8, 1, 2)
        await clock.sleep(50_000)
        return [*looks, await sending.look(), await sending.look()]

    async def receive(p2p: PointToPoint) -> list[bool]:
        receiving = await p2p.receive_async(inbox(p2p), 200, 0, 1)
        looks = [await receiving.look()]
        await clock.sleep(20_000)
        return [*looks, await receiving.look()]

    sent, got = await run((a, send(a)), (b, receive(b)))
    assert sent == [False, False, True, True]
    assert got == [False, True]
    assert received(b, 200) == bytes(range(200))


async def test_an_asynchronous_receive_drains_a_message_larger_than_the_ring() -> None:
    a, b = build(RingLayout(2, num_cores=2, slot_nbytes=32, num_slots=2))
    fill(a, bytes(range(250)))

    async def receive(p2p: PointToPoint) -> int:
        receiving, looks = await p2p.receive_async(inbox(p2p), 250, 0, 1), 0
        while not await receiving.look():
            looks += 1
            await p2p.die.clock.sleep(5_000)
        return looks

    _, looks = await run((a, a.send(out(a), 250, 1, 1)), (b, receive(b)))
    assert looks > 2
    assert received(b, 250) == bytes(range(250))
    with pytest.raises(AddressError, match="250 bytes do not fit the ring of 64 bytes at once"):
        await a.die.spawn(a.send_async(out(a), 250, 1, 2))


async def test_equal_runs_take_equal_time_and_more_cores_less() -> None:
    async def time(cores: int) -> int:
        a, b = build(RingLayout(2, slot_nbytes=8192, num_slots=192), buffer=9 << 20)
        await run(
            (a, a.send(out(a), 9 << 20, 1, 1, cores=cores)),
            (b, b.receive(inbox(b), 9 << 20, 0, 1, cores=cores)),
        )
        return a.die.clock.now

    assert await time(48) == await time(48)
    assert await time(2) > 2.5 * await time(48)


# ---- peers that fail --------------------------------------------------------------------------------

SMALL = RingLayout(3, num_cores=2, slot_nbytes=64, num_slots=2)


async def test_a_pair_that_was_reset_goes_on_with_a_fresh_event() -> None:
    a, b, _ = build(SMALL, timeout_ns=50_000)
    fill(a, bytes(range(250)))
    (error,) = await run((a, a.send(out(a), 250, 1, 3)), safe=True)
    assert isinstance(error, DeadlineError)
    assert str(error) == (
        f"send: deadline passed at {error.at_ns} ns: rank 0 waits for peer 1, "
        "field ack chunk ID of event 3: expected 1, seen 0"
    )
    pending = await b.die.spawn(b.receive_async(inbox(b), 250, 0, 3))
    a.reset(1)
    b.reset(0)
    assert a.memory.in_use == b.memory.in_use == {}
    await run((a, a.send(out(a), 250, 1, 4)), (b, b.receive(inbox(b), 250, 0, 4)))
    assert received(b, 250) == bytes(range(250))
    assert not pending.is_complete


async def test_ends_that_mean_other_sizes_are_told_what_both_said() -> None:
    a, b, _ = build(SMALL, timeout_ns=50_000)
    results = await run((a, a.send(out(a), 100, 1, 4)), (b, b.receive(inbox(b), 96, 0, 4)), safe=True)
    assert isinstance(results[0], DeadlineError)
    assert isinstance(results[1], ProtocolError)
    assert str(results[1]) == "receive: rank 1 expects 96 bytes, but the field of peer 0, core 0 says 100"


async def test_a_chunk_out_of_turn_is_named_with_what_was_expected() -> None:
    a, b, _ = build(SMALL)
    raw = RING_FIELD.pack(1, 2, 2, 250, 2, Mode.RING)  # core 0 has the odd chunks
    b.die.memory.write(b.memory.tails.offset, raw)
    with pytest.raises(
        ProtocolError,
        match=r"expects chunk one of 1, 3, ... up to 4 at ring position 0 \+ chunk, from 0 on, "
        r"but the field of peer 0, core 0 says chunk 2 at 2",
    ):
        await b.die.spawn(b.receive(inbox(b), 250, 0, 1))
    assert a.sides["send"][1].state is PairState.IDLE


async def test_a_peer_with_more_cores_than_there_are_fields_is_refused() -> None:
    _, b, _ = build(SMALL)
    b.die.memory.write(b.memory.tails.offset, RING_FIELD.pack(1, 1, 1, 250, 9, Mode.RING))
    with pytest.raises(ProtocolError, match="fields of 2 AIV cores, but peer 0 sends with 9"):
        await b.die.spawn(b.receive(inbox(b), 250, 0, 1))


# ---- callers that err -------------------------------------------------------------------------------


async def test_numpys_integers_do_not_wrap_around() -> None:
    layout = RingLayout(2, num_cores=2, slot_nbytes=64, num_slots=4)
    a, b = build(layout, buffer=20_000)
    wrong = np.int32(2**31 - 64), np.int32(64)  # their sum would be negative
    for call in (a.send, a.send_async, a.receive, a.receive_async):
        with pytest.raises(AddressError, match=r"\[2147483584, 2147483648\) leaves the app area"):
            await a.die.spawn(call(*wrong, 1, 1))
    fill(a, np.random.default_rng(0).bytes(20_000))
    at, narrow = np.int16(inbox(b)), np.int16(19_968)  # as well
    await run(
        (a, a.send(np.int16(out(a)), narrow, np.int8(1), np.int8(1), cores=np.int8(2))),
        (b, b.receive(at, narrow, np.int8(0), np.int8(1), cores=np.int8(2))),
    )
    assert received(b, 19_968) == bytes(a.die.memory.read(out(a), 19_968))
    assert a.memory.in_use == b.memory.in_use == {}
    assert not len(b.die.memory.claims)
    for bad in (1.0, True, "1", None):
        with pytest.raises(AddressError, match="peer must be an integer"):
            a.reset(bad)  # type: ignore[arg-type]


async def test_layouts_that_differ_are_refused() -> None:
    mine = RingLayout(2, num_cores=2, slot_nbytes=64, num_slots=4)
    for theirs, match in (
        (
            RingLayout(2, num_cores=2, slot_nbytes=128, num_slots=4),
            "needs 512 bytes of rings .* has 1024 bytes",
        ),
        (RingLayout(2, num_cores=1, slot_nbytes=64, num_slots=4), "needs 128 bytes of tails .* has 64 bytes"),
        (RingLayout(2, name="other"), "die 40 of rank 1 has none: layouts must be equal"),
    ):
        pod = Pod()
        for die, layout in zip(DIES[:2], (mine, theirs), strict=True):
            layout.plan(pod.plan(die))
        pod.materialise()
        with pytest.raises(DeploymentError, match=match):
            PointToPoint(pod.dies[DIES[0]], 0, DIES[:2], mine)


async def test_two_looks_at_once_are_refused_and_harm_nothing() -> None:
    a, b = build(RingLayout(2, num_cores=2, slot_nbytes=64, num_slots=8))
    fill(a, bytes(range(200)))

    async def receive(p2p: PointToPoint) -> None:
        receiving = await p2p.receive_async(inbox(p2p), 200, 0, 1)
        await p2p.die.clock.sleep(50_000)
        looks = [p2p.die.spawn(receiving.look()) for _ in range(2)]
        assert await p2p.die.clock.join(looks[0]) is True
        with pytest.raises(ProtocolError, match="receive: rank 1 is looking at event 1 with peer 0 already"):
            await p2p.die.clock.join(looks[1])
        assert await receiving.look() is True

    await run((a, a.send(out(a), 200, 1, 1)), (b, receive(b)))
    assert received(b, 200) == bytes(range(200))
    assert not len(b.die.memory.claims)


@pytest.mark.parametrize("engine", ["mte", "dma"])
@pytest.mark.parametrize("after_ns", range(200, 3_000, 200))
async def test_what_a_cancelled_send_had_on_its_way_harms_no_other(engine: Any, after_ns: int) -> None:
    a, b = build(RingLayout(2, num_cores=2, slot_nbytes=4096, num_slots=2), timeout_ns=100_000)
    clock, old, new = a.die.clock, b"o" * BUFFER, b"n" * BUFFER

    async def program() -> None:
        fill(a, old)
        sending = clock.spawn(a.send(out(a), BUFFER, 1, 1, engine=engine))
        await clock.sleep(after_ns)
        sending.cancel()
        await clock.sleep(0)
        a.reset(1)
        b.reset(0)
        fill(a, new)
        await clock.gather(a.send(out(a), BUFFER, 1, 2), b.receive(inbox(b), BUFFER, 0, 2))

    await clock.spawn(program())
    assert received(b, BUFFER) == new


async def test_buffers_of_transfers_under_way_must_not_overlap() -> None:
    a, b, c = build(SMALL, timeout_ns=100_000)

    async def overlapping(p2p: PointToPoint, call: Callable[[], Any], message: str) -> None:
        await p2p.die.clock.sleep(1_000)
        with pytest.raises(AddressError, match=message):
            await call()

    fill(a, bytes(100))
    await run(
        (b, b.receive(inbox(b), 100, 0, 1)),
        (b, overlapping(b, lambda: b.receive(inbox(b) + 96, 10, 2, 1), "overlaps .* of a receive under way")),
        (b, overlapping(b, lambda: b.send(inbox(b) + 64, 10, 2, 1), "overlaps .* of a receive under way")),
        (a, overlapping(a, lambda: a.receive(out(a), 10, 2, 1), "overlaps .* of a send under way")),
        (a, a.send(out(a), 100, 1, 1)),
        (a, a.send(out(a), 100, 2, 1)),  # two sends may read the same bytes
        (c, c.receive(inbox(c), 100, 0, 1)),
    )


async def test_two_handles_may_not_receive_to_the_same_bytes() -> None:
    """Handles on layouts of their own know nothing of each other; the memory does."""
    layouts = [RingLayout(2, name="x"), RingLayout(2, name="y")]
    pod = Pod()
    for die in DIES[:2]:
        for layout in layouts:
            layout.plan(pod.plan(die))
        pod.plan(die).app.alloc("out", BUFFER)
        pod.plan(die).app.alloc("in", BUFFER)
    pod.materialise()
    ends = [
        [PointToPoint(pod.dies[die], r, DIES[:2], lay) for r, die in enumerate(DIES[:2])] for lay in layouts
    ]
    (a, one), (_, two) = ends
    memory = one.die.memory

    async def receiver() -> None:
        at = inbox(one)
        first = await one.receive_async(at, 64, 0, 1)
        with pytest.raises(
            AddressError, match=r"receive of rank 1 from 0: .* which receive of rank 1 from 0 is"
        ):
            await two.receive_async(at + 32, 64, 0, 1)
        with pytest.raises(ProtocolError, match="cannot start"):
            await one.receive_async(at + 64, 64, 0, 2)  # refused, so it claims nothing
        await two.receive_async(at + 64, 64, 0, 1)  # neighbours are no overlap
        two.reset(0)
        while not await first.look():
            await one.die.clock.sleep(1000)
        assert len(memory.claims) == 0
        await two.receive_async(at + 32, 64, 0, 2)

    await run((one, receiver()), (a, a.send(out(a), 64, 1, 1)))


async def test_two_handles_may_not_send_what_the_other_receives() -> None:
    """As on one handle; here the die has a ring of either layout, and a peer on each."""
    pod, layouts = (
        Pod(),
        [RingLayout(2, num_cores=1, slot_nbytes=64, num_slots=4, name=name) for name in "ab"],
    )
    for die in DIES:
        plan = pod.plan(die)
        for layout in layouts:
            layout.plan(plan)
        plan.app.alloc("out", 256)
    pod.materialise()
    before = PointToPoint(pod.dies[DIES[0]], 0, DIES[:2], layouts[0])
    here = PointToPoint(pod.dies[DIES[1]], 1, DIES[:2], layouts[0])
    onward = PointToPoint(pod.dies[DIES[1]], 0, DIES[1:], layouts[1], timeout_ns=1000)
    at = out(here)
    spawn, sleep = pod.clock.spawn, pod.clock.sleep

    async def program() -> None:
        receiving = spawn(here.receive(at, 256, 0, 1, cores=1))
        await sleep(1)
        with pytest.raises(
            AddressError, match=r"send of rank 0 to 1: .* which receive of rank 1 from 0 is wri"
        ):
            await onward.send(at + 192, 64, 1, 1, cores=1)
        await before.send(out(before), 256, 1, 1, cores=1)
        await pod.clock.join(receiving)
        sending = spawn(onward.send(at, 256, 1, 1, cores=1))
        await sleep(1)
        with pytest.raises(
            AddressError, match=r"receive of rank 1 from 0: .* which send of rank 0 to 1 is rea"
        ):
            await here.receive(at + 64, 64, 0, 2, cores=1)
        with pytest.raises(DeadlineError):  # nobody receives
            await pod.clock.join(sending)
        assert not len(here.die.memory.claims)

    await spawn(program())


def test_handles_and_layouts_that_cannot_be_are_refused() -> None:
    a, *_ = build(SMALL)
    with pytest.raises(DeploymentError, match="is not rank 1 of dies"):
        PointToPoint(a.die, 1, DIES, SMALL)
    with pytest.raises(DeploymentError, match="the ring layout is for 3 different dies"):
        PointToPoint(a.die, 0, DIES[:2], SMALL)
    with pytest.raises(DeploymentError, match="slot_nbytes must be a multiple of 32, not 40"):
        RingLayout(2, slot_nbytes=40)
    with pytest.raises(DeploymentError, match="num_slots must be at least 1, not 0"):
        RingLayout(2, num_slots=0)
    with pytest.raises(OutOfMemoryError, match="metadata area"):
        RingLayout(2000).plan(MemoryPlan(0))
    # The paper's count: 768 dies x 48 cores x 2 directions, in 4 MB.
    plan = MemoryPlan(0)
    RingLayout(768, num_slots=1, slot_nbytes=32).plan(plan)
    assert plan.metadata.nbytes == 73_728 * 32 < 4 << 20


# ---- the tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [SEND, RECEIVE])
def test_what_is_not_in_the_table_is_refused(table: dict[tuple[PairState, Move], PairState]) -> None:
    for state, move in itertools.product(PairState, Move):
        side = PairEnd(table, "send", 0, 1)
        side.state = state
        if (state, move) in table:
            side.move(move)
            assert side.state is table[state, move]
        else:
            with pytest.raises(ProtocolError, match="rank 0 cannot"):
                side.move(move)


def test_every_busy_state_can_fail_and_every_resting_one_be_reset() -> None:
    for table in (SEND, RECEIVE):
        states = {state for state, _ in table} | set(table.values())
        for state in states - {PairState.IDLE, PairState.FAILED}:
            assert table[state, Move.FAIL] is PairState.FAILED
        for state in (PairState.IDLE, PairState.FAILED):
            assert table[state, Move.RESET] is PairState.IDLE


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_progress_is_the_longest_run_of_chunks_that_all_cores_have_done(
    num_chunks: int, num_cores: int, base: int, random: Any
) -> None:
    side = PairEnd(RECEIVE, "receive", 0, 1)
    side.position = base
    progress = Progress(side, 9, 4, num_chunks, 77, num_cores)
    of_core = [list(range(core, num_chunks, num_cores)) for core in range(num_cores)]
    done: set[int] = set()
    while any(of_core):
        core = random.choice([core for core in range(num_cores) if of_core[core]])
        jump = random.randint(1, len(of_core[core]))  # a field may be overwritten before it is seen
        done.update(of_core[core][:jump])
        chunk = of_core[core][jump - 1]
        del of_core[core][:jump]
        progress.look(core, RingField(9, chunk + 1, base + chunk + 1, 77, num_cores, Mode.RING))
        expected = next(i for i in range(num_chunks + 1) if i not in done)
        assert progress.next == expected
    assert progress.is_complete


# ---- stale handles and wrong arguments --------------------------------------------------------------


async def test_a_handle_from_before_a_reset_cannot_harm_the_next_transfer() -> None:
    a, b = build(RingLayout(2, num_cores=2, slot_nbytes=64, num_slots=4))
    fill(a, bytes(range(64)))

    async def send() -> None:
        stale = await a.send_async(out(a), 64, 1, 1)
        await a.die.clock.sleep(10_000)
        a.reset(1)
        b.reset(0)
        for _ in range(2):
            with pytest.raises(ProtocolError, match="event 1 of rank 0 with peer 1 was given up"):
                await stale.look()
        sending = await a.send_async(out(a), 64, 1, 2)
        with pytest.raises(ProtocolError, match="event 1 of rank 0 with peer 1 was given up"):
            await stale.look()
        await a.die.clock.sleep(30_000)
        assert await sending.look()

    async def receive() -> None:
        await b.die.clock.sleep(15_000)
        await b.receive(inbox(b), 64, 0, 2)

    await run((a, send()), (b, receive()))
    assert received(b, 64) == bytes(range(64))


async def test_a_second_look_raises_the_first_error_again() -> None:
    a, b = build(RingLayout(2, num_cores=2, slot_nbytes=64, num_slots=4))

    async def receive() -> None:
        receiving = await b.receive_async(inbox(b), 64, 0, 5)
        await b.die.clock.sleep(10_000)
        for _ in range(2):
            with pytest.raises(ProtocolError, match=r"expects event 5, .* says event 4"):
                await receiving.look()

    await run((a, a.send_async(out(a), 64, 1, 4)), (b, receive()))


@pytest.mark.parametrize(
    ("mode", "pointer", "match"),
    [
        (7, 1, "says mode 7: there are 0"),
        (Mode.ZERO_COPY, 0, "zero copy of \\[0, 64\\), which is no aligned part of the peer's app area"),
        (Mode.ZERO_COPY, 2**63, "no aligned part"),
    ],
)
async def test_a_field_that_says_nonsense_is_refused(mode: int, pointer: int, match: str) -> None:
    a, b = build(RingLayout(2, num_cores=2, slot_nbytes=64, num_slots=4))
    before = received(b, BUFFER)

    async def forge() -> None:
        raw = RING_FIELD.pack(1, 1, pointer, 64, 1, mode)
        await a.die.mte.store([(a.memory.peer_field(a.memory.peer_tails, 1, 0), raw)])

    _, error = await run((a, forge()), (b, b.receive(inbox(b), 64, 0, 1)), safe=True)
    assert isinstance(error, ProtocolError)
    with pytest.raises(ProtocolError, match=match):
        raise error
    assert received(b, BUFFER) == before


async def test_zero_copy_takes_with_all_its_cores() -> None:
    """A core takes 34 GB/s: two take 1 MB in half the time of one, and many at the speed of the port."""
    nbytes, took = 1 << 20, {}
    for cores in (1, 2, 8):
        a, b = build(RingLayout(2), buffer=nbytes)
        await run(
            (a, a.send(out(a), nbytes, 1, 1, zero_copy=True)),
            (b, b.receive(inbox(b), nbytes, 0, 1, cores=cores)),
        )
        took[cores] = a.die.clock.now
    spec = a.die.spec
    bytes_ns = {cores: spec.link_ns(0, 0, nbytes, cores) for cores in took}
    for cores, ns in took.items():
        assert bytes_ns[cores] < ns < bytes_ns[cores] + 6000
    assert took[2] < 0.6 * took[1]


# ---- messages of many pieces -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_pieces_are_gathered_and_scattered_in_order(seed: int) -> None:
    """Cut differently at the two ends, larger than the ring, with any engine."""
    rng = np.random.default_rng(seed)
    a, b = build(RingLayout(2, num_cores=4, slot_nbytes=64, num_slots=3), seed)
    total = 32 * int(rng.integers(1, 60))

    def pieces(base: int) -> list[tuple[int, int]]:
        """`total` bytes in pieces, apart from each other and in any order."""
        sizes, left = [], total
        while left:
            sizes.append(min(left, 32 * int(rng.integers(1, 9))))
            left -= sizes[-1]
        starts = np.cumsum([0, *[size + 32 for size in sizes[:-1]]]).tolist()
        found = [(base + start, size) for start, size in zip(starts, sizes, strict=True)]
        return [found[i] for i in rng.permutation(len(found))]

    app = [p2p.die.memory.app.base for p2p in (a, b)]
    fill(a, bytes(rng.integers(0, 256, BUFFER, dtype=np.uint8)))
    src, dst = pieces(out(a)), pieces(inbox(b))
    how = {"cores": int(rng.integers(1, 5)), "engine": ("mte", "dma", "urma")[seed % 3]}
    before = bytes(b.die.memory.buffer)

    async def send(p2p: PointToPoint) -> None:
        await p2p.send_pieces(src, 1, 7, **how)

    async def receive(p2p: PointToPoint) -> None:
        await p2p.receive_pieces(dst, 0, 7, **how)

    asyncio.run(run((a, send(a)), (b, receive(b))))
    sent = b"".join(bytes(a.die.memory.read(*piece)) for piece in src)
    assert b"".join(bytes(b.die.memory.read(*piece)) for piece in dst) == sent
    # Nothing else of the app area has changed.
    after = bytearray(b.die.memory.buffer)
    for offset, size in dst:
        after[offset : offset + size] = before[offset : offset + size]
    assert after[app[1] :] == before[app[1] :]


def test_pieces_that_cannot_be_are_refused() -> None:
    a, _ = build(RingLayout(2, num_cores=2, slot_nbytes=64, num_slots=2))

    async def send(p2p: PointToPoint) -> None:
        for pieces, message in (
            ([], "has one at least"),
            ([(out(p2p) + 8, 32)], "not a multiple of"),
            ([(out(p2p), 32), (2**40, 32)], "leaves the app area"),
        ):
            with pytest.raises(AddressError, match=message):
                await p2p.send_pieces(pieces, 1, 1)

    asyncio.run(run((a, send(a))))
