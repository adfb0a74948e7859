"""Programs of a TE's dies that have experts alone; expert servers among them come and go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xdeepserve.engine.die.experts import ExpertProgram


class ExpertPrograms:
    """Expert-die programs serving now, in the order in which they joined."""

    def __init__(self, programs: Iterable[ExpertProgram]) -> None:
        self._programs = [*programs]

    def __iter__(self) -> Iterator[ExpertProgram]:
        return iter(self._programs)

    def add(self, program: ExpertProgram) -> None:
        """Add a program to the end of the list, when it begins to serve."""
        self._programs.append(program)

    def of(self, die: int) -> ExpertProgram:
        """Return the program of a die; raise StopIteration if it has none."""
        return next(program for program in self._programs if program.die.index == die)

    def remove(self, die: int) -> None:
        """Remove the program of a die."""
        self._programs = [program for program in self._programs if program.die.index != die]

    def ring(self, value: int) -> None:
        """Ring the doorbells of all dies: a flag in their memory, which their kernels poll."""
        for program in self._programs:
            program.mem.doorbell.write(program.die.memory, value)
