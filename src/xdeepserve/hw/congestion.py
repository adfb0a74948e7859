"""Sending rates of queue pairs when the receiver's port is crowded (MegaScale-Infer 5).

Rates follow DCQCN's shape: a congestion notice cuts the rate, and it comes back in steps. The paper says what
its tuning aims at (less rate limiting, faster convergence where receivers get unequal amounts), and no
number: both sets are assumed, the first in the proportions of DCQCN's published defaults.
"""

from __future__ import annotations

import math

import msgspec


class CongestionControl(msgspec.Struct, frozen=True):
    """Thresholds for congestion notices, and the reaction of senders to them.

    mark_ns     a segment that would wait longer than this for the receiver's port is marked
    notice_ns   a queue pair is told so at most once in so long
    cut         by which part of it a notice lowers the rate
    step        part of the line rate that comes back in each `recover_ns`
    """

    mark_ns: int
    notice_ns: int
    cut: float
    step: float
    recover_ns: int


DEFAULT_CONTROL = CongestionControl(mark_ns=2_000, notice_ns=50_000, cut=0.5, step=0.02, recover_ns=55_000)
TUNED_CONTROL = CongestionControl(mark_ns=20_000, notice_ns=50_000, cut=0.1, step=0.25, recover_ns=5_000)


class SendingRate:
    """Sending rate of a queue pair, as a fraction of its line rate."""

    def __init__(self, control: CongestionControl) -> None:
        self.control = control
        self._rate, self._cut_ns = 1.0, 0
        self._noticed_ns = -control.notice_ns

    def at(self, now: int) -> float:
        """Return the rate now, in (0, 1]."""
        steps = (now - self._cut_ns) // self.control.recover_ns
        return min(1.0, self._rate + self.control.step * steps)

    def notice(self, now: int) -> None:
        """Lower the rate because the receiver's port is crowded."""
        self._rate, self._cut_ns = max(1e-3, self.at(now) * (1 - self.control.cut)), now

    def may_notice(self, now: int) -> bool:
        """Whether a notice is due for a marked segment; if so, note that it is sent."""
        if now - self._noticed_ns < self.control.notice_ns:
            return False
        self._noticed_ns = now
        return True

    def gap_ns(self, now: int, line_ns: float) -> int:
        """Return the time (ns) from the start of a segment that takes `line_ns` to the start of the next
        one."""
        return math.ceil(line_ns / self.at(now))
