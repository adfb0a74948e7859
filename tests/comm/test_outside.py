"""Slots in the memory of other processes: the handshake, bounds, and connections that stall, break or lie."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from tests.comm.outside import Far, free_address
from tests.comm.services import LAYERS, LAYOUT, attend, expected, logical, same, serve, tokens
from tests.comm.tools import IDENTITY, TOKEN, asks, quantize, same_bits
from xdeepserve.comm.means import Means
from xdeepserve.comm.services.client import Patience, ServiceClient
from xdeepserve.comm.services.known_servers import KnownServers
from xdeepserve.comm.services.layout import CARD, Presence
from xdeepserve.errors import FieldError, InputError, LostDieError, ProtocolError
from xdeepserve.hw.pod import Pod
from xdeepserve.loop import new_event_loop
from xdeepserve.remote import handshake
from xdeepserve.remote.handshake import Hello, connect, line, listen, proof, proves, split
from xdeepserve.remote.network_card import OP_READ, OP_WRITE, REQUEST, RESPONSE, Nic
from xdeepserve.remote.outside_reach import OutsideReach
from xdeepserve.remote.registered import SharedBuffer, Window, check_windows
from xdeepserve.remote.seat_list import Refused, Register, SeatTable
from xdeepserve.remote.server_link import CardLink, ServerLink, open_link

MS = 1_000_000
PATIENCE = Patience(300 * MS, 20_000 * MS)


class Cable:
    """Between a client and a server: it can be cut, and is slow by `delay_s` in each direction."""

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        self.target, self.delay_s, self.whole = split(target.removeprefix("tcp:")), delay_s, asyncio.Event()
        self.whole.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        self._listener = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return f"tcp:127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        self._writers += [writer, far_writer]
        for source, target in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.ensure_future(self._carry(source, target)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(self.delay_s)
                await self.whole.wait()
                writer.write(data)
        writer.close()

    async def close(self) -> None:
        self.whole.set()
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()


class Scene:
    def __init__(self, fars: list[Far], links: dict[int, ServerLink], pod: Pod) -> None:
        self.fars, self.links, self.pod = fars, links, pod

    def client(
        self, rank: int = 0, patience: Patience = PATIENCE, has_replicas: bool = True
    ) -> ServiceClient:
        known = KnownServers(OutsideReach(self.pod.dies[LAYOUT.clients[rank]], self.links), rank, LAYOUT)
        replicas = same if has_replicas else lambda layer, physical: (physical,)
        return ServiceClient(rank, 0, known, LAYERS, replicas, patience, quantize, Means())

    async def run(self, *work: Awaitable[Any]) -> list[Any]:
        async with asyncio.timeout(60):
            return await asyncio.gather(
                *(self.pod.clock.spawn(each) for each in work), return_exceptions=True
            )


@asynccontextmanager
async def scene(
    *, kind: str = "tcp", through: dict[int, float] | None = None, generations: tuple[int, ...] = (1, 1, 1)
) -> AsyncIterator[tuple[Scene, dict[int, Cable]]]:
    """Three servers, of which those in `through` are reached by a slow cable, and two clients."""
    pod, links, cables = Pod(), {}, {}
    for die in LAYOUT.clients:
        LAYOUT.plan_client(pod.plan(die))
    pod.materialise()
    fars = [Far(index, free_address(kind), generation) for index, generation in enumerate(generations)]
    serving = [far.server.die.spawn(serve(far.server, compute=logical)) for far in fars]
    for index, far in enumerate(fars):
        address = far.address
        if through is not None and index in through:
            cables[index] = Cable(address, through[index])
            address = await cables[index].start()
        links[LAYOUT.servers.dies[index]] = await open_link(address, "me", IDENTITY, TOKEN)
    try:
        yield Scene(fars, links, pod), cables
    finally:
        for process in serving:
            process.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        for link in links.values():
            link.close("the test is over")
        for cable in cables.values():
            await cable.close()
        for far in fars:
            far.close()
        await asyncio.sleep(0.01)


def batches(seed: int, count: int = 4) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [tokens(rng, LAYOUT, 1 + n % 3) for n in range(count)]


def check(results: Any, asked: list[Any]) -> None:
    assert not isinstance(results, BaseException), results
    for result, batch in zip(results, asked, strict=True):
        assert same_bits(result, expected(LAYOUT, batch, logical))


# ---- connections that are bad -----------------------------------------------------------------------


async def test_a_slow_server() -> None:
    async with scene(through={1: 0.02}) as (there, _):
        asked = batches(3)
        check((await there.run(attend(there.client(has_replicas=False), asked)))[0], asked)


async def test_a_cable_that_is_cut_for_a_while() -> None:
    """Without replicas it is waited for; with them they answer, and it serves again when it is whole."""
    for has_replicas in (False, True):
        async with scene(through={1: 0.0}) as (there, cables):
            client, asked = there.client(has_replicas=has_replicas), batches(4, 12)
            check((await there.run(attend(client, asked[:4])))[0], asked[:4])
            cables[1].whole.clear()
            asyncio.get_running_loop().call_later(3.0, cables[1].whole.set)
            check((await there.run(attend(client, asked[4:8], 5)))[0], asked[4:8])
            assert cables[1].whole.is_set() == (not has_replicas)
            assert bool(client.num_resent) == has_replicas
            await cables[1].whole.wait()
            await asyncio.sleep(0.2)
            served = there.fars[1].server.num_served
            check((await there.run(attend(client, asked[8:], 9)))[0], asked[8:])
            assert there.fars[1].server.num_served > served


async def test_a_look_from_before_a_write_says_nothing_of_it() -> None:
    async with scene(through={0: 0.0}) as (there, cables):
        link, spare = there.links[LAYOUT.servers.dies[0]], LAYOUT.state_at(0) + 1
        at = there.fars[0].windows["slots"].offset + spare
        cables[0].whole.clear()
        look = link.look(at)
        assert look is not None
        link.write(at, b"\7")
        cables[0].whole.set()
        assert await look == b"\0"
        await asyncio.sleep(0)
        assert link.seen(at) == 7
        again = link.look(at)
        assert again is not None
        assert await again == b"\7"


async def test_a_cable_that_is_cut_for_ever() -> None:
    async with scene(through={1: 0.0}) as (there, cables):
        cables[1].whole.clear()
        asked = batches(5)
        results = await there.run(attend(there.client(), asked))
        # Its card is read first, and that is given up: then nobody asks it any more.
        check(results[0], asked)
        alone = there.client(1, Patience(100 * MS, 500 * MS), has_replicas=False)
        (error,) = await there.run(attend(alone, asked))
        assert isinstance(error, FieldError)
        assert "expert server 1" in str(error)


def test_a_connection_that_has_ended_a_moment_ago() -> None:
    """uvloop writes to no closed transport, and the link's own task has not run yet."""

    async def use() -> None:
        async with scene() as (there, _):
            link = there.links[LAYOUT.servers.dies[0]]
            assert isinstance(link, CardLink)
            link.writer.transport.abort()
            assert not link.broken
            link.write(0, b"\7")
            assert link.broken == "the connection has ended"
            with pytest.raises(LostDieError, match="the connection has ended"):
                await link.read(0, 1)
            assert link.look(0) is None

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(use())


async def test_a_server_that_ends() -> None:
    for kind in ("tcp", "unix"):
        async with scene(kind=kind) as (there, _):
            client, asked = there.client(), batches(6, 8)
            check((await there.run(attend(client, asked[:4])))[0], asked[:4])
            there.fars[1].close()
            check((await there.run(attend(client, asked[4:], 5)))[0], asked[4:])
            assert there.links[LAYOUT.servers.dies[1]].broken


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_what_a_client_before_has_left_is_not_read(kind: str) -> None:
    """A client ends when a server has its request in a batch; the next one has its slots."""
    async with scene(kind=kind) as (there, _):
        first, asked = batches(10)[2], batches(11, 6)
        gates = [gate(far) for far in there.fars]
        before = there.client()
        await there.run(before.a2e(*first, 1))
        async with asyncio.timeout(10):
            while not all(waits.is_set() for _, waits in gates):
                await asyncio.sleep(0.01)
        for node, far in zip(LAYOUT.servers.dies, there.fars, strict=True):
            there.links[node].close("it has ended")
            async with asyncio.timeout(10):
                while far.nic.has_client:
                    await asyncio.sleep(0.01)
            there.links[node] = await open_link(far.address, "the next one", IDENTITY, TOKEN)
        for goes_on, _ in gates:
            asyncio.get_running_loop().call_later(1.0, goes_on.set)
        check((await there.run(attend(there.client(has_replicas=False), asked)))[0], asked)


def gate(far: Far) -> tuple[asyncio.Event, asyncio.Event]:
    """What a server waits for before it answers, and whether it does."""
    goes_on, waits, answer = asyncio.Event(), asyncio.Event(), far.server.answer

    async def late(*args: Any) -> None:
        waits.set()
        await goes_on.wait()
        await answer(*args)

    far.server.answer = late  # type: ignore[method-assign]
    return goes_on, waits


async def test_a_server_that_lies_about_its_generation() -> None:
    async with scene(generations=(1, 7, 1)) as (there, _):
        (error,) = await there.run(attend(there.client(), batches(7)))
        assert isinstance(error, FieldError)
        assert "expert server 1 do not fit together: field card" in str(error)
        assert "generation=1" in str(error)
        assert "generation=7" in str(error)


# ---- the port ---------------------------------------------------------------------------------------


def talk(address: str, data: bytes) -> bytes:
    """What somebody hears who says this after the challenge."""
    with connect(address) as sock:
        sock.recv(4096)
        sock.sendall(data)
        heard = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while raw := sock.recv(4096):
                heard += raw
        return heard


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 70_000, b'{"client": 1}\n', b"\xff\xfe\n", b"null\n"]
)
async def test_garbage_on_the_port(garbage: bytes) -> None:
    async with scene() as (there, _):
        await asyncio.to_thread(talk, there.fars[0].address, garbage)
        asked = batches(8)
        check((await there.run(attend(there.client(), asked)))[0], asked)
        assert "expected" in there.fars[0].nic.refusals[-1] or "is no" in there.fars[0].nic.refusals[-1]


def trickle(address: str) -> float:
    """How long one is listened to who says a byte now and then, in seconds."""
    begin = time.monotonic()
    with connect(address) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(0.1)
        while time.monotonic() - begin < 20.0:
            sock.sendall(b"{")
            with contextlib.suppress(TimeoutError):
                if not sock.recv(4096):
                    break
    return time.monotonic() - begin


async def test_who_trickles_is_not_listened_to_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PATIENCE_S", 0.5)
    async with scene() as (there, _):
        assert await asyncio.to_thread(trickle, there.fars[0].address) < 15.0
        assert there.fars[0].nic.refusals == ["timed out"]


async def test_any_letters_are_a_token_and_a_proof() -> None:
    assert proves(proof("\u00e9", "1"), "\u00e9", "1")
    assert not proves("\u00e9", "\u00e9", "1")
    assert proves(proof("\udce9", "1"), "\udce9", "1")  # what an environment has that is no UTF-8
    async with scene() as (there, _):
        address, hello = there.fars[0].address, line(Hello("me", IDENTITY, "\u00e9"))
        assert b"its token is another one" in await asyncio.to_thread(talk, address, hello)


class Glitching:
    """A listener of which a connection goes before it is accepted, as accept(2) says."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self.family, self.num_calls = listener, listener.family, 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.num_calls += 1
        if self.num_calls == 1:
            raise OSError(errno.ECONNABORTED, "Software caused connection abort")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


async def test_a_connection_that_ends_too_early_ends_nothing_else() -> None:
    listener, address = listen("tcp:127.0.0.1:0")
    known = {part: Window(0, 8) for part in ("card", "slots", "requests", "answers")}
    glitching: Any = Glitching(listener)
    heard: list[Exception] = []
    nic = Nic(glitching, SharedBuffer(8), known, IDENTITY, TOKEN, heard.append)
    try:
        link = await open_link(address, "me", IDENTITY, TOKEN)
        assert await link.read(0, 8) == bytes(8)
        link.close("the test is over")
    finally:
        nic.close()
    assert heard == []
    await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "known",
    [
        {"card": Window(0, 8)},
        {part: Window(0, 9) for part in ("card", "slots", "requests", "answers")},
        {part: Window(-1, 2) for part in ("card", "slots", "requests", "answers")},
    ],
)
def test_a_welcome_that_cannot_be(known: dict[str, Window]) -> None:
    with pytest.raises(ProtocolError, match="the server says where its parts are, but"):
        check_windows(known, 8, "the server")


def test_an_address_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    listener, address = listen("tcp:[::1]:0")
    with listener, connect(address) as sock:
        assert address == f"tcp:[::1]:{sock.getpeername()[1]}"


@pytest.mark.parametrize(
    ("client", "identity", "token", "words"),
    [
        ("me", IDENTITY, "guessed", "its token is another one"),
        ("me", "another model", TOKEN, "its model, precision or layout is another model, not tiny"),
        ("somebody else", IDENTITY, TOKEN, "another client process is there"),
    ],
)
async def test_who_may_not_connect(client: str, identity: str, token: str, words: str) -> None:
    async with scene() as (there, _):
        with pytest.raises(ProtocolError, match=words):
            await open_link(there.fars[0].address, client, identity, token)
        asked = batches(9)
        check((await there.run(attend(there.client(), asked)))[0], asked)


@pytest.mark.parametrize(
    ("op", "part", "shift", "nbytes"),
    [
        (OP_READ, "card", 0, CARD.size + 1),
        (OP_READ, "requests", 0, 1),  # what others have asked
        (OP_WRITE, "answers", 0, 1),
        (OP_WRITE, "card", 0, 1),
        (OP_READ, "slots", -1, 1),
        (OP_READ, "slots", 1 << 62, 1),
        (3, "slots", 0, 1),
    ],
)
async def test_no_byte_beyond_what_is_registered(op: int, part: str, shift: int, nbytes: int) -> None:
    async with scene() as (there, _):
        far, link = there.fars[0], there.links[LAYOUT.servers.dies[0]]
        assert isinstance(link, CardLink)
        before = bytes(far.server.die.memory.buffer)
        link.writer.write(REQUEST.pack(op, nbytes, far.windows[part].offset + shift) + bytes(nbytes))
        with pytest.raises(LostDieError):
            async with asyncio.timeout(10):
                await link.read(far.windows["card"].offset, CARD.size)
        assert "refuses a request" in str(link.broken)
        assert bytes(far.server.die.memory.buffer) == before


@pytest.mark.parametrize("nbytes", [3, 1 << 31])
async def test_an_answer_of_another_size_ends_the_link(nbytes: int) -> None:
    """A server that is none answers reads with what was not asked for; no room is made for it."""
    parts = b", ".join(b'"%s": [0, 64]' % part for part in (b"card", b"slots", b"requests", b"answers"))
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()

    def lie() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b'{"nonce": "1"}\n')
            sock.recv(4096)
            sock.sendall(b'{"windows": {%s}, "nbytes": 64}\n' % parts)
            sock.recv(4096)
            sock.sendall(RESPONSE.pack(0, nbytes) + b"abc")
            sock.recv(4096)

    lying = asyncio.get_running_loop().run_in_executor(None, lie)
    with listener:
        link = await open_link(f"tcp:{host}:{port}", "me", IDENTITY, TOKEN)
        with pytest.raises(LostDieError, match=f"answers a read of 64 bytes with {nbytes}"):
            async with asyncio.timeout(10):
                await link.read(0, 64)
        await lying
    await asyncio.sleep(0.01)


async def test_a_port_in_use() -> None:
    listener, address = listen("tcp:127.0.0.1:0")
    with listener, pytest.raises(OSError, match="in use"):
        listen(address)
    for wrong in ("here", "here:", ":7", "here:70000", "here:x"):
        with pytest.raises(InputError, match="is not HOST:PORT"):
            split(wrong)


# ---- seats ------------------------------------------------------------------------------------------


def seated(table: SeatTable, asked: Register) -> int:
    seat = table.register(asked)
    assert isinstance(seat, int), seat
    table.mark(seat, Presence.THERE)
    return seat


def refused(table: SeatTable, asked: Register) -> str:
    why = table.register(asked)
    assert isinstance(why, Refused)
    assert "\n" not in why.why
    return why.why


def test_who_gets_which_seat() -> None:
    table = SeatTable()
    assert [seated(table, asks(name)) for name in "abc"] == [0, 1, 2]
    assert seated(table, asks("d", 3)) == 3
    assert refused(table, asks("e")) == "all 4 seats are taken"
    assert refused(table, asks("a")) == "a server of the name a is there already, at seat 0"
    table.forget(1)
    assert refused(table, asks("e", 3)) == "seat 3 is taken, by server d"
    assert refused(table, asks("e", 9)) == "there is no seat 9: seats are 0 to 3"
    assert "is of another model, precision or layout: other" in refused(table, asks("e", 1, "other"))
    assert seated(table, asks("e")) == 1
    assert [seat.epoch for seat in table.seats] == [1, 2, 1, 1]
    assert table.check_identity("the client", "other") is not None


def test_who_may_leave() -> None:
    table = SeatTable()
    for name in "abcd":
        seated(table, asks(name))
    assert table.leave(3) == "server d cannot leave: nobody else has the shared expert"
    assert table.leave(0) is None
    assert table.seats[0].presence == Presence.LEAVING
    assert table.leave(1) == "server b cannot leave: nobody else has experts 0, 3"
    table.forget(0)
    assert table.missed_without(set()) == []


def test_a_server_keeps_its_seat_over_the_end_of_its_monitor() -> None:
    table = SeatTable()
    assert seated(table, asks("a", 2, epoch=3)) == 2
    assert table.seats[2].epoch == 3
    table.forget(2)
    assert seated(table, asks("a", 2, epoch=3)) == 2
    assert table.seats[2].epoch == 3  # still the same
    table.forget(2)
    seated(table, asks("b", 2))
    table.forget(2)
    seated(table, asks("a", 2, epoch=3))
    assert table.seats[2].epoch == 5  # somebody was there meanwhile
    assert seated(table, asks("a", 2, epoch=5)) == 2  # nobody has heard of the end of its connection
    assert table.seats[2].epoch == 5
    assert "a is there already" in refused(table, asks("a", 2, epoch=4))
    assert "seat 2 is taken, by server a" in refused(table, asks("c", 2, epoch=5))
