"""The monitor's process (EaaS 3.4, 4.4): it knows which servers are present and tells clients.

The end of a server's connection tells that the server has ended; missing beats tell that it hangs. The
monitor is a single process. When it ends, clients go on with their last list, servers go on serving, and both
connect to the next monitor at its address.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from xdeepserve.comm.services.layout import Presence
from xdeepserve.errors import ProtocolError, XDeepServeError
from xdeepserve.remote.handshake import (
    MAX_LINE,
    PATIENCE_S,
    Challenge,
    decode,
    line,
    prepare,
    proof,
    proves,
)
from xdeepserve.remote.seat_list import (
    Attend,
    Go,
    Leave,
    LoopTurns,
    Ready,
    Refused,
    Register,
    Seated,
    SeatTable,
    Seen,
    ToMonitor,
)

SEEN_S = 5.0  # how long a server that leaves waits for clients to have heard


async def hear(reader: asyncio.StreamReader, kind: Any, who: str) -> Any:
    """Read the next message, of a type or of a union of types. Returns None when the peer is gone. Raises
    ProtocolError for anything that is no message."""
    try:
        raw = await reader.readuntil()
    except (asyncio.IncompleteReadError, OSError):
        return None
    except asyncio.LimitOverrunError:
        raise ProtocolError(f"{who} says a line of more than {MAX_LINE} bytes") from None
    return decode(raw, kind, who)


def say(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Send a message. A message to a closed connection is dropped, because its reader notices the end
    anyway."""
    if not writer.is_closing():
        writer.write(line(message))


class Greeting(msgspec.Struct, forbid_unknown_fields=True):
    """First line of every connection: proof that the peer has the token."""

    proof: str


class MonitorService:
    """Serves from `start` to `close`; `tell` is called with a line of text for each event."""

    def __init__(self, token: str, beat_s: float, lost_beats: int, tell: Callable[[str], None]) -> None:
        self._token, self._beat_s, self._lost_beats, self._tell = token, beat_s, lost_beats, tell
        self.table = SeatTable()
        self._clients: dict[asyncio.StreamWriter, int] = {}  # and the list that each has seen
        self._identities: dict[asyncio.StreamWriter, str] = {}  # of clients
        self._holders: dict[int, asyncio.StreamWriter] = {}  # of seats
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Start to listen and return the port. Raises OSError if the port is in use."""
        self._server = await asyncio.start_server(self._greet, host, port, limit=MAX_LINE)
        port_: int = self._server.sockets[0].getsockname()[1]
        return port_

    @property
    def num_connections(self) -> int:
        """Number of open connections, of servers and of clients."""
        return len(self._tasks)

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            prepare(writer.get_extra_info("socket"))
            async with asyncio.timeout(PATIENCE_S):
                nonce = secrets.token_hex(16)
                say(writer, Challenge(nonce))
                greeting = await hear(reader, Greeting, "who has connected")
                if greeting is None:
                    return
                if not proves(greeting.proof, self._token, nonce):
                    raise ProtocolError("the token is another one")
                first = await hear(reader, ToMonitor, "who has connected")
            if isinstance(first, Register):
                await self._serve_server(first, reader, writer)
            elif isinstance(first, Attend):
                await self._serve_client(first, reader, writer)
            elif first is not None:
                raise ProtocolError(f"a connection begins with Register or Attend, not {first}")
        except (ProtocolError, OSError, TimeoutError) as error:
            why = str(error) or f"nothing was said within {PATIENCE_S:g} s"
            self._tell(f"a connection was refused: {why}")
            say(writer, Refused(why))
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self._tell(f"a connection has ended by an error of the monitor: {error!r}")
        finally:
            self._tasks.discard(task)
            with suppress(OSError):
                writer.close()

    # ---- servers ------------------------------------------------------------------------------------

    async def _serve_server(
        self, asked: Register, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a server's connection from its registration to its end."""
        seat = self.table.register(asked)
        if isinstance(seat, Refused):
            self._tell(seat.why)
            say(writer, seat)
            return
        if (former := self._holders.get(seat)) is not None:
            former.transport.abort()  # a connection of its own, of whose end nobody has heard yet
        self._holders[seat] = writer
        epoch = self.table.seats[seat].epoch
        who = f"server {asked.name} at seat {seat}"
        say(writer, Seated(seat, epoch, self._beat_s))
        leaving: asyncio.Task[None] | None = None
        try:
            while True:
                is_there = self.table.seats[seat].presence != Presence.ABSENT
                try:
                    async with asyncio.timeout(self._beat_s * self._lost_beats if is_there else None):
                        said = await hear(reader, ToMonitor, who)
                except TimeoutError:
                    await self._mark(seat, Presence.LOST, f"{who} is not heard of any more")
                    continue
                if said is None:
                    break
                if isinstance(said, Ready):
                    await self._mark(seat, Presence.THERE, f"{who} is there, generation {epoch}")
                elif isinstance(said, Leave) and leaving is None:
                    leaving = self._leave(seat, who, writer)
                elif isinstance(said, LoopTurns) and self.table.seats[seat].presence == Presence.LOST:
                    await self._mark(seat, Presence.THERE, f"{who} is heard of again")
        finally:
            if leaving is not None:
                leaving.cancel()
            if self._holders.get(seat) is writer:
                del self._holders[seat]
                self.table.forget(seat)
                self._tell(f"{who} is gone")
                await self._publish()

    async def _mark(self, seat: int, presence: Presence, text: str) -> None:
        if self.table.seats[seat].presence != Presence.LEAVING and self.table.mark(seat, presence):
            self._tell(text)
            await self._publish()

    def _leave(self, seat: int, who: str, writer: asyncio.StreamWriter) -> asyncio.Task[None] | None:
        """Handle a server's wish to leave: refuse it, or begin to lead clients away."""
        if why := self.table.leave(seat):
            self._tell(why)
            say(writer, Refused(why))
            return None
        self._tell(f"{who} is to leave")
        return asyncio.ensure_future(self._lead_away(self.table.changed_at[seat], writer))

    async def _lead_away(self, version: int, writer: asyncio.StreamWriter) -> None:
        """Let a server go when all clients have seen the new list, or after `SEEN_S` seconds."""
        try:
            await self._publish()
            with suppress(TimeoutError):
                async with asyncio.timeout(SEEN_S), self._news:
                    await self._news.wait_for(lambda: all(seen >= version for seen in self._clients.values()))
        except Exception as error:
            self._tell(why := f"clients could not be led away by an error of the monitor: {error!r}")
            say(writer, Refused(why))
            return
        say(writer, Go())

    # ---- clients ------------------------------------------------------------------------------------

    async def _serve_client(
        self, asked: Attend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a client process's connection until it ends."""
        if why := self.table.check_identity("the client", asked.identity):
            self._tell(why)
            say(writer, Refused(why))
            return
        self._clients[writer], self._identities[writer] = -1, asked.identity
        try:
            say(writer, self.table.as_list())
            while (said := await hear(reader, ToMonitor, "a client")) is not None:
                if isinstance(said, Seen):
                    self._clients[writer] = said.version
                    async with self._news:
                        self._news.notify_all()
        finally:
            del self._clients[writer], self._identities[writer]

    async def _publish(self) -> None:
        """Send the list of seats to all clients. A client of another model, connected before the first
        server, is refused."""
        for writer, identity in self._identities.items():
            why = self.table.check_identity("the client", identity)
            say(writer, self.table.as_list() if why is None else Refused(why))


async def dial(host: str, port: int, token: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to a monitor. Raises OSError, TimeoutError or ProtocolError."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE)
        try:
            prepare(writer.get_extra_info("socket"))
            challenge = await hear(reader, Challenge, "it")
            if challenge is None:
                raise ProtocolError("it ends the connection")
            say(writer, Greeting(proof(token, challenge.nonce)))
        except BaseException:
            writer.close()
            raise
    return reader, writer


def check_reachable(address: str, error: Exception) -> XDeepServeError:
    """Make the error for a monitor that does not answer."""
    why = str(error) or f"no answer within {PATIENCE_S:g} s"
    return XDeepServeError(f"the monitor at {address} cannot be reached: {why}")
