"""Rules of settings as rows: which kinds of deployment have them, which exclude others, which change nothing.

Bounds of numbers stand beside the fields of `deployment`. What depends on a model or on the dies of a TE is
checked by functions in `refusals`, `expert_services` and `teams`. Texts may name the deployment, `d`, and the
traits of its `exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xdeepserve.comm.exchange_choices import EXCHANGES, ExchangeTraits
from xdeepserve.engine.deploy.deployment import (
    AttentionConfig,
    Carrier,
    Deployment,
    ExecutionConfig,
    ExpertConfig,
    Kind,
    PipelineConfig,
    Role,
    ServiceConfig,
)
from xdeepserve.engine.deploy.policies import DISPATCH, ROUTE
from xdeepserve.engine.deploy.roles import (
    DEPLOYMENTS,
    SECTIONS,
    has_expert_dies,
    has_prefill,
    has_services,
    is_one_die,
    sections,
    takes_steps_away,
)
from xdeepserve.engine.deploy.settings import Setting, given


class Only(NamedTuple):
    """A setting, or a section, that some kinds of deployment have; elsewhere any value but the default is
    refused."""

    key: str
    kinds: Callable[[Kind], bool]
    what: str  # these kinds have
    beside: str = ""  # what would work elsewhere


PREFILL = "pods whose prefill has TEs of its own"
EXPERT_DIES = "pods with dies for experts alone"
SERVICES = "experts that are services"

ONLY = (
    Only("dataflow", has_expert_dies, EXPERT_DIES),
    Only("experts.routed_dies", has_expert_dies, EXPERT_DIES),
    Only("transfer", has_prefill, PREFILL),
    Only("transfer_over", has_prefill, PREFILL),
    Only("execution.prefill", has_prefill, PREFILL),
    Only("execution.decode", has_prefill, PREFILL),
    Only("scale.prefill", has_prefill, PREFILL),
    Only("scale.decode", has_prefill, PREFILL),
    Only("attention.count", has_services, SERVICES),
    Only("experts.counts", has_services, SERVICES),
    Only(
        "experts.copies",
        has_services,
        SERVICES,
        ": where a group waits for every die no copy stands in for a lost one; experts.redundant_slots share "
        "load",
    ),
    Only("experts.vacancies", has_services, SERVICES),
    Only(
        "experts.experts_per_die",
        lambda kind: "experts" in sections(kind) and not has_services(kind),
        "pods whose dies exchange tokens in a group",
        "; expert servers have experts.counts and experts.copies",
    ),
    Only("experts.transport", has_services, SERVICES),
    Only("experts.monitor", has_services, SERVICES),
)


LARGEST = 1e9  # of a duration in any unit: virtual time is counted in whole nanoseconds


def of_single_settings(d: Deployment) -> list[str]:
    """Return a reason for each setting that this kind of deployment lacks, or that is out of bounds.

    Sections that no TE of this kind heeds are refused as a whole, by `Teams`.
    """
    heeded = sections(d.kind)
    found = [
        (setting, value)
        for setting, value in given(d)
        if (head := setting.key.partition(".")[0]) in heeded or head not in SECTIONS
    ]
    missing = {row: _named(row, found) for row in ONLY if not row.kinds(d.kind)}
    reasons = []
    for row, name in missing.items():
        if name:
            names = ", ".join(kind for kind in DEPLOYMENTS if row.kinds(kind))
            reasons.append(f"{name} is for {row.what} ({names}){row.beside}")
    keys = {row.key for row in missing}
    return reasons + [
        _bounded(setting, value)
        for setting, value in found
        if setting.key not in keys and _is_out(setting, value)
    ]


def _named(row: Only, found: Sequence[tuple[Setting, Any]]) -> str:
    """Name a setting, or a section, as it is refused; "" if nothing of it is set. A section is named as such,
    whatever is set within it."""
    for setting, value in found:
        if f"{setting.key}.".startswith(f"{row.key}.") and value != setting.default:
            return f"{row.key}={value}" if setting.names and setting.key == row.key else row.key
    return ""


def _is_out(setting: Setting, value: Any) -> bool:
    is_long = isinstance(value, float) and value > LARGEST
    return setting.bounds is not None and value is not None and (is_long or not setting.bounds.allow(value))


def _bounded(setting: Setting, value: float) -> str:
    """Say the bounds of a setting whose value is out of them."""
    rest = ""
    if not math.isfinite(value):
        rest = " and finite"
    elif isinstance(value, float) and value > LARGEST:
        rest = f" and at most {LARGEST:g}"
    return f"{setting.key} must be {setting.bounds}{rest}, found {value:g}"


class SettingRule(NamedTuple):
    """A row: settings, the condition that makes them wrong or idle in a deployment, and the reason."""

    keys: tuple[str, ...]
    when: Callable[[Deployment], object]
    reason: str


def devices_of(d: Deployment) -> tuple[str, str]:
    """Return the hardware of attention dies and of expert dies."""
    return (d.attention or AttentionConfig()).hardware, (d.experts or ExpertConfig()).hardware


def carrier_of(d: Deployment) -> Carrier:
    """Choose the carrier of tokens to expert dies: as set, else network cards if there is no UB."""
    asked = (d.attention or AttentionConfig()).carrier
    return asked or ("mte" if devices_of(d) == ("cm384", "cm384") else "rdma")


def off_ub(d: Deployment) -> str:
    """Name the settings of attention and expert hardware that UB does not reach; "" if there are none.

    All dies of such a TE are beside the SuperPod.
    """
    return " and ".join(
        f"{key}={device}"
        for key, device in zip(("attention.hardware", "experts.hardware"), devices_of(d), strict=True)
        if device != "cm384"
    )


def _exchange(d: Deployment) -> ExchangeTraits:
    return EXCHANGES[d.exchange]


def _attention(d: Deployment) -> AttentionConfig:
    return d.attention or AttentionConfig()


def _experts(d: Deployment) -> ExpertConfig:
    return d.experts or ExpertConfig()


def room_for_replicas(d: Deployment) -> list[tuple[Setting, Any]]:
    """Return the settings that give dies room for replicas of routed experts, of all TEs or of a role's."""
    names = ("redundant_slots", "experts_per_die")
    return [each for each in given(d) if each[0].key.rpartition(".")[2] in names and each[1]]


def _pipeline(d: Deployment) -> PipelineConfig:
    return d.pipeline or PipelineConfig()


def _has_pool(d: Deployment) -> bool:
    return d.ems.path is not None


def _has_910b(d: Deployment) -> bool:
    return any(te is not None and te.hardware == "910b" for te in (d.prefill, *(d.te or ())))


def _sends(d: Deployment) -> bool:
    """Whether kernels send and receive KV: they work on memory that both sides reach (xDeepServe 3.1)."""
    return d.transfer_over != "dma"


def _uses_cards(d: Deployment) -> bool:
    return takes_steps_away(d.kind) and carrier_of(d) == "rdma"


def what_cards_are_for(d: Deployment) -> str:
    """Begin a reason with the setting that makes M2N carry tokens between network cards."""
    names = off_ub(d)
    return f"M2N, by which {names} is reached," if names else "attention.carrier=rdma"


LOCKSTEP = (
    SettingRule(
        ("lockstep",),
        lambda d: has_services(d.kind),
        "lockstep takes all dies through a stage at once, and expert services take each client by itself",
    ),
    SettingRule(
        ("lockstep",),
        lambda d: d.dataflow,
        "lockstep takes all dies through a stage at once, and dataflow lets each go on by itself: they "
        "exclude each other",
    ),
    SettingRule(
        ("exchange", "lockstep"),
        lambda d: not _exchange(d).has_twin,
        "lockstep has no twin of exchange={d.exchange}",
    ),
)

EXCLUDED = (
    SettingRule(
        ("cache.preemption",),
        lambda d: d.cache.preemption == "swap" and not d.cache.num_host_blocks,
        "cache.preemption=swap needs cache.num_host_blocks",
    ),
    SettingRule(
        ("scheduler.route",),
        lambda d: ROUTE.has(d.scheduler.route, "needs a heat map") and d.scheduler.heat is None,
        "scheduler.route={d.scheduler.route} looks kinds of TEs up in a heat map: set scheduler.heat",
    ),
    SettingRule(
        ("exchange", "dataflow"),
        lambda d: d.dataflow and _exchange(d).waits_for,
        "exchange={d.exchange} waits for {exchange.waits_for}, and dataflow hears from those alone that have "
        "sent tokens: choose one",
    ),
    SettingRule(
        ("exchange",),
        lambda d: has_services(d.kind) and _exchange(d).waits_for,
        "exchange={d.exchange} waits for {exchange.waits_for}, and expert services are no group",
    ),
    SettingRule(
        ("exchange",),
        lambda d: has_expert_dies(d.kind) and not _exchange(d).is_apart,
        "exchange={d.exchange} is between dies with attention and experts, and {d.kind} has them apart",
    ),
    SettingRule(
        ("experts.copies", "experts.redundant_slots"),
        lambda d: has_services(d.kind) and _experts(d).copies and _experts(d).redundant_slots,
        "experts.copies stay where they are, so that any lost server is covered, and "
        "experts.redundant_slots are filled as load asks: choose one",
    ),
    SettingRule(
        ("experts.vacancies", "experts.redundant_slots"),
        lambda d: has_services(d.kind) and _experts(d).vacancies and _experts(d).redundant_slots,
        "experts.vacancies bring copies, and experts.redundant_slots are for EPLB: choose one",
    ),
    SettingRule(
        ("experts.transport", "experts.redundant_slots"),
        lambda d: has_services(d.kind) and _experts(d).transport != "pod" and _experts(d).redundant_slots,
        "experts.redundant_slots are filled by a pod's dies, and with transport={d.experts.transport} "
        "experts are elsewhere: experts.copies are there from the start",
    ),
    SettingRule(
        ("attention.count", "experts.redundant_slots"),
        lambda d: has_services(d.kind) and _attention(d).count > 1 and _experts(d).redundant_slots,
        "experts.redundant_slots follow the load of one TE, and attention.count={d.attention.count} TEs have "
        "the same servers: experts.copies are there from the start",
    ),
    SettingRule(
        ("attention.count", "experts.transport"),
        lambda d: has_services(d.kind) and _attention(d).count > 1 and _experts(d).transport != "pod",
        "with experts.transport={d.experts.transport} there is one TE, found "
        "attention.count={d.attention.count}",
    ),
    SettingRule(
        ("experts.monitor",),
        lambda d: has_services(d.kind) and _experts(d).monitor is not None and _experts(d).transport == "pod",
        "experts.monitor is for server processes: set experts.transport to shm or tcp",
    ),
    SettingRule(
        ("transfer_over", "fabric"),
        lambda d: _sends(d) and d.fabric not in ("auto", "ub"),
        "transfer_over={d.transfer_over} goes over ub, not over fabric={d.fabric}",
    ),
    SettingRule(
        ("transfer_over",),
        lambda d: _sends(d) and _has_910b(d),
        "transfer_over={d.transfer_over} goes over ub, which 910b prefill is not on",
    ),
    SettingRule(
        ("transfer_over",),
        lambda d: _sends(d) and off_ub(d),
        "transfer_over={d.transfer_over} goes over ub, which does not lead to {off_ub}",
    ),
    # Attention and experts that network cards join.
    SettingRule(
        ("attention.hardware", "experts.hardware"),
        lambda d: off_ub(d) and has_services(d.kind),
        "{off_ub}: clients of expert services write and read themselves, and M2N's messages are taken by who "
        "receives them",
    ),
    SettingRule(
        ("attention.hardware", "experts.hardware"),
        lambda d: off_ub(d) and not has_services(d.kind) and not takes_steps_away(d.kind),
        "{off_ub}: only moe-attention and transformerless have them apart, not {d.kind}",
    ),
    SettingRule(
        ("attention.carrier",),
        lambda d: off_ub(d) and takes_steps_away(d.kind) and carrier_of(d) != "rdma",
        "{off_ub}: no UB leads there; attention.carrier={d.attention.carrier} needs it, rdma does not",
    ),
    SettingRule(
        ("dataflow", "attention.carrier"),
        lambda d: _uses_cards(d) and d.dataflow,
        "{cards} waits for every sender, and dataflow for nobody: choose one",
    ),
    SettingRule(
        ("exchange", "attention.carrier"),
        lambda d: _uses_cards(d) and _exchange(d).waits_for,
        "{cards} has no trampolines, which exchange={d.exchange} is between",
    ),
    SettingRule(
        ("lockstep", "attention.carrier"),
        lambda d: _uses_cards(d) and d.lockstep,
        "{cards} goes from card to card without a group, and lockstep takes a group as one",
    ),
    # The memory pool.
    SettingRule(
        ("ems.path",),
        lambda d: d.ems.path is not None and not d.ems.path.strip(),
        "ems.path must name a directory; without a memory pool it is left out",
    ),
    SettingRule(
        ("ems.namespace",),
        lambda d: _has_pool(d) and d.ems.namespace == "models",
        "ems.namespace=models is where weights are: choose another",
    ),
    SettingRule(
        ("ems.path", "cache.prefix"),
        lambda d: _has_pool(d) and not d.cache.prefix,
        "ems.path needs cache.prefix=true: what comes from the pool is a cached prefix",
    ),
    SettingRule(
        ("cache.peers", "ems.path"),
        lambda d: d.cache.peers and _has_pool(d),
        "cache.peers=true reads prefixes from other TEs, and ems.path has them all in a pool: choose one",
    ),
    SettingRule(
        ("cache.peers", "cache.prefix"),
        lambda d: d.cache.peers and not d.cache.prefix,
        "cache.peers needs cache.prefix=true: what comes from another TE is a cached prefix",
    ),
    SettingRule(  # cards are in servers of all hardware
        ("ems.fabric",),
        lambda d: _has_pool(d) and d.ems.fabric == "ub" and _has_910b(d),
        "ems.fabric=ub does not lead to 910b prefill: set ems.fabric=vpc",
    ),
    SettingRule(
        ("ems.fabric",),
        lambda d: _has_pool(d) and d.ems.fabric == "ub" and off_ub(d),
        "ems.fabric=ub does not lead to {off_ub}: set ems.fabric=vpc",
    ),
)

WITH_TOKENS = (
    SettingRule(
        ("services.server_sums",),
        lambda d: d.services is not None and d.services.server_sums,
        "services.server_sums is for timing-only runs: sums at servers depend on who has which expert, and "
        "bits must not",
    ),
)

TIMING_ONLY = (
    SettingRule(
        ("experts.transport",),
        lambda d: _experts(d).transport != "pod",
        "timing-only runs compute nothing that processes (experts.transport={d.experts.transport}) could",
    ),
)


def refused(d: Deployment, rules: Sequence[SettingRule]) -> list[str]:
    """Return the reason of each rule that holds in a deployment, in the order of the table."""
    return [_said(rule, d) for rule in rules if rule.when(d)]


def _said(rule: SettingRule, d: Deployment) -> str:
    return rule.reason.format(d=d, off_ub=off_ub(d), cards=what_cards_are_for(d), exchange=_exchange(d))


def _has_one_te(d: Deployment) -> bool:
    many = _attention(d).count > 1 or (d.te is not None and sum(te.count for te in d.te) > 1)
    return not (many or has_prefill(d.kind) or d.scale)


def _overlaps_by_engines(d: Deployment) -> bool:
    piped = [row.role for row in DEPLOYMENTS[d.kind] if "pipeline" in row.sections]
    return _pipeline(d).overlap == "engines" or (_pipeline(d).overlap is None and set(piped) == {"prefill"})


def _launches_eagerly(d: Deployment) -> bool:
    execution = d.execution or ExecutionConfig()
    roles: tuple[Role, ...] = ("prefill", "decode") if has_prefill(d.kind) else ("both",)
    return all(execution.for_role(role).mode == "op" for role in roles)


WITHOUT_EFFECT = (
    SettingRule(
        ("scheduler.heat",),
        lambda d: not ROUTE.has(d.scheduler.route, "reads a heat map"),
        "scheduler.route={d.scheduler.route} looks at no heat map",
    ),
    SettingRule(("scheduler.statuses",), lambda d: is_one_die(d.kind), "{d.kind} is one DP group"),
    SettingRule(
        ("scheduler.statuses",),
        lambda d: DISPATCH.has(d.scheduler.dispatch, "on arrival"),
        "scheduler.dispatch={d.scheduler.dispatch} deals requests out in turn",
    ),
    SettingRule(
        ("scheduler.decode", "scheduler.admission", "scheduler.status_period", "fabric"),
        lambda d: not has_prefill(d.kind),
        "{d.kind} has no prefill of its own to come from",
    ),
    SettingRule(
        ("health.link_probe_s",),
        lambda d: not has_prefill(d.kind),
        "links from prefill to decode are probed, and {d.kind} has none",
    ),
    SettingRule(
        ("scheduler.route", "scheduler.job_executors", "cache.peers"),
        _has_one_te,
        "there is one TE, until another one is added",
    ),
    SettingRule(
        ("exchange",),
        lambda d: is_one_die(d.kind),
        "{d.kind} is one die, which exchanges no tokens",
    ),
    SettingRule(
        ("experts.balance_interval", "experts.balance_slices", "experts.cold_tokens", "experts.placement"),
        lambda d: not room_for_replicas(d),
        "without experts.redundant_slots no expert has replicas",
    ),
    SettingRule(
        ("services.answer_timeout_ms",),
        lambda d: has_services(d.kind) and not _experts(d).copies,
        "without experts.copies there is nobody to ask instead",
    ),
    SettingRule(
        ("services.batch_timeout_us",),
        lambda d: has_services(d.kind) and (d.services or ServiceConfig()).batch_clients <= 1,
        "servers wait for nobody: services.batch_clients=1",
    ),
    SettingRule(("dataflow",), lambda d: has_services(d.kind), "{d.kind} has no barriers anyway"),
    SettingRule(
        ("attention.carrier",), lambda d: has_services(d.kind), "clients reach expert servers by URMA"
    ),
    SettingRule(
        ("pipeline.attention_cores", "pipeline.adaptive"),
        lambda d: _pipeline(d).microbatches > 1 and _overlaps_by_engines(d),
        "microbatches overlap by engines, and each has all cores",
    ),
    SettingRule(
        ("pipeline.overlap", "pipeline.dynamic", "pipeline.attention_cores", "pipeline.adaptive"),
        lambda d: _pipeline(d).microbatches <= 1,
        "steps are whole unless pipeline.microbatches=2",
    ),
    SettingRule(
        ("cache.load",),
        lambda d: not (d.cache.num_host_blocks or d.cache.peers),
        "without cache.num_host_blocks nothing is kept on the host, and without cache.peers no TE is asked",
    ),
    SettingRule(
        ("cache.max_keys", "cache.eviction"),
        lambda d: not d.cache.prefix,
        "cache.prefix=false keeps no blocks",
    ),
    SettingRule(
        ("scheduler.status_period",),
        lambda d: d.scheduler.decode == "round-robin",
        "scheduler.decode=round-robin looks at no KV load",
    ),
    SettingRule(
        ("recovery.spare_dies", "recovery.max_restarts"),
        lambda d: not d.recovery.failover,
        "without recovery.failover no TE comes in the place of a lost one",
    ),
    SettingRule(
        ("services.process_timeout_ms",),
        lambda d: has_services(d.kind) and _experts(d).transport == "pod",
        "experts.transport=pod has no processes",
    ),
    SettingRule(
        ("experts.balance_slices", "experts.cold_tokens", "experts.placement"),
        lambda d: room_for_replicas(d) and not _experts(d).balance_interval,
        "experts.balance_interval=0 counts no load",
    ),
    SettingRule(("execution.mtp",), lambda d: not d.mtp, "there are no drafts unless mtp is 1 or 2"),
    SettingRule(("execution.cache_graphs",), _launches_eagerly, "execution.mode=op launches no graphs"),
    SettingRule(("mtp_reuse",), lambda d: d.mtp != 2, "it is about the second draft of mtp=2"),
    SettingRule(("ems",), lambda d: not d.ems.path, "without ems.path there is no memory pool"),
    SettingRule(
        ("tp_mode",),
        lambda d: (d.tp or 1) <= 1,
        "a DP group of one die has nothing to share: set tp",
    ),
)


def without_effect(d: Deployment, overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Return the keys of overrides, `key=value`, that change nothing, each with the reason."""
    keys = dict.fromkeys(override.partition("=")[0].strip() for override in overrides)
    found = []
    for key in keys:
        rules = [rule for rule in WITHOUT_EFFECT if any(f"{key}.".startswith(f"{own}.") for own in rule.keys)]
        reason = next((_said(rule, d) for rule in rules if rule.when(d)), None)
        if reason is not None:
            found.append((key, reason))
    return found
