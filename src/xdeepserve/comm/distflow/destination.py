"""The side of a transfer that wants the bytes: it asks for them when it has room, and pulls them."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.comm.distflow.party import Party, Table
from xdeepserve.comm.distflow.rules import FINAL, Cause, State
from xdeepserve.comm.distflow.spans import check_overlaps, cut, pair
from xdeepserve.comm.distflow.transfer import Message, MovedParts, Transfer
from xdeepserve.errors import DeadlineError, XDeepServeError
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address


class Destination(Party):
    """What the owner of the room calls, and the words of sources."""

    _destinations: Table
    _num_attempts: int

    def receive(self, tag: int, peer: str, spans: Sequence[tuple[Address, int]]) -> None:
        """Ask for what a peer offers, or will offer, under the same tag (step 6). Returns at once.

        The completion is an error if the peer does not offer it within `timeout_ns`; it may be asked again.
        It is one, too, if the bytes come so late that the peer may have given up keeping them.
        """
        transfer = self._register(self._destinations, tag, peer, [spans], State.WANTED)
        check_overlaps((), transfer.spans)
        self.flow.claim(transfer.spans, f"receive {tag} of {self.name}")
        transfer.claimed = transfer.spans
        self._num_attempts += 1
        transfer.attempt = self._num_attempts
        self._destinations[peer, tag] = transfer
        transfer.process = self._spawn(self._pull(transfer), f"receive {tag}")

    def abort_receive(self, tag: int, peer: str) -> bool:
        """Do without what a peer offers, at whatever point it is, since the peer's side has failed.

        Nothing is written from now on, so the room is the owner's again at once. There is no completion: one
        of a failure that has not been polled is taken back. False, and nothing happens, if all the bytes have
        come.
        """
        transfer = self._destinations.get((peer, tag))
        if transfer is not None:  # the peer's side has ended; if it has not seen the want yet, it shall not
            self._tell(peer, Message(Cause.WITHDRAW, tag, self.name, transfer.attempt))
        return self._abort(self._destinations, tag, peer, is_source=False)

    async def _pull(self, transfer: Transfer) -> None:
        """Steps 6 and 7 at the destination."""
        self._tell(transfer.peer, Message(Cause.WANT, transfer.tag, self.name, transfer.attempt))
        reason: XDeepServeError | None = None
        try:
            deadline_ns = self.flow.pod.clock.now + self.flow.timeout_ns
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
        del self._destinations[transfer.peer, transfer.tag]
        self._complete(transfer, False)

    async def _move(self, transfer: Transfer) -> tuple[Cause, XDeepServeError | None]:
        """Pull what is offered, part by part as they are ready; the word for the source, and its reason."""
        clock, num_parts, num_moved = self.flow.pod.clock, len(transfer.offered), 0
        try:
            offered = [span for part in transfer.offered for span in part]
            copies = cut(
                pair(offered, transfer.spans), [sum(s.nbytes for s in part) for part in transfer.offered]
            )
            while num_moved < num_parts and transfer.state is State.MOVING:
                if num_moved == transfer.num_ready:
                    deadline_ns = clock.now + self.flow.part_timeout_ns
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
        except XDeepServeError as broken:
            transfer.error = broken
            transfer.step(Cause.BROKEN)
            return Cause.REFUSE, broken
        is_whole = transfer.state is State.MOVING
        transfer.step(Cause.MOVED)
        return (Cause.DONE if is_whole else Cause.STOPPED), None

    async def _move_in_time(self, transfer: Transfer, copies: Sequence[Copy]) -> None:
        """Bytes that come later than the source has promised to keep them may be others. So a move that takes
        longer is stopped, and with it one that would never end.

        The promise is renewed when further parts are ready, perhaps while these are moving.
        """
        clock = self.flow.pod.clock
        moving = clock.spawn(self.flow.move(copies, name := f"DistFlow {transfer.tag}"), name=name)
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
            at_ns=self.flow.pod.clock.now,
        )

    def _serve_destination(self, destination: Transfer, message: Message) -> None:
        """A word from a source. After a failure here it comes too late: the source learns of that."""
        if destination.state in FINAL:
            return
        if destination.state is State.WANTED and message.kind is Cause.READY:
            return  # the offer has been lost on its way, as this one's deadline will tell
        if message.kind is Cause.OFFER:
            destination.offered = message.parts
        if message.kind is not Cause.REVOKE:
            destination.num_ready, destination.until_ns = message.num_ready, message.until_ns
        destination.step(message.kind)
