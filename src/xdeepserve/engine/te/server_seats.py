"""Expert servers joining and leaving one by one while their TE runs; no step waits for them (EaaS 3.4, 4.4).

A TE has a seat for each of its servers, which says what experts the server has. There are vacant seats, too,
if the deployment plans for some. A joining server takes a free die, loads the seat's experts and registers
with the monitor. Its seat is vacant, or had a server that is lost. A leaving server is asked nothing more. It
goes when all steps that were under way then have ended, since only these may have asked it. No step is run
again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from xdeepserve.comm.services.layout import Presence
from xdeepserve.engine.balance.reconfigure import Reconfiguration
from xdeepserve.engine.die.expert_memory import STOP, ExpertMemory
from xdeepserve.engine.die.experts import ExpertProgram
from xdeepserve.engine.dp.events import Events, ServerMoved
from xdeepserve.engine.numbers import Seat
from xdeepserve.engine.recovery.ladder import Loss
from xdeepserve.engine.recovery.rollback import Rollback
from xdeepserve.engine.recovery.rollback_field import Epochs, RollbackField
from xdeepserve.engine.te.expert_programs import ExpertPrograms
from xdeepserve.engine.te.life import Lifetime
from xdeepserve.engine.te.lost_clients import LostClients
from xdeepserve.engine.te.reports import ServerReport
from xdeepserve.engine.te.server_monitor import ServerMonitor
from xdeepserve.engine.te.steps_apart import StepsApart
from xdeepserve.engine.te.steps_together import StepsTogether
from xdeepserve.engine.te.te_plan import TEPlan
from xdeepserve.errors import LostDieError, RequestError, XDeepServeError

Bring = Callable[[TEPlan, int, ExpertMemory], Awaitable[None]]
"""Function that brings the weights of a joining expert server to its die, in virtual time."""
Begin = Callable[[ExpertProgram], None]
"""Function that starts the program of a joining expert server."""
PAUSE_NS = 50_000  # between two looks at what has to end first
PATIENCE_NS = 120_000_000_000
BY_THEMSELVES = "expert servers that are processes come by xdeepserve expert-server, and leave by SIGTERM"


class ServerSeats:
    """Seats for the expert servers of a TE; `new_program` makes the program of a seat's die."""

    def __init__(
        self,
        plan: TEPlan,
        tell: Events,
        life: Lifetime,
        recovery: Rollback,
        reconfiguration: Reconfiguration | None,
        monitor: ServerMonitor,
        clients: LostClients,
        programs: ExpertPrograms,
        turns: StepsApart | StepsTogether,
        new_program: Callable[[int, ExpertMemory], ExpertProgram],
    ) -> None:
        self._plan, self._pod, self._tell, self._life = plan, plan.pod, tell, life
        self._recovery, self._reconfiguration = recovery, reconfiguration
        self._monitor, self._clients, self._programs = monitor, clients, programs
        self._turns, self._new_program = turns, new_program
        self._coming: dict[Seat, int] = {}  # dies of servers that are on their way

    @property
    def num_seats(self) -> int:
        """Number of seats, vacant ones included; 0 if the TE's experts are not services."""
        return 0 if self._plan.services is None else self._plan.services.servers.num_ranks

    def reports(self) -> list[ServerReport]:
        """Report the state of each seat."""
        sizes, monitor, found = self._plan.sizes, self._monitor, []
        for seat in map(Seat, range(self.num_seats)):
            presence = monitor.presence(seat).name.lower()
            experts, copies = (
                sizes.experts.experts_of[seat],
                sizes.experts.copies_of[seat] if sizes.experts.copies_of else (),
            )
            found.append(
                ServerReport(
                    te=sizes.place.name,
                    server=seat,
                    presence="coming" if seat in self._coming else presence,
                    die=self._coming.get(seat, self._plan.team.expert_at.get(seat)),
                    epoch=monitor.epoch(seat),
                    experts=(*experts, *copies),
                    is_shared=sizes.experts.is_shared(seat),
                )
            )
        return found

    # ---- who comes ----------------------------------------------------------------------------------

    async def join(self, wanted: int | None, bring: Bring, begin: Begin) -> Seat:
        """Bring a server to a seat, from within a process; return the seat once clients ask the server.

        `wanted` is the seat; if None, the first vacant seat, or at last a seat with a lost server.
        RequestError, and nothing has happened, if there is no such seat. DeploymentError if no die is free.
        XDeepServeError if the server cannot join in the end.
        """
        seat = self._find_seat(wanted)
        die = self._take_die(seat)
        self._coming[seat] = die
        mem: ExpertMemory | None = None
        try:
            mem = self._plan.plan_server(seat, die)
            await bring(self._plan, die, mem)
            while self._recovery.phase != "serving" and self._life.now == "ready":
                await self._pod.clock.sleep(PAUSE_NS)
            self._check_whole(seat, die)
            former = self._seat(seat, die, mem, begin)
        except BaseException:
            self._plan.give_back(die, mem)
            raise
        finally:
            del self._coming[seat]
        if former is not None:
            await self._free_when_idle(former)
        return seat

    def _find_seat(self, wanted: int | None) -> Seat:
        monitor, place = self._monitor, self._plan.sizes.place
        name = place.name
        if not self.num_seats:
            raise RequestError(f"TE {name} has no expert servers: its experts are no services", param="te")
        if place.has_servers_outside:
            raise RequestError(f"{name}: {BY_THEMSELVES}", param="te")
        if self._life.now != "ready":
            raise RequestError(f"no expert server can join TE {name}: it is {self._life.now}", param="te")
        free = [
            seat
            for presence in (Presence.ABSENT, Presence.LOST)
            for seat in map(Seat, range(self.num_seats))
            if monitor.presence(seat) is presence and seat not in self._coming
        ]
        if wanted is None and not free:
            raise RequestError(
                f"TE {name} has no seat for another expert server: all {self.num_seats} are taken "
                "(experts.vacancies plans for more)",
                param="server",
            )
        seat = free[0] if wanted is None else self._known(wanted)
        if seat not in free:
            where = f"is there already, on die {self._plan.team.expert_at.get(seat)}"
            if seat in self._coming:
                where = f"is on its way already, to die {self._coming[seat]}"
            raise RequestError(f"expert server {seat} of TE {name} {where}", param="server")
        return seat

    def _known(self, number: int) -> Seat:
        if not 0 <= number < self.num_seats:
            has = f"it has {self.num_seats}, from 0 on" if self.num_seats else "its experts are no services"
            raise RequestError(
                f"TE {self._plan.sizes.place.name} has no expert server {number}: {has}", param="server"
            )
        return Seat(number)

    def _take_die(self, seat: Seat) -> int:
        """Take the die reserved for a seat, or any free die."""
        pod, plan = self._pod, self._plan
        home = plan.sizes.place.expert_dies[seat]
        if home in plan.spare_dies and home not in pod.lost and home not in plan.replaced_dies:
            plan.spare_dies.remove(home)
            return home
        (die,) = pod.find_free(1)
        pod.hold([die], f"{plan.sizes.place.name} of {plan.checkpoint.name}")
        return die

    def _check_whole(self, seat: Seat, die: int) -> None:
        """Check whether a server may still join after its weights have arrived."""
        memories = self._pod.memories
        name = f"expert server {seat} of TE {self._plan.sizes.place.name}"
        if self._life.now != "ready":
            raise XDeepServeError(f"{name} cannot join: its TE is {self._life.now}")
        if die in self._pod.lost or die in memories.bad_pages:
            raise LostDieError(f"{name} cannot join: die {die} is lost, or a page of its memory")

    def _seat(self, seat: Seat, die: int, mem: ExpertMemory, begin: Begin) -> int | None:
        """Put a server on a seat, at one moment for all parts of the TE.

        Returns the die of the seat's former server, if there was one.
        """
        plan, epoch = self._plan, self._recovery.epoch
        former = self._vacate(seat)
        plan.team.expert_at[seat], plan.expert_memories[seat] = die, mem
        RollbackField(self._pod.dies[die]).write(Epochs(epoch, epoch))
        program = self._new_program(seat, mem)
        self._clients.tell_lost(program)
        begin(program)
        if self._reconfiguration is not None:
            self._reconfiguration.replace(seat, die, mem)
        self._monitor.take_in(die)
        self._monitor.seat(seat)
        self._show(seat, die, is_there=True)
        return former

    def _show(self, seat: Seat, die: int, is_there: bool) -> None:
        epoch = self._monitor.epoch(seat)
        self._tell.show(ServerMoved(self._plan.sizes.place.name, seat, die, epoch, is_there=is_there))

    # ---- who goes -----------------------------------------------------------------------------------

    async def leave(self, number: int) -> None:
        """Remove a server, from within a process, when no step waits for it.

        RequestError, and nothing has happened, if the server is not there, or if no other server has its
        experts.
        """
        seat = self._known(number)
        self._check_leaves(seat)
        life, name = self._life, self._plan.sizes.place.name
        self._monitor.lead_away(seat)
        under_way = self._turns.under_way
        while life.is_running and (under_way & self._turns.under_way or self._recovery.phase != "serving"):
            await self._pod.clock.sleep(PAUSE_NS)
        die = self._plan.team.expert_at.get(seat)
        if not life.is_running or die is None:
            raise XDeepServeError(f"TE {name} was lost before its expert server {seat} left")
        self._programs.of(die).mem.doorbell.write(self._pod.memory(die), STOP)
        self._vacate(seat)
        self._monitor.forget(seat)
        self._show(seat, die, is_there=False)
        await self._free_when_idle(die)

    def _check_leaves(self, seat: Seat) -> None:
        monitor, place = self._monitor, self._plan.sizes.place
        who = f"expert server {seat} of TE {place.name} cannot leave"
        if place.has_servers_outside:
            raise RequestError(f"{who}: {BY_THEMSELVES}", param="te")
        if self._life.now != "ready":
            raise RequestError(f"{who}: its TE is {self._life.now}", param="te")
        presence = monitor.presence(seat)
        if presence in (Presence.ABSENT, Presence.LEAVING) or seat in self._coming:
            what = "on its way there" if seat in self._coming else presence.name.lower()
            raise RequestError(f"{who}: it is {what}", param="server")
        missed = self._missed_without(seat)
        if presence is Presence.THERE and missed:
            raise RequestError(f"{who}: nobody else has {missed}", param="server")

    def why_not(self, loss: Loss) -> str | None:
        """Explain why clients could not do without a server that is lost; None if they could.

        Of a loss that has happened, each client finds out for itself, when it has tokens for the server.
        """
        if not loss.is_foreseen:
            return None
        missed = self._missed_without(self.seat_of[loss.dies[0]])
        return f"no other server has {missed}" if missed else None

    @property
    def seat_of(self) -> dict[int, Seat]:
        """Seats by the die of their server; empty if the TE's experts are not services."""
        return {die: Seat(seat) for seat, die in self._plan.team.expert_at.items()} if self.num_seats else {}

    def _missed_without(self, seat: Seat) -> str:
        """Name the experts of a seat that no other present server has; empty if there are none."""
        sizes, lost = self._plan.sizes, self._plan.pod.lost
        others = [
            each
            for each in range(self.num_seats)
            if each != seat
            and self._monitor.presence(each) is Presence.THERE
            and self._plan.team.expert_at.get(each) not in lost
        ]
        if sizes.experts.is_shared(seat):
            return "" if any(map(sizes.experts.is_shared, others)) else "the shared expert"

        def held(each: int) -> set[int]:
            return {
                *sizes.experts.experts_of[each],
                *(sizes.experts.copies_of[each] if sizes.experts.copies_of else ()),
            }

        missed = sorted(held(seat).difference(*map(held, others)))
        return f"expert{'s' * (len(missed) > 1)} {', '.join(map(str, missed))}" if missed else ""

    def _vacate(self, seat: Seat) -> int | None:
        """Clear a seat and return the die of its server, which the TE still holds; None if it was vacant."""
        plan = self._plan
        die = plan.team.expert_at.pop(seat, None)
        if die is None:
            return None
        self._programs.remove(die)
        self._monitor.leave_out(die)
        plan.replaced_dies[die] = plan.expert_memories.pop(seat)
        plan.spare_dies.add(die)
        return die

    async def _free_when_idle(self, die: int) -> None:
        """Return a die and memory to the pod once nothing runs there and no transfer uses it."""
        pod, plan, pause_ns = self._pod, self._plan, PAUSE_NS
        is_lost = die in pod.lost
        while die in plan.spare_dies and pause_ns < PATIENCE_NS:
            if not (pod.dies[die].running or pod.memories.is_in_use(die)):
                plan.spare_dies.remove(die)
                plan.give_back(die, plan.replaced_dies.pop(die))
                return
            if is_lost or pause_ns > PAUSE_NS << 6:
                for process in pod.dies[die].running:
                    process.cancel()
            await pod.clock.sleep(pause_ns)
            pause_ns *= 2
