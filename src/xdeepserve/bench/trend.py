"""A sentence of a paper, as a question to the rows of benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Values(dict[str, float]):
    """Rows by name."""

    def along(self, name: str, places: Iterable[object]) -> list[float]:
        """The rows that a name with a `{}` has at these places."""
        return [self[name.format(place)] for place in places]

    def grows(self, name: str, places: Iterable[object]) -> bool:
        """Each is larger than the one before."""
        return all(before < after for before, after in itertools.pairwise(self.along(name, places)))

    def falls(self, name: str, places: Sequence[object]) -> bool:
        """Each is smaller than the one before."""
        return self.grows(name, tuple(reversed(places)))


class Trend(NamedTuple):
    """What a paper says and where; which of `trends.ROWS` answer, and how; `why` it does not hold here."""

    id: str
    where: str
    said: str
    rows: str
    holds: Callable[[Values], bool]
    why: str = ""
