"""DeepServe's PD heat map (5.3): when TEs with prefill and decode apart beat TEs that do both.

The gain depends on the lengths of prompt and answer, on equally many dies. A map is measured for each rate of
requests. The maps are added square by square, and the sign of the sum decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import msgspec

from xdeepserve.reading import read


class HeatMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gains of prefill and decode apart: `gains[rate][prompt][output]`, in [-1, 1].

    A gain is (time of both - time apart) / the greater of the two. `prompts` and `outputs` are the least
    lengths of squares, rising; shorter ones count for the first square.
    """

    hardware: str  # what it was measured on
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    rates: tuple[float, ...]  # requests per second
    gains: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        shape = {(len(rows), len(row)) for rows in self.gains for row in rows}
        is_rising = all(list(each) == sorted(set(each)) for each in (self.prompts, self.outputs))
        fits = shape == {(len(self.prompts), len(self.outputs))} and len(self.gains) == len(self.rates)
        if not fits or not is_rising:
            raise ValueError("a heat map has a gain for each rate, prompt and output, which rise")

    def value(self, num_prompt: float, num_output: float) -> float:
        """Sum the gains over all rates in the square of these lengths; above 0 favours TEs apart."""
        row, column = _square(self.prompts, num_prompt), _square(self.outputs, num_output)
        return sum(rows[row][column] for rows in self.gains)

    @property
    def stable(self) -> float:
        """Share of squares with gains of the same sign at every rate."""
        squares = [
            [rows[row][column] for rows in self.gains]
            for row in range(len(self.prompts))
            for column in range(len(self.outputs))
        ]
        same = [all(each > 0 for each in square) or all(each < 0 for each in square) for square in squares]
        return sum(same) / len(same)


def _square(least: Sequence[int], length: float) -> int:
    return max(0, bisect_right(least, length) - 1)


def read_heat_map(path: Path) -> HeatMap:
    """Read a heat map from a JSON file; raise InputError if it is invalid."""
    return read(path, "JSON", "heat map").to(HeatMap)
