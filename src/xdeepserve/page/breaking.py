"""Break a die at a watcher's request, by a fault like those of a plan (hw/faults.py)."""

from __future__ import annotations

import msgspec

from xdeepserve.engine.serving.engine import Engine
from xdeepserve.errors import InputError, RequestError
from xdeepserve.hw.fault_kinds import RULES, Kind
from xdeepserve.hw.faults import Fault, check_faults, schedule

NEEDS_ADMIN = "breaking dies is for servers that allow it: xdeepserve serve --admin"
SOON_US = 1.0
MENU = {kind: rule for (place, kind), rule in RULES.items() if place == "die" and rule.button}


class Breaking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to break a die, by a kind of fault that the page's menu has (`fault_kinds.RULES`)."""

    die: int
    kind: Kind = "lost"


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

        RequestError, with nothing scheduled, if the die does not exist, if it is lost already, if requests
        would not survive its loss, or if the menu has no such kind.
        """
        pod, die = self._pod, asked.die
        if die not in pod.dies:
            raise RequestError(f"the pod has no die {die}: it has {_few(sorted(pod.dies))}", param="die")
        self._to_lose = [each for each in self._to_lose if each not in pod.lost]
        if die in pod.lost or die in self._to_lose:
            raise RequestError(f"die {die} is lost already", param="die")
        if asked.kind == "lost" and (why := self._why_not(die)) is not None:
            raise RequestError(why, param="die", code="no_recovery")
        if asked.kind not in MENU:
            raise RequestError(f"kind must be one of {', '.join(MENU)}, found '{asked.kind}'", param="kind")
        at_us, fields = pod.clock.now / 1000 + SOON_US, MENU[asked.kind].tried[0]
        fault = Fault(at_us=at_us, die=die, kind=asked.kind, **fields)
        try:
            check_faults([fault], pod)
        except InputError as error:
            raise RequestError(str(error), param="die") from None
        schedule([fault], pod)
        if asked.kind == "lost":
            self._to_lose.append(die)
        return Broken(die, asked.kind, round(1000 * at_us))

    def _why_not(self, die: int) -> str | None:
        """Return why a die must not be lost now, or None."""
        if self._to_lose:
            return f"die {self._to_lose[0]} is about to be lost: ask for something first"
        return self._engine.cannot_lose(die)


def _few(dies: list[int]) -> str:
    """Write die numbers in short: a range, or how many there are."""
    return f"{dies[0]} to {dies[-1]}" if dies == [*range(dies[0], dies[-1] + 1)] else f"{len(dies)} others"
