"""Brings new TEs into service: planned, loaded, tried by a dummy request, then given work (DeepServe 6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import Role
from xdeepserve.engine.dp.events import DiesTested, KVKept
from xdeepserve.engine.dp.sampling_params import SamplingParams
from xdeepserve.engine.dp.sequence import SampledToken, Sequence
from xdeepserve.engine.job.executor import JobExecutor
from xdeepserve.engine.job.links import SETTLE_NS, TIMEOUT_NS
from xdeepserve.engine.loading import SOURCES, Source
from xdeepserve.engine.recovery.ladder import Loss
from xdeepserve.engine.serving.kept_kv import KeptKV
from xdeepserve.engine.te.te import TE
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import HardwareError, ProtocolError, RequestError, XDeepServeError, abridged
from xdeepserve.hw.clock import Waiting
from xdeepserve.hw.self_test import well_dies

FAILED = (HardwareError, ProtocolError)  # what is said when dies fail, by themselves or by who waits for them


class Joining:
    """Brings new TEs to a job executor.

    `make` makes a TE from its plan; `on_joined` is called for each TE before it takes requests.
    """

    def __init__(
        self,
        plan: PodPlan,
        je: JobExecutor,
        make: Callable[[TEPlan], TE],
        on_joined: Callable[[TE], None],
    ) -> None:
        self._plan, self._je, self._make, self._on_joined = plan, je, make, on_joined
        self.loading: list[TE] = []
        self.warm: list[TE] = []  # pre-warmed, the next to come of each role first
        self._processes: list[asyncio.Task[str]] = []
        self._end: str | None = None  # why nobody can join any more

    @property
    def processes(self) -> list[asyncio.Task[Any]]:
        """Tasks of joining TEs; each ends when its TE takes requests, or has given its dies back."""
        return [*self._processes]

    def end(self, why: str) -> None:
        """Forbid further joining; loading TEs give their dies back."""
        self._end = self._end or why
        for process in self._processes:
            process.cancel()

    async def add(self, role: Role, source: Source) -> str:
        """Add a TE like the first of its role; return the name once the TE takes requests.

        If the caller is cancelled, loading ends and the dies are free again.
        """
        if source not in SOURCES:
            known = ", ".join(SOURCES)
            raise RequestError(f"source must be one of {known}, found {abridged(source)}", param="source")
        joining = self._begin(role, source)
        try:
            return await joining
        except asyncio.CancelledError:
            if self._end is None or not joining.cancelled():  # then it is the caller who ends
                joining.cancel()
                raise
            raise XDeepServeError(f"no TE of role {role} can join: {self._end}") from None

    async def join(
        self, role: Role, dies: list[int] | None = None, kept: KeptKV | None = None, adopts: bool = True
    ) -> str:
        """Add a TE, on given dies with the KV kept on them, and return its name; for callers that are
        processes of the pod. It `adopts` a pre-warmed TE where there is one and no dies are given."""
        joining = self._begin(role, "auto", dies, kept, adopts)
        try:
            await self._plan.pod.clock.join(joining)
        except asyncio.CancelledError:
            raise XDeepServeError(f"no TE of role {role} can join: {self._end}") from None
        return joining.result()

    def prewarm(self, role: Role) -> None:
        """Prepare a TE like the first of its role, with dies and memory and without weights."""
        plan = self._plan.add(role)
        try:
            self._plan.materialise([plan])
            self.warm.append(self._make(plan))
        except BaseException:
            self._plan.release(plan)
            raise

    def warm_of(self, role: Role) -> list[TE]:
        """List the pre-warmed TEs of a role, the next to come first."""
        return [te for te in self.warm if te.sizes.place.role == role]

    def release_warm(self) -> None:
        """Give back the dies of TEs that are pre-warmed."""
        warm, self.warm = self.warm, []
        for te in warm:
            te.close()
            self._plan.release(te.plan)

    def _begin(
        self,
        role: Role,
        source: Source,
        dies: list[int] | None = None,
        kept: KeptKV | None = None,
        adopts: bool = True,
    ) -> asyncio.Task[str]:
        name = f"loading of a TE for {role}"
        joining = self._plan.pod.clock.spawn(self._join(role, source, dies, kept, adopts), name=name)
        self._processes = [*(each for each in self._processes if not each.done()), joining]
        return joining

    async def _join(
        self, role: Role, source: Source, dies: list[int] | None, kept: KeptKV | None, adopts: bool
    ) -> str:
        te: TE | None = None
        warm = self.warm_of(role) if adopts and dies is None else []
        if warm:
            te = warm[0]
            self.warm.remove(te)
            plan = te.plan
        else:
            plan = self._plan.add(role, dies)
        try:
            if te is None:
                self._plan.materialise([plan])
                te = self._make(plan)
            te.load()
            self.loading.append(te)
            await self._plan.bring(plan, source, self._ready_plans, te.repairs.mend)
            te.start()
            await serve_dummy(te, TIMEOUT_NS)
        except BaseException as error:
            # A process of its own, which goes on if this one is cancelled once more.
            clock, end = self._plan.pod.clock, self._give_back(plan, te, error)
            await clock.join(clock.spawn(end, name=f"end of {plan.name}"))
            raise
        finally:
            self.loading = [each for each in self.loading if each is not te]
            for other in self._je.tes:  # one that leaves may have waited for its reader
                other.wake()
        if kept is not None and (num_blocks := kept.give(te)):
            self._je.tell(KVKept(plan.name, num_blocks))
        self._je.tes.append(te)
        self._on_joined(te)
        self._je.take(te)
        te.te_shell.returning.clear()
        return plan.name

    def _ready_plans(self) -> list[TEPlan]:
        return [te.plan for te in self._je.tes if te.life == "ready"]

    async def _give_back(self, plan: TEPlan, te: TE | None, error: BaseException) -> None:
        """Free the dies of a TE that failed to join, once nothing uses them. After a hardware failure, dies
        that do not pass the self test stay lost."""
        if te is not None:
            te.kill()
            await until_unused(plan)
            te.give_up()
            if isinstance(error, FAILED):
                well = await well_dies(self._plan.pod, plan.every_die, plan.sizes.groups.lost_ns)
                failed = tuple(die for die in plan.every_die if die not in well)
                self._plan.pod.lose(failed)
                self._je.tell(DiesTested(plan.name, tuple(well), failed))
        self._plan.release(plan)


async def until_unused(te: TEPlan) -> None:
    """Wait until work under way on a TE's dies has noticed its end; for callers that are processes of the
    pod."""
    pause_ns = SETTLE_NS
    while te.is_in_use and pause_ns < TIMEOUT_NS:
        await te.pod.clock.sleep(pause_ns)
        pause_ns *= 2


PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)  # of the dummy request


async def serve_dummy(te: TE, timeout_ns: int) -> None:
    """Serve the dummy request of a TE that has loaded: each DP group computes one token (DeepServe 6,
    TE-Post-Load). From within a process, when the TE runs.

    All that a request needs runs once before somebody depends on it: weights, kernels, exchanges, host. What
    fails there is the TE's own, as nobody has sent it anything yet: it is raised, as is DeadlineError after
    a while.
    """
    clock, missing = te.plan.pod.clock, {group.rank for group in te.groups}

    def awaited() -> Waiting:
        names = ", ".join(f"DP group {rank}" for rank in sorted(missing)[:4])
        peers = f"{names} ..." if len(missing) > 4 else names
        count = len(te.groups)
        return Waiting("dummy request", te.sizes.place.name, peers, "groups", count, count - len(missing))

    waiter = clock.waiter(awaited)

    def end(seq: Sequence, _: list[SampledToken]) -> bool:
        missing.discard(-1 - seq.seq_id)
        if not missing:
            waiter.wake()
        return True

    failures: list[Exception] = []  # also of the moment in which the last group ended

    def fail(_: TE, loss: Loss) -> None:
        reason = loss.reason
        failures.append(reason)
        waiter.fail(reason)

    on_loss, te.on_loss = te.on_loss, fail
    # The engine's sequences begin at 0.
    dummies = [Sequence(-1 - group.rank, 0, [0], 1, 1, PARAMS, 0, end) for group in te.groups]
    try:
        for seq, group in zip(dummies, te.groups, strict=True):
            te.te_shell.adopt(seq, group)
            group.places.move(seq, "add")
        te.wake()
        await clock.wait(waiter, clock.now + timeout_ns)
        if failures:
            raise failures[0]
    finally:
        te.on_loss = on_loss
        for seq in dummies:
            te.te_shell.remove(seq)  # from its group, too, if it has not ended
