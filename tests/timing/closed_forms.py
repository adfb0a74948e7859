"""What stages cost, written down by hand: an oracle for the prices of the Program's stages."""

import msgspec

from xdeepserve.hw.spec import Spec
from xdeepserve.model.config import ModelConfig


class ClosedForms(msgspec.Struct, frozen=True):
    """Rooflines of the stages that CloudMatrix 4.2 names, in ns. Weights are INT8 but for the absorbed halves
    of kv_b_proj, which are BF16, as is the KV cache (CM 4.2.2, 4.5)."""

    config: ModelConfig
    spec: Spec = Spec()

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
        up = self.vectors_ns(rows, c.q_lora_rank or c.hidden_size, c.num_attention_heads * c.qk_head_dim / tp)
        vectors = self.down_vectors_ns(rows) + up + self.out_vectors_ns(rows, tp)
        return self.linear_ns(rows, int8, bf16, cores) + vectors

    def linear_ns(self, rows: float, int8: float, bf16: float = 0.0, cores: float = 24) -> float:
        """`rows` through so many INT8 and BF16 parameters, which are read once."""
        compute = self._gemm_ns(2.0 * int8 * rows, "int8", cores) + self._gemm_ns(
            2.0 * bf16 * rows, "bf16", cores
        )
        return max(self.spec.hbm_ns(int8 + 2 * bf16), compute)

    def vectors_ns(self, rows: float, quantised: float, scaled: float, activated: float = 0) -> float:
        """What passes through memory before and after GEMMs: inputs, BF16 to INT8, outputs, BF16, once there
        and back, and SwiGLU's two inputs and one output, BF16."""
        return self.spec.hbm_ns(rows * ((2 + 1) * quantised + (2 + 2) * scaled + (2 + 2 + 2) * activated))

    def down_vectors_ns(self, rows: float) -> float:
        """Around wq_a and wkv_a, each of which has its inputs quantised."""
        c = self.config
        return self.vectors_ns(rows, 2 * c.hidden_size, self.down_projection / c.hidden_size)

    def out_vectors_ns(self, rows: float, tp: int = 1) -> float:
        c = self.config
        return self.vectors_ns(rows, c.num_attention_heads * c.v_head_dim / tp, c.hidden_size)

    def mlp_vectors_ns(self, rows: float, width: float, is_quantised: bool = True) -> float:
        """Around an MLP's two GEMMs; rows for routed experts have come as INT8."""
        h = self.config.hidden_size
        return self.vectors_ns(rows, width + h * is_quantised, 2 * width + h, width)

    def small_kernels_ns(self) -> float:
        return 1e9 * self.spec.small_kernels.value

    def gate_ns(self) -> float:
        return 1e9 * self.spec.gate.value

    def mlp_ns(self, rows: float, parameters: float, num_experts: float = 1, cores: float = 24) -> float:
        """`rows` through INT8 MLPs of `parameters` each, of which `num_experts` are read."""
        return max(
            self.spec.hbm_ns(num_experts * parameters), self._gemm_ns(2.0 * parameters * rows, "int8", cores)
        )

    def _gemm_ns(self, flops: float, arithmetic: str, cores: float) -> float:
        spec = self.spec
        is_int8 = arithmetic == "int8"
        peak = (spec.int8_peak if is_int8 else spec.bf16_peak).value
        efficiency = (spec.int8_gemm_efficiency if is_int8 else spec.bf16_gemm_efficiency).value
        return 1e9 * flops / (peak * efficiency * self._share(cores))

    def _share(self, cores: float) -> float:
        """Of a die's cores; other hardware may have fewer than are asked for."""
        return min(1.0, cores / self.spec.num_cores("aic"))
