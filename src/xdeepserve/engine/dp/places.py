"""Places of sequences in a DP group: each sequence has one, and causes move it (`PLACES`).

With transfers by layer a sequence is in two groups while its last rows are prefilled: running in one, where
its blocks are being sent, and reserved in the other. What happens to blocks is the scheduler's business.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Literal, TypeAlias, get_args

from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.errors import XDeepServeError
from xdeepserve.machine import follow

Place: TypeAlias = Literal[
    "elsewhere",  # not, not yet or no more in this group
    "waiting",  # not admitted; in order of (priority, arrival)
    "following",  # a further choice of a request, until its leader has prefilled the prompt both share
    "loading",  # waits again when RTC has brought part of its cached prefix from host DRAM
    "running",  # admitted; takes part in steps; in order of admission
    "leaving",  # preempted by swap: its blocks are on their way to host DRAM
    "swapped",  # there; comes back, in order of (priority, arrival), before anybody is admitted
    "entering",  # on its way back
    "arriving",  # prefilled elsewhere; waits until there are blocks to receive it
    "reserved",  # being prefilled elsewhere; its blocks here are written layer by layer
    "receiving",  # its blocks are on their way here
    "sending",  # prefilled here: only its blocks are left, until they have been received elsewhere
]
PLACES: dict[tuple[Place, str], Place] = {
    ("elsewhere", "add"): "waiting",
    ("elsewhere", "follow"): "following",
    ("following", "lead on"): "waiting",  # its leader has prefilled, or has ended before
    ("waiting", "load"): "loading",
    ("loading", "find"): "waiting",  # what has been loaded, on admission
    ("waiting", "admit"): "running",
    # When blocks run out.
    ("running", "recompute"): "waiting",
    ("running", "swap out"): "leaving",
    ("leaving", "be moved"): "swapped",
    ("swapped", "swap in"): "entering",
    ("entering", "be moved"): "running",
    # Its blocks were lost on the way.
    ("leaving", "recompute"): "waiting",
    ("entering", "recompute"): "waiting",
    ("receiving", "recompute"): "waiting",
    # From a prefill TE.
    ("elsewhere", "arrive"): "arriving",
    ("arriving", "receive"): "receiving",
    ("elsewhere", "reserve"): "reserved",
    ("reserved", "take over"): "receiving",  # its prompt has been prefilled
    ("receiving", "be moved"): "running",
    ("arriving", "get lost"): "elsewhere",  # its blocks do not come, or not this way
    ("reserved", "get lost"): "elsewhere",
    ("receiving", "get lost"): "elsewhere",
    # To a decode TE.
    ("running", "prefill"): "sending",
    ("running", "withdraw"): "sending",  # its request has ended while its layers were on their way
    ("sending", "release"): "elsewhere",
    # Its TE is leaving.
    ("waiting", "move out"): "elsewhere",
    ("following", "move out"): "elsewhere",
    ("running", "move out"): "elsewhere",
    ("swapped", "move out"): "elsewhere",
    # The request has ended. What is on its way ends there when it has arrived.
    ("waiting", "end"): "elsewhere",
    ("following", "end"): "elsewhere",
    ("loading", "end"): "elsewhere",
    ("running", "end"): "elsewhere",
    ("swapped", "end"): "elsewhere",
    ("arriving", "end"): "elsewhere",
    ("leaving", "end"): "elsewhere",
    ("entering", "end"): "elsewhere",
    ("receiving", "end"): "elsewhere",
}
BY_RANK: tuple[Place, ...] = ("waiting", "swapped")
IN_TRANSIT: tuple[Place, ...] = ("leaving", "entering", "receiving")
ON_TICKET: tuple[Place, ...] = (
    "loading",
    "reserved",
    *IN_TRANSIT,
)  # until RTC's transfer of this ticket has ended


class Places:
    """Tracks where each sequence of one DP group is, with a list per place. Only `move` changes it."""

    def __init__(self) -> None:
        self._place: dict[int, Place] = {}  # by seq_id
        self._at: dict[Place, list[Sequence]] = {place: [] for place in get_args(Place)[1:]}
        self.tickets: dict[int, Sequence] = {}  # whom the end of a transfer concerns
        at = self._at
        self.waiting, self.running, self.following = at["waiting"], at["running"], at["following"]
        self.swapped, self.leaving = at["swapped"], at["leaving"]
        self.arriving, self.reserved, self.sending = at["arriving"], at["reserved"], at["sending"]

    def of(self, seq: Sequence) -> Place:
        """Return the place of a sequence."""
        return self._place.get(seq.seq_id, "elsewhere")

    def move(self, seq: Sequence, cause: str, ticket: int | None = None) -> None:
        """Move a sequence to where `cause` leads from its place; an `ON_TICKET` place also needs a `ticket`.

        Raises ProtocolError, naming the sequence, its place and the cause, if that leads nowhere.
        """
        place = self.of(seq)
        target = follow(PLACES, place, cause, lambda: f"sequence {seq.seq_id} cannot {cause}: it is {place}")
        if place != "elsewhere":
            self._at[place].remove(seq)
        if place in ON_TICKET:
            del self.tickets[self.ticket_of(seq.seq_id)]
        if target == "elsewhere":
            del self._place[seq.seq_id]
            return
        self._place[seq.seq_id] = target
        if target in ON_TICKET:
            assert ticket is not None
            self.tickets[ticket] = seq
        if target in BY_RANK:
            insort(self._at[target], seq, key=lambda s: s.rank)
        else:
            self._at[target].append(seq)

    def ticket_of(self, seq_id: int) -> int:
        """Return the ticket of the transfer for which a sequence waits."""
        return next(ticket for ticket, seq in self.tickets.items() if seq.seq_id == seq_id)

    def on_ticket(self, *places: Place) -> list[Sequence]:
        """List the sequences at some of the `ON_TICKET` places, in the order in which they came there."""
        return [seq for seq in self.tickets.values() if self.of(seq) in places]

    @property
    def num_in_transit(self) -> int:
        at = self._at
        return len(at["leaving"]) + len(at["entering"]) + len(at["receiving"])

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.swapped or self.arriving or self.has_transfers)

    @property
    def has_transfers(self) -> bool:
        """Whether some sequence goes on when a transfer ends."""
        return len(self.tickets) > len(self.reserved)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is in this DP group, and none keeps KV blocks in it."""
        return not self._place

    @property
    def num_placed(self) -> int:
        """Number of sequences at any place of this DP group."""
        return len(self._place)

    @property
    def num_waiting(self) -> int:
        """Number of sequences here except those that are running, reserved or sending."""
        return len(self._place) - len(self.running) - len(self.reserved) - len(self.sending)

    def sequences(self) -> Iterator[Sequence]:
        """Iterate over all unfinished sequences, running ones first. Those at "reserved" or "sending" are
        left out."""
        yield from self.running
        yield from self.on_ticket(*IN_TRANSIT)
        yield from self.swapped
        yield from self.arriving
        yield from self.waiting
        yield from self.on_ticket("loading")
        yield from self.following

    def check_integrity(self) -> None:
        """Check the lists and tickets: a sequence is in the list of its place alone, with a ticket where
        needed."""
        found = {seq.seq_id: place for place, seqs in self._at.items() for seq in seqs}
        if found != self._place or sum(map(len, self._at.values())) != len(found):
            raise XDeepServeError(f"places: sequences are in {found}, and should be in {self._place}")
        tickets = sorted(seq.seq_id for seq in self.tickets.values())
        if tickets != sorted(seq_id for seq_id, place in found.items() if place in ON_TICKET):
            raise XDeepServeError(f"places: tickets are of {tickets}, and sequences in {found}")
