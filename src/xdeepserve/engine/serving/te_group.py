"""TEs in service for a model, which come and go while requests run (DeepServe 3, TE groups)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from xdeepserve.engine.build import PodPlan
from xdeepserve.engine.deploy.deployment import Role
from xdeepserve.engine.dp.events import DiesLost, DiesTested, FailoverEnded, named
from xdeepserve.engine.job.executor import JobExecutor, can_serve
from xdeepserve.engine.recovery.ladder import (
    LADDER,
    Loss,
    Remedies,
    Remedy,
    RungName,
    at_once,
    climb,
    reasons,
)
from xdeepserve.engine.serving.control_plane import ControlPlane
from xdeepserve.engine.serving.counters import Counters
from xdeepserve.engine.serving.elastic import Elastic
from xdeepserve.engine.serving.failover import Failover, what_helps
from xdeepserve.engine.serving.joining import FAILED, Joining, until_unused
from xdeepserve.engine.serving.kept_kv import KeptKV
from xdeepserve.engine.serving.record import RequestMetrics
from xdeepserve.engine.te.reports import ServerReport, TEHealth, TEReport
from xdeepserve.engine.te.te import TE
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import DriverReport, LostDieError, RequestError, XDeepServeError, abridged
from xdeepserve.step.linear import Threads

T = TypeVar("T")


class TEGroup:
    """Manages the TEs of a job executor: those that fail, leave or, through `joining`, come.

    `on_failure` is called with the reason when nothing can serve any more, and with the TE whose failure
    caused this, if one did.
    """

    def __init__(
        self,
        plan: PodPlan,
        je: JobExecutor,
        threads: Threads,
        on_failure: Callable[[XDeepServeError, str | None], None],
    ) -> None:
        self._plan, self._je, self._threads, self._on_failure = plan, je, threads, on_failure
        self._past = Counters.of([])  # of TEs that are gone
        self.lost: dict[str, XDeepServeError] = {}  # TEs that have failed while others went on, and why
        self._lost_health: list[tuple[TEPlan, TEHealth]] = []
        self._leaving: list[asyncio.Task[None]] = []
        self._departures: dict[str, asyncio.Task[None]] = {}  # by TE: these end when it has left
        self._moving: list[asyncio.Task[Any]] = []  # expert servers that come and go
        self._end: str | None = None  # why nobody can join, or leave, any more
        recovery, lost_ns = plan.deployment.recovery, plan.tes[0].sizes.groups.lost_ns
        self.joining = Joining(plan, je, self._make, self._note_joined)
        self._failover: Failover | None = None
        if recovery.failover and not plan.outside:
            ends = self._end_failover, self.fail
            self._failover = Failover(self, self.joining.join, plan, recovery, lost_ns, *ends)
        for te in plan.tes:
            je.tes.append(self._make(te))
        self.control_plane = ControlPlane(plan.pod, plan.deployment.health, lambda: je.tes, self.fail)
        scale = plan.deployment.scale
        self.scalers: list[Elastic] = []  # one for each role, where TEs come and go as load does
        if scale is not None:
            for role in dict.fromkeys(te.sizes.place.role for te in plan.tes):
                self.scalers.append(Elastic(plan.pod.clock, je, self, scale.of(role), self.fail, role))
        plan.pod.memories.on_silence[self] = self._find_lost
        plan.pod.fabric.on_report[self] = self._hear_report

    def _make(self, plan: TEPlan) -> TE:
        if self._je.peers is not None:
            plan.make_tier = self._je.peers.tier
        return TE(plan, self._threads, self._lose, self._je.tell, self._plan.mend)

    # ---- what they are at ---------------------------------------------------------------------------

    def counters(self) -> Counters:
        """Sum the counters of all TEs, including those that are gone."""
        return self._past.plus(Counters.of(self._je.tes))

    def recoveries(self) -> Counter[str]:
        """Count the recoveries of each stage (XDS 6.2)."""
        restarts = 0 if self._failover is None else self._failover.num_restarts
        found = Counter({"2": len(self.lost), "1": restarts})
        for rung in LADDER:
            found[rung.stage] += self._je.tell.mended[rung.name]
        return +found

    @property
    def is_recovering(self) -> bool:
        """Whether another TE is on its way to replace a lost TE."""
        return self._je.unplaced.is_open

    @property
    def _running(self) -> list[TE]:
        """TEs with running tasks, including one that serves its dummy request."""
        return [*self._je.tes, *(te for te in self.joining.loading if te.is_running)]

    def reports(self) -> list[TEReport]:
        """Report on all TEs, including those that load or are pre-warmed."""
        found = [
            TEReport(
                name=te.sizes.place.name,
                role=te.sizes.place.role,
                life=te.life,
                dies=te.plan.every_die,
                num_sequences=te.num_sequences,
                kv_load=te.kv_load,
            )
            for te in (*self._running, *self.joining.warm)
        ]
        return found + [loading.report() for loading in self._plan.loadings.values()]

    def cannot_lose(self, die: int) -> str | None:
        """Explain why requests would not outlive the loss of a die; None if they would, or no TE uses the
        die."""
        running = [te for te in self._je.tes if te.is_running]
        te = next((te for te in running if die in te.plan.every_die), None)
        if te is None:
            return None
        believed = [die for te in running for die in (*te.needed_dies, *te.members.taking_part)]
        unheard = [each for each in believed if each in self._plan.pod.lost]
        if unheard:
            return f"nobody has found yet that die {unheard[0]} is lost: ask for something first"
        loss = te.foreseen(die)
        if None in reasons(loss, te.remedies):
            return None
        found = reasons(loss, self._remedies(te))
        return None if None in found else found[0]

    def health(self) -> list[TEHealth]:
        """Report the health of all TEs, including loading and lost ones."""
        running = [
            msgspec.structs.replace(
                te.health.report(),
                life=te.life,
                lost_dies=self._lost_dies_of(te),
                num_rollbacks=te.recovery.count,
                recovering=te.recovery.reason and f"stage 3: {te.recovery.reason}",
                num_servers=te.members.num_servers,
                lost_servers=tuple(te.members.lost_servers),
                suspect_servers=tuple(te.plan.late_servers),
                links=self._je.links.troubles(te),
            )
            for te in self._running
        ]
        loading = [TEHealth(name=name, num_groups=0, life="loading") for name in self._plan.loadings]
        lost = [health for _, health in self._lost_health]
        if lost and self._failover is not None and self._failover.stage != "serving":
            lost[-1] = msgspec.structs.replace(lost[-1], recovering=self._failover.describe())
        return running + loading + lost

    @property
    def lost_dies(self) -> set[int]:
        """Dies that the engine does without: found lost, given up and not yet tested, or with a silent
        expert server."""
        silent = (server.die for te in self._je.tes for server in te.members.silent)
        return self._je.tell.lost | self._je.tell.given_up | {*silent}

    def _lost_dies_of(self, te: TE) -> tuple[int, ...]:
        """Return the dies lost by a lost TE, or those of clients and expert servers that a running TE does
        without."""
        if te.life == "lost":
            return tuple(sorted(self._je.tell.lost.intersection(te.plan.every_die)))
        without = (*te.members.silent, *te.members.lost_clients)
        return tuple(sorted(member.die for member in without))

    def _note_joined(self, te: TE) -> None:
        """Note a new TE as replacement for the first lost TE of its role that has none."""
        for number, (plan, health) in enumerate(self._lost_health):
            if plan.sizes.place.role == te.sizes.place.role and health.replaced_by is None:
                now = msgspec.structs.replace(health, replaced_by=te.sizes.place.name)
                self._lost_health[number] = plan, now
                return

    # ---- expert servers -----------------------------------------------------------------------------

    def servers(self) -> list[ServerReport]:
        """Report the seats of expert servers of all TEs that have some."""
        return [report for te in self._je.tes if te.members.keeps for report in te.seats.reports()]

    async def add_server(self, te: str | None, number: int | None) -> ServerReport:
        """Bring a further expert server (te/server_seats.py) to a TE, by default the first TE that has
        any."""
        its_te = self._te_with_servers(te)
        joining = its_te.join_server(number, self._plan.bring_server)
        number = await self._in_the_pod(joining, "an expert server comes")
        return its_te.seats.reports()[number]

    async def remove_server(self, te: str, number: int) -> None:
        """Remove an expert server from a TE once no client waits for it."""
        await self._in_the_pod(self._te_with_servers(te).leave_server(number), "an expert server leaves")

    def _te_with_servers(self, name: str | None) -> TE:
        for te in self._je.tes:
            if te.sizes.place.name == name or (name is None and te.members.num_seats):
                return next(each for each in self._je.tes if each.members is te.members.keeper)
        names = ", ".join(te.sizes.place.name for te in self._je.tes)
        wanted = "no TE with expert servers" if name is None else f"no TE {abridged(name)}"
        raise RequestError(f"there is {wanted}: this engine has {names}", param="te")

    async def _in_the_pod(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Run work as a process of the pod. It continues if the caller goes away, and ends with the TE
        group."""
        clock = self._plan.pod.clock
        process = clock.spawn(work, name=name)
        self._moving = [*(each for each in self._moving if not each.done()), process]
        try:
            return await self._asked(process)
        except asyncio.CancelledError:
            if self._end is None or not process.cancelled():  # then it is the caller who ends
                raise
            raise XDeepServeError(f"{name} no more: {self._end}") from None

    async def _asked(self, process: asyncio.Task[T]) -> T:
        """Await a process that goes on if whoever asked for it goes away; then the engine hears its error."""
        if self._plan.pod.clock.runs_caller:
            return await process
        try:
            return await asyncio.shield(process)
        except asyncio.CancelledError:
            asyncio.Task.add_done_callback(process, self._hear_alone)
            raise

    def _hear_alone(self, process: asyncio.Task[Any]) -> None:
        """Hear the end of a process that nobody awaits any more; a refusal that is late is no failure."""
        error = None if process.cancelled() else process.exception()
        if isinstance(error, Exception) and not isinstance(error, XDeepServeError):
            self.fail(error)

    async def close(self) -> None:
        """Close the TE group once there are no requests: loading TEs give their dies back, leaving TEs finish
        leaving."""
        self.control_plane.end()
        self.end("the engine has been stopped")
        under_way = [*self.joining.processes, *self._leaving, *self._moving]
        for elastic in self.scalers:
            under_way += elastic.processes
        await asyncio.gather(*under_way, return_exceptions=True)
        self.joining.release_warm()
        self._plan.pod.memories.on_silence.pop(self, None)
        self._plan.pod.fabric.on_report.pop(self, None)

    # ---- TEs that come and go as load does ----------------------------------------------------------

    def hear_ended(self, metrics: RequestMetrics, num_prompt: int) -> None:
        """Count an ended request for the service level of each role, unless it came while there was no TE of
        one: it waited for that TE, which says nothing about the other role."""
        if all(metrics.arrival_ns >= elastic.begun_ns for elastic in self.scalers):
            for elastic in self.scalers:
                elastic.hear(metrics, num_prompt)

    def num_warm(self, role: Role) -> int:
        """Return the number of pre-warmed TEs of a role, which further TEs adopt."""
        return len(self.joining.warm_of(role))

    async def prewarm(self, role: Role) -> None:
        """Prepare a TE without weights, which the next one to come adopts; from within a process."""
        self.joining.prewarm(role)

    async def bring(self, role: Role, adopts: bool) -> str:
        """Bring a TE, a pre-warmed one if it `adopts` one, and return its name; from within a process."""
        return await self.joining.join(role, adopts=adopts)

    async def send_away(self, name: str) -> None:
        """Have a TE leave when its work has ended; from within a process."""
        await self.part_with(name, moves_out=False)

    def can_resume(self, name: str) -> bool:
        """Whether a TE that has been sent away has work left, so that it can still be taken back."""
        return name in self._departures and any(te.plan.name == name and te.can_resume for te in self._je.tes)

    def resume(self, name: str) -> None:
        """Take a TE back that has been sent away: it serves new requests at once, and `send_away` returns."""
        te = next(te for te in self._je.tes if te.plan.name == name)
        te.resume()
        self._departures.pop(name).cancel()
        self._je.admission.look()
        self._je.place_waiting()

    def end(self, why: str) -> None:
        """Forbid joining and leaving; calls that wait for an expert server's move fail with `why`."""
        self._end = self._end or why
        for elastic in self.scalers:
            elastic.end()
        self.joining.end(why)
        for moving in self._moving:
            moving.cancel()

    async def part_with(self, name: str, moves_out: bool) -> None:
        """Have a TE leave when its work has ended or, if `moves_out`, at the end of its step.

        Raises RequestError, with nothing changed, if there is no such TE or the others could not serve.
        Raises XDeepServeError if the TE is lost on the way.
        """
        te = next((te for te in self._je.tes if te.sizes.place.name == name), None)
        if te is None and name in self._plan.loadings:
            raise RequestError(f"TE {name} cannot leave: it is loading", param="te")
        if te is None:
            names = ", ".join(te.sizes.place.name for te in self._je.tes)
            raise RequestError(f"there is no TE {name}: this engine has {names}", param="te")
        if te.life != "ready":
            raise RequestError(f"TE {name} cannot leave: it is {te.life}", param="te")
        ready = self._je.tes.ready("both", "prefill", "decode")
        if not (self._je.unplaced.is_elastic or can_serve(other for other in ready if other is not te)):
            role = "" if te.sizes.place.role == "both" else f" for {te.sizes.place.role}"
            is_only = self._je.tes.ready(te.sizes.place.role) == [te]
            reason = f"it is the only one{role}" if is_only else "the others could not serve without it"
            raise RequestError(f"TE {name} cannot leave: {reason}", param="te")
        clock = self._plan.pod.clock
        te.drain(moves_out)
        leaving = clock.spawn(self._leave(te), name=f"end of {name}")
        self._leaving = [*(each for each in self._leaving if not each.done()), leaving]
        await self._asked(leaving)

    async def _leave(self, te: TE) -> None:
        self._je.lead_away(te)
        clock, name = self._plan.pod.clock, te.sizes.place.name
        self._departures[name] = departure = clock.spawn(te.leave(), name=f"leave {name}")
        await clock.until_ended(departure)
        if departure.cancelled():
            return  # the TE has been taken back
        del self._departures[name]
        if te.life != "gone":
            why = self.lost.get(te.sizes.place.name) or self._end or "all TEs are started anew"
            raise XDeepServeError(f"TE {te.sizes.place.name} was lost before it had left: {why}")
        if self.is_recovering or self._is_needless(te):
            await self._je.part_with(te)
            self._forget(te)
        else:  # those that were to go on have failed since; it stays, without dies, as the last of the engine
            self._plan.tes.remove(te.plan)
            self._climb(Loss("departure", None, (), next(reversed(self.lost.values()))))

    def _is_needless(self, te: TE | None) -> bool:
        """Whether the other running TEs could serve without this TE."""
        return can_serve(other for other in self._je.tes if other is not te and other.is_running)

    def _forget(self, te: TE) -> None:
        """Remove a TE from the group, but keep its counters."""
        self._past = self._past.plus(Counters.of([te]))
        self._plan.tes.remove(te.plan)

    def _find_lost(self, die: int) -> None:
        """Handle the silence of a die: its memory did not answer a read; do this without waiting for its
        heartbeats to fail."""
        for te in self._je.tes:
            if die in te.needed_dies and te.is_running:
                self._plan.pod.clock.detach(self._lose_die(te, die), f"loss of die {die}", self.fail)

    def _hear_report(self, report: DriverReport) -> None:
        """Act on a report by a die's driver: its TE repairs what it can, even while it loads."""
        for te in (*self._je.tes, *self.joining.loading):
            if report.die in te.plan.every_die and (te.is_running or te.life == "loading"):
                te.hear_report(report)

    async def _lose_die(self, te: TE, die: int) -> None:
        """Have a TE climb the ladder with a lost die, if nothing has come of the die's loss yet."""
        if te.is_running and te in self._je.tes and die in te.needed_dies:
            name = te.plan.name
            error = LostDieError(f"die {die} of {name} is lost: its memory does not answer")
            te.lose(Loss("die", name, (die,), error))

    # ---- rungs of the ladder ------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Climb the ladder with an error in one of the processes that work for all TEs."""
        self._climb(Loss("engine", None, (), error))

    def _lose(self, te: TE, loss: Loss) -> None:
        """Climb the ladder with a loss that a TE could not mend by itself."""
        if te.plan.name in self.lost:
            return  # who read its memory, and found nothing there, has told this, too
        # With failover, another TE may go on with it; giving up the dies spoils their memory.
        kept = None if self._failover is None else KeptKV(self._plan.pod, te)
        self._lose_dies(te, loss.dies)
        self._climb(loss._replace(error=loss.reason), te, kept)

    def _lose_dies(self, te: TE, suspects: Sequence[int] = ()) -> None:
        """Withdraw the dies of a lost TE from use, and read of each whether its memory answers.

        Expert servers that other TEs share go on, except those on dies that are suspects.
        """
        if te.plan.is_given_up:
            return
        te.keeping.leave(suspects)
        pod, dies = self._plan.pod, set(te.plan.every_die)
        pod.lose(te.plan.every_die)
        te.plan.is_given_up = True
        lost = pod.memories.silent & dies
        self._je.tell(DiesLost(te.plan.name, tuple(sorted(lost)), tuple(sorted(dies - lost))))

    def take_back(self, te: TEPlan, well: Sequence[int]) -> None:
        """Free the dies of a lost TE, and restore those that have passed a test."""
        dies = te.every_die
        te.release()
        self._plan.pod.restore(well)
        failed = tuple(sorted(set(dies).difference(well)))
        self._je.tell(DiesTested(te.name, tuple(sorted(well)), failed))

    def _climb(self, loss: Loss, te: TE | None = None, kept: KeptKV | None = None) -> None:
        left = at_once(climb(loss, self._remedies(te, kept)))
        if left is not None:
            raise left.reason

    def _remedies(self, te: TE | None, kept: KeptKV | None = None) -> Remedies:
        """Return the group's remedies for a loss of a TE, whose dies have `kept` some KV, or of no TE in
        service."""
        remedies: dict[RungName, Remedy] = {
            "give up": Remedy(partial(self._needs, te), partial(self._leave_to_others, te)),
            "end": Remedy(self._helps_nobody, partial(self._end_all, te)),
        }
        if te is not None and self._failover is not None:
            replace = (
                partial(self._cannot_replace, te, self._failover),
                partial(self._replace, te, self._failover, kept),
            )
            remedies["replace"] = Remedy(*replace)
        return remedies

    def _cannot_replace(self, te: TE, failover: Failover, loss: Loss) -> str | None:
        """Explain why no TE comes up in the place of a lost one; None if failover is to try."""
        if loss.is_foreseen:
            others = [other.plan for other in self._je.tes.ready("prefill")]
            return failover.cannot_replace(te.plan, loss.dies[0], others, self.lost_dies)
        if te.life != "ready":
            return f"{te.plan.name} is {te.life}"
        return self._end

    def _replace(self, te: TE, failover: Failover, kept: KeptKV | None, loss: Loss) -> None:
        """Give up a TE, whose requests wait for another one if they must, and start to replace it."""
        unplaced = self._je.unplaced
        was_awaited, unplaced.is_awaited = unplaced.is_awaited, True
        try:
            self._give_up(te, loss.reason)
            failover.begin(te.plan, kept, loss.reason)
        except Exception:
            unplaced.is_awaited = was_awaited  # else requests would wait for a TE that never comes
            raise

    def _needs(self, te: TE | None, loss: Loss) -> str | None:
        """Explain why requests need a TE; None if the other TEs can go on, or another one is on its way."""
        if te is not None and te.plan.name in self.lost:
            return f"{te.plan.name} could not be given up"  # a rung before has failed at it
        if self._is_needless(te) or (self.is_recovering and not loss.is_foreseen):
            return None
        if te is None or not loss.is_foreseen:
            return "no other task executor could go on"
        (die,) = loss.dies
        helps = what_helps(self._plan, te.plan, [die])
        hint = f": serve with --set {helps}" if helps else ""
        return f"{te.plan.name} needs die {die}, and no other task executor could go on{hint}"

    def _leave_to_others(self, te: TE | None, loss: Loss) -> None:
        """Give up a TE whose requests go on at others; if it has been given up before, they go on now."""
        if te is None:
            self._je.place_waiting()
            return
        self._give_up(te, loss.reason)
        self._plan.pod.clock.detach(self._free_when_idle(te.plan), f"end of {te.plan.name}", self.fail)

    def _helps_nobody(self, loss: Loss) -> str | None:
        """Explain why the end of the engine is no help that one could count on beforehand."""
        return "every request would end with an error" if loss.is_foreseen else None

    def _end_all(self, te: TE | None, loss: Loss) -> None:
        """End the engine by a loss; the error names settings with which requests would have gone on."""
        reason = loss.reason
        if te is None:
            # What came of a failover is no fault of the caller's, though it may be a DeploymentError.
            is_inner = loss.kind == "replacement"
            self._on_failure(XDeepServeError(str(reason)) if is_inner else reason, None)
            return
        lost = self._je.tell.lost.intersection(te.plan.every_die)
        if isinstance(reason, FAILED):
            helps = what_helps(self._plan, te.plan, lost)
            hint = f"; requests would have gone on with {helps}" if helps else ""
            is_told = not lost or "is lost" in str(reason)
            told = "" if is_told else f"{named(sorted(lost))} of {te.plan.name} lost: "
            reason.args = (f"{told}{reason}{hint}",)
        self._on_failure(reason, te.plan.name)

    def _give_up(self, te: TE, reason: XDeepServeError) -> None:
        self.lost[te.plan.name] = reason
        self._give_up_te(te, reason)

    def _give_up_te(self, te: TE, reason: XDeepServeError) -> None:
        """End a lost TE and let other TEs continue its sequences from their tokens."""
        te.kill()
        te.close()
        groups = tuple(range(len(te.groups)))
        health = TEHealth(
            name=te.sizes.place.name,
            num_groups=len(groups),
            lost_groups=groups,
            lost_dies=self._lost_dies_of(te),
            life="lost",
            reason=str(reason),
            num_rollbacks=te.recovery.count,
        )
        self._lost_health.append((te.plan, health))
        self._forget(te)
        self._je.lose(te, reason)

    def give_up_all(self, reason: XDeepServeError) -> list[TEPlan]:
        """Give up all TEs and their dies, and return their plans."""
        found = list(self._je.tes)
        for te in found:
            self._lose_dies(te)
            self._give_up_te(te, reason)
        return [te.plan for te in found]

    async def spare_prefill(self) -> bool:
        """Have the least loaded prefill TE leave, unless it is the only one; return whether it has left."""
        tes = self._je.tes.ready("prefill")
        if len(tes) < 2:
            return False
        te = min(tes, key=lambda te: (te.num_sequences, te.sizes.place.first_die))
        te.drain(moves_out=True)
        await self._leave(te)
        return True

    def _end_failover(self, error: XDeepServeError | None) -> None:
        """End a failover: waiting sequences are assigned to a TE, or fail if none can serve."""
        self._je.unplaced.is_awaited = False
        self._je.tell(FailoverEnded(None if error is None else str(error)))
        if error is None:
            self._je.place_waiting()
        else:
            self._climb(Loss("replacement", None, (), error))

    async def _free_when_idle(self, te: TEPlan) -> None:
        """Free the memory of a lost TE when nothing uses it any more; its dies stay lost."""
        await until_unused(te)
        te.release()

    async def settle(self) -> None:
        """Wait until the dies of all TEs, which have ended, can be given back."""
        for te in self._plan.tes:
            await self._plan.pod.clock.spawn(until_unused(te), name=f"end of {te.sizes.place.name}")
