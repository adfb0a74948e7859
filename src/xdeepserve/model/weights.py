"""Weights in the form the arithmetic wants, made from a Hugging Face checkpoint one tensor at a time.

A checkpoint stores every linear layer as [out, in]. A recipe decides what lies in a die's memory:

    fp32   w float32 [in, out]                      SIMD runs across outputs
    int8   w int8 [out, in] and scale float32 [out] one scale per output channel

The INT8 recipe quantises what xDeepServe 4.7 names (wq_a, wq_b, wkv_a, wo and all MLPs); embedding, head,
norms, gate, the absorbed halves of kv_b_proj and the MTP projection stay float32 (if the files have the
matrices among them in BF16, dies hold them so, too: the same numbers in half the room). A checkpoint that is
stored in INT8 brings its own integers and scales, and may keep some layers in floating point; those stay so
(but for routed experts: what dispatch carries to them is INT8). From any other checkpoint weights are rounded
to the nearest. Latents in the cache are INT8, and so is attention's first product; so is its second one in
layers that `xdeepserve quantize` found to bear it (`ModelConfig.int8_attention`).

The reference computes on these arrays as they are. A die holds the matrices *packed* (packing.py), in the
order in which its kernels read them: `fill` packs on the way, once per array.

Names follow DeepSeek's own code (`wq_a`, `wkv_b`, ...). Routed experts of a layer are stacked on a leading
axis, so a die that holds a subset of them holds a shorter stack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from xdeepserve.errors import CheckpointError
from xdeepserve.model.canonical import Array, quantize_rows
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.packing import pack_bf16, pack_f32, pack_int8, packed_shape_f32, packed_shape_int8
from xdeepserve.model.rope import rope_tables
from xdeepserve.model.sharding import WHOLE, Shard

Recipe = Literal["fp32", "int8"]
RECIPES: tuple[Recipe, ...] = ("fp32", "int8")


class Source(Protocol):
    """Where tensors come from: a checkpoint directory or a preset."""

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> Array: ...

    def int8(self, module: str) -> tuple[Array, Array] | None: ...


class Spec(NamedTuple):
    """Shape and dtype of one prepared array; `is_matrix`: its last two axes are a GEMM's weights, which a die
    holds in BF16 if `is_bf16`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_matrix: bool = False
    is_bf16: bool = False

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the array as a die holds it."""
        if not self.is_matrix:
            return self.shape
        *stack, rows, columns = self.shape
        if self.dtype == np.int8:
            return (*stack, *packed_shape_int8(k=columns, n=rows))
        return (*stack, *packed_shape_f32(k=rows, n=columns))

    @property
    def packed_dtype(self) -> np.dtype:
        if not self.is_matrix:
            return self.dtype
        return np.dtype(np.uint8 if self.dtype == np.int8 else np.uint16 if self.is_bf16 else np.float32)

    @property
    def prepared_nbytes(self) -> int:
        """Bytes before packing."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes on a die."""
        return int(np.prod(self.packed_shape)) * self.packed_dtype.itemsize

    def pack(self, array: Array) -> Array:
        """An array of this spec (or one of its stack) as a die holds it."""
        if not self.is_matrix:
            return array
        if self.dtype == np.int8:
            return pack_int8(array)
        return pack_bf16(array) if self.is_bf16 else pack_f32(array)


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


@dataclass(frozen=True)
class Layer:
    attn_norm: Array
    wq_a: Linear | None
    q_norm: Array | None
    wq_b: Linear  # the whole query projection if there is no wq_a
    wkv_a: Linear
    kv_norm: Array
    w_uk: Array  # [heads, nope, C]: absorbed into the query
    w_uv: Array  # [heads, C, V]: applied to the attended latent
    wo: Linear
    ffn_norm: Array
    mlp: MLP | None
    moe: MoE | None
    int8_attention: bool = (
        False  # both products of attention are INT8 if the recipe is, see canonical.attention
    )


@dataclass(frozen=True)
class MTP:
    enorm: Array
    hnorm: Array
    eh_proj: Linear  # [2H, H], never quantised
    layer: Layer
    norm: Array
    embed: Array
    head: Linear


@dataclass(frozen=True)
class ModelWeights:
    embed: Array  # [vocab, H]
    layers: list[Layer]
    norm: Array
    head: Linear  # [H, vocab], never quantised
    cos: Array  # [positions, rope / 2]
    sin: Array
    mtp: list[MTP]  # the layers of multi-token prediction, in order of the token they look ahead to


# The checkpoint's linear layers behind each prepared one, from their layer's name on.
MODULES = {
    "wq_a": ("self_attn.q_a_proj",),
    "wq_b": ("self_attn.q_b_proj", "self_attn.q_proj"),
    "wkv_a": ("self_attn.kv_a_proj_with_mqa",),
    "wo": ("self_attn.o_proj",),
    "mlp.w13": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.w2": ("mlp.down_proj",),
    "shared.w13": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared.w2": ("mlp.shared_experts.down_proj",),
}


def _is_kept_float(c: ModelConfig, source: str, name: str) -> bool:
    """Whether the INT8 checkpoint keeps the layer `name` of its layer `source` in floating point."""
    return any(f"{source}.{module}" in c.kept_float for module in MODULES.get(name, ()))


def _is_bf16(c: ModelConfig, is_int8: bool) -> bool:
    """Whether a die holds the matrices in BF16 that are never quantised."""
    return is_int8 and c.has_bf16_matrices


def _linear(name: str, k: int, n: int, is_int8: bool, stack: tuple[int, ...] = ()) -> dict[str, Spec]:
    if not is_int8:
        return {name: Spec((*stack, k, n), np.dtype(np.float32), is_matrix=True)}
    return {
        name: Spec((*stack, n, k), np.dtype(np.int8), is_matrix=True),
        f"{name}.scale": Spec((*stack, n), np.dtype(np.float32)),
    }


def _layer_specs(
    c: ModelConfig, prefix: str, source: str, is_moe: bool, is_int8: bool, experts: int
) -> dict[str, Spec]:
    heads, hidden, rank = c.num_attention_heads, c.hidden_size, c.kv_lora_rank
    qk = c.qk_nope_head_dim + c.qk_rope_head_dim

    def vector(name: str, *shape: int) -> dict[str, Spec]:
        return {prefix + name: Spec(shape, np.dtype(np.float32))}

    def linear(name: str, k: int, n: int, stack: tuple[int, ...] = ()) -> dict[str, Spec]:
        return _linear(prefix + name, k, n, is_int8 and not _is_kept_float(c, source, name), stack)

    def matrix(name: str, *shape: int) -> dict[str, Spec]:
        return {prefix + name: Spec(shape, np.dtype(np.float32), True, _is_bf16(c, is_int8))}

    specs = vector("attn_norm", hidden)
    if c.q_lora_rank is not None:
        specs |= linear("wq_a", hidden, c.q_lora_rank) | vector("q_norm", c.q_lora_rank)
    specs |= linear("wq_b", c.q_lora_rank or hidden, heads * qk)
    specs |= linear("wkv_a", hidden, rank + c.qk_rope_head_dim) | vector("kv_norm", rank)
    specs |= matrix("w_uk", heads, c.qk_nope_head_dim, rank) | matrix("w_uv", heads, rank, c.v_head_dim)
    specs |= linear("wo", heads * c.v_head_dim, hidden) | vector("ffn_norm", hidden)
    if not is_moe:
        inter = c.intermediate_size
        return specs | linear("mlp.w13", hidden, 2 * inter) | linear("mlp.w2", inter, hidden)
    inter = c.moe_intermediate_size
    specs |= matrix("gate", hidden, c.n_routed_experts) | vector("bias", c.n_routed_experts)
    specs |= linear("experts.w13", hidden, 2 * inter, (experts,))
    specs |= linear("experts.w2", inter, hidden, (experts,))
    if c.n_shared_experts:
        wide = inter * c.n_shared_experts
        specs |= linear("shared.w13", hidden, 2 * wide) | linear("shared.w2", wide, hidden)
    return specs


@functools.lru_cache(maxsize=16)
def weight_specs(
    config: ModelConfig,
    recipe: Recipe,
    num_positions: int,
    num_experts: int | None = None,
    num_mtp: int | None = None,
) -> dict[str, Spec]:
    """Every prepared array of a model, or of one with `num_experts` routed experts per layer and its first
    `num_mtp` MTP layers (default all). All callers share the answer: it is not to be changed."""
    c, is_int8 = config, recipe == "int8"
    experts = c.n_routed_experts if num_experts is None else num_experts
    f32 = np.dtype(np.float32)
    head = Spec((c.hidden_size, c.vocab_size), f32, True, _is_bf16(c, is_int8))
    specs = {
        "embed": Spec((c.vocab_size, c.hidden_size), f32),
        "norm": Spec((c.hidden_size,), f32),
        "cos": Spec((num_positions, c.qk_rope_head_dim // 2), f32),
        "sin": Spec((num_positions, c.qk_rope_head_dim // 2), f32),
        "head": head,
    }
    for i in range(c.num_hidden_layers):
        specs |= _layer_specs(c, f"layers.{i}.", f"model.layers.{i}", c.is_moe(i), is_int8, experts)
    for i in range(_num_mtp(c, num_mtp)):
        name, n = f"mtp.{i}", c.num_hidden_layers + i
        specs |= {f"{name}.{norm}": Spec((c.hidden_size,), f32) for norm in ("enorm", "hnorm", "norm")}
        specs |= {f"{name}.embed": specs["embed"]}
        specs |= {f"{name}.head": head}
        specs |= {f"{name}.eh_proj": head._replace(shape=(2 * c.hidden_size, c.hidden_size))}
        specs |= _layer_specs(c, f"{name}.layer.", f"model.layers.{n}", c.is_moe(n), is_int8, experts)
    return specs


def layer_name(config: ModelConfig, layer_idx: int) -> str:
    """What the arrays of a layer are called before their names; MTP layers follow the main ones."""
    num_main = config.num_hidden_layers
    return f"layers.{layer_idx}" if layer_idx < num_main else f"mtp.{layer_idx - num_main}.layer"


def _num_mtp(config: ModelConfig, wanted: int | None) -> int:
    """How many of the checkpoint's MTP layers are used."""
    stored = config.num_nextn_predict_layers
    return stored if wanted is None else min(wanted, stored)


Prepared = tuple[str, int | None, Array]  # name, routed expert (None: not an expert's), array


class _Finite:
    """A source whose tensors have been looked at: NaN or infinity would spread to every logit."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def tensor(self, name: str) -> Array:
        array = self._source.tensor(name)
        if not np.isfinite(array).all():
            raise CheckpointError(f"tensor {name} has values that are not finite")
        return array

    def int8(self, module: str) -> tuple[Array, Array] | None:
        stored = self._source.int8(module)
        if stored is not None and not np.isfinite(stored[1]).all():
            raise CheckpointError(f"tensor {module}.weight_scale has values that are not finite")
        return stored


class _Preparer:
    """Turns checkpoint tensors into prepared arrays of one recipe."""

    def __init__(self, source: Source, recipe: Recipe) -> None:
        self.source, self.c, self.is_int8 = _Finite(source), source.config, recipe == "int8"

    def linear(self, name: str, w: Array) -> Iterator[Prepared]:
        """Prepare w [out, in], which no recipe quantises."""
        yield name, None, np.ascontiguousarray(w.T)

    def quantized(
        self,
        name: str,
        modules: Sequence[str],
        expert: int | None = None,
        is_kept_float: bool = False,
        arrange: Callable[[Array], Array] = lambda w: w,
    ) -> Iterator[Prepared]:
        """Prepare the weights [out, in] of `modules`, one below the other, rows in the order of `arrange`."""
        if self.is_int8 and not is_kept_float:
            stored = [self.source.int8(module) for module in modules]
            if all(pair is not None for pair in stored):
                q, scale = (
                    np.concatenate(parts) for parts in zip(*(pair for pair in stored if pair), strict=True)
                )
                q, scale = arrange(q), arrange(scale)[:, 0]
            else:
                q, scale = quantize_rows(arrange(self.stacked(modules)))
            yield name, expert, q
            yield f"{name}.scale", expert, scale
        else:
            yield name, expert, np.ascontiguousarray(arrange(self.stacked(modules)).T)

    def stacked(self, modules: Sequence[str]) -> Array:
        weights = [self.source.tensor(f"{module}.weight") for module in modules]
        return weights[0] if len(weights) == 1 else np.concatenate(weights)

    def mlp(
        self, name: str, source: str, expert: int | None = None, kept: tuple[bool, bool] = (False, False)
    ) -> Iterator[Prepared]:
        yield from self.quantized(
            f"{name}.w13", (f"{source}.gate_proj", f"{source}.up_proj"), expert, kept[0]
        )
        yield from self.quantized(f"{name}.w2", (f"{source}.down_proj",), expert, kept[1])

    def interleaved(self, w: Array) -> Array:
        """Put the RoPE rows w [..., rope, K] of a half-split checkpoint into neighbouring pairs."""
        if self.c.rope_interleave:
            return w
        half = w.shape[-2] // 2
        return np.stack([w[..., :half, :], w[..., half:, :]], axis=-2).reshape(w.shape)

    def layer(self, name: str, source: str, is_moe: bool) -> Iterator[Prepared]:
        c = self.c
        heads, nope, rank = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank

        def get(tensor: str) -> Array:
            return self.source.tensor(f"{source}.{tensor}.weight")

        def linear(
            part: str, module: str, arrange: Callable[[Array], Array] = lambda w: w
        ) -> Iterator[Prepared]:
            kept = _is_kept_float(c, source, part)
            yield from self.quantized(f"{name}.{part}", (f"{source}.{module}",), None, kept, arrange)

        def mlp(part: str, module: str) -> Iterator[Prepared]:
            kept = (_is_kept_float(c, source, f"{part}.w13"), _is_kept_float(c, source, f"{part}.w2"))
            yield from self.mlp(f"{name}.{part}", f"{source}.{module}", None, kept)

        def arrange_q(w: Array) -> Array:
            w = w.reshape(heads, nope + c.qk_rope_head_dim, -1)
            w = np.concatenate([w[:, :nope], self.interleaved(w[:, nope:])], axis=1)
            return w.reshape(-1, w.shape[-1])

        def arrange_kv(w: Array) -> Array:
            return np.concatenate([w[:rank], self.interleaved(w[rank:])])

        yield f"{name}.attn_norm", None, get("input_layernorm")
        if c.q_lora_rank is not None:
            yield from linear("wq_a", "self_attn.q_a_proj")
            yield f"{name}.q_norm", None, get("self_attn.q_a_layernorm")
        yield from linear("wq_b", f"self_attn.{'q_proj' if c.q_lora_rank is None else 'q_b_proj'}", arrange_q)
        yield from linear("wkv_a", "self_attn.kv_a_proj_with_mqa", arrange_kv)
        yield f"{name}.kv_norm", None, get("self_attn.kv_a_layernorm")
        wkv_b = get("self_attn.kv_b_proj").reshape(heads, nope + c.v_head_dim, rank)
        yield f"{name}.w_uk", None, np.ascontiguousarray(wkv_b[:, :nope])
        yield f"{name}.w_uv", None, np.ascontiguousarray(wkv_b[:, nope:].transpose(0, 2, 1))
        yield from linear("wo", "self_attn.o_proj")
        yield f"{name}.ffn_norm", None, get("post_attention_layernorm")
        if not is_moe:
            yield from mlp("mlp", "mlp")
            return
        yield f"{name}.gate", None, np.ascontiguousarray(get("mlp.gate").T)
        yield f"{name}.bias", None, self.source.tensor(f"{source}.mlp.gate.e_score_correction_bias")
        if c.n_shared_experts:
            yield from mlp("shared", "mlp.shared_experts")
        for e in range(c.n_routed_experts):
            yield from self.mlp(f"{name}.experts", f"{source}.mlp.experts.{e}", e)

    def model(self, num_positions: int, num_mtp: int | None) -> Iterator[Prepared]:
        c, get = self.c, self.source.tensor
        cos, sin = rope_tables(c, num_positions)
        yield "cos", None, cos
        yield "sin", None, sin
        yield "embed", None, get("model.embed_tokens.weight")
        for i in range(c.num_hidden_layers):
            yield from self.layer(f"layers.{i}", f"model.layers.{i}", c.is_moe(i))
        yield "norm", None, get("model.norm.weight")
        yield from self.linear("head", get("lm_head.weight"))
        for i in range(_num_mtp(c, num_mtp)):
            name, n = f"mtp.{i}", c.num_hidden_layers + i
            source = f"model.layers.{n}"
            yield f"{name}.embed", None, get(f"{source}.embed_tokens.weight")
            for norm in ("enorm", "hnorm"):
                yield f"{name}.{norm}", None, get(f"{source}.{norm}.weight")
            yield from self.linear(f"{name}.eh_proj", get(f"{source}.eh_proj.weight"))
            yield from self.layer(f"{name}.layer", source, c.is_moe(n))
            yield f"{name}.norm", None, get(f"{source}.shared_head.norm.weight")
            yield from self.linear(f"{name}.head", get(f"{source}.shared_head.head.weight"))


def iter_expert(source: Source, recipe: Recipe, layer_idx: int, expert: int) -> Iterator[Prepared]:
    """Yield the prepared arrays of one routed expert."""
    name = f"{layer_name(source.config, layer_idx)}.experts"
    module = f"model.layers.{layer_idx}.mlp.experts.{expert}"
    return _Preparer(source, recipe).mlp(name, module, expert)


def iter_weights(
    source: Source, recipe: Recipe, num_positions: int, num_mtp: int | None = None
) -> Iterator[Prepared]:
    """Yield every prepared array once: (name, routed expert or None, array); one tensor at a time."""
    return _Preparer(source, recipe).model(num_positions, num_mtp)


Part: TypeAlias = Literal["all", "attention", "routed", "shared"]


def select(specs: Mapping[str, Spec], part: Part) -> dict[str, Spec]:
    """The arrays that a die holds: all, all but experts, routed experts only, or the shared expert only."""

    def owner(name: str) -> Part:
        return "routed" if ".experts." in name else "shared" if ".shared." in name else "attention"

    return {name: spec for name, spec in specs.items() if part in ("all", owner(name))}


def assemble_experts(specs: Mapping[str, Spec], arrays: Mapping[str, Array]) -> list[MLP]:
    """The MLPs of a die that holds experts only, by MoE layer, MTP's last. Packed arrays become flat."""

    def linear(name: str) -> Linear:
        rows, columns = specs[name].shape[-2:]
        if f"{name}.scale" not in arrays:
            return Linear(arrays[name].reshape(-1), None, rows, columns)
        return Linear(arrays[name].reshape(-1), arrays[f"{name}.scale"].reshape(-1), columns, rows)

    stems = [name.removesuffix(".w13") for name in specs if name.endswith(".w13")]
    return [MLP(linear(f"{stem}.w13"), linear(f"{stem}.w2")) for stem in stems]


def assemble(
    config: ModelConfig, specs: Mapping[str, Spec], arrays: Mapping[str, Array], is_packed: bool
) -> ModelWeights:
    """Give the arrays of `weight_specs` their structure; nothing is copied. Packed arrays become flat."""

    def matrix(name: str) -> Array:
        return arrays[name].reshape(-1) if is_packed else arrays[name]

    def linear(name: str) -> Linear:
        rows, columns = specs[name].shape[-2:]
        if f"{name}.scale" not in arrays:
            return Linear(matrix(name), None, rows, columns)
        scale = arrays[f"{name}.scale"]
        return Linear(matrix(name), scale.reshape(-1) if is_packed else scale, columns, rows)

    def mlp(name: str) -> MLP:
        return MLP(linear(f"{name}.w13"), linear(f"{name}.w2"))

    def layer(name: str, layer_idx: int) -> Layer:
        moe = None
        if f"{name}.gate" in arrays:
            experts = mlp(f"{name}.experts") if f"{name}.experts.w13" in arrays else None
            shared = mlp(f"{name}.shared") if f"{name}.shared.w13" in arrays else None
            moe = MoE(matrix(f"{name}.gate"), arrays[f"{name}.bias"], experts, shared)
        return Layer(
            attn_norm=arrays[f"{name}.attn_norm"],
            wq_a=linear(f"{name}.wq_a") if config.q_lora_rank is not None else None,
            q_norm=arrays.get(f"{name}.q_norm"),
            wq_b=linear(f"{name}.wq_b"),
            wkv_a=linear(f"{name}.wkv_a"),
            kv_norm=arrays[f"{name}.kv_norm"],
            w_uk=matrix(f"{name}.w_uk"),
            w_uv=matrix(f"{name}.w_uv"),
            wo=linear(f"{name}.wo"),
            ffn_norm=arrays[f"{name}.ffn_norm"],
            mlp=None if moe else mlp(f"{name}.mlp"),
            moe=moe,
            int8_attention=layer_idx in config.int8_attention,
        )

    def mtp(i: int) -> MTP:
        name = f"mtp.{i}"
        return MTP(
            enorm=arrays[f"{name}.enorm"],
            hnorm=arrays[f"{name}.hnorm"],
            eh_proj=linear(f"{name}.eh_proj"),
            layer=layer(f"{name}.layer", config.num_hidden_layers + i),
            norm=arrays[f"{name}.norm"],
            embed=arrays[f"{name}.embed"],
            head=linear(f"{name}.head"),
        )

    num_mtp = sum(name.startswith("mtp.") and name.endswith(".embed") for name in arrays)
    return ModelWeights(
        embed=arrays["embed"],
        layers=[layer(f"layers.{i}", i) for i in range(config.num_hidden_layers)],
        norm=arrays["norm"],
        head=linear("head"),
        cos=arrays["cos"],
        sin=arrays["sin"],
        mtp=[mtp(i) for i in range(num_mtp)],
    )


class Store(NamedTuple):
    """Arrays by name, to be filled: which routed experts they hold, and which part of what TP cuts."""

    arrays: Mapping[str, Array]
    experts: Sequence[int]
    shard: Shard = WHOLE


def copy_to_all(targets: Sequence[Array], data: Array) -> None:
    for target in targets:
        target[...] = data


def fill(
    stores: Sequence[Store],
    weights: Iterator[Prepared],
    pack: Callable[[str, Array], Array] = lambda name, array: array,
    progress: Callable[[int], None] = lambda nbytes: None,
    place: Callable[[Sequence[Array], Array], None] = copy_to_all,
) -> None:
    """Copy each prepared array, cut and packed, into every store that has it.

    An expert's array goes to its place in the stack of the stores that hold it, and nowhere else. `progress`
    is told the bytes of each prepared array; `place` writes one array to several others.
    """
    # Who takes what is looked up once: hundreds of dies may hold one of hundreds of experts each.
    holders: dict[str, list[Store]] = {}
    for store in stores:
        for name in store.arrays:
            holders.setdefault(name, []).append(store)
    by_expert: dict[str, dict[int, list[tuple[Store, int]]]] = {}
    for name, expert, array in weights:
        targets: list[tuple[Store, Any]]
        if expert is None:
            targets = [(store, ...) for store in holders.get(name, ())]
        else:
            if name not in by_expert:
                places = by_expert[name] = {}
                for store in holders.get(name, ()):
                    for at, held in enumerate(store.experts):
                        places.setdefault(held, []).append((store, at))
            targets = by_expert[name].get(expert, [])
        by_shard: dict[Shard, list[Array]] = {}
        for store, at in targets:
            shard = WHOLE if store.shard is WHOLE else store.shard.of(name)
            by_shard.setdefault(shard, []).append(store.arrays[name][at])
        for shard, views in by_shard.items():
            place(views, pack(name, shard.cut(name, array)))
        progress(array.nbytes)


def load_weights(source: Source, recipe: Recipe, num_positions: int) -> ModelWeights:
    """The whole model in host memory, for the reference."""
    specs = weight_specs(source.config, recipe, num_positions)
    arrays = {name: np.empty(spec.shape, spec.dtype) for name, spec in specs.items()}
    fill([Store(arrays, range(source.config.n_routed_experts))], iter_weights(source, recipe, num_positions))
    return assemble(source.config, specs, arrays, is_packed=False)
