"""FIFO queue between processes, or from the outside world into virtual time."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from ..errors import DeadlineError
from .clock import Clock, Waiter, Waiting

Item = TypeVar("Item")


class Queue(Generic[Item]):
    """Unbounded FIFO queue. `put` is a plain function for any caller; `get` is for processes."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._items: deque[tuple[int, Item]] = deque()  # each with the time from which it can be had
        self._getters: deque[Waiter] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item, delay_ns: int = 0) -> None:
        """Add an item to arrive `delay_ns` from now, but never before its predecessor."""
        self._items.append((self._clock.now + delay_ns, item))
        self._wake_next(delay_ns)

    async def get(self, deadline_ns: int | None = None) -> Item:
        """Take the oldest item. Without a deadline the wait is idle: it may last for ever and is no deadlock.

        With a deadline, raises DeadlineError if there is no item by then; an item on its way is waited for.
        """
        while not self._items or self._items[0][0] > self._clock.now:
            if self._items:
                await self._clock.sleep_until(self._items[0][0])
                continue
            waiter = self._clock.waiter(
                lambda: Waiting("get", self._name, "any", "queue", "an item", "empty")
            )
            self._getters.append(waiter)
            try:
                await self._clock.wait(waiter, deadline_ns, idle=deadline_ns is None)
            except BaseException:
                # It may have been woken for an item that it will not take: pass the news on.
                if self._items:
                    self._wake_next()
                raise
        return self._items.popleft()[1]

    def take_now(self) -> Item | None:
        """Take the oldest item if it has arrived; None if `get` would have to wait."""
        if not self._items or self._items[0][0] > self._clock.now:
            return None
        return self._items.popleft()[1]

    def _wake_next(self, delay_ns: int = 0) -> None:
        # Some of those that wait may have been cancelled, or have met their deadline.
        while self._getters and not self._getters.popleft().wake(delay_ns=delay_ns):
            pass


# The CPU of a server, on which the loops of the host run; it may stand still for a while.


class HostCPU:
    """CPU of a server: runs the loops on it at no cost, unless it stalls."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.free_ns = clock, 0

    def stall(self, lasts_ns: int) -> None:
        """Let no loop turn for `lasts_ns`."""
        self.free_ns = max(self.free_ns, self._clock.now + lasts_ns)


class HostQueue(Queue[Item]):
    """Queue for a loop on a server's CPU: no item is noticed while the CPU stalls."""

    def __init__(self, clock: Clock, name: str, cpu: HostCPU) -> None:
        super().__init__(clock, name)
        self._cpu = cpu

    async def get(self, deadline_ns: int | None = None) -> Item:
        """Take the oldest item, as soon as the CPU runs. Raises DeadlineError if there is none by then."""
        try:
            item = await super().get(deadline_ns)
        except DeadlineError:
            if not await self._has_stood_still() or not len(self):
                raise
            return await super().get(self._clock.now)
        await self._has_stood_still()
        return item

    def take_now(self) -> Item | None:
        """Take the oldest item if it has arrived and the CPU runs; None if `get` would have to wait."""
        return super().take_now() if self._cpu.free_ns <= self._clock.now else None

    async def _has_stood_still(self) -> bool:
        """Whether the CPU stalled; if so, wait until it runs again."""
        stands_still = self._cpu.free_ns > self._clock.now
        if stands_still:
            await self._clock.sleep_until(self._cpu.free_ns)
        return stands_still
