"""Probes: asks idle dies whether they still answer (xDeepServe 6.1)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.numbers import GroupRank
from xdeepserve.engine.te.heartbeat import Heartbeats


class Prober:
    """Asks a TE's DP groups whether they still answer; `wake` makes the TE's loop look at the deadline."""

    def __init__(self, groups: Sequence[DPGroup], health: Heartbeats, wake: Callable[[], None]) -> None:
        self.groups, self.health, self._wake = groups, health, wake
        self._num_out = Counter[GroupRank]()  # answers that are missing, by group
        self._answered: asyncio.Event | None = None  # set when none is
        self._is_over = False  # nobody answers any more

    def send(self, group: GroupRank) -> None:
        """Send a probe to all dies of a DP group."""
        num_dies = len(self.groups[group].dies)
        self.groups[group].probe()
        self.health.ask(group, num_dies)
        self._num_out[group] += num_dies

    def hear(self, group: GroupRank) -> None:
        """Note an answer to a probe from a die of a DP group."""
        self.health.hear(group)
        self._num_out[group] -= 1
        if not self._num_out.total():
            self._release()

    def forget(self, group: GroupRank) -> None:
        """Expect no more answers from a DP group that has been given up."""
        if self._num_out.pop(group, 0) and not self._num_out.total():
            self._release()

    async def ask_all(self) -> None:
        """Probe all dies of an idle TE, and wait for the answers or for the TE's end.

        A TE that works hears of its dies anyway.
        """
        ranks = [each.rank for each in self.groups if not self.health.is_given_up(each.rank)]
        if self._is_over or any(map(self.health.is_due, ranks)):
            return
        self._answered = asyncio.Event()
        for group in ranks:
            self.send(group)
        self._wake()
        await self._answered.wait()

    def ask_again(self) -> None:
        """Probe DP groups not heard of for a while, since they may be well again."""
        due = [each.rank for each in self.groups if self.health.wants_probe(each.rank)]
        if self._is_over or not due:
            return
        for group in due:
            self.send(group)
        self._wake()

    def end(self) -> None:
        """Send no more probes, and release callers that wait for answers."""
        self._is_over = True
        self._release()

    def _release(self) -> None:
        if self._answered is not None:
            self._answered.set()
            self._answered = None
