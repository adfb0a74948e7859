"""MegaScale-Infer's performance model of a decode iteration, equations 1 to 8. Times are ns, not rounded.

A batch is cut into m microbatches. They go to the experts and come back while attention works on others. T_a
and T_e are the times of one microbatch at attention and experts; T_c is the time of its way there, and of its
way back.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from xdeepserve.hw.spec import Spec
from xdeepserve.prices.curve import Curve

GAP_NS = 1e9 * Spec().scheduler_gap.value


class LatencyBound(NamedTuple):
    """Upper bound of a decode iteration.

    `of_tpot`: it was given as TPOT, which includes the scheduler's gap.
    """

    slo_ns: float
    of_tpot: bool = False

    def __str__(self) -> str:
        """Return both times in ms, the given one first: TPOT = T_iter + the scheduler's gap."""
        times = [f"T_iter <= {self.slo_ns / 1e6:g} ms", f"TPOT <= {(self.slo_ns + GAP_NS) / 1e6:g} ms"]
        first, second = reversed(times) if self.of_tpot else times
        return f"{first} ({second}: the scheduler's gap is {GAP_NS / 1e6:g} ms)"

    def enough_for(self, least_ns: float) -> str:
        """Return the command-line option with a bound that an iteration of `least_ns` keeps."""
        option, gap_ns = ("--tpot-ms", GAP_NS) if self.of_tpot else ("--slo-ms", 0.0)
        return f"{option} {math.ceil((least_ns + gap_ns) / 1e5) / 10:g} would do"


class Times(NamedTuple):
    """Times of a microbatch in a layer, in ns."""

    a: float
    e: float
    c: float
    busy: float = 0.0  # how long expert dies have to do with it, if they serve several domains

    @property
    def f(self) -> float:
        """T_f: the time of the slower side."""
        return max(self.a, self.e, self.busy)

    @property
    def cycle(self) -> float:
        """Time from attention through the experts and back."""
        return self.a + self.e + 2 * self.c

    def min_microbatches(self) -> int:
        """Return the least m by condition 3: m T_f >= 2 (T_f + T_c)."""
        return math.ceil(2 * (1 + self.c / self.f) - 1e-9)

    def hides_communication(self, m: int) -> bool:
        """Whether conditions 2 and 3 hold, so that communication is hidden."""
        return self.c < self.f and m >= self.min_microbatches()

    def bounds(self, m: int, layers: int) -> tuple[float, float]:
        """Return the bounds of a microbatch's T_iter by equation 4."""
        return self.cycle + m * self.f * (layers - 1), m * self.f * layers

    def total(self, m: int, layers: int) -> float:
        """Return T_total of the whole batch. With enough microbatches, equation 5 holds: (T_a + T_e + 2 T_c)
        + T_f (m L - 1). Otherwise a layer begins a cycle after the one before, when its first microbatch is
        back."""
        return self.cycle + (m - 1) * self.f + (layers - 1) * max(m * self.f, self.cycle)

    def throughput(self, m: int) -> float:
        """Return the microbatches of a layer that ping-pong serves in a ns: m in the longer of m T_f and a
        cycle (MS 4.1)."""
        return m / max(m * self.f, self.cycle)


def transfer_ns(sent: Curve, received: Curve, sent_nbytes: float, received_nbytes: float) -> float:
    """Compute T_c by equation 6: the slower of sending from an attention device and receiving at an expert's.

    The curves are times of messages by size, that is, size / (W Util(size)).
    """
    return max(sent(sent_nbytes), received(received_nbytes))


def util(curve: Curve, bandwidth: float, nbytes: float) -> float:
    """Compute Util(size): the share of a device's bandwidth [B/s] that messages of `nbytes` reach."""
    return nbytes / bandwidth / (curve(nbytes) / 1e9)


def moe_util(top_k: int, experts: int, ridge_batch: float, batch: float) -> float:
    """Return the greatest share of their peak that experts can use with a batch of so many tokens (MS
    2.3)."""
    return min(top_k / experts * batch / ridge_batch, 1.0)
