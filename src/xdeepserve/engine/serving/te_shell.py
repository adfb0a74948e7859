"""The TE-shell: sends each new sequence to a DP group, once (xDeepServe 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.dp.sequence import Sequence


class TEShell:
    """The only part of the engine that sees all DP groups."""

    def __init__(self, groups: Seq[DPGroup]) -> None:
        self.groups = groups
        self._group_of: dict[int, DPGroup] = {}

    def dispatch(self, seqs: Seq[Sequence]) -> None:
        """Send the choices of one request to a DP group, where they share their prompt.

        Decode balance: of the groups with a free place the one with the lowest KV usage; if all are full,
        the one with the fewest sequences. Ties go to fewer sequences, then to the lower rank.
        """
        free = [group for group in self.groups if group.num_free_places > 0]
        if free:
            group = min(free, key=lambda g: (g.rtc.usage, g.num_sequences, g.rank))
        else:
            group = min(self.groups, key=lambda g: (g.num_sequences, g.rank))
        leader = None
        for seq in seqs:
            self._group_of[seq.seq_id] = group
            group.scheduler.add(seq, leader)
            leader = leader or seq

    def remove(self, seq: Sequence) -> None:
        """Abort a sequence wherever it is; its blocks are free on return."""
        group = self._group_of.pop(seq.seq_id, None)
        if group is not None:
            group.scheduler.remove(seq)

    def forget(self, seq: Sequence) -> None:
        """The sequence has finished by itself."""
        self._group_of.pop(seq.seq_id, None)

    @property
    def has_work(self) -> bool:
        return any(group.scheduler.has_work for group in self.groups)

    def sequences(self) -> list[Sequence]:
        """All unfinished sequences, by group."""
        return [seq for group in self.groups for seq in group.scheduler.sequences()]
