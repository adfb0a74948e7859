"""Tracks the awake loops of DP groups, and wakes resting ones (dataflow)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.messages import Wake
from xdeepserve.engine.numbers import GroupRank
from xdeepserve.hw.queue import Queue


class Awake:
    """Knows the awake loops of `groups`; `inboxes` belong to these loops, `te_inbox` to the TE's loop.

    Without `inboxes` DP groups have no loops of their own: the TE's loop hears of new work, and of room, by
    itself.
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
        """Wake the loop of a DP group; without a group, wake the loops of all groups with work."""
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
        """Mark a DP group's loop as awake.

        If all loops were resting, the TE's loop is told that there is something to watch again. While all
        rest, it waits for other events and with another deadline.
        """
        if not self._ranks:
            self._te_inbox.put(Wake())
        self._ranks.add(rank)

    def rest(self, rank: GroupRank) -> None:
        """Mark a DP group's loop as resting, since nothing can run there."""
        self._ranks.discard(rank)

    def end(self, rank: GroupRank) -> None:
        """Never wake a DP group's loop again, because it ends."""
        self._over.add(rank)
