"""The range of published times of decode, and notes on points beyond it.

Errors of `bench papers` are about points within these bounds. Beyond them the formulas still give values, but
no published time says how far off they are.
"""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """Least and greatest published value of a quantity, with the source."""

    what: str
    least: float
    most: float
    source: str

    def note(self, value: float) -> str:
        """Return a note if a value is beyond the bounds, else ""."""
        if self.least <= value <= self.most:
            return ""
        return f"{self.what} {value:,g}, published {self.least:,g} to {self.most:,g} ({self.source})"


BOUNDS = {
    "hidden": Bound("elements of a token", 7168, 7168, "DeepSeek-R1"),
    "batch": Bound("requests of a die", 4, 96, "CM Table 4, XDS 7.1"),
    "context": Bound("positions of a request", 1536, 4224, "CM Table 4: prompts, half of answers"),
    "ranks": Bound("dies of an exchange", 8, 320, "CM Table 6, 4.1"),
}


def beyond(**values: float) -> tuple[str, ...]:
    """List notes on the values that are beyond published ones, by the names of BOUNDS."""
    notes = (BOUNDS[name].note(value) for name, value in values.items())
    return tuple(note for note in notes if note)
