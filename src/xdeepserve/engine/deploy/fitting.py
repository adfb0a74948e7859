"""Fits a deployment to a model: the numbers of each of its task executors, or every reason why not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise, starmap
from typing import Literal

from xdeepserve.engine.deploy import expert_services, refusals, rules
from xdeepserve.engine.deploy.deployment import (
    AttentionConfig,
    Deployment,
    ExpertConfig,
    PipelineConfig,
    ServiceConfig,
)
from xdeepserve.engine.deploy.policies import ADMISSION, DISPATCH
from xdeepserve.engine.deploy.roles import AT_EXPERTS, TEKind, Turns
from xdeepserve.engine.deploy.sizes import (
    MAX_REPLICAS,
    ExpertSizes,
    GroupSizes,
    KVSizes,
    Sizes,
    StepSizes,
    TEPlace,
    TESettings,
    WalkSizes,
)
from xdeepserve.engine.deploy.teams import Teams, TEDies, num_routed_experts
from xdeepserve.errors import DeploymentError
from xdeepserve.hw.topology import Topology
from xdeepserve.model.checkpoint import num_parameters
from xdeepserve.model.config import ModelConfig

MAX_DIES = 768
LARGE_MODEL = 50_000_000  # parameters


def fit(deployment: Deployment, config: ModelConfig, is_timing_only: bool = False) -> tuple[Sizes, ...]:
    """Fit a deployment to a model and return the sizes of all TEs.

    DeploymentError with every reason if they cannot be built. If the run `is_timing_only`, there may be more
    dies than routed experts, even without redundant slots.
    """
    teams = Teams(deployment, config, is_timing_only)
    tes = teams.tes()
    num_experts = teams.num_experts
    reasons = refusals.reasons_against(deployment, config) + teams.reasons
    reasons += rules.refused(deployment, rules.TIMING_ONLY if is_timing_only else rules.WITH_TOKENS)
    if not reasons:
        reasons += refusals.reasons_against_slots(tes, num_experts, config.n_shared_experts)
    first_die = _places(deployment, tes, reasons)
    if reasons:
        raise DeploymentError(f"deployment {deployment.name}: " + "; ".join(dict.fromkeys(reasons)))
    sizes = [size(deployment, config, te, first_die[te.name], is_timing_only) for te in tes]
    for number, te in enumerate(tes):
        if not te.has_servers:
            sizes[number] = sizes[number].sharing(sizes[0])
    return tuple(sizes)


def with_servers_outside(deployment: Deployment, config: ModelConfig) -> Sizes:
    """Return the sizes of the TE whose expert servers are processes. Raises DeploymentError if no TE has
    such servers."""
    for sizes in fit(deployment, config):
        if sizes.place.has_servers_outside:
            return sizes
    raise DeploymentError("an expert server is a process with experts.transport shm or tcp")


def _places(d: Deployment, tes: Sequence[TEDies], reasons: list[str]) -> dict[str, int]:
    """Return the first die of each TE by name; add errors to `reasons`.

    The dies of a SuperPod come first. Prefill that finds no room there, or is of other hardware, is placed
    beside it.
    """
    prefills = [te for te in tes if te.kind.role == "prefill"]
    is_beside = _total(tes) > MAX_DIES or any(te.is_foreign for te in prefills)
    beside = [te for te in tes if te.is_mixed or (is_beside and te in prefills)]
    within = [te for te in tes if te not in beside]
    if any(te.is_foreign for te in beside) and d.fabric == "ub":
        reasons.append(
            "fabric=ub does not lead from prefill.hardware=910b, which is on no UB plane, to decode: set "
            "fabric=auto, roce or vpc"
        )
    elif (names := rules.off_ub(d)) and beside and d.fabric == "ub":
        reasons.append(f"fabric=ub does not lead to {names}: set fabric=auto, roce or vpc")
    elif _total(within) > MAX_DIES:
        reasons.append(f"a SuperPod has {MAX_DIES} dies, this deployment needs {_total(within)}")
    elif beside and d.fabric == "ub":
        reasons.append(
            f"a SuperPod has {MAX_DIES} dies, this deployment needs {_total(tes)}: to have prefill beside "
            "it, set fabric=auto, roce or vpc, since UB does not leave the pod"
        )
    elif beside and d.transfer_over != "dma" and not names:
        reasons.append(
            f"transfer_over={d.transfer_over} goes over ub, which does not lead from prefill beside the "
            "SuperPod to decode"
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
    """Return the number of MTP layers in use: one for each draft, as far as the model has them."""
    wanted = min(deployment.mtp, 1) if deployment.mtp_reuse else deployment.mtp
    return min(wanted, config.num_nextn_predict_layers)


def _is_lockstep(d: Deployment, row: TEKind, config: ModelConfig) -> bool:
    """Whether the dies of a TE run in lockstep.

    Unless `lockstep` is set, dies that are all alike do so with a large model, if they can. With a small
    model they do not, because its kernels compile in half the time.
    """
    if d.lockstep is not None:
        return d.lockstep and row.lockstep != "never"
    is_possible = row.lockstep == "large" and config.v4 is None and not rules.refused(d, rules.LOCKSTEP)
    if max(d.tp or 1, d.o_proj_tp or 1) > 1 or _turns(d, row) == "overlap":
        is_possible = False  # their stages are tasks' in any case
    return is_possible and num_parameters(config) >= LARGE_MODEL


def _turns(d: Deployment, row: TEKind) -> Turns:
    """Choose the schedule of a TE's steps: as asked for if the TE supports it, else its default."""
    has_microbatches = d.pipeline is not None and d.pipeline.microbatches > 1
    asked = {"dataflow": d.dataflow, "overlap": has_microbatches}
    return next((turns for turns in row.turns if asked.get(turns)), row.turns[0])


def _spread(num_experts: int, te: TEDies, counts: Sequence[int] | None, vacant: int = 0) -> tuple[range, ...]:
    """Return the routed experts of each die that may hold some.

    Each die gets its entry of `counts`, if the number of entries fits. Otherwise the experts are spread
    evenly, or one on each of the first dies. The last `vacant` dies get none.
    """
    first = min(te.num_holders - te.num_shared_dies - vacant, num_experts) or 1
    if counts is not None and len(counts) == te.num_routed_dies - vacant:
        ends = [0, *accumulate(counts)]
        others = te.num_shared_dies + vacant
        return (*starmap(range, pairwise(ends)), *[range(num_experts, num_experts)] * others)
    shares = [range(num_experts * r // first, num_experts * (r + 1) // first) for r in range(first)]
    return (*shares, *[range(num_experts, num_experts)] * (te.num_holders - first))


def _free_slots(te: TEDies, experts_of: Sequence[range], shared_here: int) -> tuple[int, ...]:
    """Return the redundant slots of each die that may hold experts, in each layer.

    A replica lies on another die than its primary: a die has no use for more slots than that allows.
    `shared_here` counts the shared expert of dies that have it for themselves alone.
    """
    num_experts, first_shared = experts_of[-1].stop, te.num_holders - te.num_shared_dies
    if te.room.per_die is None:
        useful = num_experts - -(-num_experts // te.num_holders)
        return (min(te.room.slots, useful),) * len(experts_of)
    shared = [shared_here if not te.num_shared_dies else n >= first_shared for n in range(te.num_holders)]
    rooms = (min(te.room.per_die - here, num_experts) for here in shared)
    return tuple(max(0, room - len(held)) for room, held in zip(rooms, experts_of, strict=True))


def _first_replicas(experts_of: Sequence[range], free: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Choose experts for redundant slots until EPLB knows the load, those with the fewest replicas first."""
    num_replicas = [1] * experts_of[-1].stop
    held: list[tuple[int, ...]] = []
    for own, slots in zip(experts_of, free, strict=True):
        others = [e for e, num in enumerate(num_replicas) if e not in own and num < MAX_REPLICAS]
        held.append(tuple(sorted(others, key=num_replicas.__getitem__)[:slots]))
        for expert in held[-1]:
            num_replicas[expert] += 1
    return tuple(held)


def _copies(
    experts: ExpertConfig, te: TEDies, experts_of: Sequence[range], vacant: int
) -> tuple[tuple[int, ...], ...]:
    """Choose the experts copied to each server from the start; fewer copies where fewer dies are left."""
    num_servers = te.num_routed_dies - vacant
    copies = max(0, min(experts.copies, num_servers - 1))
    if not te.kind.has_services or not (copies or vacant):
        return ()
    return expert_services.copies_of(experts_of, num_servers, copies, vacant)


def size(
    d: Deployment,
    config: ModelConfig,
    te: TEDies,
    first_die: int = 0,
    is_timing_only: bool = False,
    num_domains: int | None = None,
) -> Sizes:
    """Decide the numbers of a single TE; `num_domains` overrides the deployment's DP domains.

    Timing-only runs never run in lockstep, since nothing is computed.
    """
    if num_domains is None:
        num_domains = (d.attention or AttentionConfig()).domains if te.kind.is_apart else 1
    vacant = (
        min((d.experts or ExpertConfig()).vacancies, te.num_routed_dies - 1) if te.kind.has_services else 0
    )
    experts = _expert_sizes(d, config, te, vacant)
    walk = _walk_sizes(d, te, num_domains, not is_timing_only and _is_lockstep(d, te.kind, config))
    steps = _step_sizes(d, config, te, walk.least_parts)
    return Sizes(
        place=_place(d, te, experts, first_die, num_domains, vacant),
        groups=_group_sizes(d, te, steps.max_part),
        kv=_kv_sizes(d, te, steps.max_model_len),
        steps=steps,
        walk=walk,
        experts=experts,
        settings=_settings(d, te),
    )


def _place(
    d: Deployment, te: TEDies, experts: ExpertSizes, first_die: int, num_domains: int, vacant: int
) -> TEPlace:
    is_away = experts.where == "away"
    return TEPlace(
        name=te.name,
        role=te.kind.role,
        first_die=first_die,
        hardware=te.given.hardware,
        devices=te.devices,
        num_dies=te.num_dies,
        num_domains=num_domains,
        num_routed_dies=experts.num_routed if is_away else 0,
        num_shared_dies=te.num_shared_dies if is_away else 0,
        num_vacant=vacant,
        transport=(d.experts or ExpertConfig()).transport if te.kind.has_services else "pod",
    )


def _settings(d: Deployment, te: TEDies) -> TESettings:
    return TESettings(
        dispatch=d.scheduler.dispatch,
        decode=d.scheduler.decode,
        victim=d.scheduler.victim,
        eviction=d.cache.eviction,
        placement=(d.experts or ExpertConfig()).placement,
        status_period_ns=round(1e9 * d.scheduler.status_period),
        execution=d.execution and d.execution.for_role(te.kind.role),
        seed=d.seed,
        health=d.health,
        recovery=d.recovery,
        invariants=d.invariants,
    )


def _expert_sizes(d: Deployment, config: ModelConfig, te: TEDies, vacant: int) -> ExpertSizes:
    experts, num_mtp = d.experts or ExpertConfig(), num_mtp_layers(d, config)
    experts_of = _spread(num_routed_experts(config, d.mtp), te, experts.counts, vacant)
    copies_of = _copies(experts, te, experts_of, vacant)
    is_apart = te.kind.is_apart
    slots = _free_slots(te, experts_of, 0 if is_apart else min(1, config.n_shared_experts))
    if copies_of:
        slots = (max(map(len, copies_of)),) * len(experts_of)
    layers = [i for i in range(config.num_hidden_layers + num_mtp) if config.is_moe(i)]
    order = list(range(len(layers)))
    if num_mtp and layers:  # fewer layers of MTP than drafts: the first one is used again
        order += [order[-num_mtp]] * (d.mtp - num_mtp)
    where: Literal["here", "among", "away"] = "among" if te.num_dies > 1 and any(experts_of) else "here"
    return ExpertSizes(
        where="away" if _turns(d, te.kind) in AT_EXPERTS else where,
        layers=tuple(layers),
        num_mtp_layers=num_mtp,
        order=tuple(order),
        experts_of=experts_of,
        num_shared_dies=te.num_shared_dies,
        redundant_of=slots,
        copies_of=copies_of,
        first_of=() if te.room.per_die is None else _first_replicas(experts_of, slots),
        balance_interval_ns=0 if copies_of else math.ceil(1e9 * experts.balance_interval),
        balance_slices=experts.balance_slices,
        cold_tokens=experts.cold_tokens,
    )


def _walk_sizes(d: Deployment, te: TEDies, num_domains: int, is_lockstep: bool) -> WalkSizes:
    row, turns = te.kind, _turns(d, te.kind)
    attention = d.attention or AttentionConfig()
    pipeline = d.pipeline or PipelineConfig()
    overlap = pipeline.overlap or ("engines" if row.role == "prefill" else "cores")
    lost_ns = _lost_ns(d)
    return WalkSizes(
        turns=turns,
        num_microbatches=attention.microbatches if row.is_apart else pipeline.microbatches,
        is_dynamic=pipeline.dynamic and turns == "overlap",
        attention_cores=pipeline.attention_cores if turns == "overlap" and overlap == "cores" else 0,
        moves_cores=pipeline.adaptive,
        unabsorbed=d.prefill_attention == "unabsorbed",
        is_lockstep=is_lockstep,
        exchange=d.exchange,
        carrier=rules.carrier_of(d) if row.is_apart else "mte",
        num_domains=num_domains,
        # A little less than until a group is lost: so an error names the die that does not come, not all dies
        # that wait.
        timeout_ns=lost_ns - lost_ns // 20,
        services=(d.services or ServiceConfig()) if row.has_services else None,
    )


def _step_sizes(d: Deployment, config: ModelConfig, te: TEDies, num_parts: int) -> StepSizes:
    role, given = te.kind.role, te.given
    max_tokens = given.max_num_batched_tokens or d.scheduler.max_num_batched_tokens
    max_seqs = given.max_num_seqs or d.scheduler.max_num_seqs
    return StepSizes(
        role=role,
        max_model_len=refusals.context_of(d, config),
        max_tokens=max_tokens,
        max_part=-(-max_tokens // num_parts),
        max_seqs=max_seqs,
        max_logit_rows=min(max_tokens, max(64, max_seqs * (1 + d.mtp))),
        mtp=d.mtp,
        num_mtp_layers=num_mtp_layers(d, config),
        plans_ahead=d.execution is not None and d.execution.for_role(role).overlap,
        caches_prefixes=d.cache.prefix,
        preempts_by_swap=d.cache.preemption == "swap",
        reserves=role != "both" and (d.transfer == "layer" or ADMISSION.has(d.scheduler.admission, "books")),
    )


def _group_sizes(d: Deployment, te: TEDies, max_part: int) -> GroupSizes:
    tp, scheduler = te.given.tp or 1, d.scheduler
    on_arrival = DISPATCH.has(scheduler.dispatch, "on arrival")
    gathers = scheduler.statuses == "all-gather" and not on_arrival
    return GroupSizes(
        num_groups=te.num_dies // tp,
        tp=tp,
        tp_mode=te.given.tp_mode,
        o_proj_tp=te.given.o_proj_tp,
        max_slice=-(-max_part // tp),
        gathers_statuses=gathers and te.kind.role != "decode",
        lost_ns=_lost_ns(d),
        num_tes=te.num_tes,
    )


def _kv_sizes(d: Deployment, te: TEDies, max_model_len: int) -> KVSizes:
    num_blocks, role = d.cache.num_blocks, te.kind.role
    if num_blocks is None:
        num_blocks = -(-max(max_model_len, refusals.DEFAULT_MODEL_LEN) // d.cache.block_size)
    return KVSizes(
        block_size=d.cache.block_size,
        num_blocks=num_blocks,
        max_blocks_per_seq=-(-max_model_len // d.cache.block_size),
        num_host_blocks=d.cache.num_host_blocks,
        max_cache_keys=d.cache.max_keys,
        pools="all" if d.ems.decode_blocks else "nothing" if role == "decode" else "prompts",
        over=d.transfer_over,
        num_peers=te.num_peers,
        sends_layers=role == "prefill" and d.transfer == "layer",
    )


def _lost_ns(d: Deployment) -> int:
    return round(1e9 * d.health.lost_s)
