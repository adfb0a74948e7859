"""Every single fault: each kind, on each die, in the middle of each operation of each step."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from xdeepserve.chaos.case import Case
from xdeepserve.chaos.draw import PODS, SMALL
from xdeepserve.chaos.live import live
from xdeepserve.hw.faults import Fault
from xdeepserve.model.checkpoint import Checkpoint

STALL_US = 50.0


class Moment(NamedTuple):
    """The n-th time that a die is at an operation: `case` has the fault there."""

    operation: str
    number: int
    case: Case


def every_step(deployment: str, checkpoint: Checkpoint) -> list[Moment]:
    """The cases of one request on each pod of a deployment that `draw` knows.

    A run is a function of its case, so a moment of virtual time stands for (operation, step, die).
    """
    moments = []
    for pod in PODS[deployment]:
        quiet = Case(deployment, (*SMALL, *pod))
        seen: set[tuple[int, int]] = set()
        counts: Counter[tuple[int, str]] = Counter()
        for span in sorted(live(quiet, checkpoint, trace=True).spans, key=lambda span: span.start_ns):
            at_ns = (span.start_ns + span.end_ns) // 2
            counts[span.node, span.name] += 1
            if (span.node, at_ns) in seen:
                continue
            seen.add((span.node, at_ns))
            for fault in (
                Fault(at_ns / 1000, span.node, "lost"),
                Fault(at_ns / 1000, span.node, "stalled", STALL_US),
            ):
                case = msgspec.structs.replace(quiet, faults=(fault,))
                moments.append(Moment(span.name, counts[span.node, span.name], case))
    return moments
