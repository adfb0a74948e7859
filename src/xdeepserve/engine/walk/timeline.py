"""Virtual time spent by a die program and not yet waited for.

The end of a die's kernels matters only when the die meets others. So stages add up their time here, and the
program sleeps once, before its next exchange: the same instants, with a quarter of the events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from xdeepserve.hw.die import Die
from xdeepserve.hw.spec import Core


class Timeline:
    """Pace of a die program, or of one of its microbatches, whose stages only take time.

    `spent_ns` adds up by stage or exchange, waiting included. With `takes_turns` it shares the die's cores
    with another timeline and waits while the other uses them. With `shares_hbm` kernels of both share the HBM
    bandwidth.
    """

    computes = False

    def __init__(self, die: Die, takes_turns: bool = False, shares_hbm: bool = False) -> None:
        self.die, self.takes_turns, self.shares_hbm = die, takes_turns, shares_hbm
        self.spent_ns: Counter[str] = Counter()
        self._ahead_ns = 0

    async def spend(
        self,
        name: str,
        core: Core,
        cores: int | None,
        duration_ns: float,
        kernel: Callable[[], None],
        args: dict[str, Any],
        hbm_ns: float,
    ) -> None:
        """Spend the time of a launch, from the program's position on; kernels on index lists run at once."""
        kernel()
        if self.shares_hbm and duration_ns:
            start = await self.catch_up()
            await self.die.hbm.end(self.die.hbm.begin(round(duration_ns), hbm_ns))
            self.waited(core.upper(), name, start, args=args)
            return
        if not self.takes_turns:
            self.add(core.upper(), name, duration_ns, args)
            return
        await self.catch_up()
        if self.die.gate.is_shut:
            await self.die.gate.passed()
        now, duration = self.die.clock.now, round(duration_ns)
        self.spent_ns[name] += duration
        if duration:
            taken = self.die.cores[core]
            start, end = taken.reserve(now, taken.total, duration)
            self.die.trace.span(self.die.index, core.upper(), name, start, end, args)
            self._ahead_ns = end - now

    async def settle(self) -> None:
        """Let the clock reach the program's position."""
        await self.catch_up()

    def reset(self) -> None:
        """Forget the time spent and not waited for, after a rollback."""
        self._ahead_ns = 0

    def add(self, lane: str, name: str, duration_ns: float, args: dict[str, Any] | None = None) -> None:
        """Spend `duration_ns` from the program's position on, without waiting.

        In traces `args` describe what happened, or else the place of the running process.
        """
        duration = round(duration_ns)
        self.spent_ns[name] += duration
        if duration:
            start = self.die.clock.now + self._ahead_ns
            self.die.trace.span(self.die.index, lane, name, start, start + duration, self._args(args))
            self._ahead_ns += duration

    async def catch_up(self) -> int:
        """Let the clock reach the program's position; return the virtual time in ns."""
        if self._ahead_ns:
            ahead, self._ahead_ns = self._ahead_ns, 0
            if self.die.gate.is_shut:
                await self.die.gate.passed()
            await self.die.clock.sleep(ahead)
        return self.die.clock.now

    def waited(
        self,
        lane: str,
        name: str,
        start_ns: int,
        called: str | None = None,
        args: dict[str, Any] | None = None,
    ) -> None:
        """Record an exchange from `start_ns` until now.

        `called` is another name for traces; `args` as in `add`.
        """
        now = self.die.clock.now
        self.spent_ns[name] += now - start_ns
        self.die.trace.span(self.die.index, lane, called or name, start_ns, now, self._args(args))

    def _args(self, args: dict[str, Any] | None) -> dict[str, Any]:
        return self.die.trace.place if args is None else args
