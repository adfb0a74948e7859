"""A fleet growing and shrinking while it serves: the AutoScaler looks, and TEs start in five steps or leave.

Load is the largest of KV, places and queues of prompts, or the share of all TEs' time that prompts took
recently: decoding waits while a part of a prompt is in a step. A new TE takes requests when all its steps are
over; a leaving TE finishes its requests first (drains). If the AutoScaler asks for more TEs, draining TEs are
taken back first, because they are already running.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from xdeepserve.engine.balance.auto_scaler import ScaleLook, ScaleState, ScalingPolicy
from xdeepserve.engine.balance.service_level import ServiceLevel
from xdeepserve.engine.deploy.policies import SCALING
from xdeepserve.engine.deploy.scale_bounds import ScaleBounds
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_words import FleetTE, ServedRequest
from xdeepserve.platform.scale_up import ScaleUp
from xdeepserve.platform.service_report import Bounds
from xdeepserve.prices.step_price import StepCounts

# Pre-warmed TEs of a fleet: pods with processes that run and have no model yet (DeepServe 6.1).
#
# There are some; who needs a TE takes one, and begins with its weights. For each that is taken another one is
# started, which takes what a pod and processes take that nobody had ready. Without any left a TE starts cold.


class WarmTEs:
    """Pre-warmed TEs, all `wanted` of them ready at first; another needs `start_s`.

    `tell` is called when one becomes ready.
    """

    def __init__(self, fleet: Fleet, wanted: int, start_s: float, tell: Callable[[int], None]) -> None:
        self._fleet, self._start_s, self._tell = fleet, start_s, tell
        self.wanted, self.ready = wanted, wanted
        self._starting = 0

    def take(self) -> bool:
        """Take a pre-warmed TE, if there is one, and start another; return whether there was one."""
        if not self.ready:
            return False
        self.ready -= 1
        self._start()
        return True

    def give_back(self) -> None:
        """Give a pre-warmed TE back that was taken and is no longer needed. It stays only while fewer than
        `wanted` are ready."""
        self.ready = min(self.wanted, self.ready + 1)

    def _start(self) -> None:
        if self.ready + self._starting < self.wanted:
            self._starting += 1
            self._fleet.look_at(self._fleet.now + 1e9 * self._start_s, self._comes)

    def _comes(self) -> None:
        self._starting -= 1
        if self.ready < self.wanted:
            self.ready += 1
            self._tell(self.ready)


WHILE_S = 10.0  # over which the time for prompts is taken
ScaleAct = Literal["wanted", "joins", "drains", "stays", "called off", "leaves", "lost", "warm"]


class ScaleEvent(msgspec.Struct, frozen=True):
    """An event in the life of a fleet's TEs.

    `num_serving` is the number of TEs that take requests from then on.
    """

    at_ns: float
    what: ScaleAct
    te: str
    num_serving: int
    reason: str

    def line(self) -> str:
        """Format the event as a line for people."""
        te = f" {self.te}" if self.te else ""
        return f"{self.at_ns / 1e9:9.2f} s  {self.num_serving:2} serve  {self.what}{te}: {self.reason}"


class FleetScaler:
    """Makes a fleet of TEs like `kind` follow its load; `events` lists the changes made.

    `warm` is the number of pre-warmed TEs; None means that there are always enough.
    """

    def __init__(
        self,
        fleet: Fleet,
        kind: FleetTE,
        scale_up: ScaleUp,
        bounds: ScaleBounds,
        service: Bounds,
        warm: int | None = None,
    ) -> None:
        bounds.check()
        self.fleet, self.kind, self.bounds, self.service = fleet, kind, bounds, service
        self._next: ScalingPolicy = SCALING.function(bounds.policy)
        self.scale_up = scale_up
        self.state = ScaleState(len(fleet.serving))
        self.events: list[ScaleEvent] = []
        self.warm = None if warm is None else WarmTEs(fleet, warm, scale_up.warming_s, self._hear_warm)
        self._coming: dict[int, bool] = {}  # tickets of TEs on their way: whether they are pre-warmed ones
        self._tickets = 0
        self._draining: dict[int, None] = {}
        self._level = ServiceLevel(1e9 * service.ttft_s, 1e6 * service.tpot_ms)
        self._prefills: deque[tuple[float, float]] = deque([(0.0, 0.0)])  # when, time for prompts till then
        fleet.on_end = self._heard
        fleet.at(0.0, self._look)

    def lose(self, te: int) -> None:
        """Lose a TE, so all its requests begin again elsewhere; another TE is started in its place."""
        name = self.fleet.tes[te].name
        self._draining.pop(te, None)
        num = sum(each.num_tasks for each in self.fleet.steppers_of(te))
        self.fleet.lose(te)
        self._tell("lost", name, f"{num} requests begin again elsewhere")
        if len(self.fleet.serving) + len(self._coming) < self.state.wanted:
            self.bring(1)

    def _heard(self, served: ServedRequest) -> None:
        each = served.outcome()
        alone = partial(alone_ns, self.fleet, served.te, served.num_prompt)
        self._level.hear(each.ttft_ns, each.tpot_ns, alone)

    def _look(self) -> None:
        fleet = self.fleet
        if not fleet.is_open:
            return
        for te in [te for te in self._draining if fleet.is_empty(te)]:
            del self._draining[te]
            self._tell("leaves", fleet.tes[te].name, "it has ended what it had")
        load = max(
            self._prefill_share(), sum(load_of(fleet, te, 1e9 * self.service.ttft_s) for te in fleet.serving)
        )
        missed = self._level.take_share()
        seen = ScaleLook(fleet.now / 1e9, load, len(fleet.serving), len(self._coming), missed)
        before, self.state = self.state, self._next(self.state, seen, self.bounds)
        more = self.state.wanted - seen.serving - seen.coming
        if self.state.changed_s != before.changed_s and more:
            self._tell("wanted", "", f"{self.state.wanted} of them: {self.state.reason}")
            self.bring(more) if more > 0 else self.part_with(-more)
        fleet.at(fleet.now + 1e9 * self.bounds.every_s, self._look)

    def _prefill_share(self) -> float:
        """Return the number of TEs whose whole time prompts have taken lately."""
        now, recent = self.fleet.now, self._prefills
        recent.append((now, prefill_ns(self.fleet)))
        while len(recent) > 2 and recent[1][0] <= now - 1e9 * WHILE_S:
            recent.popleft()
        (since, before), (_, total) = recent[0], recent[-1]
        return (total - before) / max(now - since, 1e9 * WHILE_S)

    def bring(self, count: int) -> None:
        """Start `count` more TEs; draining ones are taken back first, then pre-warmed ones are used."""
        for te in list(self._draining)[:count]:
            del self._draining[te]
            self.fleet.resume(te)
            self._tell("stays", self.fleet.tes[te].name, "it was draining")
            count -= 1
        serving = len(self.fleet.serving)
        for place in range(1, count + 1):
            is_warm = self.warm is None or self.warm.take()
            steps = self.scale_up.steps(place, serving, is_warm)
            ticket, self._tickets = self._tickets, self._tickets + 1
            self._coming[ticket] = is_warm
            seconds = sum(step.seconds for step in steps)
            (load,) = (step for step in steps if step.name == "TE-Load")
            reason = f"{seconds:.2f} s, of which weights {load.seconds:.2f} s ({load.source})"
            if self.warm is not None:
                reason += f"; pre-warmed, {self.warm.ready} left" if is_warm else "; none was pre-warmed"
            self.fleet.at(self.fleet.now + 1e9 * seconds, self._joins(ticket, reason))

    def _joins(self, ticket: int, reason: str) -> Callable[[], None]:
        def join() -> None:
            if ticket in self._coming:
                del self._coming[ticket]
                te = self.fleet.join(self.kind._replace(name=f"new {ticket}"))
                self._tell("joins", self.fleet.tes[te].name, reason)

        return join

    def part_with(self, count: int) -> None:
        """Let `count` TEs go: first those still starting, the latest first, then those with the fewest
        requests."""
        for ticket in sorted(self._coming, reverse=True)[:count]:
            if self._coming.pop(ticket) and self.warm is not None:
                self.warm.give_back()
            self._tell("called off", f"new {ticket}", "it was still on its way")
            count -= 1
        tasks = {te: sum(each.num_tasks for each in self.fleet.steppers_of(te)) for te in self.fleet.serving}
        for te in sorted(tasks, key=lambda te: (tasks[te], -te))[:count]:
            self.fleet.drain(te)
            self._draining[te] = None
            self._tell("drains", self.fleet.tes[te].name, f"it ends {tasks[te]} requests first")

    def _hear_warm(self, ready: int) -> None:
        self._tell("warm", "", f"one more is pre-warmed, {ready} in all")

    def _tell(self, what: ScaleAct, te: str, reason: str) -> None:
        self.events.append(ScaleEvent(self.fleet.now, what, te, len(self.fleet.serving), reason))


# What the TEs of a fleet have to do, for who decides how many there are.


def load_of(fleet: Fleet, te: int, wait_ns: float) -> float:
    """Return a TE's load: 1 if its KV or its places are taken, or if prompts would wait for `wait_ns`; more
    if they wait longer."""
    loads = []
    for stepper in fleet.steppers_of(te):
        limits, groups = stepper.limits, stepper.price.num_groups
        loads += [stepper.kv_load, stepper.num_tasks / (limits.num_seqs * groups)]
        loads.append(stepper.queued_ns / wait_ns)
    return max(loads)


def prefill_ns(fleet: Fleet) -> float:
    """Return the total time [ns] of prompts' computation on all TEs."""
    return sum(stepper.prefill_ns for stepper in fleet.steppers)


def alone_ns(fleet: Fleet, te: int, num_prompt: int) -> float:
    """Estimate the time [ns] to a prompt's first token on an idle TE without a cached prefix."""
    stepper = fleet.steppers_of(te)[0]
    rows = stepper.limits.num_rows
    chunks = [(done, min(rows, num_prompt - done)) for done in range(0, num_prompt, rows)]
    return sum(
        stepper.price(StepCounts(new, new, new * (done + (new + 1) / 2), done + new)) for done, new in chunks
    )
