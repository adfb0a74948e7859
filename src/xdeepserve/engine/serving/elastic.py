"""TEs of an engine that come and go as the AutoScaler decides (DeepServe 6); from none, too.

The AutoScaler (`balance/auto_scaler.py`) looks each `every_s` of virtual time at the load of the TEs and, if
`ttft_s` or `tpot_s` is set, at the service level (`balance/service_level.py`). Requests that came before the
latest TE do not count there: they may be late because it was not there yet. Where prefill and decode are
apart, the TEs of each role have an AutoScaler of their own.

A TE comes in five steps: a pod is found, processes are started, weights come, a dummy request is served, job
executors hear of it. Pre-warmed TEs have the first two behind them: dies and processes, without weights. For
each that is taken another one is started. A TE that goes finishes its requests first. If more TEs are wanted
before it has gone, it is taken back, and no other comes in its place. Without any TE a request waits for the
first one, which comes at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from xdeepserve.engine.balance.auto_scaler import ScaleLook, ScaleState, ScalingPolicy
from xdeepserve.engine.balance.service_level import IdlePrefill, ServiceLevel
from xdeepserve.engine.deploy.deployment import Role, ScaleConfig
from xdeepserve.engine.deploy.policies import SCALING
from xdeepserve.engine.dp.events import TEsWanted
from xdeepserve.engine.job.executor import JobExecutor
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.engine.te.te import TE
from xdeepserve.errors import DeploymentError, XDeepServeError
from xdeepserve.hw.clock import Clock, Hears
from xdeepserve.hw.spec import Param


class StartCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of starting a pod and its processes, beyond the timing model of a die."""

    pod: Param = Param(20.0, "s", "assumed: a container is placed and started; DS Table 2: slow")
    warm_pod: Param = Param(0.1, "s", "assumed: a pod that runs is given away")
    start: Param = Param(46.0, "s", "assumed: imports, NPU and HCCL one after another; DS 6.1: most of all")
    start_saved: Param = Param(0.35, "ratio", "DS 6.1: late imports and parallel initialisation")
    warm_te: Param = Param(0.1, "s", "assumed: a TE without a model gets its name and layout")

    @property
    def cold_s(self) -> float:
        """Time [s] until a pod and processes run that nobody had prepared."""
        return self.pod.value + self.start.value * (1 - self.start_saved.value)

    @property
    def warm_s(self) -> float:
        """Time [s] until a pre-warmed TE can load weights."""
        return self.warm_pod.value + self.warm_te.value


COSTS: Final = StartCosts()
MAX_FAILED: Final = 8  # TEs in a row that could not come, as if their dies are lost on the way


class ElasticTEs(Protocol):
    """Calls made by Elastic on the TEs of an engine, all from within processes of the pod."""

    def num_warm(self, role: Role) -> int: ...

    async def prewarm(self, role: Role) -> None: ...

    async def bring(self, role: Role) -> str: ...

    async def send_away(self, name: str) -> None: ...

    def can_resume(self, name: str) -> bool: ...

    def resume(self, name: str) -> None: ...


class Elastic:
    """Makes the number of an engine's TEs of a role follow their load. `hears` is told of an error of its
    processes."""

    def __init__(
        self,
        clock: Clock,
        je: JobExecutor,
        tes: ElasticTEs,
        config: ScaleConfig,
        hears: Hears,
        role: Role = "both",
    ) -> None:
        self._clock, self._je, self._tes, self._config, self._hears = clock, je, tes, config, hears
        self._role = role
        self._next: ScalingPolicy = SCALING.function(config.policy)
        self._state = ScaleState(sum(te.sizes.place.role == role for te in je.tes))
        self._num_taken = 0  # pre-warmed TEs that are meant for some that come
        self._num_asked = self._num_failed = 0
        self._coming: dict[int, bool] = {}  # TEs on their way, by number: whether they may be called off
        bounds_ns = (math.inf if bound is None else 1e9 * bound for bound in (config.ttft_s, config.tpot_s))
        self._level, self._idle_prefill = ServiceLevel(*bounds_ns), IdlePrefill()
        self._grown_ns = 0  # when a TE came last, or was taken back
        self._draining: list[str] = []  # TEs sent away that have not gone, the longest away first
        self._is_over = False
        self.processes: list[asyncio.Task[None]] = []
        je.unplaced.is_elastic = True
        je.unplaced.on_take.append(self._wake)

    def start(self) -> None:
        """Pre-warm TEs, and look from now on."""
        for _ in range(self._config.warm):
            self._detach(self._warm(), "a TE that is pre-warmed")
        self._look_later()

    def end(self) -> None:
        """Look no more; nothing that is on its way comes."""
        self._is_over = True
        self._je.unplaced.is_elastic = False
        for process in self.processes:
            process.cancel()

    def hear(self, metrics: RequestMetrics, num_prompt: int) -> None:
        """Count a request that has ended for the service level."""
        begun_ns, first_ns, ttft_ns = metrics.scheduled_ns, metrics.first_token_ns, metrics.ttft_ns
        if begun_ns is None or first_ns is None or ttft_ns is None or metrics.arrival_ns < self._grown_ns:
            return
        self._idle_prefill.hear(num_prompt, metrics.num_cached_tokens, first_ns - begun_ns)
        self._level.hear(ttft_ns, metrics.tpot_ns, partial(self._idle_prefill.ns, num_prompt))

    def _look_later(self) -> None:
        self._clock.at(self._clock.now + round(1e9 * self._config.every_s), self._look_again, self._hears)

    async def _look_again(self) -> None:
        if not self._is_over:
            self._look_later()
            self._look()

    def _wake(self) -> None:
        """Look at once: a request waits for a TE."""
        if not (self._is_over or self._coming or self._je.tes.ready(self._role)):
            self._look()

    def _look(self) -> None:
        ready = self._je.tes.ready(self._role)
        load = sum(map(load_of, ready)) if ready else len(self._je.unplaced)
        missed = self._level.take_share()
        seen = ScaleLook(self._clock.now / 1e9, load, len(ready), len(self._coming), missed)
        before, self._state = self._state, self._next(self._state, seen, self._config)
        more = self._state.wanted - seen.serving - seen.coming
        if self._state.changed_s == before.changed_s or not more:
            return
        resumed = [name for name in self._draining if self._tes.can_resume(name)][: max(0, more)]
        self._je.tell(TEsWanted(self._state.wanted, self._state.reason, tuple(resumed), self._role))
        for name in resumed:
            self._tes.resume(name)
            self._grown_ns = self._clock.now
        for _ in range(more - len(resumed)):
            self._coming[self._num_asked] = True
            self._detach(self._start_te(self._num_asked), "a TE that comes")
            self._num_asked += 1
        for number in [number for number in reversed(self._coming) if self._coming[number]][: max(0, -more)]:
            del self._coming[number]
            more += 1
        for te in sorted(ready, key=lambda te: (te.num_sequences, -te.sizes.place.first_die))[
            : max(0, -more)
        ]:
            self._detach(self._send_away(te.plan.name), f"{te.plan.name} that goes")

    def _detach(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """Run work as a process; if it is impossible, tell why, and let later looks try again."""

        async def run() -> None:
            try:
                await work
            except XDeepServeError as error:
                self._je.tell(TEsWanted(self._state.wanted, f"{name}: {error}", role=self._role))
                self._num_failed += 1
                if isinstance(error, DeploymentError) or self._num_failed > MAX_FAILED:
                    self._end_waits(error)
                elif len(self._je.unplaced):
                    self._wake()

        process = self._clock.detach(run(), name, self._hears)
        self.processes = [*(each for each in self.processes if not each.done()), process]

    async def _start_te(self, number: int) -> None:
        """Bring a pre-warmed TE, and then start another, or a cold one. It may be called off before its
        weights come."""
        is_warm = self._tes.num_warm(self._role) > self._num_taken
        self._num_taken += is_warm
        await self._clock.sleep(round(1e9 * (COSTS.warm_s if is_warm else COSTS.cold_s)))
        self._num_taken -= is_warm
        if number not in self._coming:
            return
        self._coming[number] = False
        if is_warm:
            self._detach(self._warm(COSTS.cold_s), "a TE that is pre-warmed")
        try:
            await self._tes.bring(self._role)
        finally:
            del self._coming[number]
        self._num_failed, self._grown_ns = 0, self._clock.now

    async def _send_away(self, name: str) -> None:
        self._draining.append(name)
        try:
            await self._tes.send_away(name)
        finally:
            self._draining.remove(name)

    async def _warm(self, seconds: float = 0.0) -> None:
        await self._clock.sleep(round(1e9 * seconds))
        await self._tes.prewarm(self._role)

    def _end_waits(self, error: XDeepServeError) -> None:
        """End the requests that wait, if no TE of the role is there or coming."""
        running = (te for te in self._je.tes if te.is_running)
        if not (self._coming or any(te.sizes.place.role == self._role for te in running)):
            for seqs, _ in self._je.unplaced.let_go():
                for seq in seqs:
                    seq.on_failed(XDeepServeError(f"no TE could be brought up for this request: {error}"))


def load_of(te: TE) -> float:
    """Return a TE's load: 1 if its KV or its places are taken; more if requests wait for places.

    A prefill TE's load is its prompts alone: it keeps KV of prefilled requests for as long as decode is full.
    """
    in_places = te.num_sequences / sum(group.steps.max_seqs for group in te.groups)
    return in_places if te.sizes.place.role == "prefill" else max(te.kv_load, in_places)
