"""Contents of a die's HBM app area: weights, KV cache, activations and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from xdeepserve.engine.deploy.sizes import GroupSizes, Sizes
from xdeepserve.engine.die.cache_parts import CachePart, cache_parts
from xdeepserve.engine.die.expert_buffers import PARTS, holds, plan_expert_buffers
from xdeepserve.engine.die.replicas import RedundantSlots, ReplicaMap
from xdeepserve.engine.die.workspace import Workspace
from xdeepserve.engine.messages import LOGPROB_SLOTS, PoolPlace
from xdeepserve.hw.memory import Address, Area, Memory, Region
from xdeepserve.model.cache_layout import TILE, cache_shape
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.packing import ArraySpec
from xdeepserve.model.sharding import Shard
from xdeepserve.model.tensors import ModelWeights
from xdeepserve.model.weights import Recipe, assemble, select, weight_specs
from xdeepserve.step.frame import KVCache
from xdeepserve.step.layer import Holds
from xdeepserve.step.sparse import rows_at_once

F32, I32, I8, U8 = np.float32, np.int32, np.int8, np.uint8


def shard_of(groups: GroupSizes, rank: int) -> Shard:
    """Return the share of sharded weights that belongs to a die of a DP group, by its rank."""
    mode = "o-proj" if groups.o_proj_tp > 1 else groups.tp_mode
    return Shard(rank % groups.num_sharing, groups.num_sharing, mode)


def part_prefix(microbatch: int) -> str:
    """Prefix of the buffer names of a single microbatch."""
    return f"mb{microbatch}/"


class DieMemory:
    """Memory layout of a die's app area in HBM. Construct it to plan; call `materialise` to use it."""

    replicas: ReplicaMap | None = None  # where there are replicas of experts
    redundant: RedundantSlots | None = None

    def __init__(self, area: Area, config: ModelConfig, recipe: Recipe, sizes: Sizes, rank: int) -> None:
        self.config, self.recipe, self.sizes, self.kv = config, recipe, sizes, sizes.kv
        self.shard = shard_of(sizes.groups, rank)
        per_rank, first = config.num_attention_heads // sizes.groups.tp, rank % sizes.groups.tp
        self.heads = range(first * per_rank, (first + 1) * per_rank)
        is_apart = sizes.experts.where == "away"
        self.experts = range(0) if is_apart else sizes.experts.experts_of[rank]
        self.held = self.experts  # what is loaded; other slots are filled later, or never
        self.slots = range(0) if is_apart else sizes.experts.slots_of[rank]  # their physical numbers
        self.is_shared = not is_apart and sizes.experts.is_shared(rank)  # a copy of the shared one for all
        # Tokens are led to replicas of experts, or to copies of the shared one on other dies.
        self.is_dispatched = not is_apart and sizes.experts.num_shared_dies > 0  # the shared one's rows, too
        self.has_routes = sizes.experts.redundant_slots > 0 or self.is_dispatched
        self.num_layers = config.num_hidden_layers + sizes.steps.mtp
        self.specs, self._space = self._weight_specs(), self._new_space(area)
        self._host: Region | None = None
        self._plan_weights()
        self.weight_nbytes = area.nbytes
        self._plan_cache()
        self.cache_nbytes = area.nbytes - self.weight_nbytes
        self._plan_activations()
        self._plan_results()
        if sizes.experts.redundant_slots:
            self.replicas = self._new_replicas(rank)
            if self.slots:
                self.redundant = self._new_redundant()
        self.activation_nbytes = area.nbytes - self.weight_nbytes - self.cache_nbytes

    def _weight_specs(self) -> dict[str, ArraySpec]:
        sizes = self.sizes
        specs = weight_specs(
            self.config, self.recipe, sizes.steps.max_model_len, len(self.slots), sizes.steps.num_mtp_layers
        )
        if sizes.experts.where != "away" and not sizes.experts.num_shared_dies:
            return self.shard.specs(select(specs, "all"))
        return self.shard.specs(select(specs, "attention", *PARTS[self.holds]))

    @property
    def holds(self) -> Holds:
        """Kinds of experts on the die that serve all dies' tokens: routed, shared or both."""
        return holds(self.slots, self.is_shared)

    def _new_space(self, area: Area) -> Workspace:
        return Workspace(area)

    def _new_replicas(self, rank: int) -> ReplicaMap:
        return ReplicaMap(self._space, self.config, self.sizes.experts, rank)

    def _new_redundant(self) -> RedundantSlots:
        return RedundantSlots(self._space, self.config, self.sizes.experts, self.experts, self.specs)

    def _plan_weights(self) -> None:
        for name, spec in self.specs.items():
            self._space.plan(f"weights/{name}", spec.packed_dtype, *spec.packed_shape)

    def _cache_parts(self, layer: int) -> tuple[CachePart, ...]:
        """List the arrays of a layer's KV cache."""
        c, sizes = self.config, self.sizes
        return cache_parts(c, self.recipe, sizes.kv.num_blocks, sizes.kv.block_size, c.attention_of(layer))

    def _plan_cache(self) -> None:
        for layer in range(self.num_layers):
            for part in self._cache_parts(layer):
                self._space.plan(f"kv/{layer}/{part.name}", part.dtype, *part.shape)
        if self.sizes.steps.mtp > 1:
            self._space.plan("kv/tail", F32, self.sizes.kv.num_blocks, self.config.hidden_size)

    def _plan_activations(self) -> None:
        c, t = self.config, self.sizes.steps.max_tokens
        plan: Callable[..., None] = self._space.plan
        for name in ("h", "hidden", "embedding"):
            plan(name, F32, t, c.hidden_size)
        plan("both", F32, t, 2 * c.hidden_size)
        plan("positions", I32, t)
        plan("slots", I32, t)
        plan("seq_of", I32, t)
        plan("block_tables", I32, self.sizes.steps.max_seqs, self.sizes.kv.max_blocks_per_seq)
        if self.sizes.steps.plans_ahead:  # what a step hands to the next one: see carried.py
            plan("token_ids", I32, t)
            plan("carried_seq", I32, self.sizes.steps.max_seqs)
            plan("carried_row", I32, self.sizes.steps.max_seqs)
        parts = [""]
        if self.sizes.walk.turns == "overlap":
            parts = [part_prefix(m) for m in range(self.sizes.walk.num_parts)]
        for prefix in parts:
            self._plan_layer(prefix)
            if self.sizes.groups.tp > 1:
                self._plan_tensor_parallel(prefix)
            if self.sizes.groups.o_proj_tp > 1:
                self._plan_shared_out_proj(prefix)

    def _plan_layer(self, prefix: str) -> None:
        """Reserve buffers for a layer's stages, sized for a step or a microbatch, and for a slice of its
        tokens."""
        c, t, n = self.config, self.sizes.steps.max_part, self.sizes.groups.max_slice
        heads, hidden, top_k = len(self.heads), c.hidden_size, c.num_experts_per_tok

        def plan(name: str, dtype: npt.DTypeLike, *shape: int) -> None:
            self._space.plan(prefix + name, dtype, *shape)

        shared = c.n_shared_experts * c.moe_intermediate_size
        # A dense layer has all rows of its part, or a slice of the rows of it all, like the shared expert.
        is_cut = self.sizes.groups.tp_mode == "tp"
        mlp = t * (c.intermediate_size // self.sizes.groups.tp) if is_cut else n * c.intermediate_size
        act = max(mlp, (self._max_copied_rows or n) * shared)
        q_width, o_width = heads * c.qk_head_dim, heads * c.v_head_dim
        for name in ("x", "y"):
            plan(name, F32, t, hidden)
        plan("q_a", F32, t, c.q_lora_rank or 1)
        plan("q", F32, t, q_width)
        plan("kv", F32, t, c.kv_columns)
        plan("q_lat", F32, t, max(heads * c.value_columns, c.num_key_value_heads * c.key_columns))
        plan("o_lat", F32, t, heads * c.value_columns)
        plan("o", F32, t, o_width)
        if c.index_topk:
            self._plan_indexer(plan)
        plan("gate_up", F32, 2 * act)
        plan("act", F32, act)
        widest = max(2 * hidden, c.q_lora_rank or 1, q_width, o_width)
        plan("q8", I8, max(t * widest, n * c.num_attention_heads * c.v_head_dim, act))
        plan("q8_scale", F32, max(t, self._max_copied_rows))
        if not any(self.sizes.experts.experts_of):
            return
        plan("gate_logits", F32, n, c.n_routed_experts)
        plan("topk_idx", I32, n, top_k)
        plan("topk_weights", F32, n, top_k)
        if self.has_routes:
            plan("topk_physical", I32, n, top_k + self.is_dispatched)
        if self.sizes.experts.where == "away":
            return
        plan("shared", F32, n, hidden)
        plan_expert_buffers(plan, c, self.recipe, self.max_expert_rows, len(self.slots))
        plan("expert_sent", F32, self.max_expert_rows, hidden)
        plan("slot_out", F32, n * top_k, hidden)

    @property
    def num_choices(self) -> int:
        """Number of microbatches with chosen positions that must stay until the next layer, in shared
        buffers."""
        walk = self.sizes.walk
        return walk.num_microbatches if self.config.shared_choices and walk.num_parts == 1 else 1

    def _plan_indexer(self, plan: Callable[..., None]) -> None:
        """Reserve the indexer's buffers: for choosing positions and for gathering their KV rows
        (step/sparse.py)."""
        c, t = self.config, self.sizes.steps.max_part
        few = min(c.index_topk, self.sizes.steps.max_model_len)
        whole = -(-few // TILE) * TILE
        plan("index_k", F32, t, c.index_head_dim)
        plan("index_w", F32, t, c.index_n_heads)
        plan("index_q", F32, t, c.index_n_heads * c.index_head_dim)
        for lane in range(self.num_choices):
            plan(f"chosen/{lane}", I32, t, few)
        dtype, rows = U8 if self.recipe == "int8" else F32, rows_at_once(t, few)
        plan("chosen_latent", dtype, *cache_shape(rows, whole, c.value_columns))
        plan("chosen_scale", F32, rows, whole)
        plan("chosen_k_pe", F32, *cache_shape(rows, whole, c.key_columns))

    def layer_workspace(self, microbatch: int) -> Workspace:
        """Return the buffers of a layer's stages; each microbatch has its own set where microbatches
        overlap."""
        return self._space.part(part_prefix(microbatch))

    def _plan_tensor_parallel(self, prefix: str) -> None:
        """Reserve buffers for the data that ranks of a tensor-parallel group exchange (step/shard.py)."""
        c, t, n = self.config, self.sizes.steps.max_part, self.sizes.groups.max_slice

        def plan(name: str, dtype: npt.DTypeLike, *shape: int) -> None:
            self._space.plan(prefix + name, dtype, *shape)

        plan("slice", F32, n, c.hidden_size)
        if self.shard.mode == "tp":
            plan("maxima", F32, t)
            plan("sums", I32, t, c.hidden_size)
        else:
            plan("latents", F32, n, c.down_columns)
            plan("o_slice", F32, n, c.num_attention_heads * c.v_head_dim)

    def _plan_shared_out_proj(self, prefix: str) -> None:
        """Reserve buffers for DP groups that share an output projection (step/o_proj.py)."""
        c, t, size = self.config, self.sizes.steps.max_part, self.sizes.groups.o_proj_tp
        width = c.num_attention_heads * c.v_head_dim // size

        def plan(name: str, dtype: npt.DTypeLike, *shape: int) -> None:
            self._space.plan(prefix + name, dtype, *shape)

        plan("o_columns", F32, size, t, width)
        plan("o_shared", F32, size * t, width)
        plan("o_sums", F32, size * t, c.hidden_size)
        if self.recipe == "int8":
            plan("q8_columns", I8, size, t, width)
            plan("q8_shared", I8, size * t, width)
            plan("q8_sums", I32, size * t, c.hidden_size)

    @property
    def max_expert_rows(self) -> int:
        """Largest number of token copies that one step can bring to this die."""
        copies = min(self.config.num_experts_per_tok, len(self.slots))
        return self.sizes.place.num_dies * self.sizes.groups.max_slice * copies + self._max_copied_rows

    @property
    def _max_copied_rows(self) -> int:
        """Largest number of rows for this die's copy of the shared expert, part of `max_expert_rows`.

        Each die sends its shared-expert rows to one copy only, so a copy serves an equal share of the dies.
        """
        if not self.is_shared:
            return 0
        num_dies, num_shared = self.sizes.place.num_dies, self.sizes.experts.num_shared_dies
        return -(-num_dies // num_shared) * self.sizes.groups.max_slice

    def _plan_results(self) -> None:
        s, plan = self.sizes, self._space.plan
        for index in range(s.steps.num_result_sets):
            plan(f"sampled/{index}", I32, s.steps.max_logit_rows)
            plan(f"num_accepted/{index}", I32, s.steps.max_seqs)
            plan(f"drafts/{index}", I32, s.steps.max_seqs, max(1, s.steps.mtp))
            plan(f"logprob_ids/{index}", I32, s.steps.max_logit_rows, LOGPROB_SLOTS)
            plan(f"logprobs/{index}", F32, s.steps.max_logit_rows, LOGPROB_SLOTS)
            plan(f"ranks/{index}", I32, s.steps.max_logit_rows)
            plan(f"logits/{index}", F32, s.steps.max_logit_rows, self.config.vocab_size)
        plan("logit_hidden", F32, s.steps.max_logit_rows, self.config.hidden_size)
        if s.steps.mtp:
            plan("draft_logits", F32, s.steps.max_seqs, self.config.vocab_size)

    @property
    def parts_by_layer(self) -> list[list[tuple[str, int]]]:
        """Buffers with a piece of each KV block, and the piece's bytes, in the same order on all dies.

        There is a list for each layer of the main model. A last list, which may be empty, has what MTP keeps.
        """
        num_main = self.config.num_hidden_layers
        parts = [self._layer_parts(layer) for layer in range(num_main)]
        rest = [part for layer in range(num_main, self.num_layers) for part in self._layer_parts(layer)]
        if self.sizes.steps.mtp > 1:
            rest.append(("kv/tail", self.config.hidden_size * 4))
        return [*parts, rest]

    def _layer_parts(self, layer: int) -> list[tuple[str, int]]:
        parts = self._cache_parts(layer)
        return [(f"kv/{layer}/{part.name}", part.block_nbytes) for part in parts if part.block_nbytes]

    @property
    def block_parts(self) -> list[tuple[str, int]]:
        """Buffers of `parts_by_layer` as a flat list, with the bytes of each piece."""
        return [part for parts in self.parts_by_layer for part in parts]

    @property
    def num_parts(self) -> int:
        """Number of lists in `parts_by_layer`."""
        return self.config.num_hidden_layers + 1

    @property
    def block_nbytes(self) -> int:
        """Size of a KV block over all layers, in bytes."""
        return sum(nbytes for _, nbytes in self.block_parts)

    def plan_host(self, area: Area, rank: int) -> None:
        """Reserve the die's host slots in a host's memory; each slot holds one whole KV block."""
        self._host = area.alloc(f"kv of rank {rank}", self.sizes.kv.num_host_blocks * self.block_nbytes)

    @property
    def host_regions(self) -> list[Region]:
        """Regions of a host's memory that belong to this die."""
        own = [] if self._host is None else [self._host]
        return own if self.redundant is None else own + self.redundant.host_regions

    def block_pieces(self, tier: str, slot: int | PoolPlace) -> list[tuple[Address, int]]:
        """List addresses and sizes of a KV block's pieces in HBM, in host DRAM or in the memory pool.

        A pool value stores each part of all its blocks together, block after block. Parts that consist of
        positions are therefore the same bytes for every block size.
        """
        if isinstance(slot, PoolPlace):
            pieces, offset = [], 0
            for _, nbytes in self.block_parts:
                pieces.append((slot.address.plus(offset + slot.block * nbytes), nbytes))
                offset += slot.num_blocks * nbytes
            return pieces
        if tier == "hbm":
            return [
                (self._space.address(name).plus(slot * nbytes), nbytes) for name, nbytes in self.block_parts
            ]
        assert self._host is not None
        pieces, offset = [], slot * self.block_nbytes
        for _, nbytes in self.block_parts:
            pieces.append((self._host.address.plus(offset), nbytes))
            offset += nbytes
        return pieces

    def slots_at(self, start: int, stop: int) -> set[int]:
        """Return the HBM slots with some bytes in [start, stop) of the die's memory."""
        slots: set[int] = set()
        for name, nbytes in self.block_parts:
            at = self._space.address(name).offset
            slots.update(range(max(0, (start - at) // nbytes), -(-(stop - at) // nbytes)))
        return {slot for slot in slots if slot < self.sizes.kv.num_blocks}

    def layer_pieces(self, slots: Sequence[int]) -> list[list[tuple[Address, int]]]:
        """List addresses and sizes of KV blocks' pieces in HBM: a list per layer, as in `parts_by_layer`.

        Each list goes through `slots` in order, with all pieces of a slot together.
        """
        return [
            [
                (self._space.address(name).plus(slot * nbytes), nbytes)
                for slot in slots
                for name, nbytes in parts
            ]
            for parts in self.parts_by_layer
        ]

    def materialise(self, memory: Memory) -> None:
        """Bind all planned buffers to real memory."""
        self._space.materialise(memory)

    def result(self, name: str, step: int, *shape: int) -> Array:
        """Return the buffer for a step's result, which the host reads.

        With two result sets it stays valid until the next step has ended.
        """
        return self._space.take(f"{name}/{step % self.sizes.steps.num_result_sets}", *shape)

    @property
    def tail(self) -> Array:
        """Hidden states after the first MTP layer for the last row in each KV block, float32 [blocks, H].

        The second MTP layer may have to go on from these states in the next step (engine/die/drafts.py).
        """
        return self._space.take("kv/tail", self.sizes.kv.num_blocks, self.config.hidden_size)

    @property
    def workspace(self) -> Workspace:
        return self._space

    def weights(self) -> dict[str, Array]:
        """Return the packed weight arrays by their names in `weight_specs`; loading fills them, and steps
        only read."""
        return {
            name: self._space.take(f"weights/{name}", *spec.packed_shape) for name, spec in self.specs.items()
        }

    def assemble(self) -> ModelWeights:
        """Build the model's structure on the packed weight arrays."""
        weights = assemble(self.config, self.specs, self.weights(), is_packed=True)
        layers = [*weights.layers, *(mtp.layer for mtp in weights.mtp)]
        moes = [layer.moe for layer in layers if layer.moe is not None]
        if self.replicas is not None:
            self.replicas.start(moes)
        if self.redundant is not None:
            self.redundant.start([moe.experts for moe in moes if moe.experts is not None])
        return weights

    def kv_caches(self) -> list[KVCache]:
        """Return a KV cache for each layer and each draft, even if a single MTP layer makes all drafts."""

        def take(layer: int, part: CachePart) -> Array:
            return self._space.take(f"kv/{layer}/{part.name}", *part.shape)

        return [
            KVCache(**{part.name: take(layer, part) for part in self._cache_parts(layer)})
            for layer in range(self.num_layers)
        ]
