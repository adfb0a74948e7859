"""Endpoint of DistFlow: the transfers of a group of nodes, as their source and as their destination.

A source offers bytes and keeps them until the other side is done. A destination asks for them when it has
room, and pulls them. The states of both are in `rules`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from xdeepserve.comm.distflow.rules import FINAL, Cause, State
from xdeepserve.comm.distflow.spans import check_overlaps, cut, pair, spans_of
from xdeepserve.comm.distflow.transfer import Completion, Message, MovedParts, Transfer
from xdeepserve.comm.distflow.transport import Transport
from xdeepserve.errors import (
    DeadlineError,
    DeploymentError,
    HardwareError,
    ProtocolError,
    XDeepServeError,
    as_named,
)
from xdeepserve.hw.clock import Hears, Waiting
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address
from xdeepserve.hw.queue import Queue

Table = dict[tuple[str, int], Transfer]  # open transfers by peer and tag


class Endpoint:
    """Named group of nodes, such as the dies of a DP group. Made by `DistFlow.link_cluster`."""

    def __init__(self, transport: Transport, name: str, nodes: tuple[int, ...]) -> None:
        self.transport, self.pod, self.name, self.nodes = transport, transport.pod, name, nodes
        self.inbox: Queue[Message] = Queue(self.pod.clock, f"messages of {name}")
        self._completions: list[Completion] = []
        self.on_completion: Callable[[], None] = lambda: None  # tells the owner that it is time to poll
        self._processes: dict[asyncio.Task[Any], None] = {}
        self.sources: Table = {}
        self.destinations: Table = {}
        self.early_wants: dict[tuple[str, int], int] = {}  # by peer and tag, the peer's attempt
        self._num_attempts, self.is_stopped = 0, False
        transport.inboxes[name] = self.inbox
        self._detach(self._serve(), "messages")

    def poll(self) -> list[Completion]:
        """Return the completions since the last poll, oldest first (step 8)."""
        done, self._completions = self._completions, []
        return done

    @property
    def num_open(self) -> int:
        """Number of transfers without a completion so far."""
        return len(self.sources) + len(self.destinations)

    def stop(self) -> None:
        """End all activity of the endpoint at once, as its failure would. Peers notice at deadlines."""
        self.is_stopped = True
        for process in self._processes:
            process.cancel()
        for transfer in (*self.sources.values(), *self.destinations.values()):
            self._release(transfer)

    # ---- as a source ------------------------------------------------------------------------------------

    def send(self, tag: int, peer: str, spans: Sequence[tuple[Address, int]]) -> None:
        """Offer bytes to a peer (step 3). They must stay until the completion says so; nothing moves yet.

        The completion is an error if the peer does not want them within the flow's `offer_timeout_ns`, or has
        not got them all within `timeout_ns` after that.
        """
        self._offer(tag, peer, [spans], 1)

    def send_in_parts(self, tag: int, peer: str, parts: Sequence[Sequence[tuple[Address, int]]]) -> None:
        """Offer bytes like `send`, in parts that get ready one by one: a part is pulled after `ready` has
        told of it.

        A part may be empty. There is one completion, when the last part has been pulled. It is an error if a
        further part is not ready within the flow's `part_timeout_ns`.
        """
        self._offer(tag, peer, parts, 0)

    def ready(self, tag: int, peer: str, num_parts: int) -> None:
        """Declare the first `num_parts` parts of an offer ready: they are there and will not change.

        Nothing happens if the transfer has ended: its completion says how.
        """
        transfer = self.sources.get((peer, tag))
        if transfer is None or transfer.is_revoked:
            return
        if not transfer.num_ready <= num_parts <= len(transfer.parts):
            raise ProtocolError(
                f"{self.name} has {transfer.num_ready} of {len(transfer.parts)} parts of tag {tag} ready: "
                f"not {num_parts}"
            )
        transfer.ready_ns += [self.pod.clock.now] * (num_parts - transfer.num_ready)
        transfer.num_ready = num_parts
        if transfer.state is State.SENDING:
            transfer.step(Cause.READY)
            self._tell_ready(transfer, Cause.READY)

    def revoke(self, tag: int, peer: str) -> None:
        """End an offer in parts: no more parts will come, and those not yet pulled are not wanted.

        Both sides have completions when nothing is moving any more. Nothing happens if all are ready, or the
        transfer has ended: its completion comes, or has come.
        """
        transfer = self.sources.get((peer, tag))
        if transfer is None or transfer.is_all_ready or transfer.is_revoked:
            return
        transfer.is_revoked = True
        if transfer.state is State.SENDING:
            self._tell_revoked(transfer)

    def cancel(self, tag: int, peer: str) -> None:
        """Take back an offer not yet wanted by the peer. Raises ProtocolError if it is too late."""
        transfer = self.sources.get((peer, tag))
        if transfer is None:
            raise ProtocolError(f"{self.name} offers nothing to {peer} under tag {tag}")
        transfer.step(Cause.CANCEL)
        del self.sources[peer, tag]
        self._release(transfer)

    def abort_send(self, tag: int, peer: str) -> bool:
        """Give up an offer at any point, because the peer's side is known to have failed.

        The bytes are the owner's again at once. There is no completion: an error completion that has not been
        polled is taken back. Returns False, with nothing changed, if the transfer has ended well.
        """
        return self._abort(self.sources, tag, peer, is_source=True)

    def _offer(
        self, tag: int, peer: str, parts: Sequence[Sequence[tuple[Address, int]]], num_ready: int
    ) -> None:
        transfer = self._register(self.sources, tag, peer, parts, State.OFFERED)
        self.transport.share(transfer.spans, self._reader(tag))
        transfer.shared, transfer.num_ready = transfer.spans, num_ready
        transfer.ready_ns = [self.pod.clock.now] * num_ready
        self.sources[peer, tag] = transfer
        transfer.process = self._detach(
            self._push(transfer), f"send {tag}", partial(self._fail, transfer, True)
        )
        self._answer(transfer)

    def _answer(self, transfer: Transfer) -> None:
        """Step 7 at the source: if the destination already wants the offer, allow the pull now."""
        attempt = self.early_wants.pop((transfer.peer, transfer.tag), None)
        if attempt is not None:
            transfer.attempt = attempt
            transfer.step(Cause.WANT)
            if transfer.is_revoked:
                self._tell_revoked(transfer)
            else:
                self._tell_ready(transfer, Cause.OFFER)

    def _tell_ready(self, transfer: Transfer, kind: Cause) -> None:
        """Tell the destination how many parts may be pulled, and by when."""
        transfer.until_ns = self.pod.clock.now + self.transport.timeout_ns
        parts = transfer.parts if kind is Cause.OFFER else ()
        self._tell(
            transfer.peer,
            Message(
                kind, transfer.tag, self.name, transfer.attempt, parts, transfer.num_ready, transfer.until_ns
            ),
        )

    def _tell_revoked(self, transfer: Transfer) -> None:
        transfer.until_ns = self.pod.clock.now + self.transport.timeout_ns
        transfer.step(Cause.REVOKE)
        self._tell(transfer.peer, Message(Cause.REVOKE, transfer.tag, self.name, transfer.attempt))

    async def _push(self, transfer: Transfer) -> None:
        """Steps 3, 7 and 8 at the source: messages change the transfer's state, within deadlines."""
        clock, deadline_ns = self.pod.clock, None
        while transfer.state not in FINAL:
            if transfer.state is State.OFFERED:
                timeout_ns = self.transport.offer_timeout_ns
                word, deadline_ns = "want", None if timeout_ns is None else clock.now + timeout_ns
            elif transfer.state is State.SENDING and not transfer.is_all_ready:
                word, deadline_ns = "further part", clock.now + self.transport.part_timeout_ns
            else:
                # A destination that has moved all in time succeeds, so its word has the time to come, too.
                word = "done" if transfer.state is State.SENDING else "stopped"
                deadline_ns = transfer.until_ns + 2 * self.pod.spec.command_ns()
            try:
                await self._change(transfer, "send", word, deadline_ns)
            except DeadlineError as late:
                transfer.error = late
                transfer.step(Cause.TIMEOUT)
        if transfer.state is not State.CANCELLED:
            del self.sources[transfer.peer, transfer.tag]
            self._release(transfer)
            self._complete(transfer, True)

    def _serve_source(self, key: tuple[str, int], message: Message) -> None:
        """Handle a destination's message at the source. Messages after a deadline here are ignored."""
        source = self.sources.get(key)
        is_current = (
            source is not None
            and source.state in (State.SENDING, State.REVOKED)
            and source.attempt == message.attempt
        )
        if message.kind is Cause.WANT:
            # It may come before its offer, or before the end of the attempt that it follows.
            self.early_wants[key] = message.attempt
        elif message.kind is Cause.WITHDRAW and self.early_wants.get(key) == message.attempt:
            del self.early_wants[key]
        elif source is not None and is_current:
            if message.kind is Cause.REFUSE:
                source.error = ProtocolError(
                    f"send: {message.sender} refused tag {message.tag}: {message.reason}"
                )
                source.error.__cause__ = message.reason
            source.step(message.kind)
        if source is not None and source.state is State.OFFERED:
            self._answer(source)

    # ---- as a destination -------------------------------------------------------------------------------

    def receive(self, tag: int, peer: str, spans: Sequence[tuple[Address, int]]) -> None:
        """Ask for bytes offered by a peer, now or later, under the same tag (step 6). Returns at once.

        The completion is an error if the peer does not offer it within `timeout_ns`; it may be asked again.
        It is also an error if the bytes come so late that the peer may have given up keeping them.
        """
        transfer = self._register(self.destinations, tag, peer, [spans], State.WANTED)
        check_overlaps((), transfer.spans)
        self.transport.claim(transfer.spans, f"receive {tag} of {self.name}")
        transfer.claimed = transfer.spans
        self._num_attempts += 1
        transfer.attempt = self._num_attempts
        self.destinations[peer, tag] = transfer
        transfer.process = self._detach(
            self._pull(transfer), f"receive {tag}", partial(self._fail, transfer, False)
        )

    def abort_receive(self, tag: int, peer: str) -> bool:
        """Give up a receive at any point, because the peer's side is known to have failed.

        Nothing is written from now on, so the room is the owner's again at once. There is no completion: an
        error completion that has not been polled is taken back. Returns False, with nothing changed, if all
        the bytes have come.
        """
        transfer = self.destinations.get((peer, tag))
        if transfer is not None:  # the peer's side has ended; if it has not seen the want yet, it shall not
            self._tell(peer, Message(Cause.WITHDRAW, tag, self.name, transfer.attempt))
        return self._abort(self.destinations, tag, peer, is_source=False)

    async def _pull(self, transfer: Transfer) -> None:
        """Steps 6 and 7 at the destination: ask for the bytes, wait for the offer, and pull them."""
        self._tell(transfer.peer, Message(Cause.WANT, transfer.tag, self.name, transfer.attempt))
        reason: XDeepServeError | None = None
        try:
            deadline_ns = self.pod.clock.now + self.transport.timeout_ns
            await self._change(transfer, "receive", "offer", deadline_ns)
        except DeadlineError as late:
            transfer.error = late
            transfer.step(Cause.TIMEOUT)
            reply = Cause.WITHDRAW
        else:
            reply = Cause.STOPPED
            if transfer.state is not State.STOPPED:  # an offer may have come, and been revoked, at one time
                reply, reason = await self._move(transfer)
        self._release(transfer)
        self._tell(transfer.peer, Message(reply, transfer.tag, self.name, transfer.attempt, reason=reason))
        del self.destinations[transfer.peer, transfer.tag]
        self._complete(transfer, False)

    async def _move(self, transfer: Transfer) -> tuple[Cause, XDeepServeError | None]:
        """Pull the offered parts as they get ready; return the word for the source, and its reason."""
        clock, num_parts, num_moved = self.pod.clock, len(transfer.offered), 0
        try:
            offered = [span for part in transfer.offered for span in part]
            copies = cut(
                pair(offered, transfer.spans), [sum(s.nbytes for s in part) for part in transfer.offered]
            )
            while num_moved < num_parts and transfer.state is State.MOVING:
                if num_moved == transfer.num_ready:
                    deadline_ns = clock.now + self.transport.part_timeout_ns
                    await self._change(transfer, "receive", "further part", deadline_ns)
                    continue
                ready = range(num_moved, transfer.num_ready)
                batch = [copy for part in ready for copy in copies[part]]
                if batch:
                    began_ns = clock.now
                    await self._move_in_time(transfer, batch)
                    parts = tuple(part for part in ready if copies[part])
                    transfer.moves.append(MovedParts(parts, began_ns, clock.now))
                num_moved = ready.stop
        except Exception as error:
            transfer.error = as_named(error, f"{self.name}: ")
            transfer.step(Cause.BROKEN)
            return Cause.REFUSE, transfer.error
        is_whole = transfer.state is State.MOVING
        transfer.step(Cause.MOVED)
        return (Cause.DONE if is_whole else Cause.STOPPED), None

    async def _move_in_time(self, transfer: Transfer, copies: Sequence[Copy]) -> None:
        """Move copies before the source's deadline. A move that takes longer is stopped, because the source
        may have changed the bytes since.

        The deadline moves when further parts get ready, perhaps while these are moving.
        """
        clock = self.pod.clock
        moving = clock.spawn(self.transport.move(copies, name := f"DistFlow {transfer.tag}"), name=name)
        try:
            while not moving.done():
                try:
                    await clock.join(moving, transfer.until_ns + 1)
                except DeadlineError:
                    if moving.done():
                        raise  # the backend's own
                    if clock.now > transfer.until_ns:
                        raise self._late(transfer) from None
            moving.result()
        finally:
            moving.cancel()

    def _late(self, transfer: Transfer) -> DeadlineError:
        return DeadlineError(
            op="receive",
            rank=self.name,
            peer=transfer.peer,
            field=f"bytes of tag {transfer.tag}",
            expected=f"all by {transfer.until_ns} ns",
            seen="some on their way",
            at_ns=self.pod.clock.now,
        )

    def _serve_destination(self, destination: Transfer, message: Message) -> None:
        """Handle a source's message at the destination. After a failure here it comes too late, and the
        source learns of that."""
        if destination.state in FINAL:
            return
        if destination.state is State.WANTED and message.kind is Cause.READY:
            return  # the offer has been lost on its way, as this one's deadline will tell
        if message.kind is Cause.OFFER:
            destination.offered = message.parts
        if message.kind is not Cause.REVOKE:
            destination.num_ready, destination.until_ns = message.num_ready, message.until_ns
        destination.step(message.kind)

    # ---- as either --------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            message = await self.inbox.get()
            key = message.sender, message.tag
            if message.kind in (Cause.OFFER, Cause.READY, Cause.REVOKE):
                destination = self.destinations.get(key)
                # One for an earlier attempt comes too late: its want has been withdrawn.
                if destination is not None and destination.attempt == message.attempt:
                    self._serve_destination(destination, message)
            else:
                self._serve_source(key, message)

    def _register(
        self,
        table: Table,
        tag: int,
        peer: str,
        parts: Sequence[Sequence[tuple[Address, int]]],
        state: State,
    ) -> Transfer:
        """Make a transfer for `table`, and check this side. Whether both sides fit is known when they
        meet."""
        if peer not in self.transport.inboxes:
            raise DeploymentError(f"{self.name} is not linked to '{peer}'")
        if (peer, tag) in table:
            raise ProtocolError(f"{self.name} and {peer} already have an open transfer with tag {tag}")
        side = "source" if state is State.OFFERED else "destination"
        transfer = Transfer(tag, peer, tuple(spans_of(side, pieces) for pieces in parts), state)
        for span in transfer.spans:
            if span.address.node not in self.nodes:
                raise HardwareError(
                    f"node {span.address.node} is not one of {self.name}'s {list(self.nodes)}"
                )
            self.pod.memory(span.address.node).check(span.address.offset, span.nbytes)
        return transfer

    def _release(self, transfer: Transfer) -> None:
        self.transport.release(transfer.claimed)
        self.transport.unshare(transfer.shared, self._reader(transfer.tag))
        transfer.claimed = transfer.shared = ()

    def _reader(self, tag: int) -> str:
        return f"send {tag} of {self.name}"

    def _complete(self, transfer: Transfer, is_source: bool) -> None:
        now = self.pod.clock.now
        self._completions.append(
            Completion(
                transfer.tag,
                transfer.peer,
                is_source,
                transfer.nbytes,
                now,
                transfer.error,
                is_revoked=transfer.state is State.STOPPED,
                ready_ns=tuple(transfer.ready_ns),
                moves=tuple(transfer.moves),
            )
        )
        self.on_completion()

    def _tell(self, peer: str, message: Message) -> None:
        self.transport.inboxes[peer].put(message, delay_ns=self.pod.spec.command_ns())

    def _abort(self, table: Table, tag: int, peer: str, is_source: bool) -> bool:
        """End a side of a transfer at once, without a completion. Returns False if the transfer has already
        ended well."""
        transfer = table.pop((peer, tag), None)
        if transfer is not None:
            assert transfer.process is not None
            transfer.process.cancel()
            self._release(transfer)
            return True
        failed = [
            done
            for done in self._completions
            if (done.tag, done.peer, done.is_source) == (tag, peer, is_source) and done.error is not None
        ]
        self._completions = [done for done in self._completions if done not in failed]
        return bool(failed)

    async def _change(self, transfer: Transfer, op: str, word: str, deadline_ns: int | None) -> None:
        """Wait until a message from the peer, or a call of the owner, has changed the state of a transfer."""
        clock = self.pod.clock
        field = f"{word} of tag {transfer.tag}"
        transfer.waiter = clock.waiter(
            lambda: Waiting(
                op, self.name, transfer.peer, field, word, f"nothing while {transfer.state.value}"
            )
        )
        await clock.wait(transfer.waiter, deadline_ns, idle=deadline_ns is None)

    def _fail(self, transfer: Transfer, is_source: bool, error: Exception) -> None:
        """Complete a side of a transfer whose process has ended early; the peer notices at a deadline."""
        table = self.sources if is_source else self.destinations
        if table.pop((transfer.peer, transfer.tag), None) is not None:
            self._release(transfer)
        transfer.error = as_named(error, f"{self.name}: ")
        self._complete(transfer, is_source)

    def _detach(self, coro: Any, what: str, hears: Hears | None = None) -> asyncio.Task[Any]:
        process = self.pod.clock.detach(coro, f"DistFlow {self.name}: {what}", hears)
        self._processes[process] = None
        asyncio.Task.add_done_callback(process, lambda done: self._processes.pop(done, None))
        return process
