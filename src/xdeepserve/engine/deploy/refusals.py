"""Errors in the settings of a deployment for a model; all of them go into one exception."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xdeepserve.engine.deploy.deployment import Deployment, PipelineConfig
from xdeepserve.engine.deploy.policies import BY_SETTING
from xdeepserve.engine.deploy.roles import DEPLOYMENTS
from xdeepserve.engine.deploy.rules import EXCLUDED, LOCKSTEP, of_single_settings, refused, room_for_replicas
from xdeepserve.engine.deploy.settings import given
from xdeepserve.engine.deploy.teams import TEDies, num_routed_experts
from xdeepserve.errors import abridged
from xdeepserve.hw.accelerators import atlas_a2
from xdeepserve.hw.spec import Spec
from xdeepserve.model.config import ModelConfig

BLOCK_MULTIPLE = 16  # attention walks the cache in tiles of 16 positions
DEFAULT_MODEL_LEN = 4096
NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")


def context_of(d: Deployment, config: ModelConfig) -> int:
    """Return the longest context, in tokens: `max_model_len`, or by default the model's up to 4096."""
    return d.max_model_len or min(config.max_position_embeddings, DEFAULT_MODEL_LEN)


def reasons_against(d: Deployment, config: ModelConfig) -> list[str]:
    """Return the reasons against settings that all TEs share; `Teams` finds those against their dies."""
    return [
        *of_single_settings(d),
        *_against_policies(d),
        *refused(d, EXCLUDED),
        *(refused(d, LOCKSTEP) if d.lockstep else ()),
        *(["lockstep is not for deepseek_v4"] if d.lockstep and config.v4 is not None else ()),
        *_against_cache(d, config),
        *_against_steps(d),
        *_against_pipeline(d),
        *_against_drafts(d, config),
        *_against_replicas(d, config),
        *_against_health(d),
        *_against_scale(d),
        *_against_pool(d),
    ]


def _against_policies(d: Deployment) -> list[str]:
    chosen = [(each.key, value) for each, value in given(d) if each.key in BY_SETTING]
    wrong = [(key, value, BY_SETTING[key].wrong(value)) for key, value in chosen]
    return [f"{key}={value} {reason}" for key, value, reason in wrong if reason]


def _against_cache(d: Deployment, config: ModelConfig) -> list[str]:
    reasons, limit = [], config.max_position_embeddings
    if d.max_model_len is not None and not 2 <= d.max_model_len <= limit:
        reasons.append(f"max_model_len must be between 2 and the model's {limit}, found {d.max_model_len}")
    size, num_blocks, context = d.cache.block_size, d.cache.num_blocks, context_of(d, config)
    if size < BLOCK_MULTIPLE or size % BLOCK_MULTIPLE:
        reasons.append(f"cache.block_size must be a multiple of {BLOCK_MULTIPLE}, found {size}")
    elif num_blocks is not None and num_blocks * size < context:
        reasons.append(
            f"cache.num_blocks={num_blocks} of {size} positions hold less than one context of {context}: "
            f"set at least {-(-context // size)}{_shorter_context(num_blocks * size)}"
        )
    return reasons


def _shorter_context(num_positions: int) -> str:
    """Suggest max_model_len as `num_positions`; "" if a context would have one position."""
    return f", or max_model_len={num_positions}" if num_positions >= 2 else ""


def _against_steps(d: Deployment) -> list[str]:
    reasons = []
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


def _against_pipeline(d: Deployment) -> list[str]:
    pipeline, reasons = d.pipeline or PipelineConfig(), []
    # Prefill overlaps by engines, with all cores for everybody, unless it is told otherwise.
    is_910b = pipeline.overlap == "cores" and d.prefill is not None and d.prefill.hardware == "910b"
    cores = int((atlas_a2(1) if is_910b else Spec()).aic_cores.value)
    if not 1 <= pipeline.attention_cores < cores:
        reasons.append(
            f"pipeline.attention_cores must be between 1 and {cores - 1}, of the {cores} AIC cores of a die, "
            f"found {pipeline.attention_cores}"
        )
    return reasons


def _against_drafts(d: Deployment, config: ModelConfig) -> list[str]:
    if d.mtp > 0 and config.v4 is not None:
        return [f"mtp={d.mtp} is not for deepseek_v4, whose MTP layer only the reference computes"]
    if d.mtp > 0 and not config.num_nextn_predict_layers:
        return [f"mtp={d.mtp} needs an MTP layer, and the checkpoint has none"]
    return []


def _against_replicas(d: Deployment, config: ModelConfig) -> list[str]:
    if num_routed_experts(config, d.mtp):
        return []
    return [f"{setting.key} needs a model with routed experts" for setting, _ in room_for_replicas(d)]


def _against_health(d: Deployment) -> list[str]:
    suspect, lost, beat, shell_lost = (
        d.health.suspect_s,
        d.health.lost_s,
        d.health.beat_s,
        d.health.shell_lost_s,
    )
    reasons = []
    if suspect >= lost:
        reasons.append(f"health needs suspect_s < lost_s, found suspect_s={suspect}, lost_s={lost}")
    if beat >= shell_lost:
        reasons.append(f"health needs beat_s < shell_lost_s, found beat_s={beat}, shell_lost_s={shell_lost}")
    return reasons


def _against_scale(d: Deployment) -> list[str]:
    if d.scale is None:
        return []
    roles = {row.role for row in DEPLOYMENTS[d.kind]} if d.te is None else {te.role for te in d.te}
    is_pd = d.kind == "pd"
    bounds = [d.scale.of(role) for role in sorted(roles)] if is_pd else [d.scale]
    reasons = [reason for each in bounds for reason in each.wrong()]
    if not is_pd and (roles != {"both"} or len(d.te or ()) > 1):
        reasons.append("scale is for pd, and for TEs of one kind that do both prefill and decode")
    if is_pd and d.prefill is not None and d.prefill.hardware != "cm384":
        reasons.append(
            f"scale: no prefill TE can come on {d.prefill.hardware} dies, which a pod has from its start"
        )
    if d.experts is not None and d.experts.transport != "pod":
        reasons.append("scale: with expert servers that are processes there is one TE")
    return reasons


def _against_pool(d: Deployment) -> list[str]:
    ems, reasons = d.ems, []
    if ems.path is None:
        return []
    if ems.block_size % max(1, d.cache.block_size):
        reasons.append(
            f"ems.block_size must be a multiple of cache.block_size={d.cache.block_size}, found "
            f"{ems.block_size}"
        )
    if not NAMESPACE.fullmatch(ems.namespace):
        reasons.append(
            f"ems.namespace must be 1 to 64 letters, digits, dots, dashes or underscores, found "
            f"{abridged(ems.namespace)}"
        )
    return reasons


# ---- replicas of experts ----------------------------------------------------------------------------


def reasons_against_slots(tes: Sequence[TEDies], num_routed: int, num_shared: int) -> list[str]:
    """Return the reasons against the room for replicas, in a model of so many experts.

    A replica lies on another die than its primary, so a die has use for as many as the others have experts.
    """
    reasons = []
    for te in tes if num_routed else ():
        dies, (key, slots, per_die) = te.num_holders, te.room
        elsewhere, said = num_routed - -(-num_routed // dies), f"{dies} {'die' if dies == 1 else 'dies'}"
        # What the fullest die holds, and the others, before there is any replica.
        most = -(-num_routed // min(dies - te.num_shared_dies, num_routed))
        is_on_each = bool(num_shared) and not te.num_shared_dies and not te.kind.is_apart
        if slots > elsewhere:
            reasons.append(
                f"{key}={slots}: {te.name} has {said} with routed experts, each of which has use for "
                f"{elsewhere} at most"
            )
        elif per_die is not None and not most + is_on_each <= per_die <= num_routed + is_on_each:
            shared = ", the shared one counted" if is_on_each else ""
            reasons.append(
                f"{key}={per_die}: {te.name} has {said}, each of which holds between {most + is_on_each} and "
                f"{num_routed + is_on_each} experts{shared}"
            )
    return reasons
