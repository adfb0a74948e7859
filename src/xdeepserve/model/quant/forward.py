"""A layer's forward pass over calibration text in float32, fast rather than canonical (it may use BLAS).

Sequences lie one after the other in [T, H] arrays; `lengths` says where they end. Shapes as in `reference`:
T tokens, H hidden, N heads, C = kv_lora_rank, R = rope dim, V = value dim, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from ...errors import CheckpointError
from ..canonical import Array, gate, quantize_rows
from ..checkpoint import Checkpoint
from ..config import ModelConfig
from ..rope import rope_tables
from .rounding import dequantize

LATENT_NORM_EPS = 1e-6


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(eps)) * weight


def silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def segments(lengths: Sequence[int]) -> Iterator[slice]:
    """The rows of each sequence."""
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


def attend(
    config: ModelConfig,
    q: Array,
    kv: Array,
    kv_norm: Array,
    kv_b: Array,
    lengths: Sequence[int],
    int8_weights: bool = False,
) -> Array:
    """Causal MLA, expanded. q [T, N * (nope + R)], kv [T, C + R] as projected -> [T, N * V].

    `int8_weights` rounds weights as canonical.attention does; the latents themselves stay float.
    """
    c, num_rows = config, len(q)
    heads, nope, rank = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
    cos, sin = rope_tables(c, max(lengths))
    positions = np.concatenate([np.arange(length) for length in lengths])
    cos, sin = cos[positions], sin[positions]
    q = q.reshape(num_rows, heads, -1)
    q_pe = _rope(q[..., nope:], cos[:, None], sin[:, None], c.rope_interleave)
    k_pe = _rope(kv[:, rank:], cos, sin, c.rope_interleave)
    latent = rms_norm(kv[:, :rank], kv_norm, LATENT_NORM_EPS)
    expanded = (latent @ kv_b.T).reshape(num_rows, heads, -1)
    out = np.empty((num_rows, heads, c.v_head_dim), np.float32)
    for rows in segments(lengths):
        k, v = expanded[rows, :, :nope], expanded[rows, :, nope:]
        scores = np.einsum("thd,shd->hts", q[rows, :, :nope], k, optimize=True)
        scores = (scores + np.einsum("thr,sr->hts", q_pe[rows], k_pe[rows], optimize=True)) * c.softmax_scale
        length = scores.shape[-1]
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        if int8_weights:
            scale = quantize_rows(latent[rows])[1]
            p = dequantize(*quantize_rows((p * scale).reshape(-1, length))).reshape(p.shape) / scale
        out[rows] = np.einsum("hts,shv->thv", p, v, optimize=True)
    return out.reshape(num_rows, -1)


def _rope(x: Array, cos: Array, sin: Array, interleave: bool) -> Array:
    """Rotate pairs. The result's order is the same for queries and keys, so scores do not depend on it."""
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleave else (x[..., :half], x[..., half:])
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def route(config: ModelConfig, x: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
    """topk_idx and topk_weights, [T, K]."""
    c = config
    with np.errstate(over="ignore"):
        scores = 1 / (1 + np.exp(-(x @ weight.T)))
    return gate(
        scores.astype(np.float32),
        bias,
        c.n_group,
        c.topk_group,
        c.num_experts_per_tok,
        c.norm_topk_prob,
        c.routed_scaling_factor,
    )


class LayerWeights(Protocol):
    """One layer's tensors, by the rest of their names, and its linear layers as functions."""

    @property
    def int8_attention(self) -> bool: ...

    def get(self, name: str) -> Array: ...

    def apply(self, module: str, x: Array) -> Array:
        """x [T, K] -> [T, N]."""
        ...


def finite_tensor(checkpoint: Checkpoint, name: str) -> Array:
    """A tensor to calibrate with. Raises CheckpointError if it holds infinities or what is not a number."""
    array = checkpoint.tensor(name)
    if not np.isfinite(array).all():
        raise CheckpointError(f"{checkpoint.name}: {name} holds values that are not finite")
    return array


def check_states(checkpoint: Checkpoint, layer_idx: int, h: Array) -> None:
    """Hidden states h [T, H] behind a layer must be numbers whose squares are, for the next layer's norm.

    Raises CheckpointError.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        is_usable = np.isfinite(np.square(h).sum(axis=-1)).all()
    if not is_usable:
        raise CheckpointError(
            f"{checkpoint.name}: on the calibration text, the hidden states behind layer {layer_idx} "
            "are not finite in float32"
        )


class FloatLayer:
    """A layer as the checkpoint has it, tensors read when they are asked for."""

    int8_attention = False

    def __init__(self, checkpoint: Checkpoint, layer_idx: int) -> None:
        self.checkpoint, self.prefix = checkpoint, f"model.layers.{layer_idx}."

    def get(self, name: str) -> Array:
        return finite_tensor(self.checkpoint, self.prefix + name)

    def apply(self, module: str, x: Array) -> Array:
        return x @ self.get(f"{module}.weight").T


def mlp(weights: LayerWeights, name: str, x: Array) -> Array:
    inner = silu(weights.apply(f"{name}.gate_proj", x)) * weights.apply(f"{name}.up_proj", x)
    return weights.apply(f"{name}.down_proj", inner)


def layer(
    config: ModelConfig, weights: LayerWeights, layer_idx: int, h: Array, lengths: Sequence[int]
) -> tuple[Array, Array | None]:
    """One decoder layer, h [T, H] -> [T, H]; and the experts of each token, [T, K], where there are any."""
    c, get, apply = config, weights.get, weights.apply
    x = rms_norm(h, get("input_layernorm.weight"), c.rms_norm_eps)
    if c.q_lora_rank is None:
        q = apply("self_attn.q_proj", x)
    else:
        q_a = rms_norm(apply("self_attn.q_a_proj", x), get("self_attn.q_a_layernorm.weight"), LATENT_NORM_EPS)
        q = apply("self_attn.q_b_proj", q_a)
    kv = apply("self_attn.kv_a_proj_with_mqa", x)
    kv_norm, kv_b = get("self_attn.kv_a_layernorm.weight"), get("self_attn.kv_b_proj.weight")
    o = attend(c, q, kv, kv_norm, kv_b, lengths, weights.int8_attention)
    h = h + apply("self_attn.o_proj", o)
    x = rms_norm(h, get("post_attention_layernorm.weight"), c.rms_norm_eps)
    if not c.is_moe(layer_idx):
        return h + mlp(weights, "mlp", x), None
    topk_idx, topk_weights = route(c, x, get("mlp.gate.weight"), get("mlp.gate.e_score_correction_bias"))
    out = mlp(weights, "mlp.shared_experts", x) if c.n_shared_experts else np.zeros_like(x)
    for expert in np.unique(topk_idx):
        token, slot = np.nonzero(topk_idx == expert)
        out[token] += mlp(weights, f"mlp.experts.{expert}", x[token]) * topk_weights[token, slot, None]
    return h + out, topk_idx


class Walk:
    """Sequences on their way through a checkpoint's layers, MTP layers included.

    `h` [T, H] and `lengths` are what layer `layer_idx` reads once `enter(layer_idx)` was called; `step` puts
    the layer's result back into `h`.
    """

    def __init__(self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> None:
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self._tokens = [np.asarray(sequence, np.int64) for sequence in sequences]
        self.lengths = [len(sequence) for sequence in sequences]
        self.h: Array = finite_tensor(checkpoint, "model.embed_tokens.weight")[np.concatenate(self._tokens)]

    def enter(self, layer_idx: int) -> None:
        """At an MTP layer, mix the next tokens' embeddings in; each sequence loses its last row."""
        c, depth = self.config, layer_idx - self.config.num_hidden_layers
        if depth < 0:
            return
        get, eps = FloatLayer(self.checkpoint, layer_idx).get, c.rms_norm_eps
        before = (
            "model.norm.weight" if depth == 0 else f"model.layers.{layer_idx - 1}.shared_head.norm.weight"
        )
        hidden = rms_norm(self.h, finite_tensor(self.checkpoint, before), eps)
        keep = np.concatenate([np.arange(rows.start, rows.stop - 1) for rows in segments(self.lengths)])
        ahead = np.concatenate([tokens[depth + 1 :] for tokens in self._tokens])
        embedding = get("embed_tokens.weight")[ahead]
        both = (
            rms_norm(embedding, get("enorm.weight"), eps),
            rms_norm(hidden[keep], get("hnorm.weight"), eps),
        )
        self.h = np.concatenate(both, axis=-1) @ get("eh_proj.weight").T
        self.lengths = [length - 1 for length in self.lengths]

    def run(self, layer_idx: int) -> Array | None:
        """Enter and run a layer in floating point; the experts of each token, [T, K], where there are any."""
        self.enter(layer_idx)
        return self.step(layer_idx, FloatLayer(self.checkpoint, layer_idx))

    def step(self, layer_idx: int, weights: LayerWeights) -> Array | None:
        """Run a layer that was entered, with any weights. Raises CheckpointError where numbers end."""
        with np.errstate(over="ignore", invalid="ignore"):
            self.h, topk_idx = layer(self.config, weights, layer_idx, self.h, self.lengths)
        check_states(self.checkpoint, layer_idx, self.h)
        return topk_idx


def expert_load(
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int], None] = lambda layer_idx: None,
) -> dict[int, Array]:
    """Tokens that each expert sees, int64 [E], for every MoE layer, MTP layers included.

    `progress` is told each layer's number before its turn.
    """
    walk, loads = Walk(checkpoint, sequences), {}
    for layer_idx in range(checkpoint.config.num_layers_with_mtp):
        progress(layer_idx)
        topk_idx = walk.run(layer_idx)
        if topk_idx is not None:
            loads[layer_idx] = np.bincount(topk_idx.ravel(), minlength=checkpoint.config.n_routed_experts)
    return loads
