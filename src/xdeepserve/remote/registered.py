"""Buffer registered by a server process, and the parts of it that clients may read and write.

The buffer is shared memory without a name: a client maps it by a file descriptor. It is freed with the last
process that maps it, however that process ends, so nothing has to be unlinked.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from typing import NamedTuple

from xdeepserve.comm.services.layout import ServiceLayout
from xdeepserve.errors import AddressError, ProtocolError
from xdeepserve.hw.memory import Memory

READ, WRITTEN = frozenset(("card", "slots", "answers")), frozenset(("slots", "requests"))


class Window(NamedTuple):
    """A region of a server's memory: offset and size [bytes]."""

    offset: int
    nbytes: int


class SharedBuffer:
    """Shared memory of several processes. Other processes map it by the file descriptor `fd`."""

    def __init__(self, nbytes: int) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("xdeepserve expert server")
        else:  # a file that has no name any more
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.truncate(self.fd, nbytes)
        self.view = memoryview(mmap.mmap(self.fd, nbytes))


def windows(layout: ServiceLayout, memory: Memory) -> dict[str, Window]:
    """Return the parts of a server's memory that clients may know, by name."""
    found = {}
    for area, parts in (
        (memory.metadata, ("card", "slots")),
        (memory.managed, ("requests", "answers")),
    ):
        for part in parts:
            region = area.regions[layout.region(part)]
            found[part] = Window(region.offset, region.nbytes)
    return found


def check_windows(known: dict[str, Window], nbytes: int, who: str) -> None:
    """Raise ProtocolError unless all parts are known and lie within `nbytes` bytes."""
    missing = sorted((READ | WRITTEN).difference(known))
    beyond = [part for part, (at, size) in known.items() if at < 0 or size < 0 or at + size > nbytes]
    if missing or beyond:
        raise ProtocolError(
            f"{who} says where its parts are, but {missing or beyond} not, or not within them"
        )


def check_access(known: dict[str, Window], allowed: frozenset[str], offset: int, nbytes: int) -> None:
    """Raise AddressError unless [offset, offset + nbytes) lies within one of the parts that are `allowed`."""
    for part in allowed:
        start, size = known[part]
        if start <= offset and offset + nbytes <= start + size:
            return
    parts = ", ".join(f"{part} [{known[part].offset}, {sum(known[part])})" for part in sorted(allowed))
    raise AddressError(f"{nbytes} bytes at offset {offset} are not within one of {parts}")


_fence = threading.Lock()


def fence() -> None:
    """Make earlier writes visible to other processes before later writes. Releasing and taking a lock is a
    memory barrier on every computer, even on processors that reorder stores."""
    for _ in range(2):
        with _fence:
            pass
