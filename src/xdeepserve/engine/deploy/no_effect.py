"""Finds accepted settings without effect in a deployment, with the reason, for a note to the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdeepserve.engine.deploy.deployment import Deployment, ExecutionConfig, PipelineConfig, Role
from xdeepserve.engine.deploy.roles import has_prefill, has_services

Rule = Callable[[Deployment], str | None]


def without_effect(d: Deployment, overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Find overrides (`key=value`) without any effect; return each key with the reason."""
    keys = dict.fromkeys(override.partition("=")[0].strip() for override in overrides)
    found = []
    for key in keys:
        for name, rule in RULES.items():
            reason = rule(d) if f"{key}.".startswith(f"{name}.") else None
            if reason is not None:
                found.append((key, reason))
                break
    return found


def _one_way(d: Deployment) -> str | None:
    return None if has_prefill(d.kind) else f"{d.kind} has no prefill of its own to come from"


def _one_holder(d: Deployment) -> str | None:
    return "monolithic is one die, which exchanges no tokens" if d.kind == "monolithic" else None


def _no_slots(d: Deployment) -> str | None:
    slots = 0 if d.experts is None else d.experts.redundant_slots
    return None if slots else "without experts.redundant_slots no expert has replicas"


def _one_microbatch(d: Deployment) -> str | None:
    count = (d.pipeline or PipelineConfig()).microbatches
    return None if count > 1 else "steps are whole unless pipeline.microbatches=2"


def _by_engines(d: Deployment) -> str | None:
    pipeline = d.pipeline or PipelineConfig()
    if pipeline.microbatches > 1 and pipeline.overlap == "engines":
        return "microbatches overlap by engines, and each has all cores"
    return _one_microbatch(d)


def _no_host_blocks(d: Deployment) -> str | None:
    return None if d.cache.num_host_blocks else "without cache.num_host_blocks nothing is kept on the host"


def _no_prefixes(d: Deployment) -> str | None:
    return None if d.cache.prefix else "cache.prefix=false keeps no blocks"


def _no_pool(d: Deployment) -> str | None:
    return None if d.ems.path else "without ems.path there is no memory pool"


def _no_drafts(d: Deployment) -> str | None:
    return None if d.mtp else "there are no drafts unless mtp is 1 or 2"


def _one_draft(d: Deployment) -> str | None:
    return None if d.mtp == 2 else "it is about the second draft of mtp=2"


def _no_graphs(d: Deployment) -> str | None:
    execution = d.execution or ExecutionConfig()
    roles: tuple[Role, ...] = ("prefill", "decode") if has_prefill(d.kind) else ("both",)
    eager = all(execution.for_role(role).mode == "op" for role in roles)
    return "execution.mode=op launches no graphs" if eager else None


def _one_head_owner(d: Deployment) -> str | None:
    return None if (d.tp or 1) > 1 else "a DP group of one die has nothing to share: set tp"


def _in_turn(d: Deployment) -> str | None:
    if d.kind == "monolithic":
        return "monolithic is one DP group"
    in_turn = d.scheduler.dispatch == "two-level"
    return "scheduler.dispatch=two-level deals requests out in turn" if in_turn else None


def _no_copies(d: Deployment) -> str | None:
    copies = 0 if d.experts is None else d.experts.copies
    return (
        None
        if copies or not has_services(d.kind)
        else "without experts.copies there is nobody to ask instead"
    )


def _one_by_one(d: Deployment) -> str | None:
    return f"{d.kind} has no barriers anyway" if has_services(d.kind) else None


def _by_urma(d: Deployment) -> str | None:
    return "clients reach expert servers by URMA" if has_services(d.kind) else None


def _at_once(d: Deployment) -> str | None:
    waits = d.services is not None and d.services.batch_clients > 1
    return None if waits or not has_services(d.kind) else "servers wait for nobody: services.batch_clients=1"


def _no_kinds(d: Deployment) -> str | None:
    route = d.scheduler.route
    return None if route in ("pd-aware", "deepserve") else f"scheduler.route={route} looks at no heat map"


RULES: dict[str, Rule] = {
    "scheduler.heat": _no_kinds,
    "scheduler.statuses": _in_turn,
    "scheduler.decode": _one_way,
    "scheduler.admission": _one_way,
    "scheduler.status_period": _one_way,
    "fabric": _one_way,
    "exchange": _one_holder,
    "experts.balance_interval": _no_slots,
    "experts.balance_slices": _no_slots,
    "experts.cold_tokens": _no_slots,
    "services.answer_timeout_ms": _no_copies,
    "services.batch_timeout_us": _at_once,
    "dataflow": _one_by_one,
    "attention.carrier": _by_urma,
    "pipeline.overlap": _one_microbatch,
    "pipeline.attention_cores": _by_engines,
    "pipeline.adaptive": _by_engines,
    "cache.load": _no_host_blocks,
    "cache.max_keys": _no_prefixes,
    "execution.mtp": _no_drafts,
    "execution.cache_graphs": _no_graphs,
    "mtp_reuse": _one_draft,
    "ems": _no_pool,
    "tp_mode": _one_head_owner,
}
