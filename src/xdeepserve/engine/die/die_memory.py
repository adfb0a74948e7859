"""Contents of a die's HBM app area: weights, KV cache, activations and results."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xdeepserve.engine.deploy.sizes import GroupSizes, KVSizes
from xdeepserve.engine.die import stage_buffers
from xdeepserve.engine.die.kv_memory import KVMemory
from xdeepserve.engine.die.replicas import RedundantSlots, ReplicaMap
from xdeepserve.engine.die.stage_buffers import PARTS, Extent, holds
from xdeepserve.engine.die.team import Team
from xdeepserve.engine.die.workspace import Workspace
from xdeepserve.engine.messages import LOGPROB_SLOTS
from xdeepserve.engine.numbers import DieRank
from xdeepserve.hw.memory import Area, Memory, Region
from xdeepserve.model.canonical import Array
from xdeepserve.model.packing import ArraySpec
from xdeepserve.model.sharding import Shard
from xdeepserve.model.tensors import ModelWeights
from xdeepserve.model.weights import assemble, select, weight_specs
from xdeepserve.step.layer import Holds

F32, I32 = np.float32, np.int32


def shard_of(groups: GroupSizes, rank: DieRank) -> Shard:
    """Return the share of sharded weights that belongs to a die of a DP group, by its rank."""
    mode = "o-proj" if groups.o_proj_tp > 1 else groups.tp_mode
    return Shard(rank % groups.num_sharing, groups.num_sharing, mode)


def part_prefix(microbatch: int) -> str:
    """Prefix of the buffer names of a single microbatch."""
    return f"mb{microbatch}/"


class DieMemory:
    """Memory layout of a die's app area in HBM. Construct it to plan; call `materialise` to use it.

    Readers take the part of the TE's sizes that they need: `steps`, `walk`, `groups`, `placed` for experts,
    or `kv`, the KV blocks with their sizes.
    """

    replicas: ReplicaMap | None = None  # where there are replicas of experts
    redundant: RedundantSlots | None = None

    def __init__(self, area: Area, team: Team, rank: DieRank) -> None:
        sizes = team.sizes
        groups, placed = sizes.groups, sizes.experts
        self.config, self.recipe = team.config, team.recipe
        self.groups, self.steps, self.walk, self.placed = groups, sizes.steps, sizes.walk, placed
        self.shard = shard_of(groups, rank)
        per_rank, first = self.config.num_attention_heads // groups.tp, rank % groups.tp
        self.heads = range(first * per_rank, (first + 1) * per_rank)
        is_apart = placed.where == "away"
        self.experts = range(0) if is_apart else placed.experts_of[rank]
        # What is loaded into the first slots; others are filled later, or never.
        self.held = self.experts if is_apart else (*self.experts, *placed.loaded_of(rank))
        self.slots = range(0) if is_apart else placed.slots_of[rank]  # their physical numbers
        self.is_shared = not is_apart and placed.is_shared(rank)  # a copy of the shared one for all
        # Tokens are led to replicas of experts, or to copies of the shared one on other dies.
        self.is_dispatched = not is_apart and placed.num_shared_dies > 0  # the shared one's rows, too
        self.has_routes = placed.has_slots or self.is_dispatched
        self.specs, self._space = self._weight_specs(), self._new_space(area)
        self.kv = self._new_kv(sizes.kv)
        self._plan_weights()
        self.weight_nbytes = area.nbytes
        self.kv.plan()
        self.cache_nbytes = area.nbytes - self.weight_nbytes
        self._plan_activations()
        self._plan_results()
        if placed.has_slots:
            self.replicas = self._new_replicas(rank)
            if not is_apart and placed.redundant_of[rank]:
                self.redundant = self._new_redundant(rank)
        self.activation_nbytes = area.nbytes - self.weight_nbytes - self.cache_nbytes

    def _weight_specs(self) -> dict[str, ArraySpec]:
        steps, placed = self.steps, self.placed
        specs = weight_specs(
            self.config, self.recipe, steps.max_model_len, len(self.slots), steps.num_mtp_layers
        )
        if placed.where != "away" and not placed.num_shared_dies:
            return self.shard.specs(select(specs, "all"))
        return self.shard.specs(select(specs, "attention", *PARTS[self.holds]))

    @property
    def holds(self) -> Holds:
        """Kinds of experts on the die that serve all dies' tokens: routed, shared or both."""
        return holds(self.slots, self.is_shared)

    def _new_space(self, area: Area) -> Workspace:
        return Workspace(area)

    def _new_kv(self, kv: KVSizes) -> KVMemory:
        return KVMemory(self._space, self.config, self.recipe, kv, self.steps.mtp)

    def _new_replicas(self, rank: DieRank) -> ReplicaMap:
        return ReplicaMap(self._space, self.config, self.placed, rank)

    def _new_redundant(self, rank: DieRank) -> RedundantSlots:
        return RedundantSlots(self._space, self.config, self.placed, rank, self.specs)

    def _plan_weights(self) -> None:
        for name, spec in self.specs.items():
            self._space.plan(f"weights/{name}", spec.packed_dtype, *spec.packed_shape)

    def _plan_activations(self) -> None:
        c, steps, plan = self.config, self.steps, self._space.plan
        for name in ("h", "hidden", "embedding"):
            plan(name, F32, steps.max_tokens, c.hidden_size)
        plan("both", F32, steps.max_tokens, 2 * c.hidden_size)
        if c.v4 is not None:
            plan("streams", F32, steps.max_tokens, c.v4.hc_mult, c.hidden_size)
            plan("head_logits", F32, steps.max_tokens, c.v4.hc_mult)
        plan("positions", I32, steps.max_tokens)
        plan("slots", I32, steps.max_tokens)
        plan("seq_of", I32, steps.max_tokens)
        plan("block_tables", I32, steps.max_seqs, self.kv.sizes.max_blocks_per_seq)
        if steps.plans_ahead or steps.mtp:
            plan("token_ids", I32, steps.max_tokens)
        if steps.plans_ahead:  # what a step hands to the next one: see carried.py
            plan("carried_seq", I32, steps.max_seqs)
            plan("carried_row", I32, steps.max_seqs)
        walk, parts = self.walk, [""]
        if walk.turns == "overlap":
            parts = [part_prefix(m) for m in range(walk.num_parts)]
        for prefix in parts:
            self._plan_stages(prefix)

    def _plan_stages(self, prefix: str) -> None:
        """Reserve the buffers of a layer's stages, for a step or for one of its microbatches."""
        c, recipe, groups, most = self.config, self.recipe, self.groups, self._extent

        def plan(name: str, dtype: npt.DTypeLike, *shape: int) -> None:
            self._space.plan(prefix + name, dtype, *shape)

        stage_buffers.plan_layer(plan, c, recipe, most, len(self.heads), groups.tp, groups.tp_mode)
        if any(self.placed.experts_of):
            physical = c.num_experts_per_tok + self.is_dispatched if self.has_routes else 0
            stage_buffers.plan_gate(plan, c, most, physical)
            if self.placed.where != "away":
                stage_buffers.plan_own_experts(plan, c, recipe, most, len(self.slots))
        if groups.tp > 1:
            stage_buffers.plan_tensor_parallel(plan, c, most, self.shard.mode)
        if groups.o_proj_tp > 1:
            stage_buffers.plan_shared_out_proj(plan, c, recipe, most, groups.o_proj_tp)

    @property
    def _extent(self) -> Extent:
        steps, expert, copied = self.steps, self.max_expert_rows, self._max_shared_rows
        most = steps.max_part, self.groups.max_slice, expert, copied
        return Extent(*most, steps.max_model_len, self.num_choices)

    @property
    def _max_shared_rows(self) -> int:
        """Largest number of rows that one step can bring to a copy of the shared expert on this die."""
        if not self.is_shared:
            return 0
        # Each die's tokens find the shared expert on one die.
        return -(-self.groups.num_dies // self.placed.num_shared_dies) * self.groups.max_slice

    @property
    def max_expert_rows(self) -> int:
        """Largest number of token copies that one step can bring to this die."""
        copies = min(self.config.num_experts_per_tok, len(self.slots))
        return self.groups.num_dies * self.groups.max_slice * copies + self._max_shared_rows

    @property
    def num_choices(self) -> int:
        """Microbatches of which something stays until the next layer or half of one, in buffers that they
        share: chosen positions, or a hyper-connection's weights."""
        walk, stays = self.walk, self.config.shared_choices or self.config.v4 is not None
        return walk.num_microbatches if stays and walk.num_parts == 1 else 1

    def layer_workspace(self, microbatch: int) -> Workspace:
        """Return the buffers of a layer's stages; each microbatch has its own set where microbatches
        overlap."""
        return self._space.part(part_prefix(microbatch))

    def _plan_results(self) -> None:
        steps, plan = self.steps, self._space.plan
        for index in range(steps.num_result_sets):
            plan(f"sampled/{index}", I32, steps.max_logit_rows)
            plan(f"num_accepted/{index}", I32, steps.max_seqs)
            plan(f"drafts/{index}", I32, steps.max_seqs, max(1, steps.mtp))
            plan(f"logprob_ids/{index}", I32, steps.max_logit_rows, LOGPROB_SLOTS)
            plan(f"logprobs/{index}", F32, steps.max_logit_rows, LOGPROB_SLOTS)
            plan(f"ranks/{index}", I32, steps.max_logit_rows)
            plan(f"logits/{index}", F32, steps.max_logit_rows, self.config.vocab_size)
        plan("logit_hidden", F32, steps.max_logit_rows, self.config.hidden_size)
        if steps.mtp:
            plan("draft_logits", F32, steps.max_seqs, self.config.vocab_size)
            self._plan_draft_lists()

    def _plan_draft_lists(self) -> None:
        """Reserve the index lists of MTP's passes: see drafts.py."""
        steps, plan = self.steps, self._space.plan
        plan("next_token_ids", I32, steps.max_tokens)
        plan("logit_rows", I32, steps.max_logit_rows)
        for depth in range(steps.mtp):
            plan(f"draft_rows/{depth}", I32, 5, steps.max_tokens)
        for name in ("num_drafts", "token_after", "draft_mended"):
            plan(name, I32, steps.max_seqs)
        plan("draft_ends", I32, 3, steps.max_seqs)
        plan("draft_kept", I32, 2, steps.max_seqs)
        plan("draft_counts", I32, 4)

    @property
    def host_regions(self) -> list[Region]:
        """Regions of a host's memory that belong to this die."""
        own = self.kv.host_regions
        return own if self.redundant is None else own + self.redundant.host_regions

    def materialise(self, memory: Memory) -> None:
        """Find all buffers in the real memory."""
        self._space.materialise(memory)

    def result(self, name: str, step: int, *shape: int) -> Array:
        """Return where a step writes what the host reads. With a set for the step after it, it is safe until
        that one has ended."""
        return self._space.take(f"{name}/{step % self.steps.num_result_sets}", *shape)

    @property
    def workspace(self) -> Workspace:
        """All named buffers of the die."""
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
