"""DistFlow: pairs, time, endpoints and their tags, and what else `contract` does not say of it."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.contract import spans
from xdeepserve.comm.distflow import DistFlow, Endpoint, Span, pair
from xdeepserve.comm.distflow.rules import DESTINATION, FINAL, SOURCE, Cause, State, transfer
from xdeepserve.errors import AddressError, DeadlineError, DeploymentError, HardwareError, ProtocolError
from xdeepserve.hw.claims import Claims
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.memory import Address
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.topology import Topology
from xdeepserve.hw.trace import Trace

TOPOLOGY = Topology(servers=2, chips_per_server=2)  # dies 0..7, hosts 8 and 9
NBYTES = 64 * 32
NODES = range(TOPOLOGY.num_nodes)


def make_pod(seed: int | None = None) -> Pod:
    """Every node has an app area full of its own pattern, at offset 0."""
    pod = Pod(TOPOLOGY, clock=Clock(seed), trace=Trace())
    for node in NODES:
        plan = pod.plan(node)
        plan.growth = 1  # hosts, too, hold this and no more
        plan.app.alloc("data", NBYTES)
    pod.materialise()
    for node in NODES:
        pod.memory(node).buffer[:] = np.random.default_rng(node).bytes(NBYTES)
    return pod


def run(program: Callable[[Pod], Any], seed: int | None = None) -> Any:
    async def main() -> Any:
        pod = make_pod(seed)
        return await pod.clock.spawn(program(pod))

    return asyncio.run(main())


# ---- pairing ----------------------------------------------------------------------------------------


@st.composite
def sides(draw: st.DrawFn, nodes: list[int]) -> tuple[list[Span], list[Span]]:
    """Two lists of spans of equal totals: sources anywhere, destinations disjoint from all."""
    units = [(node, unit) for node in nodes for unit in range(64)]
    order = draw(st.permutations(units))
    total = draw(st.integers(1, 24))
    cut = draw(st.lists(st.integers(1, 6), min_size=1, max_size=24))

    def grow(pool: list[tuple[int, int]]) -> list[Span]:
        """Runs of free units from the front of the pool."""
        free, result, left = set(pool), [], total
        lengths = itertools.cycle(cut)
        for node, unit in pool:
            if left == 0:
                break
            length, want = 0, min(left, next(lengths))
            while length < want and (node, unit + length) in free:
                free.remove((node, unit + length))
                length += 1
            if length:
                result += spans((node, unit, length))
                left -= length
        return result

    half = len(order) // 2
    return grow(order[:half]), grow(order[half:])


def bytes_at(pod: Pod, where: list[Span]) -> bytes:
    return b"".join(bytes(pod.memories.read(span.address, span.nbytes)) for span in where)


@given(st.data())
def test_pairs_are_cut_where_either_side_is(data: st.DataObject) -> None:
    src, dst = data.draw(sides([0, 1]))
    copies = pair(src, dst)
    ends = lambda side: set(itertools.accumulate(span.nbytes for span in side))  # noqa: E731
    assert list(itertools.accumulate(copy.nbytes for copy in copies)) == sorted(ends(src) | ends(dst))


def test_sources_may_overlap() -> None:
    assert len(pair(spans((0, 0, 2), (0, 1, 2)), spans((1, 0, 4)))) == 2


def test_only_linked_nodes_and_reachable_ones() -> None:
    async def program(pod: Pod) -> None:
        flow = DistFlow(pod)
        flow.link_cluster({"a": [0], "b": [1]})
        with pytest.raises(HardwareError, match="node 2 is not linked"):
            flow.transfer(spans((0, 0, 1)), spans((2, 0, 1)))
        with pytest.raises(DeploymentError, match="endpoint 'b' is linked already"):
            flow.link_cluster({"b": [3]})
        with pytest.raises(DeploymentError, match="endpoint 'c' has no nodes"):
            flow.link_cluster({"c": []})
        with pytest.raises(AddressError, match="node 99 has no memory"):
            flow.link_cluster({"c": [99]})
        with pytest.raises(DeploymentError, match="no DistFlow backend 'tcp': there are ub, roce, vpc"):
            DistFlow(pod, "tcp")
        roce = DistFlow(pod, "roce")
        with pytest.raises(HardwareError, match=r"s01.host is not on the ROCE plane"):
            roce.link_cluster({"a": [0], "dram": [9]})
        assert roce.endpoints == {}

    run(program)


# ---- time -------------------------------------------------------------------------------------------


def duration(backend: str, src: int, dst: int, units: int = 64) -> int:
    async def program(pod: Pod) -> int:
        flow = DistFlow(pod, backend)
        flow.link_cluster({"a": [src], "b": [dst]})
        await flow.transfer(spans((src, 0, units)), spans((dst, 0, units)))
        return pod.clock.now

    return run(program)


def test_ub_is_faster_than_roce_is_faster_than_vpc() -> None:
    spec = Pod().spec
    roce = (spec.roce_startup.value + 2048 / spec.roce_bandwidth.value) * 1e9
    vpc = (spec.vpc_startup.value + 2 * spec.dma_startup.value + 2048 / spec.vpc_bandwidth.value) * 1e9
    assert duration("roce", 0, 5) == pytest.approx(roce, abs=1)
    assert duration("vpc", 0, 5) == pytest.approx(vpc, abs=1)
    assert duration("vpc", 8, 9) == pytest.approx(vpc - 2e9 * spec.dma_startup.value, abs=1)
    dma = spec.startup_ns("dma") + spec.pieces_ns(1, 1) + spec.far_latency_ns()
    port = 2048 / (1 - spec.inter_server_loss.value) / spec.ub_bandwidth.value
    assert duration("ub", 0, 5) == pytest.approx(dma + 1e9 * port, abs=1)


def test_transfers_share_a_card_but_not_with_other_cards() -> None:
    async def program(pod: Pod) -> tuple[int, int]:
        flow = DistFlow(pod, "vpc")
        flow.link_cluster({"a": [0, 1], "b": [4, 5]})
        tasks = [flow.transfer(spans((n, 0, 64)), spans((n + 4, 0, 64))) for n in (0, 1)]
        ends = []
        for task in tasks:
            await task
            ends.append(pod.clock.now)
        roce = DistFlow(pod, "roce")
        roce.link_cluster({"a": [0, 1], "b": [4, 5]})
        start = pod.clock.now
        tasks = [roce.transfer(spans((n, 0, 64)), spans((n + 4, 0, 64))) for n in (0, 1)]
        for task in tasks:
            await task
            ends.append(pod.clock.now - start)
        # One sender, or one receiver, of two transfers: the second waits.
        for routes in (((0, 4), (0, 5)), ((0, 4), (1, 4))):
            start = pod.clock.now
            tasks = [
                roce.transfer(spans((a, 0, 32)), spans((b, 32 * i, 32))) for i, (a, b) in enumerate(routes)
            ]
            await tasks[0]
            first = pod.clock.now - start
            await tasks[1]
            assert pod.clock.now - start == 2 * first
        return ends

    first, second, roce_first, roce_second = run(program)
    assert second == 2 * first  # both servers have one VPC card
    assert roce_second == roce_first  # every die has a RoCE card


# ---- the tables -------------------------------------------------------------------------------------


def test_no_state_is_on_both_sides_and_every_path_ends() -> None:
    sources, destinations = ({state for state, _ in table} for table in (SOURCE, DESTINATION))
    assert not sources & destinations
    for table in (SOURCE, DESTINATION):
        for target in table.values():
            assert target in FINAL or any(state is target for state, _ in table)
    for state, cause in itertools.product(State, Cause):
        if (state, cause) not in SOURCE | DESTINATION:
            with pytest.raises(ProtocolError, match=f"that is {state.value} cannot take '{cause.value}'"):
                transfer(state).move(cause)


# ---- endpoints --------------------------------------------------------------------------------------


async def completion(endpoint: Endpoint) -> Any:
    """The next one, however long it takes."""
    while not (found := endpoint.poll()):
        await endpoint.pod.clock.sleep(1000)
    assert len(found) == 1
    return found[0]


@given(st.permutations(range(4)), st.permutations(range(4)), st.integers(0, 99), st.integers(0, 300_000))
def test_offers_and_wants_meet_in_any_order(
    offers: list[int], wants: list[int], seed: int, delay_ns: int
) -> None:
    async def program(pod: Pod) -> None:
        clock = pod.clock
        flow = DistFlow(pod)
        one, two = flow.link_cluster({"prefill": [0, 1], "decode": [4, 8]})
        src = [spans((tag % 2, 8 * tag, 3), (0, 8 * tag + 4, 1)) for tag in range(4)]
        dst = [spans((4, 8 * tag, 2), (8, 8 * tag, 2)) for tag in range(4)]
        expected = [bytes_at(pod, where) for where in src]

        async def offer() -> None:
            for tag in offers:
                await clock.sleep(delay_ns)
                one.send(tag, "decode", src[tag])

        async def want() -> None:
            for tag in wants:
                await clock.sleep(100_000)
                two.receive(tag, "prefill", dst[tag])

        await clock.gather(offer(), want())
        done: list[list[Any]] = [[], []]
        while one.num_open + two.num_open:
            await clock.sleep(1000)
        for entries, endpoint in zip(done, (one, two), strict=True):
            entries += endpoint.poll()
            assert sorted(entry.tag for entry in entries) == list(range(4))
            assert all(entry.error is None and entry.nbytes == 128 for entry in entries)
            assert endpoint.poll() == []
        for tag in range(4):
            assert bytes_at(pod, dst[tag]) == expected[tag]
            # The source may free its blocks only after the destination has them.
            at = [next(e.at_ns for e in entries if e.tag == tag) for entries in done]
            assert at[0] > at[1]

    run(program, seed)


def test_numpys_integers_are_as_good_as_pythons() -> None:
    async def program(pod: Pod) -> None:
        flow = DistFlow(pod)
        flow.link_cluster({"all": [0, 4]})
        i8 = np.int8
        src = [(Address(i8(0), i8(96)), i8(96))]  # their sum does not fit 8 bits
        dst = [(Address(i8(4), i8(64)), i8(64)), (Address(i8(4), i8(0)), i8(32))]
        data = bytes(pod.memory(0).read(96, 96))
        assert await flow.transfer(src, dst) == 96
        assert bytes(pod.memory(4).read(0, 128)) == data[64:] + bytes(pod.memory(4).read(32, 32)) + data[:64]
        assert not len(pod.memory(4).claims)

    run(program)


def test_nothing_moves_before_the_destination_asks_and_an_offer_can_be_taken_back() -> None:
    async def program(pod: Pod) -> None:
        flow = DistFlow(pod)
        one, two = flow.link_cluster({"prefill": [0], "decode": [4]})
        before = bytes(pod.memory(4).buffer)
        one.send(1, "decode", spans((0, 0, 2)))
        await pod.clock.sleep(10**9)  # back-pressure: no deadline runs
        assert bytes(pod.memory(4).buffer) == before
        assert (one.poll(), one.num_open) == ([], 1)
        one.cancel(1, "decode")
        assert one.num_open == 0
        with pytest.raises(ProtocolError, match="prefill offers nothing to decode under tag 1"):
            one.cancel(1, "decode")
        one.send(1, "decode", spans((0, 2, 2)))  # the tag is free again
        two.receive(1, "prefill", spans((4, 0, 2)))
        assert (await completion(two)).error is None
        with pytest.raises(ProtocolError, match="a transfer that is sending cannot take 'cancel'"):
            one.cancel(1, "decode")

    run(program)


def test_a_tag_in_use_is_refused() -> None:
    async def program(pod: Pod) -> None:
        one, _ = DistFlow(pod).link_cluster({"prefill": [0], "decode": [4]})
        one.send(1, "decode", spans((0, 0, 1)))
        with pytest.raises(ProtocolError, match="already have an open transfer with tag 1"):
            one.send(1, "decode", spans((0, 0, 1)))

    run(program)


def test_a_want_serves_once() -> None:
    async def program(pod: Pod) -> None:
        flow = DistFlow(pod)
        one, two = flow.link_cluster({"prefill": [0], "decode": [4]})
        two.receive(1, "prefill", spans((4, 0, 2)))
        await pod.clock.sleep(100_000)
        one.send(1, "decode", spans((0, 0, 2)))  # after the want
        assert (await completion(two)).error is None
        assert (await completion(one)).error is None
        one.send(1, "decode", spans((0, 0, 2)))
        await pod.clock.sleep(100_000)
        one.cancel(1, "decode")  # nobody has asked for it again

    run(program)


def test_sides_that_do_not_fit_fail_on_both_and_nothing_moves() -> None:
    async def program(pod: Pod) -> None:
        flow = DistFlow(pod)
        one, two = flow.link_cluster({"prefill": [0], "decode": [4]})
        before = bytes(pod.memory(4).buffer)
        one.send(1, "decode", spans((0, 0, 2)))
        two.receive(1, "prefill", spans((4, 0, 3)))
        at_two, at_one = await completion(two), await completion(one)
        assert str(at_two.error) == "transfer: the source has 64 bytes, the destination 96"
        assert str(at_one.error) == f"send: decode refused tag 1: {at_two.error}"
        assert bytes(pod.memory(4).buffer) == before
        assert one.num_open == two.num_open == 0

    run(program)


# ---- peers that fail --------------------------------------------------------------------------------


@pytest.mark.parametrize(("dead", "num_words"), [(0, 0), (1, 0), (1, 1), (1, 2)])
def test_others_of_the_flow_go_on_without_a_side_that_has_died(dead: int, num_words: int) -> None:
    """A destination ends as it wants, as that is heard, or while bytes move: it never has them all."""

    async def program(pod: Pod) -> None:
        flow = DistFlow(pod, timeout_ns=1_000_000, offer_timeout_ns=1_000_000)
        *ends, spare = flow.link_cluster({"prefill": [0], "decode": [4], "spare": [5]})
        ends[0].send(1, "decode", spans((0, 0, 2)))
        ends[1].receive(1, "prefill", spans((4, 0, 2)))
        await pod.clock.sleep(num_words * pod.spec.command_ns() + 1000 * (num_words == 2))
        ends[dead].stop()
        left = ends[1 - dead]
        assert isinstance((await completion(left)).error, DeadlineError)
        assert bytes_at(pod, spans((4, 0, 2))) != bytes_at(pod, spans((0, 0, 2)))
        node = left.nodes[0]
        left.send(2, "spare", spans((node, 8, 2)))
        spare.receive(2, left.name, spans((5, 0, 2)))
        assert (await completion(spare)).error is None
        assert bytes_at(pod, spans((5, 0, 2))) == bytes_at(pod, spans((node, 8, 2)))

    run(program)


def test_instances_are_isolated() -> None:
    async def program(pod: Pod) -> None:
        first, second = DistFlow(pod), DistFlow(pod)
        first.link_cluster({"prefill": [0], "decode": [4]})
        one, two = second.link_cluster({"prefill": [0], "decode": [4]})
        first.close()
        one.send(1, "decode", spans((0, 0, 2)))
        two.receive(1, "prefill", spans((4, 0, 2)))
        assert (await completion(two)).error is None

    run(program)


# ---- second attempts --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("late_ns", [-40_000, -21_000, -20_000, -19_000, 0, 30_000, 300_000])
def test_a_want_that_came_to_nothing_can_be_repeated_whenever_the_offer_comes(
    seed: int | None, late_ns: int
) -> None:
    """The offer is made around the moment at which the first want's deadline passes."""

    async def program(pod: Pod) -> None:
        clock = pod.clock
        flow = DistFlow(pod, timeout_ns=100_000)
        one, two = flow.link_cluster({"prefill": [0], "decode": [4]})
        expected = bytes_at(pod, spans((0, 0, 2)))

        async def want() -> None:
            two.receive(1, "prefill", spans((4, 0, 2)))
            first = await completion(two)
            if first.error is not None:
                assert isinstance(first.error, DeadlineError)
                two.receive(1, "prefill", spans((4, 0, 2)))
                while (await completion(two)).error is not None:  # the offer is still to come
                    two.receive(1, "prefill", spans((4, 0, 2)))

        async def offer() -> None:
            await clock.sleep(100_000 + late_ns)
            one.send(1, "decode", spans((0, 0, 2)))

        await clock.gather(want(), offer())
        assert bytes_at(pod, spans((4, 0, 2))) == expected
        assert (await completion(one)).error is None
        await clock.sleep(10**6)
        assert (one.num_open, two.num_open) == (0, 0)
        # Nothing is left of the attempts: the next offer under this tag is not taken for wanted.
        one.send(1, "decode", spans((0, 0, 2)))
        await clock.sleep(10**6)
        one.cancel(1, "decode")

    run(program, seed)


def test_a_want_withdrawn_before_the_offer_is_forgotten() -> None:
    async def program(pod: Pod) -> None:
        flow = DistFlow(pod, timeout_ns=100_000)
        one, two = flow.link_cluster({"prefill": [0], "decode": [4]})
        two.receive(1, "prefill", spans((4, 0, 2)))
        assert isinstance((await completion(two)).error, DeadlineError)
        await pod.clock.sleep(1_000_000)
        one.send(1, "decode", spans((0, 0, 2)))
        await pod.clock.sleep(1_000_000)
        assert (one.poll(), one.num_open) == ([], 1)  # it waits, as if nobody had ever asked
        two.receive(1, "prefill", spans((4, 0, 2)))
        assert (await completion(two)).error is None
        assert (await completion(one)).error is None

    run(program)


def test_an_offer_that_nobody_wants_ends_at_its_deadline_and_names_the_peer() -> None:
    async def program(pod: Pod) -> None:
        flow = DistFlow(pod, timeout_ns=100_000, offer_timeout_ns=5_000_000)
        one, two = flow.link_cluster({"prefill": [0], "decode": [4]})
        one.send(1, "decode", spans((0, 0, 2)))
        two.stop()
        await pod.clock.sleep(4_999_000)
        assert (one.poll(), one.num_open) == ([], 1)
        entry = await completion(one)
        error = entry.error
        assert isinstance(error, DeadlineError)
        assert (error.op, error.rank, error.peer) == ("send", "prefill", "decode")
        assert (error.field, error.expected, error.seen) == ("want of tag 1", "want", "nothing while offered")
        assert (entry.at_ns, one.num_open) == (5_000_000, 0)
        one.send(1, "decode", spans((0, 0, 2)))  # the tag is free again
        one.cancel(1, "decode")

    run(program)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_cancelled_offer_has_no_completion_even_at_its_deadline(seed: int | None) -> None:
    async def program(pod: Pod) -> None:
        flow = DistFlow(pod, offer_timeout_ns=1_000)
        one, _ = flow.link_cluster({"prefill": [0], "decode": [4]})
        one.send(1, "decode", spans((0, 0, 2)))
        await pod.clock.sleep(999)
        one.cancel(1, "decode")
        await pod.clock.sleep(10_000)
        assert (one.poll(), one.num_open) == ([], 0)

    run(program, seed)


# ---- what two transfers may not share ---------------------------------------------------------------


def test_destinations_under_way_may_not_overlap() -> None:
    async def program(pod: Pod) -> None:
        flow, other = DistFlow(pod), DistFlow(pod)
        flow.link_cluster({"a": [0, 1], "b": [4]})
        one, two = other.link_cluster({"a": [0, 1], "b": [4]})
        first = flow.transfer(spans((0, 0, 2)), spans((4, 0, 2)))
        overlaps = r"overlaps \[0, 64\), which transfer is writing"
        with pytest.raises(AddressError, match=rf"transfer: \[32, 96\) of node 4 {overlaps}"):
            flow.transfer(spans((1, 0, 3)), spans((4, 4, 1), (4, 1, 2)))
        with pytest.raises(AddressError, match=rf"receive 7 of b: \[32, 64\) of node 4 {overlaps}"):
            two.receive(7, "a", spans((4, 1, 1)))
        # A refused one keeps nothing, not even of its spans that were free; neighbours are no overlap.
        second = flow.transfer(spans((1, 0, 3)), spans((4, 2, 3)))
        await first
        await second
        await flow.transfer(spans((1, 0, 2)), spans((4, 1, 2)))

        two.receive(1, "a", spans((4, 0, 2)))
        with pytest.raises(AddressError, match=r"overlaps .* which receive 1 of b is writing"):
            two.receive(2, "a", spans((4, 1, 2)))
        with pytest.raises(AddressError, match="overlaps a destination span"):
            two.receive(2, "a", spans((4, 4, 2), (4, 5, 2)))
        assert two.num_open == 1
        one.send(1, "b", spans((0, 0, 2)))
        assert (await completion(two)).error is None
        two.receive(2, "a", spans((4, 1, 2)))
        two.stop()  # what it would have written is free again
        await flow.transfer(spans((1, 0, 2)), spans((4, 1, 2)))
        cancelled = flow.transfer(spans((1, 0, 2)), spans((4, 1, 2)))
        cancelled.cancel()
        await pod.clock.sleep(1)
        await flow.transfer(spans((1, 0, 2)), spans((4, 1, 2)))
        assert all(len(pod.memory(node).claims) == 0 for node in NODES)

    run(program)


@given(st.lists(st.tuples(st.sampled_from("rw-"), st.integers(0, 20), st.integers(1, 6)), max_size=40))
def test_claims_are_sets_of_bytes(calls: list[tuple[str, int, int]]) -> None:
    """One writes a byte, or any number read it."""
    claims, held = Claims(3), list[tuple[str, int, int]]()
    for kind, start, nbytes in calls:
        if kind == "-":
            if held:
                old, at, size = held.pop(0)
                _ = claims.release(at) if old == "w" else claims.unshare(at, size, "test")
            continue
        in_use = {byte for old, at, size in held if "w" in (old, kind) for byte in range(at, at + size)}
        call = claims.take if kind == "w" else claims.share
        if in_use & set(range(start, start + nbytes)):
            with pytest.raises(AddressError, match="of node 3 overlaps"):
                call(start, nbytes, "test")
        else:
            call(start, nbytes, "test")
            held.append((kind, start, nbytes))
        assert len(claims) == len(held)


def test_what_is_read_is_not_written_meanwhile() -> None:
    async def program(pod: Pod) -> None:
        flow, other = DistFlow(pod), DistFlow(pod)
        flow.link_cluster({"a": [0, 1], "b": [4]})
        one, two = other.link_cluster({"a": [0, 1], "b": [4]})
        first = flow.transfer(spans((0, 0, 2)), spans((4, 0, 2)))
        with pytest.raises(AddressError, match=r"node 4 overlaps \[0, 64\), which transfer is writing"):
            flow.transfer(spans((4, 1, 1)), spans((1, 9, 1)))
        with pytest.raises(AddressError, match=r"send 3 of b: .* which transfer is writing"):
            two.send(3, "a", spans((4, 8, 1), (4, 1, 1)))
        with pytest.raises(AddressError, match=r"node 0 overlaps \[0, 64\), which transfer is reading"):
            flow.transfer(spans((1, 0, 1)), spans((0, 1, 1)))
        second = flow.transfer(spans((0, 1, 2)), spans((4, 2, 2)))  # two may read the same
        await first
        await second
        one.send(1, "b", spans((0, 0, 2)))
        with pytest.raises(AddressError, match=r"node 0 overlaps \[0, 64\), which send 1 of a is reading"):
            flow.transfer(spans((1, 0, 1)), spans((0, 1, 1)))
        one.cancel(1, "b")
        await flow.transfer(spans((1, 0, 1)), spans((0, 1, 1)))
        one.send(1, "b", spans((0, 0, 2)))
        one.stop()
        await flow.transfer(spans((1, 0, 1)), spans((0, 1, 1)))
        assert all(len(pod.memory(node).claims) == 0 for node in NODES)

    run(program)


def test_calls_that_need_an_event_loop_say_so_and_keep_nothing() -> None:
    pod = make_pod()
    flow = DistFlow(pod)
    with pytest.raises(HardwareError, match="link_cluster: to be called on a running event loop"):
        flow.link_cluster({"a": [0]})

    async def link() -> None:
        flow.link_cluster({"a": [0], "b": [4]})

    asyncio.run(link())
    with pytest.raises(HardwareError, match="transfer: to be called on a running event loop"):
        flow.transfer(spans((0, 0, 1)), spans((4, 0, 1)))
    assert not len(pod.memory(4).claims) + len(pod.memory(0).claims)


def test_an_endpoint_has_a_node_once() -> None:
    async def program(pod: Pod) -> None:
        flow = DistFlow(pod)
        with pytest.raises(DeploymentError, match=r"endpoint 'x' has nodes twice: \[0, 1, 0\]"):
            flow.link_cluster({"x": [0, 1, 0]})
        with pytest.raises(AddressError, match="endpoint 'x': node must be an integer, not '0'"):
            flow.link_cluster({"x": ["0"]})  # type: ignore[list-item]
        assert not flow.endpoints

    run(program)


class BrokenBackend:
    name = "broken"

    def check_path(self, src: int, dst: int) -> None:
        pass

    async def move(self, copies: Any, name: str) -> None:
        raise OSError("fabric gone")


def test_a_backend_that_fails_in_its_own_way_fails_both_sides() -> None:
    async def program(pod: Pod) -> None:
        flow = DistFlow(pod, BrokenBackend())
        one, two = flow.link_cluster({"prefill": [0], "decode": [4]})
        one.send(1, "decode", spans((0, 0, 2)))
        two.receive(1, "prefill", spans((4, 0, 2)))
        at_two, at_one = await completion(two), await completion(one)
        assert isinstance(at_two.error, HardwareError)
        assert str(at_two.error) == "DistFlow 1: the backend 'broken' failed: OSError: fabric gone"
        assert str(at_one.error) == f"send: decode refused tag 1: {at_two.error}"
        assert one.num_open == two.num_open == 0
        with pytest.raises(
            HardwareError, match="transfer: the backend 'broken' failed: OSError: fabric gone"
        ):
            await flow.transfer(spans((0, 0, 1)), spans((4, 0, 1)))
        assert len(pod.memory(4).claims) == 0

    run(program)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_destination_never_succeeds_where_its_source_has_given_up(seed: int | None) -> None:
    """Around the time that a move takes: with ever longer deadlines both sides fail, then both succeed."""

    def outcome(timeout_ns: int) -> tuple[bool, bool]:
        async def program(pod: Pod) -> tuple[bool, bool]:
            flow = DistFlow(pod, timeout_ns=timeout_ns)
            one, two = flow.link_cluster({"prefill": [0], "decode": [4]})
            source, target = pod.memory(0), pod.memory(4)
            data = bytes(source.buffer)

            def reuse() -> None:
                source.buffer[:] = bytes(NBYTES)  # the owner's bytes are free again

            one.on_completion = reuse
            one.send(1, "decode", spans((0, 0, 64)))
            two.receive(1, "prefill", spans((4, 0, 64)))
            received, sent = await completion(two), await completion(one)
            if received.error is None:
                assert bytes(target.buffer) == data
            else:
                assert isinstance(received.error, DeadlineError)
                assert "receive: deadline passed" in str(received.error)
            assert (one.num_open, two.num_open, len(target.claims)) == (0, 0, 0)
            return sent.error is None, received.error is None

        return run(program, seed)

    found = [outcome(timeout_ns) for timeout_ns in range(5_000, 40_000, 500)]
    assert {True, False} == {is_received for _, is_received in found}
    assert all(sent == received for sent, received in found)
