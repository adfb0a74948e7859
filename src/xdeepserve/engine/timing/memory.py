"""A die's memory in a timing-only run: tensors are shapes, and only what the host reads or writes is real."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from xdeepserve.engine.programs.expert import ExpertMemory
from xdeepserve.engine.programs.memory_plan import DieMemory, KVCache
from xdeepserve.engine.programs.workspace import MAX_VIEWS, Workspace
from xdeepserve.engine.sizes import Sizes
from xdeepserve.hw.memory import Area, MemoryPlan
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.sharding import Shard
from xdeepserve.model.tensors import MLP, ModelWeights
from xdeepserve.model.weights import Recipe, assemble, assemble_experts, select, weight_specs

# Index lists of a step and its results: few bytes, and the host's scheduler lives on them.
REAL = frozenset(
    {"positions", "slots", "seq_of", "block_tables"}
    | {f"{name}/{index}" for name in ("sampled", "num_accepted", "drafts") for index in (0, 1)}
)
BYTES_OF_PIECE = 32  # by which a piece of a KV block is represented, so that transfers have something to move
KV_BYTES = 2  # BF16, of each element (CM 4.2.2)


@functools.lru_cache(maxsize=1 << 14)
def shape_only(dtype: npt.DTypeLike, *shape: int) -> Array:
    """An array of any shape that takes one element of memory. Its values mean nothing, and all share them."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, (0,) * len(shape))


class ShapeWorkspace(Workspace):
    """A workspace that has memory for the names in REAL only, and shapes of any size for all others."""

    def __init__(self, area: Area) -> None:
        super().__init__(area)
        self._dtypes: dict[str, np.dtype] = {}

    def plan(self, name: str, dtype: npt.DTypeLike, *shape: int) -> None:
        if name in REAL or name.startswith("kv pieces"):
            super().plan(name, dtype, *shape)
        else:
            self._dtypes[name] = np.dtype(dtype)

    def take(self, name: str, *shape: int) -> Array:
        if name not in self._dtypes:
            return super().take(name, *shape)
        key = (name, *shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = shape_only(self._dtypes[name], *shape)
        return view


class ModelShapes:
    """The weights and caches of one kind of die, as shapes. All dies of the kind share them."""

    def __init__(self, config: ModelConfig, recipe: Recipe, sizes: Sizes, num_experts: int) -> None:
        self.config, self.recipe, self.sizes = config, recipe, sizes
        specs = weight_specs(config, recipe, sizes.max_model_len, num_experts, sizes.num_mtp_layers)
        # All ranks of a TP group hold parts of the same shapes.
        self.specs = Shard(0, sizes.tp, sizes.tp_mode).specs(
            select(specs, "attention" if sizes.has_expert_dies else "all")
        )
        arrays = {
            name: shape_only(spec.packed_dtype, *spec.packed_shape) for name, spec in self.specs.items()
        }
        self.model = assemble(config, self.specs, arrays, is_packed=True)

    def cache(self) -> KVCache:
        """Of any layer: BF16 latents and RoPE keys (CM 4.2.2)."""
        c, s = self.config, self.sizes
        latent, k_pe = (
            shape_only(np.uint16, s.num_blocks, s.block_size, width)
            for width in (c.kv_lora_rank, c.qk_rope_head_dim)
        )
        return KVCache(latent, shape_only(np.float32, 0, 0), k_pe)


class TimingMemory(DieMemory):
    """The app area of a die with a DP group. Sizes are reported as if it held everything."""

    def __init__(self, area: Area, shapes: ModelShapes, rank: int) -> None:
        self.config, self.recipe, self.sizes = shapes.config, shapes.recipe, shapes.sizes
        self.shapes, self.specs = shapes, shapes.specs
        self.shard = Shard(rank % self.sizes.tp, self.sizes.tp, self.sizes.tp_mode)
        per_rank = self.config.num_attention_heads // self.sizes.tp
        self.heads = range(self.shard.rank * per_rank, (self.shard.rank + 1) * per_rank)
        self.experts = range(0) if self.sizes.has_expert_dies else self.sizes.experts_of[rank]
        self.slots = self.experts
        self.num_layers = self.config.num_hidden_layers + self.sizes.mtp
        self._space, self._host = ShapeWorkspace(area), None
        self._plan_activations()
        self._plan_results()
        self._space.plan("kv/tail", np.float32)
        for name, nbytes in self.block_parts:
            self._space.plan(name, np.uint8, self.sizes.num_blocks, nbytes)
        self.weight_nbytes = sum(spec.nbytes for spec in self.specs.values())
        self.cache_nbytes = self.sizes.num_blocks * self.num_layers * self._nbytes_by_layer
        self.activation_nbytes = area.nbytes

    @property
    def _nbytes_by_layer(self) -> int:
        """Of a KV block."""
        c = self.config
        return self.sizes.block_size * KV_BYTES * (c.kv_lora_rank + c.qk_rope_head_dim)

    @property
    def piece_weight(self) -> float:
        """Bytes of KV that each byte of a piece stands for, on average over a layer's latents and keys."""
        return self._nbytes_by_layer / (2 * BYTES_OF_PIECE)

    @property
    def parts_by_layer(self) -> list[list[tuple[str, int]]]:
        """As many pieces as there are where they go from TE to TE; else the block is one.

        The states that a second MTP layer mends are not among them.
        """
        if self.sizes.role == "both":
            return [[("kv pieces", BYTES_OF_PIECE)]]
        pieces = [
            [(f"kv pieces/{layer}/{what}", BYTES_OF_PIECE) for what in ("latent", "k_pe")]
            for layer in range(self.num_layers)
        ]
        num_main = self.config.num_hidden_layers
        return [*pieces[:num_main], [piece for layer in pieces[num_main:] for piece in layer]]

    def assemble(self) -> ModelWeights:
        return self.shapes.model

    def weights(self) -> dict[str, Array]:
        return {}

    def kv_caches(self) -> list[KVCache]:
        return [self.shapes.cache()] * self.num_layers


class TimingExpertMemory(ExpertMemory):
    """An expert die: flags, which its persistent kernels live on, and shapes."""

    def __init__(
        self, plan: MemoryPlan, config: ModelConfig, recipe: Recipe, sizes: Sizes, index: int
    ) -> None:
        self.config, self.recipe, self.sizes = config, recipe, sizes
        self.is_shared = index >= len(sizes.experts_of)
        self.slots = self.experts = range(0) if self.is_shared else sizes.experts_of[index]
        specs = weight_specs(config, recipe, 1, len(self.experts), sizes.num_mtp_layers)
        self.specs = select(specs, "shared" if self.is_shared else "routed")
        self.workspace = ShapeWorkspace(plan.app)
        for item in range(sizes.num_domains * sizes.num_microbatches):
            self.workspace.plan(f"sent/{item}", np.float32)
        self.plan_flags(plan)
        self.weight_nbytes = sum(spec.nbytes for spec in self.specs.values())
        self.cache_nbytes = self.activation_nbytes = 0

    def assemble(self) -> list[MLP]:
        arrays = {
            name: shape_only(spec.packed_dtype, *spec.packed_shape) for name, spec in self.specs.items()
        }
        return self.sizes.with_mtp_used_again(assemble_experts(self.specs, arrays))

    def weights(self) -> dict[str, Array]:
        return {}
