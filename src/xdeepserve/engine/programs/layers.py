"""The die program of one transformer layer: the stages of xDeepServe's Figure 10, each one kernel launch.

    MLAProlog -> MLA -> output projection -> gate -> dispatch -> experts -> combine

Each stage runs kernels on the die's HBM and then spends its virtual time. A rank without tokens skips what
only concerns its own tokens, but takes part in dispatch and combine: they are barriers of all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xdeepserve.comm.xccl import XCCL
from xdeepserve.engine.programs.memory_plan import DieMemory, KVCache
from xdeepserve.engine.programs.ops import Ops, Threads, Work, linear_work
from xdeepserve.hw.die import Die
from xdeepserve.model import kernels as k
from xdeepserve.model.canonical import Array
from xdeepserve.model.reference import LATENT_NORM_EPS
from xdeepserve.model.weights import MLP, Layer, MoE

NO_ROWS = np.empty((0, 0), np.float32)


class Batch(NamedTuple):
    """The token rows of a step, on the die."""

    positions: Array  # int32 [T]
    slots: Array  # int32 [T]
    seq_of: Array  # int32 [T]
    block_tables: Array  # int32 [seqs, max blocks]

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


class Layers:
    """Runs layers on one die. `xccl` is None where a single die holds all experts."""

    def __init__(
        self, die: Die, mem: DieMemory, xccl: XCCL | None, threads: Threads, cos: Array, sin: Array
    ) -> None:
        self.die, self.mem, self.config = die, mem, mem.config
        self.ws, self.ops = mem.workspace, Ops(mem.workspace, threads)
        self.xccl, self.cos, self.sin = xccl, cos, sin
        self.is_int8 = mem.recipe == "int8"
        self.first_expert = mem.experts.start if mem.experts else 0

    async def layer(self, h: Array, layer: Layer, cache: KVCache, batch: Batch, event_id: int) -> None:
        """One layer in place on h [T, H]. `event_id` and the next are the same on all ranks, and grow."""
        if batch.num_tokens:
            await self.mla(h, layer, cache, batch)
        if layer.moe is not None:
            await self.moe(h, layer, layer.moe, event_id)
        elif batch.num_tokens and layer.mlp is not None:
            await self.dense(h, layer, layer.mlp)

    # ---- attention ----------------------------------------------------------------------------------

    async def mla(self, h: Array, layer: Layer, cache: KVCache, batch: Batch) -> None:
        """Absorbed MLA over the paged latent cache, added to h [T, H]."""
        c, rows = self.config, len(h)
        heads, rank = c.num_attention_heads, c.kv_lora_rank
        work = linear_work(rows, layer.wq_b) + linear_work(rows, layer.wkv_a)
        if layer.wq_a is not None:
            work += linear_work(rows, layer.wq_a)
        work += Work(2.0 * rows * layer.w_uk.size, layer.w_uk.nbytes)
        await self.compute("MLAProlog", lambda: self._mla_prolog(h, layer, cache, batch), work)

        context = int(batch.positions.sum()) + rows  # positions seen, over all rows
        entry = c.kv_lora_rank * cache.latent.itemsize + c.qk_rope_head_dim * 4 + cache.scale.itemsize
        work = Work(2.0 * context * heads * (2 * rank + c.qk_rope_head_dim), context * entry)
        await self.compute("MLA", lambda: self._attend(rows, cache, batch), work)

        work = linear_work(rows, layer.wo) + Work(2.0 * rows * layer.w_uv.size, layer.w_uv.nbytes)
        await self.compute("OProj", lambda: self._project_out(h, layer), work)

    def _mla_prolog(self, h: Array, layer: Layer, cache: KVCache, batch: Batch) -> None:
        """Norm, query and latent projections, RoPE, absorption; the new latents go into the cache."""
        c, ops, rows = self.config, self.ops, len(h)
        take, rank = self.ws.take, c.kv_lora_rank
        x = take("x", rows, c.hidden_size)
        k.rms_norm(x, h, layer.attn_norm, c.rms_norm_eps)
        q_a = x
        if layer.wq_a is not None and c.q_lora_rank is not None:
            q_a = take("q_a", rows, c.q_lora_rank)
            ops.linear(q_a, x, layer.wq_a)
            k.rms_norm(q_a, q_a, layer.q_norm, LATENT_NORM_EPS)
        q = take("q", rows, c.num_attention_heads * c.qk_head_dim)
        ops.linear(q, q_a, layer.wq_b)
        q = q.reshape(rows, c.num_attention_heads, c.qk_head_dim)
        k.rope_heads(q, batch.positions, self.cos, self.sin)
        k.absorb_query(take("q_lat", rows, c.num_attention_heads, rank), q, layer.w_uk)

        kv = take("kv", rows, rank + c.qk_rope_head_dim)
        ops.linear(kv, x, layer.wkv_a)
        latent, k_pe = take("latent", rows, rank), take("k_pe", rows, 1, c.qk_rope_head_dim)
        k.rms_norm(latent, kv, layer.kv_norm, LATENT_NORM_EPS)
        k_pe[:, 0] = kv[:, rank:]
        k.rope_heads(k_pe, batch.positions, self.cos, self.sin)
        k_pe = k_pe.reshape(rows, c.qk_rope_head_dim)
        if self.is_int8:
            k.append_kv_int8(cache.latent, cache.scale, cache.k_pe, batch.slots, latent, k_pe)
        else:
            k.append_kv(cache.latent, cache.k_pe, batch.slots, latent, k_pe)

    def _attend(self, rows: int, cache: KVCache, batch: Batch) -> None:
        c, take = self.config, self.ws.take
        shape = (rows, c.num_attention_heads, c.kv_lora_rank)
        self.ops.threads.over_rows(
            k.attention,
            int(batch.positions.sum()) // rows * c.num_attention_heads * 2 * c.kv_lora_rank,
            take("o_lat", *shape),
            take("q_lat", *shape),
            take("q", rows, c.num_attention_heads, c.qk_head_dim),
            batch.seq_of,
            batch.positions,
            rest=(*cache, batch.block_tables, c.softmax_scale),
        )

    def _project_out(self, h: Array, layer: Layer) -> None:
        c, take, rows = self.config, self.ws.take, len(h)
        o = take("o", rows, c.num_attention_heads, c.v_head_dim)
        k.project_value(o, take("o_lat", rows, c.num_attention_heads, c.kv_lora_rank), layer.w_uv)
        y = take("y", rows, c.hidden_size)
        self.ops.linear(y, o.reshape(rows, -1), layer.wo, is_row_parallel=True)
        k.add(h, h, y)

    # ---- feed-forward -------------------------------------------------------------------------------

    async def dense(self, h: Array, layer: Layer, mlp: MLP) -> None:
        """The MLP of a layer without experts, added to h [T, H]."""

        def run() -> None:
            x, y = self._normed(h, layer), self.ws.take("y", *h.shape)
            self.ops.mlp(y, x, mlp)
            k.add(h, h, y)

        await self.compute("MLP", run, linear_work(len(h), mlp.w13) + linear_work(len(h), mlp.w2))

    async def moe(self, h: Array, layer: Layer, moe: MoE, event_id: int) -> None:
        """Routed and shared experts, added to h [T, H]."""
        c, ws, rows = self.config, self.ws, len(h)
        x = self._normed(h, layer)
        topk_idx = ws.take("topk_idx", rows, c.num_experts_per_tok)
        topk_weights = ws.take("topk_weights", rows, c.num_experts_per_tok)
        if rows:
            work = Work(2.0 * moe.gate.size * rows, moe.gate.nbytes)
            await self.compute("Gate", lambda: self._gate(topk_idx, topk_weights, x, moe), work)

        if self.xccl is None:
            slot_out = await self._own_experts(x, topk_idx, moe)
        else:
            slot_out = await self._remote_experts(x, topk_idx, moe, event_id)

        if rows:
            shared_work = Work()
            if moe.shared is not None:
                shared_work = linear_work(rows, moe.shared.w13) + linear_work(rows, moe.shared.w2)
            await self.compute(
                "SharedExpert", lambda: self._merge(h, x, slot_out, topk_weights, moe), shared_work
            )

    def _normed(self, h: Array, layer: Layer) -> Array:
        x = self.ws.take("x", *h.shape)
        k.rms_norm(x, h, layer.ffn_norm, self.config.rms_norm_eps)
        return x

    def _gate(self, topk_idx: Array, topk_weights: Array, x: Array, moe: MoE) -> None:
        c = self.config
        scores = self.ws.take("scores", len(x), c.n_routed_experts)
        k.matmul(scores, x, moe.gate)
        k.sigmoid(scores, scores)
        k.gate(
            topk_idx,
            topk_weights,
            scores,
            moe.bias,
            c.n_group,
            c.topk_group,
            c.norm_topk_prob,
            c.routed_scaling_factor,
        )

    async def _own_experts(self, x: Array, topk_idx: Array, moe: MoE) -> Array:
        """All experts live here: slot_out [T, K, H] without leaving the die."""
        ws, (rows, top_k), hidden = self.ws, topk_idx.shape, x.shape[1]
        slot_out = ws.take("slot_out", rows * top_k, hidden)

        def run() -> None:
            source, scale = self.ops.quantize(x) if self.is_int8 else (x, None)
            received = ws.take("expert_received", rows * top_k, hidden)
            received.reshape(rows, top_k, hidden)[...] = source[:, None]
            received_scale = ws.take("expert_received_scale", rows * top_k)
            if scale is not None:
                received_scale.reshape(rows, top_k)[...] = scale[:, None]
            self._experts(slot_out, received, received_scale, topk_idx.reshape(-1), moe)
            if self.is_int8:
                k.round_bf16(slot_out)  # as combine carries it

        await self.compute("Experts", run, self._expert_work(rows * top_k, moe))
        return slot_out.reshape(rows, top_k, hidden)

    async def _remote_experts(self, x: Array, topk_idx: Array, moe: MoE, event_id: int) -> Array:
        """Dispatch, run the experts that live here on what arrived, combine: slot_out [T, K, H]."""
        assert self.xccl is not None
        received = await self.xccl.dispatch(x, topk_idx, event_id)
        sent = self.ws.take("expert_sent", len(received.payload), x.shape[1])
        if len(sent):
            local_idx = self.ws.take("expert_idx", len(sent))
            np.subtract(received.expert_idx, self.first_expert, out=local_idx)
            await self.compute(
                "Experts",
                lambda: self._experts(sent, received.payload, received.scale, local_idx, moe),
                self._expert_work(len(sent), moe),
            )
        return await self.xccl.combine(sent, event_id + 1)

    def _experts(self, out: Array, rows: Array, scale: Array, local_idx: Array, moe: MoE) -> None:
        """out[i] = expert local_idx[i] of rows[i]: group by expert, grouped GEMMs, back in order."""
        ws, num_rows = self.ws, len(rows)
        order = ws.take("expert_order", num_rows)
        offsets = ws.take("expert_offsets", len(self.mem.experts) + 1)
        k.group_rows(order, offsets, local_idx)
        grouped = ws.take("expert_in", *rows.shape)
        grouped_scale = ws.take("expert_in_scale", num_rows)
        k.gather_rows(grouped, rows, order)
        if self.is_int8:
            grouped_scale[...] = scale[order]
        result = ws.take("expert_out", num_rows, out.shape[1])
        self.ops.experts(result, grouped, grouped_scale, offsets, moe.experts)
        k.scatter_rows(out, result, order)

    def _expert_work(self, rows: int, moe: MoE) -> Work:
        """Grouped GEMM: weights of the experts that have rows are read once."""
        per_expert = (moe.experts.w13.w.size + moe.experts.w2.w.size) / max(len(self.mem.experts), 1)
        touched = min(rows, len(self.mem.experts))
        return Work(2.0 * rows * per_expert, touched * per_expert * moe.experts.w13.w.itemsize)

    def _merge(self, h: Array, x: Array, slot_out: Array, topk_weights: Array, moe: MoE) -> None:
        """Shared expert, weighted sum in slot order, residual."""
        shared = NO_ROWS
        if moe.shared is not None:
            shared = self.ws.take("shared", *x.shape)
            self.ops.mlp(shared, x, moe.shared)
        y = self.ws.take("y", *h.shape)
        k.combine(y, slot_out, topk_weights, shared)
        k.add(h, h, y)

    async def compute(self, name: str, fn: object, work: Work) -> None:
        await self.die.compute(
            name,
            fn,  # type: ignore[arg-type]
            flops=work.flops,
            nbytes=work.nbytes,
            arithmetic="int8" if self.is_int8 else "bf16",
        )
