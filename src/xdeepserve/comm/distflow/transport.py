"""Common parts of the endpoints of a DistFlow instance: backend, deadlines, spans in use, and inboxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdeepserve.comm.distflow.backends import Backend
from xdeepserve.comm.distflow.spans import Span
from xdeepserve.comm.distflow.transfer import Message
from xdeepserve.errors import AddressError, HardwareError, XDeepServeError
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.pod import Pod
from xdeepserve.hw.queue import Queue


@dataclass(frozen=True)
class Transport:
    """Moves copies by a backend, keeps spans in use apart, and knows the deadlines of both sides."""

    pod: Pod
    backend: Backend
    timeout_ns: int
    offer_timeout_ns: int | None
    part_timeout_ns: int
    inboxes: dict[str, Queue[Message]] = field(default_factory=dict)  # of the endpoints that are linked

    async def move(self, copies: Sequence[Copy], name: str) -> None:
        """Let the backend move copies. Errors other than XDeepServeError become a HardwareError that names
        the backend."""
        try:
            await self.backend.move(copies, name)
        except XDeepServeError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise HardwareError(f"{name}: the backend '{self.backend.name}' failed: {what}") from error

    def claim(self, spans: Sequence[Span], who: str) -> None:
        """Claim all bytes of `spans` for writing. Raises AddressError, with none claimed, if another transfer
        writes or reads one."""
        for done, span in enumerate(spans):
            try:
                self.pod.memory(span.address.node).claims.take(span.address.offset, span.nbytes, who)
            except AddressError:
                self.release(spans[:done])
                raise

    def release(self, spans: Sequence[Span]) -> None:
        """Give back spans taken by `claim`."""
        for span in spans:
            self.pod.memory(span.address.node).claims.release(span.address.offset)

    def share(self, spans: Sequence[Span], who: str) -> None:
        """Share all bytes of `spans` for reading. Raises AddressError, with none shared, if another transfer
        will write one."""
        for done, span in enumerate(spans):
            try:
                self.pod.memory(span.address.node).claims.share(span.address.offset, span.nbytes, who)
            except AddressError:
                self.unshare(spans[:done], who)
                raise

    def unshare(self, spans: Sequence[Span], who: str) -> None:
        """Give back spans taken by `share`."""
        for span in spans:
            self.pod.memory(span.address.node).claims.unshare(span.address.offset, span.nbytes, who)
