"""Consistent hashing on a ring: decides which server a key belongs to (CloudMatrix 4.4.1).

Every server has `POINTS` points on a circle of 64 bits, at the hashes of its name and a number. A key belongs
to the server of the first point at or after the key's own hash. So a server that joins or leaves moves the
keys of its own arcs, 1/n of all, and no others.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence

from xdeepserve.hw.volume import Key

POINTS = 128  # of each server; the papers say nothing of virtual nodes. Shares then differ by a tenth or so


def place(text: bytes) -> int:
    """Return the position of a text on the circle."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


class Ring:
    """A view of the pool's members. Views are numbered by the Controller, and never change."""

    def __init__(self, members: Sequence[str], version: int = 0) -> None:
        self.members, self.version = tuple(members), version
        points = sorted((place(f"{name}#{i}".encode()), name) for name in members for i in range(POINTS))
        self._points = [point for point, _ in points]
        self._owners = [name for _, name in points]

    def owner(self, key: Key) -> str:
        """Return the owner of a key, a server's name; "" if the ring is empty."""
        if not self._owners:
            return ""
        at = bisect_left(self._points, place(key.namespace.encode() + b"/" + key.digest))
        return self._owners[at % len(self._owners)]
