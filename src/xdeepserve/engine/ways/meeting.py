"""A barrier in virtual time: it settles when the last member has come, and ends for all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Generic, TypeVar

from xdeepserve.hw.clock import Clock, Waiter, Waiting
from xdeepserve.hw.die import Die

V = TypeVar("V")


class Meeting(Generic[V]):
    """Operation of a group: `settle` returns its duration in ns and its value, once all members have come.

    A member may come without waiting (it posts), and others may wait without being members (they pull).
    Members that go on at the same instant do so by their index, and those that pull after them, in the order
    in which they came. After `timeout_ns` of waiting, a DeadlineError names the members that are missing.
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
        """Create a meeting of `members`, which are named so in errors; elsewhere a member is its index."""
        self.clock, self.op, self.event = clock, op, event
        self.members, self.timeout_ns = members, timeout_ns
        self._settle = settle
        self.came: dict[int, float] = {}  # member -> rows that it brought
        self.last_member = -1
        self.first_ns = self.last_ns = 0  # arrivals
        self.ends_ns: int | None = None
        self._value: V | None = None
        self.waiters: list[tuple[int, int, Waiter]] = []  # whose, how much later than the end

    def come(self, member: int, rows: float) -> None:
        """Register a member and the rows that it brings; the last member starts the operation for all."""
        if not self.came:
            self.first_ns = self.clock.now
        self.came[member] = rows
        if len(self.came) < len(self.members):
            return
        self.last_ns, self.last_member = self.clock.now, member
        try:
            duration, self._value = self._settle(self)
        except Exception as error:
            for who, _, waiter in self.waiters:
                if who != member:  # this one hears of it right here, and waits no more
                    waiter.fail(error)
            raise
        self.ends_ns = self.last_ns + round(duration)
        for _, more_ns, waiter in sorted(self.waiters, key=itemgetter(0)):
            waiter.wake(delay_ns=self.ends_ns - self.last_ns + more_ns)

    async def meet(self, member: int, rows: float) -> V:
        """Come as a member, wait for the operation's end, and return its value. DeadlineError if it never
        begins."""
        waiter = self._waiter(self.members[member], member)
        self.come(member, rows)
        await self.clock.wait(waiter, self.clock.now + self.timeout_ns)
        return self.value

    async def wait(self, who: object, more_ns: int = 0) -> V:
        """Wait until `more_ns` after the operation's end; return its value. DeadlineError if it never
        begins."""
        if self.ends_ns is not None:
            await self.clock.sleep_until(self.ends_ns + more_ns)
        else:
            waiter = self._waiter(who, len(self.members), more_ns)
            await self.clock.wait(waiter, self.clock.now + self.timeout_ns)
        return self.value

    def _waiter(self, who: object, order: int, more_ns: int = 0) -> Waiter:
        waiter = self.clock.waiter(lambda: self.describe(who))
        self.waiters.append((order, more_ns, waiter))
        return waiter

    @property
    def value(self) -> V:
        """Value returned by `settle`, once all members have come."""
        assert self.ends_ns is not None
        return self._value  # type: ignore[return-value]

    def draw(self, dies: Sequence[int], member: int, die: Die, lane: str) -> None:
        """Draw a trace arrow to a member, whose wait ends now, from the last member to come.

        `dies` are the dies of all members.
        """
        if die.trace.is_on and member != self.last_member:
            name, last = f"{self.op} last to come", dies[self.last_member]
            die.trace.flow(name, last, lane, self.last_ns, die.index, lane, die.clock.now - 1)

    def describe(self, who: object) -> Waiting:
        """Return the words of an error: a waiter, and the members that are missing."""
        missing = [name for member, name in enumerate(self.members) if member not in self.came][:8]
        return Waiting(self.op, who, missing, f"event {self.event}", len(self.members), len(self.came))
