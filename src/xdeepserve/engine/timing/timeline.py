"""The time that a die program has spent and not yet waited for.

Nothing outside the die can tell when its kernels end, only when it meets others. So stages add up their time
here, and the program sleeps once, before its next exchange: the same instants, with a quarter of the events.
"""

from __future__ import annotations

from collections import Counter

from xdeepserve.hw.die import Die
from xdeepserve.hw.spec import Core


class Timeline:
    """Of one die program, or of one of its microbatches.

    `spent_ns` adds up by stage or exchange, waiting included.
    """

    def __init__(self, die: Die) -> None:
        self.die = die
        self.spent_ns: Counter[str] = Counter()
        self.place: dict[str, int] = {}  # layer, microbatch: for traces
        self._ahead_ns = 0

    def spend(self, lane: str, name: str, duration_ns: float) -> None:
        """A stage that takes `duration_ns` from where the program stands."""
        duration = round(duration_ns)
        self.spent_ns[name] += duration
        if duration:
            start = self.die.clock.now + self._ahead_ns
            self.die.trace.span(self.die.index, lane, name, start, start + duration, self.place)
            self._ahead_ns += duration

    async def spend_in_turn(self, core: Core, name: str, duration_ns: float) -> None:
        """A stage on all cores of a kind, when whoever has them is done with them."""
        now, duration = await self.catch_up(), round(duration_ns)
        self.spent_ns[name] += duration
        if duration:
            cores = self.die.cores[core]
            start, end = cores.reserve(now, cores.total, duration)
            self.die.trace.span(self.die.index, core.upper(), name, start, end, self.place)
            self._ahead_ns = end - now

    async def catch_up(self) -> int:
        """Let the clock reach where the program stands; the time there."""
        if self._ahead_ns:
            ahead, self._ahead_ns = self._ahead_ns, 0
            await self.die.clock.sleep(ahead)
        return self.die.clock.now

    def waited(self, lane: str, name: str, start_ns: int, called: str | None = None) -> None:
        """An exchange that began at `start_ns` ends now; traces may call it something else."""
        now = self.die.clock.now
        self.spent_ns[name] += now - start_ns
        self.die.trace.span(self.die.index, lane, called or name, start_ns, now, self.place)
