"""Every single fault: each kind, on each die, in the middle of each operation of each step."""

from __future__ import annotations

from typing import Any

import msgspec

from xdeepserve.chaos.aftermath import endure
from xdeepserve.chaos.draw import PODS, SMALL
from xdeepserve.chaos.fault_schedule import FaultSchedule
from xdeepserve.hw.faults import Fault
from xdeepserve.model.checkpoint import Checkpoint

KINDS_OF_FAULTS: tuple[dict[str, Any], ...] = (
    {"kind": "lost"},
    {"kind": "stalled", "for_us": 50.0},
    {"kind": "glitch", "code": "task-timeout"},
)


def every_step(deployment: str, checkpoint: Checkpoint) -> list[tuple[str, FaultSchedule]]:
    """The operation, and the schedule of one request on a pod of this deployment, for each pod of `draw`.

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
            for what in KINDS_OF_FAULTS:
                fault = Fault(at_us, span.node, **what)
                schedules.append((span.name, msgspec.structs.replace(quiet, faults=(fault,))))
    return schedules
