"""An endpoint: one side of the transfers between two groups of nodes, and its completion queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import DeadlineError, DeploymentError, HardwareError, ProtocolError, XDeepServeError
from ...hw.memory import Address
from ...hw.queue import Queue
from ...hw.waiting import Waiter, Waiting
from .protocol import Cause, State, next_state
from .spans import Span, check_alignment, pair

if TYPE_CHECKING:
    from .flow import DistFlow


class Completion(NamedTuple):
    """An entry of an endpoint's completion queue: `error` is None if the bytes are where they should be."""

    tag: int
    peer: str
    is_source: bool
    nbytes: int
    at_ns: int
    error: XDeepServeError | None = None


class Message(NamedTuple):
    """What one endpoint tells another about a transfer: kind is a WANT, OFFER, DONE or REFUSE."""

    kind: Cause
    tag: int
    sender: str
    spans: tuple[Span, ...] = ()
    reason: str = ""


class Transfer:
    """One side's view of a transfer between two endpoints."""

    def __init__(self, tag: int, peer: str, spans: tuple[Span, ...], state: State) -> None:
        self.tag, self.peer, self.spans, self.state = tag, peer, spans, state
        self.waiter: Waiter | None = None

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)

    def step(self, cause: Cause) -> None:
        self.state = next_state(self.state, cause)


class Endpoint:
    """A named group of nodes: say the dies of a DP group. Made by `DistFlow.link_cluster`."""

    def __init__(self, flow: DistFlow, name: str, nodes: tuple[int, ...]) -> None:
        self.flow, self.name, self.nodes = flow, name, nodes
        self._inbox: Queue[Message] = Queue(flow.pod.clock, f"messages of {name}")
        self._completions: list[Completion] = []
        self.on_completion: Callable[[], None] = lambda: None  # tells the owner that it is time to poll
        self._sources: dict[tuple[str, int], Transfer] = {}
        self._destinations: dict[tuple[str, int], Transfer] = {}
        self._early_wants: set[tuple[str, int]] = set()
        self._processes: dict[asyncio.Task[Any], None] = {}
        self._loop = self._spawn(self._serve(), "messages")

    # ---- what the owner calls -----------------------------------------------------------------------

    def send(self, tag: int, peer: str, spans: Sequence[tuple[Address, int]]) -> None:
        """Offer bytes to a peer (step 3). They must stay until the completion says so; nothing moves yet."""
        transfer = self._register(self._sources, tag, peer, spans, State.OFFERED)
        if (peer, tag) in self._early_wants:
            self._early_wants.discard((peer, tag))
            self._answer(transfer)

    def receive(self, tag: int, peer: str, spans: Sequence[tuple[Address, int]]) -> None:
        """Ask for what a peer offers, or will offer, under the same tag (step 6). Returns at once."""
        transfer = self._register(self._destinations, tag, peer, spans, State.WANTED)
        self._spawn(self._pull(transfer), f"receive {tag}")

    def cancel(self, tag: int, peer: str) -> None:
        """Take back an offer that nobody has wanted yet. ProtocolError if it is too late."""
        transfer = self._sources.get((peer, tag))
        if transfer is None:
            raise ProtocolError(f"{self.name} offers nothing to {peer} under tag {tag}")
        transfer.step(Cause.CANCEL)
        del self._sources[peer, tag]

    def poll(self) -> list[Completion]:
        """The completions since the last poll, oldest first (step 8)."""
        done, self._completions = self._completions, []
        return done

    @property
    def num_open(self) -> int:
        """Transfers that have no completion yet."""
        return len(self._sources) + len(self._destinations)

    def stop(self) -> None:
        """End all activity of this endpoint at once, as its failure would. Its peers notice at deadlines."""
        for process in self._processes:
            process.cancel()

    # ---- the two sides ------------------------------------------------------------------------------

    def _register(
        self,
        table: dict[tuple[str, int], Transfer],
        tag: int,
        peer: str,
        pieces: Sequence[tuple[Address, int]],
        state: State,
    ) -> Transfer:
        if peer not in self.flow.endpoints:
            raise DeploymentError(f"{self.name} is not linked to '{peer}'")
        if (peer, tag) in table:
            raise ProtocolError(f"{self.name} and {peer} already have an open transfer with tag {tag}")
        spans = tuple(Span(*piece) for piece in pieces)
        for span in spans:
            if span.address.node not in self.nodes:
                raise HardwareError(
                    f"node {span.address.node} is not one of {self.name}'s {list(self.nodes)}"
                )
            self.flow.pod.memory(span.address.node).check(span.address.offset, span.nbytes)
        # Whether the two sides fit is known when they meet; what is wrong with one of them, now.
        check_alignment("source" if state is State.OFFERED else "destination", spans)
        transfer = table[peer, tag] = Transfer(tag, peer, spans, state)
        return transfer

    def _answer(self, transfer: Transfer) -> None:
        """Step 7 at the source: the destination may pull now."""
        transfer.step(Cause.WANT)
        self._tell(transfer.peer, Message(Cause.OFFER, transfer.tag, self.name, transfer.spans))
        self._spawn(self._await_done(transfer), f"send {transfer.tag}")

    async def _await_done(self, transfer: Transfer) -> None:
        error: XDeepServeError | None = None
        try:
            message = await self._reply(transfer, "send", "done")
        except DeadlineError as late:
            transfer.step(Cause.TIMEOUT)
            error = late
        else:
            transfer.step(message.kind)
            if message.kind is Cause.REFUSE:
                error = ProtocolError(f"send: {transfer.peer} refused tag {transfer.tag}: {message.reason}")
        del self._sources[transfer.peer, transfer.tag]
        self._complete(transfer, True, error)

    async def _pull(self, transfer: Transfer) -> None:
        """Steps 6 and 7 at the destination."""
        self._tell(transfer.peer, Message(Cause.WANT, transfer.tag, self.name))
        error: XDeepServeError | None = None
        try:
            message = await self._reply(transfer, "receive", "offer")
            transfer.step(message.kind)
            try:
                copies = pair(message.spans, transfer.spans)
                await self.flow.backend.move(copies, f"DistFlow {transfer.tag}")
            except XDeepServeError as broken:
                transfer.step(Cause.BROKEN)
                error = broken
                reply = Message(Cause.REFUSE, transfer.tag, self.name, reason=str(broken))
            else:
                transfer.step(Cause.MOVED)
                reply = Message(Cause.DONE, transfer.tag, self.name)
            self._tell(transfer.peer, reply)
        except DeadlineError as late:
            transfer.step(Cause.TIMEOUT)
            error = late
        del self._destinations[transfer.peer, transfer.tag]
        self._complete(transfer, False, error)

    def _complete(self, transfer: Transfer, is_source: bool, error: XDeepServeError | None) -> None:
        now = self.flow.pod.clock.now
        self._completions.append(
            Completion(transfer.tag, transfer.peer, is_source, transfer.nbytes, now, error)
        )
        self.on_completion()

    # ---- messages -----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            message = await self._inbox.get()
            key = message.sender, message.tag
            is_for_source = message.kind in (Cause.WANT, Cause.DONE, Cause.REFUSE)
            transfer = (self._sources if is_for_source else self._destinations).get(key)
            if transfer is None:
                # A want may come before its offer; other words come too late, after a deadline here.
                if message.kind is Cause.WANT:
                    self._early_wants.add(key)
            elif message.kind is Cause.WANT:
                if transfer.state is State.OFFERED:
                    self._answer(transfer)
            elif transfer.waiter is not None:
                transfer.waiter.wake(message)

    def _tell(self, peer: str, message: Message) -> None:
        self.flow.endpoints[peer]._inbox.put(message, delay_ns=self.flow.pod.spec.command_ns())

    async def _reply(self, transfer: Transfer, op: str, word: str) -> Message:
        """Wait for the peer's word on a transfer."""
        clock = self.flow.pod.clock
        field = f"{word} of tag {transfer.tag}"
        transfer.waiter = clock.waiter(
            lambda: Waiting(
                op, self.name, transfer.peer, field, word, f"nothing while {transfer.state.value}"
            )
        )
        message = await clock.wait(transfer.waiter, clock.now + self.flow.timeout_ns)
        assert isinstance(message, Message)
        return message

    def _spawn(self, coro: Any, what: str) -> asyncio.Task[Any]:
        process = self.flow.pod.clock.spawn(coro, name=f"DistFlow {self.name}: {what}")
        self._processes[process] = None
        asyncio.Task.add_done_callback(process, lambda done: self._processes.pop(done, None))
        return process
