"""The network card of a server process: threads that hand out its buffer, or read and write it for clients.

The server's loop takes no part and is not told; it polls its own memory. Over shared memory a client is given
the buffer itself. Over TCP it sends requests, which are carried out in order:

    op u8 | 3 spare | nbytes u32 | offset u64 | bytes, of a WRITE        (little endian)

and a READ is answered by     status u8 | 3 spare | nbytes u32 | bytes.

A request outside the registered regions is answered by status 1 and the reason, and ends the connection.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader

from xdeepserve.errors import AddressError, ProtocolError
from xdeepserve.remote.handshake import (
    PATIENCE_S,
    Challenge,
    Hello,
    Welcome,
    line,
    prepare,
    proves,
    read_line,
)
from xdeepserve.remote.registered import READ, WRITTEN, SharedBuffer, Window, check_access, fence

REQUEST = struct.Struct("<B3xIQ")
RESPONSE = struct.Struct("<B3xI")
OP_WRITE, OP_READ = 1, 2
OK, REFUSED = 0, 1
MAX_CONNECTIONS = 32  # of which all but one have not said yet who they are
AGAIN_S = 0.05  # after a connection that could not be accepted


class Nic:
    """Network card of a server process.

    Serves a single client process at a time, from its own threads, until `close`. `hears` is told, in such a
    thread, of an error after which nobody can connect any more.
    """

    def __init__(
        self,
        listener: socket.socket,
        buffer: SharedBuffer,
        known: dict[str, Window],
        identity: str,
        token: str,
        hears: Callable[[Exception], object],
    ) -> None:
        self._listener, self._buffer, self._known, self._hears = listener, buffer, known, hears
        self._identity, self._token = identity, token
        self._shares = listener.family == socket.AF_UNIX
        self._lock, self._ends = threading.Lock(), threading.Event()
        self._open: set[socket.socket] = set()
        self._client: tuple[str, socket.socket] | None = None
        self.refusals: list[str] = []  # the latest ones
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    @property
    def has_client(self) -> bool:
        return self._client is not None

    def close(self) -> None:
        """End all connections and threads; no client can reach the buffer afterwards."""
        self._ends.set()
        _end(self._listener)  # which ends the wait of its thread
        self._listener.close()
        with self._lock:
            for sock in self._open:
                _end(sock)
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _spawn(self, what: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=what, args=args, name="network card", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def _accept(self) -> None:
        try:
            self._accept_all()
        except Exception as error:
            self._hears(error)

    def _accept_all(self) -> None:
        """Accept connections until the card is closed, and serve each in a thread."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed, or a connection that has ended before it was there
                if self._ends.wait(AGAIN_S):
                    return
                continue
            with self._lock:
                is_room = len(self._open) < MAX_CONNECTIONS
                if is_room:
                    self._open.add(sock)
            if is_room:
                self._spawn(self._serve, sock)
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        """Serve a connection from the first byte to the last."""
        try:
            sock.settimeout(PATIENCE_S)
            if not self._shares:
                prepare(sock)
            self._shake_hands(sock)
            sock.settimeout(None)
            if self._shares:
                while sock.recv(64):  # nothing is said here any more: who is gone is known by the end
                    pass
            else:
                with sock.makefile("rb") as stream:
                    self._execute(sock, stream)
        except (OSError, ProtocolError, AddressError) as error:
            self.refusals = [*self.refusals[-9:], str(error)]
        except Exception as error:
            self.refusals = [*self.refusals[-9:], repr(error)]
        finally:
            with self._lock:
                self._open.discard(sock)
                if self._client is not None and self._client[1] is sock:
                    self._client = None
            sock.close()

    def _shake_hands(self, sock: socket.socket) -> None:
        nonce = secrets.token_hex(16)
        sock.sendall(line(Challenge(nonce)))
        hello = read_line(sock, Hello, "who has connected")
        if not proves(hello.proof, self._token, nonce):
            refused = "its token is another one"
        elif hello.identity != self._identity:
            refused = f"its model, precision or layout is {hello.identity}, not {self._identity}"
        else:
            refused = self._admit(hello.client, sock)
        if refused:
            sock.sendall(line(Welcome(refused=refused)))
            raise ProtocolError(f"a client was refused: {refused}")
        nbytes = max(map(sum, self._known.values()))
        welcome = line(Welcome(self._known, nbytes))
        if self._shares:
            socket.send_fds(sock, [welcome], [self._buffer.fd])
        else:
            sock.sendall(welcome)

    def _admit(self, client: str, sock: socket.socket) -> str:
        """Return why a client may not use the slots, or "". A client may replace its own earlier
        connection."""
        with self._lock:
            if self._client is not None and self._client[0] != client:
                return "another client process is there"
            if self._client is not None:
                _end(self._client[1])
            self._client = client, sock
        return ""

    def _execute(self, sock: socket.socket, stream: BufferedReader) -> None:
        """Execute requests in order until the client disconnects."""
        view = self._buffer.view
        while raw := stream.read(REQUEST.size):
            op, nbytes, offset = REQUEST.unpack(raw)
            try:
                if op not in (OP_WRITE, OP_READ):
                    raise ProtocolError(f"field op: expected {OP_WRITE} or {OP_READ}, seen {op}")
                check_access(self._known, WRITTEN if op == OP_WRITE else READ, offset, nbytes)
            except (ProtocolError, AddressError) as error:
                reason = str(error).encode()
                sock.sendall(RESPONSE.pack(REFUSED, len(reason)) + reason)
                raise
            if op == OP_READ:
                sock.sendall(RESPONSE.pack(OK, nbytes) + view[offset : offset + nbytes])
                continue
            data = stream.read(nbytes)
            if len(data) < nbytes:
                return  # cut off in the middle: none of it is written
            view[offset : offset + nbytes] = data
            fence()


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
