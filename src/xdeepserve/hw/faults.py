"""Fault plans for a pod: failures by kind, place and time, to be written down and run again.

A plan is a TOML file with a list of faults, each of a kind (`fault_kinds`) at one place:

    [[fault]]
    at_us = 1500.0      # of the pod's clock
    die = 3
    kind = "stalled"    # or "lost", which lasts; "glitch" with code = "aicore-exception"
    for_us = 400.0

    [[fault]]
    at_us = 2000.0
    volume = 0
    kind = "full"

A die that is `lost` ends all its work in the middle; its memory is scribbled over and answers no access, and
bytes written there are gone. `stalled`: for `for_us` the die begins no kernel and no transfer; those under
way end in time. `glitch`: the die's kernels and transfers under way end with an error code (`fault_kinds`),
and its memory stays; an idle die is not affected. `bad-page`: an uncorrectable error of a page of its HBM,
whose content is scribbled over; the driver puts a healthy page in its place, ends the die's work with an
error code, and tells listeners which bytes are lost.

Faults are not announced. Parts that depend on a place find out because something does not come (heartbeats,
deadlines; xDeepServe 6.1) or because a read is not answered (`LostDieError`). A fault does not make virtual
time go on: on a pod that rests it happens as soon as time passes its moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from ..errors import HardwareError, InputError, meant
from ..reading import read
from .fault_kinds import GLITCHES, KINDS, PLACES, RULES, SAYS, Kind, Moment, OnPlane, Place, Rule, kinds_at
from .faulty_links import LinkFault
from .memory import PAGE_NBYTES
from .pod import Pod
from .topology import Plane

PLANES = {plane.value: plane for plane in Plane}
LEAST = {"for_us": 0, "factor": 1, "by_us": 0}  # what has to be more than that


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Planned failure of a part of the pod. Exactly one of the places has a number (a link two); `for_us`
    says how long it lasts.

    It happens at a time, or at the `event`-th completion of an operation's step: on the die that breaks, or
    anywhere, if the place is no die (`fault_kinds`). `page` is the number of a page of `PAGE_NBYTES` bytes,
    counted from the start of the die's memory. It may also name a region: then the page in which the region
    begins.
    """

    at_us: float | None = None
    die: int | None = None
    kind: Kind | None = None
    for_us: float | None = None
    host: int | None = None
    link: tuple[int, int] | None = None
    volume: int | None = None
    mp_server: int | None = None
    mp_controller: int | None = None
    plane: OnPlane | None = None
    factor: float | None = None
    by_us: float | None = None
    code: str | None = None
    page: int | str | None = None
    operation: str | None = None
    step: int | None = None
    event: int = 1

    def __str__(self) -> str:
        more = "" if self.plane is None else f" on the {self.plane} plane"
        when = "no time" if self.at_us is None else f"{self.at_us:g} us"
        if self.operation is not None:
            when = f"{self.operation} {self.step}, time {self.event}"
        code = "" if self.code is None else f" {self.code}"
        page = "" if self.page is None else f" {self.page}"
        more += f" {self.kind}{code}{page} at {when}"
        more += "" if self.factor is None else f" by a factor of {self.factor:g}"
        more += "" if self.by_us is None else f" by {self.by_us:g} us"
        more += "" if self.for_us is None else f" for {self.for_us:g} us"
        return (
            " and ".join(f"{_called(place)} {number}" for place, number in self.places) or "nowhere"
        ) + more

    @property
    def places(self) -> list[tuple[Place, int | tuple[int, int]]]:
        """Places of the fault with their numbers; exactly one in a checked plan."""
        return [(place, number) for place in PLACES if (number := getattr(self, place)) is not None]

    @property
    def rule(self) -> Rule | None:
        """Row of the kind at the fault's place; every fault of a checked plan has one."""
        return next((rule for (place, kind), rule in RULES.items() if self._is_of(place, kind)), None)

    def _is_of(self, place: Place, kind: Kind) -> bool:
        return kind == self.kind and getattr(self, place) is not None

    @property
    def target(self) -> tuple[str, ...]:
        """Identity of the broken part, the same for both directions of a link."""
        if self.link is not None:
            return "link", str(self.plane), str(sorted(self.link))
        return tuple(map(str, self.places))

    @property
    def end_us(self) -> float:
        """End of the fault (us of virtual time); infinite for a lasting fault."""
        if self.for_us is None:
            return self._at_us if self.rule is not None and self.rule.is_of_a_moment else float("inf")
        return self._at_us + self.for_us

    @property
    def _at_us(self) -> float:
        return float("nan") if self.at_us is None else self.at_us  # no time is before or after that


def _called(place: Place) -> str:
    return place.replace("_", " ")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    fault: tuple[Fault, ...]


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Read a fault plan from a file. Raises InputError, in one line, if the file cannot be read or a fault is
    malformed."""
    return read(path, "TOML", "faults").to(_File).fault


def check_faults(plan: Sequence[Fault], pod: Pod) -> None:
    """Check a plan against the pod. Raises InputError about the first fault that cannot happen from now
    on."""
    for fault in plan:
        problem = _place_problem(fault, pod) or _time_problem(fault, pod) or _kind_problem(fault, pod)
        if problem:
            raise InputError(f"fault '{fault}': {problem}")
    timed = sorted(
        (fault for fault in plan if fault.at_us is not None), key=lambda each: (each.target, each._at_us)
    )
    for before, after in pairwise(timed):
        if before.target == after.target and after._at_us < before.end_us:
            raise InputError(f"faults '{before}' and '{after}' contradict each other")


def _place_problem(fault: Fault, pod: Pod) -> str:
    if len(fault.places) != 1:
        return f"it happens at one of {', '.join(PLACES)}"
    ((place, number),) = fault.places
    if isinstance(number, tuple):
        return _link_problem(fault, number, pod)
    known = _numbers(place, pod)
    return "" if number in known else f"the deployment has no {_called(place)} {number}; it has {_few(known)}"


def _link_problem(fault: Fault, link: tuple[int, int], pod: Pod) -> str:
    a, b = link
    place: Place = "host" if fault.plane == "vpc" else "die"
    known = _numbers(place, pod)
    for number in link:
        if number not in known:
            return f"the deployment has no {place} {number}; it has {_few(known)}"
    if a == b:
        return f"a link has two ends; {place} {a} is one"
    if fault.plane in PLANES:
        try:
            pod.topology.check_path(*_nodes(fault, link, pod), PLANES[fault.plane])
        except HardwareError as error:
            return str(error)
    return ""


def _nodes(fault: Fault, link: tuple[int, int], pod: Pod) -> tuple[int, int]:
    """Return both ends of a link as node numbers."""
    a, b = link
    return (pod.topology.host(a), pod.topology.host(b)) if fault.plane == "vpc" else (a, b)


def _time_problem(fault: Fault, pod: Pod) -> str:
    if (fault.at_us is None) == (fault.operation is None):
        return "it happens at a time, at_us, or at a step of an operation"
    if (fault.operation is None) != (fault.step is None) or (fault.operation is None and fault.event != 1):
        return "operation and step, and which event of them, say one thing together"
    if fault.event < 1:
        return "event must be 1 or more"
    if fault.at_us is None or pod.clock.now <= fault.at_us * 1000 < float("inf"):
        return ""
    return f"its time is not ahead; it is {pod.clock.now / 1000:g} us"


def _kind_problem(fault: Fault, pod: Pod) -> str:
    ((place, number),) = fault.places
    if fault.kind not in KINDS or (place, fault.kind) not in RULES:
        return f"kind of a {_called(place)} must be one of {', '.join(kinds_at(place))}"
    rule = RULES[place, fault.kind]
    for field in SAYS:
        value = getattr(fault, field)
        if value is None and field in rule.needs:
            return f"it needs {field}"
        if value is not None and field not in rule.needs + rule.may:
            return f"it has no {field}"
        if field == "plane":
            if value is not None and value not in PLANES:
                return f"plane must be one of {', '.join(PLANES)}"
        elif field == "code":
            if value is not None and value not in GLITCHES:
                return f"unknown code{meant(value, GLITCHES)}: known are {', '.join(GLITCHES)}"
        elif field == "page":
            if (
                value is not None
                and isinstance(number, int)
                and (problem := _page_problem(value, number, pod))
            ):
                return problem
        elif value is not None and not LEAST[field] < value < float("inf"):
            return f"{field} must be more than {LEAST[field]}"
    return ""


def _page_problem(page: int | str, die: int, pod: Pod) -> str:
    plan = pod.memories.plans[die]
    if plan.find_page(page) is not None:
        return ""
    if isinstance(page, int):
        return f"die {die} uses {-(-plan.nbytes // PAGE_NBYTES)} pages of its memory, from 0 on"
    names = [name for area in plan.areas for name in area.regions]
    return f"die {die} has no '{page}' in its memory{meant(page, names)}"


def _numbers(place: Place, pod: Pod) -> Collection[int]:
    """Return the numbers of all places of a kind in this pod."""
    if place == "die":
        return pod.dies
    if place == "host":
        return {pod.topology.server_of(node) for node in pod.memories.plans}
    return [number for part, number in pod.parts if part == place]


def _few(numbers: Collection[int]) -> str:
    known = sorted(numbers)
    return (
        f"{len(known)}: {', '.join(map(str, known[:4]))}{' ...' if len(known) > 4 else ''}"
        if known
        else "none"
    )


def schedule(plan: Sequence[Fault], pod: Pod) -> None:
    """Plan checked faults on the pod's clock and moments."""
    for fault in plan:
        happen = partial(_happen, fault, pod)
        if fault.at_us is not None:
            pod.clock.at(round(1000 * fault.at_us), happen)
        else:
            assert fault.operation is not None
            assert fault.step is not None
            moment = Moment(fault.operation, fault.step, fault.event, fault.die)
            pod.fabric.moments.at(moment, partial(_at_once, happen, pod))


def _at_once(happen: Callable[[], Coroutine[Any, Any, None]], pod: Pod) -> None:
    """Make the fault happen when the running process next waits, before any other goes on."""
    pod.clock.at(pod.clock.now, happen)


async def _happen(fault: Fault, pod: Pod) -> None:
    ((place, number),) = fault.places
    assert fault.kind is not None
    if place == "die" and number in pod.lost:
        return
    now = pod.clock.now
    lasts_ns = 0 if fault.for_us is None else round(1000 * fault.for_us)
    if isinstance(number, tuple):
        a, b = _nodes(fault, number, pod)
        pod.trace.span(a, "fault", fault.kind, now, now)
        until_ns = float("inf") if fault.for_us is None else now + lasts_ns
        wrong = LinkFault(fault.kind, until_ns, fault.factor or 1.0)
        pod.fabric.links.spoil(PLANES[str(fault.plane)], a, b, wrong)
    else:
        node = number if place == "die" else pod.topology.host(number)
        pod.trace.span(node, "fault", fault.kind, now, now)
        if place == "die":
            _break_die(fault, number, pod, lasts_ns)
        elif place == "host":
            pod.cpu(number).stall(lasts_ns) if fault.kind == "stalled" else pod.break_host(number)
        else:
            pod.parts[place, number](fault.kind, True)
    if lasts_ns and (place not in ("die", "host") or fault.kind == "late"):
        pod.clock.at(now + lasts_ns, partial(_end, fault, pod))


def _break_die(fault: Fault, number: int, pod: Pod, lasts_ns: int) -> None:
    die = pod.dies[number]
    match fault.kind:
        case "lost":
            pod.break_die(number)
        case "glitch":
            die.glitch(str(fault.code))
        case "bad-page":
            assert fault.page is not None
            pod.lose_page(number, fault.page)
        case "stalled":
            die.gate.close(pod.clock.now + lasts_ns)
        case "slow":
            die.slow(fault.factor or 1.0, lasts_ns)
        case "late":
            late = LinkFault("late", pod.clock.now + lasts_ns, by_ns=round(1000 * (fault.by_us or 0)))
            for plane in (Plane.UB, Plane.ROCE):
                pod.fabric.links.spoil(plane, number, number, late)


async def _end(fault: Fault, pod: Pod) -> None:
    """End a fault of a link, or of a part of the pod other than a die."""
    ((place, number),) = fault.places
    assert fault.kind is not None
    if isinstance(number, tuple) or place == "die":
        pod.fabric.links.mend()
    else:
        pod.parts[place, number](fault.kind, False)
