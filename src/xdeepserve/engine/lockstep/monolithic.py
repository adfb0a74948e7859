"""A run on one die that holds everything: one call for all layers, whose stages threads share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdeepserve.engine.lockstep.colocated import ColocatedGang
from xdeepserve.engine.lockstep.gang import Share
from xdeepserve.engine.lockstep.kernels import experts as e
from xdeepserve.engine.lockstep.kernels import team
from xdeepserve.errors import ProtocolError


class MonolithicGang(ColocatedGang):
    """One die."""

    def prepare(self) -> None:
        """See `Gang.prepare`."""
        super().prepare()
        self._tables: dict[tuple[int, ...], tuple[np.ndarray, ...]] = {}  # of runs, by their passes

    def _compute(self, share: Share, passes: Sequence[int]) -> None:
        """See `ColocatedGang`."""
        if (key := tuple(passes)) not in self._tables:
            none = np.zeros(e.NUM_EXPERT_COLUMNS, np.int64)
            weights = np.stack([self.weights[at][0] for at in passes])
            dies = np.stack([self.experts[at][0] if at in self.experts else none for at in passes])
            is_moe = np.array([layer.moe is not None for layer in share.layers])
            self._tables[key] = weights, dies, is_moe
        sync = np.zeros(team.SYNC_SIZE, np.int64)
        args = (self.shape, self.exchange.inter, self.buffers[0], *self._tables[key], self.inputs[0])
        self.spread((team.run_together, (*args, len(share.h), self.scratch, sync)))
        if sync[team.LOST]:
            raise ProtocolError(f"lockstep: the {self.num_threads} threads of a step have lost each other")

    def _tell_time(
        self, share: Share, passes: Sequence[int], came: np.ndarray, rows: np.ndarray, contexts: np.ndarray
    ) -> None:
        """See `ColocatedGang`. Without a trace nobody asks when each stage was."""
        tt = self.timetable
        if self.executors[0].die.trace.is_on:
            super()._tell_time(share, passes, came, rows, contexts)
            return
        layers = self.executors[0].layers
        stages = tt.stages_by_kind(layers, share.layers, share.caches, rows, contexts)
        moes = [layer.moe for layer in share.layers if layer.moe is not None]
        total = np.sum([stages[layer.moe is not None].total for layer in share.layers], axis=0)
        if moes:
            each = self._experts_ns(rows * self.shape.top_k, moes[0]) + tt.shared_ns(layers, moes[0], rows)
            total = total + len(moes) * each
        tt.begin(came + total)
