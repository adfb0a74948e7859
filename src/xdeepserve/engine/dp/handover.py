"""Sequences from a prefill TE or to a decode TE: their places and their KV blocks."""

from __future__ import annotations

from xdeepserve.engine.dp import events
from xdeepserve.engine.dp.block_table import Holding
from xdeepserve.engine.dp.events import EventLog, GroupId
from xdeepserve.engine.dp.places import Places
from xdeepserve.engine.dp.preemption import Preemption
from xdeepserve.engine.dp.rtc import RTC
from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.dp.step import PlannedStep
from xdeepserve.errors import XDeepServeError


class Handover:
    """Moves sequences of a DP group from prefill to decode in its books; other code moves the bytes.

    sending    blocks that are kept, and read, for decode elsewhere, by seq_id: of sequences that are sending,
               and by layer of running ones
    reserved   blocks that are written while the prompt is prefilled elsewhere, of the sequences at that place
    """

    def __init__(
        self, rtc: RTC, places: Places, preemption: Preemption, group: GroupId, tell: EventLog
    ) -> None:
        self.rtc, self.places, self.preemption, self.group, self.tell = rtc, places, preemption, group, tell
        self.sending: dict[int, Holding] = {}
        self.reserved: dict[int, Holding] = {}

    # ---- from prefill -------------------------------------------------------------------------------

    def arrive(self, seq: Sequence) -> None:
        """Take over a sequence prefilled elsewhere. Its blocks are received when there is room."""
        self.places.move(seq, "arrive")

    def receive(self, step: PlannedStep) -> None:
        """Let prefilled sequences in, in order, while there is room for their blocks plus one."""
        while self.places.arriving and self.preemption.num_free_places > 0:
            seq = self.places.arriving[0]
            needed = self.rtc.blocks_for(seq.num_computed) + self.preemption.has_company
            if self.rtc.num_available < needed:
                return
            ticket = self.rtc.receive(seq.holding, seq.num_computed)
            self.places.move(seq, "receive", ticket)
            step.receives.append(seq)

    def reserve(self, seq: Sequence, num_tokens: int) -> int | None:
        """Reserve blocks for `num_tokens` positions, to be written from now on, and return the transfer's
        ticket.

        Returns None if there is no room, or if other sequences wait for it: then this one comes when it has
        been prefilled, and waits its turn. May be called at any moment, because it takes no block that a step
        uses.
        """
        places = self.places
        if places.waiting or places.swapped or places.arriving or self.preemption.num_free_places <= 0:
            return None
        if self.rtc.num_available < self.rtc.blocks_for(num_tokens) + self.preemption.has_company:
            return None
        holding = self.reserved[seq.seq_id] = Holding()
        ticket = self.rtc.receive(holding, num_tokens)
        places.move(seq, "reserve", ticket)
        return ticket

    def take_over(self, seq: Sequence) -> None:
        """Turn a reservation into an ordinary transfer: the sequence has been prefilled elsewhere."""
        seq.holding = self.reserved.pop(seq.seq_id)
        self.places.move(seq, "take over", self.places.ticket_of(seq.seq_id))

    def awaits(self, seq: Sequence) -> bool:
        """Whether blocks of a sequence are still to come here."""
        return self.places.of(seq) in ("arriving", "reserved", "receiving")

    def drop(self, seq: Sequence) -> None:
        """Forget an expected sequence because it will not come by this way, and free the blocks reserved for
        it. The caller has made sure that nothing writes them any more."""
        place = self.places.of(seq)
        if place in ("reserved", "receiving"):
            self.rtc.finish(self.places.ticket_of(seq.seq_id))
            self.rtc.free(self.reserved.pop(seq.seq_id) if place == "reserved" else seq.holding)
        if place == "receiving":
            seq.leave_blocks()
        if place != "elsewhere":
            self.places.move(seq, "get lost")

    # ---- to decode ----------------------------------------------------------------------------------

    def send_early(self, seq: Sequence, num_tokens: int) -> None:
        """Keep the blocks of a running sequence's first `num_tokens` positions for sending, from now on.

        The blocks get a second user. So the sequence does not free them when it ends, nor replace them by
        cached blocks with the same content.
        """
        self.sending[seq.seq_id] = self.rtc.fork(seq.holding, self.rtc.blocks_for(num_tokens))

    def stop_early(self, seq_id: int) -> None:
        """Free the blocks kept by `send_early`: the sequence's layers will not be sent early after all."""
        self.rtc.free(self.sending.pop(seq_id))

    def withdraw(self, seq: Sequence) -> None:
        """End a running sequence while its layers are on their way. Its blocks stay until they are
        released."""
        self.places.move(seq, "withdraw")
        self.tell(events.Withdrawn(seq.seq_id, self.group))

    def send(self, seq: Sequence) -> None:
        """Move a prefilled sequence to "sending": only its blocks stay, until they have been received."""
        self.places.move(seq, "prefill")
        if seq.seq_id in self.sending:
            self.rtc.free(seq.holding)
        else:
            self.sending[seq.seq_id] = seq.holding
            seq.leave_blocks()
        self.tell(events.Prefilled(seq.seq_id, self.group))

    def release(self, seq_id: int) -> None:
        """Free the blocks of a sequence that was prefilled here: they were received, or are not wanted any
        more."""
        holding = self.sending.pop(seq_id, None)
        if holding is not None:
            self.rtc.free(holding)
            for seq in [seq for seq in self.places.sending if seq.seq_id == seq_id]:
                self.places.move(seq, "release")
            self.tell(events.Released(seq_id, self.group))

    # ---- both ---------------------------------------------------------------------------------------

    def holdings(self) -> list[Holding]:
        """List the KV blocks kept or reserved for transfers, beside those that sequences of this group
        hold."""
        return [*self.sending.values(), *self.reserved.values()]

    def check_integrity(self) -> None:
        """Check for whom blocks are held: kept for sending or running sequences, reserved for reserved
        ones."""
        reserved = {seq.seq_id for seq in self.places.reserved}
        running = {seq.seq_id for seq in self.places.running}
        sending = {seq.seq_id for seq in self.places.sending}
        if set(self.reserved) != reserved or set(self.sending) - running != sending:
            kept = f"blocks are reserved for {[*self.reserved]} and kept for {[*self.sending]}"
            raise XDeepServeError(f"handover: {kept}, at these places are {reserved} and {sending}")
