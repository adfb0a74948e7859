"""Tables of the tensors of each kind of attention, and the order of rows for the kernels."""

from __future__ import annotations

import numpy as np

from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.families import AttentionKind
from xdeepserve.model.tensor_row import Tensor
from xdeepserve.model.v4 import tables as v4

# ---- rows in the order of the kernels ------------------------------------------------------------------


def _in_pairs(w: Array) -> Array:
    """Reorder RoPE rows w [..., R, K], whose halves are pairs, into neighbouring pairs."""
    half = w.shape[-2] // 2
    return np.stack([w[..., :half, :], w[..., half:, :]], axis=-2).reshape(w.shape)


def _interleaved(c: ModelConfig, w: Array) -> Array:
    """Put RoPE rows w [..., R, K] of any checkpoint into neighbouring pairs."""
    return w if c.rope_interleave else _in_pairs(w)


def _queries(c: ModelConfig, w: Array) -> Array:
    by_head = w.reshape(c.num_attention_heads, c.qk_head_dim, -1)
    still, turned = np.split(by_head, [c.qk_nope_head_dim], axis=1)
    return np.concatenate([still, _interleaved(c, turned)], axis=1).reshape(w.shape)


def _latents(c: ModelConfig, w: Array) -> Array:
    return np.concatenate([w[: c.kv_lora_rank], _interleaved(c, w[c.kv_lora_rank :])])


def _keys(c: ModelConfig, w: Array) -> Array:
    """Take each head's keys, transposed, because they are absorbed into its query."""
    by_head = w.reshape(c.num_attention_heads, -1, c.kv_lora_rank)
    return by_head[:, : c.qk_nope_head_dim].swapaxes(1, 2)


def _values(c: ModelConfig, w: Array) -> Array:
    return w.reshape(c.num_attention_heads, -1, c.kv_lora_rank)[:, c.qk_nope_head_dim :]


def _grouped(c: ModelConfig, w: Array) -> Array:
    """Reorder rows of GQA's queries or keys, or elements of a norm or bias: the columns that RoPE turns come
    last."""
    by_head = w.reshape(-1, c.key_columns, *w.shape[1:])
    by_head = by_head[..., None] if w.ndim == 1 else by_head
    turned, still = np.split(by_head, [c.qk_rope_head_dim], axis=1)
    return np.concatenate([still, _interleaved(c, turned)], axis=1).reshape(w.shape)


def _indexed(c: ModelConfig, w: Array) -> Array:
    """Reorder rows of the indexer's queries or keys, or elements of a norm: the columns that RoPE turns come
    last. They are the first of each head in a checkpoint, paired as the indexer does it, whatever attention
    does."""
    by_head = w.reshape(-1, c.index_head_dim, *w.shape[1:])
    by_head = by_head[..., None] if w.ndim == 1 else by_head
    turned, still = np.split(by_head, [c.qk_rope_head_dim], axis=1)
    return np.concatenate([still, turned if c.index_interleave else _in_pairs(turned)], axis=1).reshape(
        w.shape
    )


def _keys_values(c: ModelConfig, w: Array) -> Array:
    """Put all heads' keys above all heads' values."""
    keys, values = np.split(w, 2)
    return np.concatenate([_grouped(c, keys), values])


# ---- the tables ----------------------------------------------------------------------------------------

# The halves of kv_b_proj are two rows: keys are absorbed into queries, values come out of what was attended.
_KV_B = ("self_attn.kv_b_proj",)
MLA = (
    Tensor("attn_norm", ("input_layernorm",), "H"),
    Tensor("wq_a", ("self_attn.q_a_proj",), "Q H", "int8"),
    Tensor("q_norm", ("self_attn.q_a_layernorm",), "Q"),
    Tensor("wq_b", ("self_attn.q_b_proj",), "N(P+R) Q", "int8", "heads", _queries, gain=1.5),
    Tensor("wq_b", ("self_attn.q_proj",), "N(P+R) D", "int8", "heads", _queries, gain=1.5),
    Tensor("wkv_a", ("self_attn.kv_a_proj_with_mqa",), "C+R H", "int8", arrange=_latents),
    Tensor("kv_norm", ("self_attn.kv_a_layernorm",), "C"),
    Tensor("w_uk", _KV_B, "N(P+V) C", "matrix", "heads", _keys, "N C P"),
    Tensor("w_uv", _KV_B, "N(P+V) C", "matrix", "heads", _values, "N V C"),
    Tensor("wo", ("self_attn.o_proj",), "H NV", "int8", "inputs"),
    Tensor("ffn_norm", ("post_attention_layernorm",), "H"),
)
GQA = (
    Tensor("attn_norm", ("input_layernorm",), "H"),
    Tensor("wq_a", ("self_attn.q_proj",), "NKa H", "int8", arrange=_grouped),
    Tensor("q_norm", ("self_attn.q_norm",), "NKa", arrange=_grouped),
    Tensor("wq_b", ("self_attn.q_proj",), "NKd H", "int8", "heads", _grouped, gain=1.5),
    Tensor("bq", ("self_attn.q_proj",), "NKb", "plain", "heads", _grouped, parameter="bias", gain=3.0),
    Tensor("q_norm", ("self_attn.q_norm",), "Kh", arrange=_grouped),
    Tensor("wkv_a", ("self_attn.k_proj", "self_attn.v_proj"), "GK H", "int8", arrange=_keys_values),
    Tensor("bk", ("self_attn.k_proj",), "GKb", arrange=_grouped, parameter="bias", gain=3.0),
    Tensor("bv", ("self_attn.v_proj",), "GKb", parameter="bias", gain=3.0),
    Tensor("kv_norm", ("self_attn.k_norm",), "Kh", arrange=_grouped),
    Tensor("kv_norm", ("self_attn.k_norm",), "GKa", arrange=_grouped),
    Tensor("wo", ("self_attn.o_proj",), "H NV", "int8", "inputs"),
    Tensor("ffn_norm", ("post_attention_layernorm",), "H"),
)
INDEXER = "self_attn.indexer."
DSA = (
    *MLA,
    Tensor("index_wq", (f"{INDEXER}wq_b",), "NX Q", "matrix", arrange=_indexed),
    Tensor("index_wk", (f"{INDEXER}wk",), "X H", "matrix", arrange=_indexed),
    Tensor("index_norm", (f"{INDEXER}k_norm",), "X", arrange=_indexed),
    Tensor("index_bias", (f"{INDEXER}k_norm",), "X", arrange=_indexed, parameter="bias"),
    Tensor("index_gate", (f"{INDEXER}weights_proj",), "NI H", "router"),
)
ATTENTION: dict[AttentionKind, tuple[Tensor, ...]] = {
    "mla": MLA,
    "gqa": GQA,
    "dsa": DSA,
    "dsa-shared": MLA,
    "window": v4.WINDOW,
    "csa": v4.CSA,
    "hca": v4.HCA,
}
