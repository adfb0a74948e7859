"""Model families: the meaning of a `model_type` in a config.json, in DeepSeek-V3's terms.

How to add a family: add a row to FAMILIES. A new kind of attention or router needs its own table of tensors
(tensors.py), equation (reference.py) and operations (step/). A die's contents, the cuts of parallelism and
the traffic between dies follow from these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from xdeepserve.model.config_reader import Reader, abridged
from xdeepserve.model.v4 import sizes as v4

AttentionKind: TypeAlias = Literal["mla", "gqa", "dsa", "dsa-shared", "window", "csa", "hca"]
QKNorm: TypeAlias = Literal["none", "head", "all"]
ExpertNames: TypeAlias = Literal["deepseek", "mixtral", "v4"]
Scoring: TypeAlias = Literal["sigmoid", "softmax", "sqrtsoftplus"]
NOTHING: Mapping[str, Any] = MappingProxyType({})

# What no family here computes. A key that is neither read nor listed is taken to change no answer.
OFF = (  # keys that must be absent, null, false, zero or empty
    *("dual_chunk_attention_config", "sparse_attention_config", "linear_attn_config", "attention_chunk_size"),
    *("use_sliding_window", "use_attention_sinks", "attention_sink", "attn_output_gate", "alibi", "clip_qkv"),
    *("qkv_bias", "use_qkv_bias", "mlp_bias", "use_bias", "lm_head_bias", "qk_layernorm", "sandwich_norm"),
    *("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "logits_soft_cap"),
    *("attention_multiplier", "query_pre_attn_scalar", "mla_scale_q_lora", "mla_scale_kv_lora"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "zero_expert_num", "swiglu_limit"),
    *("text_config", "vision_config", "audio_config", "hc_mult", "pruned_heads", "is_encoder_decoder"),
    *("quantization", "quant_config", "quantize_config", "bitsandbytes_config", "awq_config", "gptq_config"),
    *("add_cross_attention", "no_rope_layer_interval", "nope_layer_interval"),
)
ONLY: Mapping[str, tuple[Any, ...]] = {  # keys that may be there, with the values that are computed
    "hidden_act": ("silu", "swish"),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    **dict.fromkeys(("embedding_multiplier", "embedding_scale", "scale_emb", "residual_multiplier"), (1,)),
    **dict.fromkeys(("logit_scale", "logits_scaling", "lm_head_multiplier", "rope_ratio"), (1,)),
}
LAYER_TYPES: Mapping[str, tuple[Any, ...]] = {  # lists of a word for each layer, and the words of such layers
    "layer_types": ("full_attention", "attention"),
    "attn_type_list": (1,),
}
EXPERT_COUNTS = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}


def _first_dense(reader: Reader, num_layers: int) -> tuple[int, frozenset[int]]:
    """Read dense layers in DeepSeek's way: the first layers."""
    return reader.integer("first_k_dense_replace", 3, minimum=0), frozenset()


def _listed(reader: Reader, num_layers: int, default: int = 1) -> tuple[int, frozenset[int]]:
    """Read dense layers in GLM's way: a word for each layer, whatever DeepSeek's key says. Without the words,
    read that key; transformers writes both, with the key at its default."""
    words = reader.raw.get("mlp_layer_types")
    if words is None:
        return reader.integer("first_k_dense_replace", default, minimum=0), frozenset()
    if not isinstance(words, list) or len(words) != num_layers or {*map(str, words)} - {"dense", "sparse"}:
        reader.problems.append(f'mlp_layer_types must be "dense" or "sparse" for each of {num_layers} layers')
        return 0, frozenset()
    first = words.index("sparse") if "sparse" in words else num_layers
    return first, frozenset(i for i, word in enumerate(words) if word == "dense" and i > first)


def _sparse_steps(reader: Reader, num_layers: int) -> tuple[int, frozenset[int]]:
    """Read dense layers in Qwen's way: experts in every n-th layer, except for the layers named."""
    step, dense = reader.integer("decoder_sparse_step", 1), reader.layer_numbers("mlp_only_layers")
    return 0, frozenset(i for i in range(num_layers) if (i + 1) % step or i in dense)


def _no_layers(reader: Reader, num_layers: int) -> frozenset[int]:
    return frozenset()


def _shared_choices(reader: Reader, num_layers: int) -> frozenset[int]:
    """Read layers without an indexer in GLM's way: a word or a letter for each layer. Without them, one layer
    in `index_topk_freq` has an indexer, from some layer on."""
    key = "indexer_types" if reader.raw.get("indexer_types") is not None else "index_topk_pattern"
    words = reader.raw.get(key)
    if words is None:
        step = reader.integer("index_topk_freq", 1)
        first = reader.integer("index_skip_topk_offset", 2, minimum=0)
        shared = frozenset(i for i in range(num_layers) if max(i - first + 1, 0) % step)
        if 0 in shared:
            reader.problems.append("index_skip_topk_offset 0 leaves nothing to share: the first one full")
        return shared
    if isinstance(words, str):
        words = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in words]
    is_list = isinstance(words, list) and len(words) == num_layers
    if not is_list or {*map(str, words)} - {"full", "shared"} or words[0] != "full":
        reader.problems.append(
            f'{key} must be "full" or "shared" (F or S) for each of {num_layers} layers, the first one full, '
            f"found {abridged(reader.raw[key])}"
        )
        return frozenset()
    return frozenset(i for i, word in enumerate(words) if word == "shared")


class Family(NamedTuple):
    """Row of FAMILIES: properties of a model family.

    attention     what its layers attend with, and what the KV cache has: `mla`, latents that all heads share;
                  `gqa`, a key and a value for each group of heads; `dsa`, those of latents that an indexer
                  has chosen, whose keys are in the cache, too; `dsa-shared`, a layer of such a model that
                  has no indexer, and sees what was chosen for the one before; `window`, `csa`, `hca`: see
                  v4/sizes.py
    scoring       how a router's logits become scores: each by itself, or all experts' together
    own_keys      keys of OFF that it has, and others that it reads in a way of its own
    names         keys that it calls otherwise: its name -> DeepSeek-V3's; counts of experts in any family
    defaults      of keys that are absent, where transformers' config class has others than DeepseekV3Config
    dense_layers  from a config.json and its number of layers: how many layers are dense before the first with
                  experts, and which of the later ones are
    only          keys that may be there, and the values of each that are computed; ONLY has those of all
    layer_type    what `layer_types` calls its layers, if not by a word of LAYER_TYPES
    has_biases    whether `attention_bias` may be true
    qk_norm       what `use_qk_norm` has normed: each head's query and key, or all heads' together
    expert_names  whose names its experts and routers have in a checkpoint
    index_interleave  whether the indexer's RoPE has neighbours for pairs, not halves
    shared_choices  from a config.json and its number of layers: those without an indexer
    best_of_group  how many of a group's experts, the best ones, make its score in a router
    partial_rotary  the default of `partial_rotary_factor`; without one, all of a head is rotated
    """

    attention: AttentionKind = "mla"
    scoring: Scoring = "sigmoid"
    own_keys: frozenset[str] = frozenset()
    names: Mapping[str, str] = EXPERT_COUNTS
    defaults: Mapping[str, Any] = NOTHING
    dense_layers: Callable[[Reader, int], tuple[int, frozenset[int]]] = _first_dense
    only: Mapping[str, tuple[Any, ...]] = NOTHING
    layer_type: str | None = None
    has_biases: bool = False
    qk_norm: QKNorm = "head"
    expert_names: ExpertNames = "deepseek"
    index_interleave: bool = False
    shared_choices: Callable[[Reader, int], frozenset[int]] = _no_layers
    partial_rotary: float | None = None
    best_of_group: Literal[1, 2] = 2


def _mla_sizes(reader: Reader, family: Family, heads: int, hidden: int) -> dict[str, Any]:
    reader.only("num_key_value_heads", heads)
    nope, turned = reader.raw.get("qk_nope_head_dim", 128), reader.raw.get("qk_rope_head_dim", 64)
    if isinstance(nope, int | float) and isinstance(turned, int | float):
        reader.only("qk_head_dim", nope + turned)
        reader.only("rotary_dim", turned)
    return {
        "q_lora_rank": None if reader.is_null("q_lora_rank") else reader.integer("q_lora_rank", 1536),
        "kv_lora_rank": reader.integer("kv_lora_rank", 512),
        "qk_nope_head_dim": reader.integer("qk_nope_head_dim", 128),
        "qk_rope_head_dim": reader.integer("qk_rope_head_dim", 64, minimum=2),
        "v_head_dim": reader.integer("v_head_dim", 128),
    }


def _dsa_sizes(reader: Reader, family: Family, heads: int, hidden: int) -> dict[str, Any]:
    sizes = _mla_sizes(reader, family, heads, hidden)
    if sizes["q_lora_rank"] is None:
        reader.problems.append("q_lora_rank must not be null: the indexer reads the query's latent")
    index_head_dim = reader.integer("index_head_dim", 128)
    if index_head_dim < sizes["qk_rope_head_dim"]:
        reader.problems.append(
            f"index_head_dim ({index_head_dim}) must not be less than "
            f"qk_rope_head_dim ({sizes['qk_rope_head_dim']})"
        )
    return sizes | {
        "index_topk": reader.integer("index_topk", 2048),
        "index_n_heads": reader.integer("index_n_heads", 64),
        "index_head_dim": index_head_dim,
        "index_interleave": family.index_interleave,
    }


def _gqa_sizes(reader: Reader, family: Family, heads: int, hidden: int) -> dict[str, Any]:
    kv_heads = heads if reader.is_null("num_key_value_heads") else reader.integer("num_key_value_heads", 1)
    if heads % kv_heads:
        reader.problems.append(f"num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})")
    default = max(2, hidden // heads)
    head_dim = default if reader.is_null("head_dim") else reader.integer("head_dim", default, minimum=2)
    turned = _rotated(reader, family, head_dim)
    qk_norm = family.qk_norm if reader.boolean("use_qk_norm", False) else "none"
    return {
        # Queries that are normed together are a latent, as wide as they are: whoever has some has them all.
        "q_lora_rank": heads * head_dim if qk_norm == "all" else None,
        "kv_lora_rank": 0,
        "qk_nope_head_dim": head_dim - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": head_dim,
        "num_key_value_heads": kv_heads,
        "attention_bias": reader.boolean("attention_bias", False),
        "qk_norm": qk_norm,
    }


def _rotated(reader: Reader, family: Family, head_dim: int) -> int:
    """Return how many columns of a head RoPE turns. Reports a problem unless the number is even and fits, and
    then returns an even number, so that checks can go on."""
    key, turned = "partial_rotary_factor", head_dim
    if family.partial_rotary is None:
        reader.only("rotary_dim", head_dim)
    else:
        owners = [owner for owner in (reader.rope, reader) if owner.raw.get(key) is not None]
        stated = {owner.key(key): int(head_dim * owner.number(key, 1.0, above=0)) for owner in owners}
        if reader.raw.get("rotary_dim") is not None:
            stated["rotary_dim"] = reader.integer("rotary_dim", 2)
        (first, turned), *others = stated.items() or [("", int(head_dim * family.partial_rotary))]
        reader.problems += [
            f"{name} has {columns} of {head_dim} columns rotated, which contradicts {first} ({turned})"
            for name, columns in others
            if columns != turned
        ]
    if 0 < turned <= head_dim and turned % 2 == 0:
        return turned
    what = "head_dim" if family.partial_rotary is None else "head_dim x partial_rotary_factor"
    reader.problems.append(f"{what} must be even, found {turned}")
    return 2


HEAD_SIZES: dict[AttentionKind, Callable[[Reader, Family, int, int], dict[str, Any]]] = {
    "mla": _mla_sizes,
    "gqa": _gqa_sizes,
    "dsa": _dsa_sizes,
    "dsa-shared": _dsa_sizes,
    "window": lambda reader, family, heads, hidden: v4.read_sizes(reader, heads),
}
"""Fields of a ModelConfig that tell of heads, from a config.json, the number of heads and the hidden size."""

FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(),
    "kimi_k2": Family(),
    "deepseek_v32": Family(
        attention="dsa",
        defaults={"max_position_embeddings": 163840, "num_nextn_predict_layers": 0},
        only={"rope_interleave": (True,), "indexer_rope_interleave": (False,)},
        layer_type="indexed_attention",
        dense_layers=partial(_listed, default=3),
    ),
    "glm_moe_dsa": Family(
        attention="dsa",
        defaults={
            "vocab_size": 154880,
            "hidden_size": 6144,
            "intermediate_size": 12288,
            "num_hidden_layers": 78,
            "num_attention_heads": 64,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "index_n_heads": 32,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "num_nextn_predict_layers": 0,
        },
        only={"rope_interleave": (True,), "indexer_rope_interleave": (True,)},
        layer_type="indexed_attention",
        dense_layers=partial(_listed, default=3),
        index_interleave=True,
        shared_choices=_shared_choices,
    ),
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
    "qwen3_moe": Family(
        attention="gqa",
        scoring="softmax",
        defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "n_routed_experts": 128,
            "n_shared_experts": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "num_nextn_predict_layers": 0,
            "rope_interleave": False,
            "use_qk_norm": True,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        dense_layers=_sparse_steps,
    ),
    "glm4_moe": Family(
        attention="gqa",
        defaults={
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "n_routed_experts": 128,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_interleave": False,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        has_biases=True,
        partial_rotary=0.5,
    ),
    "minimax_m2": Family(
        attention="gqa",
        names=EXPERT_COUNTS | {"intermediate_size": "moe_intermediate_size"},
        defaults={
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1,  # no layer is dense
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 196608,
            "rope_theta": 5000000.0,
            "num_nextn_predict_layers": 0,
            "rope_interleave": False,
            "use_qk_norm": True,
            "bos_token_id": 200034,
            "eos_token_id": 200020,
        },
        only={"use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "use_routing_bias": (True,)},
        qk_norm="all",
        expert_names="mixtral",
        partial_rotary=1.0,
    ),
    "deepseek_v2": Family(
        scoring="softmax",
        defaults={
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "moe_intermediate_size": 1407,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": None,
            "n_group": None,
            "topk_group": None,
            "topk_method": "greedy",
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 2048,
            "num_nextn_predict_layers": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        only={
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": (False,),
            "rope_interleave": (True,),
        },
        best_of_group=1,
    ),
    "deepseek_v4": Family(
        attention="window",
        scoring="sqrtsoftplus",
        own_keys=v4.OWN_KEYS,
        names=EXPERT_COUNTS | {"intermediate_size": "moe_intermediate_size"},
        defaults={
            "hidden_size": 4096,
            "intermediate_size": 1,  # no layer is dense
            "num_hidden_layers": 43,
            "num_attention_heads": 64,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "max_position_embeddings": 1048576,
        },
        dense_layers=lambda reader, num_layers: (0, frozenset()),
        expert_names="v4",
        partial_rotary=64 / 512,
    ),
}
