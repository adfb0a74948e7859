"""A layer's forward pass over calibration text in float32, fast rather than canonical (it may use BLAS).

Sequences lie one after the other in [T, H] arrays; `lengths` says where they end. Sparse attention's
positions are counted from the beginning of each sequence. Shapes as in `reference`: T tokens, H hidden, N
heads, C = kv_lora_rank, R = rope dim, V = value dim, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np

from xdeepserve.errors import CheckpointError
from xdeepserve.model import reference
from xdeepserve.model.canonical import Array, quantize_rows, top_positions
from xdeepserve.model.checkpoint import Checkpoint
from xdeepserve.model.config import INDEX_NORM_EPS, ModelConfig
from xdeepserve.model.reference import Outputs
from xdeepserve.model.rope import rope_tables
from xdeepserve.model.tensors import MTP_LAYER, layer_tensors
from xdeepserve.model.weights import NO_BIAS
from xdeepserve.quant.rounding import dequantize, quantized_rows


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(eps)) * weight


def silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def segments(lengths: Sequence[int]) -> Iterator[slice]:
    """Yield the slice of rows of each sequence."""
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


class LayerWeights(Protocol):
    """A layer's tensors, by names without the layer's prefix, and its linear layers as functions."""

    @property
    def int8_attention(self) -> bool: ...

    def get(self, name: str) -> Array: ...

    def apply(self, module: str, x: Array) -> Array:
        """Apply a module's linear layer: x [T, K] -> [T, N]."""
        ...


def finite_tensor(checkpoint: Checkpoint, name: str) -> Array:
    """Read a tensor for calibration. Raises CheckpointError if it holds infinities or NaN."""
    array = checkpoint.tensor(name)
    if not np.isfinite(array).all():
        raise CheckpointError(f"{checkpoint.name}: {name} holds values that are not finite")
    return array


def check_states(checkpoint: Checkpoint, layer_idx: int, h: Array) -> None:
    """Check hidden states h [T, H] behind a layer: the numbers and their squares, which the next norm needs,
    must be finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        is_usable = np.isfinite(np.square(h).sum(axis=-1)).all()
    if not is_usable:
        raise CheckpointError(
            f"{checkpoint.name}: on the calibration text, the hidden states behind layer {layer_idx} "
            "are not finite in float32"
        )


class FloatLayer:
    """A layer in the checkpoint's float weights; each tensor is read on request."""

    int8_attention = False

    def __init__(self, checkpoint: Checkpoint, layer_idx: int) -> None:
        self.checkpoint, self.prefix = checkpoint, f"model.layers.{layer_idx}."

    def get(self, name: str) -> Array:
        return finite_tensor(self.checkpoint, self.prefix + name)

    def apply(self, module: str, x: Array) -> Array:
        return x @ self.get(f"{module}.weight").T


class LayerResult(msgspec.Struct):
    """Stored result of a layer's quantisation; names lack the layer's prefix."""

    int8: dict[str, tuple[Array, Array]]  # module -> weight [N, K], scale [N]
    floats: dict[str, Array]  # tensor name -> float32
    int8_attention: bool = False

    def get(self, name: str) -> Array:
        return self.floats[name]

    def apply(self, module: str, x: Array) -> Array:
        """Apply a module to x [T, K]. The product is the engine's, except for the order of sums."""
        if module not in self.int8:
            return x @ self.floats[f"{module}.weight"].T
        return quantized_rows(x) @ dequantize(*self.int8[module]).T


class FastLayer:
    """A layer over whole sequences with BLAS. Weights are looked up on request; MLA is expanded."""

    def __init__(
        self, config: ModelConfig, layer_idx: int, weights: LayerWeights, lengths: Sequence[int]
    ) -> None:
        self.config, self.weights, self.lengths = config, weights, lengths
        self.attention = config.attention_of(layer_idx)
        self.rows = {row.name: row for row in (*MTP_LAYER, *layer_tensors(config, layer_idx))}
        positions = np.concatenate([np.arange(length) for length in lengths])
        self.cos, self.sin = (
            table[positions] for table in rope_tables(config.rope, config.qk_rope_head_dim, max(lengths))
        )
        self.topk_idx: Array | None = None  # int [T, K], once tokens have been routed
        self.chosen: list[Array] = []  # of each token, the positions that it sees: where attention is sparse

    def has(self, name: str) -> bool:
        return name in self.rows

    def get(self, name: str) -> Array:
        row = self.rows[name]
        return self.weights.get(f"{row.modules[0]}.{row.parameter}")

    def norm(self, x: Array, name: str, eps: float) -> Array:
        return rms_norm(x, self.get(name), eps)

    def plus(self, x: Array, name: str) -> Array:
        return x + self.get(name) if self.has(name) else x

    def linear(self, x: Array, name: str, expert: int | None = None) -> Array:
        outputs = [self.weights.apply(module, x) for module in self.rows[name].sources("", expert)]
        return outputs[0] if len(outputs) == 1 else np.concatenate(outputs, axis=-1)

    def row_parallel(self, x: Array, name: str) -> Array:
        return self.linear(x, name)

    def rope(self, x: Array) -> Array:
        """Rotate queries or keys by their positions. The result has an order of its own, the same for queries
        and keys, so scores do not depend on it. Rotated dimensions come first in files; MLA passes only
        those."""
        return self._rope(x, self.config.rope_interleave)

    def index_rope(self, x: Array) -> Array:
        return self._rope(x, self.config.index_interleave)

    def _rope(self, x: Array, is_interleaved: bool) -> Array:
        x, still = np.split(x, [2 * self.cos.shape[-1]], axis=-1)
        cos, sin = (self.cos, self.sin) if x.ndim == 2 else (self.cos[:, None], self.sin[:, None])
        half = x.shape[-1] // 2
        a, b = (x[..., 0::2], x[..., 1::2]) if is_interleaved else (x[..., :half], x[..., half:])
        return np.concatenate([a * cos - b * sin, a * sin + b * cos, still], axis=-1)

    def matrix(self, x: Array, name: str) -> Array:
        return x @ self.get(name).T

    def scores(self, x: Array, name: str) -> Array:
        return self.matrix(x, name)

    def layer_norm(self, x: Array, name: str, bias: str) -> Array:
        x = x - x.mean(axis=-1, keepdims=True)
        scale = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(INDEX_NORM_EPS))
        return x / scale * self.get(name) + self.get(bias)

    def choose(self, q: Array, k: Array, weights: Array) -> list[Array]:
        """Choose each token's positions by the indexer's scores. Factors common to all scores of a token do
        not change the choice and are left out."""
        self.chosen = []
        for rows in segments(self.lengths):
            products = np.maximum(np.einsum("thd,sd->ths", q[rows], k[rows], optimize=True), 0)
            scores = np.einsum("th,ths->ts", weights[rows], products, optimize=True)
            top_k = self.config.index_topk
            self.chosen += [top_positions(scores[t, : t + 1], top_k) for t in range(len(scores))]
        return self.chosen

    def attend(self, q: Array, q_pe: Array, latent: Array, k_pe: Array) -> Array:
        return self.attend_to(None, q, q_pe, latent, k_pe)

    def attend_to(
        self, seen: Sequence[Array | slice] | None, q: Array, q_pe: Array, latent: Array, k_pe: Array
    ) -> Array:
        """Attend to the positions `seen`, or to all earlier ones. With `int8_attention`, weights are rounded
        as canonical.attention rounds them; latents stay float."""
        c, nope = self.config, self.config.qk_nope_head_dim
        expanded = (latent @ self.get("w_uk").T).reshape(*q.shape[:2], -1)  # the whole of kv_b_proj
        out = np.empty((*q.shape[:2], c.v_head_dim), np.float32)
        for rows in segments(self.lengths):
            k, v = expanded[rows, :, :nope], expanded[rows, :, nope:]
            scores = np.einsum("thd,shd->hts", q[rows], k, optimize=True)
            scores = (
                scores + np.einsum("thr,sr->hts", q_pe[rows], k_pe[rows], optimize=True)
            ) * c.softmax_scale
            if seen is not None:
                for t, at in enumerate(seen[rows]):
                    hidden = np.ones(scores.shape[-1], bool)
                    hidden[at] = False
                    scores[:, t, hidden] = -np.inf
            length, p = scores.shape[-1], causal_softmax(scores)
            if self.weights.int8_attention:
                scale = quantize_rows(latent[rows])[1]
                p = dequantize(*quantize_rows((p * scale).reshape(-1, length))).reshape(p.shape) / scale
            out[rows] = np.einsum("hts,shv->thv", p, v, optimize=True)
        return out.reshape(len(q), -1)

    def attend_grouped(self, q: Array, k: Array, v: Array) -> Array:
        shared = q.shape[1] // k.shape[1]
        k, v, out = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1), np.empty_like(q)
        for rows in segments(self.lengths):
            scores = np.einsum("thd,shd->hts", q[rows], k[rows], optimize=True) * self.config.softmax_scale
            out[rows] = np.einsum("hts,shv->thv", causal_softmax(scores), v[rows], optimize=True)
        return out.reshape(len(q), -1)

    def swiglu(self, gate_up: Array) -> Array:
        gate, up = np.split(gate_up, 2, axis=-1)
        return silu(gate) * up

    def route(self, x: Array) -> tuple[Array, Array]:
        bias = self.get("bias") if self.has("bias") else NO_BIAS
        self.topk_idx, topk_weights = route(self.config, x, self.get("gate"), bias)
        return self.topk_idx, topk_weights

    def combine(self, outputs: Outputs, topk_weights: Array, shared: Array | None) -> Array:
        """Sum experts' outputs in the order of expert numbers, so that only one output at a time is in
        memory."""
        out = shared
        for token, slot, output in outputs:
            if out is None:
                out = np.zeros((len(topk_weights), output.shape[1]), np.float32)
            out[token] += output * topk_weights[token, slot, None]
        assert out is not None
        return out


def causal_softmax(scores: Array) -> Array:
    """Compute attention weights up to each row's own position from scores [heads, T, T], which are
    overwritten."""
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p


def route(config: ModelConfig, x: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
    """Choose experts: returns topk_idx and topk_weights, [T, K]."""
    with np.errstate(over="ignore"):
        logits = x @ weight.T
        if config.scoring == "softmax":
            scores = np.exp(logits - logits.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
        else:
            scores = 1 / (1 + np.exp(-logits))
    return reference.route(config, scores.astype(np.float32), bias)


def attend(
    config: ModelConfig,
    q: Array,
    kv: Array,
    kv_norm: Array,
    kv_b: Array,
    lengths: Sequence[int],
    int8_weights: bool = False,
    chosen: Sequence[Array] | None = None,
) -> Array:
    """Compute causal MLA between projections: q [T, N * (nope + R)], kv [T, C + R] -> [T, N * V]. Each token
    sees all positions up to its own, or the `chosen` ones."""
    floats = {"self_attn.kv_a_layernorm.weight": kv_norm, "self_attn.kv_b_proj.weight": kv_b}
    m = FastLayer(config, 0, LayerResult({}, floats, int8_weights), lengths)
    return m.attend_to(chosen, *reference.heads(m, q, kv))


class Walk:
    """Hidden states of sequences on their way through a checkpoint's layers, MTP layers included.

    `h` [T, H] and `lengths` are the input of layer `layer_idx` after `enter(layer_idx)`; `step` puts the
    layer's result back into `h`. `chosen` holds the positions chosen by the latest indexer, as in FastLayer.
    """

    def __init__(self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> None:
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self._tokens = [np.asarray(sequence, np.int64) for sequence in sequences]
        self.lengths = [len(sequence) for sequence in sequences]
        self.chosen: list[Array] = []
        self.h: Array = finite_tensor(checkpoint, "model.embed_tokens.weight")[np.concatenate(self._tokens)]

    def enter(self, layer_idx: int) -> None:
        """Prepare a layer's input: at an MTP layer, mix in the next tokens' embeddings; each sequence loses
        its last row."""
        c, depth = self.config, layer_idx - self.config.num_hidden_layers
        if depth < 0:
            return
        before = (
            "model.norm.weight" if depth == 0 else f"model.layers.{layer_idx - 1}.shared_head.norm.weight"
        )
        hidden = rms_norm(self.h, finite_tensor(self.checkpoint, before), c.rms_norm_eps)
        keep = np.concatenate([np.arange(rows.start, rows.stop - 1) for rows in segments(self.lengths)])
        ahead = np.concatenate([tokens[depth + 1 :] for tokens in self._tokens])
        self.lengths = [length - 1 for length in self.lengths]
        m = self._layer(layer_idx, FloatLayer(self.checkpoint, layer_idx))
        self.h = reference.mtp_input(m, m.get("embed")[ahead], hidden[keep])

    def run(self, layer_idx: int) -> Array | None:
        """Enter and run a layer in floating point; return each token's experts, [T, K], or None without
        experts."""
        self.enter(layer_idx)
        return self.step(layer_idx, FloatLayer(self.checkpoint, layer_idx))

    def step(self, layer_idx: int, weights: LayerWeights) -> Array | None:
        """Run an entered layer with any weights. Raises CheckpointError if hidden states stop being
        finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            m = self._layer(layer_idx, weights)
            m.chosen = self.chosen
            self.h, self.chosen = reference.block(m, self.h), m.chosen
        check_states(self.checkpoint, layer_idx, self.h)
        return m.topk_idx

    def _layer(self, layer_idx: int, weights: LayerWeights) -> FastLayer:
        return FastLayer(self.config, layer_idx, weights, self.lengths)


def expert_load(
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int], None] = lambda layer_idx: None,
) -> dict[int, Array]:
    """Count tokens for each expert, int64 [E], for every MoE layer, MTP layers included.

    `progress` is called with each layer's number before the layer runs.
    """
    walk, loads = Walk(checkpoint, sequences), {}
    for layer_idx in range(checkpoint.config.num_layers_with_mtp):
        progress(layer_idx)
        topk_idx = walk.run(layer_idx)
        if topk_idx is not None:
            loads[layer_idx] = np.bincount(topk_idx.ravel(), minlength=checkpoint.config.n_routed_experts)
    return loads
