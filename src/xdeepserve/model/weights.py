"""Weights in the form needed by the arithmetic, made from a Hugging Face checkpoint tensor by tensor.

A checkpoint stores every linear layer as [out, in]. A recipe decides what lies in a die's memory:

    fp32   w float32 [in, out]                      SIMD runs across outputs
    int8   w int8 [out, in] and scale float32 [out] one scale per output channel

One table, tensors.py, lists the arrays, their preparation, and which of them the INT8 recipe quantises. All
others stay float32 in the fp32 recipe. In the int8 recipe the other matrices, except the router's, are
rounded as for exact products (canonical.py), and dies hold them in BF16. A checkpoint stored in INT8 brings
its own integers and scales, and may keep some layers in floating point (but not routed experts, because
dispatch carries INT8 rows to them). Those layers are rounded in the same way, but held in float32, because
tensor parallelism may cut them into blocks of any depth. Weights of other checkpoints are rounded to the
nearest INT8 value. Latents in the cache are INT8, and so is attention's first product. Its second product is
INT8 in layers for which `xdeepserve quantize` found this acceptable (`ModelConfig.int8_attention`).

The reference computes on these arrays directly. A die holds the matrices *packed* (packing.py), in the order
in which its kernels read them: `fill` packs on the way, once per array. Routed experts of a layer are stacked
on a leading axis, so a die with a subset of them holds a shorter stack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from xdeepserve.errors import CheckpointError
from xdeepserve.model.canonical import Array, factors, quantize_rows
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.packing import ArraySpec
from xdeepserve.model.rope import rope_tables
from xdeepserve.model.sharding import WHOLE, Shard
from xdeepserve.model.tensor_row import Tensor
from xdeepserve.model.tensors import (
    EMBEDDING,
    MLP,
    MTP,
    Held,
    Layer,
    Linear,
    ModelWeights,
    MoE,
    Section,
    head_section,
    layer_section,
    mtp_section,
    sections,
)

Recipe = Literal["fp32", "int8"]
RECIPES: tuple[Recipe, ...] = ("fp32", "int8")
F32 = np.dtype(np.float32)


class TensorSource(Protocol):
    """Source of tensors: a checkpoint directory or a preset."""

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> Array: ...

    def int8(self, module: str) -> tuple[Array, Array] | None: ...


def _is_kept_float(c: ModelConfig, row: Tensor, source: str) -> bool:
    """Whether the INT8 checkpoint keeps the linear layer in its layer `source` in floating point."""
    return any(source + module in c.kept_float for module in row.modules)


def _row_specs(
    c: ModelConfig, section: Section, row: Tensor, is_int8: bool, experts: int
) -> dict[str, ArraySpec]:
    """Return the prepared arrays of a row: one, or integers and their scales."""
    name, shape = section.prefix + row.name, row.shape(c)
    stack = (experts,) if row.is_routed else ()
    if row.kind == "int8":
        if is_int8 and not _is_kept_float(c, row, section.source):
            k, n = shape
            integers = ArraySpec((*stack, n, k), np.dtype(np.int8), is_matrix=True)
            return {name: integers, f"{name}.scale": ArraySpec((*stack, n), F32)}
        return {name: ArraySpec((*stack, *shape), F32, is_matrix=True)}
    return {name: ArraySpec(shape, F32, row.kind != "plain", is_int8 and row.kind in ("linear", "matrix"))}


@functools.lru_cache(maxsize=16)
def weight_specs(
    config: ModelConfig,
    recipe: Recipe,
    num_positions: int,
    num_experts: int | None = None,
    num_mtp: int | None = None,
) -> dict[str, ArraySpec]:
    """Return every prepared array of a model with `num_experts` routed experts per layer and its first
    `num_mtp` MTP layers (default: all). Callers share the result, so they must not change it."""
    experts = config.n_routed_experts if num_experts is None else num_experts
    rotary = ArraySpec((num_positions, config.qk_rope_head_dim // 2), F32)
    specs = dict.fromkeys(ropes(config), rotary)
    for section in sections(config, num_mtp):
        for row in section.rows:
            specs |= _row_specs(config, section, row, recipe == "int8", experts)
    return specs


def ropes(config: ModelConfig) -> list[str]:
    """List the names of RoPE's tables."""
    return ["cos", "sin", *(["compress_cos", "compress_sin"] if config.compress_rope else [])]


NO_BIAS = np.empty(0, F32)
Prepared = tuple[str, int | None, Array]  # name, routed expert (None: not an expert's), array


def _finite(array: Array, name: str) -> Array:
    """Check a tensor for NaN and infinity, which would spread to every logit. Raises CheckpointError if it
    has any."""
    if not np.isfinite(array).all():
        raise CheckpointError(f"tensor {name} has values that are not finite")
    return array


class _Preparer:
    """Turns checkpoint tensors into prepared arrays of one recipe."""

    def __init__(self, source: TensorSource, recipe: Recipe) -> None:
        self.source, self.c, self.is_int8 = source, source.config, recipe == "int8"

    def section(
        self, section: Section, only: int | None = None, names: Collection[str] | None = None
    ) -> Iterator[Prepared]:
        """Yield all arrays of a section, those of routed expert `only`, or those of some `names`."""
        for row, expert in section.arrays(self.c, only):
            name = section.prefix + row.name
            if names is not None and name not in names and f"{name}.scale" not in names:
                continue
            for suffix, array in self.row(row, section.source, expert):
                yield name + suffix, expert, array

    def row(self, row: Tensor, source: str, expert: int | None) -> Iterator[tuple[str, Array]]:
        """Yield the arrays made from a row, each with its suffix: "" or ".scale"."""
        c, modules = self.c, row.sources(source, expert)
        if row.kind == "plain":
            yield "", row.arrange(c, self.tensor(f"{modules[0]}.{row.parameter}"))
        elif row.kind != "int8" or not self.is_int8 or _is_kept_float(c, row, source):
            w = row.arrange(c, self.stacked(modules, row.parameter)).swapaxes(-1, -2)
            yield "", np.ascontiguousarray(factors(w) if self.is_int8 and row.kind != "router" else w)
        else:
            stored = [self.stored_int8(module) for module in modules]
            whole = [pair for pair in stored if pair is not None]
            if len(whole) == len(modules):
                q, scale = (row.arrange(c, np.concatenate(each)) for each in zip(*whole, strict=True))
                scale = scale[:, 0]
            else:
                q, scale = quantize_rows(row.arrange(c, self.stacked(modules)))
            yield "", q
            yield ".scale", scale

    def tensor(self, name: str) -> Array:
        return _finite(self.source.tensor(name), name)

    def stored_int8(self, module: str) -> tuple[Array, Array] | None:
        pair = self.source.int8(module)
        return pair and (pair[0], _finite(pair[1], f"{module}.weight_scale"))

    def stacked(self, modules: Sequence[str], parameter: str = "weight") -> Array:
        """Stack the modules' weights [out, in], one below the other."""
        weights = [self.tensor(f"{module}.{parameter}") for module in modules]
        return weights[0] if len(weights) == 1 else np.concatenate(weights)


def iter_expert(source: TensorSource, recipe: Recipe, layer_idx: int, expert: int) -> Iterator[Prepared]:
    """Yield the prepared arrays of one routed expert."""
    return _Preparer(source, recipe).section(layer_section(source.config, layer_idx), expert)


def iter_weights(
    source: TensorSource,
    recipe: Recipe,
    num_positions: int,
    num_mtp: int | None = None,
    names: Collection[str] | None = None,
) -> Iterator[Prepared]:
    """Yield every prepared array once: (name, routed expert or None, array); one tensor at a time. `names`
    restricts this to some arrays, and perhaps others made with them."""
    tables = [
        table
        for rope in (source.config.rope, source.config.compress_rope)
        if rope is not None
        for table in rope_tables(rope, source.config.qk_rope_head_dim, num_positions)
    ]
    yield from ((name, None, table) for name, table in zip(ropes(source.config), tables, strict=True))
    preparer = _Preparer(source, recipe)
    for section in sections(source.config, num_mtp):
        yield from preparer.section(section, names=names)


Part: TypeAlias = Literal["all", "attention", "routed", "shared"]


def is_routed(name: str) -> bool:
    """Whether an array has a matrix for each routed expert of a die."""
    return ".experts." in name


def select(specs: Mapping[str, ArraySpec], *parts: Part) -> dict[str, ArraySpec]:
    """Select the arrays on a die: all, or some of the parts "attention" (all but experts), "routed" and
    "shared"."""

    def owner(name: str) -> Part:
        return "routed" if ".experts." in name else "shared" if ".shared." in name else "attention"

    return {name: spec for name, spec in specs.items() if "all" in parts or owner(name) in parts}


def _linear(
    specs: Mapping[str, ArraySpec], arrays: Mapping[str, Array], name: str, is_packed: bool
) -> Linear:
    """Make a linear layer, or a stack of them, from its arrays."""
    w, scale = arrays[name], arrays.get(f"{name}.scale")
    if is_packed:
        w, scale = w.reshape(-1), None if scale is None else scale.reshape(-1)
    rows, columns = specs[name].shape[-2:]
    return Linear(w, scale, *((rows, columns) if scale is None else (columns, rows)))


def assemble_experts(specs: Mapping[str, ArraySpec], arrays: Mapping[str, Array]) -> list[Held]:
    """Assemble the layers of a die with only experts, by MoE layer, MTP's last. Packed arrays become flat."""

    def mlp(stem: str) -> MLP | None:
        if f"{stem}.w13" not in specs:
            return None
        return MLP(*(_linear(specs, arrays, f"{stem}.{name}", is_packed=True) for name in ("w13", "w2")))

    stems = [name.removesuffix(".w13").rpartition(".")[0] for name in specs if name.endswith(".w13")]
    return [Held(mlp(f"{stem}.experts"), mlp(f"{stem}.shared")) for stem in dict.fromkeys(stems)]


def assemble(
    config: ModelConfig, specs: Mapping[str, ArraySpec], arrays: Mapping[str, Array], is_packed: bool
) -> ModelWeights:
    """Give the arrays of `weight_specs` their structure, without copying. Packed arrays become flat."""

    def fields(section: Section) -> dict[str, Any]:
        """Return the arrays of a section's rows that are here, by row name."""
        found: dict[str, Any] = {}
        for row in section.rows:
            name = section.prefix + row.name
            if name not in arrays:
                continue
            if row.kind in ("int8", "linear"):
                found[row.name] = _linear(specs, arrays, name, is_packed)
            else:
                is_flat = is_packed and row.kind != "plain"
                found[row.name] = arrays[name].reshape(-1) if is_flat else arrays[name]
        return found

    def layer(layer_idx: int) -> Layer:
        found = fields(layer_section(config, layer_idx))

        def mlp(name: str) -> MLP | None:
            if f"{name}.w13" not in found:
                return None
            return MLP(found.pop(f"{name}.w13"), found.pop(f"{name}.w2"))

        dense, experts, shared = mlp("mlp"), mlp("experts"), mlp("shared")
        moe = None
        if not dense:
            bias, by_token = found.pop("bias", NO_BIAS), found.pop("by_token", None)
            moe = MoE(found.pop("gate"), bias, experts, shared, by_token)
        int8_attention = layer_idx in config.int8_attention
        kind = config.attention_of(layer_idx)
        return Layer(**found, attention=kind, mlp=dense, moe=moe, int8_attention=int8_attention)

    num_main = config.num_hidden_layers
    depths = [depth for depth in range(config.num_nextn_predict_layers) if f"mtp.{depth}.embed" in arrays]
    return ModelWeights(
        **fields(Section("", "", EMBEDDING)),
        **fields(head_section(config)),
        layers=[layer(layer_idx) for layer_idx in range(num_main)],
        cos=arrays["cos"],
        sin=arrays["sin"],
        compress_cos=arrays.get("compress_cos"),
        compress_sin=arrays.get("compress_sin"),
        mtp=[MTP(**fields(mtp_section(config, depth)), layer=layer(num_main + depth)) for depth in depths],
    )


class Store(NamedTuple):
    """Arrays by name, to be filled, with the routed experts they hold and the shard of arrays cut by TP."""

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
    place: Callable[[Sequence[Array], Array], None] = copy_to_all,
) -> Iterator[int]:
    """Copy each prepared array, cut and packed, into every store that has it, and yield its bytes.

    An expert's array goes to its place in the stack of the stores that hold it, and nowhere else. `place`
    writes one array to several others.
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
        yield array.nbytes


def load_weights(source: TensorSource, recipe: Recipe, num_positions: int) -> ModelWeights:
    """Load the whole model into host memory, for the reference."""
    specs = weight_specs(source.config, recipe, num_positions)
    arrays = {name: np.empty(spec.shape, spec.dtype) for name, spec in specs.items()}
    store = Store(arrays, range(source.config.n_routed_experts))
    for _ in fill([store], iter_weights(source, recipe, num_positions)):
        pass
    return assemble(source.config, specs, arrays, is_packed=False)
