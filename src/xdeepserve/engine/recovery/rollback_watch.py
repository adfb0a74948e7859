"""A die's end of rollbacks: once the rollback field changes, its current work ends wherever it waits."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.engine.numbers import Epoch
from xdeepserve.engine.recovery.rollback_field import WORDS, RollbackField
from xdeepserve.hw.clock import Process
from xdeepserve.hw.die import Die


class RollbackCalled(Exception):
    """Raised where a program of a die waits: its current work counts as not done, and will be repeated.

    It is no failure, and so no XDeepServeError: code that handles those must not swallow a rollback.
    """


class EndOfEpoch:
    """Context for work of an epoch; a new epoch interrupts `processes` with RollbackCalled."""

    __slots__ = ("_processes", "_rollback", "_watch")

    def __init__(self, rollback: RollbackWatch, processes: Sequence[Process]) -> None:
        self._rollback, self._processes = rollback, processes

    def __enter__(self) -> None:
        rollback = self._rollback
        if rollback.is_called:
            raise RollbackCalled(f"die {rollback.die.index} was called back before")
        start = rollback.field.region.offset
        self._watch = rollback.die.memory.watch(start, WORDS.size, self._on_write)

    def __exit__(self, *error: object) -> None:
        self._rollback.die.memory.unwatch(self._watch)

    def _on_write(self, offset: int, nbytes: int) -> None:
        die = self._rollback.die
        if self._rollback.is_called:
            for process in self._processes:
                process.interrupt(RollbackCalled(f"die {die.index} is called back"), die.spec.poll_ns())


class RollbackWatch:
    """Epoch of a die, and the watch on its rollback field.

    The watch costs nothing while the host does not write the field: a write wakes the watch, and there is no
    polling.
    """

    def __init__(self, die: Die) -> None:
        self.die, self.field = die, RollbackField(die)
        self.epoch = self.field.read().epoch  # that in which it begins
        self.has_failed = False  # in this epoch; the host knows, and will begin another one
        self._since_ns = 0
        self._quiet = self.field.first_word(self.epoch)  # what the field begins with while nobody calls

    @property
    def is_called(self) -> bool:
        """Whether work launched in the current epoch must not run any more."""
        return self.has_failed or self.field.word != self._quiet

    def ending(self, processes: Sequence[Process]) -> EndOfEpoch:
        """Return the context for work of this epoch, done by `processes`.

        After a call by the host the processes end wherever they wait, with RollbackCalled, one poll later. If
        the call came before, entering raises it at once.
        """
        return EndOfEpoch(self, processes)

    async def is_called_back(self) -> None:
        """Wait, within `ending`, until the host calls a rollback."""
        await self.field.resumes(self.epoch + 1)

    def fail(self) -> None:
        """Note the failure of a kernel or transfer of this epoch on this die."""
        self.has_failed = True

    def enter(self, epoch: Epoch) -> None:
        """Enter an epoch, after the work of earlier epochs on this die has ended."""
        self.epoch, self.has_failed, self._since_ns = epoch, False, self.die.clock.now
        self._quiet = self.field.first_word(epoch)

    def resume(self) -> None:
        """Mark the end of the rollback, and draw its span in the trace."""
        self.has_failed = False  # if it has, since then, what was wrong has been put right
        name = f"rolled back to epoch {self.epoch}"
        self.die.trace.span(self.die.index, "recovery", name, self._since_ns, self.die.clock.now)
