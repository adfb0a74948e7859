"""Deals out what waits at a TE-shell (xDeepServe 4.3): between steps, as soon as the groups are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.messages import Wake
from xdeepserve.engine.te.status_gather import MAX_REQUESTS, StatusGather

if TYPE_CHECKING:
    from xdeepserve.engine.te.te import TE


class Dealer:
    """Deals out prefilled sequences at once, and requests if groups may be asked how they are.

    Where statuses are gathered an all-gather is the leader's only way to know the groups. That takes its
    time, which is that of the TE's loop. While the TE moves out nobody gets anything.
    """

    def __init__(self, te: TE) -> None:
        self._te, self._gather = te, None
        if te.plan.gathers_statuses:
            self._gather = StatusGather(te.groups, te.sizes.walk.timeout_ns)
        self._has_called = False

    def deal(self) -> None:
        """A group has ended a step, or has something new: deal out. If requests wait for an all-gather, the
        TE's loop is to have one, for all groups that ask before it begins."""
        if self._at_once() and self._gather is not None and not self._has_called:
            self._has_called = True
            self._te.inbox.put(Wake())

    async def assign(self) -> None:
        """Within the TE's loop: deal out, after an all-gather if requests wait for one."""
        te = self._te
        self._has_called = False
        requests = self._at_once()[:MAX_REQUESTS]
        if requests and self._gather is not None:
            known = await self._gather.run(te.health.open_ranks, [seqs[0] for seqs in requests])
            te.check_memory()  # what has been gathered may be what a page holds that was lost
            if not te.moves_out:
                te.te_shell.deal(requests, known)

    def _at_once(self) -> list[list[Sequence]]:
        """Deal out what can be dealt at once; what had waited for prefill, in order of arrival."""
        te = self._te
        if te.moves_out:
            return []
        te.te_shell.assign_arrivals()
        requests = te.te_shell.waiting()
        if requests and self._gather is None:
            te.te_shell.deal(requests, te.te_shell.known(requests))
        return requests
