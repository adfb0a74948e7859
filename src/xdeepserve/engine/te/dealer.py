"""Deals requests waiting at a TE-shell out to DP groups, between steps (xDeepServe 4.3)."""

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
    """Deals out prefilled sequences at once, and new requests as soon as the DP groups' statuses are known.

    Where statuses are gathered (`gather`) an all-gather is the leader's only way to know the groups. It runs
    in the TE's loop and takes virtual time. While the TE moves out no group gets anything.
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
        """Deal out waiting work after a group has ended a step or has something new.

        If requests wait for an all-gather, the TE's loop is asked for one; it serves all groups that ask
        before it begins.
        """
        if self._at_once() and self._gather is not None and not self._has_called:
            self._has_called = True
            self._te_inbox.put(Wake())

    async def assign(self, check: Callable[[], None]) -> None:
        """Deal out waiting work from the TE's loop, after an all-gather if requests wait for one.

        `check` then raises the error of lost memory, since the gathered statuses may have been in it.
        """
        self._has_called = False
        requests = self._at_once()[:MAX_REQUESTS]
        if requests and self._gather is not None:
            known = await self._gather.run(self._health.open_ranks, [seqs[0] for seqs in requests])
            check()
            if not self._life.moves_out:
                self._shell.deal(requests, known)

    def _at_once(self) -> list[list[Sequence]]:
        """Deal out whatever needs no all-gather; return the requests waiting for prefill, in order of
        arrival."""
        if self._life.moves_out:
            return []
        self._shell.assign_arrivals()
        requests = self._shell.waiting()
        if requests and self._gather is None:
            self._shell.deal(requests, self._shell.known(requests))
        return requests
