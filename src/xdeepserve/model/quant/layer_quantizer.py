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

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ..canonical import Array
from ..config import LATENT_NORM_EPS, ModelConfig
from . import forward
from .clipping import clip_factors
from .compensation import compensate
from .forward import LayerResult, LayerWeights
from .gptq import gptq, hessian
from .method import Method
from .rotation_search import AttentionWeights, rotate_where_it_helps
from .rounding import channel_scale, dequantize, quantized_rows, relative_error, round_weight
from .smoothquant import search_scale

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


class BothRows(NamedTuple):
    """Rows [T, K] in the model quantised so far, and in the original, where that runs beside."""

    seen: Array
    exact: Array | None

    def map(self, f: Callable[[Array], Array]) -> BothRows:
        return BothRows(f(self.seen), None if self.exact is None else f(self.exact))

    def join(self, other: BothRows, f: Callable[[Array, Array], Array]) -> BothRows:
        if self.exact is None or other.exact is None:
            return BothRows(f(self.seen, other.seen), None)
        return BothRows(f(self.seen, other.seen), f(self.exact, other.exact))

    def take(self, rows: Array) -> BothRows:
        return self.map(lambda x: x[rows])

    def over(self, s: Array) -> BothRows:
        """Smoothed by s [K]."""
        return self.map(lambda x: x / s)


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
        x = self.normed(self.attention(BothRows(h, exact)), "post_attention_layernorm.weight")
        if self.c.is_moe(self.layer_idx):
            self.moe(x)
        else:
            self.dense(x)
        return LayerResult(self.int8, self.floats, self.int8_attention)

    def trial(self, h: Array, lengths: Sequence[int]) -> dict[str, float]:
        """Errors by module, without the routed experts'; h [T, H] in the original model."""
        self.is_trial = True
        self.run(h, None, lengths, 0)
        return {one.module: one.both for one in self.reports}

    def report(self) -> LayerReport:
        """The errors of the layer that `run` has quantised."""
        return LayerReport(self.reports, self.attention_error, self.int8_attention)

    def normed(self, h: BothRows, name: str) -> BothRows:
        weight = self.get(name)
        return h.map(lambda h: forward.rms_norm(h, weight, self.c.rms_norm_eps))

    # ---- one linear layer ---------------------------------------------------------------------------

    def linear(self, module: str, w: Array, x: BothRows) -> BothRows:
        """Quantise w [N, K], read by x [T, K], both smoothed, and return what becomes of x, [T, N]."""
        is_kept = module in self.keep
        seen, target = x.seen if is_kept else quantized_rows(x.seen), w
        if self.method.compensate and x.exact is not None and len(seen):
            target = compensate(w, x.exact, seen)
        if is_kept:
            self.floats[f"{module}.weight"] = stored = target
        else:
            clip = clip_factors(target, np.square(seen).sum(axis=0)) if self.method.clip else 1.0
            scale = channel_scale(target, clip)
            q = gptq(target, hessian(seen), scale) if self.method.gptq else round_weight(target, scale)
            self.int8[module] = (q, scale)
            stored = dequantize(q, scale)
        wanted = x.map(lambda x: x @ w.T)
        out = BothRows(seen @ stored.T, wanted.exact)
        self.reports.append(
            LinearReport(
                module=module,
                num_rows=len(seen),
                weights=relative_error(x.seen @ stored.T, wanted.seen),
                activations=relative_error(seen @ w.T, wanted.seen),
                both=relative_error(out.seen, wanted.seen),
                is_kept_float=is_kept,
                original=None if out.exact is None else relative_error(out.seen, out.exact),
            )
        )
        return out

    def smoothing(self, x: Array, weights: Sequence[Array]) -> Array:
        """s [K] for a stage's inputs; all ones without smoothing."""
        if not self.method.alphas:
            return np.ones(x.shape[1], np.float32)
        return search_scale(x, weights, self.method.alphas)[0]

    # ---- attention ----------------------------------------------------------------------------------

    def attention(self, h: BothRows) -> BothRows:
        """The hidden states behind attention."""
        c, get = self.c, self.get
        has_latent = c.q_lora_rank is not None
        q_b_name = "self_attn.q_b_proj" if has_latent else "self_attn.q_proj"
        x = self.normed(h, "input_layernorm.weight")
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
            a = rotate_where_it_helps(a, x.seen, c, self.lengths, self.method.alphas, self.layer_idx)
        q_a, q_norm = a.q_a, a.q_norm
        s = self.smoothing(x.seen, [a.q_b if q_a is None else q_a, a.kv_a])
        self.floats["input_layernorm.weight"] = get("input_layernorm.weight") / s
        x = x.over(s)
        kv = self.linear("self_attn.kv_a_proj_with_mqa", a.kv_a * s, x)
        if q_a is not None and q_norm is not None:
            latent = self.linear("self_attn.q_a_proj", q_a * s, x)
            x = latent.map(lambda q: forward.rms_norm(q, q_norm, LATENT_NORM_EPS))
            s = self.smoothing(x.seen, [a.q_b])
            self.floats["self_attn.q_a_layernorm.weight"] = q_norm / s
            x = x.over(s)
        o = self.attended(self.linear(q_b_name, a.q_b * s, x), kv, a.kv_norm, a.kv_b)
        s = self.smoothing(o.seen, [a.o_proj])
        by_head = a.kv_b.reshape(c.num_attention_heads, -1, c.kv_lora_rank).copy()
        by_head[:, c.qk_nope_head_dim :] /= s.reshape(c.num_attention_heads, c.v_head_dim, 1)
        self.floats["self_attn.kv_a_layernorm.weight"] = a.kv_norm
        self.floats["self_attn.kv_b_proj.weight"] = by_head.reshape(a.kv_b.shape)
        return h.join(self.linear("self_attn.o_proj", a.o_proj * s, o.over(s)), np.add)

    def attended(self, q: BothRows, kv: BothRows, kv_norm: Array, kv_b: Array) -> BothRows:
        """Attention's outputs, with INT8 weights if the layer bears them (xDeepServe 4.7)."""
        plain = q.join(kv, lambda q, kv: forward.attend(self.c, q, kv, kv_norm, kv_b, self.lengths))
        rounded = forward.attend(self.c, q.seen, kv.seen, kv_norm, kv_b, self.lengths, int8_weights=True)
        self.attention_error = relative_error(rounded, plain.seen)
        limit = self.method.max_attention_error
        self.int8_attention = limit is not None and self.attention_error <= limit
        return plain._replace(seen=rounded) if self.int8_attention else plain

    # ---- feed-forward -------------------------------------------------------------------------------

    def dense(self, x: BothRows) -> None:
        """The MLP of a layer without experts."""
        names = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
        s = self.smoothing(x.seen, [self.get(name) for name in names])
        self.floats["post_attention_layernorm.weight"] = self.get("post_attention_layernorm.weight") / s
        self.mlp("mlp", x.over(s), s)

    def moe(self, x: BothRows) -> None:
        """Shared and routed experts. Both models take the quantised one's routes: like is set beside like."""
        c, get = self.c, self.get
        router, bias = get("mlp.gate.weight"), get("mlp.gate.e_score_correction_bias")
        topk_idx, _ = forward.route(c, x.seen, router, bias)
        load = np.bincount(topk_idx.ravel(), minlength=c.n_routed_experts)
        readers = [f"mlp.experts.{e}" for e in np.argsort(-load, kind="stable")[:BUSY_EXPERTS]]
        if c.n_shared_experts:
            readers.append("mlp.shared_experts")
        s = np.ones(x.seen.shape[1], np.float32)
        if self.method.alphas:
            names = [f"{name}.{part}.weight" for name in readers for part in ("gate_proj", "up_proj")]
            s = self.smoothing(x.seen, [get(name) for name in names])
        self.floats["post_attention_layernorm.weight"] = get("post_attention_layernorm.weight") / s
        self.floats["mlp.gate.weight"] = router * s
        self.floats["mlp.gate.e_score_correction_bias"] = bias
        x = x.over(s)
        if c.n_shared_experts:
            self.mlp("mlp.shared_experts", x, s)
        for expert in range(0 if self.is_trial else c.n_routed_experts):
            rows = np.nonzero((topk_idx == expert).any(axis=1))[0]
            if len(rows) < self.fallback_rows:
                rows = np.arange(len(x.seen))
            self.mlp(f"mlp.experts.{expert}", x.take(rows), s)

    def mlp(self, name: str, x: BothRows, s: Array) -> None:
        """gate, up and down of one MLP; x [T, H] is smoothed by s already, the weights are not."""
        gate_proj, up_proj, down_proj = (
            self.get(f"{name}.{part}.weight") for part in ("gate_proj", "up_proj", "down_proj")
        )
        gate_proj, up_proj = gate_proj * s, up_proj * s
        s2 = self.smoothing(forward.silu(x.seen @ gate_proj.T) * (x.seen @ up_proj.T), [down_proj])
        gate = self.linear(f"{name}.gate_proj", gate_proj, x)
        up = self.linear(f"{name}.up_proj", up_proj / s2[:, None], x)
        inner = gate.join(up, lambda gate, up: forward.silu(gate) * up)
        self.linear(f"{name}.down_proj", down_proj * s2, inner)
