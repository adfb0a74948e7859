"""The reference: DeepSeek-V3's forward pass in NumPy, one sequence at a time, written as its equations.

No batch, no cache, no pages, no dies: position i attends to the latents of positions 0..i. Every deployment
must reproduce these logits bit for bit (`xdeepserve verify` compares them); Hugging Face's transformers
agrees in float32 to 2e-3. Shapes: T tokens, H hidden, N heads, C = kv_lora_rank, R = rope dim, E experts.

DeepSeek-V2 section 2.1 (MLA), DeepSeek-V3 section 2.1.2 (gating) and 2.2 (MTP).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xdeepserve.bf16 import round_bf16
from xdeepserve.model import canonical as c
from xdeepserve.model.canonical import F32, Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.weights import MLP, Layer, Linear, ModelWeights, MoE, Recipe, Source, load_weights

LATENT_NORM_EPS = 1e-6  # q_norm and kv_norm do not follow rms_norm_eps


def linear(x: Array, layer: Linear) -> Array:
    """x [T, K] -> [T, N]; an INT8 layer quantises its input per token."""
    if layer.scale is None:
        return c.matmul(x, layer.w)
    return c.matmul_int8(*c.quantize_rows(x), layer.w, layer.scale)


def row_parallel(x: Array, layer: Linear) -> Array:
    """A linear layer that tensor parallelism cuts along K: FP32 sums in blocks, INT8 sums exactly anyway."""
    return c.matmul_blocked(x, layer.w) if layer.scale is None else linear(x, layer)


class Reference:
    """A whole model in host memory."""

    def __init__(self, source: Source, recipe: Recipe, num_positions: int | None = None) -> None:
        self.config: ModelConfig = source.config
        self.recipe: Recipe = recipe
        self.weights: ModelWeights = load_weights(
            source, recipe, num_positions or min(self.config.max_position_embeddings, 4096)
        )

    def logits(self, token_ids: Sequence[int]) -> Array:
        """float32 [T, vocab]: row i is the distribution of token i + 1."""
        return linear(self.hidden(token_ids), self.weights.head)

    def hidden(self, token_ids: Sequence[int]) -> Array:
        """The main model's hidden states after the final norm, [T, H]."""
        h = self.weights.embed[np.asarray(token_ids, np.int64)]
        for layer in self.weights.layers:
            h = self.block(h, layer)
        return c.rms_norm(h, self.weights.norm, self.config.rms_norm_eps)

    def mtp_logits(self, token_ids: Sequence[int], depth: int = 1, reuse: bool = False) -> Array:
        """float32 [T - depth, vocab]: row i is MTP's distribution of token i + depth + 1, seen tokens
        0 .. i + depth. Depth d is MTP layer d if the checkpoint has so many, else (or with `reuse`) the first
        one again; it goes on from the normed hidden states of depth d - 1, and the main model's are depth 0.
        """
        layers, eps = self.weights.mtp, self.config.rms_norm_eps
        assert layers, "this checkpoint has no MTP layer"
        hidden, mtp = self.hidden(token_ids), layers[0]
        for d in range(1, depth + 1):
            mtp = layers[0] if reuse or d > len(layers) else layers[d - 1]
            embedding, hidden = mtp.embed[np.asarray(token_ids[d:], np.int64)], hidden[:-1]
            halves = c.rms_norm(embedding, mtp.enorm, eps), c.rms_norm(hidden, mtp.hnorm, eps)
            h = self.block(linear(np.concatenate(halves, -1), mtp.eh_proj), mtp.layer)
            hidden = c.rms_norm(h, mtp.norm, eps)
        return linear(hidden, mtp.head)

    def block(self, h: Array, layer: Layer) -> Array:
        """One transformer layer, h [T, H] -> [T, H]."""
        eps = self.config.rms_norm_eps
        h = h + self.mla(c.rms_norm(h, layer.attn_norm, eps), layer)
        x = c.rms_norm(h, layer.ffn_norm, eps)
        return h + (self.moe(x, layer.moe) if layer.moe else self.mlp(x, layer.mlp))

    def mla(self, x: Array, layer: Layer) -> Array:
        """Multi-head latent attention in its weight-absorbed form, x [T, H] -> [T, H]."""
        cfg, w = self.config, self.weights
        nope, rank, num_tokens = cfg.qk_nope_head_dim, cfg.kv_lora_rank, len(x)
        cos, sin = w.cos[:num_tokens], w.sin[:num_tokens]

        q_a = x
        if layer.wq_a is not None and layer.q_norm is not None:
            q_a = c.rms_norm(linear(x, layer.wq_a), layer.q_norm, LATENT_NORM_EPS)
        q = linear(q_a, layer.wq_b).reshape(num_tokens, cfg.num_attention_heads, -1)
        q_pe = c.rope(q[..., nope:], cos[:, None], sin[:, None])
        q_lat = c.matmul(q[..., :nope].transpose(1, 0, 2), layer.w_uk).transpose(1, 0, 2)  # [T, N, C]

        kv = linear(x, layer.wkv_a)
        latent = c.rms_norm(kv[:, :rank], layer.kv_norm, LATENT_NORM_EPS)
        k_pe = c.rope(kv[:, rank:], cos, sin)
        scale: Array | None = None
        if self.recipe == "int8":  # the latent half of the KV cache is INT8
            latent, scale = c.quantize_rows(latent)

        o_lat = np.empty_like(q_lat)
        for t in range(num_tokens):
            seen = slice(0, t + 1)
            o_lat[t] = c.attention(
                q_lat[t],
                q_pe[t],
                latent[seen],
                None if scale is None else scale[seen],
                k_pe[seen],
                cfg.softmax_scale,
                layer.int8_attention,
            )
        o = c.matmul(o_lat.transpose(1, 0, 2), layer.w_uv).transpose(1, 0, 2)  # [T, N, V]
        return row_parallel(np.ascontiguousarray(o).reshape(num_tokens, -1), layer.wo)

    def mlp(self, x: Array, mlp: MLP | None) -> Array:
        """down(silu(gate(x)) * up(x)) of a dense layer or the shared expert."""
        assert mlp is not None
        return row_parallel(c.swiglu(linear(x, mlp.w13)), mlp.w2)

    def moe(self, x: Array, moe: MoE) -> Array:
        """Routed experts weighted in top-k slot order, then the shared expert, x [T, H] -> [T, H]."""
        cfg = self.config
        topk_idx, topk_weights = c.gate(
            c.sigmoid(c.matmul(x, moe.gate)),
            moe.bias,
            cfg.n_group,
            cfg.topk_group,
            cfg.num_experts_per_tok,
            cfg.norm_topk_prob,
            cfg.routed_scaling_factor,
        )
        assert moe.experts is not None
        expert_out = np.empty((*topk_idx.shape, x.shape[1]), F32)
        for e in np.unique(topk_idx):
            token, slot = np.nonzero(topk_idx == e)
            out = linear(c.swiglu(linear(x[token], expert(moe.experts.w13, e))), expert(moe.experts.w2, e))
            # INT8: an expert's output crosses the pod as BF16 (CloudMatrix 4.2.1)
            expert_out[token, slot] = round_bf16(out) if self.recipe == "int8" else out
        shared = self.mlp(x, moe.shared) if moe.shared else None
        if shared is not None and self.recipe == "int8":
            shared = round_bf16(shared)  # it may live on another die, as a routed expert does
        return c.combine(expert_out, topk_weights, shared)


def expert(stack: Linear, e: int) -> Linear:
    """One routed expert's layer out of the stack."""
    return stack._replace(w=stack.w[e], scale=None if stack.scale is None else stack.scale[e])
