"""Row of the table of tensors, and the meaning of letters in its shapes. Its columns: tensors.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig

Kind: TypeAlias = Literal["int8", "linear", "matrix", "router", "plain"]
Cut: TypeAlias = Literal["whole", "heads", "outputs", "inputs"]
Arrange: TypeAlias = Callable[[ModelConfig, Array], Array]
Shape: TypeAlias = tuple[int, ...]


@functools.lru_cache(maxsize=16)
def sizes(c: ModelConfig) -> dict[str, int]:
    """Return the sizes behind the letters in shapes."""
    heads, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
    return _v4_sizes(c) | {
        "vocab": c.vocab_size,
        "H": c.hidden_size,
        "2H": 2 * c.hidden_size,
        "N": heads,
        "Q": c.q_lora_rank or 0,
        "D": c.hidden_size if c.q_lora_rank is None else 0,  # what queries are projected from directly
        "C": c.kv_lora_rank,
        "C+R": c.kv_lora_rank + rope,
        "P": nope,
        "V": c.v_head_dim,
        "N(P+R)": heads * (nope + rope),
        "N(P+V)": heads * (nope + c.v_head_dim),
        "NV": heads * c.v_head_dim,
        "GK": c.num_key_value_heads * c.key_columns,  # keys, and values that are as wide
        "Kh": c.key_columns if c.qk_norm == "head" else 0,
        "NKa": heads * c.qk_head_dim if c.qk_norm == "all" else 0,
        "GKa": c.num_key_value_heads * c.key_columns if c.qk_norm == "all" else 0,
        "NKd": heads * c.qk_head_dim if c.qk_norm != "all" else 0,
        "NKb": heads * c.qk_head_dim if c.attention_bias else 0,
        "GKb": c.num_key_value_heads * c.key_columns if c.attention_bias else 0,
        "X": c.index_head_dim,
        "NX": c.index_n_heads * c.index_head_dim,
        "NI": c.index_n_heads,
        "E": c.n_routed_experts,
        "B": c.n_routed_experts if c.scoring != "softmax" else 0,
        "I": c.intermediate_size,
        "M": c.moe_intermediate_size,
        "S": c.n_shared_experts * c.moe_intermediate_size,
    }


def _v4_sizes(c: ModelConfig) -> dict[str, int]:
    """Return the sizes behind the letters that DeepSeek-V4 alone has."""
    if (v4 := c.v4) is None:
        return {}
    n, group = v4.hc_mult, c.num_attention_heads * c.v_head_dim // v4.o_groups
    return {
        "n": n,
        "nH": n * c.hidden_size,
        "(2+n)n": (2 + n) * n,
        "3": 3,
        "1": 1,
        "G": v4.o_groups,
        "O": v4.o_lora_rank,
        "GO": v4.o_groups * v4.o_lora_rank,
        "NV/G": group,
        "2V": 2 * c.v_head_dim,
        "2X": 2 * c.index_head_dim,
        "mC": v4.csa_rate,
        "mH": v4.hca_rate,
        "K": c.num_experts_per_tok,
    }


class Tensor(NamedTuple):
    """Row of the table of tensors; tensors.py explains the columns."""

    name: str
    modules: tuple[str, ...]
    stored: str
    kind: Kind = "plain"
    cut: Cut = "whole"
    arrange: Arrange = lambda c, w: w
    arranged: str = ""
    parameter: str = "weight"
    gain: float = 1.0

    @property
    def is_routed(self) -> bool:
        return self.name.startswith("experts.")

    def stored_shape(self, config: ModelConfig) -> Shape:
        """Return the shape of each module's tensor in a checkpoint."""
        return _shape(config, self.stored)

    def shape(self, config: ModelConfig) -> Shape:
        """Return the shape of the prepared float32 array, of one expert if routed: [..., in, out] if it is a
        matrix."""
        if self.kind == "plain":
            return self.stored_shape(config)
        *heads, out, width = _shape(config, self.arranged or self.stored)
        return (*heads, width, out * len(self.modules))

    def sources(self, source: str, expert: int | None) -> list[str]:
        """List the full names of the row's modules in layer `source`."""
        return [source + module.format(expert) for module in self.modules]


def _shape(config: ModelConfig, letters: str) -> Shape:
    size = sizes(config)
    return tuple(size[letter] for letter in letters.split())
