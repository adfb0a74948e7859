"""A FIFO between processes, or from the outside world into virtual time."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from .clock import Clock, Waiter, Waiting

Item = TypeVar("Item")


class Queue(Generic[Item]):
    """Unbounded FIFO. `put` is a plain function that anybody may call; `get` is for processes.

    Items go to getters in the order in which both came.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._items: deque[Item] = deque()
        self._getters: deque[Waiter] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item, delay_ns: int = 0) -> None:
        """Add an item; a getter that waits resumes `delay_ns` later."""
        # A getter may have been cancelled, or its deadline may have passed: then the next one takes the item.
        while self._getters:
            if self._getters.popleft().wake(delay_ns=delay_ns):
                break
        self._items.append(item)

    async def get(self, deadline_ns: int | None = None, *, idle: bool = True) -> Item:
        """The oldest item. By default the wait is idle: it may last for ever and is no deadlock."""
        while not self._items:
            waiter = self._clock.waiter(
                lambda: Waiting("get", self._name, "any", "queue", "an item", "empty"),
            )
            self._getters.append(waiter)
            await self._clock.wait(waiter, deadline_ns, idle=idle and deadline_ns is None)
        return self._items.popleft()
