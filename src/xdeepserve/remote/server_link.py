"""A client process's access to the buffer of a server: shared memory, or requests to its network card."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Protocol

from xdeepserve.errors import LostDieError, ProtocolError
from xdeepserve.forks import close_in_child
from xdeepserve.remote.handshake import (
    MAX_LINE,
    Challenge,
    Hello,
    Welcome,
    connect,
    decode,
    line,
    proof,
    read_line,
)
from xdeepserve.remote.network_card import OK, OP_READ, OP_WRITE, REQUEST, RESPONSE
from xdeepserve.remote.registered import Window, check_windows, fence

MAX_UNSENT = 64 << 20  # bytes to a server that does not take them, after which it is given up


class ServerLink(Protocol):
    """Access to a server's buffer. `broken` says why the link is no longer usable, or is None. `is_late`: a
    client has waited in vain for an answer, and none of any kind has come since."""

    windows: dict[str, Window]
    broken: str | None
    is_late: bool

    def write(self, offset: int, data: bytes) -> None:
        """Post bytes to a server. Writes arrive in the order of the calls, or not at all."""

    def read(self, offset: int, nbytes: int) -> asyncio.Future[bytes]:
        """Read bytes of the server's buffer. The future raises LostDieError if they do not come."""

    def look(self, offset: int) -> asyncio.Future[bytes] | None:
        """Refresh the value of `seen` for a byte. Returns a future that ends when the value is fresh, or None
        if it always is."""

    def seen(self, offset: int) -> int | None:
        """Return a byte's value as of the latest read, or None before the first."""

    def close(self, why: str) -> None:
        """Give the link up, for the reason `why`. Harmless when repeated."""


class SharedLink:
    """Link by shared memory: the server's buffer itself, mapped here."""

    def __init__(self, sock: socket.socket, welcome: Welcome, fd: int) -> None:
        self.windows, self.broken = welcome.windows, None if fd >= 0 else "no buffer came with the welcome"
        self.is_late = False
        self._sock, self._loop = sock, asyncio.get_running_loop()
        self._view = memoryview(mmap.mmap(fd, welcome.nbytes))
        os.close(fd)
        close_in_child(sock)
        sock.setblocking(False)
        self._loop.add_reader(sock, self._hear)

    def _hear(self) -> None:
        """Close the link when the server has ended: its socket is closed then, however it ended."""
        with suppress(BlockingIOError):
            try:
                gone = not self._sock.recv(64)
            except ConnectionError:
                gone = True
            if gone:
                self.close("its process has ended")

    def write(self, offset: int, data: bytes) -> None:
        self._view[offset : offset + len(data)] = data
        fence()

    def read(self, offset: int, nbytes: int) -> asyncio.Future[bytes]:
        fence()
        future: asyncio.Future[bytes] = self._loop.create_future()
        future.set_result(bytes(self._view[offset : offset + nbytes]))
        return future

    def look(self, offset: int) -> None:
        return None

    def seen(self, offset: int) -> int | None:
        return self._view[offset]

    def close(self, why: str) -> None:
        if self._sock.fileno() >= 0:
            self.broken = self.broken or why
            self._loop.remove_reader(self._sock)
            self._sock.close()


class CardLink:
    """Link by TCP: a connection to the server's network card."""

    def __init__(
        self,
        sock: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        welcome: Welcome,
    ) -> None:
        self.windows = welcome.windows
        self.broken: str | None = None
        self.is_late = False
        self._sock = sock
        self._reader, self.writer = reader, writer
        self._asked: deque[tuple[int, asyncio.Future[bytes]]] = deque()
        self._seen: dict[int, int] = {}
        self._looks: dict[int, asyncio.Future[bytes]] = {}
        self._task = asyncio.ensure_future(self._receive())

    async def _receive(self) -> None:
        """Receive answers, in the order of requests."""
        why = "the connection has ended"
        try:
            while True:
                status, nbytes = RESPONSE.unpack(await self._reader.readexactly(RESPONSE.size))
                if status != OK:
                    data = await self._reader.readexactly(min(nbytes, MAX_LINE))
                    why = f"it refuses a request: {data.decode(errors='replace')}"
                    return
                asked, future = self._asked[0]
                if asked != nbytes:  # which are not waited for: they may be as many as it likes
                    why = f"it answers a read of {asked} bytes with {nbytes}"
                    return
                data = await self._reader.readexactly(nbytes)
                self._asked.popleft()
                self.is_late = False
                if not future.done():
                    future.set_result(data)
        except (OSError, EOFError, struct.error, IndexError) as error:
            why = f"{why}{f': {error}' if isinstance(error, OSError) else ''}"
        except Exception as error:
            why = f"its answers cannot be read: {error!r}"
        finally:
            self.close(why)

    def _is_open(self) -> bool:
        """Whether the link is usable. Some turns of the loop pass between the end of a connection and
        `_receive`'s notice, so this looks at the transport."""
        if self.writer.transport.is_closing():
            self.close("the connection has ended")
        return self.broken is None

    def write(self, offset: int, data: bytes) -> None:
        if not self._is_open():
            return
        if self.writer.transport.get_write_buffer_size() > MAX_UNSENT:
            self.close("it takes no bytes any more")
            return
        self.writer.write(REQUEST.pack(OP_WRITE, len(data), offset) + data)
        if len(data) == 1:
            self._seen[offset] = data[0]
            self._looks.pop(offset, None)  # what it finds is older

    def read(self, offset: int, nbytes: int) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self._is_open():
            future.set_exception(LostDieError(self.broken))
        else:
            self._asked.append((nbytes, future))
            self.writer.write(REQUEST.pack(OP_READ, nbytes, offset))
        return future

    def look(self, offset: int) -> asyncio.Future[bytes] | None:
        if not self._is_open():
            return None
        if offset not in self._looks:
            self._looks[offset] = future = self.read(offset, 1)
            future.add_done_callback(lambda done: self._note(offset, done))
        return self._looks[offset]

    def _note(self, offset: int, done: asyncio.Future[bytes]) -> None:
        if self._looks.get(offset) is not done:
            return
        del self._looks[offset]
        if not done.cancelled() and done.exception() is None:
            self._seen[offset] = done.result()[0]

    def seen(self, offset: int) -> int | None:
        return self._seen.get(offset)

    def close(self, why: str) -> None:
        if self.broken:
            return
        self.broken = why
        with suppress(OSError):  # the server hears it although a forked child has a copy of the connection
            self._sock.shutdown(socket.SHUT_RDWR)
        self.writer.transport.abort()
        for _, future in self._asked:
            if not future.done():
                future.set_exception(LostDieError(why))
                future.exception()  # nobody may be left to hear of it
        self._task.cancel()


async def open_link(address: str, client: str, identity: str, token: str) -> ServerLink:
    """Connect to a server process and shake hands. Raises OSError or ProtocolError."""
    opening = _LinkOpening()
    try:
        sock, welcome, fd = await asyncio.to_thread(opening.run, address, client, identity, token)
    except asyncio.CancelledError:
        opening.leave()
        raise
    try:
        if address.startswith("unix:"):
            return SharedLink(sock, welcome, fd)
        reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_LINE)
        return CardLink(sock, reader, writer, welcome)
    except BaseException:
        sock.close()
        raise


class _LinkOpening:
    """A handshake in a thread, which cannot be cancelled: what it brings after `leave` is closed at once."""

    def __init__(self) -> None:
        self._found: list[tuple[socket.socket, int]] = []
        self._is_left = False

    def run(self, address: str, client: str, identity: str, token: str) -> tuple[socket.socket, Welcome, int]:
        """Connect and shake hands; return the connection, the welcome, and the buffer's descriptor or -1."""
        sock, welcome, fd = _greet(address, client, identity, token)
        self._found.append((sock, fd))
        if self._is_left:
            self._close()
        return sock, welcome, fd

    def leave(self) -> None:
        """Close the connection that has come, or the one that will come."""
        self._is_left = True
        self._close()

    def _close(self) -> None:
        with suppress(IndexError):  # the other thread may close it at the same time: who pops it does
            while True:
                sock, fd = self._found.pop()
                sock.close()
                if fd >= 0:
                    os.close(fd)


def _greet(address: str, client: str, identity: str, token: str) -> tuple[socket.socket, Welcome, int]:
    """Connect and shake hands; blocks, so it runs in a thread."""
    who, sock = f"the server at {address}", connect(address)
    try:
        challenge = read_line(sock, Challenge, who)
        sock.sendall(line(Hello(client, identity, proof(token, challenge.nonce))))
        fd = -1
        if address.startswith("unix:"):
            raw, fds, _, _ = socket.recv_fds(sock, MAX_LINE, 1)
            welcome, fd = decode(raw, Welcome, who), fds[0] if fds else -1
        else:
            welcome = read_line(sock, Welcome, who)
        if welcome.refused is not None:
            raise ProtocolError(f"{who} refuses: {welcome.refused}")
        check_windows(welcome.windows, welcome.nbytes, who)
        sock.settimeout(None)
        return sock, welcome, fd
    except BaseException:
        sock.close()
        raise
