"""Single faults: each kind on each die, in the middle of each operation of each step; and each kind on each
part of a memory pool, at each phase of a put and of a get."""

from __future__ import annotations

from typing import Any

import msgspec

from xdeepserve.chaos.aftermath import endure
from xdeepserve.chaos.draw import PODS, POOL, POOL_KNOBS, POOL_PARTS, SMALL
from xdeepserve.chaos.fault_schedule import FaultSchedule, PoolState
from xdeepserve.hw.fault_kinds import RULES
from xdeepserve.hw.faults import Fault
from xdeepserve.model.checkpoint import Checkpoint

TRIED: tuple[dict[str, Any], ...] = tuple(
    {"kind": kind, **fields}
    for (place, kind), rule in RULES.items()
    if place == "die"
    for fields in rule.tried
)
PAGED = ("colocated",)  # where pages are lost, too: of KV, and of weights
BROKEN_US = 100.0  # some phases of the pool
NUM_REQUESTS = 4  # that put and get
POOLED = ("colocated", "pd")  # where DP groups put and get


def every_step(deployment: str, checkpoint: Checkpoint) -> list[tuple[str, FaultSchedule]]:
    """List operations and schedules of one request on a pod of this deployment, for each pod of `draw`.

    A run is a function of its schedule, so a moment of virtual time stands for (operation, step, die).
    """
    schedules = []
    for pod in PODS[deployment]:
        quiet = FaultSchedule(deployment, (*SMALL, *pod))
        seen: set[tuple[int, int]] = set()
        for span in endure(quiet, checkpoint, trace=True).spans:
            at_ns = (span.start_ns + span.end_ns) // 2
            if (span.node, at_ns) in seen:
                continue  # operations within each other
            seen.add((span.node, at_ns))
            at_us = at_ns / 1000
            for what in TRIED:
                if "page" in what and deployment not in PAGED:
                    continue
                fault = Fault(at_us, span.node, **what)
                schedules.append((span.name, msgspec.structs.replace(quiet, faults=(fault,))))
    return schedules


def every_phase(deployment: str, checkpoint: Checkpoint) -> list[tuple[str, FaultSchedule]]:
    """List phases and schedules of each fault of a memory pool: from each phase on, for a time and for ever.

    The pod is the first of `draw`, over either fabric, with a pool that is empty, filled, or without room.
    """
    schedules = []
    states: tuple[PoolState, ...] = ("empty", "filled", "crowded")
    for knob in ((), *POOL_KNOBS) if deployment in POOLED else ():
        settings = (*SMALL, *PODS[deployment][0], *POOL, *knob)
        for state in states:
            quiet = FaultSchedule(deployment, settings, num_requests=NUM_REQUESTS, pool=state)
            counts = endure(quiet, checkpoint, trace=True).moments
            for operation, step, node in sorted(key for key in counts if key[2] is None):
                if operation not in ("put", "get"):
                    continue
                for event in range(1, counts[operation, step, node] + 1):
                    for fault in _pool_faults_at(operation, step, event):
                        schedule = msgspec.structs.replace(quiet, faults=(fault,))
                        schedules.append((f"{operation} {step}", schedule))
    return schedules


def _pool_faults_at(operation: str, step: int, event: int) -> list[Fault]:
    """List the faults of each kind on each part of the pool, at an event."""
    faults = []
    when = {"operation": operation, "step": step, "event": event}
    for place, number in POOL_PARTS:
        for kind in [kind for where, kind in RULES if where == place]:
            for for_us in (None, BROKEN_US) if "for_us" in RULES[place, kind].may else (None,):
                fault = {place: number, "kind": kind, "for_us": for_us, **when}
                faults.append(msgspec.convert(fault, Fault))
    return faults
