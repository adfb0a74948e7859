"""Why the settings of EPLB cannot be what they are."""

from __future__ import annotations

import math
from collections.abc import Mapping

from xdeepserve.engine.deploy.deployment import Deployment, ExpertConfig


def reasons_against_replicas(d: Deployment, num_experts: int) -> list[str]:
    """What is wrong with the settings by themselves; `num_experts` are the model's routed ones."""
    experts, reasons = d.experts or ExpertConfig(), []
    if d.kind in ("colocated", "pd"):
        reasons += [
            f"experts.{key} is for pods with dies for experts alone, not for {d.kind}"
            for key in ("routed_dies", "shared_dies")
            if getattr(experts, key) is not None
        ]
    if not 0 <= experts.balance_interval < math.inf:
        reasons.append(
            f"experts.balance_interval must be 0 or a number of seconds, found {experts.balance_interval:g}"
        )
    if experts.balance_slices < 1:
        reasons.append(f"experts.balance_slices must be at least 1, found {experts.balance_slices}")
    if experts.redundant_slots < 0:
        reasons.append(f"experts.redundant_slots must not be negative, found {experts.redundant_slots}")
    elif experts.redundant_slots:
        reasons += [
            f"experts.redundant_slots and {name} exclude each other: choose one"
            for name in ("lockstep", "dataflow")
            if getattr(d, name)
        ]
        if not num_experts:
            reasons.append("experts.redundant_slots needs a model with routed experts")
    return reasons


def reasons_against_slots(d: Deployment, num_experts: int, num_holders: Mapping[str, int]) -> list[str]:
    """What is wrong with the number of slots; `num_holders` are the dies with routed experts of each TE.

    A replica lies on another die than its primary, so a die has use for as many as the others have experts.
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
