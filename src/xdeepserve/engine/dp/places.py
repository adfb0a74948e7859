"""Where the sequences of a DP group are, each in one place, and by which causes they move (`PLACES`).

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
    """The places of one DP group, each with a list in its own order. Only `move` changes anything."""

    def __init__(self) -> None:
        self._place: dict[int, Place] = {}  # by seq_id
        self._at: dict[Place, list[Sequence]] = {place: [] for place in get_args(Place)[1:]}
        self.tickets: dict[int, Sequence] = {}  # whom the end of a transfer concerns
        at = self._at
        self.waiting, self.running, self.following = at["waiting"], at["running"], at["following"]
        self.swapped, self.leaving = at["swapped"], at["leaving"]
        self.arriving, self.reserved, self.sending = at["arriving"], at["reserved"], at["sending"]

    def of(self, seq: Sequence) -> Place:
        """Where a sequence is."""
        return self._place.get(seq.seq_id, "elsewhere")

    def move(self, seq: Sequence, cause: str, ticket: int | None = None) -> None:
        """Take a sequence to where `cause` leads from where it is; with a `ticket` to an `ON_TICKET` one.

        ProtocolError, naming the sequence, its place and the cause, if that leads nowhere.
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
        """The ticket that a sequence waits for."""
        return next(ticket for ticket, seq in self.tickets.items() if seq.seq_id == seq_id)

    def on_ticket(self, *places: Place) -> list[Sequence]:
        """Who is in one of these places, which are `ON_TICKET`, in the order in which they came there."""
        return [seq for seq in self.tickets.values() if self.of(seq) in places]

    @property
    def num_in_transit(self) -> int:
        return sum(len(self._at[place]) for place in IN_TRANSIT)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.swapped or self.arriving or self.has_transfers)

    @property
    def has_transfers(self) -> bool:
        """Somebody goes on when a transfer ends."""
        return len(self.tickets) > len(self.reserved)

    @property
    def is_empty(self) -> bool:
        """Nobody is here, or keeps blocks here."""
        return not self._place

    @property
    def num_placed(self) -> int:
        """Sequences that are at any place."""
        return len(self._place)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not running."""
        return len(self._place) - len(self.running) - len(self.reserved) - len(self.sending)

    def sequences(self) -> Iterator[Sequence]:
        """All that are not finished, running ones first. None that is prefilled elsewhere, or that has been
        prefilled here for elsewhere."""
        yield from self.running
        yield from self.on_ticket(*IN_TRANSIT)
        yield from self.swapped
        yield from self.arriving
        yield from self.waiting
        yield from self.on_ticket("loading")
        yield from self.following

    def check_integrity(self) -> None:
        """Every sequence is in the list of its place alone; tickets are of those who wait for one."""
        found = {seq.seq_id: place for place, seqs in self._at.items() for seq in seqs}
        if found != self._place or sum(map(len, self._at.values())) != len(found):
            raise XDeepServeError(f"places: sequences are in {found}, and should be in {self._place}")
        tickets = sorted(seq.seq_id for seq in self.tickets.values())
        if tickets != sorted(seq_id for seq_id, place in found.items() if place in ON_TICKET):
            raise XDeepServeError(f"places: tickets are of {tickets}, and sequences in {found}")
