"""A die breaks because somebody who watches has asked for it: a fault like those of a plan (hw/faults.py)."""

from __future__ import annotations

from typing import Literal

import msgspec

from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import InputError, RequestError
from xdeepserve.hw.faults import Fault, check_faults, schedule

NEEDS_ADMIN = "breaking dies is for servers that allow it: xdeepserve serve --admin"
SOON_US = 1.0


class Breaking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked for: a die is lost with all that it holds, or ends what it is at with an error code."""

    die: int
    kind: Literal["lost", "glitch"] = "lost"


class Broken(msgspec.Struct, frozen=True):
    """It will happen at that virtual time, or, while the pod rests, as soon as time passes it."""

    die: int
    kind: str
    at_ns: int


def break_die(engine: Engine, asked: Breaking) -> Broken:
    """RequestError, and nothing will happen, if there is no such die, it is lost already, or requests would
    not outlive it."""
    pod = engine.plan.pod
    if asked.die in pod.lost:
        raise RequestError(f"die {asked.die} is lost already", param="die")
    if asked.kind == "lost" and (why := engine.cannot_lose(asked.die)) is not None:
        raise RequestError(why, param="die", code="no_recovery")
    code = "aicore-exception" if asked.kind == "glitch" else None
    fault = Fault(at_us=pod.clock.now / 1000 + SOON_US, die=asked.die, kind=asked.kind, code=code)
    try:
        check_faults([fault], pod)
    except InputError as error:
        raise RequestError(str(error), param="die") from None
    schedule([fault], pod)
    return Broken(asked.die, asked.kind, round(1000 * (fault.at_us or 0)))
