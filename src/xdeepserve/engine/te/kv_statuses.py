"""KV usage of DP groups as a TE-shell knows it when it picks one to decode (xDeepServe 4.3).

"It updates the pending request count on dispatch and completion, and collects periodic KV cache stats." So
the number of a group's sequences is always current, and its use of KV blocks is as the group last sent it.
Groups send between steps, as soon as the period has passed. There is no timer, because a pod without work has
nothing to do: the blocks of a group without sequences are known to be free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from xdeepserve.engine.balance.dp import GroupStatus
from xdeepserve.engine.dp.group import DPGroup


class KVStatuses:
    """Latest status sent by each DP group; with a period of 0, statuses are always current."""

    def __init__(self, groups: Sequence[DPGroup], period_ns: int, now: Callable[[], int]) -> None:
        self._groups, self._period_ns, self._now = groups, period_ns, now
        self._sent: dict[int, tuple[int, GroupStatus]] = {}  # when, and what, by rank

    def collect(self) -> None:
        """Take new statuses, between steps, from DP groups whose period has passed."""
        if not self._period_ns:
            return
        now = self._now()
        for group in self._groups:
            sent = self._sent.get(group.rank)
            if sent is None or now - sent[0] >= self._period_ns:
                self._sent[group.rank] = now, group.status()

    def of(self, rank: int) -> GroupStatus:
        """Return the status of a DP group: its current number of sequences, and KV usage as last sent."""
        group, sent = self._groups[rank], self._sent.get(rank)
        status = group.status()
        if not self._period_ns or sent is None or not status.num_sequences:
            return status
        return msgspec.structs.replace(
            status,
            num_used_blocks=sent[1].num_used_blocks,
            num_reserved_blocks=sent[1].num_reserved_blocks,
            num_promised_blocks=sent[1].num_promised_blocks,
        )
