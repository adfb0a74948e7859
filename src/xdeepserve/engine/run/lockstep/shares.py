"""Contributions of attention dies to a run: their rows of the step, counted and found for all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xdeepserve.engine.run.lockstep.kernels import attention as a
from xdeepserve.engine.walk.schedule import Visits
from xdeepserve.model.canonical import Array
from xdeepserve.step.frame import Batch


class Contribution(NamedTuple):
    """Contribution of an attention die to a run: its rows of the step, and the layers to visit."""

    h: Array
    visits: Visits
    batch: Batch


class RowCounts(NamedTuple):
    """Counts behind the prices of stages on all dies. Most dies have equal ones, which are priced once."""

    few: list[list[int]]  # rows, positions that they attend to, cached positions read; all different
    of_die: np.ndarray  # [dies]: its place among `few`

    @classmethod
    def of(cls, shares: Sequence[Contribution], cuts: np.ndarray) -> RowCounts:
        """Count the rows between `cuts` [dies, 2] of each die's share, as `Batch.part` does die by die."""
        num, batches = len(shares), [share.batch for share in shares]
        die = np.repeat(np.arange(num), [batch.num_tokens for batch in batches])
        first = np.cumsum([0, *(batch.num_tokens for batch in batches)])[:num]
        row = np.arange(len(die)) - first[die]
        is_in = (row >= cuts[die, 0]) & (row < cuts[die, 1])
        seen = np.concatenate([batch.positions for batch in batches])[is_in].astype(np.int64) + 1
        seq, die = np.concatenate([batch.seq_of for batch in batches])[is_in], die[is_in]
        is_last = np.ones(len(die), bool)  # of its sequence's rows
        is_last[:-1] = (seq[1:] != seq[:-1]) | (die[1:] != die[:-1])
        counts = np.zeros((num, 3), np.int64)
        np.add.at(counts[:, 0], die, 1)
        np.add.at(counts[:, 1], die, seen)
        np.add.at(counts[:, 2], die[is_last], seen[is_last])
        few, of_die = np.unique(counts, axis=0, return_inverse=True)
        return cls(few.tolist(), of_die.reshape(-1))

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Number of rows on each die [dies]."""
        return np.array([rows for rows, _, _ in self.few], np.int64)[self.of_die]


def addresses(shares: Sequence[Contribution]) -> np.ndarray:
    """Return the addresses of each die's inputs for the kernels of `attention`, [dies, NUM_INPUTS]."""
    result = np.empty((len(shares), a.NUM_INPUTS), np.int64)
    for row, (h, _, batch) in zip(result, shares, strict=True):
        a.find_inputs(row, h, batch.positions, batch.slots, batch.seq_of, batch.block_tables)
    return result
