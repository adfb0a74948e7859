"""Model families: what a `model_type` of a config.json means, in DeepSeek-V3's terms.

How to add one: a row of FAMILIES. Where its attention or its router is of a kind that no other has, that kind
has a table of tensors (tensors.py), an equation (reference.py) and operations (step/) of its own; what a die
holds, how parallelism cuts it and what moves between dies follows from these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .config import Reader

NOTHING: Mapping[str, Any] = MappingProxyType({})


def _first_dense(reader: Reader, num_layers: int) -> tuple[int, frozenset[int]]:
    """DeepSeek's: the first layers."""
    return reader.integer("first_k_dense_replace", 3, minimum=0), frozenset()


def _listed(reader: Reader, num_layers: int) -> tuple[int, frozenset[int]]:
    """GLM's: a word for each layer; without them, what DeepSeek's key says."""
    words = reader.raw.get("mlp_layer_types")
    if words is None:
        return reader.integer("first_k_dense_replace", 1, minimum=0), frozenset()
    if not isinstance(words, list) or len(words) != num_layers or {*map(str, words)} - {"dense", "sparse"}:
        reader.problems.append(f'mlp_layer_types must be "dense" or "sparse" for each of {num_layers} layers')
        return 0, frozenset()
    first = words.index("sparse") if "sparse" in words else num_layers
    if reader.raw.get("first_k_dense_replace", first) != first:
        reader.problems.append(f"first_k_dense_replace is not {first}, as mlp_layer_types says")
    return first, frozenset(i for i, word in enumerate(words) if word == "dense" and i > first)


class Family(NamedTuple):
    """A row of FAMILIES.

    defaults      of keys that are absent, where transformers' config class has others than DeepseekV3Config
    dense_layers  from a config.json and its number of layers: how many layers are dense before the first with
                  experts, and which of the later ones are
    """

    defaults: Mapping[str, Any] = NOTHING
    dense_layers: Callable[[Reader, int], tuple[int, frozenset[int]]] = _first_dense


FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(),
    "kimi_k2": Family(),
    "glm4_moe_lite": Family(
        defaults={
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "num_nextn_predict_layers": 0,
        },
        dense_layers=_listed,
    ),
}
