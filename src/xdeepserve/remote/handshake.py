"""How a client and a server process come to know each other (EaaS 4.4): one exchange, then bytes alone.

    server -> client   Challenge   a number that is used once
    client -> server   Hello       who it is, of which model and layout, and proof that it has the token
    server -> client   Welcome     where its regions are; with a file descriptor if they share a computer

Each is one line of JSON. The token itself never travels, neither here nor to the monitor, which begins with a
challenge, too. What follows on the connection is not encrypted: beyond one computer it is for a network whose
members trust each other.
"""

from __future__ import annotations

import hmac
import socket
import sys
import time
from typing import Any, TypeVar

import msgspec

from xdeepserve.errors import InputError, ProtocolError
from xdeepserve.remote.registered import Window

MAX_LINE = 1 << 16
PATIENCE_S = 5.0
SILENT_S = 15  # of a computer that is gone, or behind a cable that is cut, until its connections end
T = TypeVar("T", bound=msgspec.Struct)


class Challenge(msgspec.Struct, forbid_unknown_fields=True):
    nonce: str


class Hello(msgspec.Struct, forbid_unknown_fields=True):
    """`client` tells one process from another; `identity` is that of model, precision and layout."""

    client: str
    identity: str
    proof: str


class Welcome(msgspec.Struct, forbid_unknown_fields=True):
    """The registered parts, and up to where they go; or why there are none."""

    windows: dict[str, Window] = {}
    nbytes: int = 0
    refused: str | None = None


def proof(token: str, nonce: str) -> str:
    """What only somebody with the token can know of a nonce."""
    return hmac.new(token.encode(errors="surrogateescape"), nonce.encode(), "sha256").hexdigest()


def proves(said: str, token: str, nonce: str) -> bool:
    """Whether that is the proof, in a time that tells nothing of it. As bytes: others may say any letters."""
    return hmac.compare_digest(said.encode(), proof(token, nonce).encode())


def line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode(raw: bytes, kind: Any, who: str) -> Any:
    """One line. ProtocolError for one that is not of this kind."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = bytes(raw[:40])
        name = getattr(kind, "__name__", "message")
        raise ProtocolError(f"{who} says {shown!r}, which is no {name}: {error}") from None


def read_line(sock: socket.socket, kind: type[T], who: str) -> T:
    """The next line, byte by byte, so that nothing behind it is taken. ProtocolError if it is none.

    TimeoutError after `PATIENCE_S`, however steadily bytes trickle in.
    """
    raw, deadline = bytearray(), time.monotonic() + PATIENCE_S
    while not raw.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left_s)
        byte = sock.recv(1)
        if not byte or len(raw) > MAX_LINE:
            raise ProtocolError(f"{who} says {bytes(raw[:40])!r}, which is no line: {kind.__name__} expected")
        raw += byte
    sock.settimeout(PATIENCE_S)
    message: T = decode(bytes(raw), kind, who)
    return message


# ---- addresses --------------------------------------------------------------------------------------


def connect(address: str) -> socket.socket:
    """A connection to `unix:PATH` or `tcp:HOST:PORT`, which waits for `PATIENCE_S` at most. OSError."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE_S)
        try:
            sock.connect(_unix(rest))
        except OSError:
            sock.close()
            raise
        return sock
    host, port = split(rest)
    sock = socket.create_connection((host, port), PATIENCE_S)
    prepare(sock)
    return sock


def prepare(sock: socket.socket) -> None:
    """Have a TCP connection send at once, and end when nothing of the other computer is heard any more: one
    without power says no end of a connection. One with a process that hangs does answer.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENT_S // 3),
        ("TCP_KEEPINTVL", SILENT_S // 3),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 1000 * SILENT_S),  # the same of bytes that are on their way
    ):
        if hasattr(socket, name):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(address: str) -> tuple[socket.socket, str]:
    """A socket that listens there, and where that is, with the port if it was 0. OSError."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(_unix(rest))
        sock.listen()
        return sock, address
    host, port = split(rest)
    sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return sock, f"tcp:{joined(host, sock.getsockname()[1])}"


def split(address: str) -> tuple[str, int]:
    """HOST:PORT. InputError for what is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"{address!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def joined(host: str, port: int) -> str:
    """HOST:PORT; an IPv6 host has brackets there."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unix(path: str) -> str:
    """Linux has a place for names that are no files, and are gone with their process."""
    return f"\0{path}" if sys.platform == "linux" else path
