"""Deals out what waits at a TE-shell (xDeepServe 4.3): between steps, as soon as the groups are known."""

from __future__ import annotations

from collections.abc import Callable

from xdeepserve.engine.dp.sequence import Sequence
from xdeepserve.engine.te.shell import TEShell
from xdeepserve.engine.te.status_gather import MAX_REQUESTS, StatusGather


class Dealer:
    """Deals out prefilled sequences at once, and requests if groups may be asked how they are.

    With a `gather` an all-gather is the leader's only way to know the groups. That takes its time, which is
    the TE's loop's: `call` has it come by. While the TE `moves_out` nobody gets anything.
    """

    def __init__(
        self,
        shell: TEShell,
        gather: StatusGather | None,
        call: Callable[[], None],
        moves_out: Callable[[], bool],
    ) -> None:
        self._shell, self._gather, self._call, self._moves_out = shell, gather, call, moves_out
        self._has_called = False

    def deal(self) -> None:
        """A step has ended, or there is something new: deal out. If requests wait for an all-gather, there is
        to be one, and one for all who ask before it begins."""
        if self._at_once() and self._gather is not None and not self._has_called:
            self._has_called = True
            self._call()

    async def assign(self) -> None:
        """Within the TE's loop: deal out, after an all-gather if requests wait for one."""
        self._has_called = False
        requests = self._at_once()[:MAX_REQUESTS]
        if requests and self._gather is not None:
            known = await self._gather.run(self._shell.health.open_ranks, [seqs[0] for seqs in requests])
            if not self._moves_out():
                self._shell.deal(requests, known)

    def _at_once(self) -> list[list[Sequence]]:
        """What had waited for prefill before that which can be dealt out at once was, in order of arrival."""
        if self._moves_out():
            return []
        self._shell.assign_arrivals()
        requests = self._shell.waiting()
        if requests and self._gather is None:
            self._shell.deal(requests, self._shell.known(requests))
        return requests
