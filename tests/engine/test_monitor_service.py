"""The monitor's connections: who may come, who comes again, and what is not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.comm.tools import IDENTITY, TOKEN, asks
from xdeepserve.comm.services.layout import Presence
from xdeepserve.errors import XDeepServeError
from xdeepserve.remote import enlisted, monitor_service
from xdeepserve.remote.enlisted import Enlisted
from xdeepserve.remote.handshake import Challenge, line
from xdeepserve.remote.monitor_service import Greeting, MonitorService, dial, hear, say
from xdeepserve.remote.seat_list import Attend, LoopTurns, Ready, Refused, Seated, SeatList

HOST, BOUND_S = "127.0.0.1", 20.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class There:
    """A monitor, and connections to it."""

    def __init__(self) -> None:
        self.service, self.lines = MonitorService(TOKEN, 0.5, 10, lambda text: self.lines.append(text)), [""]
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self.port = await self.service.start(HOST, 0)

    async def dial(self, token: str = TOKEN) -> Streams:
        streams = await dial(HOST, self.port, token)
        self._writers.append(streams[1])
        return streams

    async def ask(self, first: Any, token: str = TOKEN) -> tuple[Any, Streams]:
        """Its answer to the first message."""
        reader, writer = await self.dial(token)
        say(writer, first)
        return await self.hear(reader), (reader, writer)

    async def hear(self, reader: asyncio.StreamReader) -> Any:
        async with asyncio.timeout(BOUND_S):
            return await hear(reader, Seated | SeatList | Refused, "the monitor")

    async def until(self, what: Any) -> None:
        async with asyncio.timeout(BOUND_S):
            while not what():
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        await self.service.close()
        await asyncio.sleep(0.01)


@asynccontextmanager
async def monitor() -> AsyncIterator[There]:
    there = There()
    await there.start()
    try:
        yield there
    finally:
        await there.close()


async def test_the_token_does_not_travel() -> None:
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(line(Challenge("1")))
        heard.extend(await reader.read())
        writer.close()

    server = await asyncio.start_server(listen, HOST, 0)
    _, writer = await dial(HOST, server.sockets[0].getsockname()[1], TOKEN)
    say(writer, Attend(IDENTITY))
    writer.close()
    async with asyncio.timeout(BOUND_S):
        while IDENTITY.encode() not in heard:
            await asyncio.sleep(0.01)
    assert TOKEN.encode() not in heard
    server.close()
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("proof", ["guessed", "\u00e9"])
async def test_who_cannot_prove_that_it_has_the_token(proof: str) -> None:
    async with monitor() as there:
        reader, writer = await asyncio.open_connection(HOST, there.port)
        there._writers.append(writer)
        async with asyncio.timeout(BOUND_S):
            assert isinstance(await hear(reader, Challenge, "the monitor"), Challenge)
        say(writer, Greeting(proof))
        assert await there.hear(reader) == Refused("the token is another one")


async def test_a_client_that_came_before_servers_of_another_model() -> None:
    async with monitor() as there:
        first, (reader, _) = await there.ask(Attend("another"))
        assert first == SeatList(0, [])
        _, (_, writer) = await there.ask(asks("a"))
        say(writer, Ready())
        said = await there.hear(reader)
        assert isinstance(said, Refused)
        assert said.why.startswith("the client is of another model, precision or layout: another")


async def test_a_server_comes_again_before_the_end_of_its_connection_is_heard() -> None:
    async with monitor() as there:
        seated, (_, old) = await there.ask(asks("a", 2))
        assert seated == Seated(2, 1, 0.5)
        say(old, Ready())
        seats = there.service.table.seats
        await there.until(lambda: seats[2].presence == Presence.THERE)
        again, (_, new) = await there.ask(asks("a", 2, epoch=1))
        assert again == seated
        await there.until(lambda: there.service.num_connections == 1)  # the old connection is over
        assert seats[2].name == "a"
        say(new, LoopTurns())
        new.close()
        await there.until(lambda: not seats[2].name)


async def test_a_monitor_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it from the beginning, or behind its challenge."""
    for module in (monitor_service, enlisted):
        monkeypatch.setattr(module, "PATIENCE_S", 0.3)
    for words in (b"", line(Challenge("1"))):
        ends = asyncio.Event()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words=words) -> None:
            writer.write(words)
            await ends.wait()  # noqa: B023
            writer.close()

        server = await asyncio.start_server(listen, HOST, 0)
        address = f"{HOST}:{server.sockets[0].getsockname()[1]}"
        asked = Enlisted(address, TOKEN, asks("a"), lambda text: None, lambda error: None)
        with pytest.raises(XDeepServeError, match=r"cannot be reached: no answer within 0\.3 s"):
            async with asyncio.timeout(BOUND_S):
                await asyncio.wrap_future(asked.seated)
        ends.set()
        server.close()
        await asyncio.sleep(0.05)
