"""The TE-shell's EPLB trigger: decides from each interval's load which replicas are worth loading.

A policy of the table `PLACEMENT` (`engine/deploy/policies.py`) proposes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xdeepserve.engine.balance.eplb import (
    Counts,
    Holdings,
    PlacementPolicy,
    Slots,
    by_slices,
    costs,
    die_loads,
    hottest_die,
)
from xdeepserve.engine.deploy.sizes import ExpertSizes

MIN_GAIN = 0.05  # share of a layer's hottest dies' load below which its replicas stay as they are (assumed)


class Skew(NamedTuple):
    """Unevenness of a layer's load: hottest over mean, 1 if all have the same."""

    experts: float
    dies: float  # with the replicas that there are


class EPLBTrigger:
    """Keeps the load of the last interval, slice by slice, and decides on replicas at its end."""

    def __init__(self, experts: ExpertSizes, top_k: int, place: PlacementPolicy = by_slices) -> None:
        copies = top_k * experts.num_shared_dies
        self._base = [experts.is_shared(die) / max(1, copies) for die in range(len(experts.experts_of))]
        self._primary = [die for die, held in enumerate(experts.experts_of) for _ in held]
        free = experts.redundant_of
        self._place, self._slots = place, Slots(self._primary, free, self._base, experts.max_replicas)
        self._slices: deque[Counts] = deque(maxlen=experts.balance_slices)
        self._cold = experts.cold_tokens
        self._num_fresh = 0  # slices since the last decision

    def add_slice(self, token_count: Counts) -> None:
        """Add the token counts of another time slice, [layers, E]."""
        self._slices.append(token_count)
        self._num_fresh += 1

    @property
    def is_due(self) -> bool:
        """Whether an interval has ended since the last decision."""
        return self._num_fresh >= (self._slices.maxlen or 1)

    def decide(self, current: Sequence[Holdings]) -> list[Holdings] | None:
        """Decide the contents of the redundant slots, layer by layer; None if nothing changes.

        A layer's replicas change if its hottest dies would have had MIN_GAIN less to do in this interval.
        """
        self._num_fresh = 0
        by_layer = np.stack(self._slices, axis=-1)
        target = [
            self._improved(token_count, held) for token_count, held in zip(by_layer, current, strict=True)
        ]
        return None if target == list(current) else target

    def _improved(self, token_count: Counts, current: Holdings) -> Holdings:
        token_count = costs(token_count, self._cold)
        proposed = self._place(token_count, self._slots)
        now = hottest_die(token_count, self._primary, current, self._base)
        then = hottest_die(token_count, self._primary, proposed, self._base)
        return proposed if then < (1 - MIN_GAIN) * now else current

    def skews(self, current: Sequence[Holdings]) -> list[Skew]:
        """Return the skew of each layer in the latest slice; empty before the first slice."""
        made = []
        for token_count, held in zip(self._slices[-1] if self._slices else (), current, strict=False):
            dies = die_loads(token_count[:, None], self._primary, held, self._base)
            mean = max(float(token_count.mean()), 1e-9)
            made.append(
                Skew(float(token_count.max()) / mean, float(dies.max()) / max(float(dies.mean()), 1e-9))
            )
        return made
