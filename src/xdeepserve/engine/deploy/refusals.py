"""Errors in the settings of a deployment for a model; all of them go into one exception."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from xdeepserve.engine.deploy.cards import off_ub
from xdeepserve.engine.deploy.deployment import Deployment, ExpertConfig, PipelineConfig
from xdeepserve.engine.deploy.roles import DEPLOYMENTS, has_prefill, has_services
from xdeepserve.errors import abridged
from xdeepserve.hw.accelerators import atlas_a2
from xdeepserve.hw.spec import Spec
from xdeepserve.hw.topology import Topology
from xdeepserve.model.config import ModelConfig

MAX_DRAFTS = 2
BLOCK_MULTIPLE = 16  # attention walks the cache in tiles of 16 positions
DEFAULT_MODEL_LEN = 4096
NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")
LEAST = {
    "scheduler.max_num_seqs": 1,
    "scheduler.max_num_batched_tokens": 1,
    "scheduler.max_waiting": 0,
    "scheduler.job_executors": 1,
    "cache.num_host_blocks": 0,
    "cache.max_keys": 1,
    "threads": 1,
    "hardware.hbm_mb": 1,
    "ems.servers": 1,
    "ems.dram_mb": 1,
    "ems.volume_mb": 1,
    "ems.block_size": 1,
    "ems.quota_mb": 1,
}


def context_of(d: Deployment, config: ModelConfig) -> int:
    """Return the longest context, in tokens: `max_model_len`, or by default the model's up to 4096."""
    return d.max_model_len or min(config.max_position_embeddings, DEFAULT_MODEL_LEN)


def reasons_against(d: Deployment, config: ModelConfig) -> list[str]:
    """List errors in settings shared by all TEs; `Teams` finds errors in the dies of each."""
    return [
        *_against_cache(d, config),
        *_against_steps(d),
        *_against_runs(d, config),
        *_against_pipeline(d),
        *_against_drafts(d, config),
        *_against_health(d),
        *_against_recovery(d),
        *_against_pool(d),
    ]


def _against_cache(d: Deployment, config: ModelConfig) -> list[str]:
    reasons, limit = [], config.max_position_embeddings
    if d.max_model_len is not None and not 2 <= d.max_model_len <= limit:
        reasons.append(f"max_model_len must be between 2 and the model's {limit}, found {d.max_model_len}")
    size, num_blocks, context = d.cache.block_size, d.cache.num_blocks, context_of(d, config)
    if size < BLOCK_MULTIPLE or size % BLOCK_MULTIPLE:
        reasons.append(f"cache.block_size must be a multiple of {BLOCK_MULTIPLE}, found {size}")
    if num_blocks is not None and num_blocks * size < context:
        reasons.append(
            f"cache.num_blocks={num_blocks} of {size} positions hold less than one context of {context}: "
            f"set at least {-(-context // size)}{_shorter_context(num_blocks * size)}"
        )
    if d.cache.preemption == "swap" and not d.cache.num_host_blocks:
        reasons.append("cache.preemption=swap needs cache.num_host_blocks")
    return reasons


def _shorter_context(num_positions: int) -> str:
    """Suggest max_model_len as `num_positions`; "" if a context would have one position."""
    return f", or max_model_len={num_positions}" if num_positions >= 2 else ""


def _against_steps(d: Deployment) -> list[str]:
    reasons = []
    for key, least in LEAST.items():
        value: Any = functools.reduce(getattr, key.split("."), d)
        if value is not None and value < least:
            reasons.append(f"{key} must {'be at least 1' if least else 'not be negative'}, found {value}")
    if d.scheduler.route == "pd-aware" and d.scheduler.heat is None:
        reasons.append("scheduler.route=pd-aware looks kinds of TEs up in a heat map: set scheduler.heat")
    period = d.scheduler.status_period
    if not 0 <= period < math.inf:
        reasons.append(f"scheduler.status_period must be 0 or a number of seconds, found {period:g}")
    for section, te in (("scheduler", None), ("prefill", d.prefill), ("decode", d.decode)):
        num_tokens = (te and te.max_num_batched_tokens) or d.scheduler.max_num_batched_tokens
        num_seqs = (te and te.max_num_seqs) or d.scheduler.max_num_seqs
        is_own = section == "scheduler" or (te and (te.max_num_seqs or te.max_num_batched_tokens))
        if is_own and num_tokens < num_seqs * (1 + d.mtp):
            reasons.append(
                f"{section}.max_num_batched_tokens={num_tokens} cannot hold one step of "
                f"max_num_seqs={num_seqs} with {d.mtp} drafts each"
            )
    return reasons


def _against_runs(d: Deployment, config: ModelConfig) -> list[str]:
    """List errors in how steps run and are launched, and in how KV goes from TE to TE."""
    reasons = []
    if d.dataflow and not any(row.is_apart for row in DEPLOYMENTS[d.kind]):
        reasons.append(f"dataflow is for pods with dies for experts alone, not for {d.kind}")
    if d.lockstep:
        reasons += reasons_against_lockstep(d, config)
    if d.dataflow and d.exchange == "push":
        reasons.append(
            "exchange=push waits for a flag of every die, and dataflow hears from those alone that have sent "
            "tokens: choose one"
        )
    if d.transfer == "layer" and not has_prefill(d.kind):
        reasons.append(f"transfer=layer is for pods whose prefill has TEs of its own, not for {d.kind}")
    if d.transfer_over == "send-receive":
        reasons += _against_send_receive(d)
    if d.execution is not None and not has_prefill(d.kind):
        reasons += [
            f"execution.{role} is for pods whose prefill has TEs of its own, not for {d.kind}"
            for role, own in (("prefill", d.execution.prefill), ("decode", d.execution.decode))
            if own is not None
        ]
    return reasons


def _against_send_receive(d: Deployment) -> list[str]:
    """List errors in settings with transfer_over=send-receive.

    The kernels of send and receive work on memory that dies of both sides reach (XDS 3.1). No UB leads to
    910B servers.
    """
    reasons, what = [], "transfer_over=send-receive"
    if not has_prefill(d.kind):
        reasons.append(f"{what} is for pods whose prefill has TEs of its own, not for {d.kind}")
    if d.fabric not in ("auto", "ub"):
        reasons.append(f"{what} goes over ub, not over fabric={d.fabric}")
    if any(te.hardware == "910b" for te in (d.prefill, *(d.te or ())) if te is not None):
        reasons.append(f"{what} goes over ub, which 910b prefill is not on")
    if names := off_ub(d):
        reasons.append(f"{what} goes over ub, which does not lead to {names}")
    return reasons


def reasons_against_lockstep(d: Deployment, config: ModelConfig) -> list[str]:
    """List reasons why the dies of a deployment cannot run in lockstep."""
    reasons = []
    if has_services(d.kind):
        reasons.append(
            "lockstep takes all dies through a stage at once, and expert services take each client by itself"
        )
    if d.dataflow:
        reasons.append(
            "lockstep takes all dies through a stage at once, and dataflow lets each go on by itself: they "
            "exclude each other"
        )
    return reasons


def _against_pipeline(d: Deployment) -> list[str]:
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


def _against_drafts(d: Deployment, config: ModelConfig) -> list[str]:
    if not 0 <= d.mtp <= MAX_DRAFTS:
        return [f"mtp must be 0, 1 or 2, found {d.mtp}"]
    if d.mtp and not config.num_nextn_predict_layers:
        return [f"mtp={d.mtp} needs an MTP layer, and the checkpoint has none"]
    return []


def _against_health(d: Deployment) -> list[str]:
    probe, suspect, lost = d.health.probe_s, d.health.suspect_s, d.health.lost_s
    beat, shell_lost, reasons = d.health.beat_s, d.health.shell_lost_s, []
    if not (0 < probe < math.inf and 0 < suspect < lost < math.inf):
        reasons.append(
            "health needs probe_s > 0 and 0 < suspect_s < lost_s, "
            f"found probe_s={probe}, suspect_s={suspect}, lost_s={lost}"
        )
    if not 0.001 <= beat < shell_lost < math.inf:
        reasons.append(
            f"health needs 0.001 <= beat_s < shell_lost_s, found beat_s={beat}, shell_lost_s={shell_lost}"
        )
    return reasons


def _against_recovery(d: Deployment) -> list[str]:
    reasons = []
    if d.recovery.stage not in (2, 3):
        reasons.append(f"recovery.stage must be 2 or 3, found {d.recovery.stage}")
    if d.recovery.max_rollbacks < 0:
        reasons.append(f"recovery.max_rollbacks must be 0 or more, found {d.recovery.max_rollbacks}")
    for name in ("spare_dies", "max_restarts"):
        if (found := getattr(d.recovery, name)) < 0:
            reasons.append(f"recovery.{name} must be 0 or more, found {found}")
    return reasons


def _against_pool(d: Deployment) -> list[str]:
    ems, reasons = d.ems, []
    if ems.path is None:
        return []
    if not ems.path.strip():
        reasons.append("ems.path must name a directory; without a memory pool it is left out")
    if ems.block_size % max(1, d.cache.block_size):
        reasons.append(
            f"ems.block_size must be a multiple of cache.block_size={d.cache.block_size}, found "
            f"{ems.block_size}"
        )
    if ems.servers > Topology().superpod_servers:
        reasons.append(f"ems.servers must be {Topology().superpod_servers} at most, found {ems.servers}")
    if not NAMESPACE.fullmatch(ems.namespace):
        reasons.append(
            f"ems.namespace must be 1 to 64 letters, digits, dots, dashes or underscores, found "
            f"{abridged(ems.namespace)}"
        )
    if ems.namespace == "models":
        reasons.append("ems.namespace=models is where weights are: choose another")
    if not d.cache.prefix:
        reasons.append("ems.path needs cache.prefix=true: what comes from the pool is a cached prefix")
    if ems.fabric == "ub":  # cards are in servers of all hardware
        if any(te.hardware == "910b" for te in (d.prefill, *(d.te or ())) if te is not None):
            reasons.append("ems.fabric=ub does not lead to 910b prefill: set ems.fabric=vpc")
        if names := off_ub(d):
            reasons.append(f"ems.fabric=ub does not lead to {names}: set ems.fabric=vpc")
    return reasons


# ---- replicas of experts ----------------------------------------------------------------------------


def reasons_against_replicas(d: Deployment, num_experts: int) -> list[str]:
    """List errors in the settings of replicas; the model has `num_experts` routed experts."""
    experts, reasons, rows = d.experts or ExpertConfig(), [], DEPLOYMENTS[d.kind]
    has_experts = any("experts" in row.sections for row in rows)
    if experts.routed_dies is not None and has_experts and not any(row.is_apart for row in rows):
        reasons.append(f"experts.routed_dies is for pods with dies for experts alone, not for {d.kind}")
    if not 0 <= experts.balance_interval < math.inf:
        reasons.append(
            f"experts.balance_interval must be 0 or a number of seconds, found {experts.balance_interval:g}"
        )
    if experts.cold_tokens < 0:
        reasons.append(f"experts.cold_tokens must not be negative, found {experts.cold_tokens}")
    if experts.balance_slices < 1:
        reasons.append(f"experts.balance_slices must be at least 1, found {experts.balance_slices}")
    if experts.redundant_slots < 0:
        reasons.append(f"experts.redundant_slots must not be negative, found {experts.redundant_slots}")
    elif experts.redundant_slots and not num_experts:
        reasons.append("experts.redundant_slots needs a model with routed experts")
    return reasons


def reasons_against_timing(d: Deployment) -> list[str]:
    """List settings for computing runs, which a timing-only run refuses."""
    reasons = []
    if d.ems.path is not None:
        reasons.append("timing-only runs compute no KV that a memory pool (ems.path) could keep")
    if d.experts is not None and d.experts.transport != "pod":
        reasons.append(
            f"timing-only runs compute nothing that processes (experts.transport={d.experts.transport}) could"
        )
    return reasons


def reasons_against_tokens(d: Deployment) -> list[str]:
    """List settings for timing-only runs, which a computing run refuses."""
    if d.services is None or not d.services.server_sums:
        return []
    return [
        "services.server_sums is for timing-only runs: sums at servers depend on who has which expert, and "
        "bits must not"
    ]


def reasons_against_slots(d: Deployment, num_experts: int, num_holders: Mapping[str, int]) -> list[str]:
    """List errors in the number of redundant slots; `num_holders` counts each TE's dies with routed experts.

    A replica lies on another die than its primary. So a die needs at most as many slots as the other dies
    have experts.
    """
    slots, reasons = (d.experts or ExpertConfig()).redundant_slots, []
    for te, dies in num_holders.items():
        elsewhere = num_experts - -(-num_experts // dies)
        if slots > elsewhere:
            reasons.append(
                f"experts.redundant_slots={slots}: {te} has {dies} {'die' if dies == 1 else 'dies'} with "
                f"routed experts, each of which has use for {elsewhere} at most"
            )
    return reasons
