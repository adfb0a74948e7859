"""MegaScale-Infer's performance model of a decode iteration, equations 1 to 8. Times are ns, not rounded.

A batch is cut in m microbatches, which go to the experts and come back while attention works on others:
T_a and T_e is what one takes at attention and experts, T_c its way there, and its way back.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

import msgspec

from xdeepserve.hw.spec import Spec

GAP_NS = 1e9 * Spec().scheduler_gap.value


class LatencyBound(NamedTuple):
    """How long a decode iteration may take; `of_tpot`: it was said as TPOT, the scheduler's gap more."""

    slo_ns: float
    of_tpot: bool = False

    def __str__(self) -> str:
        """Both times in ms, first the one that was said: TPOT = T_iter + the scheduler's gap."""
        times = [f"T_iter <= {self.slo_ns / 1e6:g} ms", f"TPOT <= {(self.slo_ns + GAP_NS) / 1e6:g} ms"]
        first, second = reversed(times) if self.of_tpot else times
        return f"{first} ({second}: the scheduler's gap is {GAP_NS / 1e6:g} ms)"

    def enough_for(self, least_ns: float) -> str:
        """The option with a bound that an iteration of `least_ns` keeps."""
        option, gap_ns = ("--tpot-ms", GAP_NS) if self.of_tpot else ("--slo-ms", 0.0)
        return f"{option} {math.ceil((least_ns + gap_ns) / 1e5) / 10:g} would do"


class Curve(msgspec.Struct, frozen=True):
    """Measured times [ns] at some x, such as rows or bytes, in rising order: a profile."""

    x: tuple[float, ...]
    ns: tuple[float, ...]

    def __call__(self, x: float) -> float:
        """Between two points a line (profiling and interpolation, MS 4.2); before the first its value, after
        the last the line of the last two."""
        if x <= self.x[0] or len(self.x) == 1:
            return self.ns[0]
        i = min(bisect_left(self.x, x), len(self.x) - 1)
        x0, x1, y0, y1 = self.x[i - 1], self.x[i], self.ns[i - 1], self.ns[i]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    def covers(self, x: float) -> bool:
        """Nothing is known beyond the last point. Below the first, the first is an upper bound."""
        return x <= self.x[-1]

    def line(self) -> tuple[float, float]:
        """Slope and intercept by least squares: k1 and k2 of T_a, k3 and k4 of T_e."""
        n = len(self.x)
        mx, my = sum(self.x) / n, sum(self.ns) / n
        spread = sum((x - mx) ** 2 for x in self.x)
        slope = sum((x - mx) * (y - my) for x, y in zip(self.x, self.ns, strict=True)) / spread
        return slope, my - slope * mx

    def misfit(self) -> float:
        """The largest distance of a point from the line, as a part of the largest time."""
        k, c = self.line()
        return max(abs(k * x + c - y) for x, y in zip(self.x, self.ns, strict=True)) / max(self.ns)


class Times(NamedTuple):
    """What one microbatch takes in one layer."""

    a: float
    e: float
    c: float
    busy: float = 0.0  # how long expert dies have to do with it, if they serve several domains

    @property
    def f(self) -> float:
        """T_f, what the slower side takes."""
        return max(self.a, self.e, self.busy)

    @property
    def cycle(self) -> float:
        """From attention through the experts and back."""
        return self.a + self.e + 2 * self.c

    def min_microbatches(self) -> int:
        """The least m by condition 3: m T_f >= 2 (T_f + T_c)."""
        return math.ceil(2 * (1 + self.c / self.f) - 1e-9)

    def hides_communication(self, m: int) -> bool:
        """Conditions 2 and 3."""
        return self.c < self.f and m >= self.min_microbatches()

    def bounds(self, m: int, layers: int) -> tuple[float, float]:
        """Equation 4: T_iter of one microbatch lies between."""
        return self.cycle + m * self.f * (layers - 1), m * self.f * layers

    def total(self, m: int, layers: int) -> float:
        """T_total of the whole batch. Equation 5, (T_a + T_e + 2 T_c) + T_f (m L - 1), where m microbatches
        are enough to be busy; else a layer begins when the first is back, a cycle after it left."""
        return self.cycle + (m - 1) * self.f + (layers - 1) * max(m * self.f, self.cycle)


def transfer_ns(sent: Curve, received: Curve, sent_nbytes: float, received_nbytes: float) -> float:
    """T_c, equation 6: the slower of sending from an attention device and receiving at an expert's.

    The curves are times of messages by size, that is, size / (W Util(size)).
    """
    return max(sent(sent_nbytes), received(received_nbytes))


def util(curve: Curve, bandwidth: float, nbytes: float) -> float:
    """Util(size): the share of a device's bandwidth [B/s] that messages of so many bytes have."""
    return nbytes / bandwidth / (curve(nbytes) / 1e9)


def moe_util(top_k: int, experts: int, ridge_batch: float, batch: float) -> float:
    """The most that experts can use of their peak, with a batch of so many tokens (MS 2.3)."""
    return min(top_k / experts * batch / ridge_batch, 1.0)
