"""M2N against plain NumPy: bytes, order, what is lost on the way, crowded ports; and RDMA by itself."""

import asyncio
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.contract import FULL, Ended, Scene, opened, run, same
from tests.comm.contract import m2n as m2n_scene
from tests.comm.tools import quantize
from xdeepserve.bench.papers.group_calls import GroupCalls, GroupCosts
from xdeepserve.bench.papers.m2n import group_calls, m2n
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.errors import (
    DeploymentError,
    FieldError,
    GlitchError,
    HardwareError,
)
from xdeepserve.hw.clock import Clock, Waiting
from xdeepserve.hw.congestion import DEFAULT_CONTROL, TUNED_CONTROL, CongestionControl, SendingRate
from xdeepserve.hw.faulty_links import LinkFault
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.rdma import LANDING_NS, QueueEntry, RDMANetwork, poll_writes
from xdeepserve.hw.topology import Plane
from xdeepserve.m2n.cost import M2NCost
from xdeepserve.m2n.layout import LOW, M2NLayout, immediate, told
from xdeepserve.m2n.sides import M2NAttention, M2NExpert, M2NMesh

KIB = 1024


SMALL = {**FULL, "attention": 2, "experts": 3}


def spoiled(kind: str, **sizes: Any) -> tuple[list[Ended], RDMANetwork, int]:
    """What ranks get, the network, and an expert die, to which the link from attention die 0 is spoiled."""

    async def body(scene: Scene) -> tuple[list[Ended], RDMANetwork, int]:
        layout, network = scene.ranks[0].handle.layout, scene.ranks[0].handle.mesh.network
        source, target = layout.attention[0], layout.experts.dies[0]
        scene.pod.fabric.links.spoil(Plane.ROCE, source, target, LinkFault(kind, float("inf")))
        ends = await run(scene, 2)
        for index, end in enumerate(ends):
            assert all(same(each, scene.expected(turn, index)) for turn, each in enumerate(end.results))
        return ends, network, target

    return opened(m2n_scene, body, **{**SMALL, **sizes})


# ---- bytes and order -----------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.floats(0, 0.1), st.booleans())
@settings(max_examples=15, deadline=None)
def test_what_is_lost_is_sent_again_and_no_bit_is_another(seed: int, share: float, acks_first: bool) -> None:
    """Rows of several segments; data, acknowledgements and refusals are lost alike."""

    async def body(scene: Scene) -> None:
        for index, end in enumerate(await run(scene, 2)):
            assert same(end.results, [scene.expected(turn, index) for turn in range(2)])

    how = {"hidden": 3000, "quantized": False, "losses": share, "acks_first": acks_first}
    opened(m2n_scene, body, **{**SMALL, "seed": seed, **how})


def test_a_bit_that_flips_on_the_wire_costs_time_alone() -> None:
    ends, network, _ = spoiled("flipped")
    assert network.num_lost == 1
    assert [end.error for end in ends] == [None] * 5


def test_a_link_that_is_down_ends_in_a_glitch_that_names_the_node() -> None:
    ends, _, target = spoiled("down")
    assert isinstance(ends[0].error, GlitchError)
    assert f"node {target} was not acknowledged 7 times" in str(ends[0].error)


def test_rows_that_were_not_written_are_not_believed() -> None:
    async def body(scene: Scene) -> None:
        there, source = scene.ranks[1].handle, scene.ranks[0].die.index
        there.receiver.queue.put(QueueEntry(source, immediate(1, 3), 32))
        with pytest.raises(FieldError, match="attention 0 tells of 3 rows and has written 32 B"):
            await there.die.spawn(there.a2e(1))

    opened(m2n_scene, body, **{**SMALL, "attention": 1, "experts": 1})


@given(st.integers(1, 2**40), st.integers(0, LOW))
def test_an_immediate_tells_event_and_rows(event: int, rows: int) -> None:
    value = immediate(event, rows)
    assert 0 <= value < 1 << 32
    assert told(value) == (event & LOW, rows)


def test_events_may_pass_the_end_of_16_bits() -> None:
    async def body(scene: Scene) -> None:
        for index, end in enumerate(await run(scene, 2, LOW)):
            assert same(end.results, [scene.expected(turn, index) for turn in range(2)])

    opened(m2n_scene, body, **SMALL)


def test_layouts_are_refused_by_name() -> None:
    with pytest.raises(DeploymentError, match="different attention and expert dies"):
        M2NLayout((1,), Group((1,), (0,)), 1, 1, 8)
    with pytest.raises(DeploymentError, match="do not fit in the 65535"):
        M2NLayout((1,), Group((2,), (0, 0)), 40_000, 2, 8)


# ---- cards ---------------------------------------------------------------------------------------------


class Wired(NamedTuple):
    pod: Pod
    network: RDMANetwork


def wire(nodes: int, nbytes: int = 4 << 20, seed: int | None = None, **options: Any) -> Wired:
    pod = Pod(clock=Clock(seed))
    for node in range(nodes):
        pod.plan(node).app.alloc("data", nbytes)
    pod.materialise()
    return Wired(pod, RDMANetwork(pod.fabric, pod.spec_of, **options))


def start(wired: Wired, node: int) -> int:
    return wired.pod.memory(node).app.regions["data"].offset


async def transfer(wired: Wired, source: int, targets: dict[int, int], at: int = 0) -> int:
    """Write so many bytes to each target at once; when all are acknowledged."""
    network, sent = wired.network, wired.network.queue()
    for target, nbytes in targets.items():
        pair = network.connect(source, target, sent, network.queue())
        pair.write(
            Address(source, start(wired, source)), Address(target, start(wired, target) + at), nbytes, 1
        )
    await poll_writes(sent, len(targets), source, 10**10, lambda: Waiting("t", source, "-", "-", "-", "-"))
    return wired.pod.clock.now


def gathered(wired: Wired, *coros: Any) -> list[int]:
    async def main() -> list[int]:
        return await asyncio.gather(*[wired.pod.clock.spawn(coro) for coro in coros])

    return asyncio.run(main())


def test_a_write_takes_its_bytes_over_the_slower_card_and_two_flights() -> None:
    wired = wire(2)
    nbytes = 1 << 20
    (end,) = gathered(wired, transfer(wired, 0, {1: nbytes}))
    spec = wired.pod.spec
    line, flight = 1e9 * nbytes / spec.roce_bandwidth.value, 1e9 * spec.roce_startup.value
    assert line + 2 * flight < end < 1.05 * line + 2 * flight


def test_acknowledgements_wait_behind_data_unless_they_go_first() -> None:
    """Both directions at once, as with ping-pong: MS 5, high-priority ACKs."""

    def both(acks_first: bool) -> int:
        wired = wire(9, acks_first=acks_first)
        small = transfer(wired, 0, {8: 4 * KIB})
        bulk = transfer(wired, 8, dict.fromkeys(range(1, 8), 512 * KIB))
        return gathered(wired, small, bulk)[0]

    first, behind = both(True), both(False)
    assert behind > first + 3_000


@pytest.mark.parametrize("control", [DEFAULT_CONTROL, TUNED_CONTROL])
def test_uneven_receivers_end_sooner_with_tuned_control(control: CongestionControl) -> None:
    """Four senders, of whose receivers one gets eight times as much: MS 5, congestion control."""

    def last(used: CongestionControl) -> tuple[int, int]:
        wired = wire(8, 8 << 20, control=used)
        amounts = {4: 2048 * KIB, 5: 256 * KIB, 6: 256 * KIB, 7: 256 * KIB}
        ends = gathered(wired, *(transfer(wired, source, amounts, source << 21) for source in range(4)))
        return max(ends), wired.network.num_notices

    end, notices = last(control)
    assert notices > 0
    if control is TUNED_CONTROL:
        assert end < 0.8 * last(DEFAULT_CONTROL)[0]


def test_a_rate_is_cut_and_comes_back_in_steps() -> None:
    control = CongestionControl(0, 100, cut=0.5, step=0.25, recover_ns=10)
    rate = SendingRate(control)
    assert rate.at(0) == 1
    rate.notice(5)
    assert [rate.at(t) for t in (5, 14, 15, 25, 1000)] == [0.5, 0.5, 0.75, 1, 1]
    assert (rate.may_notice(0), rate.may_notice(99), rate.may_notice(100)) == (True, False, True)
    assert rate.gap_ns(5, 100.0) == 200


def test_bytes_are_certain_behind_a_flush_alone() -> None:
    wired = wire(2)
    wired.pod.memory(0).write(start(wired, 0), b"new!")
    received = wired.network.queue()

    async def main() -> tuple[bytes, bytes]:
        network = wired.network
        pair = network.connect(0, 1, network.queue(), received)
        pair.write(Address(0, start(wired, 0)), Address(1, start(wired, 1)), 4, 7)
        entry = await received.poll(10**9, lambda: Waiting("t", 1, 0, "-", "-", "-"))
        assert (entry.peer, entry.immediate, entry.nbytes) == (0, 7, 4)
        before = bytes(wired.pod.memory(1).read(start(wired, 1), 4))
        network.flush(1)
        return before, bytes(wired.pod.memory(1).read(start(wired, 1), 4))

    assert gathered(wired, main()) == [(b"\0\0\0\0", b"new!")]
    assert LANDING_NS > 0


def test_a_tensor_that_is_used_again_too_soon_is_sent_as_it_is_then() -> None:
    wired = wire(2)
    data = start(wired, 0)
    wired.pod.memory(0).write(data, b"a" * 64 * KIB)

    async def main() -> bytes:
        network, sent = wired.network, wired.network.queue()
        pair = network.connect(0, 1, sent, network.queue())
        pair.write(Address(0, data), Address(1, start(wired, 1)), 64 * KIB, 1)
        await wired.pod.clock.sleep(1000)
        wired.pod.memory(0).write(data, b"b" * 64 * KIB)  # before its completion
        await poll_writes(sent, 1, 0, 10**9, lambda: Waiting("t", 0, 1, "-", "-", "-"))
        network.flush(1)
        return bytes(wired.pod.memory(1).read(start(wired, 1), 64 * KIB))

    (got,) = gathered(wired, main())
    assert got[:1] == b"a"
    assert got[-1:] == b"b"


@given(st.integers(0, 10**6), st.lists(st.integers(0, 100_000), min_size=1, max_size=5), st.floats(0, 0.1))
@settings(max_examples=25, deadline=None)
def test_writes_of_a_pair_arrive_whole_and_in_order(seed: int, sizes: list[int], share: float) -> None:
    rng = np.random.default_rng(seed)
    wired = wire(2, sum(sizes) + 1, seed, is_lost=lambda *_: bool(rng.random() < share))
    data = rng.integers(0, 256, sum(sizes), np.uint8).tobytes()
    wired.pod.memory(0).write(start(wired, 0), data)
    sent, received = wired.network.queue(), wired.network.queue()

    async def main() -> None:
        pair, at = wired.network.connect(0, 1, sent, received), 0
        for number, nbytes in enumerate(sizes):
            pair.write(Address(0, start(wired, 0) + at), Address(1, start(wired, 1) + at), nbytes, number)
            at += nbytes
        await poll_writes(sent, len(sizes), 0, 10**11, lambda: Waiting("t", 0, 1, "-", "-", "-"))

    gathered(wired, main())
    wired.network.flush(1)
    assert [entry.immediate for entry in received.entries] == list(range(len(sizes)))
    assert bytes(wired.pod.memory(1).read(start(wired, 1), len(data))) == data


def test_an_immediate_has_32_bits() -> None:
    wired = wire(2)
    pair = wired.network.connect(0, 1, wired.network.queue(), wired.network.queue())
    with pytest.raises(HardwareError, match="32 bits"):
        pair.write(Address(0, start(wired, 0)), Address(1, start(wired, 1)), 0, 1 << 32)


# ---- beside formula and calls in groups ----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 8, 16, 2, 2048), (4, 16, 16, 8, 1024), (2, 2, 4, 2, 256)])
def test_the_formula_says_what_the_steps_take(shape: tuple[int, ...]) -> None:
    """Within 5 %: rows that are ready until the last receiver goes on, and until the sender does."""
    senders, receivers, tokens, top_k, hidden = shape
    rng, dies = np.random.default_rng(0), tuple(range(senders + receivers))
    group = Group(dies[senders:], tuple(range(receivers)))
    layout = M2NLayout(dies[:senders], group, tokens, top_k, hidden)
    chosen = [
        np.array([rng.permutation(receivers)[:top_k] for _ in range(tokens)], np.int32)
        for _ in range(senders)
    ]
    x, weights = np.ones((tokens, hidden), np.float32), np.ones((tokens, top_k), np.float32)
    pod = Pod()
    for die in layout.attention:
        layout.plan_attention(pod.plan(die))
    for die in group.dies:
        layout.plan_expert(pod.plan(die))
    pod.materialise()
    mesh = M2NMesh(RDMANetwork(pod.fabric, pod.spec_of), layout)
    attention = [M2NAttention(pod.dies[d], i, mesh, quantize) for i, d in enumerate(layout.attention)]
    experts = [M2NExpert(pod.dies[d], i, mesh, quantize) for i, d in enumerate(group.dies)]

    async def ended(coro: Any) -> int:
        await coro
        return pod.clock.now

    async def main() -> list[int]:
        both = zip(attention, chosen, strict=True)
        ends = [side.die.spawn(ended(side.a2e(x, topk, weights, 1))) for side, topk in both]
        ends += [side.die.spawn(ended(side.a2e(1))) for side in experts]
        return list(await asyncio.gather(*ends))

    ends = asyncio.run(main())
    acknowledged, received = max(ends[:senders]), max(ends[senders:])
    cost, row = M2NCost(pod.spec, pod.spec), layout.rows.dispatch_row
    most = int(np.bincount(np.concatenate([topk.ravel() for topk in chosen])).max())
    amounts = receivers, tokens * top_k * row, most * row
    assert cost.total_ns(*amounts) == pytest.approx(received, rel=0.05)
    there = cost.until_there(*amounts) + cost.until_acknowledged()
    assert there == pytest.approx(acknowledged, rel=0.05)


def test_calls_in_groups_bring_the_same_bytes_later() -> None:
    count, nbytes = 9, 3000
    pod = Pod()
    for die in range(2 * count):
        host = pod.topology.host(pod.topology.server_of(die))
        GroupCalls.plan(pod.plan(die), pod.plan(host), count, nbytes)
    pod.materialise()
    network = RDMANetwork(pod.fabric, pod.spec_of)
    ends = [GroupCalls(pod.dies[d], d % count, network, nbytes, GroupCosts()) for d in range(2 * count)]
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (count, count, nbytes), np.uint8)
    for end, own in zip(ends, data, strict=False):
        pod.memory(end.die.index).write(end.at("out", 0).offset, own.tobytes())

    async def main() -> None:
        tasks = [pod.clock.spawn(end.send(ends[count:])) for end in ends[:count]]
        await asyncio.gather(*tasks, *[pod.clock.spawn(end.receive(count)) for end in ends[count:]])

    asyncio.run(main())
    for rank, end in enumerate(ends[count:]):
        got = np.frombuffer(pod.memory(end.die.index).read(end.at("in", 0).offset, count * nbytes), np.uint8)
        assert np.array_equal(got.reshape(count, nbytes), data[:, rank])


def test_m2n_is_sooner_and_a_ninth_receiver_costs_groups_another_round() -> None:
    ours, theirs = {}, {}
    for count in (8, 9):
        ours[count], theirs[count] = m2n(count, 16 * KIB, 1).median, group_calls(count, 16 * KIB, 1).median
    assert ours[8] < theirs[8] / 2
    assert ours[9] - ours[8] < 5_000
    assert theirs[9] - theirs[8] > GroupCosts().setup
