"""Shape of a DeepSeek-V3 model, read from a Hugging Face `config.json`.

Other families are read in DeepSeek-V3's terms: families.py says what their keys mean. Both spellings of RoPE
are understood: `rope_scaling` + `rope_theta` (DeepSeek's own), and transformers 5's `rope_parameters`. A
missing key has the default of transformers' config class for the model type. Unsupported features (other
activations, other quantisations, ...) are refused, with all problems in one error.

The multi-token-prediction layers are `model.layers.N`, N = num_hidden_layers and up (DeepSeek-V3 report,
section 2.2). Layer N's input for position i is

    eh_proj · concat[enorm(embedding of token i+1), hnorm(hidden state i)]

with the embedding's half first, and the main model's hidden state after its final norm. A decoder layer with
experts follows, then `shared_head.norm` and the output head, which give the draft for token i+2. DeepSeek,
vLLM and transformers (`MtpModel`) agree on this.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from xdeepserve.errors import CheckpointError
from xdeepserve.model.config_reader import MAX_EXPERTS, MAX_JSON_BYTES, Reader, abridged
from xdeepserve.model.families import (
    FAMILIES,
    HEAD_SIZES,
    LAYER_TYPES,
    OFF,
    ONLY,
    AttentionKind,
    ExpertNames,
    QKNorm,
    Scoring,
)
from xdeepserve.model.quant_config import QuantConfig, parse_quant_config
from xdeepserve.model.v4.sizes import V4Sizes, v4_ropes
from xdeepserve.reading import Document, unreadable

LATENT_NORM_EPS = 1e-6  # MLA's q_norm and kv_norm do not follow rms_norm_eps
INDEX_NORM_EPS = 1e-6  # nor does the norm of the indexer's keys
NEEDS_INDEXER = (
    "needs a cache with keys of an indexer: model_type must be "
    f"{' or '.join(name for name, family in FAMILIES.items() if family.attention == 'dsa')}"
)
INT8_ATTENTION = "xdeepserve_int8_attention"  # this package's own key: layer numbers, written by quantize


MTP_KEYS = ("num_mtp_layers", "num_nextn_predict_layers")
ROPE_KINDS = {"none": "default", "null": "default", "": "default", "deepseek_yarn": "yarn"} | {
    name: name for name in ("default", "linear", "yarn")
}  # by the words that are written for them

_EXACT = Context(prec=40)


@cache
def _mscale(factor: float, mscale: float) -> float:
    """DeepSeek's m(mscale) = 0.1 mscale ln(factor) + 1, or 1 where nothing is stretched."""
    if factor <= 1:
        return 1.0
    return 0.1 * mscale * float(_EXACT.ln(Decimal(factor))) + 1.0


class YarnConfig(msgspec.Struct, frozen=True, kw_only=True):
    """YaRN context extension; `mscale` and `mscale_all_dim` of 0 mean "not given", as in transformers."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def table_scale(self) -> float:
        """Factor on cos and sin: `attention_factor` if given; m(mscale) / m(mscale_all_dim) if both are
        given; else m(1)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def softmax_mscale(self) -> float:
        """Factor on the attention scale, applied twice: m(mscale_all_dim), or 1 if not given."""
        return _mscale(self.factor, self.mscale_all_dim) if self.mscale_all_dim else 1.0


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """RoPE configuration: `theta` is the base of the frequencies theta^(-2i/d); `yarn` is None for plain
    RoPE."""

    theta: float
    yarn: YarnConfig | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Sizes and switches of a model, under Hugging Face's names. Validated by `load_config`.

    Values needed in every step are computed once and cached, which is why the struct has a `dict`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense layers
    moe_intermediate_size: int  # of each routed expert
    num_hidden_layers: int  # without the MTP layers
    num_attention_heads: int
    q_lora_rank: int | None  # None: queries are projected directly by `q_proj`, in one go
    kv_lora_rank: int  # 0 without latents
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int  # one MLP of n_shared_experts x moe_intermediate_size; 0: none
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    first_k_dense_replace: int
    other_dense_layers: frozenset[int] = frozenset()  # behind these
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float  # not of the q_a and kv_a norms, which always use 1e-6
    rope: RopeConfig
    max_position_embeddings: int
    num_nextn_predict_layers: int  # MTP layers
    tie_word_embeddings: bool
    rope_interleave: bool  # pair i is (x[2i], x[2i+1]) if true, else (x[i], x[i + rope_dim/2])
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    attention: AttentionKind = "mla"
    scoring: Scoring = "sigmoid"
    best_of_group: Literal[1, 2] = 2  # experts that make the score of their group, the best ones: 1 or 2
    attention_bias: bool = False  # of queries, keys and values in GQA
    qk_norm: QKNorm = "none"  # of queries and of keys in GQA: of each head's, or of all heads' together
    expert_names: ExpertNames = "deepseek"
    index_topk: int = 0  # positions that a token attends to at most; 0: all
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_interleave: bool = False  # pairs of the indexer's RoPE, as `rope_interleave` says of attention's
    shared_choices: frozenset[int] = frozenset()  # layers without indexer: they see what was chosen before
    v4: V4Sizes | None = None  # of DeepSeek-V4 alone
    compress_rope: RopeConfig | None = (
        None  # of its layers with compressed positions, which all else there has
    )
    num_key_value_heads: int = 1  # of the KV cache; latents are one that all others share
    quantization: QuantConfig | None = None  # how the files store linear layers; None: in floating point
    # Linear layers that an INT8 checkpoint keeps in floating point though the int8 recipe quantises such:
    # names as "model.layers.3.self_attn.o_proj". Known once the files have been looked at.
    kept_float: frozenset[str] = frozenset()
    int8_attention: frozenset[int] = frozenset()  # layers with INT8 attention throughout in the int8 recipe
    int8_answers: bool = False  # experts' outputs are INT8 on their way back in the int8 recipe, not BF16

    def to_bytes(self) -> bytes:
        """Serialise all fields not at their default, equally in every process (the printed form of a set is
        not). A new field changes nothing for models without it."""
        stated = {
            field.name: value
            for field in msgspec.structs.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        return msgspec.json.encode(stated, order="deterministic")

    @cached_property
    def qk_head_dim(self) -> int:
        """Length of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def has_latents(self) -> bool:
        """Whether the KV cache has latents that all heads share, not keys and values."""
        return self.attention != "gqa"

    @cached_property
    def softmax_scale(self) -> float:
        """Scale of attention scores: qk_head_dim^-0.5, with latents times m(mscale_all_dim)^2."""
        mscale = self.rope.yarn.softmax_mscale if self.rope.yarn and self.has_latents else 1.0
        return mscale * mscale / math.sqrt(self.qk_head_dim)

    @property
    def query_norm_eps(self) -> float:
        """Epsilon of the norm of a query's latent: in MLA 1e-6 whatever rms_norm_eps says."""
        return LATENT_NORM_EPS if self.has_latents and self.v4 is None else self.rms_norm_eps

    @cached_property
    def key_columns(self) -> int:
        """Number of cache columns per head compared with queries: a RoPE key, or a whole key."""
        return self.qk_rope_head_dim if self.has_latents else self.qk_head_dim

    @cached_property
    def value_columns(self) -> int:
        """Number of cache columns per head summed by weight: a latent, or a value."""
        return self.kv_lora_rank if self.has_latents else self.v_head_dim

    @cached_property
    def kv_columns(self) -> int:
        """Number of values per position in a layer's KV cache that attention reads."""
        return self.num_key_value_heads * (self.key_columns + self.value_columns)

    @property
    def cache_columns(self) -> int:
        """Number of values per position in a layer's KV cache, with the indexer's key."""
        return self.kv_columns + self.index_head_dim

    @property
    def down_columns(self) -> int:
        """Number of columns of a row's projection before heads part: the query's latent (or the row itself),
        the cache's columns, and the indexer's weights."""
        return (self.q_lora_rank or self.hidden_size) + self.cache_columns + self.index_n_heads

    @property
    def num_layers_with_mtp(self) -> int:
        """Number of decoder layers in the checkpoint: the main model's, then the MTP layers."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def num_moe_layers(self) -> int:
        """Number of MoE layers in the main model."""
        return sum(self.is_moe(layer_idx) for layer_idx in range(self.num_hidden_layers))

    @property
    def experts_per_group(self) -> int:
        """Number of routed experts in each of the `n_group` groups."""
        return self.n_routed_experts // self.n_group

    def attention_of(self, layer_idx: int) -> AttentionKind:
        """Kind of attention in a layer. MTP layers have an indexer of their own, if the others have any;
        those of DeepSeek-V4 have a window alone."""
        if self.v4 is not None:
            return self.v4.layers[layer_idx] if layer_idx < self.num_hidden_layers else "window"
        return "dsa-shared" if layer_idx in self.shared_choices else self.attention

    def is_moe(self, layer_idx: int) -> bool:
        """Whether a layer has routed experts. MTP layers, from num_hidden_layers on, always do."""
        if layer_idx in self.other_dense_layers:
            return False
        return layer_idx >= min(self.first_k_dense_replace, self.num_hidden_layers)


def load_config(directory: Path, name: str = "config.json") -> ModelConfig:
    """Read `config.json`, and the token ids of `generation_config.json`, which win as in transformers.

    Raises CheckpointError with one line that names everything that is wrong. Of an unknown family,
    it names the family and what no other family could have either.
    """
    reader = _ConfigReader(read_json_object(directory / name))
    config = reader.model_config() if reader.knows_family() else None
    if config is None:
        reader.problems += _problems_of_all_families(reader.raw)
    if config is None or reader.problems:
        raise CheckpointError(f"{directory / name}: {'; '.join(reader.problems)}")
    if not (directory / "generation_config.json").is_file():
        return config
    generation = Reader(read_json_object(directory / "generation_config.json"))
    bos, eos = generation.token_ids("bos_token_id"), generation.token_ids("eos_token_id")
    if generation.problems:
        raise CheckpointError(f"{directory / 'generation_config.json'}: {'; '.join(generation.problems)}")
    return msgspec.structs.replace(
        config, bos_token_id=bos[0] if bos else config.bos_token_id, eos_token_ids=eos or config.eos_token_ids
    )


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in a file of a checkpoint. Raises CheckpointError if it is absent, too large or
    not an object."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise CheckpointError(f"{path}: larger than {max_bytes} bytes")
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name} in this directory") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {unreadable(error)}") from None
    document = Document(text, path, "JSON", error=CheckpointError, has_nan=True)
    return document.to(dict[str, Any])


def _problems_of_all_families(raw: dict[str, Any]) -> list[str]:
    """Return the problems that a config.json has in any family's terms. In the terms of a single one, right
    keys of another would look wrong."""
    plain = {key: value for key, value in raw.items() if _family_within(value) is None}
    readers = [_ConfigReader({**plain, "model_type": name}) for name in FAMILIES]
    for reader in readers:
        reader.knows_family()
        reader.model_config()
    first, *others = [reader.problems for reader in readers]
    return [each for each in first if all(each in problems for problems in others)]


def _family_within(value: Any) -> str | None:
    """Return the `model_type` of a nested config of a supported family; None for any other value."""
    name = value.get("model_type") if isinstance(value, dict) else None
    return name if isinstance(name, str) and name.removesuffix("_text") in FAMILIES else None


class _ConfigReader(Reader):
    """Makes a ModelConfig from a config.json, in the terms of its family."""

    family = FAMILIES["deepseek_v3"]

    def knows_family(self) -> bool:
        """Find the family by `model_type`; report a type that is no family's."""
        model_type = self.raw.get("model_type")
        if isinstance(model_type, str) and model_type in FAMILIES:
            self.family = FAMILIES[model_type]
            return True
        found = "is missing" if model_type is None else f"{abridged(model_type)} is not supported"
        self.problems.append(f"model_type {found} (supported: {', '.join(FAMILIES)}){self.nested_family()}")
        return False

    def check_supported(self) -> None:
        """Refuse architectures outside the scope of this package."""
        names = self.raw.get("architectures")
        for name in names if isinstance(names, list) else ():
            if not str(name).endswith("ForCausalLM"):
                self.problems.append(
                    f"architectures {abridged(name)} is not supported (only a ...ForCausalLM is)"
                )
        own_keys = self.family.own_keys
        if self.family.attention != "dsa" and not {"index_topk"} & own_keys and self.raw.get("index_topk"):
            self.problems.append(f"index_topk {NEEDS_INDEXER}, found {abridged(self.raw['model_type'])}")
        self.given = self.renamed()
        self.raw = {**self.family.defaults, **self.given}
        self.only("scoring_func", self.family.scoring)
        for key, values in {**ONLY, **self.family.only}.items():
            self.only(key, *values)
        for key in OFF:
            if key not in own_keys:
                self.off(key)
        if (
            not {"sliding_window"} & own_keys and self.raw.get("use_sliding_window") is None
        ):  # a window that is not switched off is used
            self.off("sliding_window")
        if not self.family.has_biases:
            self.off("attention_bias")
        for key, words in LAYER_TYPES.items():
            own = (self.family.layer_type,) if self.family.layer_type and key == "layer_types" else words
            stated = None if key in own_keys else self.raw.get(key)
            for word in stated if isinstance(stated, list) else () if stated is None else (stated,):
                if word not in own:
                    self.problems.append(
                        f"{key} {abridged(word)} is not supported (only {abridged(own[0])} is)"
                    )
                    break

    def nested_family(self) -> str:
        """Say that a model of a supported family is nested in this one, as in models that also see images."""
        for key, value in self.raw.items():
            if name := _family_within(value):
                return f"; its {key} is a {name} model, which is supported as a checkpoint of its own"
        return ""

    def renamed(self) -> dict[str, Any]:
        """Return the values by DeepSeek-V3's names. Reports two names of one number that contradict."""
        values: dict[str, Any] = {}
        for key in sorted(self.raw, key=lambda key: key not in self.family.names):
            ours, value = self.family.names.get(key, key), self.raw[key]
            if values.get(ours) is None:
                values[ours] = value
                if ours != key:
                    self.own[ours] = key
            elif value not in (None, values[ours]):
                self.problems.append(
                    f"{key} {abridged(value)} contradicts {self.key(ours)} {abridged(values[ours])}"
                )
        return values

    def model_config(self) -> ModelConfig:
        """Make the config with every field, of a family that is known; defaults are those of transformers'
        config class."""
        self.check_supported()
        bos = self.token_ids("bos_token_id", 0)
        max_position_embeddings = self.integer("max_position_embeddings", 4096)
        stored, older = "quantization_config", "compression_config"  # what compressed-tensors called it first
        if self.raw.get(stored) and self.raw.get(older):
            self.same(stored, self, older)
        name = stored if self.raw.get(stored) else older
        quantization, problems = parse_quant_config(self.raw.get(name))
        self.problems += [problem.replace(stored, name) for problem in problems]
        num_layers = self.integer("num_hidden_layers", 61)
        heads, hidden = self.integer("num_attention_heads", 128), self.integer("hidden_size", 7168)
        first_moe, other_dense = self.family.dense_layers(self, num_layers)
        self.same(MTP_KEYS[0], self, MTP_KEYS[1])
        mtp_key = next((key for key in MTP_KEYS if self.raw.get(key) is not None), MTP_KEYS[-1])
        rope, compress_rope = self.both_ropes(max_position_embeddings)
        method = self.raw.get("topk_method")
        is_ungrouped = method == "greedy" or (self.is_null("n_group") and method != "group_limited_greedy")
        config = ModelConfig(
            vocab_size=self.integer("vocab_size", 129280),
            hidden_size=hidden,
            intermediate_size=self.integer("intermediate_size", 18432),
            moe_intermediate_size=self.integer("moe_intermediate_size", 2048),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            **HEAD_SIZES[self.family.attention](self, self.family, heads, hidden),
            attention=self.family.attention,
            shared_choices=self.family.shared_choices(self, num_layers),
            scoring=self.family.scoring,
            expert_names=self.family.expert_names,
            n_routed_experts=self.integer("n_routed_experts", 256),
            n_shared_experts=0
            if self.is_null("n_shared_experts")
            else self.integer("n_shared_experts", 1, minimum=0),
            num_experts_per_tok=self.integer("num_experts_per_tok", 8),
            n_group=1 if is_ungrouped else self.integer("n_group", 8),
            topk_group=1 if is_ungrouped else self.integer("topk_group", 4),
            best_of_group=self.family.best_of_group,
            first_k_dense_replace=first_moe,
            other_dense_layers=other_dense,
            norm_topk_prob=self.boolean("norm_topk_prob", True),
            routed_scaling_factor=self.number("routed_scaling_factor", 2.5),
            rms_norm_eps=self.number("rms_norm_eps", 1e-6, above=0),
            rope=rope,
            compress_rope=compress_rope,
            max_position_embeddings=max_position_embeddings,
            num_nextn_predict_layers=0 if self.is_null(mtp_key) else self.integer(mtp_key, 1, minimum=0),
            tie_word_embeddings=self.boolean("tie_word_embeddings", False),
            rope_interleave=self.boolean("rope_interleave", True),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=self.token_ids("eos_token_id", 1),
            quantization=quantization,
            int8_attention=self.layer_numbers(INT8_ATTENTION),
        )
        if not self.problems:
            self.problems += _inconsistencies(config)
        return config

    def both_ropes(self, max_position_embeddings: int) -> tuple[RopeConfig, RopeConfig | None]:
        """Read the RoPE of all layers, and in DeepSeek-V4 that of layers with compressed positions, which
        alone is stretched."""
        if self.family.attention != "window":
            return self.rope_config(max_position_embeddings), None
        spelled = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        main, compressed = v4_ropes(spelled, self.problems)
        return (
            self.rope_of(main, "rope_theta", 10000.0, max_position_embeddings),
            self.rope_of(compressed, "compress_rope_theta", 160000.0, max_position_embeddings),
        )

    def rope_of(
        self, spelled: dict[str, Any], key: str, theta: float, max_position_embeddings: int
    ) -> RopeConfig:
        """Read one of several RoPEs, whose base is in it, or outside as `key`."""
        raw: dict[str, Any] = {"rope_scaling": spelled}
        if spelled.get("rope_theta") is None:
            raw["rope_theta"] = self.number(key, theta, above=1)
        reader = _ConfigReader(raw, problems=self.problems)
        reader.family = self.family
        return reader.rope_config(max_position_embeddings)

    def rope_config(self, max_position_embeddings: int) -> RopeConfig:
        """Read RoPE in either spelling."""
        rope = self.rope
        self.same("rope_theta", rope, "rope_theta")
        theta_owner = rope if rope.raw.get("rope_theta") is not None else self
        theta = theta_owner.number("rope_theta", 10000.0, above=1)
        for owner in (self, rope) if self.family.partial_rotary is None else ():
            owner.only("partial_rotary_factor", 1.0)
        kinds = {
            key: ROPE_KINDS.get(str(rope.raw[key]).lower(), rope.raw[key])
            for key in ("rope_type", "type")
            if rope.raw.get(key) is not None
        }
        found = list(kinds.values())
        kind = found[0] if found else "default"
        is_scaled = rope.raw.get("factor") not in (None, 1)
        if kind == "linear" and not is_scaled:
            kind = "default"
        if kind not in ("default", "yarn"):
            self.problems.append(
                f"{rope.prefix}rope_type {abridged(kind)} is not supported (only default and yarn are)"
            )
        elif any(other != kind for other in found[1:]):
            self.problems.append(f"{rope.prefix}type {abridged(found[1])} contradicts its rope_type {kind}")
        elif not found and is_scaled:
            self.problems.append(f"{rope.prefix}rope_type is missing beside a factor (use yarn, or default)")
        elif kind == "yarn":
            return RopeConfig(theta=theta, yarn=self.yarn_config(rope, max_position_embeddings))
        return RopeConfig(theta=theta)

    def yarn_config(self, rope: Reader, max_position_embeddings: int) -> YarnConfig:
        """Read YaRN's numbers; the original context may stand outside the RoPE object, where it wins."""
        key = "original_max_position_embeddings"
        given = {name: value for name, value in rope.raw.items() if value is not None}
        if isinstance(factor := given.get("factor"), int | float) and factor < 1:
            self.problems.append(f"{rope.prefix}factor must be 1 or more, found {abridged(factor)}")
        owner = self if self.raw.get(key) is not None else Reader(given, rope.prefix, self.problems)
        original = owner.integer(key, max_position_embeddings)
        for name in ("attn_factor", "extrapolation_factor"):
            rope.only(name, 1)
        for name in ("beta_fast", "beta_slow"):  # 0 is as good as absent to transformers
            if given.get(name) == 0:
                del given[name]
        if "factor" not in rope.raw:
            self.problems.append(f"{rope.prefix}factor is missing")
        optional = Reader(given, rope.prefix, self.problems)
        fast = optional.number("beta_fast", 32.0, above=0)
        slow = optional.number("beta_slow", 1.0, above=0)
        if slow > fast:
            self.problems.append(f"{rope.prefix}beta_slow ({slow:g}) must not exceed beta_fast ({fast:g})")
        return YarnConfig(
            factor=optional.number("factor", max(max_position_embeddings / original, 1e-9), above=0),
            original_max_position_embeddings=original,
            beta_fast=fast,
            beta_slow=slow,
            mscale=optional.number("mscale", 0.0),
            mscale_all_dim=optional.number("mscale_all_dim", 0.0),
            attention_factor=optional.number("attention_factor", 1.0)
            if "attention_factor" in given
            else None,
            truncate=rope.boolean("truncate", True),
        )


def _inconsistencies(config: ModelConfig) -> list[str]:
    """List contradictions between a model's fields, one phrase each."""
    problems = []
    if config.qk_rope_head_dim % 2:
        problems.append(f"qk_rope_head_dim must be even, found {config.qk_rope_head_dim}")
    num_moe_layers = config.num_moe_layers + config.num_nextn_predict_layers
    if num_moe_layers * config.n_routed_experts > MAX_EXPERTS:
        problems.append(
            f"layers with experts ({num_moe_layers}, MTP's included) x n_routed_experts "
            f"({config.n_routed_experts}) must not exceed {MAX_EXPERTS}"
        )
    if max(config.int8_attention, default=-1) >= config.num_layers_with_mtp:
        problems.append(
            f"{INT8_ATTENTION} names layer {max(config.int8_attention)}, "
            f"but there are {config.num_layers_with_mtp} layers with MTP's"
        )
    if config.int8_attention and config.attention != "mla":
        problems.append(f"{INT8_ATTENTION} is for MLA, and this is {config.attention.upper()}")
    if not any(config.is_moe(layer_idx) for layer_idx in range(config.num_layers_with_mtp)):
        return problems
    if config.n_routed_experts % config.n_group:
        problems.append(
            f"n_routed_experts ({config.n_routed_experts}) must be divisible by n_group ({config.n_group})"
        )
    elif config.experts_per_group < config.best_of_group:
        problems.append(
            f"each group needs {config.best_of_group} routed experts or more, found n_routed_experts "
            f"{config.n_routed_experts} in n_group {config.n_group}"
        )
    if config.topk_group > config.n_group:
        problems.append(f"topk_group ({config.topk_group}) must not exceed n_group ({config.n_group})")
    elif config.num_experts_per_tok > config.topk_group * config.experts_per_group:
        problems.append(
            f"num_experts_per_tok ({config.num_experts_per_tok}) must not exceed "
            f"topk_group x experts per group ({config.topk_group} x {config.experts_per_group})"
        )
    return problems


# How many dies may share the heads of a model, and how: tensor parallelism in words, without arrays.

TPMode: TypeAlias = Literal["tp", "sp-tp-sp"]
ShardMode: TypeAlias = Literal["tp", "sp-tp-sp", "o-proj"]  # see model/sharding.py
TP_SIZES = (1, 2, 4, 8)  # divisors of canonical.TP_BLOCKS


def tp_sizes(config: ModelConfig, mode: TPMode) -> list[int]:
    """List the TP group sizes allowed by the model's heads, and by its dense layers where they are cut. Dies
    do not share DeepSeek-V4's streams."""
    if config.v4 is not None:
        return [1]
    cuts_mlp = mode == "tp" and config.num_moe_layers < config.num_hidden_layers
    return [
        tp
        for tp in TP_SIZES
        if not config.num_attention_heads % tp and not (cuts_mlp and config.intermediate_size % tp)
    ]
