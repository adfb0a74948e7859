"""What the stages of a decoder layer cost at full size, in closed form.

The formulas are rooflines of the stages that CloudMatrix 4.2 names, plus three fitted numbers: small kernels
of a layer, the stretch of its barriers, and what a pass takes besides its layers. All physical values come
from the one table in `hw/spec.py`. The engine's timing-only runs spend these times stage by stage; the
functions at the end add up a whole decode iteration, with and without the microbatch pipeline.

Weights are INT8 but for the absorbed halves of kv_b_proj, which are BF16, as is the KV cache (CM 4.2.2, 4.5).
All times are ns, not rounded. `cores` is a stage's share of the AICs; memory bandwidth is the die's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from xdeepserve.comm.cost import CommCost
from xdeepserve.hw.spec import Spec
from xdeepserve.model.config import ModelConfig

SPLITS = (10, 12, 14, 16, 18)  # AIC cores that the attention stream may get of the two microbatch streams


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A die's share of a decode iteration.

    requests     that it decodes
    rows         token rows of each: 2 with one MTP draft
    context      positions that each attends to
    """

    requests: float
    rows: int
    context: float


class ExpertDies(msgspec.Struct, frozen=True):
    """Where experts live: dies in all, those with slots for routed experts, those with a shared expert."""

    total: int
    routed: int
    shared: int


EP320 = ExpertDies(320, 288, 32)  # CM 4.1: 256 routed and 32 redundant experts, 32 copies of the shared one
EP288 = ExpertDies(288, 288, 32)  # XDS 7.1: 256 routed or 32 shared ones, and a redundant slot on every die


class LayerCost(msgspec.Struct, frozen=True):
    """Stage by stage, of one model on dies of one kind."""

    config: ModelConfig
    spec: Spec = Spec()
    comm: CommCost = CommCost()

    # ---- sizes, in parameters -----------------------------------------------------------------------

    @property
    def down_projection(self) -> int:
        """wq_a and wkv_a, INT8."""
        c = self.config
        return c.hidden_size * ((c.q_lora_rank or 0) + c.kv_lora_rank + c.qk_rope_head_dim)

    @property
    def up_projection(self) -> int:
        """The query projection behind its latent, INT8; cut by heads."""
        c = self.config
        return (c.q_lora_rank or c.hidden_size) * c.num_attention_heads * c.qk_head_dim

    @property
    def output_projection(self) -> int:
        """wo, INT8."""
        c = self.config
        return c.num_attention_heads * c.v_head_dim * c.hidden_size

    def absorbed(self, width: int) -> int:
        """A half of kv_b_proj, BF16, whose other side is `width`; cut by heads."""
        return self.config.num_attention_heads * self.config.kv_lora_rank * width

    @property
    def expert(self) -> int:
        """Of one expert: gate, up and down projection."""
        return 3 * self.config.hidden_size * self.config.moe_intermediate_size

    # ---- stages -------------------------------------------------------------------------------------

    def attention_ns(self, row_context: float, kv_tokens: float, cores: float = 24, tp: int = 1) -> float:
        """Absorbed MLA; positions attended to, summed over rows, and over requests (`kv_tokens`).

        A rank of a TP group has its share of the heads, each of which reads all latents.
        """
        c, spec = self.config, self.spec
        flops = 2.0 * row_context * c.num_attention_heads / tp * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
        compute = flops / (spec.bf16_peak.value * spec.compute_efficiency.value * self._share(cores))
        return max(1e9 * compute, spec.hbm_ns(kv_tokens * 2 * (c.kv_lora_rank + c.qk_rope_head_dim)))

    def projection_ns(self, rows: float, cores: float = 24, tp: int = 1) -> float:
        """All of MLA's linear layers: MLAProlog and output projection.

        A rank of a TP group has all of the down projections and its heads' share of the others.
        """
        c = self.config
        int8 = self.down_projection + (self.up_projection + self.output_projection) / tp
        bf16 = self.absorbed(c.qk_nope_head_dim + c.v_head_dim) / tp
        return self.linear_ns(rows, int8, bf16, cores)

    def linear_ns(self, rows: float, int8: float, bf16: float = 0.0, cores: float = 24) -> float:
        """`rows` through so many INT8 and BF16 parameters, which are read once."""
        compute = self._gemm_ns(2.0 * int8 * rows, "int8", cores) + self._gemm_ns(
            2.0 * bf16 * rows, "bf16", cores
        )
        return max(self.spec.hbm_ns(int8 + 2 * bf16), compute)

    def small_kernels_ns(self) -> float:
        return 1e9 * self.spec.small_kernels.value

    def gate_ns(self) -> float:
        return 1e9 * self.spec.gate.value

    def mlp_ns(self, rows: float, parameters: float, num_experts: float = 1, cores: float = 24) -> float:
        """`rows` through INT8 MLPs of `parameters` each, of which `num_experts` are read."""
        return max(
            self.spec.hbm_ns(num_experts * parameters), self._gemm_ns(2.0 * parameters * rows, "int8", cores)
        )

    def pass_ns(self) -> float:
        """What a pass, the main model's or one of MTP's, takes besides its layers.

        A fitted number stands for all of it: host, head, sampling, MTP's input projection. To read a whole
        BF16 head takes longer (1.4 ms), so no die does: the head must be shared out.
        """
        return 1e9 * self.spec.pass_overhead.value

    def exchange_ns(self, num_ranks: int, batch: float, copies: int) -> float:
        """Dispatch or combine in a layer, stretched as in serving."""
        return self.comm.exchange_ns(num_ranks, batch, copies, self.spec.barrier_stretch.value)

    def expert_rows(self, received: float, mean: float) -> float:
        """Rows that the routed experts of a die are billed for.

        The fitted stretch already holds the imbalance of ordinary routing; only a die that is hotter than
        that takes longer.
        """
        return max(received, self.spec.barrier_stretch.value * mean)

    def _gemm_ns(self, flops: float, arithmetic: str, cores: float) -> float:
        spec = self.spec
        is_int8 = arithmetic == "int8"
        peak = (spec.int8_peak if is_int8 else spec.bf16_peak).value
        efficiency = (spec.int8_gemm_efficiency if is_int8 else spec.bf16_gemm_efficiency).value
        return 1e9 * flops / (peak * efficiency * self._share(cores))

    def _share(self, cores: float) -> float:
        """Of a die's cores; other hardware may have fewer than are asked for."""
        return min(1.0, cores / self.spec.num_cores("aic"))

    # ---- a colocated layer with shared experts on dies of their own ------------------------------------

    def stream0_ns(self, load: Load, cores: float = 24) -> float:
        """MLAProlog, attention and output projection, with the layer's small kernels."""
        rows = load.requests * load.rows
        attention = self.attention_ns(rows * load.context, load.requests * load.context, cores)
        return attention + self.projection_ns(rows, cores) + self.small_kernels_ns()

    def stream1_ns(self, load: Load, dies: ExpertDies, cores: float = 24) -> float:
        """Gate, dispatch, experts, combine."""
        rows, c = load.requests * load.rows, self.config
        copies = c.num_experts_per_tok + min(1, c.n_shared_experts)
        total = rows * dies.total
        busiest = max(total / dies.shared, self.expert_rows(0, c.num_experts_per_tok * total / dies.routed))
        exchange = self.exchange_ns(dies.total, rows, copies)
        return self.gate_ns() + 2 * exchange + self.mlp_ns(busiest, self.expert, cores=cores)

    def serial_ns(self, load: Load, dies: ExpertDies) -> float:
        """A layer without microbatches."""
        return self.stream0_ns(load) + self.stream1_ns(load, dies)

    def microbatched_ns(self, load: Load, dies: ExpertDies, splits: Sequence[int] = SPLITS) -> float:
        """A layer of two microbatches in two streams that swap them, with the best of some splits."""
        half = msgspec.structs.replace(load, requests=load.requests / 2)
        total = self.spec.num_cores("aic")
        return min(
            2 * max(self.stream0_ns(half, cores), self.stream1_ns(half, dies, total - cores))
            for cores in splits
        )

    def iteration_ns(
        self, load: Load, dies: ExpertDies, microbatches: bool = True, splits: Sequence[int] = SPLITS
    ) -> float:
        """One decode iteration of CloudMatrix: all layers as MoE layers, MTP's too if there are drafts."""
        passes = load.rows
        layer = self.serial_ns(load, dies)
        if microbatches:
            layer = min(layer, self.microbatched_ns(load, dies, splits))
        num_layers = self.config.num_hidden_layers + (passes > 1)
        return num_layers * layer + passes * self.pass_ns()


@functools.cache
def ping_pong_throughput(microbatches: int, comm_ratio: float) -> float:
    """Relative throughput of MegaScale's ping-pong with m microbatches (MS 4.1), if T_a = T_e = T_f.

    A microbatch is back after 2 (T_f + T_c), `comm_ratio` = T_c / T_f; in that time at most m are served.
    """
    return microbatches / max(microbatches, 2 + 2 * comm_ratio)
