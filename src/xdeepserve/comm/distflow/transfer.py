"""A transfer between two endpoints as seen from a side, and the messages between the two."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, TypeAlias

from xdeepserve.comm.distflow.rules import Cause, State, transfer
from xdeepserve.comm.distflow.spans import Span
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.clock import Waiter

Parts: TypeAlias = tuple[tuple[Span, ...], ...]


class MovedParts(NamedTuple):
    """Parts of a transfer moved together, and when."""

    parts: tuple[int, ...]
    start_ns: int
    end_ns: int


class Completion(NamedTuple):
    """Entry of an endpoint's completion queue. `error` is None if the bytes are in place, or if the source
    has revoked the parts that were not ready (`is_revoked`).

    ready_ns: at the source, since when each part could go. moves: at the destination, when they went.
    """

    tag: int
    peer: str
    is_source: bool
    nbytes: int
    at_ns: int
    error: XDeepServeError | None = None
    is_revoked: bool = False
    ready_ns: tuple[int, ...] = ()
    moves: tuple[MovedParts, ...] = ()


class Message(NamedTuple):
    """Message about a transfer from an endpoint to its peer.

    kind is a WANT, WITHDRAW, DONE, REFUSE or STOPPED of the destination, an OFFER, READY or REVOKE of the
    source. `attempt` is the number that the destination has given to its want. The source repeats it in its
    answers, so that neither side mixes up an ended attempt and the next.
    """

    kind: Cause
    tag: int
    sender: str
    attempt: int
    parts: Parts = ()
    num_ready: int = 0  # of an OFFER or READY: how many parts may be pulled
    until_ns: int = 0  # and by when those must have been
    reason: XDeepServeError | None = None  # of a REFUSE


class Transfer:
    """Side of a transfer, at the source or at the destination.

    `attempt` is the destination's own number, or the one that the source has answered.
    """

    def __init__(self, tag: int, peer: str, parts: Parts, state: State) -> None:
        self.tag, self.peer, self.parts, self._machine = tag, peer, parts, transfer(state)
        self.attempt = 0
        self.num_ready = 0  # parts of the source that may be pulled
        self.is_revoked = False  # at the source: there will be no more
        self.claimed: tuple[Span, ...] = ()  # at the destination: what nobody else may write meanwhile
        self.shared: tuple[Span, ...] = ()  # at the source: what nobody may write meanwhile
        self.offered: Parts = ()  # at the destination: the source's parts
        self.until_ns = 0  # since the offer: until when the source keeps what is ready for this attempt
        self.error: XDeepServeError | None = None
        self.ready_ns: list[int] = []  # of the source's parts
        self.moves: list[MovedParts] = []
        self.waiter: Waiter | None = None  # of the process that looks after it
        self.process: asyncio.Task[Any] | None = None

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(span for part in self.parts for span in part)

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    @property
    def is_all_ready(self) -> bool:
        """Whether no further parts are to come, at the source."""
        return self.num_ready == len(self.parts)

    def step(self, cause: Cause) -> None:
        """Change the state, and wake the process waiting for a change."""
        self._machine.move(cause)
        if self.waiter is not None:
            self.waiter.wake()
