"""Activations of two models side by side: the one that is being quantised, and the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from xdeepserve.model.canonical import Array


class BothRows(NamedTuple):
    """Rows [T, K] in the model quantised so far, and in the original model where that runs beside."""

    seen: Array
    exact: Array | None

    def map(self, f: Callable[[Array], Array]) -> BothRows:
        return BothRows(f(self.seen), None if self.exact is None else f(self.exact))

    def join(self, other: BothRows, f: Callable[[Array, Array], Array]) -> BothRows:
        if self.exact is None or other.exact is None:
            return BothRows(f(self.seen, other.seen), None)
        return BothRows(f(self.seen, other.seen), f(self.exact, other.exact))

    def take(self, rows: Array) -> BothRows:
        return self.map(lambda x: x[rows])

    def over(self, s: Array) -> BothRows:
        """Smooth both rows: divide by s [K]."""
        return self.map(lambda x: x / s)
