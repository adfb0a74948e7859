"""One wait of one process: who waits for what, and the one event that may end it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .clock import Clock, Process

LAPSED = -1


class Waiting(NamedTuple):
    """What a wait is for; the words of its error if it fails."""

    op: str
    rank: object
    peer: object
    field: str
    expected: object
    seen: object


class Waiter:
    """One wait of one process. Whoever ends it calls `wake` or `fail`; the first call counts.

    `describe` is called only if the wait fails, so what it reports is what was seen at that moment.
    """

    __slots__ = (
        *("_clock", "_ending", "_error", "_future", "_is_interrupted", "_process", "_tie", "_value"),
        "describe",
    )

    def __init__(self, clock: Clock, describe: Callable[[], Waiting]) -> None:
        self._clock = clock
        self._future: asyncio.Future[None] | None = None
        self._process: Process | None = None
        self._tie = LAPSED  # key of its only live event in the heap
        self._ending = self._is_interrupted = False
        self._value: Any = None
        self._error: BaseException | None = None
        self.describe = describe

    def wake(self, value: Any = None, delay_ns: int = 0) -> bool:
        """End the wait at now + delay with `value`. False if it had already been ended."""
        if self._ending:
            return False
        self._ending = True
        self._value = value
        self._clock._push(self._clock._now + delay_ns, self)
        return True

    def fail(self, error: BaseException, delay_ns: int = 0) -> bool:
        """End the wait at now + delay by raising `error` in the waiting process."""
        if not self.wake(None, delay_ns):
            return False
        self._error = error
        return True

    def _unpark(self) -> None:
        """Make its process runnable; its other events lapse."""
        self._tie = LAPSED
        self._ending = True
        if self._process is not None:
            self._process.waiter = None
            self._process = None
            self._clock._num_running += 1
        self._clock._unbounded.pop(self, None)
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
