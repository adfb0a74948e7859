"""Moments of operations, at which faults may be planned: the n-th time that a step of one is complete.

Dies pass the steps of the papers' operations ("dispatch" 1 to 8; in lockstep they take none of them one by
one); the memory pool those of "put" (1 a place is given, 2 its bytes are there, 3 it is committed) and of
"get" (1 pinned, 2 to be promoted, 3 in DRAM, 4 released).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple


class Moment(NamedTuple):
    """The `event`-th time, from 1, that a step is complete on a node; None: wherever it is."""

    operation: str
    step: int
    event: int
    node: int | None


class Moments:
    """Off, at the cost of a look, unless somebody waits for a moment or wants `counts` of those that pass."""

    def __init__(self) -> None:
        self.is_on = False
        self.counts: Counter[tuple[str, int, int | None]] = Counter()
        self._then: dict[Moment, list[Callable[[], None]]] = {}

    def at(self, moment: Moment, then: Callable[[], None]) -> None:
        """Call `then`, which must not wait, when it comes; never, if it does not."""
        self.is_on = True
        self._then.setdefault(moment, []).append(then)

    def passed(self, operation: str, step: int, node: int) -> None:
        """A step is complete on a node."""
        for where in (node, None):
            self.counts[operation, step, where] += 1
            moment = Moment(operation, step, self.counts[operation, step, where], where)
            for then in self._then.pop(moment, ()):
                then()
