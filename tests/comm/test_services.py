"""Experts as services: bytes and states of slots, batches, and servers that are slow, lost, or begin anew."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.comm.services import LAYERS, LAYOUT, attend, expected, logical, same, serve, tokens
from tests.comm.tools import quantize, same_bits
from xdeepserve.comm.exchange.layout import Group
from xdeepserve.comm.means import Means
from xdeepserve.comm.services.client import PATIENCE, Patience, ServiceClient
from xdeepserve.comm.services.known_servers import KnownServers
from xdeepserve.comm.services.layout import BELL, CARD, HEADER_AT, SEAT, Presence, ServiceLayout, SlotHeader
from xdeepserve.comm.services.reach import OverURMA
from xdeepserve.comm.services.rules import OF_CLIENT, SLOT, SlotEvent, SlotState, next_state
from xdeepserve.comm.services.server import AT_ONCE, Batching, ServiceServer
from xdeepserve.errors import DeadlineError, DeploymentError, FieldError, ProtocolError
from xdeepserve.hw.clock import Clock
from xdeepserve.hw.memory import Region
from xdeepserve.hw.pod import Pod


class Built(NamedTuple):
    pod: Pod
    clients: list[list[ServiceClient]]  # by client and slot
    servers: list[ServiceServer]

    def slot(self, server: int, client: int, slot: int = 0) -> tuple[int, SlotHeader]:
        """State and header, from the bytes."""
        side, number = self.servers[server], self.servers[server].layout.number(client, slot)
        return side.state(number), side.header(number)


def build(
    layout: ServiceLayout = LAYOUT,
    seed: int | None = None,
    batching: Batching = AT_ONCE,
    patience: Patience = PATIENCE,
    replicas: Callable[[int, int], tuple[int, ...]] = lambda layer, physical: (physical,),
    on_step: Any = None,
    watch: Any = None,
) -> Built:
    pod = Pod(clock=Clock(seed))
    for die in layout.clients:
        layout.plan_client(pod.plan(die))
    for die in layout.servers.dies:
        layout.plan_server(pod.plan(die))
    pod.materialise()
    servers = [
        ServiceServer(pod.dies[die], index, layout, LAYERS, batching, quantize, on_step=watch)
        for index, die in enumerate(layout.servers.dies)
    ]
    clients = []
    for rank, die in enumerate(layout.clients):
        known = KnownServers(OverURMA(pod.dies[die], layout), rank, layout)
        clients.append(
            [
                ServiceClient(rank, slot, known, LAYERS, replicas, patience, quantize, Means(), on_step)
                for slot in range(layout.num_slots)
            ]
        )
    return Built(pod, clients, servers)


def slots_of(server: ServiceServer) -> Region:
    return server.die.memory.metadata.regions[LAYOUT.region("slots")]


async def run(built: Built, *work: Awaitable[Any], **how: Any) -> list[Any]:
    """The results, or errors, of what clients do while all servers serve."""
    serving = [server.die.spawn(serve(server, **how)) for server in built.servers]
    clients = [built.pod.clock.spawn(each) for each in work]
    results = await asyncio.gather(*clients, return_exceptions=True)
    for process in serving:
        process.cancel()
    ends = await asyncio.gather(*serving, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
    return results


ONE = (
    np.arange(8, dtype=np.float32).reshape(1, 8),
    np.array([[0, 4]], np.int32),
    np.array([[0.5, 0.25]], np.float32),
)


# ---- the table --------------------------------------------------------------------------------------


def test_every_state_and_event() -> None:
    for state in SlotState:
        for event in SlotEvent:
            if (state, event) in SLOT:
                assert next_state(state, event, "slot") == SLOT[state, event]
            else:
                with pytest.raises(
                    ProtocolError, match=rf"slot cannot {event.value}: it is {state.value} \("
                ):
                    next_state(state, event, "slot")
    with pytest.raises(ProtocolError, match="cannot write: it is 77, which is no state"):
        next_state(77, SlotEvent.WRITE, "slot")


def test_a_slot_is_changed_by_who_has_it() -> None:
    """In states 0 and 2 it is the client's, in 1 the server's; only those events cross, by which the server
    ends all that was."""
    ends = (SlotEvent.RELEASE, SlotEvent.REGISTER)
    for state, event in SLOT:
        if event in OF_CLIENT:
            assert state in (SlotState.EMPTY, SlotState.DONE)
        elif event not in ends:
            assert state == SlotState.WRITTEN


# ---- one request, byte by byte ----------------------------------------------------------------------


async def test_one_request_state_by_state() -> None:
    seen: list[Any] = []

    def look(op: str, step: int) -> None:
        seen.append((op, step, built.slot(0, 0)[0], built.slot(2, 0)[0], built.slot(1, 0)[0]))

    built = build(on_step=look, watch=look)
    (result,) = await run(built, attend(built.clients[0][0], [ONE]))
    assert same_bits(result[0], expected(LAYOUT, ONE)[0:1])
    of_client = [each for each in seen if each[0] != "expert serve"]
    assert of_client[:5] == [("expert write", step, 0, 0, 0) for step in (1, 2, 3, 4)] + [
        ("expert write", 5, 1, 1, 0)
    ]
    assert [each[1:] for each in of_client[5:8]] == [(1, 2, 2, 0), (2, 2, 2, 0), (3, 0, 0, 0)]
    state, header = built.slot(0, 0)
    assert (state, header) == (0, SlotHeader(1, 1, 1, 0, 1))
    memory = built.pod.memory(2)
    at = memory.metadata.regions["services.slots"].offset + BELL.size
    assert bytes(memory.read(at, 64)) == bytes(HEADER_AT) + bytes.fromhex(
        "01000000 01000000 0100000000000000 00000000 01000000 0000000000000000"
    )
    request = memory.managed.regions["services.requests"].offset
    assert bytes(memory.read(request, 12)) == bytes(12)  # expert 0, token 0, its first choice
    assert built.slot(1, 0)[1] == SlotHeader(0, 0, 0, 0, 0)  # nothing for server 1, and nothing written there


async def test_a_server_serves_one_layer_at_a_time_and_goes_on_without_those_who_do_not_come() -> None:
    """Two clients in different layers; the second one's requests come while the first is served."""
    batches: list[Any] = []
    built = build(batching=Batching(2, 30_000))
    rng = np.random.default_rng(1)
    first = [tokens(rng, LAYOUT, 3) for _ in range(3)]
    second = [tokens(rng, LAYOUT, 3) for _ in range(6)]
    results = await run(
        built, attend(built.clients[0][0], first), attend(built.clients[1][0], second, 2), seen=batches
    )
    for found, given_batches in zip(results, (first, second), strict=True):
        for result, batch in zip(found, given_batches, strict=True):
            assert same_bits(result, expected(LAYOUT, batch))
    assert all(len({header.layer for _, _, header in batch}) == 1 for batch in batches)


# ---- batches ----------------------------------------------------------------------------------------

EVERYWHERE = (np.ones((1, 8), np.float32), np.array([[0, 2]], np.int32), np.ones((1, 2), np.float32))


async def sizes_of_batches(layout: ServiceLayout, batching: Batching, late_ns: int) -> tuple[list[int], int]:
    """Clients in each batch of server 0, and when all was done: the second client begins `late_ns` late."""
    seen: list[Any] = []
    built = build(layout, batching=batching)
    one, two = built.clients[0][0], built.clients[1][0]

    async def late() -> Any:
        await two.die.clock.sleep(late_ns)
        return await attend(two, [ONE])

    serving = [
        server.die.spawn(serve(server, seen=seen if not server.index else None)) for server in built.servers
    ]
    await asyncio.gather(one.die.spawn(attend(one, [ONE])), two.die.spawn(late()))
    for process in serving:
        process.cancel()
    return [len(batch) for batch in seen], built.pod.clock.now


async def test_policies() -> None:
    """At once: two batches. All: one, however long it takes to the timeout; then without who is missing."""
    assert (await sizes_of_batches(LAYOUT, Batching(), 10_000))[0] == [1, 1]
    assert (await sizes_of_batches(LAYOUT, Batching(2, 1_000_000), 10_000))[0] == [2]
    alone, at_ns = await sizes_of_batches(LAYOUT, Batching(2, 50_000), 400_000)
    assert alone == [1, 1]
    assert at_ns < 1_000_000


async def test_none_for_you() -> None:
    """A client that has nothing for a server says so, and the server does not wait for it."""
    times = {}
    for announces in (False, True):
        layout = ServiceLayout(
            LAYOUT.clients, LAYOUT.servers, max_tokens=3, top_k=2, hidden=8, announces=announces
        )
        built = build(layout, batching=Batching(2, 700_000))
        two = (ONE[0], np.array([[2, 4]], np.int32), ONE[2])
        both = [[ONE] * 3, [two] * 3]
        results = await run(
            built, *(attend(side[0], each) for side, each in zip(built.clients, both, strict=True))
        )
        for found, batch in zip(results, (ONE, two), strict=True):
            for result in found:
                assert same_bits(result, expected(layout, batch))
        times[announces] = built.pod.clock.now
        assert {built.slot(server, client)[0] for server in range(3) for client in range(2)} == {0}
    assert times[False] > 700_000 > times[True]


# ---- servers that are slow, or lost -----------------------------------------------------------------


async def test_a_late_answer_is_never_read_and_its_slot_is_left_alone_until_it_is_there() -> None:
    slow, patience = 2_000_000, Patience(100_000, 10_000_000)
    built = build(patience=patience, replicas=same)
    client, late = built.clients[0][0], built.servers[1]
    states: list[int] = []
    batch = (ONE[0], np.array([[2, 4]], np.int32), ONE[2])

    async def work() -> list[np.ndarray]:
        results = []
        for event_id in range(1, 6):
            await client.a2e(*batch, event_id)
            results.append(await client.e2a(event_id))
            states.append(built.slot(1, 0)[0])
            await client.die.clock.sleep(600_000)
        return results

    def delay(n: int) -> int:
        return slow if n == 0 else 0

    processes = [
        server.die.spawn(serve(server, delay if server is late else lambda n: 0, logical))
        for server in built.servers
    ]
    (results,) = await asyncio.gather(client.die.spawn(work()))
    for process in processes:
        process.cancel()
    for result in results:
        assert same_bits(result, expected(LAYOUT, batch, logical))
    assert client.num_resent == 1
    # The server has it for as long as it computes; then the client finds 2, empties it, and asks it again.
    assert states == [1, 1, 1, 0, 0]
    assert built.slot(1, 0)[1].event_id == 5
    assert late.header(0).attempt == 1


async def test_a_lost_server_costs_no_bit_where_there_are_replicas() -> None:
    moments = [("expert write", step) for step in range(1, 6)] + [("expert read", n) for n in (1, 2, 3, 4)]
    for moment in moments:
        built = build(patience=Patience(100_000, 10_000_000), replicas=same)
        client = built.clients[0][0]

        def lose(op: str, step: int, moment: tuple[str, int] = moment, built: Built = built) -> None:
            if (op, step) == moment:
                built.pod.break_die(16)

        client.steps.on_step = lose
        batches = [ONE, (ONE[0], np.array([[1, 4]], np.int32), ONE[2])]
        serving = [server.die.spawn(serve(server, compute=logical)) for server in built.servers]
        (results,) = await asyncio.gather(client.die.spawn(attend(client, batches)))
        for process in serving:
            process.cancel()
        for result, batch in zip(results, batches, strict=True):
            assert same_bits(result, expected(LAYOUT, batch, logical))
        # Before its card is read the client has not asked it; then it has, and asks another: in this layer,
        # or if the answer has been read, in the next one.
        assert client.num_resent == (moment not in (("expert write", 1), ("expert write", 2)))
        assert not client.known.is_usable(2)


async def test_the_monitors_word_is_sooner_than_the_clients_patience() -> None:
    built = build(patience=Patience(5_000_000, 10_000_000), replicas=same)
    client = built.clients[0][0]

    async def monitor() -> None:
        await client.die.clock.sleep(40_000)
        built.pod.break_die(16)
        await client.die.clock.sleep(200_000)
        client.die.memory.write(client.known.mask_region.offset + 2, b"\1")

    serving = [server.die.spawn(serve(server, lambda n: 100_000, logical)) for server in built.servers]
    watching = built.pod.dies[1].spawn(monitor())
    (results,) = await asyncio.gather(client.die.spawn(attend(client, [ONE])))
    assert built.pod.clock.now < 1_000_000
    assert same_bits(results[0], expected(LAYOUT, ONE, logical))
    assert (client.num_resent, watching.done()) == (1, True)
    for process in serving:
        process.cancel()


async def test_without_a_replica_errors_say_who_and_what() -> None:
    built = build(patience=Patience(100_000, 700_000))
    client = built.clients[0][0]
    serving = [server.die.spawn(serve(server)) for server in built.servers[:2]]  # nobody serves on server 2
    (error,) = await asyncio.gather(client.die.spawn(attend(client, [ONE])), return_exceptions=True)
    assert isinstance(error, DeadlineError)
    assert (error.op, error.rank, error.peer) == ("expert read", "client 0", "expert server 2")
    assert (error.field, error.expected, error.seen) == ("state of slot 0", [2], [1])
    other = built.clients[1][0]
    built.pod.break_die(16)
    (error,) = await asyncio.gather(other.die.spawn(attend(other, [ONE])), return_exceptions=True)
    for process in serving:
        process.cancel()
    assert isinstance(error, FieldError)
    assert "no replica of physical experts [4] of expert layer 0" in str(error)
    assert (error.rank, error.peer) == ("client 1", "expert server 2")


# ---- generations ------------------------------------------------------------------------------------


async def test_a_server_that_begins_anew_is_asked_again_under_its_new_generation() -> None:
    """It has forgotten what was asked of it, and drops what is written for the one that it was."""
    for at_step in (3, 4, 5):
        built = build()
        client, server = built.clients[0][0], built.servers[2]

        def begin_anew(op: str, step: int, at_step: int = at_step, server: Any = server) -> None:
            if (op, step) == ("expert write", at_step) and server.generation == 1:
                server.register()

        client.steps.on_step = begin_anew
        (found,) = await run(built, attend(client, [ONE] * 2))
        for result in found:
            assert same_bits(result, expected(LAYOUT, ONE))
        assert server.generation == 2
        assert client.num_resent == 1
        assert built.slot(2, 0)[1] == SlotHeader(2, 1, 2, 1, 1)
        assert built.slot(0, 0)[1] == SlotHeader(1, 1, 2, 1, 1)  # others were asked once


@pytest.mark.parametrize("moment", [("expert write", step) for step in range(1, 6)] + [("expert read", 1)])
async def test_another_server_comes_to_the_seat(moment: tuple[str, int]) -> None:
    """At any step: what was written for the one before, or half of it, is nobody's, and is asked again."""
    built = build()
    client, former = built.clients[0][0], built.servers[2]
    new_die, server = 40, 2
    LAYOUT.plan_server(built.pod.plan(new_die))
    built.pod.materialise()
    die, generation = built.pod.dies[new_die], former.generation
    later = ServiceServer(die, server, LAYOUT, LAYERS, AT_ONCE, former.quantize, generation=generation)
    serving = [each.die.spawn(serve(each)) for each in (*built.servers, later)]

    def replace(op: str, step: int) -> None:
        if (op, step) == moment and client.known.epoch(server) == 1:
            serving[2].cancel()
            seat = client.die.memory.metadata.regions[LAYOUT.region("seats")].offset + server * SEAT.size
            client.die.memory.write(seat, SEAT.pack(new_die, 2))
            client.die.memory.write(client.known.mask_region.offset + server, bytes([Presence.THERE]))

    client.steps.on_step = replace
    (results,) = await asyncio.gather(client.die.spawn(attend(client, [ONE] * 3)))
    for process in serving:
        process.cancel()
    for result in results:
        assert same_bits(result, expected(LAYOUT, ONE))
    assert later.header(LAYOUT.number(0, 0)).generation == later.generation == 2
    assert client.known.epoch(server) == 2


async def test_a_server_that_leaves_answers_what_it_has_been_asked() -> None:
    built = build(replicas=same)
    client = built.clients[0][0]

    def lead_away(op: str, step: int) -> None:
        if (op, step) == ("expert write", 5):
            client.die.memory.write(client.known.mask_region.offset + 2, bytes([Presence.LEAVING]))

    client.steps.on_step = lead_away
    serving = [server.die.spawn(serve(server, compute=logical)) for server in built.servers]
    (results,) = await asyncio.gather(client.die.spawn(attend(client, [ONE] * 2)))
    for process in serving:
        process.cancel()
    for result in results:
        assert same_bits(result, expected(LAYOUT, ONE, logical))
    assert client.num_resent == 0
    assert built.slot(2, 0)[1].event_id == 1, "the second time it was asked nothing"


async def test_a_server_that_lies_about_a_request_is_found_out() -> None:
    built = build()
    client, server = built.clients[0][0], built.servers[0]

    def lie(op: str, step: int) -> None:
        if step == 3:
            at = slots_of(server).offset + LAYOUT.header_at(0)
            server.die.memory.write(at, SlotHeader(7, 1, 1, 0, 1).pack())

    server.steps.on_step = lie
    (error,) = await run(built, attend(client, [ONE]))
    assert isinstance(error, FieldError)
    assert (error.field, error.peer) == ("header", "expert server 0")
    assert (error.expected, error.seen) == (SlotHeader(1, 1, 1, 0, 1), SlotHeader(7, 1, 1, 0, 1))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (SlotHeader(1, 1, 1, 0, 99), "field batch size: expected 6 at most, seen 99"),
        (SlotHeader(1, 1, 1, 2, 1), "field layer: expected below 2, seen 2"),
        (
            SlotHeader(1, 1, 1, 0, 1),
            r"has the physical experts \[2, 3\], but peer client 0 sends it a row for expert 0",
        ),
    ],
)
async def test_a_request_that_cannot_be_puts_its_client_offline_and_others_are_served(
    header: SlotHeader, said: str
) -> None:
    built = build()
    server, liar = built.servers[1], built.clients[0][0]
    memory, at = server.die.memory, slots_of(server).offset
    memory.write(at + LAYOUT.header_at(0), header.pack())
    memory.write(at + LAYOUT.state_at(0), b"\1")
    batch = (ONE[0], np.array([[2, 3]], np.int32), ONE[2])
    error, found = await run(built, attend(liar, [batch]), attend(built.clients[1][0], [batch]))
    assert same_bits(found[0], expected(LAYOUT, batch))
    assert built.slot(1, 0)[0] == SlotState.OFFLINE
    (refusal,) = server.refusals
    assert re.search(said, refusal)
    assert isinstance(error, FieldError | DeadlineError)


async def test_a_client_that_is_lost_is_released() -> None:
    built = build(batching=Batching(2, 10**9))
    for server in built.servers:
        server.release(1)
    (found,) = await run(built, attend(built.clients[0][0], [ONE] * 2))
    assert built.pod.clock.now < 1_000_000  # nobody waits for the other client
    assert same_bits(found[0], expected(LAYOUT, ONE))
    (error,) = await run(built, attend(built.clients[1][0], [ONE]))
    assert isinstance(error, FieldError)
    assert (error.field, error.expected, error.seen) == ("state of slot 0", "0, 1 or 2", 3)


async def test_who_is_of_another_layout_is_refused_when_it_connects() -> None:
    built = build()
    memory = built.pod.memory(3)
    at = memory.metadata.regions["services.card"].offset
    memory.write(at, CARD.pack(1, 16, 32, 32, 6))
    batch = (ONE[0], np.array([[2, 3]], np.int32), ONE[2])
    (error,) = await run(built, attend(built.clients[0][0], [batch]))
    assert isinstance(error, FieldError)
    assert error.field == "card"
    assert "hidden=8" in str(error)
    assert "hidden=16" in str(error)


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(DeploymentError, match="need different dies"):
        ServiceLayout((0, 1), Group((1, 2), (0, 1)), 1, 1, 8)
    with pytest.raises(DeploymentError, match="num_slots must be at least 1"):
        ServiceLayout((0,), Group((1,), (0,)), 1, 1, 8, num_slots=0)
    with pytest.raises(DeploymentError, match="one or more experts"):
        ServiceLayout((0,), Group((1,), ()), 1, 1, 8)


async def test_the_bell_is_answered_between_batches() -> None:
    built = build()
    server = built.servers[0]

    async def ring() -> list[int]:
        seen = []
        for asked in (1, 2):
            server.die.memory.write(slots_of(server).offset, BELL.pack(asked, asked - 1))
            await built.pod.clock.sleep(5_000)
            seen.append(BELL.unpack(server.die.memory.read(slots_of(server).offset, BELL.size))[1])
        return seen

    assert await run(built, ring()) == [[1, 2]]


async def test_a_late_replica_answers_when_the_other_is_gone() -> None:
    """Both servers of an expert are out of use: one is lost for good, the other one was only slow."""
    built = build(patience=Patience(20_000, 10**9), replicas=same)
    client, known = built.clients[0][0], built.clients[0][0].known
    x, weights = np.ones((1, LAYOUT.hidden), np.float32), np.ones((1, 2), np.float32)
    batch = x, np.array([[0, 1]], np.int32), weights  # of server 0; 2 and 3, on server 1, are the same ones
    known.give_up(1)
    client.die.memory.write(known.mask_region.offset, bytes([Presence.ABSENT]))
    (results,) = await run(built, attend(client, [batch]), compute=logical)
    assert not isinstance(results, BaseException), results
    assert same_bits(results[0], expected(LAYOUT, batch, logical))
