"""Reads typed values from a JSON object of a checkpoint."""

from __future__ import annotations

import json
import math
from functools import cached_property
from typing import Any

# What a config.json and its neighbours may ask for at most.
#
# Several times what any published model has, and little enough that what follows from it (names of tensors,
# sizes in bytes) is counted in seconds. Numbers with a fraction stay far within float32, in which dies
# compute.

LIMITS: dict[str, float] = {  # by key; negative numbers may be as large
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "partial_rotary_factor": 1.0,
    "rotary_dim": 2**12,
    "decoder_sparse_step": 2**10,
    "q_lora_rank": 2**16,
    "kv_lora_rank": 2**16,
    "qk_nope_head_dim": 2**12,
    "qk_rope_head_dim": 2**12,
    "v_head_dim": 2**12,
    "sliding_window": 2**20,
    "o_groups": 2**12,
    "o_lora_rank": 2**16,
    "hc_mult": 2**5,
    "hc_sinkhorn_iters": 2**10,
    "hc_eps": 1.0,
    "swiglu_limit": 1e6,
    "num_hash_layers": 2**10,
    "index_topk": 2**20,
    "index_n_heads": 2**12,
    "index_head_dim": 2**12,
    "index_topk_freq": 2**10,
    "index_skip_topk_offset": 2**10,
    "n_routed_experts": 2**14,
    "n_shared_experts": 2**8,
    "num_experts_per_tok": 2**10,
    "n_group": 2**12,
    "topk_group": 2**12,
    "first_k_dense_replace": 2**31 - 1,  # any number beyond the layers means all of them
    "num_nextn_predict_layers": 2**6,
    "num_mtp_layers": 2**6,
    "max_position_embeddings": 2**26,  # as far as the angles of RoPE are exact
    "original_max_position_embeddings": 2**26,
    "routed_scaling_factor": 1e6,
    "rms_norm_eps": 1.0,
    "rope_theta": 1e15,
    "compress_rope_theta": 1e15,
    "factor": 1e6,
    "beta_fast": 1e6,
    "beta_slow": 1e6,
    "mscale": 1e3,
    "mscale_all_dim": 1e3,
    "attention_factor": 1e3,
}
MAX_EXPERTS = 2**18  # routed ones in all layers; DeepSeek-V3 has 14,848
MAX_END_TOKENS = 2**10
MAX_JSON_BYTES = 2**24  # of one file
MAX_INDEXED = 2**21  # tensors in an index: those of MAX_EXPERTS experts with their scales, and some more
MAX_INDEX_BYTES = 2**27  # which these come to
MAX_FILE_NAME = 255  # bytes that file systems take


class Reader:
    """Reads typed values from a JSON object and collects the problems with them."""

    def __init__(self, raw: dict[str, Any], prefix: str = "", problems: list[str] | None = None) -> None:
        self.raw = self.given = raw  # `given` has no defaults
        self.prefix = prefix
        self.problems: list[str] = [] if problems is None else problems
        self.own: dict[str, str] = {}  # what the family calls keys, by DeepSeek-V3's names

    def key(self, key: str) -> str:
        """Name of a key as spelt in the file."""
        return self.prefix + self.own.get(key, key)

    @cached_property
    def rope(self) -> Reader:
        """Reader of all RoPE numbers in `rope_scaling` and `rope_parameters`, which may not contradict.
        Without either, it is empty."""
        spelled, beside = self.rope_object("rope_scaling"), self.rope_object("rope_parameters")
        if not (spelled.raw and beside.raw):
            return spelled if spelled.raw else beside
        for key in beside.raw:
            spelled.same(key, beside, key)
        return Reader({**beside.raw, **spelled.raw}, spelled.prefix, self.problems)

    def rope_object(self, name: str) -> Reader:
        """Reader of one object with RoPE's numbers, which may be those of the only kind of layer."""
        raw = self.raw.get(name) or {}
        if not isinstance(raw, dict):
            self.problems.append(f"{name} must be an object or null, found {abridged(raw)}")
            return Reader({}, f"{name}.", self.problems)
        kinds = [key for key, value in raw.items() if isinstance(value, dict)]
        if kinds == list(raw) == ["full_attention"]:  # by kind of layer, of which there is one
            return Reader(raw["full_attention"], f"{name}.full_attention.", self.problems)
        if kinds:
            self.problems.append(
                f"{name}.{abridged(kinds[0])} is not supported (only one RoPE for all layers is)"
            )
        return Reader(raw, f"{name}.", self.problems)

    def integer(self, key: str, default: int, minimum: int = 1) -> int:
        """Read an integer, which may be written with a fraction of 0."""
        value, limit = whole(self.raw.get(key, default)), LIMITS[key]
        if type(value) is int and minimum <= value <= limit:
            return value
        bound = f"<= {limit}" if type(value) is int and value > limit else f">= {minimum}"
        self.problems.append(f"{self.key(key)} must be an integer {bound}, found {abridged(value)}")
        return default

    def number(self, key: str, default: float, above: float = -math.inf) -> float:
        value, limit = self.raw.get(key, default), LIMITS[key]
        # An integer may be too large for a float: it is compared as it is.
        if type(value) in (int, float) and above < value and -limit <= value <= limit:
            return float(value)
        bound = f" > {above:g}" if math.isfinite(above) else ""
        if type(value) in (int, float) and not -limit <= value <= limit:
            bound = f" between {max(above, -limit):g} and {limit:g}"
        self.problems.append(f"{self.key(key)} must be a number{bound}, found {abridged(value)}")
        return default

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.problems.append(f"{self.key(key)} must be true or false, found {abridged(value)}")
        return default

    def token_ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        value = self.raw.get(key, default)
        ids = [] if value is None else [whole(i) for i in (value if isinstance(value, list) else [value])]
        last = LIMITS["vocab_size"] - 1
        if len(ids) <= MAX_END_TOKENS and all(type(i) is int and 0 <= i <= last for i in ids):
            return tuple(ids)
        self.problems.append(
            f"{self.key(key)} must be a token id up to {last}, a list of {MAX_END_TOKENS} at most "
            f"or null, found {abridged(value)}"
        )
        return ()

    def layer_numbers(self, key: str) -> frozenset[int]:
        value = [] if self.is_null(key) else self.raw.get(key, [])
        numbers = [whole(each) for each in value] if isinstance(value, list) else [-1]
        if all(type(layer_idx) is int and layer_idx >= 0 for layer_idx in numbers):
            return frozenset(numbers)
        self.problems.append(f"{self.key(key)} must be a list of layer numbers, found {abridged(value)}")
        return frozenset()

    def only(self, key: str, *supported: object) -> None:
        """Refuse any value but the supported ones; null counts as absent."""
        value = self.raw.get(key)
        if value is not None and value not in supported:
            self.problems.append(
                f"{self.key(key)} {abridged(value)} is not supported (only {abridged(supported[0])} is)"
            )

    def off(self, key: str) -> None:
        """Refuse a key that would change the arithmetic unless it is null, false, zero or empty."""
        if value := self.raw.get(key):
            self.problems.append(f"{self.key(key)} {abridged(value)} is not supported (only without it)")

    def same(self, key: str, other: Reader, its_key: str) -> None:
        """Report two names of one number that are both given and differ."""
        ours, theirs = self.given.get(key), other.given.get(its_key)
        if None not in (ours, theirs) and str(ours).lower() != str(theirs).lower() and ours != theirs:
            self.problems.append(
                f"{other.key(its_key)} {abridged(theirs)} contradicts {self.key(key)} {abridged(ours)}"
            )

    def is_null(self, key: str) -> bool:
        return key in self.raw and self.raw[key] is None


def whole(value: Any) -> Any:
    """Turn a number with a fraction of 0 into an integer, as some writers of JSON have it; leave all else."""
    return int(value) if type(value) is float and value.is_integer() else value


def abridged(value: object) -> str:
    """Format a value as JSON, cut short if it is long."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= 80 else f"{text[:80]}... ({len(text)} characters)"
