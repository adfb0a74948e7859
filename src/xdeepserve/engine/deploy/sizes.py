"""Sizes of a task executor fitted to a model: the numbers that it is built from, grouped by their readers.

`fitting.fit` decides every number once. Code that builds something from the sizes takes one part, not all of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec
from msgspec.structs import replace

from xdeepserve.comm.exchange_choices import EXCHANGES
from xdeepserve.engine.deploy.deployment import (
    Carrier,
    Device,
    Exchange,
    ExecutionConfig,
    Hardware,
    HealthConfig,
    Over,
    RecoveryConfig,
    Role,
    ServiceConfig,
    Transport,
)
from xdeepserve.engine.deploy.roles import FLOWING, Turns
from xdeepserve.hw.topology import Topology
from xdeepserve.model.config import TPMode

MAX_REPLICAS = 16  # of an expert, so that maps stay small where there are hundreds of dies


class TEPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Name, role and dies of a TE.

    Dies of DP groups come first, then expert dies, those with routed experts first.
    """

    name: str = "te"
    role: Role = "both"
    first_die: int = 0
    scattered: tuple[int, ...] = ()  # all its dies in order, where they are no neighbours
    hardware: Hardware = "cm384"
    devices: tuple[Device, Device] = ("cm384", "cm384")  # of attention, of experts on dies of their own
    num_dies: int  # of DP groups; expert dies come on top
    num_domains: int = 1  # into which these are divided
    num_routed_dies: int = 0  # with routed experts and no DP group
    num_shared_dies: int = 0  # with a copy of the shared expert and no DP group
    num_vacant: int = 0  # of the dies with routed experts, the last ones: seats of servers that may join
    transport: Transport = "pod"  # to expert servers; they are dies of the pod, or processes outside

    @property
    def is_foreign(self) -> bool:
        """Whether some of the TE's dies are of other hardware than the SuperPod's."""
        return self.hardware != "cm384" or self.devices != ("cm384", "cm384")

    @property
    def num_expert_dies(self) -> int:
        """Number of dies with experts and no DP group."""
        return self.num_routed_dies + self.num_shared_dies

    @property
    def vacant(self) -> range:
        """Numbers of the expert dies reserved for expert servers that may join."""
        return range(self.num_routed_dies - self.num_vacant, self.num_routed_dies)

    @property
    def has_servers_outside(self) -> bool:
        """Whether each expert server is a process of its own, outside of the pod."""
        return self.transport != "pod"

    @property
    def dies_per_domain(self) -> int:
        """Number of dies with DP groups in a DP domain."""
        return self.num_dies // self.num_domains

    @property
    def every_die(self) -> tuple[int, ...]:
        """All dies of the TE: dies of DP groups, then dies with experts alone.

        A 910B package has one die where a package of CloudMatrix has two, so its numbers are spaced by two.
        """
        step = 1 if self.hardware == "cm384" else Topology().dies_per_chip
        total = self.num_dies + self.num_expert_dies
        return self.scattered or tuple(range(self.first_die, self.first_die + step * total, step))

    @property
    def dies(self) -> tuple[int, ...]:
        """Dies with DP groups, in order."""
        return self.every_die[: self.num_dies]

    @property
    def expert_dies(self) -> tuple[int, ...]:
        """Dies with experts alone: routed ones first, then copies of the shared one."""
        return self.every_die[self.num_dies :]

    @property
    def routed_dies(self) -> tuple[int, ...]:
        """Expert dies with routed experts, in order."""
        return self.expert_dies[: self.num_routed_dies]

    @property
    def device_of_each(self) -> dict[int, Device]:
        """Kind of hardware of each of the TE's dies."""
        attention, experts = self.devices if self.hardware == "cm384" else (self.hardware, self.hardware)
        return dict.fromkeys(self.dies, attention) | dict.fromkeys(self.expert_dies, experts)


class GroupSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of DP groups: how a group's dies share its work, and how long groups wait for each other."""

    num_groups: int
    tp: int = 1  # dies that a DP group spans, consecutive ones
    tp_mode: TPMode = "tp"
    o_proj_tp: int = 1  # DP groups of one die that share an output projection, consecutive ones
    max_slice: int  # rows of a step, or of one of its parts, that a die has where tokens are cut between dies
    gathers_statuses: bool = False  # on the leader's die, before requests are dealt out
    lost_ns: int = 60_000_000_000  # without an answer, after which a DP group is lost
    num_tes: int = 1  # whose DP groups are clients of the same expert servers

    @property
    def num_dies(self) -> int:
        """Number of dies of all DP groups."""
        return self.num_groups * self.tp

    @property
    def is_sliced(self) -> bool:
        """Whether the dies of a DP group cut tokens between them, and not only heads."""
        return self.tp > 1 and self.tp_mode == "sp-tp-sp"

    @property
    def num_sharing(self) -> int:
        """Number of dies sharing projections and meeting in collectives, of one DP group or several."""
        return max(self.tp, self.o_proj_tp)


class KVSizes(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks of a DP group: how many there are, and where they go."""

    block_size: int
    num_blocks: int
    max_blocks_per_seq: int
    num_host_blocks: int = 0
    max_cache_keys: int = 1024
    pools: Literal["prompts", "all", "nothing"] = "prompts"  # positions whose blocks go to a memory pool
    over: Over = "dma"  # what carries blocks between prefill and decode on UB
    num_peers: int = 0  # dies of DP groups to which it carries them, or from which
    sends_layers: bool = False  # KV of prompts leaves layer by layer, while later layers are computed


class StepSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a DP group's steps: how many rows and sequences its scheduler may put into them."""

    role: Role = "both"
    max_model_len: int
    max_tokens: int  # rows
    max_part: int  # rows of one of the parts that are side by side on a die, see `WalkSizes.num_parts`
    max_seqs: int
    max_logit_rows: int  # rows whose logits are kept
    mtp: int  # drafts per sequence and step
    num_mtp_layers: int = 0  # that make them; if there are fewer, the first is used again
    plans_ahead: bool = False  # a step is planned while the one before runs
    caches_prefixes: bool = True
    preempts_by_swap: bool = False
    reserves: bool = False  # blocks for KV from elsewhere, at any moment of a step

    @property
    def num_result_sets(self) -> int:
        """Number of result sets: two if the next step may run while the host reads a step's results."""
        return 2 if self.plans_ahead else 1


class WalkSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How dies walk through the layers of a step: the order of stages, and how tokens travel."""

    turns: Turns = "serial"
    num_microbatches: int = 1
    is_dynamic: bool = False  # a step is cut into microbatches only if it is predicted to end sooner so
    attention_cores: int = 0  # AIC cores of the attention stream; 0 unless microbatches overlap by cores
    moves_cores: bool = False  # between the two streams
    unabsorbed: bool = False  # attention to prompts is billed so
    is_lockstep: bool = False  # the dies run as one, see engine/run/lockstep
    exchange: Exchange = "pull"  # of tokens between dies with experts
    carrier: Carrier = "mte"  # of tokens to experts on dies of their own, and of answers
    num_domains: int = 1  # of attention dies, where experts have dies of their own
    timeout_ns: int = 57_000_000_000  # how long a die waits for others in an exchange
    services: ServiceConfig | None = None  # where experts are services

    @property
    def num_items(self) -> int:
        """Number of microbatches of all DP domains, which expert dies serve in turn."""
        return self.num_domains * self.num_microbatches

    @property
    def pushes(self) -> bool:
        """Whether answers are summed where they arrive, as where rows are pushed."""
        return EXCHANGES[self.exchange].sums

    @property
    def flows(self) -> bool:
        """Whether there are no barriers, so each DP group has steps of its own."""
        return self.turns in FLOWING

    @property
    def overlap(self) -> Literal["cores", "engines"] | None:
        """Resource shared by overlapping microbatches on a die: cores or engines; None without overlap."""
        if self.turns != "overlap":
            return None
        return "cores" if self.attention_cores else "engines"

    @property
    def num_parts(self) -> int:
        """Number of microbatches side by side on a die, each with buffers and exchanges of its own."""
        return self.num_microbatches if self.turns == "overlap" else 1

    @property
    def least_parts(self) -> int:
        """Smallest number of parts of a step; buffers have room for the largest of these."""
        return 1 if self.is_dynamic else self.num_parts


class ExpertSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of routed experts and of copies of the shared expert on holders.

    Holders are the dies that may have experts: those of DP groups, or expert dies.
    """

    where: Literal["here", "among", "away"]  # all on this die, on each die some, on dies of their own
    layers: tuple[int, ...]  # that have experts, those of MTP last
    num_mtp_layers: int = 0  # of these, the last ones
    order: tuple[int, ...]  # of `layers` in a step, by index: one of MTP may come several times
    experts_of: tuple[range, ...]  # the routed experts of each holder; may be none
    num_shared_dies: int = 0  # the last holders, each with a copy of the shared expert for others
    redundant_of: tuple[int, ...]  # slots of each layer, on each holder: see engine/die/replicas.py
    copies_of: tuple[tuple[int, ...], ...] = ()  # routed experts that holders have there all along, if any
    first_of: tuple[tuple[int, ...], ...] = ()  # what they have there until EPLB knows the load, if anything
    balance_interval_ns: int = 0  # between decisions on replicas; 0: never
    balance_slices: int = 1  # of an interval
    cold_tokens: int = 0  # of a slice, that an expert costs at least

    @property
    def num_routed(self) -> int:
        """Number of holders that may have routed experts; those with the shared one alone come after."""
        return len(self.experts_of) - self.num_shared_dies

    @property
    def num_primary_dies(self) -> int:
        """Number of holders with routed experts of their own, or with replicas from the start."""
        first = self.first_of or ((),) * len(self.experts_of)
        return sum(bool(held or more) for held, more in zip(self.experts_of, first, strict=True))

    @property
    def has_slots(self) -> bool:
        """Whether some holder has redundant slots."""
        return any(self.redundant_of)

    def loaded_of(self, holder: int) -> tuple[int, ...]:
        """Return the experts that a holder's redundant slots are loaded with, in order."""
        loaded = self.copies_of or self.first_of
        return loaded[holder] if loaded else ()

    def is_shared(self, holder: int) -> bool:
        """Whether a holder has a copy of the shared expert for other dies' tokens."""
        return holder >= self.num_routed

    @property
    def num_slots(self) -> int:
        """Number of physical routed experts; the copies of the shared expert are numbered from there on."""
        return sum(map(len, self.experts_of)) + sum(self.redundant_of)

    def shared_expert(self, rank: int) -> int | None:
        """Return the physical number of the shared expert for a rank's tokens; None if it is on the same
        die."""
        return self.num_slots + rank % self.num_shared_dies if self.num_shared_dies else None

    @property
    def max_replicas(self) -> int:
        """Largest number of replicas of an expert, its primary included: no die has two."""
        return min(len(self.experts_of), MAX_REPLICAS)

    @property
    def expert_rank(self) -> tuple[int, ...]:
        """Holder of each physical expert, then of each copy of the shared expert."""
        held = [holder for holder, slots in enumerate(self.slots_of) for _ in slots]
        return (*held, *(holder for holder in range(len(self.experts_of)) if self.is_shared(holder)))

    @property
    def slots_of(self) -> tuple[range, ...]:
        """Physical experts of each holder: its own in order, then its redundant slots."""
        ends = [0]
        for held, redundant in zip(self.experts_of, self.redundant_of, strict=True):
            ends.append(ends[-1] + len(held) + redundant)
        return tuple(range(first, end) for first, end in pairwise(ends))

    @property
    def free_slots(self) -> tuple[range, ...]:
        """Physical numbers of the redundant slots of each holder."""
        own = zip(self.slots_of, self.redundant_of, strict=True)
        return tuple(range(slots.stop - redundant, slots.stop) for slots, redundant in own)


class TESettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a TE's host: its policies, what launches cost, and reactions to failures."""

    dispatch: str  # policy that picks the DP group of a request
    decode: str  # policy that picks it on decode TEs, after prefill
    victim: str  # policy that picks the sequence that gives up its KV blocks
    eviction: str  # policy that picks the cached KV block that goes first
    placement: str  # policy for replicas of experts
    status_period_ns: int  # between statuses that KV loads are read from; 0: always the latest
    execution: ExecutionConfig | None  # of the TE's role; None: a host that costs nothing
    seed: int  # of the host's delays; each TE draws its own from it
    health: HealthConfig
    recovery: RecoveryConfig
    invariants: bool  # are checked after every turn


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """All sizes and settings of a TE, for a deployment fitted to a model."""

    place: TEPlace
    groups: GroupSizes
    kv: KVSizes
    steps: StepSizes
    walk: WalkSizes
    experts: ExpertSizes
    settings: TESettings

    def at(self, dies: Sequence[int]) -> Sizes:
        """Return the same TE on other dies."""
        scattered = () if isinstance(dies, range) else tuple(dies)
        return replace(self, place=replace(self.place, first_die=dies[0], scattered=scattered))

    def sharing(self, other: Sizes) -> Sizes:
        """Return the same TE with the expert dies of another one."""
        return self.at([*self.place.dies, *other.place.expert_dies])

    def called(self, name: str) -> Sizes:
        """Return the same TE under another name."""
        return replace(self, place=replace(self.place, name=name))
