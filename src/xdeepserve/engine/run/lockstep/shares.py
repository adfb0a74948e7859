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
        batches = [share.batch for share in shares]
        counts = [(batch.num_tokens, batch.context, batch.kv_tokens) for batch in batches]
        if (cuts[:, 1] - cuts[:, 0]).sum() < sum(batch.num_tokens for batch in batches):
            counts = _of_parts(batches, cuts)
        of_die = [known.setdefault(of_one, len(known)) for of_one in counts]
        return cls(list(known), np.array(of_die))

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Number of rows on each die [dies]."""
        return np.array([rows for rows, _, _ in self.few], np.int64)[self.of_die]


def _of_parts(batches: Sequence[Batch], cuts: np.ndarray) -> list[tuple[int, int, int]]:
    """Return rows, context and KV tokens of the part of each batch between `cuts` [dies, 2], as `Batch.of`
    counts them; in one pass over all rows, since NumPy takes as long for one of them."""
    starts, stops = (cuts + np.cumsum([0, *(batch.num_tokens for batch in batches[:-1])])[:, None]).T
    seen = np.concatenate([batch.positions for batch in batches]).astype(np.int64) + 1
    seq_of = np.concatenate([batch.seq_of for batch in batches])
    ends = np.append(seq_of[1:] != seq_of[:-1], True)  # the last rows of sequences
    ends[stops[stops > starts] - 1] = True
    sums = [np.concatenate([[0], np.cumsum(values)]) for values in (seen, seen * ends)]
    counts = (stops - starts, *(total[stops] - total[starts] for total in sums))
    return list(zip(*(count.tolist() for count in counts), strict=True))


def addresses(shares: Sequence[Contribution]) -> np.ndarray:
    """Return the addresses of each die's inputs for the kernels of `attention`, [dies, NUM_INPUTS]."""
    result = np.empty((len(shares), a.NUM_INPUTS), np.int64)
    for row, (h, _, batch) in zip(result, shares, strict=True):
        a.find_inputs(row, h, batch.positions, batch.slots, batch.seq_of, batch.block_tables)
    return result
