"""A run on one die that holds everything: one call for all layers, and threads that share its sequences.

A thread takes neighbouring sequences of a step through all layers by itself, as a die with attention does in
a pod: rows of different sequences meet nowhere but in the weights that they read, and nobody waits. Each
thread has its rows' part of every buffer to itself. The KV cache and the results are the same bytes for any
number of threads; with one, so is all scratch memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from xdeepserve.engine.lockstep import tables
from xdeepserve.engine.lockstep.colocated import ColocatedGang
from xdeepserve.engine.lockstep.gang import Share, addresses
from xdeepserve.engine.lockstep.kernels import attention as a
from xdeepserve.engine.lockstep.kernels import experts as e
from xdeepserve.engine.lockstep.kernels import team
from xdeepserve.engine.lockstep.programs import LockstepExecutor
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.engine.programs.layers import Batch
from xdeepserve.engine.programs.memory_plan import KVCache
from xdeepserve.errors import ProtocolError
from xdeepserve.model.canonical import Array
from xdeepserve.model.weights import Layer

HAS_TEAMS = hasattr(os, "sched_yield")
FEW_ROWS = 8  # the threads share their products instead, see kernels/team.py
MAX_SHARE = 0.7  # of a step's rows in one sequence; with more, threads had better share every product


def cut(seq_of: np.ndarray, num_threads: int) -> np.ndarray:
    """[threads, 2]: first and last row + 1 of each thread, between sequences; some may have none.

    seq_of [T] ascends: the sequence of each row.
    """
    rows = len(seq_of)
    starts = np.flatnonzero(np.diff(seq_of, prepend=-1))
    bounds = [0]
    for i in range(1, num_threads):
        wanted = rows * i / num_threads
        nearest = int(starts[np.abs(starts - wanted).argmin()]) if rows else 0
        bounds.append(max(bounds[-1], nearest))
    return np.array([bounds, [*bounds[1:], rows]], np.int64).T.copy()


class MonolithicGang(ColocatedGang):
    """One die, a row of the tables for each thread."""

    def prepare(self) -> None:
        """See `Gang.prepare`."""
        super().prepare()
        num, mem = self.num_threads, self.executors[0].mem
        ws, max_rows = mem.workspace, mem.sizes.max_tokens

        def row_nbytes(name: str) -> int:
            return ws.size(name) // max_rows * ws.dtype(name).itemsize if name in ws else 0

        self._whole = self.buffers
        self._row_nbytes = np.zeros_like(self.buffers)
        self._row_nbytes[0, : len(a.BUFFERS)] = [row_nbytes(name) for name in a.BUFFERS]
        self.weights = [table.repeat(num, axis=0) for table in self.weights]
        self._layers = [*self.experts]
        self._experts = np.array([table.repeat(num, axis=0) for table in self.experts.values()], np.int64)
        self._expert_row_nbytes = np.zeros(e.NUM_EXPERT_COLUMNS, np.int64)
        self._expert_row_nbytes[e.IN :] = [row_nbytes(f"expert_{name}") for name in e.BUFFERS]
        self._expert_row_nbytes[e.OFFSETS] = 0
        self._tables: dict[tuple[int, ...], tuple[np.ndarray, ...]] = {}  # of runs, by their passes
        self._no_experts = np.zeros(e.NUM_EXPERT_COLUMNS, np.int64)
        # The first thread uses the die's own.
        self._offsets = np.zeros((num, len(mem.slots) + 1), np.int32)
        for at in range(1, num if self._layers else 0):
            self._experts[:, at, e.OFFSETS] = tables.address(self._offsets[at])

    def _compute(self, share: Share, passes: Sequence[int]) -> None:
        """See `ColocatedGang`."""
        rows = len(share.h)
        if self.num_threads == 1 or rows > FEW_ROWS or not HAS_TEAMS:
            super()._compute(share, passes)
            return
        if (key := tuple(passes)) not in self._tables:
            own = dict(zip(self._layers, self._experts[:, 0], strict=True)) if self._layers else {}
            weights = np.stack([self.weights[at][0] for at in passes])
            dies = np.stack([own.get(at, self._no_experts) for at in passes])
            is_moe = np.array([layer.moe is not None for layer in share.layers])
            self._tables[key] = weights, dies, is_moe
        sync = np.zeros(team.SYNC_SIZE, np.int64)
        args = (self.shape, self.exchange.inter, self._whole[0], *self._tables[key], self.inputs[0], rows)
        self.spread((team.run_together, (*args, self.scratch, sync)))
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

    def place(self, shares: Sequence[Share]) -> None:
        """See `ColocatedGang.place`."""
        self.cuts = cut(shares[0].batch.seq_of, self.num_threads)
        self.inputs = addresses(shares).repeat(self.num_threads, axis=0)
        first = self.cuts[:, :1]
        self.buffers = self._whole + first * self._row_nbytes
        if self._layers:
            experts = self._experts + first * self._expert_row_nbytes
            self.experts = dict(zip(self._layers, experts, strict=True))


class MonolithicExecutor(LockstepExecutor):
    """The program of a die that holds everything."""

    async def run_layers(
        self, h: Array, layers: Sequence[Layer], caches: Sequence[KVCache], batch: Batch, first_event: int
    ) -> None:
        """Layers in place on h [T, H], by the gang or, a step of one long sequence, kernel by kernel."""
        num = self.gang.num_threads
        if num > 1 and len(h) > FEW_ROWS:
            cuts = cut(batch.seq_of, num)
            if (cuts[:, 1] - cuts[:, 0]).max() > MAX_SHARE * len(h):
                await Executor.run_layers(self, h, layers, caches, batch, first_event)
                return
        await super().run_layers(h, layers, caches, batch, first_event)
