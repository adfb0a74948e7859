"""The table of a model's tensors: what a checkpoint calls them, and what becomes of them on a die.

A row is one *prepared* array: one or several tensors of the checkpoint in the form that kernels want. Rows
stand in the order of the checkpoint, in which arrays lie in a die's memory, too:

    name       of the prepared array, from its layer's name on; DeepSeek's own code calls most of them so
    modules    the checkpoint's modules behind it, from their layer's name on, one below the other ({} stands
               for a routed expert's number)
    stored     the shape of each module's tensor, [out, in] if it is a matrix
    kind       int8    a linear layer that the int8 recipe quantises, one scale per output channel (what
                       xDeepServe 4.7 names: latent, query and output projections and all MLPs)
               linear  one that no recipe quantises
               matrix  a bare matrix that no recipe quantises: the router's, and those that each head holds
               plain   float32 as it is: norms, biases, embeddings
    cut        what tensor parallelism cuts: heads (also in SP-TP-SP), outputs or inputs (sharding.py)
    when       whether a model has it at all
    arrange    puts rows [out, in] in the order of the kernels; `arranged` is the shape then, if another one

Arrays of routed experts are called `experts.*`, and are stacked on a leading axis; those of the shared expert
are called `shared.*`. An expert die holds either, all else belongs to attention dies. Everything that
needs a list of tensors takes it from here: what a checkpoint must hold and how many parameters that is
(checkpoint.py), seeded weights (seeded.py), preparing, packing and assembling (weights.py), tensor
parallelism (sharding.py), what is quantised and under which name it is read (quant/), addresses in lockstep.

How to add a weight, in three places:

    1. here: a row in a table, and a field of `Layer` with the row's name
    2. reference.py: the equation that reads it
    3. engine/programs/layers.py: the stage that reads it on a die

How to add a model family: a table of its own beside `ATTENTION` (grouped-query attention: `wq`, `wk`, `wv`
and `wo`, with `parameter="bias"` in rows of their biases), fields of `Layer` for what is new, and the choice
in `layer_tensors`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig

Kind: TypeAlias = Literal["int8", "linear", "matrix", "plain"]
Cut: TypeAlias = Literal["whole", "heads", "outputs", "inputs"]
Shape: TypeAlias = tuple[int, ...]
ShapeOf: TypeAlias = Callable[[ModelConfig], Shape]


class Tensor(NamedTuple):
    """A row; see above. `gain` is the outputs' deviation in seeded models for inputs of deviation 1."""

    name: str
    modules: tuple[str, ...]
    stored: ShapeOf
    kind: Kind = "plain"
    cut: Cut = "whole"
    when: Callable[[ModelConfig], bool] = lambda c: True
    arrange: Callable[[ModelConfig, Array], Array] = lambda c, w: w
    arranged: ShapeOf | None = None
    parameter: str = "weight"
    gain: float = 1.0

    @property
    def is_routed(self) -> bool:
        return self.name.startswith("experts.")

    def shape(self, config: ModelConfig) -> Shape:
        """Of the prepared array in float32, of one expert if routed: [..., in, out] if it is a matrix."""
        if self.kind == "plain":
            return self.stored(config)
        out, width = self.stored(config)
        arranged = self.arranged or (lambda c: (out * len(self.modules), width))
        *heads, out, width = arranged(config)
        return (*heads, width, out)

    def sources(self, source: str, expert: int | None) -> list[str]:
        """The full names of its modules in layer `source`."""
        return [source + module.format(expert) for module in self.modules]


# ---- rows in the order of the kernels ------------------------------------------------------------------


def _interleaved(c: ModelConfig, w: Array) -> Array:
    """RoPE rows w [..., R, K] of a half-split checkpoint, put into neighbouring pairs."""
    if c.rope_interleave:
        return w
    half = w.shape[-2] // 2
    return np.stack([w[..., :half, :], w[..., half:, :]], axis=-2).reshape(w.shape)


def _queries(c: ModelConfig, w: Array) -> Array:
    """The query projection [N * (nope + R), K]."""
    by_head = w.reshape(c.num_attention_heads, c.qk_head_dim, -1)
    still, turned = np.split(by_head, [c.qk_nope_head_dim], axis=1)
    return np.concatenate([still, _interleaved(c, turned)], axis=1).reshape(w.shape)


def _latents(c: ModelConfig, w: Array) -> Array:
    """The projection to the cache, [C + R, H]."""
    return np.concatenate([w[: c.kv_lora_rank], _interleaved(c, w[c.kv_lora_rank :])])


def _by_head(c: ModelConfig, w: Array) -> Array:
    """kv_b_proj as [N, nope + V, C]."""
    return w.reshape(c.num_attention_heads, -1, c.kv_lora_rank)


# ---- the tables ----------------------------------------------------------------------------------------


def _norm(name: str, module: str) -> Tensor:
    return Tensor(name, (module,), lambda c: (c.hidden_size,))


def _mlp(name: str, module: str, width: Callable[[ModelConfig], int], is_cut: bool = False) -> list[Tensor]:
    """Gate and up projection side by side, [H, 2I], and the down projection, [I, H]."""
    outputs: Cut = "outputs" if is_cut else "whole"
    inputs: Cut = "inputs" if is_cut else "whole"
    gate_up = (f"{module}.gate_proj", f"{module}.up_proj")
    return [
        Tensor(f"{name}.w13", gate_up, lambda c: (width(c), c.hidden_size), "int8", outputs),
        Tensor(f"{name}.w2", (f"{module}.down_proj",), lambda c: (c.hidden_size, width(c)), "int8", inputs),
    ]


def _has_query_latent(c: ModelConfig) -> bool:
    return c.q_lora_rank is not None


ATTENTION = [
    _norm("attn_norm", "input_layernorm"),
    Tensor(
        "wq_a",
        ("self_attn.q_a_proj",),
        lambda c: (c.q_lora_rank or 0, c.hidden_size),
        "int8",
        when=_has_query_latent,
    ),
    Tensor("q_norm", ("self_attn.q_a_layernorm",), lambda c: (c.q_lora_rank or 0,), when=_has_query_latent),
    Tensor(
        "wq_b",
        ("self_attn.q_b_proj",),
        lambda c: (c.num_attention_heads * c.qk_head_dim, c.q_lora_rank or 0),
        "int8",
        "heads",
        when=_has_query_latent,
        arrange=_queries,
        gain=1.5,
    ),
    Tensor(
        "wq_b",
        ("self_attn.q_proj",),
        lambda c: (c.num_attention_heads * c.qk_head_dim, c.hidden_size),
        "int8",
        "heads",
        when=lambda c: not _has_query_latent(c),
        arrange=_queries,
        gain=1.5,
    ),
    Tensor(
        "wkv_a",
        ("self_attn.kv_a_proj_with_mqa",),
        lambda c: (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        "int8",
        arrange=_latents,
    ),
    Tensor("kv_norm", ("self_attn.kv_a_layernorm",), lambda c: (c.kv_lora_rank,)),
    # The halves of kv_b_proj. A head's keys go into its query; its values come out of what it attended to.
    Tensor(
        "w_uk",
        ("self_attn.kv_b_proj",),
        lambda c: (c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "matrix",
        "heads",
        arrange=lambda c, w: _by_head(c, w)[:, : c.qk_nope_head_dim].swapaxes(1, 2),
        arranged=lambda c: (c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim),
    ),
    Tensor(
        "w_uv",
        ("self_attn.kv_b_proj",),
        lambda c: (c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "matrix",
        "heads",
        arrange=lambda c, w: _by_head(c, w)[:, c.qk_nope_head_dim :],
        arranged=lambda c: (c.num_attention_heads, c.v_head_dim, c.kv_lora_rank),
    ),
    Tensor(
        "wo",
        ("self_attn.o_proj",),
        lambda c: (c.hidden_size, c.num_attention_heads * c.v_head_dim),
        "int8",
        "inputs",
    ),
    _norm("ffn_norm", "post_attention_layernorm"),
]
DENSE = _mlp("mlp", "mlp", lambda c: c.intermediate_size, is_cut=True)
MOE = [
    Tensor("gate", ("mlp.gate",), lambda c: (c.n_routed_experts, c.hidden_size), "matrix", gain=1.5),
    Tensor("bias", ("mlp.gate",), lambda c: (c.n_routed_experts,), parameter="e_score_correction_bias"),
    *_mlp("experts", "mlp.experts.{}", lambda c: c.moe_intermediate_size),
    *(
        row._replace(when=lambda c: bool(c.n_shared_experts))
        for row in _mlp(
            "shared", "mlp.shared_experts", lambda c: c.n_shared_experts * c.moe_intermediate_size
        )
    ),
]
MTP_LAYER = [  # what an MTP layer has behind its decoder layer
    Tensor("embed", ("embed_tokens",), lambda c: (c.vocab_size, c.hidden_size)),
    _norm("enorm", "enorm"),
    _norm("hnorm", "hnorm"),
    Tensor("eh_proj", ("eh_proj",), lambda c: (c.hidden_size, 2 * c.hidden_size), "linear"),
    _norm("norm", "shared_head.norm"),
    Tensor("head", ("shared_head.head",), lambda c: (c.vocab_size, c.hidden_size), "linear"),
]
BEFORE_LAYERS = [Tensor("embed", ("model.embed_tokens",), lambda c: (c.vocab_size, c.hidden_size))]
BEHIND_LAYERS = [
    _norm("norm", "model.norm"),
    Tensor("head", ("lm_head",), lambda c: (c.vocab_size, c.hidden_size), "linear"),
]


@functools.lru_cache(maxsize=64)
def layer_tensors(config: ModelConfig, is_moe: bool) -> tuple[Tensor, ...]:
    """The rows of a decoder layer."""
    return tuple(row for row in (*ATTENTION, *(MOE if is_moe else DENSE)) if row.when(config))


class Section(NamedTuple):
    """Rows, and what goes before their names: of prepared arrays, and of the checkpoint's modules."""

    prefix: str
    source: str
    rows: tuple[Tensor, ...]

    def arrays(self, config: ModelConfig) -> Iterator[tuple[Tensor, int | None]]:
        """Each row, those of routed experts once for each expert; and its number."""
        for is_routed, group in itertools.groupby(self.rows, key=lambda row: row.is_routed):
            rows = list(group)
            for expert in range(config.n_routed_experts) if is_routed else (None,):
                yield from ((row, expert) for row in rows)


BEFORE_SECTION, BEHIND_SECTION = Section("", "", tuple(BEFORE_LAYERS)), Section("", "", tuple(BEHIND_LAYERS))


def layer_section(config: ModelConfig, layer_idx: int) -> Section:
    """A decoder layer; MTP's follow the main ones."""
    depth = layer_idx - config.num_hidden_layers
    prefix = f"layers.{layer_idx}." if depth < 0 else f"mtp.{depth}.layer."
    return Section(prefix, f"model.layers.{layer_idx}.", layer_tensors(config, config.is_moe(layer_idx)))


def mtp_section(config: ModelConfig, depth: int) -> Section:
    """What MTP layer `depth` has behind its decoder layer."""
    return Section(f"mtp.{depth}.", f"model.layers.{config.num_hidden_layers + depth}.", tuple(MTP_LAYER))


def sections(config: ModelConfig, num_mtp: int | None = None) -> Iterator[Section]:
    """A whole model, with its first `num_mtp` MTP layers (default all)."""
    num_main, stored = config.num_hidden_layers, config.num_nextn_predict_layers
    yield BEFORE_SECTION
    yield from (layer_section(config, layer_idx) for layer_idx in range(num_main))
    for depth in range(stored if num_mtp is None else min(num_mtp, stored)):
        yield layer_section(config, num_main + depth)
        yield mtp_section(config, depth)
    yield BEHIND_SECTION


def stored_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face name -> (one of) its rows, of every tensor of the model."""
    return {
        f"{module}.{row.parameter}": row
        for section in sections(config)
        for row, expert in section.arrays(config)
        for module in row.sources(section.source, expert)
    }


# ---- prepared arrays in their structure ----------------------------------------------------------------


class Linear(NamedTuple):
    """A linear layer from k to n features; `scale` is None where it is not quantised.

    On a die `w` is packed and flat; a stack of experts holds one after the other, its scales too.
    """

    w: Array
    scale: Array | None
    k: int
    n: int


@dataclass(frozen=True)
class MLP:
    w13: Linear  # gate and up projection side by side: [H, 2I]
    w2: Linear  # down projection: [I, H]


@dataclass(frozen=True)
class MoE:
    gate: Array  # [H, E]
    bias: Array  # [E], selects but does not weigh
    experts: MLP | None  # stacked; None on a die that holds none
    shared: MLP | None


@dataclass(frozen=True, kw_only=True)
class Layer:
    attn_norm: Array
    wq_a: Linear | None = None
    q_norm: Array | None = None
    wq_b: Linear  # the whole query projection if there is no wq_a
    wkv_a: Linear
    kv_norm: Array
    w_uk: Array  # [heads, nope, C]: absorbed into the query
    w_uv: Array  # [heads, C, V]: applied to the attended latent
    wo: Linear
    ffn_norm: Array
    mlp: MLP | None
    moe: MoE | None
    int8_attention: bool  # both products of attention are INT8 if the recipe is, see canonical.attention


@dataclass(frozen=True, kw_only=True)
class MTP:
    enorm: Array
    hnorm: Array
    eh_proj: Linear  # [2H, H], never quantised
    layer: Layer
    norm: Array
    embed: Array
    head: Linear


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    embed: Array  # [vocab, H]
    layers: list[Layer]
    norm: Array
    head: Linear  # [H, vocab], never quantised
    cos: Array  # [positions, rope / 2]
    sin: Array
    mtp: list[MTP]  # the layers of multi-token prediction, in order of the token they look ahead to


def find(weights: Layer | MTP, name: str) -> Any:
    """What lies here of the row `name`: a Linear, an array, or None."""
    first, _, rest = name.partition(".")
    owner = weights if hasattr(weights, first) else getattr(weights, "moe", None)
    found = getattr(owner, first, None)
    return getattr(found, rest, None) if rest else found
