"""Tables of times: steps are run at a few points, and lines lie between these."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from xdeepserve.engine.deploy.deployment import Deployment

X = TypeVar("X", bound=float)
Point = TypeVar("Point")
Run = TypeVar("Run")
Progress = Callable[[int, int], None]


class Curve(msgspec.Struct, frozen=True):
    """A profile: measured times [ns] at some x, such as rows or bytes, in rising order."""

    x: tuple[float, ...]
    ns: tuple[float, ...]

    @staticmethod
    def of(x: Sequence[X], ns: Callable[[X], float]) -> Curve:
        """Make the curve of a function from its values at some x."""
        return Curve(tuple(x), tuple(map(ns, x)))

    def __call__(self, x: float) -> float:
        """Interpolate linearly between two points (MS 4.2). Before the first point the first time holds;
        after the last, the line of the last two continues."""
        if x <= self.x[0] or len(self.x) == 1:
            return self.ns[0]
        i = min(bisect_left(self.x, x), len(self.x) - 1)
        x0, x1, y0, y1 = self.x[i - 1], self.x[i], self.ns[i - 1], self.ns[i]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    def covers(self, x: float) -> bool:
        """Whether x is at most the last point. Below the first point, the first time is an upper bound;
        beyond the last, nothing is known."""
        return x <= self.x[-1]

    def line(self) -> tuple[float, float]:
        """Fit slope and intercept by least squares: k1 and k2 of T_a, k3 and k4 of T_e."""
        n = len(self.x)
        mx, my = sum(self.x) / n, sum(self.ns) / n
        spread = sum((x - mx) ** 2 for x in self.x)
        slope = sum((x - mx) * (y - my) for x, y in zip(self.x, self.ns, strict=True)) / spread
        return slope, my - slope * mx

    def misfit(self) -> float:
        """Return the largest distance of a point from the fitted line, as a fraction of the largest time."""
        k, c = self.line()
        return max(abs(k * x + c - y) for x, y in zip(self.x, self.ns, strict=True)) / max(self.ns)


def measured(
    points: Sequence[Point], run: Callable[[Point], Run], progress: Progress = lambda done, total: None
) -> dict[Point, Run]:
    """Run each point once; `progress` gets the number of the point and the number of all points."""
    runs = {}
    for done, point in enumerate(points, 1):
        progress(done, len(points))
        runs[point] = run(point)
    return runs


def with_blocks(deployment: Deployment, num_blocks: int, block_size: int, **changes: Any) -> Deployment:
    """Give a deployment other KV blocks and no shared prefixes; the time of a step depends on neither."""
    cache = msgspec.structs.replace(
        deployment.cache, num_blocks=num_blocks, block_size=block_size, prefix=False
    )
    return msgspec.structs.replace(deployment, cache=cache, **changes)
