"""Replicas of experts, as dies see them (xDeepServe 4.5, steps 1 and 4).

In each layer a die has its own routed experts first, the *primaries*, and then redundant slots. A die may
also have slots alone, or slots beside a copy of the shared expert. Physical experts number all of these die
by die (`ExpertSizes.slots_of`), and then the copies of the shared expert. A die with a gate maps logical
experts to physical ones, and counts how many of its tokens chose each:

    log2phy int32 [layers, E, R], logcnt int32 [layers, E]   an expert's replicas, and how many it has
    load    int32 [layers, E]                                 tokens since the last report

The map is the paper's table [tokens, logical experts] without its rows: column e rotates over the logcnt[e]
replicas of e.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from xdeepserve.engine.deploy.sizes import ExpertSizes
from xdeepserve.engine.die.workspace import Workspace
from xdeepserve.engine.numbers import DieRank
from xdeepserve.errors import ProtocolError
from xdeepserve.hw.address_space import AddressSpace
from xdeepserve.hw.die import Die
from xdeepserve.hw.engines import Copy
from xdeepserve.hw.memory import Address, Area, Region
from xdeepserve.model.canonical import Array
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.packing import ArraySpec
from xdeepserve.model.tensors import MLP, MoE, layer_section

NOTHING = -1  # in a redundant slot, or while it is being loaded


def primaries_only(experts: ExpertSizes) -> list[list[int]]:
    """Return phy2log [layers, physical experts] of a TE whose redundant slots are all empty."""
    row: list[int] = []
    for held, redundant in zip(experts.experts_of, experts.redundant_of, strict=True):
        row += [*held, *[NOTHING] * redundant]
    return [list(row) for _ in experts.layers]


def replica_tables(
    config: ModelConfig, placed: ExpertSizes, phy2log: Sequence[Sequence[int]]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Build log2phy and logcnt from phy2log [layers, physical experts]; an expert's primary is its first
    replica."""
    num_experts, most = config.n_routed_experts, placed.max_replicas
    log2phy = np.zeros((len(phy2log), num_experts, most), np.int32)
    logcnt = np.zeros((len(phy2log), num_experts), np.int32)
    is_primary = np.array(primaries_only(placed)[0]) != NOTHING
    order = np.argsort(~is_primary, kind="stable")
    for number, row in enumerate(np.array(phy2log)):
        physical = order[row[order] != NOTHING]
        physical = physical[np.argsort(row[physical], kind="stable")]  # expert by expert
        experts = row[physical]
        logcnt[number] = np.bincount(experts, minlength=num_experts)
        first = np.cumsum(logcnt[number]) - logcnt[number]
        log2phy[number, experts, np.arange(len(experts)) - first[experts]] = physical
    return log2phy, logcnt


def first_map(experts: ExpertSizes) -> list[list[int]]:
    """Return phy2log [layers, physical experts] of a TE that begins.

    Redundant slots hold what was loaded with the primaries, or nothing.
    """
    row = primaries_only(experts)[0]
    for holder, slots in enumerate(experts.free_slots):
        loaded = experts.loaded_of(holder)
        row[slots.start : slots.start + len(loaded)] = loaded
    return [list(row) for _ in experts.layers]


@functools.lru_cache(maxsize=4)
def first_tables(
    config: ModelConfig, experts: ExpertSizes
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Build the tables of `first_map`; all dies share them and only read them."""
    return replica_tables(config, experts, first_map(experts))


class ReplicaMap:
    """Map from logical experts to their replicas, for one die's tokens.

    Construct it to plan its buffers; call `start` once there is memory.
    """

    def __init__(self, space: Workspace, config: ModelConfig, experts: ExpertSizes, rank: DieRank) -> None:
        self._space, self._config, self._experts, self._rank = space, config, experts, rank
        shape = len(experts.layers), config.n_routed_experts
        self._shape, self.most = shape, experts.max_replicas
        self.collects = experts.balance_interval_ns > 0
        space.plan("log2phy", np.int32, *shape, self.most)
        space.plan("logcnt", np.int32, *shape)
        if self.collects:
            space.plan("load", np.int32, *shape)
            space.plan("reported_load", np.int32, *shape)
        self._number: dict[int, int] = {}  # of each layer with experts

    def start(self, layers: Sequence[MoE]) -> None:
        """Number the MoE layers in order, and set the map to the experts' first places."""
        self._number = {id(layer): number for number, layer in enumerate(layers)}
        self.begin()

    def begin(self) -> None:
        """Set the map to the places where experts were first loaded."""
        self.set_tables(*first_tables(self._config, self._experts))

    def set_map(self, phy2log: Sequence[Sequence[int]]) -> None:
        """Set the replicas of all experts from phy2log [layers, physical experts], each expert's primary
        first."""
        self.set_tables(*replica_tables(self._config, self._experts, phy2log))

    def set_tables(self, log2phy: npt.NDArray[np.int32], logcnt: npt.NDArray[np.int32]) -> None:
        """Set the replicas of all experts from log2phy [layers, E, R] and logcnt [layers, E]."""
        self._space.take("log2phy", *self._shape, self.most)[:] = log2phy
        self.logcnt[:] = logcnt

    @property
    def logcnt(self) -> Array:
        return self._space.take("logcnt", *self._shape)

    def tables(self, moe: MoE) -> tuple[Array, Array, Array | None]:
        """Return a layer's log2phy [E, R], logcnt [E] and load [E]; load is None if it is not counted."""
        number = self._number[id(moe)]
        load = self._space.take("load", *self._shape)[number] if self.collects else None
        return self._space.take("log2phy", *self._shape, self.most)[number], self.logcnt[number], load

    def find(self, out: Array, topk_idx: Array, moe: MoE) -> None:
        """Write the physical experts of topk_idx [T, K] into `out`, int32 [T, K].

        Row i takes replica (rank + i) mod r. No die asks another die (the paper's "communication-free").
        Ranks begin at different replicas because the first rows of small batches would otherwise all meet at
        one replica.
        """
        log2phy, logcnt, _ = self.tables(moe)
        row = np.arange(self._rank, self._rank + len(topk_idx), dtype=np.int32)[:, None]
        out[:] = log2phy[topk_idx, row % logcnt[topk_idx]]

    def collect(self, topk_idx: Array, moe: MoE) -> None:
        """Count the tokens of topk_idx [T, K] by logical expert."""
        number, load = self._number[id(moe)], self._space.take("load", *self._shape)
        load[number] += np.bincount(topk_idx.reshape(-1), minlength=self._shape[1]).astype(np.int32)

    def report(self) -> None:
        """Copy the counts to the buffer that the host reads, and begin counting anew."""
        load = self._space.take("load", *self._shape)
        self.reported[:] = load
        load[:] = 0

    def forget_load(self) -> None:
        """Set all load counts to zero, the last report's included."""
        if self.collects:
            self._space.take("load", *self._shape)[:] = 0
            self.reported[:] = 0

    @property
    def reported(self) -> Array:
        """Counts of the last report, int32 [layers, E]."""
        return self._space.take("reported_load", *self._shape)


class RedundantSlots:
    """Redundant expert slots of a die: their contents in each layer, and where the bytes come from.

    In HBM `slot_expert` int32 [layers, slots] says which expert is whole in a slot. `num_rows` int64 [layers]
    counts the rows that have come for the die's experts so far. Construct it to plan; call `start` once there
    is memory.
    """

    def __init__(
        self,
        space: Workspace,
        config: ModelConfig,
        experts: ExpertSizes,
        holder: int,
        specs: dict[str, ArraySpec],
    ) -> None:
        self._loaded = experts.loaded_of(holder)  # with the primaries, into the first slots
        self._space, self.num_slots = space, experts.redundant_of[holder]
        self._num_primaries = len(experts.experts_of[holder])
        layers = experts.layers
        by_layer: dict[str, list[tuple[str, int]]] = {}
        for name, spec in specs.items():
            layer, is_expert, _ = name.partition("experts.")
            if is_expert:
                by_layer.setdefault(layer, []).append((f"weights/{name}", spec.nbytes // spec.shape[0]))
        self._parts = [by_layer.get(layer_section(config, layer).prefix, []) for layer in layers]
        self._sizes = [sum(nbytes for _, nbytes in parts) for parts in self._parts]  # of a slot, by layer
        self._before = [0, *accumulate(self._sizes)]
        space.plan("slot_expert", np.int32, len(layers), self.num_slots)
        space.plan("num_rows", np.int64, len(layers))
        self.staging: Region | None = None
        self._number: dict[int, int] = {}

    def plan_staging(self, area: Area, die: int) -> None:
        """Reserve staging room in a host's memory for the experts that fill this die's slots."""
        self.staging = area.alloc(f"replicas of die {die}", self.num_slots * self.nbytes)

    @property
    def host_regions(self) -> list[Region]:
        """Regions of a host's memory that belong to these slots."""
        return [] if self.staging is None else [self.staging]

    @property
    def nbytes(self) -> int:
        """Size of a slot over all layers, in bytes."""
        return self._before[-1]

    def start(self, layers: Sequence[MLP]) -> None:
        """Number the experts' structures in the order of their layers, and set the slots' first contents."""
        for number, layer in enumerate(layers):
            self._number.setdefault(id(layer), number)
        self.begin()

    def begin(self) -> None:
        """Note the experts loaded with the primaries in the first slots; all others become empty."""
        self.empty()
        self.experts[:, : len(self._loaded)] = self._loaded

    def empty(self) -> None:
        """Mark all slots as empty."""
        self.experts[:] = NOTHING

    @property
    def experts(self) -> Array:
        return self._space.take("slot_expert", len(self._parts), self.num_slots)

    @property
    def num_rows(self) -> Array:
        return self._space.take("num_rows", len(self._parts))

    def staged(self, number: int, slot: int) -> list[tuple[Address, int]]:
        """List addresses and sizes of a slot's staged pieces in the host's memory, for MoE layer `number`."""
        assert self.staging is not None
        at = self.staging.address.plus(self.num_slots * self._before[number] + slot * self._sizes[number])
        pieces = []
        for _, nbytes in self._parts[number]:
            pieces.append((at, nbytes))
            at = at.plus(nbytes)
        return pieces

    def stage(
        self, memories: AddressSpace, number: int, slot: int, arrays: Callable[[], list[Array]]
    ) -> None:
        """Write the arrays for a slot of MoE layer `number` to the host's staging memory."""
        for (address, nbytes), array in zip(self.staged(number, slot), arrays(), strict=True):
            assert array.nbytes == nbytes
            memories.write(address, array.tobytes())

    async def load(self, die: Die, number: int, slot: int) -> None:
        """Copy a slot's staged arrays from the host to HBM, one by one, with the die's DMA engine."""
        pairs = zip(self.staged(number, slot), self.pieces(number, slot), strict=True)
        for (src, nbytes), (dst, _) in pairs:
            await die.dma.copy([Copy(src, dst, nbytes)], name="replicas")

    def pieces(self, number: int, slot: int) -> list[tuple[Address, int]]:
        """List addresses and sizes of a slot's pieces in HBM, for MoE layer `number`."""
        place = self._num_primaries + slot
        return [
            (self._space.address(name).plus(place * nbytes), nbytes) for name, nbytes in self._parts[number]
        ]

    def tables(self, layer: MLP) -> tuple[Array, Array]:
        """Return a layer's slot_expert [slots] and num_rows [1]."""
        number = self._number[id(layer)]
        return self.experts[number], self.num_rows[number : number + 1]

    def accept(self, local_idx: Array, layer: MLP) -> None:
        """Count received rows by MoE layer; raise ProtocolError for a row to an empty slot.

        `local_idx` [N] numbers the experts on this die, redundant slots after the primaries.
        """
        number = self._number[id(layer)]
        self.num_rows[number] += len(local_idx)
        if not len(local_idx) or int(local_idx.max()) < self._num_primaries:
            return
        slots = np.unique(local_idx[local_idx >= self._num_primaries]) - self._num_primaries
        for slot in slots.tolist():
            if self.experts[number, slot] == NOTHING:
                raise ProtocolError(
                    f"a row has come for redundant slot {slot} of expert layer {number}, which holds no "
                    "expert, or half of one"
                )


async def load_experts(die: Die, redundant: RedundantSlots, loads: Sequence[tuple[int, int, int]]) -> None:
    """Copy experts from the host to slots; each load is (MoE layer, slot, expert).

    The DMA engine carries them array by array while the die computes. A slot therefore counts as empty until
    its last array is there.
    """
    for number, slot, _ in loads:
        redundant.experts[number, slot] = NOTHING
    for number, slot, expert in loads:
        await redundant.load(die, number, slot)
        redundant.experts[number, slot] = expert
