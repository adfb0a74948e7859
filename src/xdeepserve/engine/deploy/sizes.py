"""A deployment fitted to a model: the numbers that task executors are built from, or why there are none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise, starmap
from typing import Literal, TypeVar

import msgspec

from xdeepserve.engine.deploy import expert_services, refusals
from xdeepserve.engine.deploy.deployment import (
    AttentionConfig,
    Carrier,
    Deployment,
    Exchange,
    ExpertConfig,
    Hardware,
    PipelineConfig,
    Role,
    ServiceConfig,
    Transport,
)
from xdeepserve.engine.deploy.roles import AT_EXPERTS, FLOWING, TEKind, Turns
from xdeepserve.engine.deploy.teams import Teams, TEDies, num_routed_experts
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.topology import Topology
from xdeepserve.model.checkpoint import num_parameters
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.tp import TPMode

MAX_DIES = 768
MAX_REPLICAS = 16  # of an expert, so that maps stay small where there are hundreds of dies
LARGE_MODEL = 50_000_000  # parameters

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
    num_shared_dies: int = 0  # the last ones of these, each with a copy of the shared expert for others
    redundant_slots: int = 0  # of each layer, on each of these dies: see engine/die/replicas.py
    copies_of: tuple[tuple[int, ...], ...] = ()  # routed experts that these hold from the start, if any
    services: ServiceConfig | None = None  # where experts are services
    transport: Transport = "pod"  # to servers
    num_vacant: int = 0  # of the dies with routed experts, the last ones: servers that may join
    balance_interval_ns: int = 0  # between decisions on replicas; 0: never
    balance_slices: int = 1  # of an interval
    carrier: Carrier = "mte"  # of what A2E and E2A pull
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


def fit(deployment: Deployment, config: ModelConfig, is_timing_only: bool = False) -> tuple[Sizes, ...]:
    """The TEs of a deployment for a model. DeploymentError with every reason why they cannot be built.

    In a run that `is_timing_only` there may be more dies than routed experts, without slots that are said.
    """
    teams = Teams(deployment, config, is_timing_only)
    tes = teams.tes()
    num_experts = teams.num_experts
    reasons = refusals.reasons_against(deployment, config) + teams.reasons
    reasons += refusals.reasons_against_replicas(deployment, num_experts)
    reasons += expert_services.reasons_elsewhere(deployment)
    if not reasons and num_experts:
        holders = {te.name: te.num_holders for te in tes}
        if is_timing_only:
            reasons += refusals.reasons_against_timing(deployment)
        reasons += refusals.reasons_against_slots(deployment, num_experts, holders)
    first_die = _places(deployment, tes, reasons)
    if reasons:
        raise DeploymentError(f"deployment {deployment.name}: " + "; ".join(reasons))
    return tuple(size(deployment, config, te, first_die[te.name], is_timing_only) for te in tes)


def _places(d: Deployment, tes: Sequence[TEDies], reasons: list[str]) -> dict[str, int]:
    """The first die of each TE by name. A SuperPod's dies come first; prefill that finds no room there, or is
    of other hardware, is beside it. What is wrong with that is added to `reasons`."""
    prefills = [te for te in tes if te.kind.role == "prefill"]
    is_beside = _total(tes) > MAX_DIES or any(te.is_foreign for te in prefills)
    beside = prefills if is_beside else []
    within = [te for te in tes if te not in beside]
    if any(te.is_foreign for te in beside) and d.fabric == "ub":
        reasons.append(
            "fabric=ub does not lead from prefill.hardware=910b, which is on no UB plane, to decode: set "
            "fabric=auto, roce or vpc"
        )
    elif _total(within) > MAX_DIES:
        reasons.append(f"a SuperPod has {MAX_DIES} dies, this deployment needs {_total(within)}")
    elif beside and d.fabric == "ub":
        reasons.append(
            f"a SuperPod has {MAX_DIES} dies, this deployment needs {_total(tes)}: to have prefill beside "
            "it, set fabric=auto, roce or vpc, since UB does not leave the pod"
        )
    first_die, next_die = {}, 0
    for te in within + beside:
        if te in beside:
            next_die = max(next_die, MAX_DIES)
        first_die[te.name] = next_die
        next_die += Topology().dies_per_server if te.is_foreign else te.total
    return first_die


def _total(tes: Sequence[TEDies]) -> int:
    return sum(te.total for te in tes)


def num_mtp_layers(deployment: Deployment, config: ModelConfig) -> int:
    """MTP layers that a deployment uses: one for each draft, as far as there are any."""
    wanted = min(deployment.mtp, 1) if deployment.mtp_reuse else deployment.mtp
    return min(wanted, config.num_nextn_predict_layers)


def _is_lockstep(d: Deployment, row: TEKind, config: ModelConfig) -> bool:
    """Whether the dies of a TE run in lockstep. Unless it is said, dies that are all alike do with a large
    model, if they can. The kernels of a small one are compiled in half the time.
    """
    if d.lockstep is not None:
        return d.lockstep and row.lockstep != "never"
    is_possible = row.lockstep == "large" and not refusals.reasons_against_lockstep(d, config)
    if row.is_single and d.execution is not None:
        is_possible = False  # a step on one die is one call, and has no launches that would cost something
    return is_possible and num_parameters(config) >= LARGE_MODEL


def _turns(d: Deployment, row: TEKind) -> Turns:
    """How a step takes turns: as is asked for, if the TE can, or as its kind does by itself."""
    has_microbatches = d.pipeline is not None and d.pipeline.microbatches > 1
    asked = {"dataflow": d.dataflow, "overlap": has_microbatches}
    return next((turns for turns in row.turns if asked.get(turns)), row.turns[0])


def _spread(num_experts: int, te: TEDies, counts: Sequence[int] | None, vacant: int = 0) -> tuple[range, ...]:
    """The routed experts of each die that may hold some: `counts`, if that is said for so many; else an even
    share, or one on each of the first ones. The last `vacant` ones have none."""
    first = min(te.num_holders - te.num_shared_dies - vacant, num_experts) or 1
    if counts is not None and len(counts) == te.num_routed_dies - vacant:
        ends = [0, *accumulate(counts)]
        others = te.num_shared_dies + vacant
        return (*starmap(range, pairwise(ends)), *[range(num_experts, num_experts)] * others)
    shares = [range(num_experts * r // first, num_experts * (r + 1) // first) for r in range(first)]
    return (*shares, *[range(num_experts, num_experts)] * (te.num_holders - first))


def _copies(
    experts: ExpertConfig, te: TEDies, experts_of: Sequence[range], vacant: int
) -> tuple[tuple[int, ...], ...]:
    """The experts of which each server has copies from the start; fewer of each where fewer dies are left."""
    num_servers = te.num_routed_dies - vacant
    copies = max(0, min(experts.copies, num_servers - 1))
    if not te.kind.has_services or not (copies or vacant):
        return ()
    return expert_services.copies_of(experts_of, num_servers, copies, vacant)


def size(
    d: Deployment, config: ModelConfig, te: TEDies, first_die: int = 0, is_timing_only: bool = False
) -> Sizes:
    """The numbers of one TE. In runs that only take time nobody computes, in lockstep or otherwise."""
    row, given = te.kind, te.given
    num_experts = num_routed_experts(config, d.mtp)
    attention, experts = d.attention or AttentionConfig(), d.experts or ExpertConfig()
    pipeline, turns = d.pipeline or PipelineConfig(), _turns(d, row)
    overlap = pipeline.overlap or ("engines" if row.role == "prefill" else "cores")
    max_model_len = refusals.context_of(d, config)
    max_tokens = given.max_num_batched_tokens or d.scheduler.max_num_batched_tokens
    max_seqs = given.max_num_seqs or d.scheduler.max_num_seqs
    vacant = min(experts.vacancies, te.num_routed_dies - 1) if row.has_services else 0
    experts_of = _spread(num_experts, te, experts.counts, vacant)
    copies_of = _copies(experts, te, experts_of, vacant)
    num_blocks = d.cache.num_blocks
    if num_blocks is None:
        num_blocks = -(-max(max_model_len, refusals.DEFAULT_MODEL_LEN) // d.cache.block_size)
    return Sizes(
        name=te.name,
        role=row.role,
        first_die=first_die,
        hardware=given.hardware,
        num_dies=te.num_dies,
        tp=given.tp or 1,
        tp_mode=given.tp_mode,
        o_proj_tp=given.o_proj_tp,
        experts_of=experts_of,
        num_domains=attention.domains if row.is_apart else 1,
        num_microbatches=attention.microbatches if row.is_apart else pipeline.microbatches,
        turns=turns,
        attention_cores=pipeline.attention_cores if turns == "overlap" and overlap == "cores" else 0,
        num_shared_dies=te.num_shared_dies,
        redundant_slots=max(map(len, copies_of), default=experts.redundant_slots),
        copies_of=copies_of,
        services=(d.services or ServiceConfig()) if row.has_services else None,
        transport=experts.transport if row.has_services else "pod",
        num_vacant=vacant,
        balance_interval_ns=0 if copies_of else math.ceil(1e9 * experts.balance_interval),
        balance_slices=experts.balance_slices,
        carrier=attention.carrier if row.is_apart else "mte",
        exchange=d.exchange,
        is_lockstep=not is_timing_only and _is_lockstep(d, row, config),
        max_model_len=max_model_len,
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        max_logit_rows=min(max_tokens, max(64, max_seqs * (1 + d.mtp))),
        block_size=d.cache.block_size,
        num_blocks=num_blocks,
        mtp=d.mtp,
        num_mtp_layers=num_mtp_layers(d, config),
        lost_ns=round(1e9 * d.health.lost_s),
        plans_ahead=d.execution is not None and d.execution.for_role(row.role).overlap,
        num_host_blocks=d.cache.num_host_blocks,
        caches_prefixes=d.cache.prefix,
        max_cache_keys=d.cache.max_keys,
        preempts_by_swap=d.cache.preemption == "swap",
        pools_decode=d.ems.decode_blocks,
        has_channels=d.transfer_over == "send-receive" and row.role != "both",
        gathers_statuses=d.scheduler.statuses == "all-gather"
        and d.scheduler.dispatch == "collaborative"
        and row.role != "decode",
        reserves=row.role != "both" and (d.transfer == "layer" or d.scheduler.admission == "decode"),
        transfers_by_layer=d.transfer == "layer" and row.role != "both",
    )
