"""Faults: what breaks on a pod, when and where, as a plan that can be written down and run again.

A plan is a TOML file with a list of faults:

    [[fault]]
    at_us = 1500.0      # of the pod's clock
    die = 3
    kind = "stalled"    # or "lost", which lasts; "glitch" with code = "aicore-exception"
    for_us = 400.0

`lost`: whatever the die does ends in the middle; its memory is scribbled over and answers nobody, and what is
written there is gone. `stalled`: for so long it begins nothing, neither a kernel nor a transfer; what has
begun ends in time. `glitch`: the kernel or transfer that the die is at ends with an error code
(`error_codes`), and its memory stays; a die that is at nothing has nothing that could fail.

Nobody is told. Who depends on the die finds out by what does not come (heartbeats, deadlines; xDeepServe 6.1)
or by reading where nothing answers (`LostDieError`). A fault is no reason for virtual time to go on: on a pod
that rests it happens as soon as time passes its moment.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import msgspec

from ..errors import InputError, meant
from .error_codes import ERROR_CODES
from .pod import Pod

Kind = Literal["lost", "stalled", "glitch"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that breaks. `for_us`: how long a stall lasts; `code`: that of a glitch."""

    at_us: float
    die: int
    kind: Kind
    for_us: float | None = None
    code: str | None = None

    def __str__(self) -> str:
        lasting = "" if self.for_us is None else f" for {self.for_us:g} us"
        kind = self.kind if self.code is None else f"{self.kind} {self.code}"
        return f"die {self.die} {kind} at {self.at_us:g} us{lasting}"

    @property
    def end_us(self) -> float:
        """When it is over."""
        if self.kind == "lost":
            return float("inf")
        return self.at_us + (self.for_us or 0.0)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    fault: tuple[Fault, ...]


def read_faults(path: Path) -> tuple[Fault, ...]:
    """The plan in a file. InputError, with one line, if it cannot be read or no fault can be so."""
    try:
        plan = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).fault
    except (OSError, ValueError) as error:  # of the file, of its text, of TOML, of msgspec
        raise InputError(f"faults {path}: {error}") from None
    return plan


def check_faults(plan: Sequence[Fault], pod: Pod) -> None:
    """InputError, about the first of them, unless each can happen on this pod, from now on."""
    for fault in plan:
        if fault.die not in pod.dies:
            raise InputError(f"fault '{fault}': the deployment has no die {fault.die}; it has {_few(pod)}")
        if not pod.clock.now <= fault.at_us * 1000 < float("inf"):
            raise InputError(f"fault '{fault}': its time is not ahead; it is {pod.clock.now / 1000:g} us")
        if fault.kind not in KINDS:
            raise InputError(f"fault '{fault}': kind must be one of {', '.join(KINDS)}")
        if (fault.kind == "stalled") != (fault.for_us is not None):
            raise InputError(f"fault '{fault}': a stall, and nothing else, lasts for_us")
        if (fault.kind == "glitch") != (fault.code is not None):
            raise InputError(f"fault '{fault}': a glitch, and nothing else, has a code")
        if fault.code is not None and fault.code not in ERROR_CODES:
            known = ", ".join(ERROR_CODES)
            raise InputError(
                f"fault '{fault}': unknown code{meant(fault.code, ERROR_CODES)}: known are {known}"
            )
        if fault.for_us is not None and not 0 < fault.for_us < float("inf"):
            raise InputError(f"fault '{fault}': for_us must be more than 0")
    for before, after in pairwise(sorted(plan, key=lambda fault: (fault.die, fault.at_us))):
        if before.die == after.die and after.at_us < before.end_us:
            raise InputError(f"faults '{before}' and '{after}' contradict each other")


def _few(pod: Pod) -> str:
    dies = sorted(pod.dies)
    return f"{len(dies)}: {', '.join(map(str, dies[:4]))}{' ...' if len(dies) > 4 else ''}"


def schedule(plan: Sequence[Fault], pod: Pod) -> None:
    """Have faults, which have been checked, happen."""
    for fault in plan:
        pod.clock.at(round(1000 * fault.at_us), partial(_happen, fault, pod))


async def _happen(fault: Fault, pod: Pod) -> None:
    if fault.die in pod.lost:
        return
    pod.trace.span(fault.die, "fault", fault.kind, pod.clock.now, pod.clock.now)
    if fault.code is not None:
        pod.dies[fault.die].glitch(fault.code)
    elif fault.for_us is not None:
        pod.dies[fault.die].stall(round(1000 * fault.for_us))
    else:
        pod.break_die(fault.die)
