"""Deals out what waits at a TE-shell (xDeepServe 4.3): between steps, as soon as the groups are known."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.messages import Wake
from xdeepserve.engine.te.heartbeat import Heartbeats
from xdeepserve.engine.te.life import Lifetime
from xdeepserve.engine.te.shell import TEShell
from xdeepserve.engine.te.status_gather import MAX_REQUESTS, StatusGather
from xdeepserve.hw.queue import Queue


class Dealer:
    """Deals out prefilled sequences at once, and requests if groups may be asked how they are.

    Where statuses are gathered (`gather`) an all-gather is the leader's only way to know the groups. That
    takes its time, which is that of the TE's loop. While the TE moves out no group gets anything.
    """

    def __init__(
        self,
        shell: TEShell,
        health: Heartbeats,
        life: Lifetime,
        te_inbox: Queue[msgspec.Struct],
        gather: StatusGather | None,
    ) -> None:
        self._shell, self._health, self._life = shell, health, life
        self._te_inbox, self._gather = te_inbox, gather
        self._has_called = False
        self.on_turn: Callable[[], None] = lambda: None  # told before each step: there may be room

    def deal(self) -> None:
        """Deal out, when a group has ended a step or has something new. If requests wait for an all-gather,
        the TE's loop is to have one, for all groups that ask before it begins."""
        if self._at_once() and self._gather is not None and not self._has_called:
            self._has_called = True
            self._te_inbox.put(Wake())

    async def assign(self, check: Callable[[], None]) -> None:
        """Within the TE's loop: deal out, after an all-gather if requests wait for one. Then `check` raises
        the error of memory that was lost, since what has been gathered may have lain there."""
        self._has_called = False
        requests = self._at_once()[:MAX_REQUESTS]
        if requests and self._gather is not None:
            known = await self._gather.run(self._health.open_ranks, [seqs[0] for seqs in requests])
            check()
            if not self._life.moves_out:
                self._shell.deal(requests, known)

    def _at_once(self) -> list[list[Sequence]]:
        """Deal out what can be dealt at once. Returns what has waited for prefill, in order of arrival."""
        if self._life.moves_out:
            return []
        self._shell.assign_arrivals()
        requests = self._shell.waiting()
        if requests and self._gather is None:
            self._shell.deal(requests, self._shell.known(requests))
        return requests
