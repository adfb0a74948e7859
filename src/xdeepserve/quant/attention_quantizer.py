"""Quantise attention's projections, stage by stage, as `layer_quantizer` does the rest of a layer.

    stage                  reads                      its inputs' scale is folded into
    ---------------------  -------------------------  ------------------------------------------
    MLA
    q_a_proj, kv_a_proj    normed hidden state        input_layernorm (the indexer follows, if there is one)
    q_b_proj               normed query latent        q_a_layernorm (and the indexer's queries)
    o_proj                 attended values            value rows of kv_b_proj
    GQA
    q, k and v_proj        normed hidden state        input_layernorm
    o_proj                 attended values            rows of v_proj, and its bias

kv_b_proj, biases, norms and the indexer stay float (xDeepServe 4.7; CloudMatrix384 4.5). Where attention is
sparse, both models see what the quantised one's indexer chooses: like is set beside like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from xdeepserve.model import reference
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import LATENT_NORM_EPS, ModelConfig
from xdeepserve.model.families import AttentionKind
from xdeepserve.model.tensor_row import Tensor
from xdeepserve.quant import forward
from xdeepserve.quant.both_rows import BothRows
from xdeepserve.quant.forward import FastLayer
from xdeepserve.quant.method import Method
from xdeepserve.quant.rotation import rotate_values, rotation
from xdeepserve.quant.rotation_search import AttentionWeights, rotate_where_it_helps
from xdeepserve.quant.rounding import relative_error
from xdeepserve.quant.smoothquant import search_scale

NORM, ATTN = "input_layernorm.weight", "self_attn."
INDEX_Q, INDEX_K, INDEX_GATE = (f"{ATTN}indexer.{name}.weight" for name in ("wq_b", "wk", "weights_proj"))


class Quantizer(Protocol):
    """Interface of a layer's quantiser that attention needs; see LayerQuantizer."""

    c: ModelConfig
    layer_idx: int
    method: Method
    rows: dict[str, Tensor]
    lengths: Sequence[int]
    chosen: Sequence[Array]
    floats: dict[str, Array]
    attention_error: float
    int8_attention: bool

    @property
    def get(self) -> Callable[[str], Array]: ...
    def linear(self, module: str, w: Array, x: BothRows) -> BothRows: ...
    def smoothing(self, x: Array, weights: Sequence[Array], tie: Callable[[Array], Array] = ...) -> Array: ...


class Folded:
    """A layer's float tensors with the scales folded in so far."""

    int8_attention = False

    def __init__(self, layer: Quantizer) -> None:
        self._layer = layer

    def get(self, name: str) -> Array:
        return self._layer.floats[name] if name in self._layer.floats else self._layer.get(name)

    def apply(self, module: str, x: Array) -> Array:
        return x @ self.get(f"{module}.weight").T


def fast(layer: Quantizer) -> FastLayer:
    """Make the float layer for the computation between attention's projections."""
    return FastLayer(layer.c, layer.layer_idx, Folded(layer), layer.lengths)


def mla(layer: Quantizer, x: BothRows) -> BothRows:
    """Quantise MLA's projections; return attention's contribution [T, H] for its normed inputs x [T, H]."""
    c, get, floats = layer.c, layer.get, layer.floats
    has_latent, has_indexer = c.q_lora_rank is not None, "index_wq" in layer.rows
    q_b_name = f"{ATTN}q_b_proj" if has_latent else f"{ATTN}q_proj"
    a = AttentionWeights(
        q_a=get(f"{ATTN}q_a_proj.weight") if has_latent else None,
        q_norm=get(f"{ATTN}q_a_layernorm.weight") if has_latent else None,
        q_b=get(f"{q_b_name}.weight"),
        kv_a=get(f"{ATTN}kv_a_proj_with_mqa.weight"),
        kv_norm=get(f"{ATTN}kv_a_layernorm.weight"),
        kv_b=get(f"{ATTN}kv_b_proj.weight"),
        o_proj=get(f"{ATTN}o_proj.weight"),
        index_q=get(INDEX_Q) if has_indexer else None,
    )
    if layer.method.rotate:
        a = rotate_where_it_helps(a, x.seen, c, layer.lengths, layer.method.alphas, layer.layer_idx)
    q_a, q_norm = a.q_a, a.q_norm
    s = layer.smoothing(x.seen, [a.q_b if q_a is None else q_a, a.kv_a])
    floats[NORM] = get(NORM) / s
    x = query = x.over(s)
    kv = layer.linear(f"{ATTN}kv_a_proj_with_mqa", a.kv_a * s, x)
    if has_indexer:
        floats[INDEX_K], floats[INDEX_GATE] = get(INDEX_K) * s, get(INDEX_GATE) * s
    if q_a is not None and q_norm is not None:
        latent = layer.linear(f"{ATTN}q_a_proj", q_a * s, x)
        query = latent.map(lambda q: forward.rms_norm(q, q_norm, LATENT_NORM_EPS))
        s = layer.smoothing(query.seen, [a.q_b])
        floats[f"{ATTN}q_a_layernorm.weight"] = q_norm / s
        query = query.over(s)
    if a.index_q is not None:
        floats[INDEX_Q] = a.index_q * s
        layer.chosen = reference.indexer(fast(layer), x.seen, query.seen)
    o = attended(layer, layer.linear(q_b_name, a.q_b * s, query), kv, a.kv_norm, a.kv_b)
    s = layer.smoothing(o.seen, [a.o_proj])
    by_head = a.kv_b.reshape(c.num_attention_heads, -1, c.kv_lora_rank).copy()
    by_head[:, c.qk_nope_head_dim :] /= s.reshape(c.num_attention_heads, c.v_head_dim, 1)
    floats[f"{ATTN}kv_a_layernorm.weight"] = a.kv_norm
    floats[f"{ATTN}kv_b_proj.weight"] = by_head.reshape(a.kv_b.shape)
    return layer.linear(f"{ATTN}o_proj", a.o_proj * s, o.over(s))


def attended(layer: Quantizer, q: BothRows, kv: BothRows, kv_norm: Array, kv_b: Array) -> BothRows:
    """Compute attention's outputs, with INT8 weights if they cost the layer little enough (xDeepServe
    4.7)."""
    chosen = layer.chosen if layer.c.attention != "mla" else None

    def attend(q: Array, kv: Array, int8_weights: bool = False) -> Array:
        return forward.attend(layer.c, q, kv, kv_norm, kv_b, layer.lengths, int8_weights, chosen)

    plain = q.join(kv, attend)
    if chosen is not None:
        return plain
    rounded = attend(q.seen, kv.seen, int8_weights=True)
    layer.attention_error = relative_error(rounded, plain.seen)
    limit = layer.method.max_attention_error
    layer.int8_attention = limit is not None and layer.attention_error <= limit
    return plain._replace(seen=rounded) if layer.int8_attention else plain


def gqa(layer: Quantizer, x: BothRows) -> BothRows:
    """Quantise and smooth grouped-query attention's projections; return attention's contribution [T, H]."""
    c, get, floats = layer.c, layer.get, layer.floats
    q, k, v, o_proj = (get(f"{ATTN}{name}_proj.weight") for name in "qkvo")
    s = layer.smoothing(x.seen, [q, k, v])
    floats[NORM] = get(NORM) / s
    x, q, k, v = x.over(s), q * s, k * s, v * s

    def attend(q: Array, k: Array, v: Array) -> Array:
        return reference.grouped_attention(fast(layer), q, k, v)

    bias_name = f"{ATTN}v_proj.bias"
    bias = get(bias_name) if "bv" in layer.rows else np.zeros(len(v), np.float32)
    o = attend(*(x.seen @ w.T for w in (q, k, v)))
    if layer.method.rotate:
        v, bias, o_proj, o = _rotated_values(layer, v, bias, o_proj, o)
    s = layer.smoothing(o, [o_proj], lambda s: _per_value(c, s))
    to_values = s.reshape(c.num_key_value_heads, -1, c.v_head_dim)[:, 0].reshape(-1)
    if "bv" in layer.rows:
        floats[bias_name] = bias / to_values
    keys, values = (
        layer.linear(f"{ATTN}k_proj", k, x),
        layer.linear(f"{ATTN}v_proj", v / to_values[:, None], x),
    )
    queries = layer.linear(f"{ATTN}q_proj", q, x)
    exact = None
    if queries.exact is not None and keys.exact is not None and values.exact is not None:
        exact = attend(queries.exact, keys.exact, values.exact)
    attended = BothRows(attend(queries.seen, keys.seen, values.seen), exact)
    return layer.linear(f"{ATTN}o_proj", o_proj * s, attended)


def _per_value(c: ModelConfig, s: Array) -> Array:
    """Make s [N * V] equal for all heads that share values, by the mean of its logarithms."""
    shared = np.log(s).reshape(c.num_key_value_heads, -1, c.v_head_dim)
    mean = np.broadcast_to(np.exp(shared.mean(axis=1, keepdims=True)), shared.shape)
    return mean.reshape(-1).astype(np.float32)


def _rotated_values(
    layer: Quantizer, v: Array, bias: Array, o_proj: Array, o: Array
) -> tuple[Array, Array, Array, Array]:
    """Rotate v_proj with bias, o_proj and o_proj's inputs [T, N * V] if rotation lowers the error."""
    width, alphas = layer.c.v_head_dim, layer.method.alphas
    turn = rotation(width, layer.layer_idx)
    values, turned_proj = rotate_values(v.reshape(-1, width, v.shape[1]), o_proj, turn)
    turned = (o.reshape(len(o), -1, width) @ turn).reshape(o.shape).astype(np.float32)
    if search_scale(turned, [turned_proj], alphas)[1] >= search_scale(o, [o_proj], alphas)[1]:
        return v, bias, o_proj, o
    turned_bias = (bias.reshape(-1, width) @ turn).reshape(-1).astype(np.float32)
    return values.reshape(v.shape), turned_bias, turned_proj, turned


ATTENTION: dict[AttentionKind, Callable[[Quantizer, BothRows], BothRows]] = {
    "mla": mla,
    "gqa": gqa,
    "dsa": mla,
    "dsa-shared": mla,
}
