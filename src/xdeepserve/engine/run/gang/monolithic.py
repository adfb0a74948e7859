"""A run on one die that holds everything: one call for all layers, whose stages threads share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdeepserve.engine.run.gang.colocated import ALONE, TO_THE_END, ColocatedGang
from xdeepserve.engine.run.gang.gang import Share, Span
from xdeepserve.engine.run.gang.kernels import experts as e
from xdeepserve.engine.run.gang.kernels import team
from xdeepserve.engine.run.gang.kernels.sync import new_sync
from xdeepserve.engine.walk.schedule import Visit


class MonolithicGang(ColocatedGang):
    """One die."""

    kernels: frozenset[Span] = frozenset({ALONE, TO_THE_END})

    def prepare(self) -> None:
        """Find the tables, and keep those of each kind of pass."""
        super().prepare()
        self._tables: dict[tuple[int, ...], tuple[np.ndarray, ...]] = {}  # of runs, by their passes

    def _compute(self, shares: Sequence[Share], visits: Sequence[Visit], passes: Sequence[int]) -> None:
        """All bytes, in one call; or in one for each layer, where attention has run before."""
        rows = len(shares[0].h)
        if not self.staged.is_used:
            self._run_layers(visits, passes, rows)
            return
        for visit, at in zip(visits, passes, strict=True):
            self.staged.run(at, visit.program, shares, self.columns[at], self.cuts)
            self._run_layers([visit], [at], rows)

    def _run_layers(self, visits: Sequence[Visit], passes: Sequence[int], rows: int) -> None:
        """Some layers in one call."""
        if (key := tuple(passes)) not in self._tables:
            none = np.zeros(e.NUM_EXPERT_COLUMNS, np.int64)
            weights = np.stack([self.weights[at][0] for at in passes])
            dies = np.stack([self.experts[at][0] if at in self.experts else none for at in passes])
            is_moe = np.array([visit.layer.moe is not None for visit in visits])
            self._tables[key] = weights, dies, is_moe
        sync = new_sync()
        args = (self.shape, self.exchange.inter, self.buffers[0], *self._tables[key], self.inputs)
        self.spread([(team.run_together, (*args, rows, self.scratch, sync))])
        self.check_threads(sync)
