"""How many dies may share the heads of a model, and how: tensor parallelism in words, without arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from xdeepserve.model.config import ModelConfig

TPMode: TypeAlias = Literal["tp", "sp-tp-sp"]
ShardMode: TypeAlias = Literal["tp", "sp-tp-sp", "o-proj"]  # see model/sharding.py
TP_SIZES = (1, 2, 4, 8)  # divisors of canonical.TP_BLOCKS


def tp_sizes(config: ModelConfig, mode: TPMode) -> list[int]:
    """The sizes of groups that the model's heads, and where they are cut its dense layers, allow."""
    cuts_mlp = mode == "tp" and config.num_moe_layers < config.num_hidden_layers
    return [
        tp
        for tp in TP_SIZES
        if not config.num_attention_heads % tp and not (cuts_mlp and config.intermediate_size % tp)
    ]
