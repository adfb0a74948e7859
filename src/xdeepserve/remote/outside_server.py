"""A server's end in a process of its own: it polls memory that clients write to at any time."""

from __future__ import annotations

import time

from xdeepserve.comm.services.rules import SlotEvent, SlotState
from xdeepserve.comm.services.server import ServiceServer
from xdeepserve.errors import DeadlineError
from xdeepserve.remote.outside_reach import nap
from xdeepserve.remote.registered import fence


class OutsideServer(ServiceServer):
    """Server's end of the exchange; waits in this computer's time.

    The die's memory begins with a buffer that clients map.
    """

    num_served = 0  # requests

    @property
    def now_ns(self) -> int:
        return time.monotonic_ns()

    @property
    def is_quiet(self) -> bool:
        """Whether every request has been answered and every answer read."""
        return not bool((self._states == SlotState.WRITTEN).any() or (self._states == SlotState.DONE).any())

    async def _wait(self, deadline_ns: int | None) -> None:
        num_looks = 0
        while not self._has_news:
            if deadline_ns is not None and self.now_ns >= deadline_ns:
                raise DeadlineError(**self._describe()._asdict(), at_ns=self.die.clock.now)
            await nap(num_looks)
            num_looks += 1
        fence()

    def _set(self, number: int, event: SlotEvent) -> None:
        fence()  # answers before the state that says so
        self.num_served += event is SlotEvent.ANSWER
        super()._set(number, event)
