"""Computes logits and tokens of all dies in lockstep, at the first die that comes to its head after a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.die.sampler import Sampler, columns
from xdeepserve.engine.run.lockstep.kernels.heads import draw_stage, head_stage
from xdeepserve.engine.run.lockstep.tables import address
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array
from xdeepserve.step.frame import Ends, Frame
from xdeepserve.step.passes import HEAD, head, logit_hidden
from xdeepserve.step.stage import Program, Stage


class Heads:
    """Computes the logits of all dies together and draws the tokens, when the first die comes to its head.

    By then all dies have done their layers. The weights are those of the die that computes, and equal to all
    others'. A die's buffers end up as if it had computed its own logits. Its virtual time is that of its own
    rows. `spread` runs a kernel on all threads.
    """

    def __init__(self, executors: Sequence[Executor], spread: Callable[..., None]) -> None:
        self._executors, self._spread = executors, spread
        self._done: set[int] = set()  # ranks whose logits another die has made

    def program(self, rank: int) -> Program:
        """Return the Program of a die in place of HEAD."""
        if len(self._executors) == 1:
            return HEAD
        *before, last = HEAD
        assert isinstance(last, Stage)
        return (*before, last._replace(ops=(head._replace(kernel=partial(self.run, rank)),)))

    def begin(self) -> None:
        """Forget the computed logits, since all dies' rows are about to go through layers again."""
        self._done.clear()

    def run(self, rank: int, f: Frame) -> None:
        """Compute the logits of all ranks when the first rank comes; for the others do nothing."""
        if rank not in self._done:
            executors = [each for each in self._executors if len(each.runner.frame.logit_rows)]
            self._done.update(each.rank for each in executors)
            self.run_all([each.runner.frame for each in executors], f.ends)
            self._draw([each for each in executors if not each.plan.edits])
        self._done.remove(rank)

    def run_all(self, frames: Sequence[Frame], ends: Ends) -> None:
        """Compute the logits of all frames with the head `ends` of a die that has come: others may be
        lost."""
        given = []
        for f in frames:
            rows = logit_hidden(f, f.whole)
            k.rms_norm(rows, rows, f.ends.norm, f.config.rms_norm_eps)
            given.append(rows)
        head = ends.head.w
        args = (_rows([f.logits for f in frames]), np.concatenate(given), address(head), head[:0])
        self._spread([(head_stage, (*args, frames[0].config.vocab_size))])

    def _draw(self, executors: Sequence[Executor]) -> None:
        """Draw the tokens of dies whose logits are made and need no changes; a single die draws its own."""
        if len(executors) < 2:
            return
        logits = [each.runner.frame.logits for each in executors]
        given = columns([(each.plan, range(len(of))) for each, of in zip(executors, logits, strict=True)], 1)
        tokens = np.empty(len(given.position), np.int32)
        self._spread([(draw_stage, (tokens, _rows(logits), logits[0].shape[1], *given))])
        first = 0
        for executor, of in zip(executors, logits, strict=True):
            assert isinstance(executor.chooser, Sampler)
            executor.chooser.take(executor.plan, tokens[first : first + len(of)])
            first += len(of)


def _rows(arrays: Sequence[Array]) -> np.ndarray:
    """Return the addresses of all rows of some arrays of equal width, one array after another."""
    counts = [len(array) for array in arrays]
    starts, row_nbytes = np.cumsum([0, *counts[:-1]]), arrays[0].strides[0]
    first = np.array([address(array) for array in arrays]) - starts * row_nbytes
    return np.repeat(first, counts) + np.arange(sum(counts)) * row_nbytes
