"""The die program of one transformer layer: the stages of xDeepServe's Figure 10, each one kernel launch.

    MLAProlog -> MLA -> output projection -> gate -> dispatch -> experts -> combine

Each stage runs kernels on the die's HBM and then spends its virtual time. A rank without tokens skips what
only concerns its own tokens, but takes part in dispatch and combine: they are barriers of all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xdeepserve.comm.exchange.handle import XCCL
from xdeepserve.engine.programs.launcher import Launches
from xdeepserve.engine.programs.memory_plan import DieMemory, KVCache
from xdeepserve.engine.programs.ops import Ops, Rows, Threads, Work, linear_work
from xdeepserve.engine.programs.replicas import Routes
from xdeepserve.engine.programs.workspace import Workspace
from xdeepserve.hw.die import Die
from xdeepserve.hw.spec import Core
from xdeepserve.model import kernels as k
from xdeepserve.model.cache_layout import scratch_size
from xdeepserve.model.canonical import Array
from xdeepserve.model.reference import LATENT_NORM_EPS
from xdeepserve.model.tensors import MLP, Layer, MoE

FLOAT_KERNELS = {"MLA", "HeadOutputs", "OProj inputs", "Sample", "Draft", "MTPInput"}  # in INT8 recipe too
NO_ROWS = np.empty((0, 0), np.float32)


class Batch(NamedTuple):
    """The token rows of a step, on the die."""

    positions: Array  # int32 [T]
    slots: Array  # int32 [T]
    seq_of: Array  # int32 [T]
    block_tables: Array  # int32 [seqs, max blocks]
    context: int  # positions seen, over all rows

    @classmethod
    def of(cls, positions: Array, slots: Array, seq_of: Array, block_tables: Array) -> Batch:
        return cls(positions, slots, seq_of, block_tables, int(positions.sum()) + len(positions))

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


class Layers:
    """Runs layers on one die. `xccl` is None where a single die holds all experts."""

    OUTPUT_STAGES: tuple[str, ...] = ("SharedExpert",)  # after combine

    def __init__(
        self,
        die: Die,
        mem: DieMemory,
        xccl: XCCL | None,
        threads: Threads,
        cos: Array,
        sin: Array,
        workspace: Workspace | None = None,
    ) -> None:
        self.die, self.mem, self.config = die, mem, mem.config
        self.ws, self.is_int8 = workspace or mem.workspace, mem.recipe == "int8"
        self.ops = Ops(self.ws, threads, self.is_int8)
        self.xccl, self.cos, self.sin = xccl, cos, sin
        self.scratch_size = scratch_size(
            mem.sizes.max_model_len, self.config.kv_lora_rank, self.config.qk_rope_head_dim
        )
        self.num_heads = len(mem.heads)
        self.softmax_scale = self.config.softmax_scale
        self._work_key, self._work = (-1, -1), (Work(), Work(), Work())
        self.launcher: Launches | None = None  # None: launches cost nothing
        self._home: dict[str, int] = {}  # the die's DP domain, if there are some: for traces
        self.place: dict[str, int] = {}  # the same, and layer and microbatch

    async def layer(self, h: Array, layer: Layer, cache: KVCache, batch: Batch, event_id: int) -> None:
        """One layer in place on h [T, H]. `event_id` is the same on all ranks, and grows."""
        if batch.num_tokens:
            await self.mla(h, layer, cache, batch)
        if layer.moe is not None:
            await self.moe(h, layer, layer.moe, event_id)
        elif batch.num_tokens and layer.mlp is not None:
            await self.dense(h, layer, layer.mlp)

    # ---- attention ----------------------------------------------------------------------------------

    async def mla(self, h: Array, layer: Layer, cache: KVCache, batch: Batch) -> None:
        """Absorbed MLA over the paged latent cache, added to h [T, H]."""
        prolog, attention, output = self.attention_work(layer, cache, len(h), batch.context)
        await self.compute("MLAProlog", lambda: self._mla_prolog(h, layer, cache, batch), prolog)
        await self.compute(
            "MLA", lambda: self._attend(len(h), attention.flops / 2, layer, cache, batch), attention
        )
        await self.compute("OProj", lambda: self._project_out(h, layer), output)

    def attention_work(
        self, layer: Layer, cache: KVCache, rows: int, context: int
    ) -> tuple[Work, Work, Work]:
        """Of the prolog, of attention to `context` positions over all rows, and of the output projection.

        All layers have the same shapes, so the last answer is kept.
        """
        if self._work_key != (rows, context):
            c = self.config
            rank = c.kv_lora_rank
            prolog = self._down_work(rows, layer) + self._up_work(rows, layer)
            entry = rank * cache.latent.itemsize + c.qk_rope_head_dim * 4 + cache.scale.itemsize
            flops = 2.0 * context * self.num_heads * (2 * rank + c.qk_rope_head_dim)
            output = linear_work(rows, layer.wo) + self._per_head_work(rows, c.v_head_dim, layer.w_uv)
            self._work_key, self._work = (rows, context), (prolog, Work(flops, context * entry), output)
        return self._work

    def _down_work(self, rows: int, layer: Layer) -> Work:
        work = linear_work(rows, layer.wkv_a)
        return work if layer.wq_a is None else work + linear_work(rows, layer.wq_a)

    def _up_work(self, rows: int, layer: Layer) -> Work:
        up = self._per_head_work(rows, self.config.qk_nope_head_dim, layer.w_uk)
        return linear_work(rows, layer.wq_b) + up

    def _per_head_work(self, rows: int, width: int, w: Array) -> Work:
        """Of a product with one [width, C] or [C, width] matrix per head, all in w."""
        size = self.num_heads * self.config.kv_lora_rank * width
        return Work(2.0 * rows * size, float(w.itemsize * size))

    def _mla_prolog(self, h: Array, layer: Layer, cache: KVCache, batch: Batch) -> None:
        """Norm, query and latent projections, RoPE, absorption; the new latents go into the cache."""
        kv, source = self._project_down(h, layer)
        self._project_up(kv, source, layer, cache, batch)

    def _project_down(self, h: Array, layer: Layer) -> tuple[Array, Rows]:
        """From h [T, H] to the low-rank latents: kv [T, C + R], and the input of wq_b."""
        c, ops, rows, take = self.config, self.ops, len(h), self.ws.take
        x = take("x", rows, c.hidden_size)
        source = ops.norm(x, h, layer.attn_norm, c.rms_norm_eps)
        kv = take("kv", rows, c.kv_lora_rank + c.qk_rope_head_dim)
        ops.apply(kv, source, layer.wkv_a)
        if layer.wq_a is not None and c.q_lora_rank is not None:
            q_a = take("q_a", rows, c.q_lora_rank)
            ops.apply(q_a, source, layer.wq_a)
            assert layer.q_norm is not None
            source = ops.norm(q_a, q_a, layer.q_norm, LATENT_NORM_EPS)
        return kv, source

    def _project_up(self, kv: Array, source: Rows, layer: Layer, cache: KVCache, batch: Batch) -> None:
        """From the latents to the cache and to this die's heads: q [T, heads * D], q_lat [T, heads * C]."""
        c, ops, rows, take = self.config, self.ops, len(kv), self.ws.take
        heads, rank = self.num_heads, c.kv_lora_rank
        k.append_kv(
            *cache, batch.slots, kv, layer.kv_norm, LATENT_NORM_EPS, batch.positions, self.cos, self.sin
        )
        q = take("q", rows, heads * c.qk_head_dim)
        ops.apply(q, source, layer.wq_b)
        k.rope_heads(q, heads, batch.positions, self.cos, self.sin)
        ops.heads(take("q_lat", rows, heads * rank), q, layer.w_uk, heads, c.qk_nope_head_dim)

    def _attend(self, rows: int, num_ops: float, layer: Layer, cache: KVCache, batch: Batch) -> None:
        c, take = self.config, self.ws.take
        heads, width = self.num_heads, self.num_heads * c.kv_lora_rank
        self.ops.threads.over_pieces(
            k.attention,
            num_ops,
            self.scratch_size,
            take("o_lat", rows, width),
            take("q_lat", rows, width),
            take("q", rows, heads * c.qk_head_dim),
            heads,
            c.qk_rope_head_dim,
            batch.seq_of,
            batch.positions,
            *cache,
            batch.block_tables,
            self.softmax_scale,
            layer.int8_attention,
        )

    def _project_out(self, h: Array, layer: Layer) -> None:
        self._add_projected(h, self._head_outputs(len(h), layer), layer)

    def _add_projected(self, h: Array, o: Array, layer: Layer) -> None:
        y = self.ws.take("y", *h.shape)
        self.ops.apply(y, self.ops.prepare(o), layer.wo, is_row_parallel=True)
        k.add(h, h, y)

    def _head_outputs(self, rows: int, layer: Layer) -> Array:
        """o [T, heads * V] of this die's heads, from the attended latents."""
        c, take, heads = self.config, self.ws.take, self.num_heads
        o, o_lat = take("o", rows, heads * c.v_head_dim), take("o_lat", rows, heads * c.kv_lora_rank)
        self.ops.heads(o, o_lat, layer.w_uv, heads, c.kv_lora_rank)
        return o

    # ---- feed-forward -------------------------------------------------------------------------------

    async def dense(self, h: Array, layer: Layer, mlp: MLP) -> None:
        """The MLP of a layer without experts, added to h [T, H]."""

        def run() -> None:
            x, y = self.ws.take("x", *h.shape), self.ws.take("y", *h.shape)
            self.ops.mlp(y, self.ops.norm(x, h, layer.ffn_norm, self.config.rms_norm_eps), mlp)
            k.add(h, h, y)

        await self.compute("MLP", run, linear_work(len(h), mlp.w13) + linear_work(len(h), mlp.w2))

    async def gate(self, h: Array, layer: Layer, moe: MoE) -> tuple[Array, Rows, Array, Array]:
        """Norm and routing of h [T, H]: x [T, H], also as linear layers take it (until the next are made),
        topk_idx int32 [T, K], physical experts, and topk_weights [T, K]."""
        c, ws, rows = self.config, self.ws, len(h)
        x = ws.take("x", rows, c.hidden_size)
        topk_idx = ws.take("topk_idx", rows, c.num_experts_per_tok)
        topk_weights = ws.take("topk_weights", rows, c.num_experts_per_tok)
        source = Rows(x, None)
        if rows:

            def run() -> None:
                nonlocal source
                source = self.ops.norm(x, h, layer.ffn_norm, c.rms_norm_eps)
                self._gate(topk_idx, topk_weights, x, moe)

            await self.compute("Gate", run, self.gate_work(rows, moe), "aiv")
        else:
            self.skip("Gate")
        if self.mem.routes is not None:
            topk_idx = await self._find_replicas(self.mem.routes, topk_idx, moe)
        return x, source, topk_idx, topk_weights

    async def _find_replicas(self, routes: Routes, topk_idx: Array, moe: MoE) -> Array:
        """Count the tokens of each logical expert, and give each token one of its replicas."""
        physical, nbytes = self.ws.take("topk_physical", *topk_idx.shape), 3.0 * topk_idx.nbytes
        stages = {
            "Collect": lambda: routes.collect(topk_idx, moe),
            "Route": lambda: routes.route(physical, topk_idx, moe),
        }
        for name, run in stages.items():
            if name == "Collect" and not routes.collects:
                continue
            if len(topk_idx):
                await self.compute(name, run, Work(0.0, nbytes), "aiv")
            else:
                self.skip(name)
        return physical

    def gate_work(self, rows: int, moe: MoE) -> Work:
        """Of routing."""
        size = self.config.hidden_size * self.config.n_routed_experts
        return Work(2.0 * size * rows, float(moe.gate.itemsize * size))

    async def moe(self, h: Array, layer: Layer, moe: MoE, event_id: int) -> None:
        """Routed and shared experts, added to h [T, H]."""
        rows = len(h)
        x, source, topk_idx, topk_weights = await self.gate(h, layer, moe)
        if self.xccl is None:
            slot_out = await self._own_experts(source, topk_idx, moe)
        else:
            slot_out = await self._remote_experts(x, topk_idx, moe, event_id)

        if rows:
            await self.add_outputs(h, source, slot_out, topk_weights, moe)
        else:
            self.skip(*self.OUTPUT_STAGES)

    async def add_outputs(
        self, h: Array, source: Rows, slot_out: Array, topk_weights: Array, moe: MoE
    ) -> None:
        """The shared expert, and the sum of all experts' outputs, added to h [T, H]."""
        await self.compute(
            "SharedExpert",
            lambda: self.add_sum(h, slot_out, topk_weights, self.shared_output(h, source, moe)),
            self.shared_work(len(h), moe),
        )

    def shared_work(self, rows: int, moe: MoE) -> Work:
        """Of the shared expert, if there is one."""
        if moe.shared is None:
            return Work()
        return linear_work(rows, moe.shared.w13) + linear_work(rows, moe.shared.w2)

    def shared_output(self, h: Array, source: Rows, moe: MoE) -> Array:
        """[T, H] of the shared expert; no rows if there is none."""
        if moe.shared is None:
            return NO_ROWS
        shared = self.ws.take("shared", *h.shape)
        self.ops.mlp(shared, source, moe.shared)
        return shared

    def add_sum(self, h: Array, slot_out: Array, topk_weights: Array, shared: Array) -> None:
        """Weighted sum in slot order, shared expert, residual."""
        # INT8: experts' outputs are BF16, as if each came from a die of its own.
        k.combine(h, slot_out, topk_weights, shared, self.is_int8)

    def _gate(self, topk_idx: Array, topk_weights: Array, x: Array, moe: MoE) -> None:
        c = self.config
        logits = self.ws.take("gate_logits", len(x), c.n_routed_experts)
        self.ops.matmul(logits, x, moe.gate)
        k.gate(
            topk_idx,
            topk_weights,
            logits,
            moe.bias,
            c.n_group,
            c.topk_group,
            c.norm_topk_prob,
            c.routed_scaling_factor,
        )

    async def _own_experts(self, source: Rows, topk_idx: Array, moe: MoE) -> Array:
        """All experts live here: slot_out [T * K, H] without leaving the die."""
        slot_out = self.ws.take("slot_out", topk_idx.size, source.x.shape[1])
        if not len(slot_out):
            self.skip("Experts")
            return slot_out
        await self.compute(
            "Experts",
            lambda: self._experts(slot_out, source, topk_idx.reshape(-1), moe),
            self.expert_work(topk_idx.size, moe),
        )
        return slot_out

    async def _remote_experts(self, x: Array, topk_idx: Array, moe: MoE, event_id: int) -> Array:
        """Dispatch, run the experts that live here on what arrived, combine: slot_out [T * K, H]."""
        assert self.xccl is not None
        received = await self.xccl.dispatch(x, topk_idx, event_id)
        sent = self.ws.take("expert_sent", len(received.payload), x.shape[1])
        if len(sent):
            rows = Rows(received.payload, received.scale if self.is_int8 else None)
            local_idx = self.ws.take("expert_idx", len(sent))
            np.subtract(received.expert_idx, self.mem.slots.start, out=local_idx)
            await self.compute(
                "Experts",
                lambda: self._experts(sent, rows, local_idx, moe),
                self.expert_work(len(sent), moe),
            )
        else:
            self.skip("Experts")
        slot_out = await self.xccl.combine(sent, event_id)
        return slot_out.reshape(-1, x.shape[1])

    def _experts(self, out: Array, rows: Rows, local_idx: Array, moe: MoE) -> None:
        assert moe.experts is not None
        if self.mem.redundant is not None:
            self.mem.redundant.accept(local_idx, moe.experts)
        self.ops.route(out, rows, local_idx, moe.experts, len(self.mem.slots))

    def expert_work(self, rows: int, moe: MoE) -> Work:
        """Grouped GEMM: weights of the experts that have rows are read once."""
        assert moe.experts is not None
        w13, w2 = moe.experts.w13, moe.experts.w2
        per_expert = w13.k * w13.n + w2.k * w2.n
        touched = min(rows, len(self.mem.slots))
        return Work(2.0 * rows * per_expert, touched * per_expert * w13.w.itemsize)

    def skip_mla(self, layer: Layer) -> None:
        """`mla` of no rows."""
        self.skip("MLAProlog", "MLA", "OProj")

    def skip_dense(self, mlp: MLP) -> None:
        """`dense` of no rows."""
        self.skip("MLP")

    def skip(self, *names: str) -> None:
        """Stages that have no rows in this step. They are in its graph all the same."""
        if self.launcher is not None:
            for name in names:
                self.launcher.stage(name)

    async def compute(self, name: str, fn: object, work: Work, core: Core = "aic") -> None:
        """Launch a kernel of this die. FP32 work is billed at the cube's BF16 rate, its nearest."""
        if self.launcher is not None:
            self.launcher.stage(name)
            await self.launcher.kernel()
        await self.die.compute(
            name,
            fn,  # type: ignore[arg-type]
            flops=work.flops,
            nbytes=work.nbytes,
            core=core,
            cores=self.num_cores(name, core),
            arithmetic="int8" if self.is_int8 and name not in FLOAT_KERNELS else "bf16",
            args=self.place,
        )

    def set_domain(self, domain: int) -> None:
        """The DP domain of all that comes: for traces."""
        self._home = {"domain": domain}
        self.at()

    def at(self, **place: int) -> None:
        """What comes belongs to this layer, and microbatch if there are some; or to none."""
        if not self.die.trace.is_on:
            return
        self.place = {**self._home, **place}
        if self.xccl is not None:
            self.xccl.steps.place = self.place

    def num_cores(self, name: str, core: Core) -> int | None:
        """A stage's share of the die's cores; None: all."""
        return None

    async def settle(self) -> None:
        """Let the clock reach the end of what has been launched."""
