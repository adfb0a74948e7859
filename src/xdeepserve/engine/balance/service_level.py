"""The service level, as the AutoScaler sees it: the share of ended requests that more TEs would have helped.

A request misses the level if its TTFT or its TPOT is over the bound. It does not count if its first token
would have been late on an idle TE, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from xdeepserve.engine.balance.dp import prefill_cost


class ServiceLevel:
    """Counts requests that end between two looks of the AutoScaler, and how many of them missed their bounds.

    A bound is in ns; without one, `math.inf`, no request is late.
    """

    def __init__(self, ttft_ns: float, tpot_ns: float) -> None:
        self._ttft_ns, self._tpot_ns = ttft_ns, tpot_ns
        self._num_ended = self._num_missed = 0

    def hear(self, ttft_ns: float, tpot_ns: float | None, alone_ns: Callable[[], float]) -> None:
        """Count a request that has ended. `alone_ns` estimates its TTFT on an idle TE, if that matters."""
        self._num_ended += 1
        if ttft_ns > self._ttft_ns or (tpot_ns or 0.0) > self._tpot_ns:
            self._num_missed += alone_ns() <= self._ttft_ns

    def take_share(self) -> float | None:
        """Return the share of the requests that missed their bounds, and begin anew; None if none ended."""
        share = self._num_missed / self._num_ended if self._num_ended else None
        self._num_ended = self._num_missed = 0
        return share


class IdlePrefill:
    """Estimates the time of a prompt on an idle TE from the fastest prompts of requests that have ended.

    The estimate is never above what such a request itself took from its first step to its first token.
    """

    def __init__(self) -> None:
        self._least_ns = self._ns_per_cost = math.inf

    def hear(self, num_tokens: int, num_cached: int, prefill_ns: float) -> None:
        """Learn from a prompt with `num_cached` cached tokens that was computed in `prefill_ns`."""
        self._least_ns = min(self._least_ns, prefill_ns)
        cost = prefill_cost(max(1, num_tokens - num_cached), num_cached)
        self._ns_per_cost = min(self._ns_per_cost, prefill_ns / cost)

    def ns(self, num_tokens: int) -> float:
        """Estimate the time [ns] of a prompt without a cached prefix, which a new TE does not have."""
        return max(self._least_ns, self._ns_per_cost * prefill_cost(num_tokens, 0))
