"""The program of an attention die where experts have dies of their own (xDeepServe 5.2).

An attention die runs MLAProlog, attention, output projection, gating, A2E and E2A. A step's rows are cut in
microbatches: while the expert dies work on one, the die computes attention of the next. Rows of one sequence
may be cut apart, since the microbatches of a layer run in order and each finds its predecessors in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from xdeepserve.comm.trampoline.a2e import AttentionSide
from xdeepserve.comm.trampoline.naive import NaiveAttentionSide
from xdeepserve.engine.programs.executor import Executor
from xdeepserve.engine.programs.layers import Batch
from xdeepserve.engine.programs.memory_plan import KVCache
from xdeepserve.engine.programs.ops import Work
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import Layer, MoE


class AttentionExecutor(Executor):
    """An executor whose experts are elsewhere: `sides[m]` is its end of A2E and E2A for microbatch m.

    `shared_expert` is the physical expert that its tokens take for the shared one, None if there is none.
    """

    sides: Sequence[AttentionSide | NaiveAttentionSide]
    shared_expert: int | None

    async def run_layers(
        self, h: Array, layers: Sequence[Layer], caches: Sequence[KVCache], batch: Batch, first_event: int
    ) -> None:
        """Layers in place on h [T, H], microbatch by microbatch; see `Executor.run_layers`."""
        cuts = [len(h) * m // len(self.sides) for m in range(len(self.sides) + 1)]
        parts = [slice(lo, hi) for lo, hi in pairwise(cuts)]
        batches = [
            Batch.of(batch.positions[p], batch.slots[p], batch.seq_of[p], batch.block_tables) for p in parts
        ]
        away = [0] * len(parts)  # the event of the A2E that a microbatch waits to come back from
        last = 0  # the layer before, which it then is in
        event = first_event
        for layer, cache in zip(layers, caches, strict=True):
            for m, part in enumerate(parts):
                rows = h[part]
                self.layers.at(layer=last, microbatch=m)
                away[m] = await self._come_back(m, rows, away[m])
                self.layers.at(layer=self.layer_index[id(layer)], microbatch=m)
                if len(rows):
                    await self.layers.mla(rows, layer, cache, batches[m])
                else:
                    self.layers.skip("MLAProlog", "MLA", "OProj")
                if layer.moe is not None:
                    await self._go_away(m, rows, layer, layer.moe, event)
                    away[m] = event
                elif len(rows) and layer.mlp is not None:
                    await self.layers.dense(rows, layer, layer.mlp)
                else:
                    self.layers.skip("MLP")
            event += layer.moe is not None
            last = self.layer_index[id(layer)]
        for m, part in enumerate(parts):
            self.layers.at(layer=last, microbatch=m)
            await self._come_back(m, h[part], away[m])
        self.layers.at()

    async def _go_away(self, m: int, rows: Array, layer: Layer, moe: MoE, event: int) -> None:
        """Gate the tokens and hand them to the trampoline; the shared expert is one more, of weight 1."""
        x, _, topk_idx, topk_weights = await self.layers.gate(rows, layer, moe)
        if self.shared_expert is not None:
            count = len(rows)
            topk_idx = np.concatenate([topk_idx, np.full((count, 1), self.shared_expert, np.int32)], axis=1)
            topk_weights = np.concatenate([topk_weights, np.ones((count, 1), np.float32)], axis=1)
        self.sides[m].at(**self.layers.place)
        await self.sides[m].a2e(x, topk_idx, topk_weights, event)

    async def _come_back(self, m: int, rows: Array, event: int) -> int:
        """Add the experts' answers, if the microbatch is away; 0."""
        if event:
            y = await self.sides[m].e2a(event)
            if len(rows):
                size = float(rows.nbytes)
                await self.layers.compute(
                    "Residual", lambda: k.add(rows, rows, y), Work(0.0, 3 * size), "aiv"
                )
            else:
                self.layers.skip("Residual")
        return 0
