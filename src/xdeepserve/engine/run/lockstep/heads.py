"""Computes the heads of all dies in lockstep, at the first die that comes to its own after a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.run.lockstep.kernels.heads import head_stage
from xdeepserve.engine.run.lockstep.tables import address
from xdeepserve.model import kernels as k
from xdeepserve.step.frame import Ends, Frame
from xdeepserve.step.passes import HEAD, head, logit_hidden
from xdeepserve.step.stage import Op, Program, Stage


class Heads:
    """Computes the logits of all dies together, when the first die comes to its head.

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
        return (*before, last._replace(ops=(Op(partial(self.run, rank), head.work),)))

    def begin(self) -> None:
        """Forget the computed logits, since all dies' rows are about to go through layers again."""
        self._done.clear()

    def run(self, rank: int, f: Frame) -> None:
        """Compute the logits of all ranks when the first rank comes; for the others do nothing."""
        if rank not in self._done:
            frames = {each: executor.runner.frame for each, executor in enumerate(self._executors)}
            frames = {each: frame for each, frame in frames.items() if len(frame.logit_rows)}
            self._done.update(frames)
            self.run_all([*frames.values()], f.ends)
        self._done.remove(rank)

    def run_all(self, frames: Sequence[Frame], ends: Ends) -> None:
        """Compute the logits of all frames with the head `ends` of a die that has come: others may be
        lost."""
        given, addresses = [], []
        for f in frames:
            rows = logit_hidden(f, f.whole)
            k.rms_norm(rows, rows, f.ends.norm, f.config.rms_norm_eps)
            given.append(rows)
            addresses.append(address(f.logits) + np.arange(len(rows)) * f.logits.strides[0])
        head = ends.head.w
        args = (np.concatenate(addresses), np.concatenate(given), address(head), head[:0])
        self._spread([(head_stage, (*args, frames[0].config.vocab_size))])
