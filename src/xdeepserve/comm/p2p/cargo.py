"""A message's bytes in the app area of one rank: one piece, or many that travel as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address

Piece = tuple[Address, int]


class Cargo:
    """Pieces (offset, size) of a rank's app area, in order: gathered by its send, filled by its receive.

    With a `weight` other than 1 each of their bytes stands for so many, and none moves: where in memory such
    a byte would lie nobody knows, so it is said to be at offset 0.
    """

    def __init__(self, node: int, pieces: Sequence[tuple[int, int]], weight: float = 1.0) -> None:
        self.node, self.pieces, self._moves = node, tuple(pieces), weight == 1.0
        self._ends = list(accumulate(nbytes for _, nbytes in self.pieces))
        self.nbytes = round(weight * (self._ends[-1] if self._ends else 0))

    @property
    def offset(self) -> int:
        """Where in the app area the first piece begins."""
        return self.pieces[0][0]

    def part(self, start: int, nbytes: int) -> list[Piece]:
        """Where `nbytes` of the message from `start` on lie."""
        if not nbytes:
            return [(Address(self.node, self.offset), 0)]
        if not self._moves:
            return [(Address(self.node, 0), nbytes)]
        found, at, stop = [], bisect_right(self._ends, start), start + nbytes
        while start < stop:
            offset, size = self.pieces[at]
            done = size - (self._ends[at] - start)
            count = min(size - done, stop - start)
            found.append((Address(self.node, offset + done), count))
            start, at = start + count, at + 1
        return found


def copies(src: Sequence[Piece], dst: Sequence[Piece]) -> list[Copy]:
    """What carries `src`, in order, to `dst`, in order; both have as many bytes."""
    found, sources, targets = [], list(reversed(src)), list(reversed(dst))
    while sources and targets:
        (source, left), (target, room) = sources.pop(), targets.pop()
        nbytes = min(left, room)
        found.append(Copy(source, target, nbytes))
        if left > nbytes:
            sources.append((source.plus(nbytes), left - nbytes))
        if room > nbytes:
            targets.append((target.plus(nbytes), room - nbytes))
    return found
