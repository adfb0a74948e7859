"""DeepSeek-V3 in torch, with the semantics of transformers' DeepseekV3ForCausalLM and its MTP layers.

Written for training on a CPU: documents of a batch lie one after the other in a flat [T, H] array, so that
nothing but attention sees padding; a layer's experts are three stacked weights, and each expert runs once on
all rows of the batch that chose it. Parameter names are those of the checkpoint, experts stacked
(`experts.gate_proj.weight` [E, I, H]).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Config = dict[str, Any]  # config.json
LATENT_NORM_EPS = 1e-6


@dataclass
class Buckets:
    """Documents of like length side by side, padded to the longest, as attention wants them."""

    shapes: list[tuple[int, int]]  # (documents, length) of each bucket
    rows: Tensor  # int64 [P]: the flat row at each padded place, T where there is none
    places: Tensor  # int64 [T]: the padded place of each flat row


@dataclass
class Batch:
    """Documents back to back."""

    ids: Tensor  # int64 [T]
    targets: Tensor  # int64 [3, T]: the tokens 1, 2 and 3 places ahead
    weights: Tensor  # float32 [3, T]: what each target counts in the loss; 0 beyond the document
    positions: Tensor  # int64 [T]
    buckets: Buckets


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def linear(k: int, n: int) -> nn.Linear:
    layer = nn.Linear(k, n, bias=False)
    nn.init.normal_(layer.weight, std=0.7 / math.sqrt(k))
    return layer


def rope_tables(config: Config, length: int) -> tuple[Tensor, Tensor]:
    """cos, sin [length, rope / 2] with YaRN as DeepSeek scales it; their own scale is m/m = 1 here."""
    dim, theta, yarn = config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"]
    assert yarn["mscale"] == yarn["mscale_all_dim"]
    frequency = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    original = yarn["original_max_position_embeddings"]

    def boundary(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(boundary(yarn["beta_fast"])), 0)
    high = min(math.ceil(boundary(yarn["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequency = frequency * (1 - ramp) + frequency / yarn["factor"] * ramp
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


class Attention(nn.Module):
    """MLA, expanded: latents become keys and values before attention, as training has no cache to spare."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.nope, self.rope, self.v = (
            c["num_attention_heads"],
            c["qk_nope_head_dim"],
            c["qk_rope_head_dim"],
            c["v_head_dim"],
        )
        self.rank, hidden = c["kv_lora_rank"], c["hidden_size"]
        self.q_a_proj = linear(hidden, c["q_lora_rank"])
        self.q_a_layernorm = RMSNorm(c["q_lora_rank"], LATENT_NORM_EPS)
        self.q_b_proj = linear(c["q_lora_rank"], self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(hidden, self.rank + self.rope)
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_NORM_EPS)
        self.kv_b_proj = linear(self.rank, self.heads * (self.nope + self.v))
        self.o_proj = linear(self.heads * self.v, hidden)
        nn.init.zeros_(self.o_proj.weight)
        mscale = 0.1 * c["rope_scaling"]["mscale_all_dim"] * math.log(c["rope_scaling"]["factor"]) + 1
        self.scale = mscale * mscale / math.sqrt(self.nope + self.rope)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, buckets: Buckets) -> Tensor:
        """x [T, H], cos and sin [T, rope / 2] of each row's position -> [T, H]."""
        rows = len(x)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(rows, self.heads, -1)
        q_pe = rotate(q[..., self.nope :], cos[:, None], sin[:, None])
        latent, k_pe = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope), dim=-1)
        k_pe = rotate(k_pe, cos, sin)[:, None].expand(rows, self.heads, self.rope)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(rows, self.heads, -1)
        # One array, so that padding is gathered once; its last row, of zeros, is what padding reads. Values
        # are as long as keys, with zeros behind, because torch's fast attention wants it so.
        v = F.pad(kv[..., self.nope :], (0, self.nope + self.rope - self.v))
        qkv = torch.cat((q[..., : self.nope], q_pe, kv[..., : self.nope], k_pe, v), dim=-1)
        qkv = F.pad(qkv.flatten(1), (0, 0, 0, 1)).float()  # torch's fast attention is slower in BF16
        padded = F.embedding(buckets.rows, qkv).split([n * length for n, length in buckets.shapes])
        outs = []
        for part, shape in zip(padded, buckets.shapes, strict=True):
            q_b, k_b, v_b = part.view(*shape, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
            with torch.autocast("cpu", enabled=False):
                o = F.scaled_dot_product_attention(q_b, k_b, v_b, is_causal=True, scale=self.scale)
            outs.append(o[..., : self.v].transpose(1, 2).reshape(part.shape[0], -1))
        out = torch.cat(outs).index_select(0, buckets.places)
        return self.o_proj(out)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on neighbouring pairs. Scores depend on dot products alone, so the order in the output is free."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(hidden, inner),
            linear(hidden, inner),
            linear(inner, hidden),
        )
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Stack(nn.Module):
    """One matrix per expert, [E, out, in]."""

    def __init__(self, experts: int, k: int, n: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, n, k) * std)


class MoE(nn.Module):
    """Group-limited sigmoid gating with the selection bias that replaces an auxiliary loss."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        hidden, inner, self.num_experts = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
        self.n_group, self.topk_group = c["n_group"], c["topk_group"]
        self.top_k, self.factor = c["num_experts_per_tok"], c["routed_scaling_factor"]
        self.gate = nn.Linear(hidden, self.num_experts, bias=False)
        nn.init.normal_(self.gate.weight, std=1 / math.sqrt(hidden))
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(self.num_experts))
        self.experts = nn.Module()
        self.experts.gate_proj = Stack(self.num_experts, hidden, inner, 0.7 / math.sqrt(hidden))
        self.experts.up_proj = Stack(self.num_experts, hidden, inner, 0.7 / math.sqrt(hidden))
        self.experts.down_proj = Stack(self.num_experts, inner, hidden, 0.0)
        self.shared_experts = MLP(hidden, inner * c["n_shared_experts"])
        self.counts = torch.zeros(self.num_experts)  # rows per expert in the last batch

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """topk_idx and topk_weights, [T, K]."""
        with torch.autocast("cpu", enabled=False):
            scores = self.gate(x.float()).sigmoid()
        with torch.no_grad():
            choice = (scores + self.gate.e_score_correction_bias).view(len(x), self.n_group, -1)
            group_score = choice.topk(2, dim=-1)[0].sum(-1)
            is_open = torch.zeros_like(group_score).scatter_(1, group_score.topk(self.topk_group)[1], 1.0)
            choice = choice.masked_fill(is_open[..., None] == 0, -math.inf).flatten(1)
            topk_idx = choice.topk(self.top_k)[1]
        weights = scores.gather(1, topk_idx)
        return topk_idx, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.factor

    def forward(self, x: Tensor) -> Tensor:
        topk_idx, topk_weights = self.route(x)
        flat = topk_idx.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=self.num_experts)
        self.counts = counts.float()
        token = order // self.top_k
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        rows = x.index_select(0, token).split(counts.tolist())
        e = self.experts
        outs = [
            F.linear(F.silu(F.linear(row, gate)) * F.linear(row, up), down)
            for row, gate, up, down in zip(
                rows,
                e.gate_proj.weight.unbind(),
                e.up_proj.weight.unbind(),
                e.down_proj.weight.unbind(),
                strict=True,
            )
        ]
        weighted = torch.cat(outs).float() * topk_weights.flatten()[order, None]
        return self.shared_experts(x).float().index_add(0, token, weighted)


class Layer(nn.Module):
    def __init__(self, c: Config, layer_idx: int) -> None:
        super().__init__()
        hidden, eps = c["hidden_size"], c["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attn = Attention(c)
        is_moe = layer_idx >= c["first_k_dense_replace"]
        self.mlp = MoE(c) if is_moe else MLP(hidden, c["intermediate_size"])

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, buckets: Buckets) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), cos, sin, buckets)
        return h + self.mlp(self.post_attention_layernorm(h))


class MTPLayer(Layer):
    """concat[enorm(embedding of a token ahead), hnorm(hidden)] -> layer -> shared_head.norm."""

    def __init__(self, c: Config, layer_idx: int) -> None:
        super().__init__(c, layer_idx)
        hidden, eps = c["hidden_size"], c["rms_norm_eps"]
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.eh_proj = linear(2 * hidden, hidden)
        self.shared_head = nn.Module()
        self.shared_head.norm = RMSNorm(hidden, eps)

    def draft(self, embedding: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, buckets: Buckets) -> Tensor:
        """Hidden states after the norm, [T, H]: for the head, and for the next MTP layer."""
        both = torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1)
        return self.shared_head.norm(self(self.eh_proj(both), cos, sin, buckets))


class Model(nn.Module):
    """The main model's layers, then the MTP layers, all in `model.layers` as in the checkpoint."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        hidden, self.num_main = config["hidden_size"], config["num_hidden_layers"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.5)
        main = [Layer(config, i) for i in range(self.num_main)]
        mtp = [MTPLayer(config, self.num_main + i) for i in range(config["num_nextn_predict_layers"])]
        self.model.layers = nn.ModuleList(main + mtp)
        self.model.norm = RMSNorm(hidden, config["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, config["vocab_size"], bias=False)
        nn.init.zeros_(self.lm_head.weight)
        cos, sin = rope_tables(config, config["max_position_embeddings"])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def tables(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.cos[batch.positions], self.sin[batch.positions]

    def hidden(self, batch: Batch) -> Tensor:
        """The main model's hidden states after the final norm, [T, H]."""
        cos, sin = self.tables(batch)
        h = self.model.embed_tokens(batch.ids)
        for layer in self.model.layers[: self.num_main]:
            h = layer(h, cos, sin, batch.buckets)
        return self.model.norm(h)

    def draft(self, index: int, hidden: Tensor, tokens: Tensor, batch: Batch) -> Tensor:
        """MTP layer `index` after `hidden` [T, H] and the token ahead of each row's last known one, [T]."""
        cos, sin = self.tables(batch)
        embedding = self.model.embed_tokens(tokens)
        return self.model.layers[self.num_main + index].draft(embedding, hidden, cos, sin, batch.buckets)

    def loss(self, hidden: Tensor, batch: Batch, ahead: int) -> Tensor:
        """Weighted cross entropy of the tokens `ahead` + 1 places ahead."""
        keep = batch.weights[ahead].nonzero()[:, 0]
        weights = batch.weights[ahead][keep]
        losses = F.cross_entropy(
            self.lm_head(hidden[keep]).float(), batch.targets[ahead][keep], reduction="none"
        )
        return (losses * weights).sum() / weights.sum()

    def moe_layers(self) -> list[MoE]:
        return [layer.mlp for layer in self.model.layers if isinstance(layer.mlp, MoE)]
