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

    few: list[tuple[int, int, int]]  # all different: rows, positions attended to, cached positions read
    of_die: np.ndarray  # [dies]: its place among `few`

    @classmethod
    def of(cls, shares: Sequence[Contribution], cuts: np.ndarray) -> RowCounts:
        """Count the rows between `cuts` [dies, 2] of each die's share."""
        known: dict[tuple[int, int, int], int] = {}
        of_die = []
        for share, (start, stop) in zip(shares, cuts.tolist(), strict=True):
            batch = share.batch
            if stop - start < batch.num_tokens:
                batch = batch.part(slice(start, stop))
            counts = batch.num_tokens, batch.context, batch.kv_tokens
            of_die.append(known.setdefault(counts, len(known)))
        return cls(list(known), np.array(of_die))

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
