"""Steps of the papers, noted as operators pass them: for traces, walkthroughs and fault tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from xdeepserve.hw.die import Die

Observer: TypeAlias = Callable[[str, int], Awaitable[None] | None]
"""Called with an operation and the number of a step that is complete. Where a rank can pause between two
steps, it does so on what is returned, if that is awaitable."""


WAITING = 5  # in all of the papers' lists of steps, the one that looks for a peer's field


class Steps:
    """Notes an operator's completed steps, for traces and observers."""

    def __init__(self, die: Die, on_step: Observer | None = None, lane: str = "XCCL") -> None:
        self.die, self.on_step = die, on_step
        self.lane = lane  # of a trace, and what comes is
        self._start = 0

    def begin(self) -> None:
        self._start = self.die.clock.now

    async def passed(self, op: str, step: int) -> None:
        """Note a completed step, and pause if the observer asks for it."""
        pause = self.done(op, step)
        if pause is not None:
            await pause

    def done(self, op: str, step: int) -> Awaitable[None] | None:
        """Note the completion of all steps up to `step`; 7 stands for 6 and 7, which are one copy."""
        now = self.die.clock.now
        if self.die.trace.is_on and now > self._start:
            name = f"{op} {step}" if step != 7 else f"{op} 6-7"
            self.die.draw(self.lane, name, self._start, {"waits": True} if step == WAITING else None)
        self._start = now
        moments = self.die.fabric.moments
        if moments.is_on:
            moments.passed(op, step, self.die.index)
        return self.observe(op, step)

    def observe(self, op: str, step: int) -> Awaitable[None] | None:
        """Tell the observer of a completed step; steps of another object may be passed on in this way."""
        return self.on_step(op, step) if self.on_step is not None else None
