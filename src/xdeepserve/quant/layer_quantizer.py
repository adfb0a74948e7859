"""Quantise a decoder layer stage by stage; each stage reads inputs from the quantised stages before it.

    stage                  reads                      its inputs' scale is folded into
    ---------------------  -------------------------  ------------------------------------------
    attention              see attention_quantizer
    gate_proj, up_proj     normed hidden state        post_attention_layernorm (the router follows)
    down_proj              silu(gate) * up            rows of up_proj

The router, norms and MTP's projection stay float (xDeepServe 4.7; CloudMatrix384 4.5).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np

from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.tensors import layer_tensors
from xdeepserve.model.weights import NO_BIAS
from xdeepserve.quant import forward
from xdeepserve.quant.attention_quantizer import ATTENTION
from xdeepserve.quant.both_rows import BothRows
from xdeepserve.quant.clipping import clip_factors
from xdeepserve.quant.compensation import compensate
from xdeepserve.quant.forward import LayerResult, LayerWeights
from xdeepserve.quant.gptq import gptq, hessian
from xdeepserve.quant.method import Method
from xdeepserve.quant.rounding import channel_scale, dequantize, quantized_rows, relative_error, round_weight
from xdeepserve.quant.smoothquant import search_scale

BUSY_EXPERTS = 8  # experts whose weights a common smoothing scale looks at


class LinearReport(msgspec.Struct, frozen=True):
    """Errors of a linear layer's outputs on the calibration text: relative, squared.

    `weights`, `activations` and `both` compare with the original weights on the quantised model's inputs.
    Error compensation moves outputs away from that target on purpose, towards the original model's outputs.
    `original` compares with the original model's outputs, so it includes the loss of earlier layers.
    Without calibration text `weights` is of the weights themselves, and the others are None.
    """

    module: str
    num_rows: int
    weights: float  # with INT8 weights only
    activations: float | None  # with INT8 activations only
    both: float | None
    is_kept_float: bool
    original: float | None = None  # None where the original model does not run beside


class LayerReport(msgspec.Struct, frozen=True):
    """Report of the quantisation of a decoder layer."""

    linears: list[LinearReport]
    attention: float  # what INT8 weights of attention cost its outputs: relative, squared
    int8_attention: bool  # whether that is so little that they are used


class LayerQuantizer:
    """Quantises a decoder layer; `run` returns everything that is stored of the layer."""

    def __init__(
        self,
        config: ModelConfig,
        layer_idx: int,
        weights: LayerWeights,
        method: Method,
        keep: Collection[str] = (),
    ) -> None:
        """Prepare a layer. `keep` names modules that stay float, without the layer's prefix: see
        `sensitivity`."""
        self.c, self.layer_idx, self.get, self.method = config, layer_idx, weights.get, method
        self.rows = {row.name: row for row in layer_tensors(config, layer_idx)}
        self.keep, self.is_trial = keep, False
        self.int8: dict[str, tuple[Array, Array]] = {}
        self.floats: dict[str, Array] = {}
        self.reports: list[LinearReport] = []
        self.attention_error, self.int8_attention = 0.0, False

    def run(
        self,
        h: Array,
        exact: Array | None,
        lengths: Sequence[int],
        chosen: Sequence[Array],
        fallback_rows: int,
    ) -> LayerResult:
        """Quantise the layer for inputs h [T, H] of the model quantised so far. `exact` are the original
        model's inputs, for comparison; `chosen` as in `Walk`.

        An expert with fewer than `fallback_rows` tokens is quantised as if it saw every token.
        """
        self.lengths, self.chosen, self.fallback_rows = lengths, chosen, fallback_rows
        x = self.normed(self.attention(BothRows(h, exact)), "post_attention_layernorm.weight")
        if self.c.is_moe(self.layer_idx):
            self.moe(x)
        else:
            self.dense(x)
        return LayerResult(self.int8, self.floats, self.int8_attention)

    def trial(self, h: Array, lengths: Sequence[int], chosen: Sequence[Array]) -> dict[str, float]:
        """Quantise on trial; return the errors by module, without routed experts. h [T, H] is the original
        model's."""
        self.is_trial = True
        self.run(h, None, lengths, chosen, 0)
        return {one.module: one.both for one in self.reports if one.both is not None}

    def report(self) -> LayerReport:
        """Return the errors of the layer that `run` has quantised."""
        return LayerReport(self.reports, self.attention_error, self.int8_attention)

    def normed(self, h: BothRows, name: str) -> BothRows:
        weight = self.get(name)
        return h.map(lambda h: forward.rms_norm(h, weight, self.c.rms_norm_eps))

    # ---- one linear layer ---------------------------------------------------------------------------

    def linear(self, module: str, w: Array, x: BothRows) -> BothRows:
        """Quantise w [N, K], read by x [T, K], both smoothed; return the layer's outputs [T, N]."""
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

    def smoothing(
        self, x: Array, weights: Sequence[Array], tie: Callable[[Array], Array] = lambda scale: scale
    ) -> Array:
        """Find the smoothing scale s [K] of a stage's inputs; all ones without smoothing. `tie` as in
        `search_scale`."""
        if not self.method.alphas:
            return np.ones(x.shape[1], np.float32)
        return search_scale(x, weights, self.method.alphas, tie)[0]

    # ---- attention ----------------------------------------------------------------------------------

    def attention(self, h: BothRows) -> BothRows:
        """Quantise attention; return the hidden states behind attention."""
        x = self.normed(h, "input_layernorm.weight")
        return h.join(ATTENTION[self.c.attention](self, x), np.add)

    # ---- feed-forward -------------------------------------------------------------------------------

    def modules(self, name: str, expert: int | None = None) -> list[str]:
        """Return checkpoint names of the modules in row `name` of the tensor table, without the layer's
        prefix."""
        return self.rows[name].sources("", expert)

    def dense(self, x: BothRows) -> None:
        """Quantise the MLP of a layer without experts."""
        s = self.smoothing(x.seen, [self.get(f"{name}.weight") for name in self.modules("mlp.w13")])
        self.floats["post_attention_layernorm.weight"] = self.get("post_attention_layernorm.weight") / s
        self.mlp("mlp", None, x.over(s), s)

    def moe(self, x: BothRows) -> None:
        """Quantise shared and routed experts. Both models take the quantised model's routes, so that outputs
        are comparable."""
        c, get = self.c, self.get
        (gate,) = self.modules("gate")
        router = get(f"{gate}.weight")
        bias = NO_BIAS
        if "bias" in self.rows:
            name = f"{self.modules('bias')[0]}.{self.rows['bias'].parameter}"
            bias = self.floats[name] = get(name)
        topk_idx, _ = forward.route(c, x.seen, router, bias)
        load = np.bincount(topk_idx.ravel(), minlength=c.n_routed_experts)
        busy = np.argsort(-load, kind="stable")[:BUSY_EXPERTS].tolist()
        readers = [name for expert in busy for name in self.modules("experts.w13", expert)]
        if c.n_shared_experts:
            readers += self.modules("shared.w13")
        s = np.ones(x.seen.shape[1], np.float32)
        if self.method.alphas:
            s = self.smoothing(x.seen, [get(f"{name}.weight") for name in readers])
        self.floats["post_attention_layernorm.weight"] = get("post_attention_layernorm.weight") / s
        self.floats[f"{gate}.weight"] = router * s
        x = x.over(s)
        if c.n_shared_experts:
            self.mlp("shared", None, x, s)
        for expert in range(0 if self.is_trial else c.n_routed_experts):
            rows = np.nonzero((topk_idx == expert).any(axis=1))[0]
            if len(rows) < self.fallback_rows:
                rows = np.arange(len(x.seen))
            self.mlp("experts", expert, x.take(rows), s)

    def mlp(self, name: str, expert: int | None, x: BothRows, s: Array) -> None:
        """Quantise gate, up and down of an MLP; x [T, H] is already smoothed by s, the weights are not."""
        gate_name, up_name = self.modules(f"{name}.w13", expert)
        (down_name,) = self.modules(f"{name}.w2", expert)
        gate_proj, up_proj = self.get(f"{gate_name}.weight") * s, self.get(f"{up_name}.weight") * s
        down_proj = self.get(f"{down_name}.weight")
        s2 = self.smoothing(forward.silu(x.seen @ gate_proj.T) * (x.seen @ up_proj.T), [down_proj])
        gate = self.linear(gate_name, gate_proj, x)
        up = self.linear(up_name, up_proj / s2[:, None], x)
        inner = gate.join(up, lambda gate, up: forward.silu(gate) * up)
        self.linear(down_name, down_proj * s2, inner)
