"""A barrier in virtual time: it settles when the last member has come, and ends for all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from xdeepserve.hw.clock import Clock, Waiter, Waiting
from xdeepserve.hw.die import Die

V = TypeVar("V")


class Meeting(Generic[V]):
    """One operation of a group. `settle` tells its duration in ns and its value, once all have come.

    A member may come without waiting (it posts), and others may wait without being members (they pull). Who
    has waited for `timeout_ns` gets a DeadlineError that names who of `members` is missing.
    """

    def __init__(
        self,
        clock: Clock,
        op: str,
        event: int,
        members: Sequence[object],
        timeout_ns: int,
        settle: Callable[[Meeting[V]], tuple[float, V]],
    ) -> None:
        """`members` are their names in errors; else a member is its place there."""
        self.clock, self.op, self.event = clock, op, event
        self.members, self.timeout_ns = members, timeout_ns
        self._settle = settle
        self.came: dict[int, float] = {}  # member -> rows that it brought
        self.last_member = -1
        self.first_ns = self.last_ns = 0  # arrivals
        self.ends_ns: int | None = None
        self._value: V | None = None
        self._waiters: list[tuple[Waiter, int]] = []

    def come(self, member: int, rows: float) -> None:
        """Register `member`; the last one starts the operation for all."""
        if not self.came:
            self.first_ns = self.clock.now
        self.came[member] = rows
        if len(self.came) < len(self.members):
            return
        self.last_ns, self.last_member = self.clock.now, member
        try:
            duration, self._value = self._settle(self)
        except Exception as error:
            for waiter, _ in self._waiters:
                waiter.fail(error)
            raise
        self.ends_ns = self.last_ns + round(duration)
        for waiter, more in self._waiters:
            waiter.wake(delay_ns=self.ends_ns - self.last_ns + more)

    async def wait(self, who: object, more_ns: int = 0) -> V:
        """Until the operation's end, and `more_ns` after it; its value. DeadlineError if it never begins."""
        if self.ends_ns is not None:
            await self.clock.sleep_until(self.ends_ns + more_ns)
        else:
            waiter = self.clock.waiter(lambda: self._describe(who))
            self._waiters.append((waiter, more_ns))
            await self.clock.wait(waiter, self.clock.now + self.timeout_ns)
        return self.value

    @property
    def value(self) -> V:
        """What `settle` has made of it."""
        assert self.ends_ns is not None
        return self._value  # type: ignore[return-value]

    def draw(self, dies: Sequence[int], member: int, die: Die, lane: str) -> None:
        """For traces: an arrow to a member, whose wait ends now, from who kept it waiting. `dies` are those
        of all members."""
        if die.trace.is_on and member != self.last_member:
            name, last = f"{self.op} last to come", dies[self.last_member]
            die.trace.flow(name, last, lane, self.last_ns, die.index, lane, die.clock.now - 1)

    def _describe(self, who: object) -> Waiting:
        missing = [name for member, name in enumerate(self.members) if member not in self.came][:8]
        return Waiting(self.op, who, missing, f"event {self.event}", len(self.members), len(self.came))
