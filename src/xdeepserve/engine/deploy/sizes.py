"""A deployment fitted to a model: the numbers that task executors are built from, or why there are none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeVar

import msgspec

from xdeepserve.engine.deploy.deployment import (
    AttentionConfig,
    Deployment,
    ExpertConfig,
    Hardware,
    Kind,
    PipelineConfig,
    Role,
    TEConfig,
)
from xdeepserve.engine.deploy.replicas import reasons_against_replicas, reasons_against_slots
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.atlas import NPUS_PER_SERVER, atlas_a2
from xdeepserve.hw.spec import Spec
from xdeepserve.hw.topology import Topology
from xdeepserve.model.checkpoint import num_parameters
from xdeepserve.model.config import ModelConfig
from xdeepserve.model.tp import TP_SIZES, TPMode, tp_sizes

DEFAULT_DIES = 8
DEFAULT_PD_DIES = 4  # of a prefill or decode TE
DEFAULT_PREFILL_TP = 4
MAX_DIES = 768
DEFAULT_ROUTED_DIES = 4
DEFAULT_MODEL_LEN = 4096
MAX_DRAFTS = 2
BLOCK_MULTIPLE = 16  # attention walks the cache in tiles of 16 positions

SHARED_INPUTS = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
LARGE_MODEL = 50_000_000  # parameters
APART: tuple[Kind, ...] = ("moe-attention", "transformerless")  # experts have dies of their own
LOCKSTEP: tuple[Kind, ...] = ("monolithic", "colocated", *APART)

T = TypeVar("T")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """One TE of a deployment fitted to a model: every number that it is built from."""

    name: str = "te"
    role: Role = "both"
    first_die: int = 0
    hardware: Hardware = "cm384"
    num_dies: int  # of DP groups; expert dies of their own come on top
    tp: int = 1  # dies that a DP group spans, consecutive ones
    tp_mode: TPMode = "tp"
    experts_of: tuple[range, ...]  # the routed experts of each of them, or of each expert die
    num_domains: int = 1
    num_microbatches: int = 1
    overlap: Literal["cores", "engines"] | None = None  # of microbatches on one die, see programs/pipeline.py
    attention_cores: int = 0  # AIC cores of the attention stream, where they overlap by cores
    num_shared_dies: int = 0
    redundant_slots: int = 0  # of each layer, on each die with routed experts: see programs/replicas.py
    balance_interval_ns: int = 0  # between decisions on replicas; 0: never
    balance_slices: int = 1  # of an interval
    has_expert_dies: bool = False  # MoE and attention are apart
    is_dataflow: bool = False  # nobody waits for dies that its tokens do not go to
    is_lockstep: bool = False  # their dies run as one, see engine/lockstep
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
    transfers_by_layer: bool = False  # KV goes from prefill to decode while prefill computes later layers

    def with_mtp_used_again(self, layers: list[T]) -> list[T]:
        """Layers with experts, those of MTP last, in the order in which a step runs through them."""
        if not self.num_mtp_layers:
            return layers
        return layers + [layers[-self.num_mtp_layers]] * (self.mtp - self.num_mtp_layers)

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
    def dies(self) -> range:
        """Those of DP groups. A 910B has one where a package of CloudMatrix has two."""
        step = 1 if self.hardware == "cm384" else Topology().dies_per_chip
        return range(self.first_die, self.first_die + step * self.num_dies, step)

    @property
    def num_groups(self) -> int:
        """DP groups."""
        return self.num_dies // self.tp

    @property
    def max_part(self) -> int:
        """Rows of a step, or of one of its microbatches where they overlap on a die."""
        return -(-self.max_tokens // (1 if self.overlap is None else self.num_microbatches))

    @property
    def max_slice(self) -> int:
        """Of these, the rows that one die of a DP group has where tokens are cut between dies."""
        return -(-self.max_part // self.tp)

    @property
    def num_expert_dies(self) -> int:
        """Dies without a DP group: routed experts first, then copies of the shared expert."""
        return len(self.experts_of) + self.num_shared_dies if self.has_expert_dies else 0

    @property
    def slots_of(self) -> tuple[range, ...]:
        """The physical experts of each die with routed ones: the experts of `experts_of`, in that order, and
        then redundant slots."""
        ends = [0]
        for held in self.experts_of:
            ends.append(ends[-1] + len(held) + self.redundant_slots)
        return tuple(range(first, end) for first, end in pairwise(ends))

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


class _Team(msgspec.Struct, frozen=True):
    """Name, role and dies of a TE."""

    name: str
    role: Role
    num_dies: int
    hardware: Hardware = "cm384"
    tp: int = 1
    tp_mode: TPMode = "tp"
    num_routed_dies: int = 0  # of their own; 0: experts live with attention
    num_shared_dies: int = 0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None

    @property
    def total(self) -> int:
        return self.num_dies + self.num_routed_dies + self.num_shared_dies

    @property
    def is_foreign(self) -> bool:
        return self.hardware != "cm384"


def fit(deployment: Deployment, config: ModelConfig, has_redundant_slots: bool = False) -> tuple[Sizes, ...]:
    """The TEs of a deployment for a model. DeploymentError with every reason why they cannot be built.

    With `has_redundant_slots` there may be more dies than routed experts: the rest hold replicas.
    """
    reasons = _reasons_against(deployment, config)
    teams = _teams(deployment, config, reasons, has_redundant_slots)
    num_experts = num_routed_experts(config, deployment.mtp)
    reasons += reasons_against_replicas(deployment, num_experts)
    if not reasons and num_experts:
        holders = {team.name: team.num_routed_dies or team.num_dies for team in teams}
        reasons += reasons_against_slots(deployment, num_experts, holders)
    # A SuperPod's dies come first. Prefill that finds no room there, or is of other hardware, is beside it.
    prefills = [team for team in teams if team.role == "prefill"]
    is_beside = _total(teams) > MAX_DIES or any(team.is_foreign for team in prefills)
    beside = prefills if is_beside else []
    within = [team for team in teams if team not in beside]
    if any(team.is_foreign for team in beside) and deployment.fabric == "ub":
        reasons.append(
            "fabric=ub does not lead from prefill.hardware=910b, which is on no UB plane, to decode: set "
            "fabric=auto, roce or vpc"
        )
    elif _total(within) > MAX_DIES:
        reasons.append(f"a SuperPod has {MAX_DIES} dies, this deployment needs {_total(within)}")
    elif beside and deployment.fabric == "ub":
        reasons.append(
            f"a SuperPod has {MAX_DIES} dies, this deployment needs {_total(teams)}: to have prefill beside "
            "it, set fabric=auto, roce or vpc, since UB does not leave the pod"
        )
    if reasons:
        raise DeploymentError(f"deployment {deployment.name}: " + "; ".join(reasons))
    first_die, next_die = {}, 0
    for team in within + beside:
        if team in beside:
            next_die = max(next_die, MAX_DIES)
        first_die[team.name] = next_die
        next_die += Topology().dies_per_server if team.is_foreign else team.total
    return tuple(_size(deployment, config, team, first_die[team.name]) for team in teams)


def _total(teams: Sequence[_Team]) -> int:
    return sum(team.total for team in teams)


def num_mtp_layers(deployment: Deployment, config: ModelConfig) -> int:
    """MTP layers that a deployment uses: one for each draft, as far as there are any."""
    wanted = min(deployment.mtp, 1) if deployment.mtp_reuse else deployment.mtp
    return min(wanted, config.num_nextn_predict_layers)


def num_routed_experts(config: ModelConfig, mtp: int) -> int:
    """Routed experts of a layer; 0 if no layer that is used has any. MTP layers count where they are used."""
    used_layers = config.num_hidden_layers + min(mtp, config.num_nextn_predict_layers)
    return config.n_routed_experts if any(config.is_moe(i) for i in range(used_layers)) else 0


def default_tp(config: ModelConfig, role: Role, num_dies: int, mode: TPMode) -> int:
    """Dies of a DP group: up to 4 in prefill TEs, 1 in others (XDS 5.1)."""
    most = DEFAULT_PREFILL_TP if role == "prefill" else 1
    return max(tp for tp in tp_sizes(config, mode) if tp <= most and not num_dies % tp)


SECTIONS: dict[Kind, set[str]] = {
    "monolithic": {"dies"},
    "colocated": {"dies", "tp", "tp_mode", "pipeline", "experts"},
    "pd": {"prefill", "decode", "pipeline", "experts"},
    "moe-attention": {"attention", "experts"},
    "transformerless": {"prefill", "attention", "experts", "pipeline"},
}


def _teams(
    d: Deployment, config: ModelConfig, reasons: list[str], has_redundant_slots: bool = False
) -> list[_Team]:
    """The TEs; what is wrong with them is added to `reasons`."""
    num_experts = num_routed_experts(config, d.mtp)
    for section in ("dies", "tp", "tp_mode", "prefill", "decode", "pipeline", "attention", "experts"):
        if getattr(d, section) is not None and section not in SECTIONS[d.kind]:
            known = ", ".join(sorted(SECTIONS[d.kind]))
            reasons.append(f"{section} is no setting of {d.kind}, which has {known}")

    def checked(key: str, dies: int | None, default: int, tp: int = 1) -> int:
        num_dies = dies
        if num_dies is None:
            fitting = min(default, num_experts or default)
            num_dies = max(tp, fitting - fitting % tp)
        if num_dies < 1:
            reasons.append(f"{key} must be at least 1, found {num_dies}")
        elif num_experts and num_dies > num_experts and not has_redundant_slots:
            reasons.append(f"{key}={num_dies} is more than the model's {num_experts} routed experts")
        elif num_dies % tp:
            reasons.append(f"{key}={num_dies} cannot be groups of tp={tp}")
        return num_dies

    def checked_tp(key: str, tp: int, mode: TPMode) -> int:
        if tp not in TP_SIZES:
            reasons.append(f"{key} must be one of {', '.join(map(str, TP_SIZES))}, found {tp}")
            return 1
        if config.num_attention_heads % tp:
            reasons.append(f"{key}={tp} does not divide the model's {config.num_attention_heads} heads")
        elif mode == "tp" and config.intermediate_size % tp and not config.is_moe(0):
            reasons.append(
                f"{key}={tp} does not divide the intermediate size {config.intermediate_size} of the model's "
                "dense layers; sp-tp-sp does not cut them"
            )
        return tp

    def colocated(role: Role, given: TEConfig | None) -> list[_Team]:
        te = given or TEConfig()
        if te.count < 1:
            reasons.append(f"{role}.count must be at least 1, found {te.count}")
        if te.hardware != "cm384" and role == "decode":
            reasons.append(
                f"decode.hardware={te.hardware}: decode needs the interconnect of CloudMatrix dies; "
                "prefill.hardware may be 910b"
            )
        if te.tp is None:
            num_dies = checked(f"{role}.dies", te.dies, DEFAULT_PD_DIES)
            tp = default_tp(config, role, num_dies, te.tp_mode)
        else:
            tp = checked_tp(f"{role}.tp", te.tp, te.tp_mode)
            num_dies = checked(f"{role}.dies", te.dies, DEFAULT_PD_DIES, tp)
        limits = {"max_num_seqs": te.max_num_seqs, "max_num_batched_tokens": te.max_num_batched_tokens}
        for key, limit in limits.items():
            if limit is not None and limit < 1:
                reasons.append(f"{role}.{key} must be at least 1, found {limit}")
        if te.hardware == "910b" and num_dies > NPUS_PER_SERVER:
            reasons.append(
                f"{role}.dies={num_dies} do not fit in a 910B server, whose {NPUS_PER_SERVER} NPUs share "
                f"memory among themselves alone; {role}.count makes more TEs"
            )
        made = _Team("", role, num_dies, te.hardware, tp, te.tp_mode, **limits)  # type: ignore[arg-type]
        return [msgspec.structs.replace(made, name=f"{role} {i}") for i in range(te.count)]

    def disaggregated(name: str, role: Role) -> _Team:
        attention, experts = d.attention or AttentionConfig(), d.experts or ExpertConfig()
        for key in ("domains", "dies", "microbatches"):
            if getattr(attention, key) < 1:
                reasons.append(f"attention.{key} must be at least 1, found {getattr(attention, key)}")
        rows = d.scheduler.max_num_batched_tokens
        if attention.microbatches > rows:
            reasons.append(
                f"attention.microbatches={attention.microbatches} is more than the {rows} rows of a step"
            )
        if not num_experts:
            reasons.append(f"{d.kind} needs a model with routed experts")
            return _Team(name, role, 1)
        routed = checked("experts.routed_dies", experts.routed_dies, DEFAULT_ROUTED_DIES)
        shared = experts.shared_dies
        if shared is None:
            shared = max(1, routed // 8) if config.n_shared_experts else 0
        if bool(shared) != bool(config.n_shared_experts) or shared < 0:
            kind = "needs dies for its shared expert" if config.n_shared_experts else "has no shared expert"
            reasons.append(f"the model {kind}, found experts.shared_dies={shared}")
        if any(each.endswith(SHARED_INPUTS) for each in config.kept_float):
            reasons.append(
                "the checkpoint's INT8 recipe keeps gate_proj and up_proj of a shared expert in float, "
                f"and {d.kind} sends INT8 rows to the shared expert's dies"
            )
        num_dies = attention.domains * attention.dies
        return _Team(name, role, num_dies, num_routed_dies=routed, num_shared_dies=shared)

    match d.kind:
        case "monolithic" | "colocated":
            mode = d.tp_mode or "tp"
            tp = checked_tp("tp", 1 if d.tp is None else d.tp, mode)
            if d.kind == "monolithic":
                tp = 1  # a reason has been given if it is not
            num_dies = checked("dies", d.dies, 1 if d.kind == "monolithic" else DEFAULT_DIES, tp)
            if d.kind == "monolithic" and num_dies != 1:
                reasons.append(f"monolithic is one die, not dies={num_dies}; colocated spreads over several")
            return [_Team("te", "both", num_dies, tp=tp, tp_mode=mode)]
        case "pd":
            return [*colocated("prefill", d.prefill), *colocated("decode", d.decode)]
        case "moe-attention":
            return [disaggregated("te", "both")]
        case "transformerless":
            return [*colocated("prefill", d.prefill), disaggregated("decode 0", "decode")]


def _reasons_against(d: Deployment, config: ModelConfig) -> list[str]:
    """What is wrong with the settings that all TEs share."""
    reasons = []
    limit = config.max_position_embeddings
    if d.max_model_len is not None and not 2 <= d.max_model_len <= limit:
        reasons.append(f"max_model_len must be between 2 and the model's {limit}, found {d.max_model_len}")
    size, num_blocks = d.cache.block_size, d.cache.num_blocks
    if size < BLOCK_MULTIPLE or size % BLOCK_MULTIPLE:
        reasons.append(f"cache.block_size must be a multiple of {BLOCK_MULTIPLE}, found {size}")
    context = d.max_model_len or min(limit, DEFAULT_MODEL_LEN)
    if num_blocks is not None and num_blocks * size < context:
        reasons.append(
            f"cache.num_blocks={num_blocks} of {size} positions hold less than one context of {context}"
        )
    if d.scheduler.max_waiting < 0:
        reasons.append(f"scheduler.max_waiting must not be negative, found {d.scheduler.max_waiting}")
    if d.cache.num_host_blocks < 0:
        reasons.append(f"cache.num_host_blocks must not be negative, found {d.cache.num_host_blocks}")
    if d.cache.preemption == "swap" and not d.cache.num_host_blocks:
        reasons.append("cache.preemption=swap needs cache.num_host_blocks")
    for key, value in (
        ("scheduler.max_num_seqs", d.scheduler.max_num_seqs),
        ("scheduler.max_num_batched_tokens", d.scheduler.max_num_batched_tokens),
        ("cache.max_keys", d.cache.max_keys),
        ("threads", d.threads),
    ):
        if value < 1:
            reasons.append(f"{key} must be at least 1, found {value}")
    for section, te in (("scheduler", None), ("prefill", d.prefill), ("decode", d.decode)):
        num_tokens = (te and te.max_num_batched_tokens) or d.scheduler.max_num_batched_tokens
        num_seqs = (te and te.max_num_seqs) or d.scheduler.max_num_seqs
        is_own = section == "scheduler" or (te and (te.max_num_seqs or te.max_num_batched_tokens))
        if is_own and num_tokens < num_seqs * (1 + d.mtp):
            reasons.append(
                f"{section}.max_num_batched_tokens={num_tokens} cannot hold one step of "
                f"max_num_seqs={num_seqs} with {d.mtp} drafts each"
            )
    if d.dataflow and d.kind not in APART:
        reasons.append(f"dataflow is for pods with dies for experts alone, not for {d.kind}")
    if d.lockstep and d.kind not in LOCKSTEP:
        reasons.append(f"lockstep is for {', '.join(LOCKSTEP)}, not for {d.kind}")
    if d.lockstep and d.kind == "colocated":
        if (d.tp or 1) > 1:
            reasons.append(f"lockstep needs DP groups of one die, found tp={d.tp}")
        if d.pipeline is not None and d.pipeline.microbatches > 1:
            reasons.append(
                f"lockstep runs a step's layers one after the other, found "
                f"pipeline.microbatches={d.pipeline.microbatches}"
            )
    if d.transfer == "layer" and "prefill" not in SECTIONS[d.kind]:
        reasons.append(f"transfer=layer is for pods whose prefill has TEs of its own, not for {d.kind}")
    if d.lockstep and d.dataflow:
        reasons.append("lockstep and dataflow exclude each other: choose one")
    if d.dataflow and d.execution is not None and d.execution.for_role("decode").overlap:
        reasons.append("dataflow and execution.overlap exclude each other: choose one")
    if d.execution is not None and "prefill" not in SECTIONS[d.kind]:
        reasons += [
            f"execution.{role} is for pods whose prefill has TEs of its own, not for {d.kind}"
            for role, own in (("prefill", d.execution.prefill), ("decode", d.execution.decode))
            if own is not None
        ]
    reasons += _reasons_against_pipeline(d)
    if not 0 <= d.mtp <= MAX_DRAFTS:
        reasons.append(f"mtp must be 0, 1 or 2, found {d.mtp}")
    elif d.mtp and not config.num_nextn_predict_layers:
        reasons.append(f"mtp={d.mtp} needs an MTP layer, and the checkpoint has none")
    health = (d.health.probe_s, d.health.suspect_s, d.health.lost_s)
    if not 0 < health[0] < math.inf or not 0 < health[1] < health[2] < math.inf:
        reasons.append(
            "health needs probe_s > 0 and 0 < suspect_s < lost_s, "
            "found probe_s={}, suspect_s={}, lost_s={}".format(*health)
        )
    if d.hardware.hbm_mb is not None and d.hardware.hbm_mb < 1:
        reasons.append(f"hardware.hbm_mb must be at least 1, found {d.hardware.hbm_mb}")
    return reasons


def _reasons_against_pipeline(d: Deployment) -> list[str]:
    pipeline, reasons = d.pipeline or PipelineConfig(), []
    # Prefill overlaps by engines, with all cores for everybody, unless it is told otherwise.
    is_910b = pipeline.overlap == "cores" and d.prefill is not None and d.prefill.hardware == "910b"
    cores = int((atlas_a2(1) if is_910b else Spec()).aic_cores.value)
    if pipeline.microbatches not in (1, 2):
        reasons.append(f"pipeline.microbatches must be 1 or 2, found {pipeline.microbatches}")
    if not 1 <= pipeline.attention_cores < cores:
        reasons.append(
            f"pipeline.attention_cores must be between 1 and {cores - 1}, of the {cores} AIC cores of a die, "
            f"found {pipeline.attention_cores}"
        )
    return reasons


def _is_lockstep(d: Deployment, config: ModelConfig) -> bool:
    """Whether the dies with decode run in lockstep. Unless it is said, dies that are all alike do with a
    large model, if they can. The kernels of a small one are compiled in half the time.
    """
    if d.lockstep is not None:
        return d.lockstep
    if d.kind == "monolithic":
        is_possible = d.execution is None
    elif d.kind == "colocated":
        has_microbatches = d.pipeline is not None and d.pipeline.microbatches > 1
        has_slots = d.experts is not None and d.experts.redundant_slots > 0
        is_possible = d.tp in (None, 1) and not has_microbatches and not has_slots
    else:
        is_possible = False
    return is_possible and num_parameters(config) >= LARGE_MODEL


def _size(d: Deployment, config: ModelConfig, team: _Team, first_die: int) -> Sizes:
    """The numbers of one TE."""
    num_experts = num_routed_experts(config, d.mtp)
    num_holders = team.num_routed_dies or team.num_dies
    attention, experts = d.attention or AttentionConfig(), d.experts or ExpertConfig()
    is_apart = team.num_routed_dies > 0
    pipeline = PipelineConfig() if is_apart or d.pipeline is None else d.pipeline
    overlap = pipeline.overlap or ("engines" if team.role == "prefill" else "cores")
    max_model_len = d.max_model_len or min(config.max_position_embeddings, DEFAULT_MODEL_LEN)
    max_tokens = team.max_num_batched_tokens or d.scheduler.max_num_batched_tokens
    max_seqs = team.max_num_seqs or d.scheduler.max_num_seqs
    num_blocks = d.cache.num_blocks
    if num_blocks is None:
        num_blocks = -(-max(max_model_len, DEFAULT_MODEL_LEN) // d.cache.block_size)
    return Sizes(
        name=team.name,
        role=team.role,
        first_die=first_die,
        hardware=team.hardware,
        num_dies=team.num_dies,
        tp=team.tp,
        tp_mode=team.tp_mode,
        experts_of=tuple(
            range(num_experts * r // num_holders, num_experts * (r + 1) // num_holders)
            for r in range(num_holders)
        ),
        num_domains=attention.domains if is_apart else 1,
        num_microbatches=attention.microbatches if is_apart else pipeline.microbatches,
        overlap=overlap if pipeline.microbatches > 1 else None,
        attention_cores=pipeline.attention_cores,
        num_shared_dies=team.num_shared_dies,
        redundant_slots=experts.redundant_slots,
        balance_interval_ns=math.ceil(1e9 * experts.balance_interval),
        balance_slices=experts.balance_slices,
        has_expert_dies=is_apart,
        is_lockstep=_is_lockstep(d, config) and team.role != "prefill",
        is_dataflow=is_apart and d.dataflow,
        max_model_len=max_model_len,
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        max_logit_rows=min(max_tokens, max(64, max_seqs * (1 + d.mtp))),
        block_size=d.cache.block_size,
        num_blocks=num_blocks,
        mtp=d.mtp,
        num_mtp_layers=num_mtp_layers(d, config),
        lost_ns=round(1e9 * d.health.lost_s),
        plans_ahead=d.execution is not None and d.execution.for_role(team.role).overlap,
        num_host_blocks=d.cache.num_host_blocks,
        caches_prefixes=d.cache.prefix,
        max_cache_keys=d.cache.max_keys,
        preempts_by_swap=d.cache.preemption == "swap",
        transfers_by_layer=d.transfer == "layer" and team.role != "both",
    )
