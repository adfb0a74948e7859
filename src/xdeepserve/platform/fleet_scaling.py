"""A fleet growing and shrinking while it serves: its TEs start in five steps, or leave.

The AutoScaler is the engine's own (`engine/balance/te_scaler.py`). A new TE takes requests when all its steps
are over; a leaving TE finishes its requests first (drains).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from xdeepserve.engine.balance.auto_scaler import ScaleState
from xdeepserve.engine.balance.te_load import PromptSteps, TEWork
from xdeepserve.engine.balance.te_scaler import TEScaler
from xdeepserve.engine.deploy.scale_bounds import ScaleBounds
from xdeepserve.platform.fleet import Fleet
from xdeepserve.platform.fleet_words import FleetTE, ServedRequest
from xdeepserve.platform.scale_up import ScaleUp, StepCost
from xdeepserve.platform.service_report import Bounds

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
        self.fleet, self.kind, self.scale_up, self._every_ns = fleet, kind, scale_up, 1e9 * bounds.every_s
        self.events: list[ScaleEvent] = []
        self.warm = None if warm is None else WarmTEs(fleet, warm, scale_up.warming_s, self._hear_warm)
        self._taken: dict[int, bool] = {}  # TEs that have no weights yet, by number: whether pre-warmed
        self._num_loading = 0
        bounds_ns = 1e9 * service.ttft_s, 1e6 * service.tpot_ms
        self._scaler: TEScaler[int] = TEScaler(self, bounds, *bounds_ns, len(fleet.serving))
        self.bring, self.part_with = self._scaler.bring, self._scaler.part_with
        fleet.on_end = self._heard
        fleet.at(self._every_ns, self._look)

    def lose(self, te: int) -> None:
        """Lose a TE, so all its requests begin again elsewhere; another TE is started in its place."""
        name, scaler = self.fleet.tes[te].name, self._scaler
        if te in scaler.draining:
            scaler.draining.remove(te)
        num = self.num_sequences(te)
        self.fleet.lose(te)
        self._tell("lost", name, f"{num} requests begin again elsewhere")
        if len(self.fleet.serving) + len(scaler.coming) < scaler.state.wanted:
            self.bring(1)

    def _heard(self, served: ServedRequest) -> None:
        prefill = served.num_prompt, served.num_cached, served.first_ns - served.begun_ns
        self._scaler.hear(served.at_ns, prefill, served.ttft_ns, served.tpot_ns)

    def _look(self) -> None:
        if not self.fleet.is_open:
            return
        draining = self._scaler.draining
        for te in [te for te in draining if self.fleet.is_empty(te)]:
            draining.remove(te)
            self._tell("leaves", self.fleet.tes[te].name, "it has ended what it had")
        self._scaler.look()
        self.fleet.at(self.fleet.now + self._every_ns, self._look)

    # ---- what the AutoScaler sees and does ----------------------------------------------------------

    @property
    def now_ns(self) -> float:
        return self.fleet.now

    def ready(self) -> Sequence[int]:
        return sorted(self.fleet.serving)

    def works(self, te: int) -> list[TEWork]:
        return [each.work_at(self.fleet.now) for each in self.fleet.steppers_of(te)]

    def num_sequences(self, te: int) -> int:
        return sum(each.num_tasks for each in self.fleet.steppers_of(te))

    def num_unplaced(self) -> int:
        return self.fleet.num_homeless

    def prompt_steps(self) -> PromptSteps:
        """Sum up the steps of all TEs, those that have left included."""
        found = PromptSteps()
        for stepper in self.fleet.steppers:
            found.take_in(stepper.prompts)
        return found

    def tell_wanted(self, state: ScaleState, stay: Sequence[int]) -> None:
        self._tell("wanted", "", f"{state.wanted} of them: {state.reason}")

    def start(self, number: int) -> None:
        is_warm = self.warm is None or self.warm.take()
        self._taken[number] = is_warm
        steps = self.scale_up.steps(1, len(self.fleet.serving), is_warm)[:2]
        self._later(_seconds(steps), lambda: self._load(number))

    def call_off(self, number: int) -> None:
        if self._taken.pop(number) and self.warm is not None:
            self.warm.give_back()
        self._tell("called off", f"new {number}", "it was still on its way")

    def _load(self, number: int) -> None:
        """Have the weights of a TE come, behind those of TEs that load already; then it joins."""
        if not self._scaler.begin_load(number):
            return
        is_warm = self._taken.pop(number)
        self._num_loading += 1
        steps = self.scale_up.steps(self._num_loading, len(self.fleet.serving), is_warm)
        (load,) = (step for step in steps if step.name == "TE-Load")
        reason = f"{_seconds(steps):.2f} s, of which weights {load.seconds:.2f} s ({load.source})"
        if self.warm is not None:
            reason += f"; pre-warmed, {self.warm.ready} left" if is_warm else "; none was pre-warmed"

        def join() -> None:
            self._num_loading -= 1
            te = self.fleet.join(self.kind._replace(name=f"new {number}"))
            self._scaler.end_load(number, has_come=True)
            self._tell("joins", self.fleet.tes[te].name, reason)

        self._later(_seconds(steps[2:]), join)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self.fleet.at(self.fleet.now + 1e9 * seconds, act)

    def send_away(self, te: int) -> None:
        self.fleet.drain(te)
        self._tell("drains", self.fleet.tes[te].name, f"it ends {self.num_sequences(te)} requests first")

    def can_resume(self, te: int) -> bool:
        return not self.fleet.is_empty(te)

    def resume(self, te: int) -> None:
        self.fleet.resume(te)
        self._tell("stays", self.fleet.tes[te].name, "it was draining")

    def _hear_warm(self, ready: int) -> None:
        self._tell("warm", "", f"one more is pre-warmed, {ready} in all")

    def _tell(self, what: ScaleAct, te: str, reason: str) -> None:
        self.events.append(ScaleEvent(self.fleet.now, what, te, len(self.fleet.serving), reason))


def _seconds(steps: Sequence[StepCost]) -> float:
    return sum(step.seconds for step in steps)
