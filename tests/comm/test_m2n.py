"""M2N against plain NumPy: bytes, order, what is lost on the way, crowded ports; and RDMA by itself."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.tools import expert, quantize, same_bits
from xdeepserve.bench.papers.group_calls import GroupCalls, GroupCosts
from xdeepserve.bench.papers.m2n import group_calls, m2n
from xdeepserve.comm import oracles
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.means import Means
from xdeepserve.errors import (
    AddressError,
    DeadlineError,
    DeploymentError,
    FieldError,
    GlitchError,
    HardwareError,
    ProtocolError,
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


class Case(NamedTuple):
    layout: M2NLayout
    tokens: list[list[np.ndarray]]  # [layer][attention rank] float32 [T, H]
    topk: list[list[np.ndarray]]  # int32 [T, K]
    weights: list[list[np.ndarray]]  # float32 [T, K]


def make_case(
    seed: int, attention: int, experts: int, quantized: bool, hidden: int = 24, layers: int = 2
) -> Case:
    rng = np.random.default_rng(seed)
    top_k = int(rng.integers(1, 4))
    physical, max_tokens = max(top_k, int(rng.integers(1, 3 * experts + 1))), int(rng.integers(1, 6))
    dies = [int(die) for die in rng.permutation(64)[: attention + experts]]
    rank = tuple(int(rank) for rank in rng.integers(0, experts, physical))
    group = Group(tuple(dies[attention:]), rank)
    layout = M2NLayout(tuple(dies[:attention]), group, max_tokens, top_k, hidden, quantized)
    sizes = rng.integers(0, max_tokens + 1, (layers, attention))

    def of_each(make: Callable[[int], np.ndarray]) -> list[list[np.ndarray]]:
        return [[make(int(n)) for n in row] for row in sizes]

    return Case(
        layout,
        of_each(lambda n: rng.standard_normal((n, hidden)).astype(np.float32)),
        of_each(
            lambda n: np.array([rng.permutation(physical)[:top_k] for _ in range(n)], np.int32).reshape(
                n, top_k
            )
        ),
        of_each(lambda n: rng.random((n, top_k)).astype(np.float32)),
    )


def oracle(case: Case, layer: int, rank: int) -> np.ndarray:
    quantizer = quantize if case.layout.quantize else None
    slots = oracles.combine(case.tokens[layer][rank], case.topk[layer][rank], expert, quantizer)
    return oracles.weighted_sum(slots, case.weights[layer][rank])


class Built(NamedTuple):
    pod: Pod
    network: RDMANetwork
    attention: list[M2NAttention]
    experts: list[M2NExpert]


def build(case: Case, seed: int | None = None, timeout_ns: int = 10**9, **network: Any) -> Built:
    pod, layout = Pod(clock=Clock(seed)), case.layout
    for die in layout.attention:
        layout.plan_attention(pod.plan(die))
    for die in layout.experts.dies:
        layout.plan_expert(pod.plan(die))
    pod.materialise()
    rdma = RDMANetwork(pod.fabric, pod.spec_of, **network)
    mesh, means = M2NMesh(rdma, layout), Means(timeout_ns=timeout_ns)
    return Built(
        pod,
        rdma,
        [M2NAttention(pod.dies[d], i, mesh, quantize, means) for i, d in enumerate(layout.attention)],
        [M2NExpert(pod.dies[d], i, mesh, quantize, means) for i, d in enumerate(layout.experts.dies)],
    )


async def attend(side: M2NAttention, case: Case, event: int = 1) -> list[np.ndarray]:
    results = []
    for layer in range(len(case.tokens)):
        arguments = (batch[layer][side.rank] for batch in (case.tokens, case.topk, case.weights))
        await side.a2e(*arguments, event + layer)
        results.append(await side.e2a(event + layer))
    return results


async def serve(side: M2NExpert, case: Case, event: int = 1) -> list[list[tuple[int, ...]]]:
    seen = []
    for layer in range(len(case.tokens)):
        got = await side.a2e(event + layer)
        seen.append(
            list(zip(got.expert_idx.tolist(), got.token_idx.tolist(), got.slot.tolist(), strict=True))
        )
        x = got.payload * got.scale[:, None]
        out = np.array([expert(e, row) for e, row in zip(got.expert_idx, x, strict=True)], np.float32)
        await side.e2a(out.reshape(x.shape), event + layer)
    return seen


async def run(built: Built, case: Case, event: int = 1, safe: bool = False) -> tuple[list[Any], list[Any]]:
    tasks = [side.die.spawn(attend(side, case, event)) for side in built.attention]
    tasks += [side.die.spawn(serve(side, case, event)) for side in built.experts]
    results = await asyncio.gather(*tasks, return_exceptions=safe)
    return results[: len(built.attention)], results[len(built.attention) :]


def check(case: Case, results: list[Any]) -> None:
    for rank, by_layer in enumerate(results):
        for layer, found in enumerate(by_layer):
            assert same_bits(found, oracle(case, layer, rank))


# ---- bytes and order -----------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_answers_are_those_of_numpy_in_any_order_of_events(
    seed: int, attention: int, experts: int, quantized: bool, clock: int
) -> None:
    case = make_case(seed, attention, experts, quantized)
    results, seen = asyncio.run(run(build(case, clock), case))
    check(case, results)
    for rank, by_layer in enumerate(seen):
        for layer, rows in enumerate(by_layer):
            expected = [
                (int(e), t, k)
                for topk in case.topk[layer]
                for t, experts_of in enumerate(topk)
                for k, e in enumerate(experts_of)
                if case.layout.experts.expert_rank[e] == rank
            ]
            assert rows == expected


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 0.1), st.booleans())
@settings(max_examples=15, deadline=None)
def test_what_is_lost_is_sent_again_and_no_bit_is_another(
    seed: int, losses: int, share: float, acks_first: bool
) -> None:
    """Rows of several segments; data, acknowledgements and refusals are lost alike."""
    case = make_case(seed, 2, 3, False, hidden=3000)
    rng = np.random.default_rng(losses)
    built = build(case, is_lost=lambda *_: bool(rng.random() < share), acks_first=acks_first)
    results, _ = asyncio.run(run(built, case))
    check(case, results)


def test_a_bit_that_flips_on_the_wire_costs_time_alone() -> None:
    case = make_case(3, 2, 2, True)
    built = build(case)
    source, target = case.layout.attention[0], case.layout.experts.dies[1]
    quiet, _ = asyncio.run(run(build(case), case))
    built.pod.fabric.links.spoil(Plane.ROCE, source, target, LinkFault("flipped", float("inf")))
    results, _ = asyncio.run(run(built, case))
    check(case, results)
    assert built.network.num_lost == 1
    assert all(
        same_bits(a, b)
        for own, other in zip(quiet, results, strict=True)
        for a, b in zip(own, other, strict=True)
    )


def test_a_link_that_is_down_ends_in_a_glitch_that_names_the_node() -> None:
    case = make_case(5, 1, 2, False)
    built = build(case)
    target = case.layout.experts.dies[0]
    built.pod.fabric.links.spoil(
        Plane.ROCE, case.layout.attention[0], target, LinkFault("down", float("inf"))
    )
    (error,), _ = asyncio.run(run(built, case, safe=True))
    assert isinstance(error, GlitchError)
    assert f"node {target} was not acknowledged 7 times" in str(error)


def test_who_has_not_sent_is_named_at_the_deadline() -> None:
    case = make_case(7, 3, 1, False)
    built = build(case, timeout_ns=10**7)

    async def two_of_three() -> Any:
        for side in built.attention[:2]:
            side.die.spawn(
                side.a2e(case.tokens[0][side.rank], case.topk[0][side.rank], case.weights[0][side.rank], 1)
            )
        return await built.experts[0].die.spawn(built.experts[0].a2e(1))

    with pytest.raises(DeadlineError, match=r"M2N receive: deadline .*peer \['attention 2'\].*2 completions"):
        asyncio.run(two_of_three())


def test_another_event_is_refused_by_both_numbers() -> None:
    case = make_case(9, 1, 1, False)
    built = build(case)

    async def apart() -> Any:
        a, e = built.attention[0], built.experts[0]
        a.die.spawn(a.a2e(case.tokens[0][0], case.topk[0][0], case.weights[0][0], 5))
        return await e.die.spawn(e.a2e(4))

    with pytest.raises(ProtocolError, match=r"expects event 4, but peer attention 0 is ahead: .* event 5"):
        asyncio.run(apart())


def test_rows_that_were_not_written_are_not_believed() -> None:
    case = make_case(11, 1, 1, False)
    built = build(case)
    built.experts[0].receiver.queue.put(QueueEntry(case.layout.attention[0], immediate(1, 3), 32))
    with pytest.raises(FieldError, match="attention 0 tells of 3 rows and has written 32 B"):
        asyncio.run(_spawned(built.experts[0].die, built.experts[0].a2e(1)))


async def _spawned(die: Any, coro: Any) -> Any:
    return await die.spawn(coro)


def test_after_a_reset_what_was_given_up_is_not_taken_for_new() -> None:
    case = make_case(13, 2, 2, True)
    built = build(case, timeout_ns=10**6)

    async def twice() -> tuple[list[Any], list[Any]]:
        # One attention die does not come: all others fail, and are reset.
        some = [built.attention[0].die.spawn(attend(built.attention[0], case))]
        some += [side.die.spawn(serve(side, case)) for side in built.experts]
        failures = await asyncio.gather(*some, return_exceptions=True)
        assert all(isinstance(error, DeadlineError) for error in failures)
        for side in (*built.attention, *built.experts):
            side.reset()
        return await run(built, case, event=10)

    results, _ = asyncio.run(twice())
    check(case, results)


@given(st.integers(1, 2**40), st.integers(0, LOW))
def test_an_immediate_tells_event_and_rows(event: int, rows: int) -> None:
    value = immediate(event, rows)
    assert 0 <= value < 1 << 32
    assert told(value) == (event & LOW, rows)


def test_events_may_pass_the_end_of_16_bits() -> None:
    case = make_case(15, 2, 2, False)
    results, _ = asyncio.run(run(build(case), case, event=LOW))
    check(case, results)


def test_layouts_are_refused_by_name() -> None:
    with pytest.raises(DeploymentError, match="different attention and expert dies"):
        M2NLayout((1,), Group((1,), (0,)), 1, 1, 8)
    with pytest.raises(DeploymentError, match="do not fit in the 65535"):
        M2NLayout((1,), Group((2,), (0, 0)), 40_000, 2, 8)
    case = make_case(17, 1, 1, False)
    side = build(case).attention[0]
    top_k = case.layout.top_k
    one, chosen = np.zeros((1, 24), np.float32), np.arange(top_k, dtype=np.int32)[None]
    with pytest.raises(AddressError, match="topk_weights must be float32"):
        asyncio.run(_spawned(side.die, side.a2e(one, chosen, np.zeros((1, 9), np.float32), 1)))


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
    case = Case(layout, [[x] * senders], [chosen], [[weights] * senders])
    built = build(case)

    async def ended(coro: Any) -> int:
        await coro
        return built.pod.clock.now

    async def main() -> list[int]:
        both = zip(built.attention, chosen, strict=True)
        ends = [side.die.spawn(ended(side.a2e(x, topk, weights, 1))) for side, topk in both]
        ends += [side.die.spawn(ended(side.a2e(1))) for side in built.experts]
        return list(await asyncio.gather(*ends))

    ends = asyncio.run(main())
    acknowledged, received = max(ends[:senders]), max(ends[senders:])
    cost, row = M2NCost(built.pod.spec, built.pod.spec), layout.rows.dispatch_row
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
