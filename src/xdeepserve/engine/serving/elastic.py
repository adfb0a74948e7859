"""TEs of an engine that come and go as the AutoScaler decides (DeepServe 6); from none, too.

The AutoScaler (`balance/te_scaler.py`) looks each `every_s` of virtual time at the load of the TEs and, if
`ttft_s` or `tpot_s` is set, at the service level (`balance/service_level.py`). Where prefill and decode are
apart, the TEs of each role have an AutoScaler of their own.

A TE comes in five steps: a pod is found, processes are started, weights come, a dummy request is served, job
executors hear of it. Pre-warmed TEs have the first two behind them: dies and processes, without weights. For
each that is taken another one is started. A TE that goes finishes its requests first. If more TEs are wanted
before it has gone, it is taken back, and no other comes in its place. Without any TE a request waits for the
first one, which comes at once; where prefill and decode are apart it waits for one of each role. The last
decode TE stays while a prefill TE has requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Protocol

import msgspec

from xdeepserve.engine.balance.auto_scaler import ScaleState
from xdeepserve.engine.balance.dp import prefill_cost
from xdeepserve.engine.balance.te_load import PromptSteps, TEWork
from xdeepserve.engine.balance.te_scaler import TEScaler, in_ns
from xdeepserve.engine.deploy.deployment import Role, ScaleConfig
from xdeepserve.engine.dp.events import Observed, StepEnded, TEJoined, TEsWanted
from xdeepserve.engine.job.executor import JobExecutor
from xdeepserve.engine.loading import most_nbytes
from xdeepserve.engine.numbers import StepNo
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.engine.te.te import TE
from xdeepserve.errors import DeploymentError, XDeepServeError
from xdeepserve.hw.clock import Clock, Hears
from xdeepserve.hw.spec import Param


class StartCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a TE that comes, beyond the timing model of a die."""

    pod: Param = Param(20.0, "s", "assumed: a container is placed and started; DS Table 2: slow")
    warm_pod: Param = Param(0.1, "s", "assumed: a pod that runs is given away")
    start: Param = Param(46.0, "s", "assumed: imports, NPU and HCCL one after another; DS 6.1: most of all")
    start_saved: Param = Param(0.35, "ratio", "DS 6.1: late imports and parallel initialisation")
    warm_te: Param = Param(0.1, "s", "assumed: a TE without a model gets its name and layout")
    tensors: Param = Param(0.3, "s", "DS 6.2: tensor initialisation when loading from DRAM")
    link: Param = Param(0.05, "s", "assumed: source and target connect (DS 6.2: before a fork)")
    push: Param = Param(1e-3, "s", "assumed: a message to each job executor; DS Table 2: pushed")

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

    async def bring(self, role: Role, adopts: bool) -> str: ...

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
        first = [te for te in je.tes if te.sizes.place.role == role]
        # Of a TE that comes, beyond what passes while its weights and its dummy request are on their way.
        self._digest_s = first[0].plan.spec.hbm_ns(most_nbytes(first[0].plan)) / 1e9
        bounds_ns = in_ns(config.ttft_s), in_ns(config.tpot_s)
        self._scaler: TEScaler[TE] = TEScaler(self, config, *bounds_ns, len(first))
        self._prompts = PromptWatch(role, je)
        self._num_taken = 0  # pre-warmed TEs that are meant for some that come
        self._num_failed = 0
        self._is_over = False
        self.processes: list[asyncio.Task[None]] = []
        je.unplaced.is_elastic = True
        je.unplaced.on_take.append(self._wake)
        je.tell.observers.insert(0, self._prompts.see)

    def begin(self) -> None:
        """Pre-warm TEs, and look from now on."""
        for _ in range(self._num_wanted_warm):
            self._detach(self._warm(), "a TE that is pre-warmed")
        self._look_later()

    def end(self) -> None:
        """Look no more; nothing that is on its way comes."""
        self._is_over = True
        self._je.unplaced.is_elastic = False
        for process in self.processes:
            process.cancel()

    @property
    def begun_ns(self) -> float:
        """When the latest TE of the role came that was the only one."""
        return self._scaler.begun_ns

    def hear(self, metrics: RequestMetrics, num_prompt: int) -> None:
        """Count a request that has ended for the service level."""
        begun_ns, first_ns, ttft_ns = metrics.scheduled_ns, metrics.first_token_ns, metrics.ttft_ns
        if begun_ns is None or first_ns is None or ttft_ns is None:
            return
        prefill = num_prompt, metrics.num_cached_tokens, first_ns - begun_ns
        self._scaler.hear(metrics.arrival_ns, prefill, ttft_ns, metrics.tpot_ns)

    def _look_later(self) -> None:
        self._clock.at(self._clock.now + round(1e9 * self._config.every_s), self._look_again, self._hears)

    async def _look_again(self) -> None:
        if not self._is_over:
            self._look_later()
            self._scaler.look()

    def _wake(self) -> None:
        """Look at once: a request waits for a TE."""
        if not (self._is_over or self._scaler.coming or self.ready()):
            self._scaler.look()

    # ---- what the AutoScaler sees and does ----------------------------------------------------------

    @property
    def now_ns(self) -> float:
        return self._clock.now

    def ready(self) -> list[TE]:
        return self._je.tes.ready(self._role)

    def works(self, te: TE) -> list[TEWork]:
        groups = [group.status() for group in te.groups]
        max_seqs = sum(group.steps.max_seqs for group in te.groups)
        return [TEWork(self._role, groups, te.te_shell.pending_tokens, max_seqs)]

    def num_sequences(self, te: TE) -> int:
        return te.num_sequences

    def num_unplaced(self) -> int:
        return self._je.num_ahead(self._role)

    def prompt_steps(self) -> PromptSteps:
        return self._prompts.steps

    def tell_wanted(self, state: ScaleState, stay: Sequence[TE]) -> None:
        names = tuple(te.plan.name for te in stay)
        self._je.tell(TEsWanted(state.wanted, state.reason, names, self._role))

    def start(self, number: int) -> None:
        self._detach(self._start_te(number), "a TE that comes")

    def call_off(self, number: int) -> None:
        """Do nothing: the process of the TE ends when its weights were to come."""

    def send_away(self, te: TE) -> None:
        self._detach(self._leave(te), f"{te.plan.name} that goes")

    def can_resume(self, te: TE) -> bool:
        return self._tes.can_resume(te.plan.name)

    def resume(self, te: TE) -> None:
        self._tes.resume(te.plan.name)

    # ---- processes ----------------------------------------------------------------------------------

    def _detach(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """Run work as a process; if it is impossible, tell why, and let later looks try again."""

        async def run() -> None:
            try:
                await work
            except XDeepServeError as error:
                self._je.tell(TEsWanted(self._scaler.state.wanted, f"{name}: {error}", role=self._role))
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
        is_taken = self._num_left > 0
        is_warm = is_taken or self._config.warm is None
        self._num_taken += is_taken
        if is_taken:
            self._detach(self._warm(COSTS.cold_s), "a TE that is pre-warmed")
        await self._sleep(COSTS.warm_s if is_warm else COSTS.cold_s)
        if not self._scaler.begin_load(number):
            self._num_taken -= is_taken
            return
        has_come = False
        before_load = COSTS.link if self.ready() else COSTS.tensors
        try:
            try:
                await self._sleep(before_load.value + self._digest_s + COSTS.push.value)
            finally:
                self._num_taken -= is_taken
            name = await self._tes.bring(self._role, adopts=is_taken)
            has_come = True
        finally:
            self._scaler.end_load(number, has_come)
        self._num_failed = 0
        self._je.tell(TEJoined(name))

    async def _leave(self, te: TE) -> None:
        try:
            await self._tes.send_away(te.plan.name)
        finally:
            if te in self._scaler.draining:  # else it has been taken back
                self._scaler.draining.remove(te)

    async def _warm(self, seconds: float = 0.0) -> None:
        await self._sleep(seconds)
        if self._num_left < self._num_wanted_warm:
            await self._tes.prewarm(self._role)

    @property
    def _num_wanted_warm(self) -> int:
        """Pre-warmed TEs that hold dies until they are needed."""
        return self._config.warm or 0

    @property
    def _num_left(self) -> int:
        """Pre-warmed TEs that are meant for none that comes."""
        return self._tes.num_warm(self._role) - self._num_taken

    async def _sleep(self, seconds: float) -> None:
        await self._clock.sleep(round(1e9 * seconds))

    def _end_waits(self, error: XDeepServeError) -> None:
        """End the requests that wait, if no TE of the role is there or coming."""
        running = (te for te in self._je.tes if te.is_running)
        if not (self._scaler.coming or any(te.sizes.place.role == self._role for te in running)):
            for seqs, _ in self._je.unplaced.let_go():
                for seq in seqs:
                    seq.on_failed(XDeepServeError(f"no TE could be brought up for this request: {error}"))


class PromptWatch:
    """Sums up the steps of the TEs of a role that compute parts of prompts, by the events of their ends."""

    def __init__(self, role: Role, je: JobExecutor) -> None:
        self.steps = PromptSteps()
        self._role, self._je = role, je
        self._costs: dict[str, tuple[StepNo, float]] = {}  # by TE: its latest step, and the cost of prompts
        self._until_ns: dict[str, int] = {}  # by TE: the end of the latest step that counts

    def see(self, event: Observed) -> None:
        """Take in the end of a DP group's step. The groups of a TE end the same step one by one."""
        if not isinstance(event, StepEnded) or not any(each.is_prefill for each in event.shares):
            return
        te, end_ns = event.group.te, event.end_ns
        if not any(each.plan.name == te and each.sizes.place.role == self._role for each in self._je.tes):
            return  # a TE that serves its dummy request
        step, cost = self._costs.get(te, (event.step, 0.0))
        cost = cost if step == event.step else 0.0
        cost += sum(prefill_cost(each.num_tokens, each.start) for each in event.shares if each.is_prefill)
        self._costs[te] = event.step, cost
        self.steps.hear(end_ns - event.start_ns, cost)
        self.steps.total_ns += max(0, end_ns - max(event.start_ns, self._until_ns.get(te, 0)))
        self._until_ns[te] = max(end_ns, self._until_ns.get(te, 0))
