"""A die's end of rollbacks: what it is at ends where it waits, once its rollback field says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property

from xdeepserve.engine.recovery.rollback_field import WORDS, RollbackField
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.clock import Process
from xdeepserve.hw.die import Die


class RollbackCalled(XDeepServeError):
    """Raised where a program of a die waits: what it is at has not happened, and will be done again."""


class RollbackWatch:
    """Which epoch a die is in, and the watch on its rollback field.

    It costs nothing while nobody writes the field: a write wakes who watches it, and nobody polls.
    """

    def __init__(self, die: Die) -> None:
        self.die, self.epoch = die, 0
        self.has_failed = False  # in this epoch; the host knows, and will begin another one
        self._since_ns = 0

    @cached_property
    def field(self) -> RollbackField:
        return RollbackField(self.die)

    @property
    def is_called(self) -> bool:
        """What was launched in this epoch is not to run any more."""
        return self.has_failed or self.field.read().epoch > self.epoch

    @contextlib.contextmanager
    def ending(self, processes: Sequence[Process]) -> Iterator[None]:
        """Around what belongs to this epoch, which `processes` are at: they end wherever they wait, by a
        RollbackCalled, a poll after the host has called. Raises it at once if that was before."""
        memory, region = self.die.memory, self.field.region
        poll_ns = self.die.spec.poll_ns()

        def on_write(offset: int, nbytes: int) -> None:
            if self.is_called:
                for process in processes:
                    process.interrupt(RollbackCalled(f"die {self.die.index} is called back"), poll_ns)

        if self.is_called:
            raise RollbackCalled(f"die {self.die.index} was called back before")
        watch = memory.watch(region.offset, WORDS.size, on_write)
        try:
            yield
        finally:
            memory.unwatch(watch)

    async def is_called_back(self) -> None:
        """Within `ending`: wait for that."""
        await self.field.resumes(self.epoch + 1)

    def fail(self) -> None:
        """A kernel or transfer of this epoch has failed here."""
        self.has_failed = True

    def enter(self, epoch: int) -> None:
        """Nothing of an earlier epoch runs here any more."""
        self.epoch, self.has_failed, self._since_ns = epoch, False, self.die.clock.now

    def resume(self) -> None:
        """Work goes on."""
        name = f"rolled back to epoch {self.epoch}"
        self.die.trace.span(self.die.index, "recovery", name, self._since_ns, self.die.clock.now)
