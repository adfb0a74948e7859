"""Contents of an expert die's memory: weights, rows in transit, and the flags of its kernels."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xdeepserve.comm.exchange.rows import TokenCopies
from xdeepserve.engine.deploy.sizes import ExpertSizes
from xdeepserve.engine.die.replicas import RedundantSlots
from xdeepserve.engine.die.stage_buffers import PARTS, holds, plan_experts
from xdeepserve.engine.die.workspace import Workspace
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.die import Die
from xdeepserve.hw.memory import Area, Memory, MemoryPlan, Region
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.tensors import Held
from xdeepserve.model.weights import Recipe, assemble_experts, select, weight_specs

FLAG = struct.Struct("<Q")
STOP = 2**64 - 1  # on the doorbell: the end


class Flag:
    """Counter in a die's metadata area; kernels and the host poll it to wait for each other."""

    def __init__(self, plan: MemoryPlan, name: str) -> None:
        self._region: Region = plan.metadata.alloc(name, 32, align=32)
        self.name = name

    def write(self, memory: Memory, value: int) -> None:
        memory.write(self._region.offset, FLAG.pack(value))

    def read(self, memory: Memory) -> int:
        return int(FLAG.unpack_from(memory.read(self._region.offset, FLAG.size))[0])

    async def reaches(self, die: Die, value: int) -> int:
        """Wait without a deadline until the flag is at least `value`; return the value then read."""
        memory = die.memory
        seen = self.read(memory)
        if seen >= value:
            return seen  # the poll that sees it is hidden behind the kernel's work
        await die.wait_fields(
            self._region.offset,
            FLAG.size,
            lambda offset, nbytes: self.read(memory) >= value,
            deadline_ns=None,
            describe=lambda: Waiting(self.name, die.index, die.index, self.name, value, self.read(memory)),
            idle=True,
        )
        return self.read(memory)


class FlowRows(NamedTuple):
    """Token copies of several arrivals, one after another, in buffers of the die's memory."""

    payload: Array  # [N, H]
    scale: Array  # float32 [N]
    expert_idx: Array  # int32 [N], physical

    def __len__(self) -> int:
        return len(self.scale)


class ExpertMemory:
    """Memory layout of an expert die: routed experts, the shared expert or both, and rows in transit.

    `index` counts the expert dies of the TE. `items` are the microbatches of all domains, each with a buffer
    for `max_rows` rows of answers. In dataflow mode (`is_flow`) rows of several arrivals are gathered into
    one batch. Construct it to plan; call `materialise` to use it.
    """

    redundant: RedundantSlots | None = None  # where there are replicas of experts

    def __init__(
        self,
        plan: MemoryPlan,
        config: ModelConfig,
        recipe: Recipe,
        placed: ExpertSizes,
        index: int,
        items: int,
        max_rows: int,
        is_flow: bool,
    ) -> None:
        self.config, self.recipe, self.items = config, recipe, items
        self.placed, self.index = placed, index
        self.die = plan.node
        self.is_shared = placed.is_shared(index)
        self.experts, self.slots = placed.experts_of[index], placed.slots_of[index]  # physical numbers
        self.held = (*self.experts, *placed.loaded_of(index))  # what is loaded into the first of these slots
        self.holds = holds(self.slots, self.is_shared)
        self.max_rows = max_rows
        self.next_answer = 0  # row of the buffer of answers
        specs = weight_specs(config, recipe, 1, len(self.slots), placed.num_mtp_layers)
        self.specs = select(specs, *PARTS[self.holds])
        self.workspace = self._plan_space(plan.app, is_flow)
        self._plan_flags(plan)
        self.cache_nbytes = 0
        self.activation_nbytes = plan.app.nbytes - self.weight_nbytes

    def _plan_space(self, area: Area, is_flow: bool) -> Workspace:
        """Reserve the weights and buffers of this die in its app area."""
        config, recipe, placed, max_rows = self.config, self.recipe, self.placed, self.max_rows
        space = Workspace(area)
        for name, spec in self.specs.items():
            space.plan(f"weights/{name}", spec.packed_dtype, *spec.packed_shape)
        self.weight_nbytes = area.nbytes
        hidden, wide = config.hidden_size, config.n_shared_experts * config.moe_intermediate_size
        if self.is_shared:
            for name, dtype, width in (
                ("gate_up", np.float32, 2 * wide),
                ("act", np.float32, wide),
                ("q8", np.int8, wide),
                ("q8_scale", np.float32, 1),
            ):
                space.plan(name, dtype, max_rows, width)
        if self.holds != "shared":
            plan_experts(space.plan, config, recipe, max_rows, len(self.slots))
            if placed.redundant_of[self.index]:
                self.redundant = RedundantSlots(space, config, placed, self.index, self.specs)
        if is_flow:
            space.plan("flow/payload", np.int8 if recipe == "int8" else np.float32, max_rows, hidden)
            space.plan("flow/scale", np.float32, max_rows)
            space.plan("flow/expert_idx", np.int32, max_rows)
            space.plan("flow/answers", np.float32, (self.items + 1) * max_rows, hidden)
            return space
        for item in range(self.items):
            space.plan(f"sent/{item}", np.float32, max_rows, hidden)
        return space

    def _plan_flags(self, plan: MemoryPlan) -> None:
        """Reserve the flags for signals among the host and the three kernels."""
        self.doorbell = Flag(plan, "doorbell")
        self.received, self.computed, self.sent = (
            Flag(plan, name) for name in ("A2E received", "experts done", "E2A sent")
        )

    @property
    def host_regions(self) -> list[Region]:
        """Regions of a host's memory that belong to this die."""
        return [] if self.redundant is None else self.redundant.host_regions

    def materialise(self, memory: Memory) -> None:
        """Bind all planned buffers to real memory."""
        self.workspace.materialise(memory)

    def weights(self) -> dict[str, Array]:
        """Return the packed weight arrays; loading fills them, and steps only read."""
        take = self.workspace.take
        return {name: take(f"weights/{name}", *spec.packed_shape) for name, spec in self.specs.items()}

    def num_copied(self, received: TokenCopies) -> int:
        """Count the received rows for this die's copy of the shared expert."""
        if self.holds == "both":
            return int((received.expert_idx >= self.placed.num_slots).sum())
        return len(received) if self.is_shared else 0

    def gathered(self, parts: Sequence[TokenCopies]) -> TokenCopies:
        """Join the rows of several arrivals into one batch in the die's memory.

        This takes no virtual time here: the kernel that sorts rows by expert is billed for the copy.
        """
        take, rows = self.workspace.take, sum(map(len, parts))
        found = FlowRows(
            take("flow/payload", rows, self.config.hidden_size),
            take("flow/scale", rows),
            take("flow/expert_idx", rows),
        )
        for name, out in found._asdict().items():
            np.concatenate([getattr(part, name) for part in parts], out=out)
        return found

    def answers(self, rows: int) -> Array:
        """Reserve rows in the ring buffer of answers and return them as an array [N, H].

        Whoever sends tokens sends again only after the answers have come. So each has at most one exchange's
        rows on their way. The buffer has room for those rows, and for an end that is too short for the next
        batch.
        """
        width, name = self.config.hidden_size, "flow/answers"
        room = self.workspace.size(name) // width
        first = self.next_answer if self.next_answer + rows <= room else 0
        self.next_answer = first + rows
        return self.workspace.take(name, room, width)[first : first + rows]

    def assemble(self) -> list[Held]:
        """Build the experts of each MoE layer on this memory; an MTP layer that is used again comes twice."""
        layers = assemble_experts(self.specs, self.weights())
        if self.redundant is not None:
            self.redundant.start([held.experts for held in layers if held.experts is not None])
        return [layers[number] for number in self.placed.order]
