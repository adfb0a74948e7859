"""Break a die at a watcher's request, by a fault like those of a plan (hw/faults.py)."""

from __future__ import annotations

from typing import Literal

import msgspec

from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import InputError, RequestError
from xdeepserve.hw.faults import Fault, check_faults, schedule

NEEDS_ADMIN = "breaking dies is for servers that allow it: xdeepserve serve --admin"
SOON_US = 1.0


class Breaking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to break a die.

    `lost` takes the die with all its memory; `glitch` ends its current operation with an error code.
    """

    die: int
    kind: Literal["lost", "glitch"] = "lost"


class Broken(msgspec.Struct, frozen=True):
    """Answer to a request: the die will break at virtual time `at_ns`.

    While the pod rests, it breaks as soon as time passes `at_ns`.
    """

    die: int
    kind: str
    at_ns: int


class Breaker:
    """Breaks dies of an engine's pod on request."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._pod = engine, engine.plan.pod
        self._to_lose: list[int] = []  # at a time that may not have come: while the pod rests, none passes

    def break_die(self, asked: Breaking) -> Broken:
        """Schedule the fault to break a die.

        RequestError, with nothing scheduled, if the die does not exist, if it is lost already, or if requests
        would not survive its loss.
        """
        pod, die = self._pod, asked.die
        if die not in pod.dies:
            raise RequestError(f"the pod has no die {die}: it has {_few(sorted(pod.dies))}", param="die")
        self._to_lose = [each for each in self._to_lose if each not in pod.lost]
        if die in pod.lost or die in self._to_lose:
            raise RequestError(f"die {die} is lost already", param="die")
        if asked.kind == "lost" and (why := self._why_not(die)) is not None:
            raise RequestError(why, param="die", code="no_recovery")
        code = "aicore-exception" if asked.kind == "glitch" else None
        fault = Fault(at_us=pod.clock.now / 1000 + SOON_US, die=die, kind=asked.kind, code=code)
        try:
            check_faults([fault], pod)
        except InputError as error:
            raise RequestError(str(error), param="die") from None
        schedule([fault], pod)
        if asked.kind == "lost":
            self._to_lose.append(die)
        return Broken(die, asked.kind, round(1000 * (fault.at_us or 0)))

    def _why_not(self, die: int) -> str | None:
        """Return why a die must not be lost now, or None."""
        if self._to_lose:
            return f"die {self._to_lose[0]} is about to be lost: ask for something first"
        return self._engine.cannot_lose(die)


def _few(dies: list[int]) -> str:
    """Write die numbers in short: a range, or how many there are."""
    return f"{dies[0]} to {dies[-1]}" if dies == [*range(dies[0], dies[-1] + 1)] else f"{len(dies)} others"
