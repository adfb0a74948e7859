"""Where the sequences of a DP group are. A sequence is in one of these places:

waiting    not admitted; in order of (priority, arrival)
following  a further choice of a request, until its leader has prefilled the prompt both share
loading    admitted, but part of its cached prefix is still on its way from host DRAM
running    admitted; takes part in steps
leaving    preempted by swap: its blocks are on their way to host DRAM
swapped    there; comes back before anybody is admitted
entering   on its way back
arriving   prefilled elsewhere; waits until there are blocks to receive it
receiving  its blocks are on their way here
sending    prefilled here, for decode elsewhere: only its blocks are left, until they have been received
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from xdeepserve.engine.dp.block_table import Holding
from xdeepserve.engine.dp.sequence import Sequence, Transit


class Queues:
    """The places, and the moves that concern nothing else. Blocks are the scheduler's business."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.in_transit: dict[int, Sequence] = {}  # loading, leaving, entering, receiving ones, by ticket
        self.arriving: list[Sequence] = []
        self.sending: dict[int, Holding] = {}  # by seq_id
        self.following: dict[int, list[Sequence]] = {}  # by their leader's seq_id

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.swapped or self.in_transit or self.arriving)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not running."""
        followers = sum(len(seqs) for seqs in self.following.values())
        queued = len(self.waiting) + len(self.swapped) + len(self.in_transit) + len(self.arriving)
        return queued + followers

    def sequences(self) -> Iterator[Sequence]:
        """All that are not finished, running ones first."""
        yield from self.running
        yield from self.in_transit.values()
        yield from self.swapped
        yield from self.arriving
        yield from self.waiting
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
