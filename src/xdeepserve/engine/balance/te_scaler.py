"""The AutoScaler at work: looks at TEs each `every_s`, asks a policy how many there should be, and acts.

It is the same for the engine's TEs (`serving/elastic.py`) and for those of a simulated fleet. A TE that goes
finishes its requests first; if more are wanted before it has gone, it is taken back, and no other comes in
its place. One that comes may be called off until its weights come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from xdeepserve.engine.balance.auto_scaler import ScaleLook, ScaleState, ScalingPolicy
from xdeepserve.engine.balance.service_level import IdlePrefill, ServiceLevel
from xdeepserve.engine.balance.te_load import PromptShare, PromptSteps, TEWork, load_of
from xdeepserve.engine.deploy.policies import SCALING
from xdeepserve.engine.deploy.scale_bounds import ScaleBounds

T = TypeVar("T")


class ScaledTEs(Protocol[T]):
    """Calls made by a TEScaler on the TEs that it scales. A TE that is to come has a number."""

    @property
    def now_ns(self) -> float:
        """Virtual time in ns, now."""

    def ready(self) -> Sequence[T]:
        """List the TEs that take requests, in the order in which they came."""

    def works(self, te: T) -> Sequence[TEWork]:
        """List the work of a TE, or of each of its halves."""

    def num_sequences(self, te: T) -> int:
        """Count the requests at a TE."""

    def num_unplaced(self) -> int:
        """Count the requests that wait for any TE, or that TEs of another role have yet to hand over."""

    def prompt_steps(self) -> PromptSteps:
        """Return the time and the speed of all TEs' steps so far."""

    def tell_wanted(self, state: ScaleState, stay: Sequence[T]) -> None:
        """Tell that another number is wanted, and which leaving TEs stay for that."""

    def start(self, number: int) -> None:
        """Have another TE come, by number."""

    def call_off(self, number: int) -> None:
        """Have a TE not come that was to."""

    def send_away(self, te: T) -> None:
        """Have a TE leave when it has finished its requests."""

    def can_resume(self, te: T) -> bool:
        """Whether a TE that is leaving has requests left."""

    def resume(self, te: T) -> None:
        """Have a TE that is leaving take requests again."""


class TEScaler(Generic[T]):
    """Makes the number of TEs follow their load and the service level, from `num_tes` on.

    A bound of TTFT or of TPOT is in ns; without one, `math.inf`, it plays no part.
    """

    def __init__(
        self, tes: ScaledTEs[T], bounds: ScaleBounds, ttft_ns: float, tpot_ns: float, num_tes: int
    ) -> None:
        self._tes, self._bounds = tes, bounds
        self._ttft_ns = ttft_ns if bounds.within else math.inf  # else no request has to keep it
        self._counts_prompts = tpot_ns < math.inf and bounds.within > 0
        self._next: ScalingPolicy = SCALING.function(bounds.policy)
        self.state = ScaleState(num_tes)
        self._share = PromptShare()
        self._level, self._idle_prefill = ServiceLevel(ttft_ns, tpot_ns), IdlePrefill()
        self.begun_ns = 0.0  # when the latest TE came that was the only one
        self._num_asked = 0
        self.coming: dict[int, bool] = {}  # TEs on their way, by number: whether they may be called off
        self.draining: list[T] = []  # TEs sent away that have not gone, the longest away first

    def hear(
        self,
        at_ns: float,
        prefill: tuple[int, int, float],
        ttft_ns: float,
        tpot_ns: float | None,
    ) -> None:
        """Count a request that arrived at `at_ns` and has ended, for the service level.

        `prefill` has tokens of its prompt, those of them that were cached, and the time [ns] of the rest. A
        request that came while there was no TE does not count: it is late for that reason.
        """
        if at_ns >= self.begun_ns:
            self._idle_prefill.hear(*prefill)
            self._level.hear(ttft_ns, tpot_ns, partial(self._idle_prefill.ns, prefill[0]))

    def look(self) -> None:
        """Look at the TEs, and act if another number of them is wanted."""
        tes, ready = self._tes, self._tes.ready()
        waiting = tes.num_unplaced()
        load = self._load(ready) if ready else waiting
        missed = self._level.take_share()
        seen = ScaleLook(tes.now_ns / 1e9, load, len(ready), len(self.coming), missed, waiting)
        before, self.state = self.state, self._next(self.state, seen, self._bounds)
        more = self.state.wanted - seen.serving - seen.coming
        if self.state.changed_s != before.changed_s and more:
            tes.tell_wanted(self.state, self._staying(more))
            self.bring(more) if more > 0 else self.part_with(-more)

    def _load(self, ready: Sequence[T]) -> float:
        """Return the load of TEs in sum."""
        steps = self._tes.prompt_steps()
        share = self._share.take(self._tes.now_ns, steps.total_ns) if self._counts_prompts else 0.0
        works = map(self._tes.works, ready)
        loads = (max(load_of(work, steps, self._ttft_ns) for work in halves) for halves in works)
        return max(share, sum(loads))

    def _staying(self, count: int) -> list[T]:
        return [te for te in self.draining if self._tes.can_resume(te)][: max(0, count)]

    def bring(self, count: int) -> None:
        """Have `count` more TEs serve: those that are leaving stay first, the longest away of them first."""
        staying = self._staying(count)
        for te in staying:
            self.draining.remove(te)
            self._tes.resume(te)
            self._note_come()
        for _ in range(count - len(staying)):
            self.coming[self._num_asked] = True
            self._tes.start(self._num_asked)
            self._num_asked += 1

    def part_with(self, count: int) -> None:
        """Have `count` fewer TEs serve: of those on their way the latest are called off first. Then those
        with the fewest requests go, and among equals the latest."""
        latest_first = self._tes.ready()[::-1]
        for number in [number for number in reversed(self.coming) if self.coming[number]][:count]:
            del self.coming[number]
            self._tes.call_off(number)
            count -= 1
        for te in sorted(latest_first, key=self._tes.num_sequences)[:count]:
            self.draining.append(te)
            self._tes.send_away(te)

    def begin_load(self, number: int) -> bool:
        """Note that the weights of a TE come now, so that it cannot be called off any more; return whether it
        is still to come."""
        if number in self.coming:
            self.coming[number] = False
        return number in self.coming

    def end_load(self, number: int, has_come: bool) -> None:
        """Note that a TE takes requests now, or that it could not come."""
        del self.coming[number]
        if has_come:
            self._note_come()

    def _note_come(self) -> None:
        if len(self._tes.ready()) == 1:
            self.begun_ns = self._tes.now_ns


def in_ns(seconds: float | None) -> float:
    """Return a bound in ns; `math.inf` without one."""
    return math.inf if seconds is None else 1e9 * seconds
