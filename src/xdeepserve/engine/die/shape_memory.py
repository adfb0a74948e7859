"""Memory of a die in a time-only run: tensors are shapes, and only data that the host reads is real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from xdeepserve.comm.exchange.rows import TokenCopies
from xdeepserve.engine.deploy.sizes import ExpertSizes, KVSizes, StepSizes
from xdeepserve.engine.die.die_memory import DieMemory, shard_of
from xdeepserve.engine.die.expert_memory import ExpertMemory
from xdeepserve.engine.die.kv_memory import KVMemory
from xdeepserve.engine.die.replicas import RedundantSlots, ReplicaMap
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.die.workspace import MAX_VIEWS, Workspace
from xdeepserve.engine.numbers import DieRank
from xdeepserve.hw.address_space import AddressSpace
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Address, Area, MemoryPlan
from xdeepserve.model.cache_layout import entries_nbytes
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.packing import ArraySpec, packed_shapes, shape_only
from xdeepserve.model.tensors import Held, ModelWeights
from xdeepserve.model.weights import Recipe, assemble, assemble_experts, select, weight_specs
from xdeepserve.step.frame import KVCache

# Index lists of a step and its results: few bytes, and the host's scheduler lives on them.
REAL = frozenset(
    {"positions", "slots", "seq_of", "block_tables", "token_ids", "carried_seq", "carried_row"}
    | {"next_token_ids", "logit_rows", "num_drafts", "token_after"}
    | {"draft_rows/0", "draft_rows/1", "draft_ends", "draft_mended", "draft_kept", "draft_counts"}
    | {f"{name}/{index}" for name in ("sampled", "num_accepted", "drafts") for index in (0, 1)}
)
BYTES_OF_PIECE = 32  # by which a piece of a KV block is represented, so that transfers have something to move


def piece_weight(c: ModelConfig, recipe: Recipe, block_size: int, steps: StepSizes) -> float:
    """Bytes of KV that each byte of a block's pieces stands for: two in each layer where blocks go from TE to
    TE, else a single one."""
    num_layers = c.num_hidden_layers + steps.mtp
    num_pieces = 1 if steps.role == "both" else 2 * num_layers
    return block_size * entries_nbytes(c, recipe, num_layers) / (num_pieces * BYTES_OF_PIECE)


class ShapeWorkspace(Workspace):
    """Workspace with real memory for the names in REAL; all other buffers are shapes of any size."""

    def __init__(self, area: Area) -> None:
        super().__init__(area)
        self._dtypes: dict[str, np.dtype] = {}

    def plan(self, name: str, dtype: npt.DTypeLike, *shape: int) -> None:
        """Reserve memory for a real buffer; remember only the dtype of any other buffer."""
        if name in REAL or name.startswith("kv pieces"):
            super().plan(name, dtype, *shape)
        else:
            self._dtypes[name] = np.dtype(dtype)

    def take(self, name: str, *shape: int) -> Array:
        """Return an array on a real buffer, or a shape without memory."""
        if name not in self._dtypes:
            return super().take(name, *shape)
        key = (name, *shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = shape_only(self._dtypes[name], *shape)
        return view


class DrawnRouting(Protocol):
    """Draws where tokens go in a time-only run (engine/ways/routing.py)."""

    def set_tables(self, log2phy: Array, logcnt: Array) -> None: ...

    def take_load(self) -> Array: ...


class DrawnReplicas(ReplicaMap):
    """Replica map of a die in a time-only run, where one routing draws the experts for all dies.

    The routing keeps the map and counts the load for all dies that share it.
    """

    def __init__(
        self,
        space: Workspace,
        config: ModelConfig,
        placed: ExpertSizes,
        rank: DieRank,
        routing: DrawnRouting | None,
    ) -> None:
        super().__init__(space, config, placed, rank)
        self._routing = routing
        self._reported: Array = np.broadcast_to(np.zeros((), np.int32), self._shape)

    def set_tables(self, log2phy: npt.NDArray[np.int32], logcnt: npt.NDArray[np.int32]) -> None:
        """Pass the new replica tables to the routing, if this die is the one that reports to it."""
        if self._routing is not None:
            self._routing.set_tables(log2phy, logcnt)

    def report(self) -> None:
        """Take the load of all dies together; report nothing if another die has the routing."""
        if self._routing is not None:
            self._reported = self._routing.take_load()

    @property
    def reported(self) -> Array:
        """Counts of the last report, int32 [layers, E]."""
        return self._reported


class ShapeSlots(RedundantSlots):
    """Redundant slots for time-only runs: filling them moves no bytes but takes as long."""

    def plan_staging(self, area: Area, die: int) -> None:
        """Remember the host's node; no staging memory is reserved, since no bytes move."""
        self._host = area.node

    def staged(self, number: int, slot: int) -> list[tuple[Address, int]]:
        """List pieces of the sizes that real staging would have, all at offset 0 of the host."""
        return [(Address(self._host, 0), nbytes) for _, nbytes in self._parts[number]]

    def stage(
        self, memories: AddressSpace, number: int, slot: int, arrays: Callable[[], list[Array]]
    ) -> None:
        """Write nothing to the host: no die reads staged bytes in a time-only run."""

    async def load(self, die: Die, number: int, slot: int) -> None:
        """Pass the virtual time for loading each of the slot's arrays."""
        for _, nbytes in self._parts[number]:
            await die.dma.pass_time(self._host, die.index, nbytes, name="replicas")


class ModelShapes:
    """Weights and caches of a kind of die, as shapes that all dies of the kind share."""

    def __init__(self, team: Team) -> None:
        self.team, self.config, self.recipe = team, team.config, team.recipe
        # All ranks of a TP group hold parts of the same shapes.
        self.specs = shard_of(team.sizes.groups, DieRank(0)).specs(self._whole_specs())
        self.model = assemble(self.config, self.specs, packed_shapes(self.specs), is_packed=True)

    def _whole_specs(self) -> dict[str, ArraySpec]:
        experts, steps = self.team.sizes.experts, self.team.sizes.steps
        is_away = experts.where == "away"
        held = 0 if is_away else max(map(len, experts.slots_of))
        specs = weight_specs(self.config, self.recipe, steps.max_model_len, held, steps.num_mtp_layers)
        return select(specs, "attention" if is_away else "all")

    def cache(self) -> KVCache:
        """Return the shape of any layer's KV cache: latents and RoPE keys, of two bytes each."""
        c, kv = self.config, self.team.sizes.kv
        latent, k_pe = (
            shape_only(np.uint16, kv.num_blocks * c.num_key_value_heads, kv.block_size, width)
            for width in (c.value_columns, c.key_columns)
        )
        return KVCache(latent, shape_only(np.float32, 0, 0), k_pe)


class ShapeKV(KVMemory):
    """KV blocks of which a few bytes are real, and those only where something moves them.

    Where blocks go from TE to TE each layer has pieces of its own; else a block is one piece.
    The states that a second MTP layer mends are not among them.
    """

    def __init__(self, space: Workspace, shapes: ModelShapes) -> None:
        kv, steps = shapes.team.sizes.kv, shapes.team.sizes.steps
        super().__init__(space, shapes.config, shapes.recipe, kv, steps.mtp)
        self._shapes, self._is_moved = shapes, steps.role != "both"

    def plan(self) -> None:
        """Reserve the real bytes of each block."""
        self._space.plan("kv/tail", np.float32)
        for name, nbytes in self.block_parts:
            self._space.plan(name, np.uint8, self.sizes.num_blocks, nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes that the blocks of all layers would have."""
        entries = entries_nbytes(self._config, self._recipe, self._num_layers)
        return self.sizes.num_blocks * self.sizes.block_size * entries

    @property
    def piece_weight(self) -> float:
        """Bytes of KV that each byte of a piece stands for, on average over all layers' latents and keys."""
        return piece_weight(self._config, self._recipe, self.sizes.block_size, self._shapes.team.sizes.steps)

    @property
    def parts_by_layer(self) -> list[list[tuple[str, int]]]:
        """The buffers of the pieces, and the bytes of each, for each layer of the main model and for MTP."""
        if not self._is_moved:
            return [[("kv pieces", BYTES_OF_PIECE)]]
        pieces = [
            [(f"kv pieces/{layer}/{what}", BYTES_OF_PIECE) for what in ("latent", "k_pe")]
            for layer in range(self._num_layers)
        ]
        return [
            *pieces[: self._num_main],
            [piece for layer in pieces[self._num_main :] for piece in layer],
        ]

    def caches(self) -> list[KVCache]:
        """Shapes of the blocks of each layer, all the same."""
        return [self._shapes.cache()] * self._num_layers


class ShapeMemory(DieMemory):
    """Memory of a die with a DP group in a time-only run; sizes are reported as if all bytes were there."""

    kv: ShapeKV

    def __init__(
        self, area: Area, shapes: ModelShapes, rank: DieRank, routing: DrawnRouting | None = None
    ) -> None:
        """`routing` is told of maps of replicas, and asked for the load, by one die for all."""
        self.shapes, self._routing = shapes, routing
        super().__init__(area, shapes.team, rank)
        self.weight_nbytes = sum(spec.nbytes for spec in self.specs.values())
        self.cache_nbytes = self.kv.nbytes
        self.activation_nbytes = area.nbytes

    def _weight_specs(self) -> dict[str, ArraySpec]:
        return self.shapes.specs

    def _new_space(self, area: Area) -> Workspace:
        return ShapeWorkspace(area)

    def _new_kv(self, kv: KVSizes) -> KVMemory:
        return ShapeKV(self._space, self.shapes)

    def _new_replicas(self, rank: DieRank) -> ReplicaMap:
        return DrawnReplicas(self._space, self.config, self.placed, rank, self._routing)

    def _new_redundant(self, rank: DieRank) -> RedundantSlots:
        return ShapeSlots(self._space, self.config, self.placed, rank, self.specs)

    def _plan_weights(self) -> None:
        """Reserve nothing: a time-only run has no weights."""

    def assemble(self) -> ModelWeights:
        """Return the model's structure, built on shapes."""
        return self.shapes.model

    def weights(self) -> dict[str, Array]:
        """Return no arrays: a time-only run has no weights to fill."""
        return {}


class ShapeExpertMemory(ExpertMemory):
    """Memory of an expert die in a time-only run: real flags for its persistent kernels, and shapes."""

    def __init__(
        self,
        plan: MemoryPlan,
        config: ModelConfig,
        recipe: Recipe,
        placed: ExpertSizes,
        index: int,
        items: int,
    ) -> None:
        super().__init__(plan, config, recipe, placed, index, items, max_rows=0, is_flow=False)
        self.weight_nbytes, self.activation_nbytes = sum(spec.nbytes for spec in self.specs.values()), 0

    def _plan_space(self, area: Area, is_flow: bool) -> Workspace:
        space = ShapeWorkspace(area)
        if self.placed.redundant_of[self.index]:
            self.redundant = ShapeSlots(space, self.config, self.placed, self.index, self.specs)
        for item in range(self.items):
            space.plan(f"sent/{item}", np.float32)
        space.plan("flow/answers", np.float32)
        self.weight_nbytes = 0
        return space

    def gathered(self, parts: Sequence[TokenCopies]) -> TokenCopies:
        """Return the only arrival: time-only exchanges always deliver one."""
        (one,) = parts
        return one

    def answers(self, rows: int) -> Array:
        """Return the shape [N, H] of answers."""
        return self.workspace.take("flow/answers", rows, self.config.hidden_size)

    def assemble(self) -> list[Held]:
        """Build the experts of each MoE layer, as shapes."""
        layers = assemble_experts(self.specs, packed_shapes(self.specs))
        return [layers[number] for number in self.placed.order]

    def weights(self) -> dict[str, Array]:
        """Return no arrays: a time-only run has no weights to fill."""
        return {}
