"""How a client and a server process come to know each other (EaaS 4.4): a handshake, then bytes alone.

    server -> client   Challenge   a number that is used once

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
    """A client's introduction.

    `client` identifies the process; `identity` is a digest of model, precision and layout.
    """

    client: str
    identity: str
    proof: str


class Welcome(msgspec.Struct, forbid_unknown_fields=True):
    """The server's answer: registered regions and the end of the last region, or the reason for a refusal."""

    windows: dict[str, Window] = {}
    nbytes: int = 0
    refused: str | None = None


def proof(token: str, nonce: str) -> str:
    """Compute the proof of a token for a nonce; only a process with the token can."""
    return hmac.new(token.encode(errors="surrogateescape"), nonce.encode(), "sha256").hexdigest()


def proves(said: str, token: str, nonce: str) -> bool:
    """Check a proof in constant time. The texts are compared as bytes because a peer may send any
    characters."""
    return hmac.compare_digest(said.encode(), proof(token, nonce).encode())


def line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode(raw: bytes, kind: Any, who: str) -> Any:
    """Decode a line as a message of type `kind`. Raises ProtocolError for anything else."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = bytes(raw[:40])
        name = getattr(kind, "__name__", "message")
        raise ProtocolError(f"{who} says {shown!r}, which is no {name}: {error}") from None


def read_line(sock: socket.socket, kind: type[T], who: str) -> T:
    """Read the next line byte by byte, so that no byte behind it is taken. Raises ProtocolError if it is no
    message.

    Raises TimeoutError after `PATIENCE_S`, even if bytes keep trickling in.
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
    """Connect to `unix:PATH` or `tcp:HOST:PORT` with a timeout of `PATIENCE_S`. Raises OSError."""
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
    """Make a TCP connection send at once, and end it when the other computer is silent for `SILENT_S`
    seconds. A computer without power never closes a connection, while a process that merely hangs still
    answers keepalives."""
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
    """Listen at an address; return the socket and the address, with the real port if 0 was asked for. Raises
    OSError."""
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
    """Split HOST:PORT into host and port. Raises InputError for any other text."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"{address!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def joined(host: str, port: int) -> str:
    """Join host and port to HOST:PORT, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unix(path: str) -> str:
    """Return a socket name in Linux's abstract namespace: no file, and gone with its process."""
    return f"\0{path}" if sys.platform == "linux" else path
