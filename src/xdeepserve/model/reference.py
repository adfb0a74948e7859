"""The reference: DeepSeek-V3's forward pass in NumPy, one sequence at a time, written as its equations.

The functions fix the order of a layer's computations. `Reference` runs them in the arithmetic that every
deployment must reproduce bit for bit (`xdeepserve verify` compares logits; Hugging Face's transformers agrees
in float32 to 2e-3). The quantiser runs them in a fast arithmetic, over calibration text (quant/forward.py).
No batch, no cache, no pages, no dies: position i attends to the latents of positions 0..i. Weights have their
names from tensors.py. Shapes: T tokens, H hidden, N heads, C = kv_lora_rank, R = rope dim, E experts.

DeepSeek-V2 section 2.1 (MLA), DeepSeek-V3 section 2.1.2 (gating) and 2.2 (MTP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from xdeepserve.bf16 import round_bf16
from xdeepserve.model import canonical as c
from xdeepserve.model.canonical import F32, Array
from xdeepserve.model.config import INDEX_NORM_EPS, LATENT_NORM_EPS, ModelConfig
from xdeepserve.model.families import AttentionKind, Scoring
from xdeepserve.model.tensors import MTP, Layer, Linear, ModelWeights, find
from xdeepserve.model.v4 import canonical as v4_canonical
from xdeepserve.model.v4 import equations as v4
from xdeepserve.model.weights import NO_BIAS, Recipe, TensorSource, load_weights

# Of each expert: the tokens [n] and slots [n] that chose it, and what it made of them [n, H].
Outputs = Iterator[tuple[Array, Array, Array]]


class Arithmetic(Protocol):
    """Weights of a layer, and a way to compute with them."""

    config: ModelConfig
    attention: AttentionKind  # of the layer

    def has(self, name: str) -> bool: ...
    def norm(self, x: Array, name: str, eps: float) -> Array: ...
    def plus(self, x: Array, name: str) -> Array: ...  # x and a bias, if there is one
    def linear(self, x: Array, name: str, expert: int | None = None) -> Array: ...  # x [T, K] -> [T, N]
    def row_parallel(self, x: Array, name: str) -> Array: ...  # tensor parallelism may cut this one along K
    def rope(
        self, x: Array
    ) -> Array: ...  # x [T, R] or [T, N, R] or more, of which R are turned, by positions
    # q [T, N, D], k and v [T, G, D], whose heads are shared by N / G queries each -> [T, N * D]: causal
    def attend_grouped(self, q: Array, k: Array, v: Array) -> Array: ...
    # q [T, N, nope], q_pe [T, N, R], latent [T, C], k_pe [T, R] -> [T, N * V]: causal, with w_uk and w_uv
    def attend(self, q: Array, q_pe: Array, latent: Array, k_pe: Array) -> Array: ...
    def swiglu(self, gate_up: Array) -> Array: ...  # [T, 2I] -> silu(gate) * up [T, I]
    def route(self, x: Array) -> tuple[Array, Array]: ...  # topk_idx and topk_weights, [T, K]
    # The weighted sum of the experts' outputs, and the shared expert's [T, H] -> [T, H]
    def combine(self, outputs: Outputs, topk_weights: Array, shared: Array | None) -> Array: ...


class Chooses(Arithmetic, Protocol):
    """Arithmetic with the further operations of an indexer."""

    def matrix(self, x: Array, name: str) -> Array: ...  # x [T, K] -> [T, N], never quantised
    def scores(self, x: Array, name: str) -> Array: ...  # the same of a router
    def layer_norm(self, x: Array, name: str, bias: str) -> Array: ...
    def index_rope(self, x: Array) -> Array: ...  # `rope`, in the pairs of the indexer's queries and keys
    # q [T, N, X], k [T, X], weights [T, N] -> of each token, positions, ascending
    def choose(self, q: Array, k: Array, weights: Array) -> list[Array]: ...
    @property
    def chosen(self) -> list[Array]: ...  # what `choose` has found, here or in the layer before
    # `attend`, each token to some positions
    def attend_to(
        self, seen: Sequence[Array | slice], q: Array, q_pe: Array, latent: Array, k_pe: Array
    ) -> Array: ...


def block(m: Arithmetic, h: Array) -> Array:
    """Compute a transformer layer, h [T, H] -> [T, H]; or with hyper-connections, [T, n, H] -> the same."""
    h = connected(m, h, "attn", lambda x: ATTENTION[m.attention](m, x))
    return connected(m, h, "ffn", lambda x: moe(m, x) if m.has("gate") else mlp(m, x, "mlp"))


def connected(m: Arithmetic, h: Array, name: str, part: Callable[[Array], Array]) -> Array:
    """Compute a half of a layer, `attn` or `ffn`, on rows that have been normed, and add it to the rows."""
    if m.config.v4 is not None:
        return v4.connected(m, h, name, part)
    return h + part(m.norm(h, f"{name}_norm", m.config.rms_norm_eps))


def mla(m: Arithmetic, x: Array) -> Array:
    """Multi-head latent attention, x [T, H] -> [T, H]."""
    kv = m.linear(x, "wkv_a")
    query = m.norm(m.linear(x, "wq_a"), "q_norm", LATENT_NORM_EPS) if m.has("wq_a") else x
    return m.row_parallel(attention(m, m.linear(query, "wq_b"), kv), "wo")


def dsa(m: Chooses, x: Array) -> Array:
    """DeepSeek sparse attention, x [T, H] -> [T, H]: MLA in which each token sees only chosen positions."""
    kv, query = m.linear(x, "wkv_a"), m.norm(m.linear(x, "wq_a"), "q_norm", LATENT_NORM_EPS)
    chosen = indexer(m, x, query) if m.attention == "dsa" else m.chosen
    return m.row_parallel(m.attend_to(chosen, *heads(m, m.linear(query, "wq_b"), kv)), "wo")


def indexer(m: Chooses, x: Array, query: Array) -> list[Array]:
    """Choose the positions seen by each token (DeepSeek-V3.2, section 2.1), x [T, H], query [T, Q]:

    I[t, s] = sum over heads j of w[t, j] relu(q[t, j] . k[s]), and of those with s <= t the index_topk best
    """
    q = m.index_rope(m.matrix(query, "index_wq").reshape(len(x), m.config.index_n_heads, -1))
    k = m.index_rope(m.layer_norm(m.matrix(x, "index_wk"), "index_norm", "index_bias"))
    return m.choose(q, k, m.scores(x, "index_gate"))


def gqa(m: Arithmetic, x: Array) -> Array:
    """Grouped-query attention, x [T, H] -> [T, H], optionally with biases, and with norms per head or over
    all heads."""
    k, v = np.split(m.linear(x, "wkv_a"), 2, axis=1)
    q = m.linear(x, "wq_a" if m.config.qk_norm == "all" else "wq_b")
    return m.row_parallel(grouped_attention(m, q, k, v), "wo")


def grouped_attention(m: Arithmetic, q: Array, k: Array, v: Array) -> Array:
    """Attend between the projections of `gqa`: q [T, N * D], k and v [T, G * D] -> [T, N * D]."""
    c, eps = m.config, m.config.rms_norm_eps
    if c.qk_norm == "all":
        q, k = m.norm(q, "q_norm", eps), m.norm(k, "kv_norm", eps)
    else:
        q, k, v = m.plus(q, "bq"), m.plus(k, "bk"), m.plus(v, "bv")
    q = q.reshape(len(q), c.num_attention_heads, -1)
    k, v = (each.reshape(len(q), c.num_key_value_heads, -1) for each in (k, v))
    if c.qk_norm == "head":
        q, k = m.norm(q, "q_norm", eps), m.norm(k, "kv_norm", eps)
    return m.attend_grouped(m.rope(q), m.rope(k), v)


ATTENTION: dict[AttentionKind, Callable[[Any, Array], Array]] = {
    "mla": mla,
    "gqa": gqa,
    "dsa": dsa,
    "dsa-shared": dsa,
    "window": v4.attend,
    "csa": v4.attend,
    "hca": v4.attend,
}


def attention(m: Arithmetic, q: Array, kv: Array) -> Array:
    """Attend between the projections of MLA: q [T, N * (nope + R)], kv [T, C + R] -> [T, N * V]."""
    return m.attend(*heads(m, q, kv))


def heads(m: Arithmetic, q: Array, kv: Array) -> tuple[Array, Array, Array, Array]:
    """Split and rotate q and kv into the arguments of `attend`."""
    nope, rank = m.config.qk_nope_head_dim, m.config.kv_lora_rank
    q = q.reshape(len(q), m.config.num_attention_heads, -1)
    latent = m.norm(kv[:, :rank], "kv_norm", LATENT_NORM_EPS)
    return q[..., :nope], m.rope(q[..., nope:]), latent, m.rope(kv[:, rank:])


def mlp(m: Arithmetic, x: Array, name: str) -> Array:
    """Compute down(silu(gate(x)) * up(x)) of a dense layer or the shared expert."""
    return m.row_parallel(m.swiglu(m.linear(x, f"{name}.w13")), f"{name}.w2")


def moe(m: Arithmetic, x: Array) -> Array:
    """Compute the weighted routed experts, then the shared expert, x [T, H] -> [T, H]."""
    topk_idx, topk_weights = m.route(x)
    shared = mlp(m, x, "shared") if m.has("shared.w13") else None
    return m.combine(expert_outputs(m, x, topk_idx), topk_weights, shared)


def expert_outputs(m: Arithmetic, x: Array, topk_idx: Array) -> Outputs:
    """Yield the outputs of the chosen routed experts, expert by expert."""
    for e in np.unique(topk_idx):
        token, slot = np.nonzero(topk_idx == e)
        yield token, slot, m.linear(m.swiglu(m.linear(x[token], "experts.w13", e)), "experts.w2", e)


def mtp_input(m: Arithmetic, embedding: Array, hidden: Array) -> Array:
    """Compute the input of an MTP layer's block, [T, H], from the next token's embedding and the normed
    hidden state."""
    eps = m.config.rms_norm_eps
    halves = m.norm(embedding, "enorm", eps), m.norm(hidden, "hnorm", eps)
    return m.linear(np.concatenate(halves, axis=-1), "eh_proj")


def route(config: ModelConfig, scores: Array, bias: Array) -> tuple[Array, Array]:
    """Route tokens: return topk_idx and topk_weights [T, K] for scores [T, E]."""
    return c.gate(
        scores,
        bias,
        config.n_group,
        config.topk_group,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        config.routed_scaling_factor,
        config.best_of_group,
    )


def product(recipe: Recipe, x: Array, w: Array) -> Array:
    """Multiply x [..., M, K] @ w [..., K, N], weights that are not quantised. The INT8 recipe uses exact
    products."""
    return c.matmul_exact(c.factors(x), w) if recipe == "int8" else c.matmul(x, w)


def linear(recipe: Recipe, x: Array, layer: Linear) -> Array:
    """Apply a linear layer, x [T, K] -> [T, N]; an INT8 layer quantises its input per token."""
    if layer.scale is None:
        return product(recipe, x, layer.w)
    return c.matmul_int8(*c.quantize_rows(x), layer.w, layer.scale)


def rounded_to_int8(x: Array) -> Array:
    """Round rows x [T, K] as if they had travelled as INT8: each element of q times the row's scale, rounded
    once."""
    q, scale = c.quantize_rows(x)
    return q.astype(F32) * scale[..., None]


SCORES: dict[Scoring, Callable[[Array], Array]] = {
    "sigmoid": c.sigmoid,
    "softmax": c.softmax,
    "sqrtsoftplus": v4_canonical.sqrt_softplus,
}
"""A router's scores by its logits."""


class Canonical:
    """A layer of prepared weights in the arithmetic of `canonical`; MLA in its weight-absorbed form."""

    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        weights: Layer | MTP | ModelWeights,
        cos: Array,
        sin: Array,
        token_ids: Sequence[int] = (),
    ) -> None:
        """Take the weights of a layer; cos and sin [T, R / 2] belong to the rows' positions."""
        self.config, self.recipe, self.is_int8, self.weights = config, recipe, recipe == "int8", weights
        self.cos, self.sin, self.token_ids = cos, sin, token_ids
        self.attention = weights.attention if isinstance(weights, Layer) else config.attention
        self.chosen: list[Array] = []

    def has(self, name: str) -> bool:
        return find(self.weights, name) is not None

    def plus(self, x: Array, name: str) -> Array:
        bias = find(self.weights, name)
        return x if bias is None else x + bias

    def norm(self, x: Array, name: str, eps: float) -> Array:
        return c.rms_norm(x, find(self.weights, name), eps)

    def linear(self, x: Array, name: str, expert: int | None = None) -> Array:
        layer: Linear = find(self.weights, name)
        if expert is not None:
            scale = None if layer.scale is None else layer.scale[expert]
            layer = layer._replace(w=layer.w[expert], scale=scale)
        return linear(self.recipe, x, layer)

    def row_parallel(self, x: Array, name: str) -> Array:
        """Multiply in blocks of K in FP32, because ranks may hold parts of the sum; INT8 sums are exact
        anyway."""
        layer: Linear = find(self.weights, name)
        if layer.scale is not None:
            return linear(self.recipe, x, layer)
        if self.is_int8:
            return c.matmul_blocked(c.factors(x), layer.w, product=c.matmul_exact)
        return c.matmul_blocked(x, layer.w)

    def rope(self, x: Array, back: bool = False, step: int = 1) -> Array:
        """Rotate the last columns of x by the rows' positions, or back; or by every `step`-th of them."""
        cos, sin = self.cos[::step][: len(x)], self.sin[::step][: len(x)]
        cos, sin = (cos, sin) if x.ndim == 2 else (cos[:, None], sin[:, None])
        sin = -sin if back else sin
        still, turned = np.split(x, [x.shape[-1] - 2 * cos.shape[-1]], axis=-1)
        return np.concatenate([still, c.rope(turned, cos, sin)], axis=-1)

    def matrix(self, x: Array, name: str) -> Array:
        return product(self.recipe, x, find(self.weights, name))

    def scores(self, x: Array, name: str) -> Array:
        return c.matmul(x, find(self.weights, name))

    index_rope = rope  # rows of weights are in the order of attention's

    def layer_norm(self, x: Array, name: str, bias: str) -> Array:
        return c.layer_norm(x, find(self.weights, name), find(self.weights, bias), INDEX_NORM_EPS)

    def choose(self, q: Array, k: Array, weights: Array) -> list[Array]:
        scores = (c.index_scores(q[t], k[: t + 1], weights[t], self.is_int8) for t in range(len(q)))
        self.chosen = [c.top_positions(each, self.config.index_topk) for each in scores]
        return self.chosen

    def attend(self, q: Array, q_pe: Array, latent: Array, k_pe: Array) -> Array:
        return self.attend_to([slice(0, t + 1) for t in range(len(q))], q, q_pe, latent, k_pe)

    def attend_to(
        self, seen: Sequence[Array | slice], q: Array, q_pe: Array, latent: Array, k_pe: Array
    ) -> Array:
        layer, scale = self.weights, None
        assert isinstance(layer, Layer)
        q_lat = product(self.recipe, q.transpose(1, 0, 2), layer.w_uk).transpose(1, 0, 2)  # [T, N, C]
        if self.is_int8:  # the latent half of the KV cache is INT8
            latent, scale = c.quantize_rows(latent)
        o_lat = np.empty_like(q_lat)
        for t, at in enumerate(seen):
            o_lat[t] = c.attention(
                q_lat[t],
                q_pe[t],
                latent[at],
                None if scale is None else scale[at],
                k_pe[at],
                self.config.softmax_scale,
                layer.int8_attention,
            )
        o = product(self.recipe, o_lat.transpose(1, 0, 2), layer.w_uv).transpose(1, 0, 2)  # [T, N, V]
        return np.ascontiguousarray(o).reshape(len(q), -1)

    def product(self, x: Array, name: str) -> Array:
        """Multiply x [B, M, K] by matrices [B, K, N] that are never quantised."""
        return product(self.recipe, x, find(self.weights, name))

    def attend_latents(self, q: Array, latent: Array, k_pe: Array, seen: Sequence[Array]) -> Array:
        """Attend with latents that are keys and values, q [T, N, D] -> [T, N, D], each token to some."""
        scale, sinks, still = None, find(self.weights, "sinks"), latent.shape[1]
        if self.is_int8:
            latent, scale = c.quantize_rows(latent)
        found = np.empty_like(q)
        for t, at in enumerate(seen):
            found[t, :, :still], found[t, :, still:] = v4_canonical.sink_attention(
                np.ascontiguousarray(q[t, :, :still]),
                np.ascontiguousarray(q[t, :, still:]),
                latent[at],
                None if scale is None else scale[at],
                k_pe[at],
                self.config.softmax_scale,
                sinks,
            )
        return found

    def attend_grouped(self, q: Array, k: Array, v: Array) -> Array:
        scale: Array | None = None
        if self.is_int8:  # the values of the KV cache are INT8
            v, scale = c.quantize_rows(v)
        shared, out = q.shape[1] // k.shape[1], np.empty_like(q)
        for t, g in np.ndindex(len(q), k.shape[1]):
            heads, seen = slice(g * shared, (g + 1) * shared), (slice(0, t + 1), g)
            v_scale = None if scale is None else scale[seen]
            out[t, heads] = c.grouped_attention(
                q[t, heads], k[seen], v[seen], v_scale, self.config.softmax_scale
            )
        return out.reshape(len(q), -1)

    def swiglu(self, gate_up: Array) -> Array:
        if self.config.v4 is not None:
            return v4_canonical.swiglu(gate_up, self.config.v4.swiglu_limit)
        return c.swiglu(gate_up)

    def route(self, x: Array) -> tuple[Array, Array]:
        gate, bias = find(self.weights, "gate"), find(self.weights, "bias")
        scored = SCORES[self.config.scoring](c.matmul(x, gate))
        by_token = find(self.weights, "by_token")
        if by_token is None:
            return route(self.config, scored, NO_BIAS if bias is None else bias)
        norm, factor = self.config.norm_topk_prob, self.config.routed_scaling_factor
        return v4_canonical.experts_by_token(by_token, np.asarray(self.token_ids), scored, norm, factor)

    def combine(self, outputs: Outputs, topk_weights: Array, shared: Array | None) -> Array:
        """Combine experts' outputs in top-k slot order. In the INT8 recipe all outputs cross the pod as BF16
        (CloudMatrix 4.2.1), or as INT8 with a scale per token (xDeepServe 4.7). The shared expert's does,
        too, because it may live on another die like a routed one."""
        rounded: Callable[[Array], Array] = np.asarray
        if self.is_int8:
            rounded = rounded_to_int8 if self.config.int8_answers else round_bf16
        expert_out = np.empty((*topk_weights.shape, self.config.hidden_size), F32)
        for token, slot, out in outputs:
            expert_out[token, slot] = rounded(out)
        return c.combine(expert_out, topk_weights, None if shared is None else rounded(shared))


class Reference:
    """Model in host memory for computing the reference logits."""

    def __init__(self, source: TensorSource, recipe: Recipe, num_positions: int | None = None) -> None:
        self.config: ModelConfig = source.config
        self.recipe: Recipe = recipe
        self.weights: ModelWeights = load_weights(
            source, recipe, num_positions or min(self.config.max_position_embeddings, 4096)
        )

    def logits(self, token_ids: Sequence[int]) -> Array:
        """Return the logits, float32 [T, vocab]: row i is the distribution of token i + 1."""
        return linear(self.recipe, self.hidden(token_ids), self.weights.head)

    def hidden(self, token_ids: Sequence[int]) -> Array:
        """Return the main model's hidden states after the final norm, [T, H]."""
        return self._normed(self.rows(token_ids), self.weights)

    def rows(self, token_ids: Sequence[int]) -> Array:
        """Return the rows behind the main model's last layer, [T, H], or with hyper-connections [T, n, H]."""
        h = self.weights.embed[np.asarray(token_ids, np.int64)]
        if self.config.v4 is not None:
            h = np.repeat(h[:, None], self.config.v4.hc_mult, axis=1)
        chosen: list[Array] = []
        for layer in self.weights.layers:
            m = self._layer(layer, token_ids)
            m.chosen = chosen
            h, chosen = block(m, h), m.chosen
        return h

    def _normed(self, rows: Array, ends: ModelWeights | MTP) -> Array:
        """Norm rows behind the last layer for the head, [T, H]."""
        if self.config.v4 is not None:
            rows = v4.merged(
                Canonical(self.config, self.recipe, ends, self.weights.cos, self.weights.sin), rows
            )
        return c.rms_norm(rows, ends.norm, self.config.rms_norm_eps)

    def mtp_logits(self, token_ids: Sequence[int], depth: int = 1, reuse: bool = False) -> Array:
        """Return MTP's logits, float32 [T - depth, vocab]: row i is the distribution of token i + depth + 1,
        seen tokens 0 .. i + depth.

        Depth d is MTP layer d if the checkpoint has that many, else (or with `reuse`) the first one again. It
        continues from the normed hidden states of depth d - 1; depth 0 is the main model.
        """
        layers, has_streams = self.weights.mtp, self.config.v4 is not None
        assert layers, "this checkpoint has no MTP layer"
        hidden, mtp = self.rows(token_ids), layers[0]
        hidden = hidden if has_streams else self._normed(hidden, self.weights)
        for d in range(1, depth + 1):
            mtp = layers[0] if reuse or d > len(layers) else layers[d - 1]
            embedding = mtp.embed[np.asarray(token_ids[d:], np.int64)]
            ids = token_ids[d:]
            h = (v4.mtp_input if has_streams else mtp_input)(self._layer(mtp, ids), embedding, hidden[:-1])
            h = block(self._layer(mtp.layer, ids), h)
            hidden = h if has_streams else self._normed(h, mtp)
        return linear(self.recipe, self._normed(h, mtp) if has_streams else hidden, mtp.head)

    def _layer(self, weights: Layer | MTP, token_ids: Sequence[int]) -> Canonical:
        """Return a layer with the RoPE of rows whose tokens are `token_ids`."""
        ends, count = self.weights, len(token_ids)
        cos, sin = ends.cos[:count], ends.sin[:count]
        if isinstance(weights, Layer) and weights.attention in ("csa", "hca"):
            assert ends.compress_cos is not None
            assert ends.compress_sin is not None
            cos, sin = ends.compress_cos[:count], ends.compress_sin[:count]
        return Canonical(self.config, self.recipe, weights, cos, sin, token_ids)
