"""The CPU of a server, on which the loops of the host run; it may stand still for a while."""

from __future__ import annotations

from typing import TypeVar

from ..errors import DeadlineError
from .clock import Clock
from .queue import Queue

Item = TypeVar("Item")


class HostCPU:
    """Runs whatever loops turn on it, at no cost, unless it stalls."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.free_ns = clock, 0

    def stall(self, lasts_ns: int) -> None:
        """No loop turns for so long."""
        self.free_ns = max(self.free_ns, self._clock.now + lasts_ns)


class HostQueue(Queue[Item]):
    """What a loop on a server's CPU waits for: it hears of nothing while that stands still."""

    def __init__(self, clock: Clock, name: str, cpu: HostCPU) -> None:
        super().__init__(clock, name)
        self._cpu = cpu

    async def get(self, deadline_ns: int | None = None) -> Item:
        """The oldest item, as soon as somebody looks; DeadlineError if there is none then."""
        try:
            item = await super().get(deadline_ns)
        except DeadlineError:
            if not await self._has_stood_still() or not len(self):
                raise
            return await super().get(self._clock.now)
        await self._has_stood_still()
        return item

    async def _has_stood_still(self) -> bool:
        """Whether nobody could look; on return somebody can."""
        stands_still = self._cpu.free_ns > self._clock.now
        if stands_still:
            await self._clock.sleep_until(self._cpu.free_ns)
        return stands_still
