"""Sizes of DeepSeek-V4 that no other family has, read from its config.json in any of its spellings.

    published       `compress_ratios` with a number for each layer, `num_hash_layers`, `rope_scaling`
    transformers'   `layer_types` and `mlp_layer_types` with a word for each layer, `rope_parameters` with an
                    object for each of both RoPEs

Where both are there, the words win, as in transformers.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from xdeepserve.model.config_reader import Reader, abridged, whole

LayerKind: TypeAlias = Literal["window", "csa", "hca"]

KINDS: dict[str, LayerKind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
RATIOS: dict[int, LayerKind] = {0: "window", 4: "csa", 128: "hca"}
RATES: dict[LayerKind, tuple[str, str, int]] = {  # word, older key, default
    "csa": ("compressed_sparse_attention", "compress_rate_csa", 4),
    "hca": ("heavily_compressed_attention", "compress_rate_hca", 128),
}
MAX_RATE = 2**16
OWN_KEYS = frozenset({"hc_mult", "swiglu_limit", "sliding_window", "index_topk", "layer_types"})
"""Keys that mean something in this family and are refused, or read otherwise, in all others."""


class V4Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that a ModelConfig of DeepSeek-V4 has beside its common ones.

    layers          kind of attention of each layer: a window alone, or with compressed positions beside it,
                    of which an indexer chooses some (csa), or which are all seen (hca)
    csa_rate        positions of a window that become one entry of the cache, in csa; hca_rate in hca
    sliding_window  positions that each token sees as they are, itself included
    o_groups        groups of heads, each with an output projection of its own to o_lora_rank values
    hc_mult         streams of residuals; their connections are normalised hc_sinkhorn_iters times
    swiglu_limit    bound of what gates and experts' up projections let through
    hash_layers     layers whose experts are found by token id
    """

    layers: tuple[LayerKind, ...]
    csa_rate: int
    hca_rate: int
    sliding_window: int
    o_groups: int
    o_lora_rank: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    swiglu_limit: float
    hash_layers: frozenset[int]

    def rate(self, kind: str) -> int:
        """Return how many positions become one entry in layers of a kind; 0 where none do."""
        return {"csa": self.csa_rate, "hca": self.hca_rate}.get(kind, 0)


def read_sizes(reader: Reader, heads: int) -> dict[str, Any]:
    """Read the fields of a ModelConfig that tell of heads, with those of V4 alone in `v4`."""
    head_dim = reader.integer("head_dim", 512, minimum=4)
    turned = _turned(reader, head_dim)
    num_layers = reader.integer("num_hidden_layers", 43)
    groups = reader.integer("o_groups", 8)
    if heads % groups:
        reader.problems.append(f"o_groups ({groups}) must divide num_attention_heads ({heads})")
    index_head_dim = reader.integer("index_head_dim", 128)
    if index_head_dim < turned:
        reader.problems.append(
            f"index_head_dim ({index_head_dim}) must not be less than what RoPE turns of a head ({turned})"
        )
    window = reader.integer("sliding_window", 128)
    return {
        "q_lora_rank": reader.integer("q_lora_rank", 1024),
        "kv_lora_rank": head_dim - turned,
        "qk_nope_head_dim": head_dim - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": head_dim,
        "index_topk": reader.integer("index_topk", 512),
        "index_n_heads": reader.integer("index_n_heads", 64),
        "index_head_dim": index_head_dim,
        "v4": V4Sizes(
            layers=_layers(reader, num_layers),
            csa_rate=_rate(reader, "csa"),
            hca_rate=_rate(reader, "hca"),
            sliding_window=window,
            o_groups=groups,
            o_lora_rank=reader.integer("o_lora_rank", 1024),
            hc_mult=reader.integer("hc_mult", 4),
            hc_sinkhorn_iters=reader.integer("hc_sinkhorn_iters", 20),
            hc_eps=reader.number("hc_eps", 1e-6, above=0),
            swiglu_limit=reader.number("swiglu_limit", 10.0, above=0),
            hash_layers=_hash_layers(reader, num_layers),
        ),
    }


def _turned(reader: Reader, head_dim: int) -> int:
    """Return how many columns of a head RoPE turns: 64 of 512, unless one of both keys says otherwise."""
    if reader.raw.get("qk_rope_head_dim") is not None:
        turned = reader.integer("qk_rope_head_dim", 64, minimum=2)
    else:
        turned = int(head_dim * reader.number("partial_rotary_factor", 64 / 512, above=0))
    if 0 < turned < head_dim and turned % 2 == 0:
        return turned
    reader.problems.append(
        f"head_dim x partial_rotary_factor must be even, and less than head_dim ({head_dim}), found {turned}"
    )
    return 2


def _layers(reader: Reader, num_layers: int) -> tuple[LayerKind, ...]:
    words, ratios = reader.raw.get("layer_types"), reader.raw.get("compress_ratios")
    if words is not None:
        if isinstance(words, list) and len(words) >= num_layers and set(map(str, words)) <= KINDS.keys():
            return tuple(KINDS[word] for word in words[:num_layers])
        reader.problems.append(
            f"layer_types must be one of {', '.join(KINDS)} for each of {num_layers} layers, "
            f"found {abridged(words)}"
        )
    elif ratios is not None:
        numbers = [whole(each) for each in ratios] if isinstance(ratios, list) else []
        if len(numbers) >= num_layers and all(number in RATIOS for number in numbers):
            return tuple(RATIOS[number] for number in numbers[:num_layers])  # those behind are MTP's
        reader.problems.append(
            f"compress_ratios must be 0, 4 or 128 for each of {num_layers} layers, found {abridged(ratios)}"
        )
    return tuple("csa" if i > 2 and i % 2 else "hca" for i in range(num_layers))


def _rate(reader: Reader, kind: LayerKind) -> int:
    word, older, default = RATES[kind]
    rates = reader.raw.get("compress_rates") or {}
    stated = rates.get(word, default) if isinstance(rates, dict) else rates
    value = whole(stated if reader.raw.get(older) is None else reader.raw[older])
    if type(value) is int and 1 <= value <= MAX_RATE:
        return value
    reader.problems.append(
        f"compress_rates.{word} must be an integer from 1 to {MAX_RATE}, found {abridged(value)}"
    )
    return default


def _hash_layers(reader: Reader, num_layers: int) -> frozenset[int]:
    words = reader.raw.get("mlp_layer_types")
    if words is None:
        return frozenset(range(min(reader.integer("num_hash_layers", 3, minimum=0), num_layers)))
    if isinstance(words, list) and len(words) >= num_layers and set(map(str, words)) <= {"hash_moe", "moe"}:
        return frozenset(i for i, word in enumerate(words[:num_layers]) if word == "hash_moe")
    reader.problems.append(f'mlp_layer_types must be "hash_moe" or "moe" for each of {num_layers} layers')
    return frozenset()


def v4_ropes(spelled: object, problems: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers of both RoPEs, of windows and of all else in layers with compressed positions.

    One object for both is for the latter alone, whose cos and sin YaRN does not scale then.
    """
    if not isinstance(spelled, dict):
        problems.append(f"rope_parameters must be an object or null, found {abridged(spelled)}")
        return {}, {}
    both = [spelled.get(name) for name in ("main", "compress")]
    if all(isinstance(each, dict) for each in both):
        return both[0], both[1]  # type: ignore[return-value]
    flat = {key: value for key, value in spelled.items() if key not in ("main", "compress", "rope_theta")}
    return {}, {"attention_factor": 1.0, **flat} if flat else {}
