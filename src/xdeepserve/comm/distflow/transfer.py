"""One side's view of a transfer between two endpoints, and what the two sides tell each other."""

from __future__ import annotations

from typing import NamedTuple

from ...errors import XDeepServeError
from ...hw.waiting import Waiter
from .protocol import Cause, State, next_state
from .spans import Span


class Completion(NamedTuple):
    """An entry of an endpoint's completion queue: `error` is None if the bytes are where they should be."""

    tag: int
    peer: str
    is_source: bool
    nbytes: int
    at_ns: int
    error: XDeepServeError | None = None


class Message(NamedTuple):
    """What one endpoint tells another about a transfer: kind is a WANT, WITHDRAW, OFFER, DONE or REFUSE.

    `attempt` is the number that the destination has given to its want. The source answers with it, so that
    neither side takes a word about an attempt that has ended for one about the next.
    """

    kind: Cause
    tag: int
    sender: str
    attempt: int
    spans: tuple[Span, ...] = ()
    until_ns: int = 0  # of an OFFER: when the bytes must have been moved
    reason: str = ""


class Transfer:
    """One side of it. `attempt` is the destination's own number, or the one that the source has answered."""

    def __init__(self, tag: int, peer: str, spans: tuple[Span, ...], state: State) -> None:
        self.tag, self.peer, self.spans, self.state = tag, peer, spans, state
        self.attempt = 0
        self.claimed: tuple[Span, ...] = ()  # at the destination: what nobody else may write meanwhile
        self.shared: tuple[Span, ...] = ()  # at the source: what nobody may write meanwhile
        self.offered: tuple[Span, ...] = ()  # at the destination: the source's spans
        self.until_ns = 0  # since the offer: until when the source keeps its bytes for this attempt
        self.error: XDeepServeError | None = None
        self.waiter: Waiter | None = None  # of the process that looks after it

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    def step(self, cause: Cause) -> None:
        """Change state. Whoever waits looks at the new one."""
        self.state = next_state(self.state, cause)
        if self.waiter is not None:
            self.waiter.wake()
