"""A die's end of rollbacks: what it is at ends where it waits, once its rollback field says so."""

from __future__ import annotations

from collections.abc import Sequence

from xdeepserve.engine.numbers import Epoch
from xdeepserve.engine.recovery.rollback_field import WORDS, RollbackField
from xdeepserve.errors import XDeepServeError
from xdeepserve.hw.clock import Process
from xdeepserve.hw.die import Die


class RollbackCalled(XDeepServeError):
    """Raised where a program of a die waits: what it is at has not happened, and will be done again."""


class EndOfEpoch:
    """Within it, a write to the rollback field that begins another epoch ends what `processes` are at."""

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
    """Which epoch a die is in, and the watch on its rollback field.

    It costs nothing while nobody writes the field: a write wakes who watches it, and nobody polls.
    """

    def __init__(self, die: Die) -> None:
        self.die, self.field = die, RollbackField(die)
        self.epoch = self.field.read().epoch  # that in which it begins
        self.has_failed = False  # in this epoch; the host knows, and will begin another one
        self._since_ns = 0
        self._quiet = self.field.first_word(self.epoch)  # what the field begins with while nobody calls

    @property
    def is_called(self) -> bool:
        """What was launched in this epoch is not to run any more."""
        return self.has_failed or self.field.word != self._quiet

    def ending(self, processes: Sequence[Process]) -> EndOfEpoch:
        """Around what belongs to this epoch, which `processes` are at: they end wherever they wait, by a
        RollbackCalled, a poll after the host has called. Raises it at once if that was before."""
        return EndOfEpoch(self, processes)

    async def is_called_back(self) -> None:
        """Within `ending`: wait for that."""
        await self.field.resumes(self.epoch + 1)

    def fail(self) -> None:
        """A kernel or transfer of this epoch has failed here."""
        self.has_failed = True

    def enter(self, epoch: Epoch) -> None:
        """Nothing of an earlier epoch runs here any more."""
        self.epoch, self.has_failed, self._since_ns = epoch, False, self.die.clock.now
        self._quiet = self.field.first_word(epoch)

    def resume(self) -> None:
        """Work goes on."""
        self.has_failed = False  # if it has, since then, what was wrong has been put right
        name = f"rolled back to epoch {self.epoch}"
        self.die.trace.span(self.die.index, "recovery", name, self._since_ns, self.die.clock.now)
