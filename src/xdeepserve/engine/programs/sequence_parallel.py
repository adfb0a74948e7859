"""The SP-TP-SP hybrid of CloudMatrix's prefill (4.3.1): tokens cut, then heads, then tokens again.

    stage 1, SP   norm and down projections of this rank's slice of the tokens
                  all-gather of the low-rank latents
    stage 2, TP   up projections and attention of all tokens, for this rank's heads
                  all-to-all: heads of all tokens become all heads of a slice
    stage 3, SP   output projection, and the MLP or the experts, of the slice

The tokens of a step, whatever their sequences, are packed in one row of rows and cut evenly. The ranks are
balanced for prompts of any length, and the latents that cross dies are narrower than the rows that tensor
parallelism adds up. No sum is cut, so every bit is that of one die.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdeepserve.engine.programs.layers import Batch
from xdeepserve.engine.programs.memory_plan import KVCache
from xdeepserve.engine.programs.ops import linear_work
from xdeepserve.engine.programs.tp_group import GroupExecutor, GroupLayers
from xdeepserve.model.canonical import Array
from xdeepserve.model.tensors import MLP, Layer


class SPLayers(GroupLayers):
    """Layers of which this rank holds h [n, H], its slice of the tokens; `Batch` is of all tokens."""

    async def mla(self, h: Array, layer: Layer, cache: KVCache, batch: Batch) -> None:
        """The three stages, added to h [n, H]."""
        gathered = await self._stage_1(h, layer, batch.num_tokens)
        parts = await self._stage_2(gathered, layer, cache, batch)
        await self._stage_3(h, parts, layer)

    def _query_input(self, rows: int) -> Array:
        """What queries are projected from: their latent, or the normed row where the query has none."""
        c = self.config
        if c.q_lora_rank is None:
            return self.ws.take("x", rows, c.hidden_size)
        return self.ws.take("q_a", rows, c.q_lora_rank)

    async def _stage_1(self, h: Array, layer: Layer, num_tokens: int) -> Array:
        """Latents of all tokens, each row the query's and then the cache's."""
        c, rows = self.config, len(h)
        query = self._query_input(rows)
        width = query.shape[1] + c.kv_lora_rank + c.qk_rope_head_dim
        latents = self.ws.take("latents", self.group.slice_size(num_tokens), width)

        def run() -> None:
            kv, _ = self._project_down(h, layer)
            np.concatenate([query, kv], axis=1, out=latents[:rows])

        if rows:
            await self.compute("DownProj", run, self._down_work(rows, layer))
        else:
            self.skip("DownProj")
        return await self.group.all_gather(latents, num_tokens)

    async def _stage_2(self, gathered: Array, layer: Layer, cache: KVCache, batch: Batch) -> list[Array]:
        """Attention of this rank's heads; of the slice's tokens, the outputs of each rank's heads."""
        c, rows = self.config, batch.num_tokens

        def project_up() -> None:
            query, kv = self._query_input(rows), self.ws.take("kv", rows, c.kv_lora_rank + c.qk_rope_head_dim)
            query[:], kv[:] = gathered[:, : query.shape[1]], gathered[:, query.shape[1] :]
            self._project_up(kv, self.ops.prepare(query), layer, cache, batch)

        await self.compute("UpProj", project_up, self._up_work(rows, layer))
        _, attention, _ = self.attention_work(layer, cache, rows, batch.context)
        await self.compute(
            "MLA", lambda: self._attend(rows, attention.flops / 2, layer, cache, batch), attention
        )
        o = self.ws.take("o", rows, self.num_heads * c.v_head_dim)
        work = self._per_head_work(rows, c.v_head_dim, layer.w_uv)
        await self.compute("HeadOutputs", lambda: self._head_outputs(rows, layer), work)
        return await self.group.to_slices(o)

    async def _stage_3(self, h: Array, parts: Sequence[Array], layer: Layer) -> None:
        """The output projection of the slice."""
        o = self.ws.take("o_slice", len(h), layer.wo.k)

        def run() -> None:
            np.concatenate(parts, axis=1, out=o)
            self._add_projected(h, o, layer)

        if len(h):
            await self.compute("OProj", run, linear_work(len(h), layer.wo))
        else:
            self.skip("OProj")

    def skip_mla(self, layer: Layer) -> None:
        self.skip("DownProj", "UpProj", "MLA", "HeadOutputs", "OProj")

    async def dense(self, h: Array, layer: Layer, mlp: MLP) -> None:
        """The MLP of the slice."""
        if len(h):
            await super().dense(h, layer, mlp)
        else:
            self.skip("MLP")


class SPExecutor(GroupExecutor):
    """One of the dies of a DP group that cuts tokens, then heads, then tokens."""

    async def run_layers(
        self, h: Array, layers: Sequence[Layer], caches: Sequence[KVCache], batch: Batch, first_event: int
    ) -> None:
        """Layers in place on this rank's slice of h [T, H], which is whole before and after."""
        mine = h[self.layers.group.rows(len(h))]
        await super().run_layers(mine, layers, caches, batch, first_event)
        self.layers.at(layer=self.layer_index[id(layers[-1])])
        await self.layers.gather(h)
        self.layers.at()
