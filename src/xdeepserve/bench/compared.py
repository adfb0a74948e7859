"""Where prices of decode stand beside published times, and which points are beyond.

Errors of `bench papers` speak of points within these bounds. Beyond them the formulas go on, and nothing
published says how far off they are.
"""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """The least and the most of something that a published time is of, and where that stands."""

    what: str
    least: float
    most: float
    source: str

    def note(self, value: float) -> str:
        """That a value is beyond; nothing if it is not."""
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
    """What of these, by the names of BOUNDS, is beyond what is published."""
    notes = (BOUNDS[name].note(value) for name, value in values.items())
    return tuple(note for note in notes if note)
