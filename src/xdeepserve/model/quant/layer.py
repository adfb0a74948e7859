"""Quantise one decoder layer, stage by stage, each with the inputs that the quantised stages before it make.

    stage                  reads                      its inputs' scale is folded into
    ---------------------  -------------------------  ------------------------------------------
    q_a_proj, kv_a_proj    normed hidden state        input_layernorm
    q_b_proj               normed query latent        q_a_layernorm
    o_proj                 attended values            value rows of kv_b_proj
    gate_proj, up_proj     normed hidden state        post_attention_layernorm (the router follows)
    down_proj              silu(gate) * up            rows of up_proj

kv_b_proj, the router, norms and MTP's projection stay float (xDeepServe 4.7; CloudMatrix384 4.5).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from ..canonical import Array
from ..config import ModelConfig
from ..reference import LATENT_NORM_EPS
from . import forward
from .clipping import clip_factors
from .compensation import compensate
from .forward import LayerResult, LayerWeights
from .gptq import gptq, hessian
from .method import Method
from .rotation_search import AttentionWeights, rotate_where_it_helps
from .rounding import channel_scale, dequantize, quantized_rows, relative_error, round_weight
from .smoothquant import find_scale

BUSY_EXPERTS = 8  # experts whose weights a common smoothing scale looks at


class LinearReport(msgspec.Struct, frozen=True):
    """How far a layer's outputs are off on the calibration text: relative, squared.

    `weights`, `activations` and `both` compare with the original weights on the inputs that the quantised
    model has here. Error compensation moves outputs away from these on purpose, towards the original model's;
    `original` compares with those, and so counts what the layers before have lost, too.
    """

    module: str
    num_rows: int
    weights: float  # with INT8 weights only
    activations: float  # with INT8 activations only
    both: float
    is_kept_float: bool
    original: float | None = None  # None where the original model does not run beside


class LayerReport(msgspec.Struct, frozen=True):
    """What became of one decoder layer."""

    linears: list[LinearReport]
    attention: float  # what INT8 weights of attention cost its outputs: relative, squared
    int8_attention: bool  # whether that is so little that they are used


class LayerQuantizer:
    """Quantises one layer; `run` returns everything that is stored of it."""

    def __init__(
        self,
        config: ModelConfig,
        layer_idx: int,
        weights: LayerWeights,
        method: Method,
        keep: Collection[str] = (),
    ) -> None:
        """`keep` names modules that stay float, without the layer's prefix: see `sensitivity`."""
        self.c, self.layer_idx, self.get, self.method = config, layer_idx, weights.get, method
        self.keep, self.is_trial = keep, False
        self.int8: dict[str, tuple[Array, Array]] = {}
        self.floats: dict[str, Array] = {}
        self.reports: list[LinearReport] = []
        self.attention_error, self.int8_attention = 0.0, False

    def run(self, h: Array, exact: Array | None, lengths: Sequence[int], fallback_rows: int) -> LayerResult:
        """h [T, H] in the model quantised so far, `exact` in the original, to compare with.

        An expert with fewer than `fallback_rows` tokens is quantised as if it saw every token.
        """
        self.lengths, self.fallback_rows = lengths, fallback_rows
        h, exact = self.attention(h, exact)
        x = self.normed(h, "post_attention_layernorm.weight")
        x_exact = None if exact is None else self.normed(exact, "post_attention_layernorm.weight")
        if self.c.is_moe(self.layer_idx):
            self.moe(x, x_exact)
        else:
            self.dense(x, x_exact)
        return LayerResult(self.int8, self.floats, self.int8_attention)

    def trial(self, h: Array, lengths: Sequence[int]) -> dict[str, float]:
        """Errors by module, without the routed experts'; h [T, H] in the original model."""
        self.is_trial = True
        self.run(h, None, lengths, 0)
        return {one.module: one.both for one in self.reports}

    def report(self) -> LayerReport:
        """Of what `run` did."""
        return LayerReport(self.reports, self.attention_error, self.int8_attention)

    def normed(self, h: Array, name: str) -> Array:
        return forward.rms_norm(h, self.get(name), self.c.rms_norm_eps)

    # ---- one linear layer ---------------------------------------------------------------------------

    def linear(self, module: str, w: Array, x: Array, x_exact: Array | None = None) -> Array:
        """Quantise w [N, K], read by x [T, K], and return what it makes of them, [T, N].

        x and x_exact are inputs in the quantised and the original model, both smoothed like w.
        """
        is_kept = module in self.keep
        seen, target = x if is_kept else quantized_rows(x), w
        if self.method.compensate and x_exact is not None and len(x):
            target = compensate(w, x_exact, seen)
        if is_kept:
            self.floats[f"{module}.weight"] = stored = target
        else:
            clip = clip_factors(target, np.square(seen).sum(axis=0)) if self.method.clip else 1.0
            scale = channel_scale(target, clip)
            q = gptq(target, hessian(seen), scale) if self.method.gptq else round_weight(target, scale)
            self.int8[module] = (q, scale)
            stored = dequantize(q, scale)
        found, wanted = seen @ stored.T, x @ w.T
        self.reports.append(
            LinearReport(
                module=module,
                num_rows=len(x),
                weights=relative_error(x @ stored.T, wanted),
                activations=relative_error(seen @ w.T, wanted),
                both=relative_error(found, wanted),
                is_kept_float=is_kept,
                original=None if x_exact is None else relative_error(found, x_exact @ w.T),
            )
        )
        return found

    def smoothing(self, x: Array, weights: Sequence[Array]) -> Array:
        """s [K] for a stage's inputs; all ones without smoothing."""
        if not self.method.alphas:
            return np.ones(x.shape[1], np.float32)
        return find_scale(x, weights, self.method.alphas)

    # ---- attention ----------------------------------------------------------------------------------

    def attention(self, h: Array, exact: Array | None) -> tuple[Array, Array | None]:
        """The hidden states behind attention, in the quantised and the original model."""
        c, get = self.c, self.get
        heads, nope, rank = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
        has_latent = c.q_lora_rank is not None
        q_b_name = "self_attn.q_b_proj" if has_latent else "self_attn.q_proj"
        norm = get("input_layernorm.weight")
        x = forward.rms_norm(h, norm, c.rms_norm_eps)
        x_exact = None if exact is None else forward.rms_norm(exact, norm, c.rms_norm_eps)
        a = AttentionWeights(
            q_a=get("self_attn.q_a_proj.weight") if has_latent else None,
            q_norm=get("self_attn.q_a_layernorm.weight") if has_latent else None,
            q_b=get(f"{q_b_name}.weight"),
            kv_a=get("self_attn.kv_a_proj_with_mqa.weight"),
            kv_norm=get("self_attn.kv_a_layernorm.weight"),
            kv_b=get("self_attn.kv_b_proj.weight"),
            o_proj=get("self_attn.o_proj.weight"),
        )
        if self.method.rotate:
            a = rotate_where_it_helps(a, x, c, self.lengths, self.method.alphas, self.layer_idx)
        q_a, q_norm, q_b, kv_a = a.q_a, a.q_norm, a.q_b, a.kv_a
        kv_norm, kv_b, o_proj = a.kv_norm, a.kv_b, a.o_proj

        readers = [q_b if q_a is None else q_a, kv_a]
        s = self.smoothing(x, readers)
        self.floats["input_layernorm.weight"] = norm / s
        x, x_exact = x / s, None if x_exact is None else x_exact / s
        kv = self.linear("self_attn.kv_a_proj_with_mqa", kv_a * s, x, x_exact)
        kv_exact = None if x_exact is None else x_exact @ (kv_a * s).T
        q_exact = None
        if q_a is not None and q_norm is not None:
            x2 = forward.rms_norm(
                self.linear("self_attn.q_a_proj", q_a * s, x, x_exact), q_norm, LATENT_NORM_EPS
            )
            x2_exact = None
            if x_exact is not None:
                x2_exact = forward.rms_norm(x_exact @ (q_a * s).T, q_norm, LATENT_NORM_EPS)
            s2 = self.smoothing(x2, [q_b])
            self.floats["self_attn.q_a_layernorm.weight"] = q_norm / s2
            x2_exact = None if x2_exact is None else x2_exact / s2
            q = self.linear(q_b_name, q_b * s2, x2 / s2, x2_exact)
            q_exact = None if x2_exact is None else x2_exact @ (q_b * s2).T
        else:
            q = self.linear(q_b_name, q_b * s, x, x_exact)
            q_exact = None if x_exact is None else x_exact @ (q_b * s).T

        o = self.weighted(q, kv, kv_norm, kv_b)
        o_exact = None
        if q_exact is not None and kv_exact is not None:
            o_exact = forward.attend(c, q_exact, kv_exact, kv_norm, kv_b, self.lengths)
        s3 = self.smoothing(o, [o_proj])
        by_head = kv_b.reshape(heads, nope + c.v_head_dim, rank).copy()
        by_head[:, nope:] /= s3.reshape(heads, c.v_head_dim, 1)
        self.floats["self_attn.kv_a_layernorm.weight"] = kv_norm
        self.floats["self_attn.kv_b_proj.weight"] = by_head.reshape(kv_b.shape)
        o_exact = None if o_exact is None else o_exact / s3
        after = h + self.linear("self_attn.o_proj", o_proj * s3, o / s3, o_exact)
        if exact is None or o_exact is None:
            return after, None
        return after, exact + o_exact @ (o_proj * s3).T

    def weighted(self, q: Array, kv: Array, kv_norm: Array, kv_b: Array) -> Array:
        """Attention's outputs, with INT8 weights if the layer bears them (xDeepServe 4.7)."""
        plain = forward.attend(self.c, q, kv, kv_norm, kv_b, self.lengths)
        rounded = forward.attend(self.c, q, kv, kv_norm, kv_b, self.lengths, int8_weights=True)
        self.attention_error = relative_error(rounded, plain)
        limit = self.method.max_attention_error
        self.int8_attention = limit is not None and self.attention_error <= limit
        return rounded if self.int8_attention else plain

    # ---- feed-forward -------------------------------------------------------------------------------

    def dense(self, x: Array, x_exact: Array | None) -> None:
        """The MLP of a layer without experts."""
        names = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
        s = self.smoothing(x, [self.get(name) for name in names])
        self.floats["post_attention_layernorm.weight"] = self.get("post_attention_layernorm.weight") / s
        self.mlp("mlp", x / s, None if x_exact is None else x_exact / s, s)

    def moe(self, x: Array, x_exact: Array | None) -> None:
        """Shared and routed experts. Both models take the quantised one's routes: like is set beside like."""
        c, get = self.c, self.get
        router, bias = get("mlp.gate.weight"), get("mlp.gate.e_score_correction_bias")
        topk_idx, _ = forward.route(c, x, router, bias)
        load = np.bincount(topk_idx.ravel(), minlength=c.n_routed_experts)
        readers = [f"mlp.experts.{e}" for e in np.argsort(-load, kind="stable")[:BUSY_EXPERTS]]
        if c.n_shared_experts:
            readers.append("mlp.shared_experts")
        s = np.ones(x.shape[1], np.float32)
        if self.method.alphas:
            s = self.smoothing(
                x, [get(f"{name}.{part}.weight") for name in readers for part in ("gate_proj", "up_proj")]
            )
        self.floats["post_attention_layernorm.weight"] = get("post_attention_layernorm.weight") / s
        self.floats["mlp.gate.weight"] = router * s
        self.floats["mlp.gate.e_score_correction_bias"] = bias
        x, x_exact = x / s, None if x_exact is None else x_exact / s
        if c.n_shared_experts:
            self.mlp("mlp.shared_experts", x, x_exact, s)
        for expert in range(0 if self.is_trial else c.n_routed_experts):
            rows = np.nonzero((topk_idx == expert).any(axis=1))[0]
            if len(rows) < self.fallback_rows:
                rows = np.arange(len(x))
            exact_rows = None if x_exact is None else x_exact[rows]
            self.mlp(f"mlp.experts.{expert}", x[rows], exact_rows, s)

    def mlp(self, name: str, x: Array, x_exact: Array | None, s: Array) -> None:
        """gate, up and down of one MLP; x [T, H] is smoothed by s already, the weights are not."""
        gate_proj, up_proj, down_proj = (
            self.get(f"{name}.{part}.weight") for part in ("gate_proj", "up_proj", "down_proj")
        )
        gate_proj, up_proj = gate_proj * s, up_proj * s
        inner = forward.silu(x @ gate_proj.T) * (x @ up_proj.T)
        s2 = self.smoothing(inner, [down_proj])
        up_proj, down_proj = up_proj / s2[:, None], down_proj * s2
        gate_out = self.linear(f"{name}.gate_proj", gate_proj, x, x_exact)
        up_out = self.linear(f"{name}.up_proj", up_proj, x, x_exact)
        inner = forward.silu(gate_out) * up_out
        inner_exact = None
        if x_exact is not None:
            inner_exact = forward.silu(x_exact @ gate_proj.T) * (x_exact @ up_proj.T)
        self.linear(f"{name}.down_proj", down_proj, inner, inner_exact)
