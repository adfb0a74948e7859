"""The table of a model's tensors: what a checkpoint calls them, and what becomes of them on a die. Those of
attention stand in attention_tables.py, what a row is made of in tensor_row.py.

A row is one *prepared* array: one or several tensors of the checkpoint in the form that kernels want. Rows
stand in the order of the checkpoint, in which arrays lie in a die's memory, too:

    name       of the prepared array, from its layer's name on; DeepSeek's own code calls most of them so
    modules    the checkpoint's modules behind it, from their layer's name on, one below the other ({} stands
               for a routed expert's number)
    stored     the shape of each module's tensor, [out, in] if it is a matrix (see `sizes`); a row with a size
               of 0 is not there
    kind       int8    a linear layer that the int8 recipe quantises, one scale per output channel (what
                       xDeepServe 4.7 names: latent, query and output projections and all MLPs)
               linear  one that no recipe quantises, but rounds to BF16 in the int8 recipe
               matrix  a bare matrix, for which the same holds: those that each head holds
               router  a bare matrix that stays float32
               plain   float32 as it is: norms, biases, embeddings
    cut        what tensor parallelism cuts: heads (also in SP-TP-SP), outputs or inputs (sharding.py)
    arrange    puts [out, in] in the order of the kernels; the shape is `arranged` then, if that is another
    parameter  the module's tensor, if not its weight
    gain       in seeded models, the outputs' deviation for inputs of deviation 1

Arrays of routed experts are called `experts.*`, and are stacked on a leading axis; those of the shared expert
are called `shared.*`. An expert die holds either; all else belongs to dies with attention. Every list of
tensors comes from here: a checkpoint's required tensors and number of parameters (checkpoint.py), seeded
weights (seeded.py), preparing, packing and assembling (weights.py), tensor parallelism (sharding.py), names
and sizes for the quantiser (quant/), addresses in lockstep.

How to add a weight, in three places:

    1. here: a row in a table (and a letter in `sizes` for a new size), and a field of `Layer` of its name
    2. reference.py: the equation that reads it
    3. step/attention.py or feed.py: the stage that reads it on a die; where all dies run in lockstep, kernels
       find it in a column of LINEARS or VECTORS (engine/run/lockstep/kernels/attention.py)

Everything else follows. A weight to be rounded by `xdeepserve quantize` also needs an entry in
quant/layer_quantizer.py, with its inputs.

How to add a model family: a row in families.py. A kind of attention that no other has needs a table of its
own in attention_tables.py (with `parameter="bias"` in rows of biases), fields of `Layer` for what is new, in
reference.py a function like `mla`, and its operations in step/layer.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from xdeepserve.model.attention_tables import ATTENTION
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.families import AttentionKind, ExpertNames
from xdeepserve.model.tensor_row import Tensor
from xdeepserve.model.v4 import tables as v4


def _gate_up(mlp: str) -> tuple[str, str]:
    return f"{mlp}.gate_proj", f"{mlp}.up_proj"


DENSE = (
    Tensor("mlp.w13", _gate_up("mlp"), "I H", "int8", "outputs"),
    Tensor("mlp.w2", ("mlp.down_proj",), "H I", "int8", "inputs"),
)
MOE = (
    Tensor("gate", ("mlp.gate",), "E H", "router", gain=1.5),
    Tensor("bias", ("mlp.gate",), "B", parameter="e_score_correction_bias"),
    Tensor("experts.w13", _gate_up("mlp.experts.{}"), "M H", "int8"),
    Tensor("experts.w2", ("mlp.experts.{}.down_proj",), "H M", "int8"),
    Tensor("shared.w13", _gate_up("mlp.shared_experts"), "S H", "int8"),
    Tensor("shared.w2", ("mlp.shared_experts.down_proj",), "H S", "int8"),
)
MIXTRAL_MOE = (
    Tensor("gate", ("block_sparse_moe.gate",), "E H", "router", gain=1.5),
    Tensor("bias", ("block_sparse_moe",), "B", parameter="e_score_correction_bias"),
    Tensor(
        "experts.w13",
        ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "M H",
        "int8",
    ),
    Tensor("experts.w2", ("block_sparse_moe.experts.{}.w2",), "H M", "int8"),
)
EXPERTS: dict[ExpertNames, tuple[Tensor, ...]] = {"deepseek": MOE, "mixtral": MIXTRAL_MOE, "v4": v4.MOE}
MTP_LAYER = (  # what an MTP layer has behind its decoder layer
    Tensor("embed", ("embed_tokens",), "vocab H"),
    Tensor("enorm", ("enorm",), "H"),
    Tensor("hnorm", ("hnorm",), "H"),
    Tensor("eh_proj", ("eh_proj",), "H 2H", "linear"),
    Tensor("norm", ("shared_head.norm",), "H"),
    Tensor("head", ("shared_head.head",), "vocab H", "linear"),
)
EMBEDDING = (Tensor("embed", ("model.embed_tokens",), "vocab H"),)
HEAD = (Tensor("norm", ("model.norm",), "H"), Tensor("head", ("lm_head",), "vocab H", "linear"))


@functools.lru_cache(maxsize=256)
def layer_tensors(config: ModelConfig, layer_idx: int) -> tuple[Tensor, ...]:
    """List the rows present in a decoder layer."""
    feed = EXPERTS[config.expert_names] if config.is_moe(layer_idx) else DENSE
    if config.v4 is not None and layer_idx in config.v4.hash_layers:
        feed = v4.HASH_MOE
    rows = (*ATTENTION[config.attention_of(layer_idx)], *feed)
    return tuple(row for row in rows if all(row.stored_shape(config)))


class Section(NamedTuple):
    """Rows with the prefixes of their names: of prepared arrays, and of the checkpoint's modules."""

    prefix: str
    source: str
    rows: tuple[Tensor, ...]

    def arrays(self, config: ModelConfig, only: int | None = None) -> Iterator[tuple[Tensor, int | None]]:
        """Yield each row with None, and rows of routed experts once per expert with its number; or only those
        of expert `only`."""
        if only is not None:
            yield from ((row, only) for row in self.rows if row.is_routed)
            return
        for is_routed, group in itertools.groupby(self.rows, key=lambda row: row.is_routed):
            rows = list(group)
            for expert in range(config.n_routed_experts) if is_routed else (None,):
                yield from ((row, expert) for row in rows)


def layer_section(config: ModelConfig, layer_idx: int) -> Section:
    """Return the section of a decoder layer; MTP's follow the main ones."""
    depth = layer_idx - config.num_hidden_layers
    prefix = f"layers.{layer_idx}." if depth < 0 else f"mtp.{depth}.layer."
    return Section(prefix, f"model.layers.{layer_idx}.", layer_tensors(config, layer_idx))


def mtp_section(config: ModelConfig, depth: int) -> Section:
    """Return the rows of MTP layer `depth` behind its decoder layer."""
    rows = MTP_LAYER if config.v4 is None else v4.MTP_LAYER
    return Section(f"mtp.{depth}.", f"model.layers.{config.num_hidden_layers + depth}.", rows)


def head_section(config: ModelConfig) -> Section:
    """Return the section of norm and head."""
    return Section("", "", HEAD if config.v4 is None else v4.HEAD)


def sections(config: ModelConfig, num_mtp: int | None = None) -> Iterator[Section]:
    """Yield all sections of a model, with its first `num_mtp` MTP layers (default all)."""
    num_main, stored = config.num_hidden_layers, config.num_nextn_predict_layers
    yield Section("", "", EMBEDDING)
    yield from (layer_section(config, layer_idx) for layer_idx in range(num_main))
    for depth in range(stored if num_mtp is None else min(num_mtp, stored)):
        yield layer_section(config, num_main + depth)
        yield mtp_section(config, depth)
    yield head_section(config)


def stored_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Return the table's row for every tensor of the model, by Hugging Face name; a tensor in several rows
    gets one of them."""
    return {
        f"{module}.{row.parameter}": row
        for section in sections(config)
        for row, expert in section.arrays(config)
        for module in row.sources(section.source, expert)
    }


# ---- prepared arrays in their structure ----------------------------------------------------------------


def _no_heads() -> Array:
    return np.empty((0, 0, 0), np.float32)


class Linear(NamedTuple):
    """Linear layer from k to n features; `scale` is None where it is not quantised.

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
    bias: Array  # [E], selects but does not weigh; [0] without one
    experts: MLP | None  # stacked; None on a die that holds none
    shared: MLP | None
    by_token: Array | None = None  # [vocab, K], each token's experts where its id alone decides; no bias then


_KINDS: dict[Hashable, int] = {}


class Weights:
    """Weights that stages are priced by: those of one `kind` cost the same, whatever is in their arrays."""

    @cached_property
    def kind(self) -> int:
        """Number of the shapes and forms of all tensors, equal for equal ones."""
        return _KINDS.setdefault(_form(self), len(_KINDS))


def _form(part: Any) -> Hashable:
    """Return all that a cost may depend on in a part of a layer."""
    if isinstance(part, Linear):
        return part.k, part.n, part.scale is None
    if isinstance(part, np.ndarray):
        return part.shape
    return tuple(_form(getattr(part, each.name)) for each in fields(part)) if is_dataclass(part) else part


@dataclass(frozen=True)
class Held(Weights):
    """Parts of a layer on a die with only experts."""

    experts: MLP | None  # stacked
    shared: MLP | None


@dataclass(frozen=True, kw_only=True)
class Layer(Weights):
    attention: AttentionKind
    attn_norm: Array
    wq_a: Linear | None = None
    q_norm: Array | None = None  # of the query's latent; in GQA of each head's query, or of wq_a's outputs
    wq_b: Linear | None = None  # the whole query projection if there is no wq_a; one of them there is
    wkv_a: Linear  # what the cache is made of: a latent and a RoPE key; or all heads' keys, then their values
    kv_norm: Array | None = None  # of the latent, which always has one; in GQA of each head's key, or of all
    bq: Array | None = None  # biases of GQA's queries, keys and values
    bk: Array | None = None
    bv: Array | None = None
    w_uk: Array = field(default_factory=_no_heads)  # MLA's [heads, nope, C]: absorbed into the query
    w_uv: Array = field(default_factory=_no_heads)  # MLA's [heads, C, V]: applied to the attended latent
    index_wq: Array | None = None  # the indexer's [Q, heads * X], from the query's latent
    index_wk: Array | None = None  # [H, X]; its keys are in the cache, too
    index_norm: Array | None = None
    index_bias: Array | None = None
    index_gate: Array | None = None  # [H, heads]: what each head's score counts
    wo: Linear
    ffn_norm: Array
    # DeepSeek-V4 (v4/): hyper-connections of both halves, attention's sinks, each group's first output
    # projection, and what compresses positions to entries, of the cache and of the indexer
    hc_attn_fn: Array | None = None
    hc_attn_base: Array | None = None
    hc_attn_scale: Array | None = None
    hc_ffn_fn: Array | None = None
    hc_ffn_base: Array | None = None
    hc_ffn_scale: Array | None = None
    sinks: Array | None = None
    wo_a: Array | None = None
    entry_kv: Array | None = None
    entry_gate: Array | None = None
    entry_ape: Array | None = None
    entry_norm: Array | None = None
    index_entry_kv: Array | None = None
    index_entry_gate: Array | None = None
    index_entry_ape: Array | None = None
    index_entry_norm: Array | None = None
    mlp: MLP | None
    moe: MoE | None
    int8_attention: bool  # both products of attention are INT8 if the recipe is, see canonical.attention


@dataclass(frozen=True, kw_only=True)
class MTP:
    enorm: Array
    hnorm: Array
    eh_proj: Linear | None = None  # [2H, H], never quantised; DeepSeek-V4 has two of [H, H]
    e_proj: Linear | None = None
    h_proj: Linear | None = None
    hc_head_fn: Array | None = None  # what each of DeepSeek-V4's streams counts in the row before the norm
    hc_head_base: Array | None = None
    hc_head_scale: Array | None = None
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
    compress_cos: Array | None = None  # the same of layers with compressed positions
    compress_sin: Array | None = None
    hc_head_fn: Array | None = None
    hc_head_base: Array | None = None
    hc_head_scale: Array | None = None
    mtp: list[MTP]  # the layers of multi-token prediction, in order of the token they look ahead to

    @property
    def tables(self) -> list[Array]:
        """RoPE's cos and sin, and then those of layers with compressed positions, if there are any."""
        both = (self.cos, self.sin, self.compress_cos, self.compress_sin)
        return [table for table in both if table is not None]


def find(weights: Layer | MTP | ModelWeights, name: str) -> Any:
    """Find the weights of the row `name`: a Linear, an array, or None."""
    first, _, rest = name.partition(".")
    owner = weights if hasattr(weights, first) else getattr(weights, "moe", None)
    found = getattr(owner, first, None)
    return getattr(found, rest, None) if rest else found
