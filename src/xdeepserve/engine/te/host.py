"""Delays of a TE's host in virtual time: scheduling gap, launches and their jitter (xDeepServe 4.4, 7.1).

Every DP group has a launch process of its own. Where dispatch is a barrier, a delay of one group delays all
dies there, because the first dispatch of the step waits for the last die. There jitter becomes visible. For
the same reason pauses of the garbage collector are harmless only where all groups take them in the same step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xdeepserve.engine.deploy.deployment import ExecutionConfig
from xdeepserve.engine.numbers import StepNo
from xdeepserve.hw.spec import Spec

GC_PERIOD = 256  # steps between two collections; assumed: XDS 4.4 says "every few hundred forward passes"
PREEMPTION_RATE = 0.05  # of the launches of a thread that is not pinned; assumed


class Host(NamedTuple):
    """Host side of a TE's steps; delays are functions of the seed, the step and the rank."""

    config: ExecutionConfig
    spec: Spec
    num_groups: int
    seed: int = 0

    def gap_ns(self) -> int:
        """Return the time in ns for scheduling a step; dies wait meanwhile unless the previous step runs."""
        return round(1e9 * self.spec.scheduler_gap.value)

    def bucket(self, num_rows: int) -> int:
        """Return the graph's number of rows, to which a group's step is padded; 0 without graphs."""
        if self.config.mode == "op":
            return 0
        return 1 << max(0, num_rows - 1).bit_length()

    def launches_ns(self, step: StepNo) -> list[int]:
        """Return how long each DP group's launch of a step takes, in ns."""
        base = self.ahead_ns() - self.gap_ns()
        return [base + round(1e9 * delay) for delay in self.jitter(step)]

    def ahead_ns(self) -> int:
        """Return the time in ns from planning a step to its start; it passes beside the step before where
        steps are planned ahead."""
        return self.gap_ns() + (0 if self.config.mode == "op" else self.spec.dispatch_ns("graph"))

    def mean_ns(self) -> float:
        """Return the mean time [ns] that a host without jitter adds to a step; planned ahead, to one that
        takes `ahead_ns` at least."""
        pause = 1e9 * self.spec.gc_pause.value / GC_PERIOD
        return pause if self.config.overlap else self.ahead_ns() + pause

    def jitter(self, step: StepNo) -> np.ndarray:
        """Draw how late each launch of a step is, in seconds [groups]."""
        config, spec, count = self.config, self.spec, self.num_groups
        rng = np.random.Generator(np.random.Philox(key=[self.seed % 2**64, 1 << 40], counter=[step, 0, 0, 0]))
        lost, wait, guard, pause = rng.random((4, count))  # always drawn, so that switches do not mix
        late = np.zeros(count)
        if not config.pin_cores:
            late += np.where(lost < PREEMPTION_RATE, wait * spec.preemption.value, 0.0)
        if not config.cache_graphs:
            late += (0.5 + guard) * spec.guard_checks.value
        if not config.control_gc:
            late += np.where(pause < 1 / GC_PERIOD, spec.gc_pause.value, 0.0)
        elif step % GC_PERIOD == GC_PERIOD - 1:
            late += spec.gc_pause.value
        return late
