"""An endpoint: the transfers of one group of nodes, as their source and as their destination."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdeepserve.comm.distflow.destination import Destination
from xdeepserve.comm.distflow.rules import Cause
from xdeepserve.comm.distflow.source import Source

if TYPE_CHECKING:
    from xdeepserve.comm.distflow.flow import DistFlow


class Endpoint(Source, Destination):
    """A named group of nodes: say the dies of a DP group. Made by `DistFlow.link_cluster`."""

    def __init__(self, flow: DistFlow, name: str, nodes: tuple[int, ...]) -> None:
        super().__init__(flow, name, nodes)
        self._sources, self._destinations, self._early_wants = {}, {}, {}
        self._num_attempts, self.is_stopped = 0, False
        self._loop = self._spawn(self._serve(), "messages")

    @property
    def num_open(self) -> int:
        """Transfers that have no completion yet."""
        return len(self._sources) + len(self._destinations)

    def stop(self) -> None:
        """End all activity of this endpoint at once, as its failure would. Its peers notice at deadlines."""
        self.is_stopped = True
        for process in self._processes:
            process.cancel()
        for transfer in (*self._sources.values(), *self._destinations.values()):
            self._release(transfer)

    async def _serve(self) -> None:
        while True:
            message = await self._inbox.get()
            key = message.sender, message.tag
            if message.kind in (Cause.OFFER, Cause.READY, Cause.REVOKE):
                destination = self._destinations.get(key)
                # One for an earlier attempt comes too late: its want has been withdrawn.
                if destination is not None and destination.attempt == message.attempt:
                    self._serve_destination(destination, message)
            else:
                self._serve_source(key, message)
