"""A run on one die that holds everything: one call for all layers, whose stages threads share."""

from __future__ import annotations

import numpy as np

from xdeepserve.engine.run.gang.colocated import ALONE, TO_THE_END, ColocatedGang
from xdeepserve.engine.run.gang.gang import Call, Span
from xdeepserve.engine.run.gang.kernels import team


class MonolithicGang(ColocatedGang):
    """One die."""

    kernels: frozenset[Span] = frozenset({ALONE, TO_THE_END})

    def _layers(self, passes: np.ndarray, is_moe: np.ndarray, events: np.ndarray) -> list[Call]:
        args = (self.shape, self.exchange.inter, self.buffers, self.weights, self.experts, passes, is_moe)
        return [(team.run_together, (*args, self.inputs, self.cuts[0, 1], self.scratch, self.sync))]
