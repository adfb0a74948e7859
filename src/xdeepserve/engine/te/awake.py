"""Which loops of DP groups do not rest, and how those that do are woken (dataflow)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import Wake
from xdeepserve.engine.numbers import GroupRank
from xdeepserve.hw.queue import Queue


class Awake:
    """The loops of `groups` that are awake. `inboxes` are theirs, `te_inbox` that of the TE's loop.

    Without `inboxes` groups have no loops of their own: the TE's hears of work, and of room, by itself.
    """

    def __init__(
        self,
        groups: Sequence[DPGroup],
        inboxes: Sequence[Queue[msgspec.Struct]],
        te_inbox: Queue[msgspec.Struct],
    ) -> None:
        self._groups, self._inboxes, self._te_inbox = groups, inboxes, te_inbox
        self._ranks = {group.rank for group in groups} if inboxes else set()
        self._over: set[GroupRank] = set()  # ranks whose loops end

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def wake(self, group: DPGroup | None = None) -> None:
        """Have the loop of a group look for something new, or those of all groups that have something."""
        if not self._inboxes:
            return
        for each in self._groups if group is None else (group,):
            is_resting = each.rank not in self._ranks and each.rank not in self._over
            if is_resting and (group is not None or not each.is_empty):
                self.rise(each.rank)
                self._inboxes[each.rank].put(Wake())

    def wake_all(self) -> None:
        """Tell every loop, the TE's too, that there is new work, or room for what could not run."""
        self.wake()
        self._te_inbox.put(Wake())

    def rise(self, rank: GroupRank) -> None:
        """Note that a loop rests no more.

        If all rested, the TE's loop hears that there is something to watch again: at rest it waits for other
        things, and until another time.
        """
        if not self._ranks:
            self._te_inbox.put(Wake())
        self._ranks.add(rank)

    def rest(self, rank: GroupRank) -> None:
        """Note that a loop has nothing that it can do."""
        self._ranks.discard(rank)

    def end(self, rank: GroupRank) -> None:
        """Wake a loop no more: it ends."""
        self._over.add(rank)
