"""Where the sequences of a DP group are, each in one place:

    waiting    not admitted; in order of (priority, arrival)
    following  a further choice of a request, until its leader has prefilled the prompt both share
    loading    waits again when RTC has brought part of its cached prefix from host DRAM
    running    admitted; takes part in steps
    leaving    preempted by swap: its blocks are on their way to host DRAM
    swapped    there; comes back before anybody is admitted
    entering   on its way back
    arriving   prefilled elsewhere; waits until there are blocks to receive it
    receiving  its blocks are on their way here
    sending    prefilled here, for decode elsewhere: only its blocks are left, until they have been received

With transfers by layer a sequence is in two groups while its last rows are prefilled: in one it is running,
with its blocks in `sending` as well (`early`); in the other it has only a reservation (`reserved`).

Blocks are the scheduler's business.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import NamedTuple

from xdeepserve.engine.dp.block_table import Holding
from xdeepserve.engine.dp.sequence import Sequence, Transit


class Reservation(NamedTuple):
    """Blocks for a sequence whose prompt is being prefilled elsewhere, layer by layer."""

    seq: Sequence
    holding: Holding


class Queues:
    """The places, and the moves that concern nothing else."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.loading: dict[int, Sequence] = {}  # by RTC's ticket
        self.in_transit: dict[int, Sequence] = {}  # leaving, entering, receiving ones, by ticket
        self.arriving: list[Sequence] = []
        self.sending: dict[int, Holding] = {}  # by seq_id
        self.early: set[int] = set()  # seq_ids
        self.reserved: dict[int, Reservation] = {}  # by ticket
        self.following: dict[int, list[Sequence]] = {}  # by their leader's seq_id

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.swapped or self.arriving or self.has_transfers)

    @property
    def has_transfers(self) -> bool:
        """Somebody goes on when a transfer ends."""
        return bool(self.loading or self.in_transit)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not running."""
        followers = sum(len(seqs) for seqs in self.following.values())
        queues = (self.waiting, self.loading, self.swapped, self.in_transit, self.arriving)
        return sum(map(len, queues)) + followers

    def sequences(self) -> Iterator[Sequence]:
        """All that are not finished, running ones first."""
        yield from self.running
        yield from self.in_transit.values()
        yield from self.swapped
        yield from self.arriving
        yield from self.waiting
        yield from self.loading.values()
        for seqs in self.following.values():
            yield from seqs

    def _wait(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=lambda s: s.rank)

    def _depart(self, seq: Sequence, transit: Transit, ticket: int) -> None:
        seq.transit = transit
        self.in_transit[ticket] = seq

    def _take_out(self, seq: Sequence) -> None:
        """Out of whatever queue it is in; those in transit stay until they arrive."""
        for queue in (self.running, self.waiting, self.swapped, self.arriving, *self.following.values()):
            if seq in queue:
                queue.remove(seq)
        self.loading = {ticket: each for ticket, each in self.loading.items() if each is not seq}
