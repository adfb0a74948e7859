"""The numbers that one task executor is built from, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeVar

import msgspec

from xdeepserve.engine.deploy.deployment import (
    Carrier,
    Device,
    Exchange,
    Hardware,
    Role,
    ServiceConfig,
    Transport,
)
from xdeepserve.engine.deploy.roles import AT_EXPERTS, FLOWING, Turns
from xdeepserve.hw.topology import Topology
from xdeepserve.model.tp import TPMode

MAX_REPLICAS = 16  # of an expert, so that maps stay small where there are hundreds of dies

T = TypeVar("T")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """One TE of a deployment fitted to a model: every number that it is built from."""

    name: str = "te"
    role: Role = "both"
    first_die: int = 0
    scattered: tuple[int, ...] = ()  # all its dies in order, where they are no neighbours
    hardware: Hardware = "cm384"
    num_dies: int  # of DP groups; expert dies of their own come on top
    tp: int = 1  # dies that a DP group spans, consecutive ones
    tp_mode: TPMode = "tp"
    o_proj_tp: int = 1  # DP groups of one die that share an output projection, consecutive ones
    experts_of: tuple[range, ...]  # the routed experts of each of them, or of each expert die; may be none
    num_domains: int = 1
    num_microbatches: int = 1
    turns: Turns = "serial"
    attention_cores: int = 0  # AIC cores of the attention stream; 0 unless microbatches overlap by cores
    moves_cores: bool = False  # between the two streams
    unabsorbed: bool = False  # attention to prompts is billed so
    num_shared_dies: int = 0  # the last ones of these, each with a copy of the shared expert for others
    redundant_slots: int = 0  # of each layer, on each of these dies: see engine/die/replicas.py
    copies_of: tuple[tuple[int, ...], ...] = ()  # routed experts that these hold from the start, if any
    services: ServiceConfig | None = None  # where experts are services
    transport: Transport = "pod"  # to servers
    num_vacant: int = 0  # of the dies with routed experts, the last ones: servers that may join
    balance_interval_ns: int = 0  # between decisions on replicas; 0: never
    balance_slices: int = 1  # of an interval
    cold_tokens: int = 0  # of a slice, that an expert costs at least
    carrier: Carrier = "mte"  # of tokens to experts on dies of their own, and of answers
    devices: tuple[Device, Device] = ("cm384", "cm384")  # of attention, of experts on dies of their own
    exchange: Exchange = "pull"  # of tokens between dies with experts
    is_lockstep: bool = False  # its dies run as one, see engine/run/gang
    max_model_len: int
    max_tokens: int  # rows in a step of one DP group
    max_seqs: int
    max_logit_rows: int  # rows of a step whose logits are kept
    block_size: int
    num_blocks: int
    mtp: int  # drafts per sequence and step
    num_mtp_layers: int = 0  # that make them; if there are fewer, the first is used again
    num_host_blocks: int = 0
    plans_ahead: bool = False  # a step is planned while the one before runs
    caches_prefixes: bool = True
    max_cache_keys: int = 1024
    preempts_by_swap: bool = False
    lost_ns: int = 60_000_000_000  # without an answer, after which a DP group is lost
    pools_decode: bool = False  # blocks with generated tokens go to the memory pool, too
    has_channels: bool = False  # KV goes by XCCL's send and receive, through buffers on each of these dies
    gathers_statuses: bool = False  # of its DP groups, on the leader's die, before requests are dealt out
    reserves: bool = False  # blocks for KV from elsewhere, at any moment of a step
    transfers_by_layer: bool = False  # KV goes from prefill to decode while prefill computes later layers

    def with_mtp_used_again(self, layers: list[T]) -> list[T]:
        """Layers with experts, those of MTP last, in the order in which a step runs through them."""
        if not self.num_mtp_layers:
            return layers
        return layers + [layers[-self.num_mtp_layers]] * (self.mtp - self.num_mtp_layers)

    @property
    def experts(self) -> Literal["here", "among", "away"]:
        """Where routed experts are: all on this die, on each die some, or on dies of their own."""
        if self.turns in AT_EXPERTS:
            return "away"
        return "among" if self.num_dies > 1 and any(self.experts_of) else "here"

    @property
    def is_foreign(self) -> bool:
        """Some of its dies are of other hardware than the SuperPod's."""
        return self.hardware != "cm384" or self.devices != ("cm384", "cm384")

    @property
    def flows(self) -> bool:
        """There are no barriers: each DP group has steps of its own."""
        return self.turns in FLOWING

    @property
    def overlap(self) -> Literal["cores", "engines"] | None:
        """What microbatches that overlap on a die share."""
        if self.turns != "overlap":
            return None
        return "cores" if self.attention_cores else "engines"

    @property
    def num_parts(self) -> int:
        """Microbatches that are side by side on a die, each with buffers and exchanges of its own."""
        return self.num_microbatches if self.turns == "overlap" else 1

    @property
    def sends_layers(self) -> bool:
        """KV of its prompts leaves layer by layer."""
        return self.transfers_by_layer and self.role == "prefill"

    @property
    def exchange_timeout_ns(self) -> int:
        """How long a die waits for others in an exchange: a little less than until its group is lost, so that
        it is who does not come that an error names, not all who wait."""
        return self.lost_ns - self.lost_ns // 20

    @property
    def num_result_sets(self) -> int:
        """The host reads the results of a step while the next one may be running."""
        return 2 if self.plans_ahead else 1

    @property
    def every_die(self) -> tuple[int, ...]:
        """Dies of DP groups, then those with experts alone. A 910B has one where a package of CloudMatrix has
        two."""
        step = 1 if self.hardware == "cm384" else Topology().dies_per_chip
        total = self.num_dies + self.num_expert_dies
        return self.scattered or tuple(range(self.first_die, self.first_die + step * total, step))

    def at(self, dies: Sequence[int]) -> Sizes:
        """The same TE on other dies."""
        return msgspec.structs.replace(self, first_die=dies[0], scattered=tuple(dies))

    @property
    def dies(self) -> tuple[int, ...]:
        """Dies of DP groups."""
        return self.every_die[: self.num_dies]

    @property
    def expert_dies(self) -> tuple[int, ...]:
        """Dies with experts alone: routed ones first, then copies of the shared one."""
        return self.every_die[self.num_dies :]

    @property
    def device_of_each(self) -> dict[int, Device]:
        """Kind of hardware of each of its dies."""
        attention, experts = self.devices if self.hardware == "cm384" else (self.hardware, self.hardware)
        return dict.fromkeys(self.dies, attention) | dict.fromkeys(self.expert_dies, experts)

    @property
    def routed_dies(self) -> tuple[int, ...]:
        """Of these the ones with routed experts."""
        return self.expert_dies[: self.num_expert_dies - self.num_shared_dies]

    @property
    def num_groups(self) -> int:
        """DP groups."""
        return self.num_dies // self.tp

    @property
    def num_sharing(self) -> int:
        """Dies that share projections, and meet in collectives: those of a DP group, or of several."""
        return max(self.tp, self.o_proj_tp)

    @property
    def max_part(self) -> int:
        """Rows of a step, or of one of its microbatches where they overlap on a die."""
        return -(-self.max_tokens // self.num_parts)

    @property
    def max_slice(self) -> int:
        """Rows of such a part that one die of a DP group has where tokens are cut between dies."""
        return -(-self.max_part // self.tp)

    @property
    def num_expert_dies(self) -> int:
        """Dies without a DP group: routed experts first, then copies of the shared expert."""
        return len(self.experts_of) if self.experts == "away" else 0

    @property
    def vacant(self) -> range:
        """The dies of `experts_of` that are held for servers which may join."""
        end = len(self.experts_of) - self.num_shared_dies
        return range(end - self.num_vacant, end)

    @property
    def num_primary_dies(self) -> int:
        """Dies with routed experts of their own, not only replicas."""
        return sum(len(held) > 0 for held in self.experts_of)

    def is_shared(self, holder: int) -> bool:
        """Whether a die of `experts_of` has a copy of the shared expert for other dies' tokens."""
        return holder >= len(self.experts_of) - self.num_shared_dies

    @property
    def num_slots(self) -> int:
        """Physical experts; the numbers from there on are those of the copies of the shared one."""
        return self.slots_of[-1].stop

    def shared_expert(self, rank: int) -> int | None:
        """The physical expert that a rank's tokens take for the shared one, if that is not with them."""
        return self.num_slots + rank % self.num_shared_dies if self.num_shared_dies else None

    @property
    def max_replicas(self) -> int:
        """Most replicas of an expert, its primary included: no die has two."""
        return min(len(self.experts_of), MAX_REPLICAS)

    @property
    def expert_rank(self) -> tuple[int, ...]:
        """By physical expert, the die of `experts_of` that holds it; then of each copy of the shared one."""
        held = [holder for holder, slots in enumerate(self.slots_of) for _ in slots]
        return (*held, *(holder for holder in range(len(self.experts_of)) if self.is_shared(holder)))

    @property
    def slots_of(self) -> tuple[range, ...]:
        """The physical experts of each die of `experts_of`: these, in that order, then redundant slots."""
        ends = [0]
        for held in self.experts_of:
            ends.append(ends[-1] + len(held) + self.redundant_slots)
        return tuple(range(first, end) for first, end in pairwise(ends))

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)
