"""Attention without lockstep kernels, die by die: all operations up to the output projection.

The operations are those of tasks (`step/`), on the same buffers, and read and write the die's own bytes
alone. The output projection and all later stages run in kernels, whatever the kind of attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdeepserve.engine.die.program import Executor
from xdeepserve.engine.run.lockstep.shares import Contribution
from xdeepserve.model.tensors import Layer
from xdeepserve.step.frame import Frame
from xdeepserve.step.layer import ATTENTION
from xdeepserve.step.linear import Threads
from xdeepserve.step.stage import LayerProgram, stages

STAGED = [program for kind, program in ATTENTION.items() if kind != "mla"]


def as_kernels_see(program: LayerProgram) -> LayerProgram:
    """Return a layer with MLA in place of attention that has run before (see `StagedAttention`)."""
    return program._replace(attention=ATTENTION["mla"]) if program.attention in STAGED else program


class StagedAttention:
    """Runs attention of dies in lockstep, one after the other, each operation on `num_threads` threads.

    `is_used` says whether the model's attention is of such a kind. The threads and their scratch memory are
    not shared: another TE's steps may run at the same time.
    """

    def __init__(self, executors: Sequence[Executor], num_threads: int) -> None:
        self.executors, self.is_used = executors, executors[0].config.attention != "mla"
        self._threads = Threads(num_threads if self.is_used else 1)
        self._frames: dict[tuple[int, int], Frame] = {}  # by rank and microbatch

    def run(
        self,
        at: int,
        program: LayerProgram,
        shares: Sequence[Contribution],
        layers: Sequence[Layer],
        cuts: np.ndarray,
        microbatch: int = 0,
    ) -> None:
        """Run attention in pass `at` of a step, on each die's rows between `cuts` [dies, 2] of a microbatch.

        Each die has its own of `layers`. The heads' output is left in the buffer `o`.
        """
        *ops, _ = (op for stage in stages(program.attention) for op in stage.ops)
        for rank, (share, layer, (lo, hi)) in enumerate(zip(shares, layers, cuts.tolist(), strict=True)):
            if hi == lo:
                continue
            frame = self._frame(rank, microbatch)
            frame.begin(share.h[lo:hi], share.batch.part(slice(lo, hi)))
            frame.layer, frame.cache = layer, self.executors[rank].caches[at]
            for op in ops:
                op.kernel(frame)

    def _frame(self, rank: int, microbatch: int) -> Frame:
        if (rank, microbatch) not in self._frames:
            executor = self.executors[rank]
            mem, weights, model = executor.mem, executor.weights, executor.runner.frame.model
            tables, longest = (weights.cos, weights.sin), mem.steps.max_model_len
            frame = self._frames[rank, microbatch] = Frame(
                model, mem.workspace, self._threads, tables, longest
            )
            frame.lane = microbatch % mem.num_choices
        return self._frames[rank, microbatch]

    def close(self) -> None:
        """End the threads of staged attention."""
        self._threads.close()
