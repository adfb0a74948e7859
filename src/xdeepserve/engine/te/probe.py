"""Probes: dies that have nothing to do are asked whether they are there (xDeepServe 6.1)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from xdeepserve.engine.dp.group import DPGroup
from xdeepserve.engine.te.heartbeat import Heartbeats


class Prober:
    """Asks a TE's groups whether they are there; `wake` makes its loop look at the deadline."""

    def __init__(self, groups: Sequence[DPGroup], health: Heartbeats, wake: Callable[[], None]) -> None:
        self.groups, self.health, self._wake = groups, health, wake
        self._num_out = Counter[int]()  # answers that are missing, by group
        self._answered: asyncio.Event | None = None  # set when none is
        self._is_over = False  # nobody answers any more

    def send(self, rank: int) -> None:
        """Ask all dies of a group."""
        num_dies = len(self.groups[rank].dies)
        self.groups[rank].probe()
        self.health.ask(rank, num_dies)
        self._num_out[rank] += num_dies

    def hear(self, rank: int) -> None:
        """One of them has answered."""
        self.health.hear(rank)
        self._num_out[rank] -= 1
        if not self._num_out.total():
            self._release()

    def give_up(self, rank: int) -> None:
        """A group answers no more."""
        if self._num_out.pop(rank, 0) and not self._num_out.total():
            self._release()

    async def ask_all(self) -> None:
        """If the TE rests, ask all its dies, and wait for the answers, or for the TE's end.

        If it works, it hears of its dies anyway.
        """
        ranks = [rank for rank in range(len(self.groups)) if not self.health.is_given_up(rank)]
        if self._is_over or any(map(self.health.is_due, ranks)):
            return
        self._answered = asyncio.Event()
        for rank in ranks:
            self.send(rank)
        self._wake()
        await self._answered.wait()

    def ask_again(self) -> None:
        """Ask groups that have not been heard of for a while: they may be well again."""
        due = [rank for rank in range(len(self.groups)) if self.health.wants_probe(rank)]
        if self._is_over or not due:
            return
        for rank in due:
            self.send(rank)
        self._wake()

    def end(self) -> None:
        """Nobody will answer any more: whoever waits goes on."""
        self._is_over = True
        self._release()

    def _release(self) -> None:
        if self._answered is not None:
            self._answered.set()
            self._answered = None
