"""Trends: sentences of papers, as questions to the rows of benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Values(dict[str, float]):
    """Values of benchmark rows by name."""

    def along(self, name: str, places: Iterable[object]) -> list[float]:
        """Return the rows named by a name with a `{}`, at these places."""
        return [self[name.format(place)] for place in places]

    def grows(self, name: str, places: Iterable[object]) -> bool:
        """Whether each row is larger than the row before."""
        return all(before < after for before, after in itertools.pairwise(self.along(name, places)))

    def falls(self, name: str, places: Sequence[object]) -> bool:
        """Whether each row is smaller than the row before."""
        return self.grows(name, tuple(reversed(places)))


class Trend(NamedTuple):
    """A statement of a paper, with its place; which of `trends.ROWS` answer it, and how.

    `why` explains a statement that does not hold here.
    """

    id: str
    where: str
    said: str
    rows: str
    holds: Callable[[Values], bool]
    why: str = ""
