"""The side of a transfer that has the bytes: it offers them, and keeps them until the other side is done."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.comm.distflow.party import Party, Table
from xdeepserve.comm.distflow.rules import FINAL, Cause, State
from xdeepserve.comm.distflow.transfer import Message, Transfer
from xdeepserve.errors import DeadlineError, ProtocolError
from xdeepserve.hw.memory import Address


class Source(Party):
    """What the owner of the bytes calls, and the words of destinations."""

    _sources: Table
    _early_wants: dict[tuple[str, int], int]  # by peer and tag, the peer's attempt

    def send(self, tag: int, peer: str, spans: Sequence[tuple[Address, int]]) -> None:
        """Offer bytes to a peer (step 3). They must stay until the completion says so; nothing moves yet.

        The completion is an error if the peer does not want them within the flow's `offer_timeout_ns`, or has
        not got them all within `timeout_ns` after that.
        """
        self._offer(tag, peer, [spans], 1)

    def send_in_parts(self, tag: int, peer: str, parts: Sequence[Sequence[tuple[Address, int]]]) -> None:
        """`send` bytes that are not all there yet: a part is pulled when `ready` has told of it.

        A part may be empty. There is one completion, when the last one has been pulled. It is an error if a
        further part is not ready within the flow's `part_timeout_ns`.
        """
        self._offer(tag, peer, parts, 0)

    def ready(self, tag: int, peer: str, num_parts: int) -> None:
        """The first `num_parts` parts of what is offered are there, and will not change.

        Nothing happens if the transfer has ended: its completion says how.
        """
        transfer = self._sources.get((peer, tag))
        if transfer is None or transfer.is_revoked:
            return
        if not transfer.num_ready <= num_parts <= len(transfer.parts):
            raise ProtocolError(
                f"{self.name} has {transfer.num_ready} of {len(transfer.parts)} parts of tag {tag} ready: "
                f"not {num_parts}"
            )
        transfer.ready_ns += [self.flow.pod.clock.now] * (num_parts - transfer.num_ready)
        transfer.num_ready = num_parts
        if transfer.state is State.SENDING:
            transfer.step(Cause.READY)
            self._tell_ready(transfer, Cause.READY)

    def revoke(self, tag: int, peer: str) -> None:
        """There will be no more parts, and nobody wants those that were ready.

        Both sides have completions when nothing is moving any more. Nothing happens if all are ready, or the
        transfer has ended: its completion comes, or has come.
        """
        transfer = self._sources.get((peer, tag))
        if transfer is None or transfer.is_all_ready or transfer.is_revoked:
            return
        transfer.is_revoked = True
        if transfer.state is State.SENDING:
            self._tell_revoked(transfer)

    def cancel(self, tag: int, peer: str) -> None:
        """Take back an offer that nobody has wanted yet. ProtocolError if it is too late."""
        transfer = self._sources.get((peer, tag))
        if transfer is None:
            raise ProtocolError(f"{self.name} offers nothing to {peer} under tag {tag}")
        transfer.step(Cause.CANCEL)
        del self._sources[peer, tag]
        self._release(transfer)

    def abort_send(self, tag: int, peer: str) -> bool:
        """Give an offer up at whatever point it is, since the peer's side is known to have failed.

        The bytes are the owner's again at once. There is no completion: one of a failure that has not been
        polled is taken back. False, and nothing happens, if the transfer has ended well.
        """
        return self._abort(self._sources, tag, peer, is_source=True)

    def _offer(
        self, tag: int, peer: str, parts: Sequence[Sequence[tuple[Address, int]]], num_ready: int
    ) -> None:
        transfer = self._register(self._sources, tag, peer, parts, State.OFFERED)
        self.flow.share(transfer.spans, self._reader(tag))
        transfer.shared, transfer.num_ready = transfer.spans, num_ready
        transfer.ready_ns = [self.flow.pod.clock.now] * num_ready
        self._sources[peer, tag] = transfer
        transfer.process = self._spawn(self._push(transfer), f"send {tag}")
        self._answer(transfer)

    def _answer(self, transfer: Transfer) -> None:
        """Step 7 at the source: if the destination wants what is offered, it may pull now."""
        attempt = self._early_wants.pop((transfer.peer, transfer.tag), None)
        if attempt is not None:
            transfer.attempt = attempt
            transfer.step(Cause.WANT)
            if transfer.is_revoked:
                self._tell_revoked(transfer)
            else:
                self._tell_ready(transfer, Cause.OFFER)

    def _tell_ready(self, transfer: Transfer, kind: Cause) -> None:
        """What may be pulled, and by when it must have been."""
        transfer.until_ns = self.flow.pod.clock.now + self.flow.timeout_ns
        parts = transfer.parts if kind is Cause.OFFER else ()
        self._tell(
            transfer.peer,
            Message(
                kind, transfer.tag, self.name, transfer.attempt, parts, transfer.num_ready, transfer.until_ns
            ),
        )

    def _tell_revoked(self, transfer: Transfer) -> None:
        transfer.until_ns = self.flow.pod.clock.now + self.flow.timeout_ns
        transfer.step(Cause.REVOKE)
        self._tell(transfer.peer, Message(Cause.REVOKE, transfer.tag, self.name, transfer.attempt))

    async def _push(self, transfer: Transfer) -> None:
        """Steps 3, 7 and 8 at the source: messages change its state, which must not last too long."""
        clock, deadline_ns = self.flow.pod.clock, None
        while transfer.state not in FINAL:
            if transfer.state is State.OFFERED:
                timeout_ns = self.flow.offer_timeout_ns
                word, deadline_ns = "want", None if timeout_ns is None else clock.now + timeout_ns
            elif transfer.state is State.SENDING and not transfer.is_all_ready:
                word, deadline_ns = "further part", clock.now + self.flow.part_timeout_ns
            else:
                # A destination that has moved all in time succeeds, so its word has the time to come, too.
                word = "done" if transfer.state is State.SENDING else "stopped"
                deadline_ns = transfer.until_ns + 2 * self.flow.pod.spec.command_ns()
            try:
                await self._change(transfer, "send", word, deadline_ns)
            except DeadlineError as late:
                transfer.error = late
                transfer.step(Cause.TIMEOUT)
        if transfer.state is not State.CANCELLED:
            del self._sources[transfer.peer, transfer.tag]
            self._release(transfer)
            self._complete(transfer, True)

    def _serve_source(self, key: tuple[str, int], message: Message) -> None:
        """A word from a destination. What comes after a deadline here is about nothing, and ignored."""
        source = self._sources.get(key)
        is_current = (
            source is not None
            and source.state in (State.SENDING, State.REVOKED)
            and source.attempt == message.attempt
        )
        if message.kind is Cause.WANT:
            # It may come before its offer, or before the end of the attempt that it follows.
            self._early_wants[key] = message.attempt
        elif message.kind is Cause.WITHDRAW and self._early_wants.get(key) == message.attempt:
            del self._early_wants[key]
        elif source is not None and is_current:
            if message.kind is Cause.REFUSE:
                source.error = ProtocolError(
                    f"send: {message.sender} refused tag {message.tag}: {message.reason}"
                )
                source.error.__cause__ = message.reason
            source.step(message.kind)
        if source is not None and source.state is State.OFFERED:
            self._answer(source)
