"""Tensor parallelism: the ranks of a DP group cut the heads and the dense layers' features among them.

Each rank adds up to whole rows what it has of a row-parallel layer (model/sharding.py):

    FP32   its blocks of K as a tree, then the ranks' sums as the rest of that tree    all-reduce
    INT8   the row's maximum over all ranks, for the scale                             all-reduce
           then int32 sums, exact in any order                                         all-reduce

which are the bits of one die. Tokens of MoE layers are cut: a rank gates and dispatches its slice, and the
slices are gathered again.
"""

from __future__ import annotations

from collections.abc import Callable

from xdeepserve.engine.programs.layers import Batch
from xdeepserve.engine.programs.memory_plan import KVCache
from xdeepserve.engine.programs.ops import Work, linear_work
from xdeepserve.engine.programs.tp_group import GroupLayers
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import TP_BLOCKS, Array
from xdeepserve.model.tensors import MLP, Layer, Linear, MoE


class TPLayers(GroupLayers):
    """Layers whose heads and dense layers are cut; h [T, H] is whole on every rank."""

    async def mla(self, h: Array, layer: Layer, cache: KVCache, batch: Batch) -> None:
        """Attention of this rank's heads, whose outputs it projects, added to h [T, H]."""
        rows, width = len(h), self.config.v_head_dim
        prolog, attention, _ = self.attention_work(layer, cache, rows, batch.context)
        await self.compute("MLAProlog", lambda: self._mla_prolog(h, layer, cache, batch), prolog)
        await self.compute(
            "MLA", lambda: self._attend(rows, attention.flops / 2, layer, cache, batch), attention
        )
        o = self.ws.take("o", rows, self.num_heads * width)
        work = self._per_head_work(rows, width, layer.w_uv)
        await self._add_row_parallel("OProj", h, o, lambda: self._head_outputs(rows, layer), layer.wo, work)

    async def dense(self, h: Array, layer: Layer, mlp: MLP) -> None:
        """An MLP of which each rank has some features."""
        act = self.ws.take("act", len(h), mlp.w2.k)

        def run() -> None:
            gate_up = self.ws.take("gate_up", len(h), mlp.w13.n)
            x = self.ws.take("x", *h.shape)
            rows = self.ops.norm(x, h, layer.ffn_norm, self.config.rms_norm_eps)
            self.ops.apply(gate_up, rows, mlp.w13)
            k.swiglu(act, gate_up)

        await self._add_row_parallel("MLP", h, act, run, mlp.w2, linear_work(len(h), mlp.w13))

    async def moe(self, h: Array, layer: Layer, moe: MoE, event_id: int) -> None:
        """Each rank takes its slice of the tokens through the experts."""
        await super().moe(h[self.group.rows(len(h))], layer, moe, event_id)
        await self.gather(h)

    def skip_mla(self, layer: Layer) -> None:
        self.skip("MLAProlog", "MLA")
        self._skip_row_parallel("OProj", layer.wo)

    def skip_dense(self, mlp: MLP) -> None:
        self._skip_row_parallel("MLP", mlp.w2)

    def _skip_row_parallel(self, name: str, layer: Linear) -> None:
        """`_add_row_parallel` of no rows."""
        if layer.scale is not None:
            self.skip(f"{name} inputs")
        self.skip(name, "Residual")

    async def _add_row_parallel(
        self, name: str, h: Array, x: Array, make_x: Callable[[], object], layer: Linear, work: Work
    ) -> None:
        """Add layer(x) to h [T, H]. `make_x`, which costs `work`, makes this rank's columns x [T, K / R]."""
        if layer.scale is None:
            y = self.ws.take("y", *h.shape)

            def partial() -> None:
                make_x()
                self.ops.partial_sums(y, x, layer, TP_BLOCKS // self.group.size)

            await self.compute(name, partial, work + linear_work(len(h), layer))
        else:
            y = await self._partial_int8(name, x, make_x, layer, work)
        total = await self.group.all_reduce(y)

        def finish() -> None:
            result = total
            if layer.scale is not None:
                result = self.ws.take("y", *h.shape)
                k.scale_sums(result, total, self.ws.take("q8_scale", len(h)), layer.scale)
            k.add(h, h, result)

        await self.compute("Residual", finish, Work(0.0, 3.0 * h.nbytes), "aiv")

    async def _partial_int8(
        self, name: str, x: Array, make_x: Callable[[], object], layer: Linear, work: Work
    ) -> Array:
        """int32 [T, N]: this rank's share of the sums; the scales of the rows are in `q8_scale`."""
        take, rows = self.ws.take, len(x)
        maxima, sums = take("maxima", rows), take("sums", rows, layer.n)

        def prepare() -> None:
            make_x()
            k.row_maxima(maxima, x)

        await self.compute(f"{name} inputs", prepare, work)
        largest = await self.group.all_reduce(maxima, "max")

        def multiply() -> None:
            q, scale = take("q8", *x.shape), take("q8_scale", rows)
            k.quantize_by_maxima(q, scale, x, largest)
            self.ops.int8_sums(sums, q, layer)

        await self.compute(name, multiply, linear_work(rows, layer))
        return sums
